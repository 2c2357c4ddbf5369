"""Trajectories in Parquet. The only file that imports pyarrow."""

import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hpcrl.spool.record import COLUMNS, Trajectory
from hpcrl.system.files import publish, publish_json, sync_directory
from hpcrl.traj.conversation import Speech
from hpcrl.traj.export import row

GROUP_TOKENS = 4 << 20
GROUP_ROWS = 1024

_PART = pa.struct([("name", pa.string()), ("value", pa.float64())])
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
_TURN = pa.struct(
    [
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("reward", pa.float64()),
        ("generate_s", pa.float64()),
        ("step_s", pa.float64()),
        ("remote_prefill", pa.bool_()),
    ]
)
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("group", pa.string()),
        ("domain", pa.string()),
        ("seed", pa.int64()),
        ("status", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.list_(_PART)),
        ("messages", pa.list_(_MESSAGE)),
        ("turns", pa.list_(_TURN)),
        ("num_tokens", pa.int64()),
        ("start_version", pa.int64()),
        ("end_version", pa.int64()),
        ("producer", pa.string()),
        ("created", pa.float64()),
        ("reset_s", pa.float64()),
        ("extra", pa.string()),
        *((name, pa.list_(pa.from_numpy_dtype(dtype))) for name, dtype in COLUMNS.items()),
    ]
)


def write_shard(path: Path, trajectories: Iterator[Trajectory], speech: Speech, *, max_tokens: int | None) -> int:
    """Write a new file, durable when this returns, until it has `max_tokens`; returns how many rows it got."""
    num_rows, num_tokens = 0, 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as out:
        with pq.ParquetWriter(out, SCHEMA, compression="zstd") as writer:
            for group in _groups(trajectories):
                writer.write_table(_table(group, speech))
                num_rows += len(group)
                num_tokens += sum(map(len, group))
                if max_tokens is not None and num_tokens >= max_tokens:
                    break
        out.flush()
        os.fsync(out.fileno())
    return num_rows


def write_dataset(
    directory: Path, trajectories: Iterable[Trajectory], speech: Speech, *, mark: str, max_tokens: int
) -> None:
    """Fill a directory that `datasets.load_dataset(directory)` reads."""
    data = directory / "data"
    data.mkdir(mode=0o700)
    left = iter(trajectories)
    num_rows, shard = 0, 0
    ahead = list(_take(left))
    while ahead or not shard:
        num_rows += write_shard(data / f"train-{shard:05d}.parquet", chain(ahead, left), speech, max_tokens=max_tokens)
        shard += 1
        ahead = list(_take(left))
    publish(directory / "README.md", _CARD)
    publish_json(directory / mark, {"num_trajectories": num_rows, "num_files": shard})
    sync_directory(data)


def _take(trajectories: Iterator[Trajectory]) -> Iterator[Trajectory]:
    """The next one, if there is one."""
    for trajectory in trajectories:
        yield trajectory
        return


def _groups(trajectories: Iterator[Trajectory]) -> Iterator[list[Trajectory]]:
    """Rows that are written together."""
    group: list[Trajectory] = []
    num_tokens = 0
    for trajectory in trajectories:
        group.append(trajectory)
        num_tokens += len(trajectory)
        if num_tokens >= GROUP_TOKENS or len(group) >= GROUP_ROWS:
            yield group
            group, num_tokens = [], 0
    if group:
        yield group


def _table(group: list[Trajectory], speech: Speech) -> pa.Table:
    rows = [row(trajectory, speech) for trajectory in group]
    offsets = np.zeros(len(group) + 1, np.int32)
    np.cumsum([len(trajectory) for trajectory in group], out=offsets[1:])
    arrays = [
        _tokens(group, field.name, offsets)
        if field.name in COLUMNS
        else pa.array([one[field.name] for one in rows], field.type)
        for field in SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _tokens(group: list[Trajectory], name: str, offsets: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> pa.Array:
    """A column of lists, without making a Python number of every token."""
    values = np.concatenate([getattr(trajectory, name) for trajectory in group])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


_CARD = """---
configs:
- config_name: default
  data_files: data/*.parquet
---
Trajectories of an hpcrl campaign: `messages` is the conversation, `token_ids` is everything the model saw and said,
`loss_mask` is true where the model said it, with its `logprobs` and the `versions` of the weights there.
"""
