"""One immutable HDF5 file of trajectories: complete and checked, or absent. The only file that imports h5py.

    /                     format, schema_major, schema_minor, num_trajectories, header_xxh3_128 (attributes)
    /token_ids, logprobs, versions, loss_mask    per-token columns of all trajectories, one after another
    /offsets              trajectory i owns the tokens offsets[i] to offsets[i+1]
    /metadata             the facts: one JSON array with an object per trajectory

Every dataset is contiguous and carries the attribute xxh3_128; the header's checksum covers them all. HDF5 only
lays the file out: the columns are written with pwritev at the offsets that it gives, and read by mapping them,
which is twice to ten times as fast as through HDF5. The 1.8 file format is readable by every HDF5 tool in use
and, other than the default, checksums HDF5's own structures.
"""

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from hpcrl.errors import SpoolError
from hpcrl.files import staged
from hpcrl.spool.record import (
    COLUMNS,
    SCHEMA_MAJOR,
    SCHEMA_MINOR,
    Facts,
    Packed,
    Trajectory,
    pack,
    parse_facts,
    with_columns,
)

FORMAT = "hpcrl trajectories"
_IOV_MAX = 1024
# What h5py, NumPy and msgspec raise on files that are damaged or foreign.
_UNREADABLE = (OSError, KeyError, IndexError, ValueError, TypeError, AttributeError, RuntimeError, msgspec.MsgspecError)


@dataclass(frozen=True)
class Segment:
    """The trajectories of one file; their columns are read-only views of it, not copies."""

    path: Path
    facts: list[Facts]
    offsets: NDArray[np.int64]
    columns: dict[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.facts)

    def __getitem__(self, index: int) -> Trajectory:
        span = slice(self.offsets[index], self.offsets[index + 1])
        return with_columns(self.facts[index], {name: column[span] for name, column in self.columns.items()})

    def __iter__(self) -> Iterator[Trajectory]:
        return (self[index] for index in range(len(self)))


