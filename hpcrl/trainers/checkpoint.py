"""Checkpoints: the trainer's state and the trajectories it consumed, in one commit.

    CHECKPOINTS/000007-step-000070/    the seventh checkpoint, saved after step 70
        checkpoint.json                step, version, extra; size and checksum of every other file
        consumed.json                  the groups that were trained on (see learn/consumed.py)
        ...                            the trainer's own files

A checkpoint is filled under a temporary name, made durable, and renamed: it is complete or absent. Names and manifest
are those of `hpcrl/campaign_dir/checkpoints.py`. No pickle: safetensors and JSON.
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from hpcrl.campaign_dir.checkpoints import (
    MANIFEST_FILE,
    CheckpointFile,
    CheckpointManifest,
    decode_manifest,
    encode_manifest,
    explain_newer_format,
    find_missing_file,
    list_committed,
    parse_commit_number,
    parse_step,
)
from hpcrl.errors import LostCheckpointsError, TrainError
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.system.files import make_private_dir, publish_file, remove_path, staged_path, sync_directory, sync_file
from hpcrl.trainers.base import WritableState
from hpcrl.trainers.state import MOMENTS_PATTERN

CONSUMED_FILE = "consumed.json"
WEIGHTS_ALONE = "weights_alone"
"""The key in a manifest of a checkpoint that was kept for its weights alone."""

_READ_CHUNK_BYTES = 1 << 22
NUM_STREAMS = 8
"""The files that are read at a time for their checksums: one stream has a part of a file system's speed."""


@dataclass(frozen=True, kw_only=True)
class PendingCheckpoint:
    """The contents of a checkpoint, in memory: a thread can commit it while training continues."""

    step: int
    version: int
    state: WritableState
    consumed: bytes
    """The result of `ConsumedTrajectories.encode`."""
    extra: dict[str, Any]


def commit_checkpoint(directory: Path, pending: PendingCheckpoint) -> Path:
    """Commit what was captured earlier; the trainer may have moved on since."""
    step = pending.step
    path = directory / f"{_next_commit_number(directory):06d}-step-{step:06d}"
    try:
        make_private_dir(directory)
        with staged_path(path) as temporary:
            temporary.mkdir(mode=0o700)
            pending.state.write(temporary)
            (temporary / CONSUMED_FILE).write_bytes(pending.consumed)
            names = _list_files(temporary)
            with ThreadPoolExecutor(NUM_STREAMS) as pool:
                files = dict(zip(names, pool.map(_seal_file, [temporary / name for name in names]), strict=True))
            manifest = CheckpointManifest(
                step=step, version=pending.version, created=time.time(), files=files, extra=pending.extra
            )
            publish_file(temporary / MANIFEST_FILE, encode_manifest(manifest))
    except OSError as error:
        raise TrainError(
            f"checkpoint {path} could not be saved ({error}); older checkpoints are untouched: "
            "free space or fix the directory, then resume"
        ) from error
    return path


def find_newest(directory: Path, *, report: Callable[[Path, str], None]) -> Path | None:
    """Return the last intact commit with all of the state, or None before the first.

    Each damaged one skipped is passed to `report`.

    If all are damaged, or one is of a newer hpcrl, it raises: to start again, or from an older one, would train a
    second time on what they had consumed.
    """
    committed = [path for path in list_committed(directory) if not _has_weights_alone(path)]
    for path in reversed(committed):
        if newer := explain_newer_format(path):
            raise LostCheckpointsError(f"{path} was saved by a newer hpcrl: {newer}")
        reason = find_damage(path)
        if reason is None:
            return path
        report(path, reason)
    if committed:
        raise LostCheckpointsError(
            f"every checkpoint in {directory} is damaged (the newest: {find_damage(committed[-1])}): "
            "restore one from a copy, or move them away to train from the start"
        )
    return None


def read_checkpoint(path: Path) -> tuple[CheckpointManifest, ConsumedTrajectories]:
    """Read a checkpoint except for the trainer's state."""
    return decode_manifest((path / MANIFEST_FILE).read_bytes()), ConsumedTrajectories.decode(
        (path / CONSUMED_FILE).read_bytes()
    )


def read_recorded_reward(manifest: CheckpointManifest) -> float | None:
    """Return the mean reward recorded in a checkpoint, if any."""
    reward = manifest.extra.get("reward")
    return float(reward) if isinstance(reward, int | float) else None


