"""The rows of a domain's task set: copied into the campaign at submission, read one at a time in the job.

    import_task_set   copy the rows of a domain's files; refuse what is not a row
    check_task_set    only refuse, without copying
    import_conversations, check_conversations    the same for the conversations of a warm-up, and only the check
    iterate_conversations    these, one after the other
    ImitationModel    what a campaign whose trajectories are imitated is read for
    TaskRows          the rows of one split of a domain, on disk
    TaskSplit         "train" or "held-out"
    MAX_ROW_BYTES     the limit of one row
    ROWS_PER_BATCH    rows of Parquet that are read together
    DATA_SUFFIXES     the ends of the names of data files
    NUM_TASK_SEEDS    the bound of the seeds in rows

A campaign has its own copy, DOMAIN.jsonl, so that it is not touched by what becomes of the files. The places of the
rows of each split are in DOMAIN.train.index and DOMAIN.held-out.index, 16 bytes a row: a row is read with two small
reads, and no process holds the rows or the index in memory.
"""

import os
import struct
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from hpcrl.config.recipe import TaskSetConfig, WarmupConfig
from hpcrl.errors import ConfigError, EnvFault, show_error
from hpcrl.models.conversation_data import parse_conversation
from hpcrl.system.processes import do_nothing

TaskSplit = Literal["train", "held-out"]
MAX_ROW_BYTES = 8 << 20
"""A message to an environment in another process has at most twice this."""
ROWS_PER_BATCH = 256
DATA_SUFFIXES = (".jsonl", ".ndjson", ".parquet")
"""The names of data files end with one of these."""
NUM_TASK_SEEDS = 1 << 63
"""Records of trajectories have signed numbers of 64 bits."""
WARMUP_ROWS = "conversations"
"""The name of a warm-up's rows, in a separate directory."""
_PLACE_FORMAT = struct.Struct("<QQ")
_decoder = msgspec.json.Decoder(dict[str, Any])


def import_task_set(config: TaskSetConfig, *, domain: str, directory: Path, only_held_out: bool = False) -> None:
    """Copy the rows of a domain's files to `directory`; raises ConfigError for files that cannot be used."""
    what = f"domains.{domain}.tasks"
    first, end = _read_range_of_rows(config, what=what)
    with (directory / f"{domain}.jsonl").open("xb") as out:
        rows = _copy_rows(
            _iterate_files(config.path, what=f"{what}.path", check=_check_seed), out, first=first, end=end
        )
        held_out_rows = _iterate_files(config.held_out_path or [], what=f"{what}.held_out_path", check=_check_seed)
        held_out = _copy_rows(held_out_rows, out, first=0, end=None)
        out.flush()
        os.fsync(out.fileno())
    _check_numbers(config, what=what, num_rows=len(rows), num_held_out=len(held_out), only_held_out=only_held_out)
    if only_held_out:
        rows, held_out = _RowPlaces(), held_out if len(held_out) else rows
    elif config.held_out_rows:
        rows, held_out = rows.split_evenly(config.held_out_rows)
    for split, places in (("train", rows), ("held-out", held_out)):
        (directory / f"{domain}.{split}.index").write_bytes(places.to_bytes())


def check_task_set(
    config: TaskSetConfig,
    *,
    domain: str,
    only_held_out: bool = False,
    check: Callable[[dict[str, Any]], object] = do_nothing,
) -> None:
    """Raise ConfigError for files that cannot be used; `check` raises it for the fields of a row, which it is given."""
    what = f"domains.{domain}.tasks"
    first, end = _read_range_of_rows(config, what=what)
    numbers = count()

    def check_chosen(fields: dict[str, Any]) -> None:
        _check_seed(fields)
        if next(numbers) >= first:
            check(fields)

    def check_held_out(fields: dict[str, Any]) -> None:
        _check_seed(fields)
        check(fields)

    rows = islice(_iterate_files(config.path, what=f"{what}.path", check=check_chosen), first, end)
    held_out = _iterate_files(config.held_out_path or [], what=f"{what}.held_out_path", check=check_held_out)
    num_rows, num_held_out = (sum(1 for _ in each) for each in (rows, held_out))
    _check_numbers(config, what=what, num_rows=num_rows, num_held_out=num_held_out, only_held_out=only_held_out)


def _read_range_of_rows(config: TaskSetConfig, *, what: str) -> tuple[int, int | None]:
    first, end = config.rows or (0, None)
    if end is not None and end <= first:
        raise ConfigError(
            f"{what}.rows = [{first}, {end}] has no rows: the second number is the one after the last row"
        )
    return first, end


