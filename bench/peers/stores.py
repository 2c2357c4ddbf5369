"""Other stores for trajectories, each made as durable as it can be.

Every writing function writes all trajectories, durable after each batch of `per_batch`, and returns when they are. Each
packs a trajectory as the spool does (columns as they are, facts as JSON) without checksums and without checks.
Libraries are imported before the clock starts, by `available`.
"""

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hpcrl.spool.record import COLUMNS, Trajectory, TrajectoryFacts
from hpcrl.system.files import sync_directory

Store = Callable[[Path, Sequence[Trajectory], int], None]


def available() -> tuple[dict[str, Store], list[str]]:
    """Return the stores whose libraries are installed, and messages about the others."""
    found, missing = {}, []
    for name, (library, store) in _STORES.items():
        try:
            importlib.import_module(library)
            found[name] = store
        except ImportError as error:
            missing.append(f"{name} is left out: {error}; pip install 'hpcrl[bench]'")
    return found, missing


def facts_json(trajectory: Trajectory) -> bytes:
    return msgspec.json.encode({name: getattr(trajectory, name) for name in TrajectoryFacts.__struct_fields__})


def write_lmdb(directory: Path, batch: Sequence[Trajectory], per_batch: int) -> None:
    """Write a value per trajectory, a transaction per batch; LMDB syncs with every commit."""
    import lmdb

    with lmdb.open(str(directory), map_size=4 << 30) as store:
        for group in _groups(batch, per_batch):
            with store.begin(write=True) as transaction:
                for one in group:
                    facts = facts_json(one)
                    parts = [len(facts).to_bytes(4, "little"), facts, *(getattr(one, name).data for name in COLUMNS)]
                    transaction.put(one.id.encode(), b"".join(parts))


def write_arrow(directory: Path, batch: Sequence[Trajectory], per_batch: int) -> None:
    """Write an Arrow IPC file per batch."""
    import pyarrow as pa  # noqa: TID251

    for number, group in enumerate(_groups(batch, per_batch)):
        table = _arrow(group)
        temporary = directory / f".{number}.tmp"
        with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        _publish(temporary, directory / f"{number:08d}.arrow")


def write_parquet(directory: Path, batch: Sequence[Trajectory], per_batch: int) -> None:
    """Write a Parquet file per batch, zstd at its default level."""
    import pyarrow.parquet as pq  # noqa: TID251

    for number, group in enumerate(_groups(batch, per_batch)):
        temporary = directory / f".{number}.tmp"
        pq.write_table(_arrow(group), temporary, compression="zstd")
        _publish(temporary, directory / f"{number:08d}.parquet")


def write_zarr(directory: Path, batch: Sequence[Trajectory], per_batch: int) -> None:
    """Append every batch to one array per column; changes are fsynced, but a crash may still tear a batch."""
    import zarr

    root = zarr.open_group(str(directory), mode="w")
    options: Any = {"shape": (0,), "chunks": (1 << 20,), "compressors": None}
    arrays = {name: root.create_array(name, dtype=dtype, **options) for name, dtype in COLUMNS.items()}
    facts = root.create_array("facts", dtype=np.uint8, **options)
    synced: dict[str, int] = {}
    for group in _groups(batch, per_batch):
        for name, array in arrays.items():
            array.append(np.concatenate([getattr(one, name) for one in group]))
        facts.append(np.frombuffer(b"\n".join(map(facts_json, group)), np.uint8))
        _sync_changed(directory, synced)


def write_msgpack(directory: Path, batch: Sequence[Trajectory], per_batch: int) -> None:
    """Write a file per trajectory, each fsynced before its rename; fsync the directory once per batch."""
    import msgpack

    for group in _groups(batch, per_batch):
        for one in group:
            path = directory / f"{one.id.replace('/', '-')}.msgpack"
            temporary = path.with_suffix(".tmp")
            record = {name: getattr(one, name).tobytes() for name in COLUMNS} | {"facts": facts_json(one)}
            temporary.write_bytes(msgpack.packb(record))
            _sync_file(temporary)
            temporary.rename(path)
        sync_directory(directory)


