"""Export trajectories: as Parquet, JSON lines, a directory for `datasets.load_dataset`, or logs for `inspect view`.

    export_trajectories   `hpcrl traj export`
    build_export_row      a trajectory as a row, without its token columns
    encode_json_line      a trajectory as a JSON line

Parquet and JSON lines have the same columns. Their types are read alike by pyarrow, pandas and `datasets`, whatever
the first rows contain: lists of records instead of mappings with free keys, and facts of a newer schema as JSON text.
One segment is in memory at a time, and the target is complete or absent.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import SpoolError
from hpcrl.spool.record import EpisodeTurn, Trajectory, list_columns
from hpcrl.spool.rows import list_placed_turns, list_spans
from hpcrl.system.exit_codes import EXIT_FAILED
from hpcrl.system.files import remove_path, staged_path, sync_directory
from hpcrl.system.terminal import print_to_stderr, track_progress
from hpcrl.traj.conversation import (
    TokenDecoder,
    build_conversation,
    chat_messages,
    find_main_row,
    load_token_decoder,
)
from hpcrl.traj.history import TrajectoryHistory, TrajectorySelection


def build_export_row(trajectory: Trajectory, decoder: TokenDecoder) -> dict[str, Any]:
    """Return the row of a trajectory, without its token columns."""
    conversations = _row_messages(trajectory, decoder)
    return {
        "id": trajectory.id,
        "group": trajectory.group,
        "domain": trajectory.domain,
        "seed": trajectory.seed,
        "status": trajectory.status,
        "reward": trajectory.reward,
        "reward_parts": [{"name": name, "value": value} for name, value in trajectory.reward_parts.items()],
        "messages": conversations[find_main_row(list_placed_turns(trajectory))],
        "turns": [_turn_fields(turn) for turn in trajectory.turns],
        "rows": [
            {"end": row.end, "parent": row.parent, "shares": row.shares, "messages": messages}
            for row, messages in zip(trajectory.rows, conversations, strict=False)
        ],
        "num_tokens": len(trajectory),
        "start_version": trajectory.start_version,
        "end_version": trajectory.end_version,
        "producer": trajectory.producer,
        "created": trajectory.created,
        "reset_s": trajectory.reset_s,
        "extra": _encode_extra(trajectory),
    }


def encode_json_line(trajectory: Trajectory, decoder: TokenDecoder) -> bytes:
    """Return a trajectory as one line; null stands for NaN and infinity, which JSON lacks."""
    return msgspec.json.encode({**build_export_row(trajectory, decoder), **list_columns(trajectory)}) + b"\n"


def _row_messages(trajectory: Trajectory, decoder: TokenDecoder) -> list[list[dict[str, str]]]:
    """Return the messages of each row; without a tokenizer there are none."""
    if decoder.chat is None:
        return [[] for _ in list_spans(trajectory)]
    return [
        chat_messages(build_conversation(trajectory, decoder, row=row, turns=turns))
        for row, turns in enumerate(list_placed_turns(trajectory))
    ]


def _turn_fields(turn: EpisodeTurn) -> dict[str, Any]:
    return {name: getattr(turn, name) for name in EpisodeTurn.__struct_fields__ if name != "extra"}


def _encode_extra(trajectory: Trajectory) -> str:
    turn_extras = [turn.extra for turn in trajectory.turns]
    return msgspec.json.encode({**trajectory.extra, **({"turns": turn_extras} if any(turn_extras) else {})}).decode()


STDOUT = Path("-")
DIRECTORY_FORMATS = ("hf", "inspect")
MARKER_NAME = "hpcrl-export.json"
MAX_SHARD_TOKENS = 64 << 20
"""The tokens of one file: about a GiB of columns before compression."""
_FORMAT_BY_SUFFIX = {".parquet": "parquet", ".jsonl": "jsonl", ".json": "jsonl", "": "hf"}


def export_trajectories(
    history: TrajectoryHistory, selection: TrajectorySelection, *, target: Path, kind: str | None, force: bool
) -> int:
    """Write the selected trajectories; exit code 1 if some are missing because a segment could not be read."""
    kind = kind or _choose_format(target)
    write = _choose_writer(kind, history.campaign)
    _check_target(target, kind=kind, force=force)
    decoder = load_token_decoder(history.campaign)
    if decoder.missing_reason:
        print_to_stderr(f"the messages are left empty: {decoder.missing_reason}")
    selected: Iterable[Trajectory] = (trajectory for _, trajectory in history.trajectories(selection, verify=True))
    if target != STDOUT:  # those to a terminal are their own progress
        total = history.num_trajectories() if selection == TrajectorySelection() else None
        selected = track_progress(selected, "trajectories are exported", total=total)
    exported = _TrajectoryCounter(selected)
    try:
        write(target, exported, decoder)
    except BrokenPipeError:  # the reader of the output has closed it: handled by the caller
        raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise SpoolError(f"cannot write {str(target)!r}: {reason}; no file was left there") from error
    except (OverflowError, ValueError) as error:  # pyarrow: a number that its column cannot hold
        raise SpoolError(f"cannot export as {kind}: {error}; no file was left in {str(target)!r}") from error
    where = "" if target == STDOUT else f" to {target}"
    print_to_stderr(f"{exported.num_trajectories:,} trajectories exported{where}")
    return EXIT_FAILED if history.problems else 0


class _TrajectoryCounter:
    """An iterable that counts its trajectories."""

    def __init__(self, trajectories: Iterable[Trajectory]) -> None:
        self.num_trajectories = 0
        self._trajectories = trajectories

    def __iter__(self) -> Iterator[Trajectory]:
        for trajectory in self._trajectories:
            self.num_trajectories += 1
            yield trajectory


def _choose_format(target: Path) -> str:
    if target == STDOUT:
        return "jsonl"
    try:
        return _FORMAT_BY_SUFFIX[target.suffix.lower()]
    except KeyError:
        raise SpoolError(f"{target.name!r} has no known suffix: add --format parquet, jsonl, hf or inspect") from None


def _choose_writer(kind: str, campaign: CampaignDir) -> Callable[[Path, Iterable[Trajectory], TokenDecoder], None]:
    if kind == "jsonl":
        return _write_lines
    if kind == "inspect":
        return functools.partial(_write_inspect_directory, campaign=campaign)
    try:
        from hpcrl.traj import parquet
    except ModuleNotFoundError as error:
        raise SpoolError(f"{kind} needs {error.name}: pip install 'hpcrl[export]', or use --format jsonl") from None

    def write_file(target: Path, trajectories: Iterable[Trajectory], decoder: TokenDecoder) -> None:
        with staged_path(target) as temporary:
            parquet.write_shard(temporary, iter(trajectories), decoder, max_tokens=None)

    def write_directory(target: Path, trajectories: Iterable[Trajectory], decoder: TokenDecoder) -> None:
        with _StagedDirectory(target) as temporary:
            parquet.write_dataset(
                temporary, trajectories, decoder, marker_name=MARKER_NAME, max_tokens=MAX_SHARD_TOKENS
            )

    return write_file if kind == "parquet" else write_directory


def _check_target(target: Path, *, kind: str, force: bool) -> None:
    if target == STDOUT:
        if kind != "jsonl":
            raise SpoolError(f"{kind} cannot be written to a pipe: give a file name, or --format jsonl")
        return
    if not target.absolute().parent.is_dir():
        raise SpoolError(f"cannot write {str(target)!r}: directory {str(target.absolute().parent)!r} does not exist")
    if not os.path.lexists(target):
        return
    if target.exists() and not (target.is_file() or target.is_dir()):
        raise SpoolError(f"{str(target)!r} is not a regular file: choose another name")
    if not force:
        raise SpoolError(f"{str(target)!r} exists: choose another name, or replace it with --force")
    if kind not in DIRECTORY_FORMATS and target.is_dir():
        raise SpoolError(f"{str(target)!r} is a directory, and {kind} is one file: choose another name")
    if kind in DIRECTORY_FORMATS and not (target.is_dir() and (target / MARKER_NAME).is_file()):
        raise SpoolError(f"{str(target)!r} is not an export of hpcrl (it has no {MARKER_NAME}): it is not replaced")


def _write_lines(target: Path, trajectories: Iterable[Trajectory], decoder: TokenDecoder) -> None:
    if target == STDOUT:
        _write_all(sys.stdout.buffer, trajectories, decoder)
        return
    with staged_path(target) as temporary:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb", buffering=1 << 20) as out:
            _write_all(out, trajectories, decoder)
            os.fsync(out.fileno())


def _write_all(out: IO[bytes], trajectories: Iterable[Trajectory], decoder: TokenDecoder) -> None:
    for trajectory in trajectories:
        out.write(encode_json_line(trajectory, decoder))
    out.flush()


def _write_inspect_directory(
    target: Path, trajectories: Iterable[Trajectory], decoder: TokenDecoder, *, campaign: CampaignDir
) -> None:
    from hpcrl.traj.inspect_log import load_answer_parser, write_inspect_logs

    decoder = dataclasses.replace(decoder, parser=load_answer_parser(campaign, decoder))
    with _StagedDirectory(target) as temporary:
        write_inspect_logs(temporary, trajectories, decoder, campaign=campaign, marker_name=MARKER_NAME)


class _StagedDirectory(staged_path):
    """A `staged_path` for a directory, which may replace an older export."""

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
        remove_path(older)
        sync_directory(self.path.parent)