def write_segment(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Make `path` a segment of these trajectories, durable when this returns; replaces what was there."""
    write_packed(path, [pack(trajectory) for trajectory in trajectories])


def write_packed(path: Path, batch: Sequence[Packed]) -> None:
    """Make `path` a segment of trajectories that are packed already."""
    datasets = [*_columns(batch), _offsets(batch), _metadata(batch)]
    try:
        with staged(path) as temporary:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                places = _lay_out(temporary, datasets, num_trajectories=len(batch))
                for dataset in datasets:
                    _write_at(fd, places[dataset.name], dataset.buffers)
                os.fsync(fd)
            finally:
                os.close(fd)
    except (OSError, RuntimeError) as error:  # RuntimeError: how h5py reports a failed write when it closes a file
        raise SpoolError(f"cannot write segment {str(path)!r}: {_reason(error)}") from error


def read_segment(path: Path, *, verify: bool = True) -> Segment:
    """Map a segment; `verify` reads all of it once to compare the checksums of its datasets."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            _check_schema(path, file)
            # HDF5's own descriptor: a name may come to mean another file between two opens.
            mapped = mmap.mmap(file.id.get_vfd_handle(), 0, access=mmap.ACCESS_READ)
            return _decode(path, file, mapped, verify=verify)
    except _UNREADABLE as error:
        raise SpoolError(f"cannot read segment {str(path)!r}: {_reason(error)}") from error


@dataclass(frozen=True)
class _Dataset:
    """One dataset before it is written."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    buffers: list[memoryview]
    checksum: str


def _dataset(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], parts: Iterable[Any]) -> _Dataset:
    buffers = [view.cast("B") for part in parts if (view := memoryview(part)).nbytes]
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        digest.update(buffer)
    return _Dataset(name, dtype, shape, buffers, digest.hexdigest())


def _columns(batch: Sequence[Packed]) -> Iterator[_Dataset]:
    for name, dtype in COLUMNS.items():
        parts = [packed.columns[name] for packed in batch]
        yield _dataset(name, dtype, (sum(map(len, parts)),), parts)


def _offsets(batch: Sequence[Packed]) -> _Dataset:
    offsets = np.zeros(len(batch) + 1, np.int64)
    np.cumsum([len(packed.columns["token_ids"]) for packed in batch], out=offsets[1:])
    return _dataset("offsets", offsets.dtype, offsets.shape, [offsets])


def _metadata(batch: Sequence[Packed]) -> _Dataset:
    text = b"[" + b",\n".join(packed.facts for packed in batch) + b"]"
    return _dataset("metadata", h5py.string_dtype("utf-8", len(text)), (), [text])


def _lay_out(path: Path, datasets: Sequence[_Dataset], *, num_trajectories: int) -> dict[str, int]:
    """Let HDF5 write everything but the data; returns where in the file each dataset's data belong."""
    early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    early.set_layout(h5py.h5d.CONTIGUOUS)
    early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    early.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    early.set_obj_track_times(False)
    places = {}
    # Aligned to the widest column type, so that the mapped columns are aligned arrays.
    with h5py.File(
        path, "w", libver=("v108", "v108"), locking=False, alignment_threshold=1, alignment_interval=8
    ) as file:
        for dataset in datasets:
            space = h5py.h5s.create_simple(dataset.shape) if dataset.shape else h5py.h5s.create(h5py.h5s.SCALAR)
            kind = h5py.h5t.py_create(dataset.dtype, logical=True)
            created = h5py.h5d.create(file.id, dataset.name.encode(), kind, space, early)
            # Text of fixed length: HDF5 keeps other text in a heap without a checksum.
            h5py.Dataset(created).attrs["xxh3_128"] = np.bytes_(dataset.checksum)
            places[dataset.name] = created.get_offset() or 0
        shapes = {dataset.name: (dataset.dtype.str, dataset.shape, dataset.checksum) for dataset in datasets}
        file.attrs["format"] = np.bytes_(FORMAT)
        file.attrs["schema_major"] = SCHEMA_MAJOR
        file.attrs["schema_minor"] = SCHEMA_MINOR
        file.attrs["num_trajectories"] = num_trajectories
        file.attrs["header_xxh3_128"] = np.bytes_(_header_checksum(file.attrs, shapes))
    return places


def _header_checksum(attrs: Mapping[str, Any], shapes: Mapping[str, Any]) -> str:
    numbers = [int(attrs[name]) for name in ("schema_major", "schema_minor", "num_trajectories")]
    digest: str = xxhash.xxh3_128_hexdigest(msgspec.json.encode([FORMAT, numbers, sorted(shapes.items())]))
    return digest


def _write_at(fd: int, offset: int, buffers: Sequence[memoryview]) -> None:
    """Write all of `buffers`, however little the system takes at a time."""
    for first in range(0, len(buffers), _IOV_MAX):
        left = list(buffers[first : first + _IOV_MAX])
        while left:
            written = os.pwritev(fd, left, offset)
            offset += written
            left = _after(left, written)


def _after(buffers: list[memoryview], written: int) -> list[memoryview]:
    """What is left of `buffers` when `written` bytes of them are gone."""
    for index, buffer in enumerate(buffers):
        if written < len(buffer):
            return [buffer[written:], *buffers[index + 1 :]]
        written -= len(buffer)
    return []


def _check_schema(path: Path, file: Any) -> None:
    if file.attrs.get("format") != FORMAT.encode():
        raise SpoolError(
            f"cannot read segment {str(path)!r}: an HDF5 file, but not of hpcrl's: remove it from the spool"
        )
    major, minor = int(file.attrs["schema_major"]), int(file.attrs["schema_minor"])
    if major != SCHEMA_MAJOR:
        raise SpoolError(
            f"cannot read segment {str(path)!r}: written with schema {major}.{minor}, "
            f"this hpcrl reads {SCHEMA_MAJOR}.x: use the version of hpcrl that wrote it, or a newer one"
        )


def _decode(path: Path, file: Any, mapped: mmap.mmap, *, verify: bool) -> Segment:
    names = (*COLUMNS, "offsets", "metadata")
    checksums = {name: file[name].attrs["xxh3_128"].decode() for name in names}
    shapes = {name: (file[name].dtype.str, file[name].shape, checksums[name]) for name in names}
    if _header_checksum(file.attrs, shapes) != file.attrs["header_xxh3_128"].decode():
        raise ValueError("the header does not match its checksum")
    raw = {name: _raw(file[name], mapped) for name in names}
    if verify:
        for name in names:
            if xxhash.xxh3_128_hexdigest(raw[name]) != checksums[name]:
                raise ValueError(f"{name} does not match its checksum")
    facts = [parse_facts(row) for row in msgspec.json.decode(raw["metadata"], type=list[dict[str, Any]])]
    offsets = np.frombuffer(raw["offsets"], np.int64)
    columns = {name: np.frombuffer(raw[name], dtype) for name, dtype in COLUMNS.items()}
    _check_shapes(facts, offsets, columns)
    return Segment(path, facts, offsets, columns)


def _raw(dataset: Any, mapped: mmap.mmap) -> memoryview:
    """The bytes of a contiguous dataset, in place."""
    place, size = dataset.id.get_offset(), dataset.id.get_storage_size()
    if size == 0:
        return memoryview(b"")
    if place is None or place + size > len(mapped):
        raise ValueError(f"{dataset.name} is not inside the file")
    return memoryview(mapped)[place : place + size]


def _check_shapes(facts: Sequence[Facts], offsets: NDArray[np.int64], columns: Mapping[str, NDArray[Any]]) -> None:
    lengths = {len(column) for column in columns.values()}
    whole = len(offsets) == len(facts) + 1 and offsets[0] == 0 and lengths == {int(offsets[-1])}
    if not whole or (np.diff(offsets) < 0).any():
        raise ValueError(f"{len(facts)} facts, {len(offsets)} offsets and columns of {sorted(lengths)} do not fit")


def _reason(error: Exception) -> str:
    """The system's word for it where there is one: HDF5's is half a page."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    if isinstance(error, KeyError):
        return f"damaged or foreign: {error.args[0]}"
    return f"damaged or foreign: {error}"
