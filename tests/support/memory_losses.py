"""Losses of a recipe that run out of memory: at a number of tokens, or really.

raise_above       torch's error for a micro-batch with more trained tokens than a limit
shrink_memory     a process that may use no more memory than it has, and a micro-batch that needs more
fill_memory       the memory of a control group, once a file is there
"""

import os
import resource
from pathlib import Path

import torch
from torch import Tensor

LIMIT_VARIABLE = "HPCRL_TEST_LIMIT"
"""The variable with the trained tokens of the largest micro-batch."""
RANK_VARIABLE = "HPCRL_TEST_RANK"
"""The variable with the only rank that has this limit; every rank without it."""
FILL_VARIABLE = "HPCRL_TEST_FILL"
"""The variable with the path of the file."""
FILL_BYTES = 8 << 30
SPARE_BYTES = 512 << 20
BYTES_PER_TOKEN = 8 << 20


def raise_above(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return a loss, or raise what torch raises when a GPU is full."""
    limit, rank = int(os.environ[LIMIT_VARIABLE]), os.environ.get(RANK_VARIABLE, "")
    if mask.sum() > limit and rank in ("", os.environ.get("RANK", "0")):
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {int(mask.sum())} things")
    return -(logprobs - behaviour).exp() * advantages


def shrink_memory(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return a loss for which each token needs 8 MiB, in a process that has 512 MiB to spare."""
    pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115, PTH123
    used = pages * resource.getpagesize()
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, resource.RLIM_INFINITY))
    torch.zeros(int(mask.sum()) * BYTES_PER_TOKEN, dtype=torch.uint8)
    return -(logprobs - behaviour).exp() * advantages


def fill_memory(logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return a loss; use more memory than the step of a trainer has in the lab, once, if a file asks for it."""
    request = Path(os.environ[FILL_VARIABLE])
    if request.exists():
        request.unlink()
        torch.ones(FILL_BYTES, dtype=torch.uint8)
    return -(logprobs - behaviour).exp() * advantages
