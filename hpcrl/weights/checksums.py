"""xxh3 of the tensors in a slot, on a few threads."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import xxhash

from hpcrl.weights.layout import Layout, Placed

SUM_BYTES = 16
HASH_THREADS = min(4, len(os.sched_getaffinity(0)))
SMALL_BYTES = 4 << 20
"""Below this, threads cost more than they save."""


def sum_of(data: memoryview, tensor: Placed) -> bytes:
    """The checksum of one tensor in a slot."""
    return xxhash.xxh3_128_digest(data[tensor.offset : tensor.offset + tensor.nbytes])


def for_each_tensor(layout: Layout, work: Callable[[int, Placed], None]) -> None:
    """Do it for all tensors on a few threads, each with its share of the bytes; the first error is raised."""
    shares = deal(layout, HASH_THREADS)

    def do(share: list[int]) -> None:
        for index in share:
            work(index, layout.tensors[index])

    if layout.nbytes < SMALL_BYTES:
        do([index for share in shares for index in share])
        return
    with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="checksums") as pool:
        list(pool.map(do, shares))


def deal(layout: Layout, num_shares: int) -> list[list[int]]:
    """Indices of the tensors, in shares of about as many bytes, the largest first."""
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [0] * num_shares
    for index in sorted(range(len(layout.tensors)), key=lambda index: -layout.tensors[index].nbytes):
        lightest = loads.index(min(loads))
        shares[lightest].append(index)
        loads[lightest] += layout.tensors[index].nbytes
    return shares
