"""Write parts of several ranks into one directory while training continues, without a collective.

    make_parts_directory  rank 0: make the directory for the parts
    write_part, PartMark  another rank: write a part, and then a mark that it is complete, or why it is not
    await_part            rank 0: wait for that mark
    part_directory        the files of one rank's part
    leave_window          another node: write its window's part of a version
    iterate_tensors       rank 0: yield all tensors of the version, one by one, from its window and the parts

The parts of a checkpoint are written in the same way (`trainers.leader`). Besides the windows, at most one tensor of
a version is in memory.
"""

import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from hpcrl.errors import WeightsError
from hpcrl.system.files import make_private_dir, publish_file, remove_path, sync_directory, sync_file
from hpcrl.weights.layout import TensorLayout, TensorSlot, view_values
from hpcrl.weights.window.file import compute_checksum
from hpcrl.weights.window.window import Window

MARK_POLL_INTERVAL_S = 0.02
PART_TIMEOUT_S = 1800.0
"""The longest that a rank may take to write its part."""
WINDOW_FILE = "window.bin"


class PartMark(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a part: complete, or failed."""

    error: str = ""
    checksums: dict[str, str] = {}
    """Checksums of the part's content, if its writer has any."""


def make_parts_directory(directory: Path) -> Path:
    """Make a directory with a new name, and remove those that a killed trainer left unfinished."""
    make_private_dir(directory)
    for unfinished in directory.glob(".parts-*.tmp"):
        remove_path(unfinished)
    parts = directory / f".parts-{secrets.token_hex(6)}.tmp"
    parts.mkdir(mode=0o700)
    return parts


def write_part(write: Callable[[Path], Mapping[str, str]], directory: Path, *, rank: int) -> None:
    """Let `write` fill this rank's part, make it durable, then publish the mark, which also reports an error.

    `write` returns the checksums for the mark, if there are any.
    """
    own = part_directory(directory, rank)
    try:
        own.mkdir(mode=0o700)
        mark = PartMark(checksums=dict(write(own)))
        for path in own.iterdir():
            sync_file(path)
        sync_directory(own)
    except (OSError, WeightsError) as found:
        mark = PartMark(error=str(found) or type(found).__name__)
        remove_path(own)  # frees room for the mark on a full disk
    publish_file(_mark_path(directory, rank), msgspec.json.encode(mark))


def await_part(directory: Path, rank: int) -> PartMark:
    """Wait until a rank has written its part; OSError, naming the rank, if it could not or takes too long."""
    path, deadline = _mark_path(directory, rank), time.monotonic() + PART_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise OSError(f"rank {rank} has not written its part within {PART_TIMEOUT_S:g} s: see its log")
        time.sleep(MARK_POLL_INTERVAL_S)
    mark = msgspec.json.decode(path.read_bytes(), type=PartMark)
    if mark.error:
        raise OSError(f"rank {rank} cannot write its part: {mark.error}")
    return mark


def part_directory(directory: Path, rank: int) -> Path:
    """Return the directory of a rank's part."""
    return directory / f"rank-{rank}"


def leave_window(window: Window, version: int, directory: Path, *, rank: int) -> None:
    """Write this node's part of a version, out of its window."""

    def write(own: Path) -> Mapping[str, str]:
        path = own / WINDOW_FILE
        with window.read_version(version) as data, path.open("xb") as file:
            path.chmod(0o600)
            file.write(data)
            return window.manifest(version).checksums

    write_part(write, directory, rank=rank)


def iterate_tensors(
    layout: TensorLayout, own: memoryview, parts: Mapping[int, TensorLayout], directory: Path, *, rank: int
) -> Iterator[memoryview]:
    """Yield all tensors of a version in order: from `own`, this rank's slot, and from the files of other writers.

    `parts` are by writer. OSError if a part is not written, WeightsError if it is damaged.
    """
    slots = {writer: own if writer == rank else _map_part(directory, writer, part) for writer, part in parts.items()}
    shard_slots: dict[str, list[tuple[memoryview, TensorSlot]]] = defaultdict(list)
    for writer, part in parts.items():
        for shard_slot in part.tensors:
            shard_slots[shard_slot.shard.name].append((slots[writer], shard_slot))
    for tensor in layout.tensors:
        yield _assemble_tensor(tensor, shard_slots[tensor.name])


def _assemble_tensor(tensor: TensorSlot, shard_slots: list[tuple[memoryview, TensorSlot]]) -> memoryview:
    if len(shard_slots) == 1 and shard_slots[0][1].cut is None:
        slot, shard_slot = shard_slots[0]
        return slot[shard_slot.offset : shard_slot.offset + shard_slot.nbytes]
    data = memoryview(bytearray(tensor.nbytes))
    values = view_values(data, msgspec.structs.replace(tensor, offset=0))
    for slot, shard_slot in shard_slots:
        values[shard_slot.shard.index] = view_values(slot, shard_slot)
    return data


def _map_part(directory: Path, writer: int, part: TensorLayout) -> memoryview:
    """Map the part that another node has written, and check it."""
    mark, path = await_part(directory, writer), part_directory(directory, writer) / WINDOW_FILE
    if path.stat().st_size != part.nbytes:
        raise WeightsError(f"{path} has {path.stat().st_size} bytes and not {part.nbytes}: it is truncated")
    data = np.memmap(path, np.uint8, "r").data if part.nbytes else memoryview(b"")
    for shard_slot in part.tensors:
        if (actual := compute_checksum(data, shard_slot).hex()) != (expected := mark.checksums.get(shard_slot.name)):
            raise WeightsError(
                f"{path}: shard {shard_slot.name!r} has checksum {actual}, {expected} was written: it is damaged"
            )
    return data


def _mark_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.json"
