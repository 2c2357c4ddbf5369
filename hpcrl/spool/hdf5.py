"""The HDF5 structures around the columns of a segment. The only file that imports h5py and hdf5plugin.

    make_file_head      the start of a file whose columns follow one another, and the offset of each
    compress_columns    a whole file with compressed columns
    decompress_columns  the bytes of the columns of such a file

HDF5 takes milliseconds to arrange a file, as long as writing it takes. All files with the same columns have the same
structures and differ only in numbers, so HDF5 lays out one empty file per process, and its numbers are filled in:
lengths, addresses and the end of the file. The oldest file format is used: every HDF5 tool reads it, and it holds no
checksums that would have to be recomputed (a checksum in the segment's index covers these bytes). The HDF5 standard
leaves the block before HDF5's first byte to the user: a segment keeps its index there.
"""

import functools
import itertools
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, BinaryIO

import h5py  # noqa: TID251
import numpy as np

from hpcrl.config.recipe import Compression
from hpcrl.errors import SpoolError
from hpcrl.spool.record import COLUMNS, EXPERTS, OPTIONAL_COLUMNS, SCHEMA_MAJOR, SCHEMA_MINOR

FORMAT = "hpcrl trajectories"
USER_BLOCK = 2048
"""Bytes before those of HDF5: the index of a segment."""
ALIGNMENT = 8
"""The alignment of every column in bytes, so that a mapped column is an aligned array."""
METADATA_NAME = "metadata"
ARRAYS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {**COLUMNS, **OPTIONAL_COLUMNS, EXPERTS: np.dtype(np.uint8), "offsets": np.dtype(np.int64)}
)
COLUMN_CHUNK_BYTES = 1 << 20

_NO_ADDRESS = b"\xff" * 8
_END_OFFSET = 40
"""The offset of the file's length in HDF5's first block."""
# Lengths that stand in for the real ones; they occur nowhere else in the file.
_STAND_INS = {name: 0x0123_4567_8900 + 0x1001 * index for index, name in enumerate(ARRAYS)}
_STAND_IN_TEXT = 0x5A17_B3C1
_FILE_NUMBERS = itertools.count()


def make_file_head(lengths: Mapping[str, int]) -> tuple[bytes, dict[str, int]]:
    """Return HDF5's own bytes of a file with columns of these lengths, and the offset of each column in the file.

    `lengths`: the number of entries of every array that the file has, and of bytes of the metadata.
    """
    names = tuple(name for name in ARRAYS if name in lengths)
    image = _make_template(names)
    places, end = {}, _align_offset(USER_BLOCK + len(image))
    for name in names:
        places[name], num_bytes = end, lengths[name] * ARRAYS[name].itemsize
        stand_in = _STAND_INS[name]
        image = image.replace(_encode_layout(stand_in * ARRAYS[name].itemsize), _encode_layout(num_bytes, at=end))
        image = image.replace(struct.pack("<Q", stand_in), struct.pack("<Q", lengths[name]))
        end = _align_offset(end + num_bytes)
    places[METADATA_NAME] = end
    image = image.replace(_encode_layout(_STAND_IN_TEXT), _encode_layout(lengths[METADATA_NAME], at=end))
    image = image.replace(struct.pack("<I", _STAND_IN_TEXT), struct.pack("<I", lengths[METADATA_NAME]))
    return _set_file_end(image, end + lengths[METADATA_NAME]), places


def compress_columns(columns: Mapping[str, Sequence[memoryview]], *, compression: Compression) -> memoryview:
    """Return HDF5's bytes of a whole file with compressed columns; any HDF5 tool that has the filter reads it."""
    filters = _import_filters(f'spool.compression = "{compression}"').FILTERS
    codec = {"zstd": 32015, "lz4": 32004, "blosc": 32001}[compression]
    assert codec in filters.values()
    with _create_memory_file() as file:
        for name, parts in columns.items():
            raw = np.frombuffer(b"".join(parts), ARRAYS.get(name, np.dtype(np.uint8)))
            chunk = min(len(raw), COLUMN_CHUNK_BYTES // raw.itemsize)
            how: dict[str, Any] = {"chunks": (chunk,), "compression": codec} if chunk else {}
            file.create_dataset(name, data=raw, track_times=False, **how)
        file.flush()
        return memoryview(file.id.get_file_image())


def decompress_columns(source: BinaryIO, names: Sequence[str]) -> dict[str, memoryview]:
    """Return the bytes of compressed columns."""
    _import_filters("this segment is compressed")
    with h5py.File(source, "r") as file:
        return {name: memoryview(file[name][()]).cast("B") if file[name].size else memoryview(b"") for name in names}


@functools.cache
def _make_template(names: tuple[str, ...]) -> bytes:
    """Make the file that all others with these arrays are made from: it has every dataset, none with a place yet."""
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_layout(h5py.h5d.CONTIGUOUS)
    how.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
    how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    how.set_obj_track_times(False)
    with _create_memory_file() as file:
        for name in names:
            kind, space = h5py.h5t.py_create(ARRAYS[name], logical=True), h5py.h5s.create_simple((_STAND_INS[name],))
            h5py.h5d.create(file.id, name.encode(), kind, space, how)
        text = h5py.h5t.C_S1.copy()
        text.set_size(_STAND_IN_TEXT)
        text.set_cset(h5py.h5t.CSET_UTF8)
        h5py.h5d.create(file.id, METADATA_NAME.encode(), text, h5py.h5s.create(h5py.h5s.SCALAR), how)
        file.flush()
        return bytes(file.id.get_file_image())


def _create_memory_file() -> Any:
    """Create a file that never touches a disk, with the attributes of every segment."""
    file = h5py.File(
        f"segment {next(_FILE_NUMBERS)}",  # HDF5 refuses a name that another thread has open
        "w",
        driver="core",
        backing_store=False,
        block_size=1 << 16,
        libver=("earliest", "v108"),
        userblock_size=USER_BLOCK,
    )
    file.attrs["format"] = np.bytes_(FORMAT)
    file.attrs["schema_major"], file.attrs["schema_minor"] = SCHEMA_MAJOR, SCHEMA_MINOR
    return file


def _encode_layout(num_bytes: int, *, at: int | None = None) -> bytes:
    """Encode the place of a contiguous dataset as HDF5 does. Addresses count from the end of the user block."""
    address = _NO_ADDRESS if at is None or not num_bytes else struct.pack("<Q", at - USER_BLOCK)
    return address + struct.pack("<Q", num_bytes)


def _set_file_end(image: bytes, end: int) -> bytes:
    return image[:_END_OFFSET] + struct.pack("<Q", end) + image[_END_OFFSET + 8 :]


def _align_offset(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _import_filters(what: str) -> Any:
    """Return hdf5plugin; importing it registers its filters with HDF5."""
    try:
        import hdf5plugin  # noqa: TID251 - not needed without compression
    except ImportError as error:
        raise SpoolError(
            f"{what}, and Python package hdf5plugin is missing: pip install 'hpcrl[compress]', "
            'or set spool.compression = "none" for new segments'
        ) from error
    return hdf5plugin
