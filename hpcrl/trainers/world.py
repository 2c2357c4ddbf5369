"""The ranks of a trainer: how they meet and communicate.

    World         this rank among the others; a single rank never communicates
    SINGLE_RANK   the world of one rank
    computes_in_bf16  whether a device is a GPU with bfloat16
    join_world    meet the other ranks, at a TCP store whose address rank 0 writes to a private file
    leave_world   leave the process group
    StoreAddress  the address of the TCP store

Only ids (a few kB of JSON), sums and torch's own traffic pass through here. Training data does in one case, the buffer
of a node that runs on other ranks than the policy.
"""

import datetime
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from hpcrl.errors import TrainError
from hpcrl.system.files import publish_file

JOIN_TIMEOUT_S = 300.0
COLLECTIVE_TIMEOUT_S = 1800.0
"""The longest time that one rank may keep the others waiting before all of them fail."""
RENDEZVOUS_POLL_INTERVAL_S = 0.05


class StoreAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address where the ranks meet."""

    host: str
    port: int


@dataclass(frozen=True)
class World:
    """A rank among `size`, with its device."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    group: Any = None
    """The torch group of these ranks; None for all ranks."""
    cpu_group: Any = None
    """The same ranks over gloo where `group` uses NCCL; None where `group` uses gloo."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, on each."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def max(self, number: int) -> int:
        """Return the largest of all ranks' numbers, on each."""
        if self.size == 1:
            return number
        tensor = torch.tensor(number, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return int(tensor)

    def any(self, is_so: bool) -> bool:
        """Return whether something is so on any rank, on each; without waiting for a GPU."""
        if self.size == 1:
            return is_so
        tensor = torch.tensor(int(is_so))
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group if self.cpu_group is None else self.cpu_group)
        return bool(tensor)

    def broadcast(self, message: bytes) -> bytes:
        """Send rank 0's message to all ranks and return it; the message of the others is ignored.

        It goes between CPUs: a rank that waits for one keeps no GPU busy.
        """
        if self.size == 1:
            return message
        group = self.group if self.cpu_group is None else self.cpu_group
        size = torch.tensor(len(message))
        dist.broadcast(size, src=0, group=group)
        data = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == 0:
            data.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        dist.broadcast(data, src=0, group=group)
        return bytes(data.numpy())

    def exchange(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send a part to each rank, all-to-all, and return the part that each sent to this one; all have one dtype."""
        sizes = torch.tensor([len(part) for part in parts], device=self.device)
        incoming = torch.empty_like(sizes)
        dist.all_to_all_single(incoming, sizes, group=self.group)
        received = parts[0].new_empty(int(incoming.sum()), device=self.device)
        dist.all_to_all_single(
            received, torch.cat(list(parts)).to(self.device), incoming.tolist(), sizes.tolist(), group=self.group
        )
        return list(torch.split(received, incoming.tolist()))

    def wait(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            dist.barrier(group=self.group)


SINGLE_RANK = World()


def computes_in_bf16(device: torch.device) -> bool:
    """Return whether a device is a GPU that computes in bfloat16, and does not emulate it as a V100 does."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def join_world(meeting_file: Path, *, environ: Mapping[str, str] = os.environ) -> World:
    """Meet the other ranks; RANK, WORLD_SIZE and LOCAL_RANK identify this one, as with torchrun.

    The file `meeting_file` belongs to one start of the ranks: a later start needs another.
    """
    rank, size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    device = _select_device(int(environ.get("LOCAL_RANK", "0")))
    if size == 1:
        return World(device=device)
    store = _open_store(meeting_file, size, environ) if rank == 0 else _connect_store(meeting_file, size)
    dist.init_process_group(
        backend="cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo",  # gloo for gradients in host memory
        store=store,
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    cpu_group = dist.new_group(backend="gloo") if device.type == "cuda" else None
    return World(rank=rank, size=size, device=device, cpu_group=cpu_group)


def leave_world(world: World) -> None:
    """Leave the process group."""
    if world.size > 1 and dist.is_initialized():
        dist.destroy_process_group()


def _select_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _open_store(meeting_file: Path, size: int, environ: Mapping[str, str]) -> TCPStore:
    """Open rank 0's store, on a port that the system chooses, at one address: by itself it listens on all of them."""
    host = environ.get("MASTER_ADDR", "127.0.0.1")
    listener = socket.create_server((host, 0), backlog=size)
    port = int(listener.getsockname()[1])
    store = TCPStore(
        host,
        port,
        size,
        is_master=True,
        wait_for_workers=False,
        timeout=_to_timedelta(JOIN_TIMEOUT_S),
        master_listen_fd=listener.detach(),  # the store closes it
    )
    publish_file(meeting_file, msgspec.json.encode(StoreAddress(host=host, port=port)))
    return store


def _connect_store(meeting_file: Path, size: int) -> TCPStore:
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while not meeting_file.exists():
        if time.monotonic() > deadline:
            raise TrainError(
                f"rank 0 of the trainer did not start within {JOIN_TIMEOUT_S:g} s ({meeting_file} does not exist): "
                "see its log, train-0.log"
            )
        time.sleep(RENDEZVOUS_POLL_INTERVAL_S)
    address = msgspec.json.decode(meeting_file.read_bytes(), type=StoreAddress)
    return TCPStore(address.host, address.port, size, is_master=False, timeout=_to_timedelta(JOIN_TIMEOUT_S))


def _to_timedelta(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)
