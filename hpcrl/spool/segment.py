"""Write and read segments: immutable files of trajectories, complete and checked, or absent.

    Segment, SegmentFacts             the trajectories of one file, and their facts
    write_segment, write_packed, draft_packed    write one
    read_segment                      maps and checks one
    read_facts                        reads the facts of one, without its columns
    is_out_of_reach                   distinguishes an unreachable segment from a damaged one

The layout of a file, in order:

    bytes 0 to 2047: the index: a line of text, a line of JSON, its checksum
    bytes of HDF5: the structures that every HDF5 tool needs to find the datasets by name
    /token_ids, /logprobs, /versions, /loss_mask: per-token columns of all trajectories, one after another
    /teacher_logprobs: another, if any of them has it
    /experts: the bytes of the experts that tokens were sent to, likewise; the index has their type and shape
    /offsets: trajectory i has the tokens offsets[i] to offsets[i+1]
    /metadata: the facts: one JSON array, an object per trajectory and line

The index has offset, length and xxh3-128 of every column and of HDF5's own bytes. A segment is written with pwritev
from front to back and read by mapping it, both without HDF5. A compressed one is smaller, needs a copy, and is read
through HDF5.
"""

import contextlib
import functools
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, overload

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from hpcrl.config.recipe import Compression
from hpcrl.errors import SpoolError
from hpcrl.spool import hdf5
from hpcrl.spool.hdf5 import ARRAYS, FORMAT, METADATA_NAME, USER_BLOCK
from hpcrl.spool.record import (
    COLUMNS,
    EXPERTS,
    OPTIONAL_COLUMNS,
    SCHEMA_MAJOR,
    SCHEMA_MINOR,
    PackedTrajectory,
    Trajectory,
    TrajectoryFacts,
    attach_columns,
    pack_trajectory,
    parse_facts,
)
from hpcrl.spool.routed_experts import EXPERT_DTYPES, make_unknown
from hpcrl.system.files import staged_path

_MAGIC = FORMAT.encode() + b"\n"
_IOV_MAX = 1024
_NEWLINE = ord("\n")
# The errors that NumPy, h5py and msgspec raise for damaged and foreign files.
_UNREADABLE = (OSError, KeyError, IndexError, ValueError, TypeError, AttributeError, RuntimeError, msgspec.MsgspecError)


_ExpertNumbers = tuple[str, int, int]
"""The type of the numbers of experts, and the layers and places that a token has in them."""


class _ColumnEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The entry of one dataset in the index."""

    num_bytes: int
    xxh3_128: str
    at: int | None
    """The offset of its first byte in the file; None if it is compressed."""
    numbers: _ExpertNumbers | None = None
    """Set for the column of experts."""


class _SegmentIndex(msgspec.Struct, frozen=True, kw_only=True):
    schema: tuple[int, int]
    num_trajectories: int
    columns: dict[str, _ColumnEntry]
    hdf5_bytes: int
    """The number of HDF5's own bytes after the index; 0 if columns are compressed: then they are everywhere."""
    hdf5_xxh3_128: str


def is_out_of_reach(error: SpoolError) -> bool:
    """Return whether the system failed (permission, an I/O error): then the segment itself may be intact."""
    return isinstance(error.__cause__, OSError) and bool(error.__cause__.errno)


@dataclass(frozen=True)
class Segment:
    """The trajectories of one file; their columns are read-only views of it, not copies."""

    path: Path
    facts: "SegmentFacts"
    """The facts, each parsed when it is accessed."""
    offsets: NDArray[np.int64]
    columns: dict[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.facts)

    def __getitem__(self, index: int) -> Trajectory:
        return attach_columns(self.facts[index], self._columns_of(index))

    def __iter__(self) -> Iterator[Trajectory]:
        return (self[index] for index in range(len(self)))

    def pack_row(self, index: int) -> PackedTrajectory:
        """Return a trajectory as it is stored, to be written elsewhere."""
        return PackedTrajectory(id=self.facts[index].id, facts=self.facts.raw(index), columns=self._columns_of(index))

    def _columns_of(self, index: int) -> dict[str, NDArray[Any]]:
        if index < 0:
            index += len(self)
        span = slice(self.offsets[index], self.offsets[index + 1])
        return {name: column[span] for name, column in self.columns.items()}


