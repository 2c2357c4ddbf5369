"""Write files that are complete or absent, make private directories, and read JSON and logs tolerantly."""

import contextlib
import errno
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpcrl.system.json_numbers import load_json
from hpcrl.system.processes import do_nothing

MAX_LINE_CHARS = 500
"""The longest line that is taken from a log."""
OUTPUT_MODE = 0o666
"""The mode of a file that a user asks for, in a place of their choice: as their umask leaves it."""
_NO_LOG = "it has no log"
_TRACEBACK, _CPP_MESSAGE = "Traceback (most recent call last)", "what():"
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")


def publish_file(path: Path, data: bytes | str, *, mode: int = 0o600) -> None:
    """Make `path` appear with `data`, complete and durable, or not at all."""
    raw = data.encode() if isinstance(data, str) else data
    with staged_path(path) as temporary:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(fd, "wb") as out:
            out.write(raw)
            out.flush()
            os.fsync(out.fileno())


def find_output(path: Path) -> Path:
    """Return the file that a user's path leads to; raise OSError where it is anything but a file, such as a device."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise FileExistsError(errno.EEXIST, "it is not a regular file", str(path))
    return target


def find_input(path: Path) -> Path:
    """Return a path that a user gives as a file; raise OSError where it is anything else, such as a pipe."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path


def is_table_path(path: Path) -> bool:
    """Return whether a user gives a CSV file, or what is to be refused as one, and not the name of a campaign."""
    return path.suffix == ".csv" or (path.exists() and not path.is_dir())


def replace_file(path: Path, data: bytes | str) -> None:
    """Make `path` appear with `data`, complete or not at all; after a crash of the machine it may be old, or empty.

    It takes microseconds where `publish_file` waits for a disk, twice.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as out:
            out.write(data.encode() if isinstance(data, str) else data)
        os.rename(temporary, path)  # noqa: PTH104 - as in staged_path
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


class staged_path:  # noqa: N801 - reads as a statement: `with staged_path(path) as temporary:`
    """A temporary name beside `path` that becomes `path` when the block succeeds.

    The block writes and fsyncs the temporary file (or fills a temporary directory). At its end the file is
    renamed and the directory is fsynced; after an exception nothing is left.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")

    def __enter__(self) -> Path:
        return self.temporary

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            remove_path(self.temporary)
            return
        try:
            os.rename(self.temporary, self.path)  # noqa: PTH104 - must fail on a non-empty directory
        except OSError:
            remove_path(self.temporary)
            raise
        sync_directory(self.path.parent)


def sync_directory(directory: Path) -> None:
    """Make renames and new names in `directory` durable."""
    _fsync_path(directory, os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Make durable what other processes have written into a file."""
    _fsync_path(path)


def _fsync_path(path: Path, flags: int = 0) -> None:
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_path(path: Path) -> None:
    """Remove a file or a directory tree; a missing one is fine."""
    if path.is_dir() and not path.is_symlink():
        for child in path.iterdir():
            remove_path(child)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def make_private_dir(path: Path) -> Path:
    """Make `path` and its missing parents, readable by their owner alone and durable; return `path`."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was faster
            directory.mkdir(mode=0o700)
        sync_directory(directory.parent)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "exists and is not a directory", str(path))
    return path


def publish_json(path: Path, value: Any, *, mode: int = 0o600) -> None:
    """Publish `value` as readable JSON."""
    publish_file(path, json.dumps(value, indent=2, sort_keys=True) + "\n", mode=mode)


def expand_path(path: str) -> Path:
    """Return the path with a leading `~` and variables expanded; an unknown user and unset variables stay."""
    return Path(os.path.expandvars(os.path.expanduser(path)))  # noqa: PTH111 - Path.expanduser raises for unknown users


def find_variables(text: str) -> list[str]:
    """Return the names of the variables that a text has as $NAME or ${NAME}."""
    return re.findall(r"\$\{?([A-Za-z_]\w*)", text)


def is_file(path: Path) -> bool:
    """Return whether a path names a file; a name that is too long for the file system does not."""
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises for a name that is too long


def is_directory(path: Path) -> bool:
    """Return whether a path names a directory; a name that is too long does not."""
    return os.path.isdir(path)  # noqa: PTH112 - Path.is_dir raises for a name that is too long


def read_json(path: Path) -> Any:
    """Return the JSON value in `path`; the caller knows its shape. One that is nested too deep is a ValueError too."""
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deep") from None


def parse_json_lines(data: bytes, *, note_damage: Callable[[], object] = do_nothing) -> Iterator[dict[str, Any]]:
    """Yield the complete JSON objects in `data`, one per line; for torn and foreign lines `note_damage` is called.

    Numbers that are too large to compute with are NaN.
    """
    for line in data.split(b"\n"):
        if not line:
            continue
        try:
            value = load_json(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            yield value
        else:
            note_damage()


def measure_file(path: Path) -> int:
    """Return the size of a file; 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


def read_last_line(path: Path) -> str:
    """Return the last line of a log that is not blank: of a traceback, the error."""
    if (lines := _read_end(path, 4096)) is None:
        return _NO_LOG
    return next((line for line in reversed(lines) if line.strip()), "")[:MAX_LINE_CHARS]


def read_error_line(path: Path) -> str:
    """Return the error with which a process ended: the first line of a message that has several, or the last line.

    Errors of CUDA end with hints about debugging, those of C++ with frames. torch puts the rank before each line.
    """
    if (lines := _read_end(path, 1 << 16)) is None:
        return _NO_LOG
    lines = [_RANK_PREFIX.sub("", line) for line in lines if line.strip()]
    for number in reversed(range(len(lines))):
        if lines[number].startswith(_TRACEBACK):
            message = (line for line in lines[number + 1 :] if not line[0].isspace())
            return next(message, lines[-1])[:MAX_LINE_CHARS]
        if lines[number].lstrip().startswith(_CPP_MESSAGE):
            return lines[number].strip().removeprefix(_CPP_MESSAGE).strip()[:MAX_LINE_CHARS]
    return (lines[-1] if lines else "")[:MAX_LINE_CHARS]


def _read_end(path: Path, num_bytes: int) -> list[str] | None:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(path.stat().st_size - num_bytes, 0))
        return file.read().decode(errors="replace").split("\n")
    return None
