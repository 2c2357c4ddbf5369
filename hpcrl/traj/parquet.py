"""Write trajectories as Parquet. Beside hpcrl.envs.task_set the only file that imports pyarrow.

write_shard         writes one file
write_dataset       fills a directory of files
TRAJECTORY_SCHEMA   their columns
"""

import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa  # noqa: TID251
import pyarrow.parquet as pq  # noqa: TID251

from hpcrl.spool.record import ALL_COLUMNS, Trajectory
from hpcrl.system.files import publish_file, publish_json, sync_directory
from hpcrl.traj.conversation import TokenDecoder
from hpcrl.traj.export import build_export_row

MAX_ROW_GROUP_TOKENS = 4 << 20
MAX_ROW_GROUP_ROWS = 1024

_REWARD_PART_TYPE = pa.struct([("name", pa.string()), ("value", pa.float64())])
_MESSAGE_TYPE = pa.struct([("role", pa.string()), ("content", pa.string())])
_TURN_TYPE = pa.struct(
    [
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("reward", pa.float64()),
        ("generate_s", pa.float64()),
        ("overlap_s", pa.float64()),
        ("step_s", pa.float64()),
        ("remote_prefill", pa.bool_()),
        ("row", pa.int32()),
        ("masked", pa.string()),
        ("token_rewards", pa.list_(pa.float64())),
        ("num_forced", pa.int32()),
    ]
)
_ROW_TYPE = pa.struct(
    [("end", pa.int32()), ("parent", pa.int32()), ("shares", pa.int32()), ("messages", pa.list_(_MESSAGE_TYPE))]
)
TRAJECTORY_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("group", pa.string()),
        ("domain", pa.string()),
        ("seed", pa.int64()),
        ("status", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.list_(_REWARD_PART_TYPE)),
        ("messages", pa.list_(_MESSAGE_TYPE)),
        ("turns", pa.list_(_TURN_TYPE)),
        ("rows", pa.list_(_ROW_TYPE)),
        ("num_tokens", pa.int64()),
        ("start_version", pa.int64()),
        ("end_version", pa.int64()),
        ("producer", pa.string()),
        ("created", pa.float64()),
        ("reset_s", pa.float64()),
        ("extra", pa.string()),
        *((name, pa.list_(pa.from_numpy_dtype(dtype))) for name, dtype in ALL_COLUMNS.items()),
    ]
)


def write_shard(
    path: Path, trajectories: Iterator[Trajectory], decoder: TokenDecoder, *, max_tokens: int | None
) -> int:
    """Write a new file of up to about `max_tokens`, durable when this returns; return its number of rows."""
    num_rows, num_tokens = 0, 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as out:
        with pq.ParquetWriter(out, TRAJECTORY_SCHEMA, compression="zstd") as writer:
            for group in _split_row_groups(trajectories):
                writer.write_table(_build_arrow_table(group, decoder))
                num_rows += len(group)
                num_tokens += sum(map(len, group))
                if max_tokens is not None and num_tokens >= max_tokens:
                    break
        out.flush()
        os.fsync(out.fileno())
    return num_rows


def write_dataset(
    directory: Path, trajectories: Iterable[Trajectory], decoder: TokenDecoder, *, marker_name: str, max_tokens: int
) -> None:
    """Fill a directory that `datasets.load_dataset(directory)` reads."""
    data = directory / "data"
    data.mkdir(mode=0o700)
    remaining = iter(trajectories)
    num_rows, shard = 0, 0
    prefetched = list(_take_next(remaining))
    while prefetched or not shard:
        num_rows += write_shard(
            data / f"train-{shard:05d}.parquet", chain(prefetched, remaining), decoder, max_tokens=max_tokens
        )
        shard += 1
        prefetched = list(_take_next(remaining))
    publish_file(directory / "README.md", _README_TEXT)
    publish_json(directory / marker_name, {"num_trajectories": num_rows, "num_files": shard})
    sync_directory(data)


def _take_next(trajectories: Iterator[Trajectory]) -> Iterator[Trajectory]:
    """Yield the next trajectory, if there is one."""
    for trajectory in trajectories:
        yield trajectory
        return


def _split_row_groups(trajectories: Iterator[Trajectory]) -> Iterator[list[Trajectory]]:
    """Yield the rows that are written together."""
    group: list[Trajectory] = []
    num_tokens = 0
    for trajectory in trajectories:
        group.append(trajectory)
        num_tokens += len(trajectory)
        if num_tokens >= MAX_ROW_GROUP_TOKENS or len(group) >= MAX_ROW_GROUP_ROWS:
            yield group
            group, num_tokens = [], 0
    if group:
        yield group


def _build_arrow_table(group: list[Trajectory], decoder: TokenDecoder) -> pa.Table:
    rows = [build_export_row(trajectory, decoder) for trajectory in group]
    arrays = [
        _build_token_column(group, field.name)
        if field.name in ALL_COLUMNS
        else pa.array([one[field.name] for one in rows], field.type)
        for field in TRAJECTORY_SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=TRAJECTORY_SCHEMA)


def _build_token_column(group: list[Trajectory], name: str) -> pa.Array:
    """Build a column of lists, without a Python number per token; it is null for rows that do not have it."""
    columns = [getattr(trajectory, name) for trajectory in group]
    present = [column for column in columns if column is not None]
    offsets = np.zeros(len(group) + 1, np.int32)
    np.cumsum([0 if column is None else len(column) for column in columns], out=offsets[1:])
    values = np.concatenate(present) if present else np.empty(0, ALL_COLUMNS[name])
    missing = pa.array([column is None for column in columns])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), mask=missing)


_README_TEXT = """---
configs:
- config_name: default
  data_files: data/*.parquet
---
Trajectories of an hpcrl campaign: `messages` is the conversation, `token_ids` is the input and the output of the model,
`loss_mask` is true for tokens that the model generated, with their `logprobs` and the `versions` of the weights.
`teacher_logprobs` are those of a teacher's engine for the same tokens (NaN elsewhere); null if none was asked.
"""