class SegmentFacts(Sequence[TrajectoryFacts]):
    """The facts of a segment, each parsed when it is accessed."""

    def __init__(self, path: Path, raw: memoryview) -> None:
        self._path = path
        self._raw = raw
        # Encoded JSON contains no newline, so the lines are the rows: "[{...},\n{...},\n{...}]"
        breaks = np.flatnonzero(np.frombuffer(raw, np.uint8) == _NEWLINE)
        self._starts = [1, *(breaks + 1).tolist()] if len(raw) > 2 else []
        self._stops = [*(breaks - 1).tolist(), len(raw) - 1] if len(raw) > 2 else []

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> TrajectoryFacts: ...
    @overload
    def __getitem__(self, index: slice) -> list[TrajectoryFacts]: ...
    def __getitem__(self, index: int | slice) -> TrajectoryFacts | list[TrajectoryFacts]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        try:
            return parse_facts(self.raw(index))
        except _UNREADABLE as error:
            if isinstance(error, IndexError):
                raise
            raise SpoolError(f"cannot read segment {str(self._path)!r}: trajectory {index}: {error}") from error

    def raw(self, index: int) -> bytes:
        """Return the JSON object of a trajectory."""
        return bytes(self._raw[self._starts[index] : self._stops[index]])


def write_segment(path: Path, trajectories: Iterable[Trajectory], *, compression: Compression = "none") -> None:
    """Write a segment of these trajectories, durable when this returns; an existing file is replaced."""
    write_packed(path, [pack_trajectory(trajectory) for trajectory in trajectories], compression=compression)


def write_packed(path: Path, batch: Sequence[PackedTrajectory], *, compression: Compression = "none") -> None:
    """Write a segment of packed trajectories, as `write_segment` does."""
    draft_packed(path, batch, compression=compression)()


def draft_packed(
    path: Path, batch: Sequence[PackedTrajectory], *, compression: Compression = "none"
) -> Callable[[], None]:
    """Write a segment under a temporary name; the returned function makes it durable and renames it."""
    columns = {**_collect_columns(batch), "offsets": _make_offsets(batch), METADATA_NAME: _make_metadata(batch)}
    make = (
        _make_plain_file if compression == "none" else functools.partial(_make_compressed_file, compression=compression)
    )
    buffers = make(columns, num_trajectories=len(batch), numbers=_describe_experts(batch))
    with _convert_os_errors(path), contextlib.ExitStack() as stack:
        temporary = stack.enter_context(staged_path(path))
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        stack.callback(os.close, fd)
        _write_buffers(fd, buffers)
        rest = stack.pop_all()

    def publish() -> None:
        with _convert_os_errors(path), rest:
            os.fsync(fd)

    return publish


def read_segment(path: Path, *, verify: bool = True) -> Segment:
    """Map a segment; with `verify`, read all of it once and compare the checksums."""
    try:
        with path.open("rb") as file:
            return _decode_segment(path, file, verify=verify)
    except _UNREADABLE as error:
        raise SpoolError(f"cannot read segment {str(path)!r}: {_describe_error(error)}") from error


def read_facts(path: Path) -> SegmentFacts:
    """Read the facts of a segment alone: the columns are neither mapped nor decompressed, and nothing is verified."""
    try:
        with path.open("rb") as file:
            mapped, index = _map_file(path, file)
            facts = SegmentFacts(path, _read_columns(file, mapped, index, [METADATA_NAME])[METADATA_NAME])
            if len(facts) != index.num_trajectories:
                raise ValueError(f"{len(facts)} facts of {index.num_trajectories} trajectories")
            return facts
    except _UNREADABLE as error:
        raise SpoolError(f"cannot read segment {str(path)!r}: {_describe_error(error)}") from error


# Writing


@contextlib.contextmanager
def _convert_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SpoolError(f"cannot write segment {str(path)!r}: {_describe_error(error)}") from error


ByteBuffers = Sequence[memoryview]


def _collect_columns(batch: Sequence[PackedTrajectory]) -> dict[str, ByteBuffers]:
    columns = {name: _view_bytes(packed.columns[name] for packed in batch) for name in COLUMNS}
    for name, dtype in OPTIONAL_COLUMNS.items():
        if any(name in packed.columns for packed in batch):
            columns[name] = _view_bytes(_get_optional_column(packed, name, dtype) for packed in batch)
    if (one := next((packed.columns[EXPERTS] for packed in batch if EXPERTS in packed.columns), None)) is not None:
        columns[EXPERTS] = _view_bytes(_get_experts(packed, like=one) for packed in batch)
    return columns


def _get_experts(packed: PackedTrajectory, *, like: NDArray[Any]) -> NDArray[Any]:
    """Return the experts of a trajectory; none are known of one that has none."""
    column = packed.columns.get(EXPERTS)
    return make_unknown(len(packed.columns["token_ids"]), like=like) if column is None else column


def _describe_experts(batch: Sequence[PackedTrajectory]) -> _ExpertNumbers | None:
    """Return the type and the shape of a token's experts, which all trajectories of a segment have."""
    found = [packed.columns[EXPERTS] for packed in batch if EXPERTS in packed.columns]
    kinds = sorted({(column.dtype.name, *column.shape[1:]) for column in found})
    if len(kinds) > 1:
        raise SpoolError(
            f"a segment was to have experts of several models {kinds}: they are of one campaign, so of one"
        )
    return kinds[0] if kinds else None