def _check_numbers(config: TaskSetConfig, *, what: str, num_rows: int, num_held_out: int, only_held_out: bool) -> None:
    """Raise ConfigError for files without rows, and where all rows are held out."""
    if not num_rows:
        chosen = "" if config.rows is None else f" in rows = {list(config.rows)}"
        raise ConfigError(f"{what}.path = {config.path!r} has no rows{chosen}{_explain_rows(config.path)}")
    if config.held_out_path is not None and not num_held_out:
        raise ConfigError(f"{what}.held_out_path = {config.held_out_path!r} has no rows")
    if not only_held_out and config.held_out_rows >= num_rows:
        raise ConfigError(
            f"{what}.held_out_rows = {config.held_out_rows} leaves nothing to train on: there are {num_rows} rows"
        )


def _explain_rows(paths: str | list[str]) -> str:
    """Explain what a row is where a file has text; empty for Parquet."""
    named = [paths] if isinstance(paths, str) else paths
    return "" if all(path.endswith(".parquet") for path in named) else ": a row is a line with a JSON object"


def _check_seed(fields: dict[str, Any]) -> None:
    """Raise ConfigError for a row whose `seed`, which is that of its task, is not one."""
    seed = fields.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < NUM_TASK_SEEDS:
        raise ConfigError(
            f"seed = {seed!r:.60}: the seed of a row is that of its task, a whole number from 0 to 2**63 - 1: correct "
            "it, or give the field another name"
        )


@dataclass(frozen=True, kw_only=True)
class ImitationModel:
    """The reader of a campaign's trajectories, and the model that they are for: other data needs neither."""

    python: str = sys.executable
    """An interpreter that has h5py."""
    path: str | None = None
    """The directory of the model to train; None for a tiny one."""


def import_conversations(warmup: WarmupConfig, *, directory: Path, model: ImitationModel | None = None) -> None:
    """Copy the conversations of a warm-up's files to `directory`; raises ConfigError for a row that is not one."""
    rows = iterate_conversations(warmup, model)
    with (directory / f"{WARMUP_ROWS}.jsonl").open("xb") as out:
        places = _copy_rows(rows, out, first=0, end=None)
        out.flush()
        os.fsync(out.fileno())
    (directory / f"{WARMUP_ROWS}.train.index").write_bytes(places.to_bytes())


def check_conversations(warmup: WarmupConfig, *, model: ImitationModel | None = None) -> int:
    """Return the number of conversations in a warm-up's files; raises ConfigError for a row that is not one."""
    return sum(1 for _ in iterate_conversations(warmup, model))


def iterate_conversations(warmup: WarmupConfig, model: ImitationModel | None = None) -> Iterator[bytes]:
    """Yield the conversations of a warm-up as lines of JSON; raises ConfigError for a row that is not one."""
    paths = warmup.paths
    if warmup.min_reward is not None and not any(Path(path).is_dir() for path in paths):
        raise ConfigError(
            f"warmup.min_reward = {warmup.min_reward:g} is for the trajectories of a campaign, and warmup.path names "
            "files, whose rows have no reward: remove it"
        )
    rows = chain.from_iterable(
        _iterate_campaign(path, warmup, model or ImitationModel())
        if Path(path).is_dir()
        else _iterate_files(path, what="warmup.path", check=parse_conversation)
        for path in paths
    )
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"warmup.path = {warmup.path!r} has no rows{_explain_rows(warmup.path)}")
    yield first
    yield from rows


def _iterate_campaign(path: str, warmup: WarmupConfig, model: ImitationModel) -> Iterator[bytes]:
    """Yield the chosen trajectories of a campaign, read by another process, which has h5py."""
    request = {"root": path, "model": model.path, "min_reward": warmup.min_reward}
    command = [model.python, "-m", "hpcrl.traj.imitation", msgspec.json.encode(request).decode()]
    with tempfile.TemporaryFile() as errors:
        try:
            reader = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
        except OSError as error:
            raise ConfigError(f"the site's python {model.python!r} cannot be run here: {error.strerror}") from error
        with reader:
            try:
                assert reader.stdout is not None
                for number, line in enumerate(reader.stdout):
                    yield _check_row(line.rstrip(), f"warmup.path = {path!r}, trajectory {number}", bool)
            except BaseException:
                reader.kill()  # what takes the rows has stopped
                raise
        if reader.returncode:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines() or [
                "its reader ended without a message"
            ]
            raise ConfigError(f"warmup.path = {path!r} is a campaign that cannot be imitated: {lines[-1]}")


