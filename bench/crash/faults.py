"""Disks that are full, broken, slow to take, gone, and clocks that jump, under a writer and a reader at work.

Each scene returns what was wrong, in words. A scene in which the fault never struck returns that too.
"""

import errno
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from bench.crash.campaign import episode
from hpcrl.errors import SpoolError
from hpcrl.spool.reader import DiskSpoolReader
from hpcrl.spool.writer import BatchLimits, DiskSpoolWriter

_WRITES = ("write", "writev", "pwrite", "pwritev")
_DAY_S = 86_400.0
_MEAN_TOKENS = 3000
_PATIENCE_S = 30.0
"""A reader that has not found all by then never will."""


@dataclass
class Scene:
    """A writer, a reader, and what they reported."""

    directory: Path
    acknowledged: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_written: int = 0
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.writer = DiskSpoolWriter(
            self.directory, producer="000-env-0", batching=BatchLimits(max_count=3), clock=lambda: self.now
        )
        self.reader = DiskSpoolReader(self.directory, on_damage=lambda path, why: self.damage.append(f"{path}: {why}"))

    def write(self, num: int = 3) -> None:
        """Append a batch and flush it; an error is noted."""
        for _ in range(num):
            self.writer.append(episode(self.num_written, num_tokens=_MEAN_TOKENS))
            self.num_written += 1
        try:
            self.acknowledged += self.writer.flush()
        except SpoolError as error:
            self.errors.append(str(error))

    def read(self) -> None:
        try:
            self.found += [one.id for one in self.reader.poll()]
        except SpoolError as error:
            self.errors.append(str(error))

    def verdict(self, *, expected: str | None) -> list[str]:
        """The fault is over: everything must come out once. `expected`: what an error must have reported."""
        self.acknowledged += self.writer.close()
        deadline = time.monotonic() + _PATIENCE_S
        while len(self.found) < self.num_written and time.monotonic() < deadline:
            self.read()
            time.sleep(0.01)
        everything = {f"math/{number}/0" for number in range(self.num_written)}
        wrong = [f"unreadable: {what}" for what in self.damage]
        if set(self.acknowledged) != everything or sorted(self.found) != sorted(everything):
            wrong.append(f"{len(everything)} written, {len(set(self.acknowledged))} reported, {len(self.found)} read")
        if expected is not None and not any(expected in error for error in self.errors):
            wrong.append(f"no error contained {expected!r}: {self.errors}")
        if expected is None and self.errors:
            wrong.append(f"errors without a cause: {self.errors}")
        return wrong


def refused(directory: Path, *, calls: tuple[str, ...], code: int) -> list[str]:
    """The system refuses a call with an error until it is repaired."""
    scene = Scene(directory)
    scene.write()
    with _failing(calls, directory, lambda: OSError(code, os.strerror(code))):
        scene.write()
        scene.read()
        scene.write()
    scene.write()
    return scene.verdict(expected=os.strerror(code))


def largest_file(directory: Path, *, num_bytes: int) -> list[str]:
    """The kernel itself refuses, HDF5's own writes too."""
    scene = Scene(directory)
    scene.write()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        scene.write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    scene.read()
    return scene.verdict(expected=os.strerror(errno.EFBIG))


def short_writes(directory: Path) -> list[str]:
    """Every write takes a part of what it is given, as the system may."""
    scene = Scene(directory)
    with _short():
        for _ in range(3):
            scene.write()
            scene.read()
    return scene.verdict(expected=None)


def vanishing_directory(directory: Path) -> list[str]:
    """The spool is moved away under writer and reader, and comes back."""
    scene = Scene(directory)
    scene.write()
    scene.read()
    away = directory.with_name("away")
    directory.rename(away)
    scene.write()
    num_errors = len(scene.errors)
    deadline = time.monotonic() + _PATIENCE_S
    while len(scene.errors) == num_errors and time.monotonic() < deadline:
        scene.read()
        time.sleep(0.01)
    wrong = [] if (num_errors, len(scene.errors)) == (1, 2) else [f"writer and reader reported {scene.errors}"]
    if directory.exists():
        return [*wrong, "the directory was made again, so what was in it is forgotten"]
    away.rename(directory)
    return wrong + scene.verdict(expected=str(directory))


def clock_jumps(directory: Path) -> list[str]:
    """A day ahead, two days back: the system's clock, the writer's, and the directory's time."""
    scene = Scene(directory)
    for jump_s in (0.0, _DAY_S, -_DAY_S, 0.0):
        with mock.patch.multiple(
            time, time=_shifted(time.time, jump_s), time_ns=_shifted(time.time_ns, int(jump_s * 1e9))
        ):
            scene.now += jump_s
            scene.write()
            os.utime(directory, (time.time(), time.time()))
            scene.read()
    return scene.verdict(expected=None)


def scenes() -> dict[str, dict[str, Callable[[Path], list[str]]]]:
    """By the kind of fault that the table names."""
    return {
        "ENOSPC and EFBIG": {
            **_everywhere(errno.ENOSPC),
            **{f"largest file {size}": _sized(size) for size in (1, 1000, 3000, 20_000)},
        },
        "EIO": _everywhere(errno.EIO),
        "EDQUOT": _everywhere(errno.EDQUOT),
        "short writes": {"all": short_writes},
        "vanishing directory": {"moved": vanishing_directory},
        "clock jumps": {"a day": clock_jumps},
    }


def _everywhere(code: int) -> dict[str, Callable[[Path], list[str]]]:
    places = {"write": _WRITES, "fsync": ("fsync", "fdatasync"), "rename": ("rename", "replace"), "open": ("open",)}
    return {place: _refusing(calls, code) for place, calls in places.items()}


def _refusing(calls: tuple[str, ...], code: int) -> Callable[[Path], list[str]]:
    return lambda directory: refused(directory, calls=calls, code=code)


def _sized(num_bytes: int) -> Callable[[Path], list[str]]:
    return lambda directory: largest_file(directory, num_bytes=num_bytes)


@contextmanager
def _failing(calls: tuple[str, ...], directory: Path, error: Callable[[], OSError]) -> Iterator[None]:
    """These calls of `os` fail on what is in `directory`."""

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(what: Any, *args: Any, **options: Any) -> Any:
            path = f"/proc/self/fd/{what}" if isinstance(what, int) else what
            if os.path.realpath(path).startswith(str(directory)):
                raise error()
            return call(what, *args, **options)

        return failing

    wrapped: dict[str, Any] = {name: wrap(getattr(os, name)) for name in calls}
    with mock.patch.multiple(os, **wrapped):
        yield


@contextmanager
def _short() -> Iterator[None]:
    """Writes take at most 1,000 bytes of their first buffer."""
    write, writev, pwrite, pwritev = os.write, os.writev, os.pwrite, os.pwritev
    with mock.patch.multiple(
        os,
        write=lambda fd, data: write(fd, memoryview(data)[:1000]),
        writev=lambda fd, parts: writev(fd, [memoryview(parts[0])[:1000]]),
        pwrite=lambda fd, data, at: pwrite(fd, memoryview(data)[:1000], at),
        pwritev=lambda fd, parts, at, *flags: pwritev(fd, [memoryview(parts[0])[:1000]], at, *flags),
    ):
        yield


def _shifted(clock: Callable[[], Any], by: float) -> Callable[[], Any]:
    return lambda: clock() + by