# Reading, for the stores that return memory without a copy: the columns of a trajectory by its index.

Columns = dict[str, Any]


def reader(name: str, directory: Path, batch: Sequence[Trajectory], per_batch: int) -> Callable[[int], Columns]:
    """Return a reader of the files that the store `name` wrote."""
    return _lmdb_reader(directory, batch) if name == "LMDB" else _arrow_reader(directory, per_batch)


def _lmdb_reader(directory: Path, batch: Sequence[Trajectory]) -> Callable[[int], Columns]:
    import lmdb

    transaction = lmdb.open(str(directory), map_size=4 << 30, readonly=True).begin(buffers=True)
    keys = [one.id.encode() for one in batch]

    def read(index: int) -> Columns:
        value = transaction.get(keys[index])
        assert value is not None, "every key was put"
        place = 4 + int.from_bytes(value[:4], "little")
        num_tokens, columns = (len(value) - place) // sum(dtype.itemsize for dtype in COLUMNS.values()), {}
        for name, dtype in COLUMNS.items():
            columns[name] = np.frombuffer(value, dtype, num_tokens, place)
            place += columns[name].nbytes
        return columns

    return read


def _arrow_reader(directory: Path, per_batch: int) -> Callable[[int], Columns]:
    import pyarrow as pa  # noqa: TID251

    files = [pa.ipc.open_file(pa.memory_map(str(path))).read_all() for path in sorted(directory.glob("*.arrow"))]
    lists = [{name: file[name].chunk(0) for name in COLUMNS} for file in files]
    offsets = [one["token_ids"].offsets.to_numpy() for one in lists]

    def values(name: str, column: Any) -> Any:  # Arrow stores booleans as bits
        return column.values if name == "loss_mask" else column.values.to_numpy()

    columns = [{name: values(name, column) for name, column in one.items()} for one in lists]

    def read(index: int) -> Columns:
        number, row = divmod(index, per_batch)
        span = slice(offsets[number][row], offsets[number][row + 1])
        found = {name: column[span] for name, column in columns[number].items()}
        return found | {"loss_mask": found["loss_mask"].to_numpy(zero_copy_only=False)}

    return read


_STORES: dict[str, tuple[str, Store]] = {
    "LMDB": ("lmdb", write_lmdb),
    "Arrow IPC": ("pyarrow", write_arrow),
    "Parquet zstd": ("pyarrow.parquet", write_parquet),
    "zarr append": ("zarr", write_zarr),
    "msgpack file each": ("msgpack", write_msgpack),
}


def _groups(batch: Sequence[Trajectory], per_batch: int) -> list[Sequence[Trajectory]]:
    return [batch[first : first + per_batch] for first in range(0, len(batch), per_batch)]


def _arrow(group: Sequence[Trajectory]) -> Any:
    import pyarrow as pa  # noqa: TID251

    offsets = np.zeros(len(group) + 1, np.int32)
    np.cumsum([len(one) for one in group], out=offsets[1:])
    lists = {
        name: pa.ListArray.from_arrays(offsets, np.concatenate([getattr(one, name) for one in group]))
        for name in COLUMNS
    }
    return pa.table({**lists, "facts": pa.array(list(map(facts_json, group)), pa.binary())})


def _publish(temporary: Path, path: Path) -> None:
    _sync_file(temporary)
    temporary.rename(path)
    sync_directory(path.parent)


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _sync_changed(directory: Path, synced: dict[str, int]) -> None:
    """Sync every file below `directory` that changed since the last call, and the directories."""
    for where, _, names in os.walk(directory):
        for path in (Path(where) / name for name in names):
            changed_ns = path.stat().st_mtime_ns
            if synced.get(str(path)) != changed_ns:
                _sync_file(path)
                synced[str(path)] = changed_ns
        sync_directory(Path(where))