def prune_checkpoints(
    directory: Path,
    *,
    keep: int,
    keep_best: int = 0,
    score: Callable[[CheckpointManifest], float | None] = read_recorded_reward,
) -> list[Path]:
    """Remove all but the `keep` newest checkpoints with all their files, and the leftovers of killed savers.

    Of the `keep_best` others with the highest `score` the weights stay too: to be exported, not to resume from.
    Only the one process that saves here may call this: it removes every temporary name.
    """
    committed = list_committed(directory)
    removed = committed[: _count_older(committed, keep)]
    best = set(sorted(removed, key=lambda path: _score_checkpoint(path, score), reverse=True)[:keep_best])
    removed = [path for path in removed if path not in best]
    for path in best:
        _leave_weights(path)
    for path in removed:
        path.rename(path.with_name(f".{path.name}.pruned.tmp"))  # half removed must not look like a checkpoint
    for leftover in directory.glob(".*.tmp"):
        remove_path(leftover)
    return removed


def _leave_weights(path: Path) -> None:
    """Remove all but the weights from a checkpoint; the manifest comes first, so that it is intact at any time."""
    try:
        manifest = decode_manifest((path / MANIFEST_FILE).read_bytes())
    except (OSError, ValueError):  # a damaged one stays as it is
        return
    files = {name: file for name, file in manifest.files.items() if not fnmatch(name, MOMENTS_PATTERN)}
    if len(files) < len(manifest.files):
        extra = manifest.extra | {WEIGHTS_ALONE: True}
        publish_file(path / MANIFEST_FILE, encode_manifest(msgspec.structs.replace(manifest, files=files, extra=extra)))
    for leftover in path.glob(MOMENTS_PATTERN):
        leftover.unlink()


def _has_weights_alone(path: Path) -> bool:
    """Return whether a checkpoint was kept for its weights alone; a damaged one is not known to be."""
    try:
        return WEIGHTS_ALONE in decode_manifest((path / MANIFEST_FILE).read_bytes()).extra
    except (OSError, ValueError):
        return False


def find_oldest_number(directory: Path, *, keep: int) -> int | None:
    """Return the oldest commit that is kept to resume from; those kept as the best may be older."""
    committed = list_committed(directory)
    return parse_commit_number(committed[_count_older(committed, keep)]) if committed else None


def _count_older(committed: list[Path], keep: int) -> int:
    """Return how many commits are older than the `keep` newest ones that have all their files."""
    intact = [index for index, path in enumerate(committed) if find_missing_file(path) is None]
    return intact[-keep] if len(intact) >= keep else 0


def find_by_step(directory: Path, step: int) -> Path | None:
    """Return the last commit of a step, if it is intact."""
    found = [path for path in list_committed(directory) if parse_step(path) == step]
    return found[-1] if found and find_damage(found[-1]) is None else None


def find_damage(path: Path) -> str | None:
    """Return why a checkpoint cannot be used; None if every byte is as it was saved."""
    reason = find_missing_file(path)
    if reason is not None:
        return reason
    files = decode_manifest((path / MANIFEST_FILE).read_bytes()).files
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        return next(filter(None, pool.map(partial(_find_file_damage, path), files, files.values())), None)


def _find_file_damage(path: Path, name: str, content: CheckpointFile) -> str | None:
    try:
        found_checksum = _hash_file(path / name)
    except OSError as error:
        return f"{name}: {error}"
    if found_checksum != content.xxh3:
        return f"{name}: checksum is {found_checksum}, was {content.xxh3} when saved"
    return None


def _score_checkpoint(path: Path, score: Callable[[CheckpointManifest], float | None]) -> float:
    """Return the score of a checkpoint; one without a score ranks last."""
    try:
        value = score(decode_manifest((path / MANIFEST_FILE).read_bytes()))
    except (OSError, ValueError):
        return -math.inf
    return -math.inf if value is None else value


def _seal_file(path: Path) -> CheckpointFile:
    """Make a file of a checkpoint durable and return its size and checksum."""
    sync_file(path)
    sync_directory(path.parent)
    return CheckpointFile(num_bytes=path.stat().st_size, xxh3=_hash_file(path))


def _hash_file(path: Path) -> str:
    state = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_READ_CHUNK_BYTES):
            state.update(chunk)
    return str(state.hexdigest())


def _list_files(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def _next_commit_number(directory: Path) -> int:
    committed = list_committed(directory)
    return parse_commit_number(committed[-1]) + 1 if committed else 1