def _get_optional_column(packed: PackedTrajectory, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a column that others of the segment have; it is NaN where this trajectory lacks it."""
    column = packed.columns.get(name)
    return np.full(len(packed.columns["token_ids"]), np.nan, dtype) if column is None else column


def _make_offsets(batch: Sequence[PackedTrajectory]) -> ByteBuffers:
    offsets = np.zeros(len(batch) + 1, np.int64)
    np.cumsum([len(packed.columns["token_ids"]) for packed in batch], out=offsets[1:])
    return _view_bytes([offsets])


def _make_metadata(batch: Sequence[PackedTrajectory]) -> ByteBuffers:
    return _view_bytes([b"[" + b",\n".join(packed.facts for packed in batch) + b"]"])


def _view_bytes(parts: Iterable[Any]) -> ByteBuffers:
    return [view.cast("B") for part in parts if (view := memoryview(part)).nbytes]


def _make_plain_file(
    columns: Mapping[str, ByteBuffers], *, num_trajectories: int, numbers: _ExpertNumbers | None
) -> ByteBuffers:
    """Return all bytes of a segment in order, without a copy."""
    sizes = {name: sum(map(len, buffers)) for name, buffers in columns.items()}
    own, places = hdf5.make_file_head({name: size // _get_item_size(name) for name, size in sizes.items()})
    described = {name: _describe_column(name, columns[name], at=places[name], numbers=numbers) for name in columns}
    body, end = [memoryview(own)], USER_BLOCK + len(own)
    for name, buffers in columns.items():
        body += [memoryview(bytes(places[name] - end)), *buffers]
        end = places[name] + sizes[name]
    return [_make_index(described, num_trajectories=num_trajectories, own=own), *body]


def _make_compressed_file(
    columns: Mapping[str, ByteBuffers],
    *,
    num_trajectories: int,
    numbers: _ExpertNumbers | None,
    compression: Compression,
) -> ByteBuffers:
    described = {name: _describe_column(name, buffers, at=None, numbers=numbers) for name, buffers in columns.items()}
    index = _make_index(described, num_trajectories=num_trajectories, own=b"")
    return [index, hdf5.compress_columns(columns, compression=compression)]


def _describe_column(
    name: str, buffers: ByteBuffers, *, at: int | None, numbers: _ExpertNumbers | None
) -> _ColumnEntry:
    return _ColumnEntry(
        num_bytes=sum(map(len, buffers)),
        xxh3_128=_hash_buffers(buffers),
        at=at,
        numbers=numbers if name == EXPERTS else None,
    )


def _make_index(columns: dict[str, _ColumnEntry], *, num_trajectories: int, own: bytes) -> memoryview:
    index = _SegmentIndex(
        schema=(SCHEMA_MAJOR, SCHEMA_MINOR),
        num_trajectories=num_trajectories,
        columns=columns,
        hdf5_bytes=len(own),
        hdf5_xxh3_128=_hash_buffers([own]),
    )
    line = msgspec.json.encode(index)
    text = b"%b%b\n%b\n" % (_MAGIC, line, _hash_buffers([line]).encode())
    assert len(text) <= USER_BLOCK
    return memoryview(text.ljust(USER_BLOCK, b"\0"))


def _get_item_size(name: str) -> int:
    return ARRAYS[name].itemsize if name in ARRAYS else 1


def _hash_buffers(buffers: Iterable[Any]) -> str:
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        digest.update(buffer)
    return str(digest.hexdigest())


def _write_buffers(fd: int, buffers: ByteBuffers) -> None:
    """Write all of `buffers`, however little the system writes at a time."""
    end = 0
    for first in range(0, len(buffers), _IOV_MAX):
        left = list(buffers[first : first + _IOV_MAX])
        while left:
            written = os.pwritev(fd, left, end)
            end += written
            left = _drop_written(left, written)


def _drop_written(buffers: list[memoryview], written: int) -> list[memoryview]:
    """Return what is left of `buffers` after `written` bytes of them."""
    for index, buffer in enumerate(buffers):
        if written < len(buffer):
            return [buffer[written:], *buffers[index + 1 :]]
        written -= len(buffer)
    return []


# Reading


def _decode_segment(path: Path, file: BinaryIO, *, verify: bool) -> Segment:
    mapped, index = _map_file(path, file)
    raw = _read_columns(file, mapped, index, _list_stored(index))
    if verify:
        _verify_checksums(mapped, index, raw)
    offsets = np.frombuffer(raw["offsets"], ARRAYS["offsets"])
    columns = {name: np.frombuffer(raw[name], ARRAYS[name]) for name in (*COLUMNS, *OPTIONAL_COLUMNS) if name in raw}
    if EXPERTS in raw:
        columns[EXPERTS] = _view_experts(raw[EXPERTS], index.columns[EXPERTS].numbers)
    facts = SegmentFacts(path, raw[METADATA_NAME])
    _check_shapes(index, facts, offsets, columns)
    return Segment(path, facts, offsets, columns)


def _view_experts(raw: memoryview, numbers: _ExpertNumbers | None) -> NDArray[Any]:
    if numbers is None or np.dtype(numbers[0]) not in EXPERT_DTYPES:
        raise ValueError(f"the index gives {numbers} as the numbers of experts")
    return np.frombuffer(raw, np.dtype(numbers[0])).reshape(-1, *numbers[1:])


def _map_file(path: Path, file: BinaryIO) -> tuple[memoryview, _SegmentIndex]:
    mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return mapped, _parse_index(path, bytes(mapped[:USER_BLOCK]))


def _parse_index(path: Path, block: bytes) -> _SegmentIndex:
    if not block.startswith(_MAGIC):
        if b"\x89HDF\r\n" in block:
            raise SpoolError(
                f"cannot read segment {str(path)!r}: an HDF5 file, but not one of hpcrl: remove it from the spool"
            )
        raise ValueError("it does not start as a segment does")
    line, checksum = block.removeprefix(_MAGIC).split(b"\n")[:2]
    if _hash_buffers([line]).encode() != checksum:
        raise ValueError("the index does not match its checksum")
    major, minor = msgspec.json.decode(line, type=dict[str, Any])["schema"]
    if major not in range(1, SCHEMA_MAJOR + 1):
        raise SpoolError(
            f"cannot read segment {str(path)!r}: written with schema {major}.{minor}, "
            f"this hpcrl reads 1.x to {SCHEMA_MAJOR}.x: use the version of hpcrl that wrote it, or a newer one"
        )
    return msgspec.json.decode(line, type=_SegmentIndex)


def _is_compressed(index: _SegmentIndex) -> bool:
    return any(column.at is None for column in index.columns.values())


def _list_stored(index: _SegmentIndex) -> list[str]:
    """Return the datasets of a segment; only optional ones may be absent."""
    return [
        name for name in (*ARRAYS, METADATA_NAME) if name in index.columns or name not in (*OPTIONAL_COLUMNS, EXPERTS)
    ]


def _read_columns(
    file: BinaryIO, mapped: memoryview, index: _SegmentIndex, names: Sequence[str]
) -> dict[str, memoryview]:
    """Return the bytes of these columns."""
    return _read_compressed_columns(file, index, names) if _is_compressed(index) else _map_columns(mapped, index, names)


def _map_columns(mapped: memoryview, index: _SegmentIndex, names: Sequence[str]) -> dict[str, memoryview]:
    """Return the bytes of columns, in place."""
    raw = {}
    for name in names:
        column = index.columns[name]
        assert column.at is not None
        raw[name] = mapped[column.at : column.at + column.num_bytes]
        if len(raw[name]) != column.num_bytes:
            raise ValueError(f"{name} is not inside the file")
    return raw


def _read_compressed_columns(file: BinaryIO, index: _SegmentIndex, names: Sequence[str]) -> dict[str, memoryview]:
    raw = hdf5.decompress_columns(file, names)
    for name, column in raw.items():
        if len(column) != index.columns[name].num_bytes:
            raise ValueError(f"{name} has {len(column)} bytes, not {index.columns[name].num_bytes}")
    return raw


def _verify_checksums(mapped: memoryview, index: _SegmentIndex, raw: Mapping[str, memoryview]) -> None:
    if _hash_buffers([mapped[USER_BLOCK : USER_BLOCK + index.hdf5_bytes]]) != index.hdf5_xxh3_128:
        raise ValueError("the HDF5 structures do not match their checksum")
    for name, column in index.columns.items():
        if _hash_buffers([raw[name]]) != column.xxh3_128:
            raise ValueError(f"{name} does not match its checksum")


def _check_shapes(
    index: _SegmentIndex,
    facts: Sequence[TrajectoryFacts],
    offsets: NDArray[np.int64],
    columns: Mapping[str, NDArray[Any]],
) -> None:
    lengths = {len(column) for column in columns.values()}
    is_consistent = len(offsets) == len(facts) + 1 == index.num_trajectories + 1 and offsets[0] == 0
    if not is_consistent or lengths != {int(offsets[-1])} or (np.diff(offsets) < 0).any():
        raise ValueError(f"{len(facts)} facts, {len(offsets)} offsets and columns of {sorted(lengths)} do not fit")


def _describe_error(error: Exception) -> str:
    """Describe an error, in the system's words if it has an errno."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    if isinstance(error, KeyError):
        return f"damaged or foreign: {error.args[0]}"
    return f"damaged or foreign: {error}"
