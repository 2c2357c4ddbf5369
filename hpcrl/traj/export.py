"""A trajectory as a row for other tools: the same columns in Parquet and in JSON lines.

Only types that pyarrow, pandas and `datasets` read alike whatever the first rows hold: lists of records instead of
mappings with free keys, and what is only known to a newer schema as JSON text.

`hpcrl traj export`: trajectories as Parquet, JSON lines, or a directory that `datasets.load_dataset` takes.

One segment is in memory at a time, and the target is there complete or not at all.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from hpcrl.errors import SpoolError
from hpcrl.spool.record import COLUMNS, Trajectory, Turn
from hpcrl.system.exit_codes import EXIT_FAILED
from hpcrl.system.files import discard, staged, sync_directory
from hpcrl.system.terminal import complain
from hpcrl.traj.conversation import Speech, conversation, load_speech, messages
from hpcrl.traj.history import History, Wanted


def row(trajectory: Trajectory, speech: Speech) -> dict[str, Any]:
    """Everything but the token columns."""
    said = messages(conversation(trajectory, speech)) if speech.chat is not None else []
    return {
        "id": trajectory.id,
        "group": trajectory.group,
        "domain": trajectory.domain,
        "seed": trajectory.seed,
        "status": trajectory.status,
        "reward": trajectory.reward,
        "reward_parts": [{"name": name, "value": value} for name, value in trajectory.reward_parts.items()],
        "messages": said,
        "turns": [_turn(turn) for turn in trajectory.turns],
        "num_tokens": len(trajectory),
        "start_version": trajectory.start_version,
        "end_version": trajectory.end_version,
        "producer": trajectory.producer,
        "created": trajectory.created,
        "reset_s": trajectory.reset_s,
        "extra": _extra(trajectory),
    }


def json_line(trajectory: Trajectory, speech: Speech) -> bytes:
    """One line; JSON has no NaN and no infinity, so null stands for them."""
    columns = {name: getattr(trajectory, name).tolist() for name in COLUMNS}
    return msgspec.json.encode({**row(trajectory, speech), **columns}) + b"\n"


def _turn(turn: Turn) -> dict[str, Any]:
    return {name: getattr(turn, name) for name in Turn.__struct_fields__ if name != "extra"}


def _extra(trajectory: Trajectory) -> str:
    of_turns = [turn.extra for turn in trajectory.turns]
    return msgspec.json.encode({**trajectory.extra, **({"turns": of_turns} if any(of_turns) else {})}).decode()


STDOUT = Path("-")
MARK = "hpcrl-export.json"
SHARD_TOKENS = 64 << 20
"""About a GiB of columns before compression."""
_ENDINGS = {".parquet": "parquet", ".jsonl": "jsonl", ".json": "jsonl", "": "hf"}


def export(history: History, wanted: Wanted, *, target: Path, kind: str | None, force: bool) -> int:
    """Write what is wanted; exit code 1 if a segment could not be read, whose trajectories are then missing."""
    kind = kind or _kind_of(target)
    write = _writer(kind)
    _check_target(target, kind=kind, force=force)
    speech = load_speech(history.run)
    if speech.missing:
        complain(f"the messages are left empty: {speech.missing}")
    counted = _Counted(trajectory for _, trajectory in history.trajectories(wanted, verify=True))
    try:
        write(target, counted, speech)
    except BrokenPipeError:  # the reader of our output went away: no matter of ours
        raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise SpoolError(f"cannot write {str(target)!r}: {reason}; nothing was left there") from error
    except (OverflowError, ValueError) as error:  # pyarrow: a number that its column cannot hold
        raise SpoolError(f"cannot export as {kind}: {error}; nothing was left in {str(target)!r}") from error
    where = "" if target == STDOUT else f" to {target}"
    complain(f"{counted.num:,} trajectories exported{where}")
    return EXIT_FAILED if history.problems else 0


class _Counted:
    """Counts what passes."""

    def __init__(self, trajectories: Iterable[Trajectory]) -> None:
        self.num = 0
        self._trajectories = trajectories

    def __iter__(self) -> Iterator[Trajectory]:
        for trajectory in self._trajectories:
            self.num += 1
            yield trajectory


def _kind_of(target: Path) -> str:
    if target == STDOUT:
        return "jsonl"
    try:
        return _ENDINGS[target.suffix.lower()]
    except KeyError:
        raise SpoolError(f"{target.name!r} does not say what to write: add --format parquet, jsonl or hf") from None


def _writer(kind: str) -> Callable[[Path, Iterable[Trajectory], Speech], None]:
    if kind == "jsonl":
        return _write_lines
    try:
        from hpcrl.traj import parquet
    except ModuleNotFoundError as error:
        raise SpoolError(f"{kind} needs {error.name}: pip install 'hpcrl[export]', or use --format jsonl") from None

    def write_file(target: Path, trajectories: Iterable[Trajectory], speech: Speech) -> None:
        with staged(target) as temporary:
            parquet.write_shard(temporary, iter(trajectories), speech, max_tokens=None)

    def write_directory(target: Path, trajectories: Iterable[Trajectory], speech: Speech) -> None:
        with _staged_directory(target) as temporary:
            parquet.write_dataset(temporary, trajectories, speech, mark=MARK, max_tokens=SHARD_TOKENS)

    return write_file if kind == "parquet" else write_directory


def _check_target(target: Path, *, kind: str, force: bool) -> None:
    if target == STDOUT:
        if kind != "jsonl":
            raise SpoolError(f"{kind} cannot go to a pipe: give a name, or --format jsonl")
        return
    if not target.absolute().parent.is_dir():
        raise SpoolError(f"cannot write {str(target)!r}: there is no directory {str(target.absolute().parent)!r}")
    if not os.path.lexists(target):
        return
    if not force:
        raise SpoolError(f"{str(target)!r} exists: choose another name, or replace it with --force")
    if kind != "hf" and target.is_dir():
        raise SpoolError(f"{str(target)!r} is a directory, and {kind} is one file: choose another name")
    if kind == "hf" and not (target.is_dir() and (target / MARK).is_file()):
        raise SpoolError(f"{str(target)!r} is no export of hpcrl's (it has no {MARK}): it is not replaced")


def _write_lines(target: Path, trajectories: Iterable[Trajectory], speech: Speech) -> None:
    if target == STDOUT:
        _write_all(sys.stdout.buffer, trajectories, speech)
        return
    with staged(target) as temporary:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb", buffering=1 << 20) as out:
            _write_all(out, trajectories, speech)
            os.fsync(out.fileno())


def _write_all(out: IO[bytes], trajectories: Iterable[Trajectory], speech: Speech) -> None:
    for trajectory in trajectories:
        out.write(json_line(trajectory, speech))
    out.flush()


class _staged_directory(staged):  # noqa: N801 - as `staged`
    """As `staged`, for a directory that may have an older one of ours in its place."""

    def __enter__(self) -> Path:
        temporary = super().__enter__()
        temporary.mkdir(mode=0o700)
        return temporary

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None or not self.path.is_dir():
            super().__exit__(kind, *rest)
            return
        older = self.temporary.with_suffix(".older")
        self.path.rename(older)
        try:
            super().__exit__(kind, *rest)
        except OSError:
            older.rename(self.path)
            raise
        discard(older)
        sync_directory(self.path.parent)
