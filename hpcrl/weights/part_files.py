"""A version that lies on several nodes, put into one file: each node leaves its part, and rank 0 takes them in.

    begun     rank 0: where the parts of a version are left
    leave     another node's writer: its part of a version, and then a mark that says so
    tensors   rank 0: all tensors of the version, one after the other, once the parts are there

No collective: the ranks train on meanwhile. Nor is more than one tensor in memory besides the windows.
"""

import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from hpcrl.errors import WeightsError
from hpcrl.system.files import discard, private_dir, publish, sync_directory, sync_file
from hpcrl.weights.couriers.spans import values_of
from hpcrl.weights.layout import Layout, Placed
from hpcrl.weights.window.file import sum_of
from hpcrl.weights.window.window import Window

LOOK_S = 0.02
WAIT_S = 1800.0
"""Longer than this no node writes its part."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says once its part is there, or will not be."""

    error: str = ""
    checksums: dict[str, str] = {}


def begun(directory: Path) -> Path:
    """A new directory beside the versions; what an earlier one has left that was killed is removed."""
    private_dir(directory)
    for torn in directory.glob(".parts-*.tmp"):
        discard(torn)
    parts = directory / f".parts-{secrets.token_hex(6)}.tmp"
    parts.mkdir(mode=0o700)
    return parts


def leave(window: Window, version: int, directory: Path, *, rank: int) -> None:
    """Write what lies in this node's window, durable, and then the mark, which also tells what went wrong."""
    path, mark = _data(directory, rank), Mark()
    try:
        with window.reading(version) as data, path.open("xb") as file:
            path.chmod(0o600)
            file.write(data)
            mark = Mark(checksums=window.manifest(version).checksums)
        sync_file(path)
        sync_directory(directory)
    except (OSError, WeightsError) as found:
        mark = Mark(error=str(found) or type(found).__name__)
        discard(path)  # a full disk must have room for the mark
    publish(_mark(directory, rank), msgspec.json.encode(mark))


def tensors(
    layout: Layout, own: memoryview, parts: Mapping[int, Layout], directory: Path, *, rank: int
) -> Iterator[memoryview]:
    """All tensors of a version in order: from `own`, this rank's slot, and from the files of the other writers.

    `parts` are by writer. WeightsError if one has not left its part, or it is damaged.
    """
    slots = {writer: own if writer == rank else _left(directory, writer, part) for writer, part in parts.items()}
    boxes: dict[str, list[tuple[memoryview, Placed]]] = defaultdict(list)
    for writer, part in parts.items():
        for box in part.tensors:
            boxes[box.shard.name].append((slots[writer], box))
    for tensor in layout.tensors:
        yield _whole(tensor, boxes[tensor.name])


def _whole(tensor: Placed, boxes: list[tuple[memoryview, Placed]]) -> memoryview:
    if len(boxes) == 1 and boxes[0][1].cut is None:
        slot, box = boxes[0]
        return slot[box.offset : box.offset + box.nbytes]
    data = memoryview(bytearray(tensor.nbytes))
    values = values_of(data, msgspec.structs.replace(tensor, offset=0))
    for slot, box in boxes:
        values[box.shard.index] = values_of(slot, box)
    return data


def _left(directory: Path, writer: int, part: Layout) -> memoryview:
    """What another node has left, mapped and checked."""
    mark, path = _awaited(directory, writer), _data(directory, writer)
    if path.stat().st_size != part.nbytes:
        raise WeightsError(f"{path} has {path.stat().st_size} bytes and not {part.nbytes}: it was cut short")
    data = np.memmap(path, np.uint8, "r").data if part.nbytes else memoryview(b"")
    for box in part.tensors:
        if (seen := sum_of(data, box).hex()) != (wanted := mark.checksums.get(box.name)):
            raise WeightsError(f"{path}: box {box.name!r} has checksum {seen}, {wanted} was written: it is damaged")
    return data


def _awaited(directory: Path, writer: int) -> Mark:
    path, deadline = _mark(directory, writer), time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise WeightsError(f"rank {writer} has not written its part within {WAIT_S:g} s: see its log")
        time.sleep(LOOK_S)
    mark = msgspec.json.decode(path.read_bytes(), type=Mark)
    if mark.error:
        raise WeightsError(f"rank {writer} cannot write its part of the weights: {mark.error}")
    return mark


def _data(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.bin"


def _mark(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.json"