class TaskRows:
    """The rows of one split of a domain, in a campaign's directory."""

    def __init__(self, directory: Path, *, domain: str, split: TaskSplit) -> None:
        self._rows = directory / f"{domain}.jsonl"
        self._index = directory / f"{domain}.{split}.index"
        self._num_rows: int | None = None

    def __len__(self) -> int:
        """Return the number of rows; raises EnvFault if they cannot be read."""
        if self._num_rows is None:
            try:
                self._num_rows = self._index.stat().st_size // _PLACE_FORMAT.size
            except OSError as error:
                raise EnvFault(f"the campaign's task rows cannot be read: {error}") from error
        return self._num_rows

    def read_row(self, number: int) -> dict[str, Any]:
        """Return the fields of a row; raises EnvFault if it cannot be read."""
        try:
            start, size = _PLACE_FORMAT.unpack(
                _read_range(self._index, number * _PLACE_FORMAT.size, _PLACE_FORMAT.size)
            )
            return _decoder.decode(_read_range(self._rows, start, size))
        except (OSError, struct.error, msgspec.MsgspecError) as error:
            raise EnvFault(f"row {number} of {self._rows} cannot be read: {error}") from error


class _RowPlaces:
    """The start and the size of each row in a file."""

    def __init__(self) -> None:
        self._starts = array("Q")
        self._sizes = array("Q")

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, size: int) -> None:
        self._starts.append(start)
        self._sizes.append(size)

    def split_evenly(self, num_held_out: int) -> "tuple[_RowPlaces, _RowPlaces]":
        """Return the rows to train on and `num_held_out` others, which are spread evenly."""
        kept, held_out, total = _RowPlaces(), _RowPlaces(), len(self)
        for number, place in enumerate(zip(self._starts, self._sizes, strict=True)):
            is_held_out = (number + 1) * num_held_out // total > number * num_held_out // total
            (held_out if is_held_out else kept).add(*place)
        return kept, held_out

    def to_bytes(self) -> bytes:
        return b"".join(map(_PLACE_FORMAT.pack, self._starts, self._sizes))


def _copy_rows(rows: Iterator[bytes], out: BinaryIO, *, first: int, end: int | None) -> _RowPlaces:
    places, start = _RowPlaces(), out.tell()
    for row in islice(rows, first, end):
        out.write(row + b"\n")
        places.add(start, len(row))
        start += len(row) + 1
    return places


def _iterate_files(
    paths: str | list[str], *, what: str, check: Callable[[dict[str, Any]], object] = do_nothing
) -> Iterator[bytes]:
    """Yield the rows of the files as lines of JSON; `check` raises ConfigError for a row that cannot be used."""
    for path in [paths] if isinstance(paths, str) else paths:
        try:
            iterate = _iterate_parquet if path.endswith(".parquet") else _iterate_lines
            yield from iterate(path, what, check)
        except OSError as error:
            where = (
                " (a relative path is looked for beside the TOML file that sets it, then in the current directory, "
                f"{Path.cwd()})"
            ) * isinstance(error, FileNotFoundError)
            raise ConfigError(f"{what} = {path!r} cannot be read: {error.strerror or error}{where}") from error


def _iterate_lines(path: str, what: str, check: Callable[[dict[str, Any]], object]) -> Iterator[bytes]:
    """Yield the lines that have a row; raises ConfigError for a line that is not a JSON object."""
    if not path.endswith(DATA_SUFFIXES):
        known = ".jsonl or .ndjson (a JSON object a line), or .parquet"
        raise ConfigError(f"{what} = {path!r}: the name must end in {known}")
    with Path(path).open("rb") as lines:
        number = 0
        while line := lines.readline(MAX_ROW_BYTES + 1):
            number += 1
            row = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
            if row:
                yield _check_row(row, f"{what} = {path!r}, line {number}", check)


def _iterate_parquet(path: str, what: str, check: Callable[[dict[str, Any]], object]) -> Iterator[bytes]:
    """Yield the rows of a Parquet file, of which a small part is in memory at a time."""
    try:
        import pyarrow as pa  # noqa: TID251
        import pyarrow.parquet as pq  # noqa: TID251
    except ImportError as error:
        raise ConfigError(
            f"{what} = {path!r} needs the package pyarrow: pip install 'hpcrl[export]', or give JSON lines"
        ) from error
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH):
                for row in batch.to_pylist():
                    yield _check_row(msgspec.json.encode(row), f"{what} = {path!r}, row {number}", check)
                    number += 1
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ConfigError(f"{what} = {path!r} cannot be read as Parquet, row {number}: {error}") from error


def _check_row(row: bytes, where: str, check: Callable[[dict[str, Any]], object]) -> bytes:
    if len(row) > MAX_ROW_BYTES:
        raise ConfigError(f"{where} is longer than {MAX_ROW_BYTES >> 20} MiB: put large data into files, and name them")
    try:
        fields = _decoder.decode(row)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} is not a JSON object ({error}): {row[:60]!r}; correct or remove it") from None
    try:
        check(fields)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:  # of a check_task of the user's
        raise ConfigError(f"{where}: {show_error(error)}") from error
    return row


def _read_range(path: Path, start: int, size: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(fd, size, start)
    finally:
        os.close(fd)
    if len(data) != size:
        raise OSError(f"the file has fewer than {start + size} bytes")
    return data
