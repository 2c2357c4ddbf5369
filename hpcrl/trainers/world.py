"""The ranks of a trainer: who they are, how they meet, what they tell each other.

    World        this rank's place; a single rank needs no others and never communicates
    join_world   meet the other ranks, at a TCP store whose address rank 0 leaves in a private file
    leave_world  the way out

Data never goes through here: only ids (a few kB of JSON), sums, and what torch moves by itself.
"""

import datetime
import os
import time
from collections.abc import Mapping
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
STEP_TIMEOUT_S = 1800.0
"""The longest that one rank may keep the others waiting before all of them fail."""
POLL_INTERVAL_S = 0.05


class StoreAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ranks meet."""

    host: str
    port: int


@dataclass(frozen=True)
class World:
    """One rank among `size`; `device` is its own."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    group: Any = None
    """torch's group of these ranks; None for all of them."""
    cpu_group: Any = None
    """The same ranks over gloo, where `group` is NCCL's; None where it is gloo's itself."""

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, on each."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def max(self, number: int) -> int:
        """The largest of all ranks' numbers, on each."""
        if self.size == 1:
            return number
        tensor = torch.tensor(number, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return int(tensor)

    def broadcast(self, message: bytes) -> bytes:
        """What rank 0 says; the others' own message is not looked at."""
        if self.size == 1:
            return message
        size = torch.tensor(len(message), device=self.device)
        dist.broadcast(size, src=0, group=self.group)
        data = torch.zeros(int(size), dtype=torch.uint8, device=self.device)
        if self.rank == 0:
            data.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        dist.broadcast(data, src=0, group=self.group)
        return bytes(data.cpu().numpy())

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.size > 1:
            dist.barrier(group=self.group)


SINGLE_RANK = World()


def join_world(meeting_file: Path, *, environ: Mapping[str, str] = os.environ) -> World:
    """Meet the others; RANK, WORLD_SIZE and LOCAL_RANK say who this is, as torchrun has them.

    The file `meeting_file` belongs to one start of the ranks: a later start meets elsewhere.
    """
    rank, size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    device = _select_device(int(environ.get("LOCAL_RANK", "0")))
    if size == 1:
        return World(device=device)
    store = _open_store(meeting_file, size, environ) if rank == 0 else _connect_store(meeting_file, size)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=STEP_TIMEOUT_S),
    )
    cpu_group = dist.new_group(backend="gloo") if device.type == "cuda" else None
    return World(rank=rank, size=size, device=device, cpu_group=cpu_group)


def leave_world(world: World) -> None:
    """Let go of the others."""
    if world.size > 1 and dist.is_initialized():
        dist.destroy_process_group()


def _select_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _open_store(meeting_file: Path, size: int, environ: Mapping[str, str]) -> TCPStore:
    """Rank 0's store, on a port that the system chose."""
    host = environ.get("MASTER_ADDR", "127.0.0.1")
    store = TCPStore(host, 0, size, is_master=True, wait_for_workers=False, timeout=_to_timedelta(JOIN_TIMEOUT_S))
    publish_file(meeting_file, msgspec.json.encode(StoreAddress(host=host, port=store.port)))
    return store


def _connect_store(meeting_file: Path, size: int) -> TCPStore:
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while not meeting_file.exists():
        if time.monotonic() > deadline:
            raise TrainError(
                f"rank 0 of the trainer has not come within {JOIN_TIMEOUT_S:g} s ({meeting_file} is not there): "
                "see its log, train-0.log"
            )
        time.sleep(POLL_INTERVAL_S)
    address = msgspec.json.decode(meeting_file.read_bytes(), type=StoreAddress)
    return TCPStore(address.host, address.port, size, is_master=False, timeout=_to_timedelta(JOIN_TIMEOUT_S))


def _to_timedelta(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)
