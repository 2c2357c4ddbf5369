"""Follow files of a shared file system with few operations, and read them in spite of errors that pass.

retry_passing   call a function again after an error that passes
is_there        whether a path exists, asked like that
is_passing, is_full   whether an error may pass, or is that of a file system without room
is_outage       whether a file system that gave an error may work again: it was away, full, or read-only
is_denied       whether this user may not do what was tried
names_full_disk, names_outage    whether a text, or the last line of a process, names such an error
describe_outage, advise_on_outage    what users read about it
PollPace        when to look again: ever more rarely while nothing changes
PathWatch       notices that a file, or the names in a directory, may have changed
WatchedValue    what was read from a path, read again after a change
NameWatch       the names in a directory
PASSING_ERRORS, PATIENCE_S, RETRY_TIMEOUT_S, REREAD_INTERVAL_S, SETTLE_S, FIRST_RETRY_S   limits
MAX_PAUSE_S, LONG_PAUSE_S, PAUSE_SHARE   more of them

A campaign has hundreds of processes that wait for small files, and one server for the metadata of all of them. So a
file is read again only after one stat has found a change, and the pause between two stats is a share of the time since
the last change. The client of a network file system may answer a stat, or report a name as absent, from its memory:
opening a file, and listing a directory, ask the server. That is done from time to time in any case.
"""

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

PASSING_ERRORS = frozenset(
    {
        errno.ESTALE,
        errno.EIO,
        errno.ESHUTDOWN,
        errno.ETIMEDOUT,
        errno.EAGAIN,
        errno.EINTR,
        errno.ENOTCONN,
        errno.EREMOTEIO,
    }
)
"""Errors of a network file system whose server was replaced, restarted, or lost for a while."""
PATIENCE_S = 300.0
"""The time for which a value that was read before is used while reading fails; then the error is raised."""
RETRY_TIMEOUT_S = 10.0
"""The time for which a single read is tried again."""
REREAD_INTERVAL_S = 15.0
"""The time after which a path is read again without a change: longer than most clients remember, and below a drain."""
SETTLE_S = 2.0
"""Time stamps may be this coarse: so long after a change, another one may have left the same stamp."""
FIRST_RETRY_S = 0.1
MAX_PAUSE_S = 2.0
LONG_PAUSE_S = 5.0
"""The longest pause for what is rare, or also known in another way: new engines, files of the weights."""
PAUSE_SHARE = 0.1
"""The pause between two stats, as a share of the time since the last change."""


def is_passing(error: OSError) -> bool:
    """Return whether an error may pass by itself."""
    return error.errno in PASSING_ERRORS


def is_full(error: OSError) -> bool:
    """Return whether a file system has no room left, or none for this user."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_outage(error: OSError) -> bool:
    """Return whether a file system may work again that gave this error: it was away, full, or read-only."""
    return is_passing(error) or is_full(error) or error.errno == errno.EROFS


def is_denied(error: OSError) -> bool:
    """Return whether this user may not do what was tried: another try is refused too."""
    return error.errno in (errno.EACCES, errno.EPERM)


def names_full_disk(text: str) -> bool:
    """Return whether a text names the error of a disk that is full, or of a quota that is used up."""
    return any(os.strerror(error) in text for error in (errno.ENOSPC, errno.EDQUOT))


def names_outage(text: str) -> bool:
    """Return whether a process with this last line ended since the file system took nothing, not even the line."""
    return "lost sys.stderr" in text or names_full_disk(text) or os.strerror(errno.EROFS) in text


def describe_outage(error: OSError) -> str:
    """Return a message for users about an error of `is_outage` or `is_denied`, with what to do."""
    where = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror}{where}: {advise_on_outage(error)}"


def advise_on_outage(error: OSError) -> str:
    """Return what to do about a file system that is full, read-only or away, or where this user may not write."""
    if is_denied(error):
        return "you may not write there now: `ls -ld` shows who may, and the owner changes it (`chmod u+w`)"
    if is_full(error):
        return (
            "free space, or raise the quota (`hpcrl gc` lists what campaigns no longer need), then repeat the command"
        )
    return "the file system takes no changes now, or is away: repeat the command when it works again"


def retry_passing(
    action: Callable[[], T], *, timeout_s: float = RETRY_TIMEOUT_S, passes: Callable[[OSError], bool] = is_passing
) -> T:
    """Call `action`; after an error that `passes` call it again, for up to `timeout_s`."""
    deadline, pause_s = time.monotonic() + timeout_s, FIRST_RETRY_S
    while True:
        try:
            return action()
        except OSError as error:
            if not passes(error) or time.monotonic() + pause_s > deadline:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def is_there(path: Path) -> bool:
    """Return whether a path exists; if the file system still gives an error after some tries, it counts as absent."""
    try:
        return retry_passing(path.exists)
    except OSError:
        return False


class PollPace:
    """The time to look again; the pause grows with the time since the last change."""

    def __init__(self, *, longest_s: float = MAX_PAUSE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_s = longest_s
        self._clock = clock
        self._next = float("-inf")
        self.changed_at = clock()

    def is_due(self) -> bool:
        """Return whether it is time to look; the next pause starts with it."""
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + min(PAUSE_SHARE * (now - self.changed_at), self._longest_s)
        return True

    def note_change(self) -> None:
        """Note that what was looked at has changed: the next look comes soon."""
        self.changed_at = self._next = self._clock()


class PathWatch:
    """Notices that a file, or the names in a directory, may have changed."""

    def __init__(
        self, path: Path, *, longest_s: float = MAX_PAUSE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Stat the path at least every `longest_s`, if it is asked for often enough."""
        self._path = os.fspath(path)
        self._clock = clock
        self._pace = PollPace(longest_s=longest_s, clock=clock)
        self._seen: tuple[int, int, int] | None = None
        self._read_at = float("-inf")

    def expect_change(self) -> None:
        """Look at the next call."""
        self._pace.note_change()

    def has_changed(self) -> bool:
        """Return whether the path must be read now: after a change, from time to time, and at first."""
        if not self._pace.is_due():
            return False
        now = self._clock()
        is_old = now - self._read_at >= REREAD_INTERVAL_S
        seen = self._look(is_old=is_old)
        is_other = seen != self._seen
        if is_other:
            self._seen = seen
            self._pace.note_change()
        is_unsettled = now - self._pace.changed_at < SETTLE_S
        if not (is_other or is_old or is_unsettled):
            return False
        self._read_at = now
        return True

    def _look(self, *, is_old: bool) -> tuple[int, int, int] | None:
        """Return what identifies the present content; None if the path is absent or cannot be looked at."""
        try:
            if is_old and self._seen is None:
                os.listdir(os.path.dirname(self._path) or ".")  # noqa: PTH208, PTH120 - asks the server
            facts = os.stat(self._path)  # noqa: PTH116 - every process does it all the time
        except OSError:
            return None
        return facts.st_ino, facts.st_mtime_ns, facts.st_size


class WatchedValue(Generic[T]):
    """The value that `read` returns, read again after a change of the path; it may be asked for from any thread.

    While reading fails with an error that passes, the last value stays in use.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[], T],
        *,
        longest_s: float = MAX_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._clock = clock
        self._watch = PathWatch(path, longest_s=longest_s, clock=clock)
        self._values: list[T] = []
        """The last value; empty before the first."""
        self._failing_since: float | None = None
        self._lock = threading.Lock()

    def expect_change(self) -> None:
        """Look for a change at the next call."""
        self._watch.expect_change()

    def poll(self) -> T:
        """Return the value as of the last change that was noticed."""
        with self._lock:
            if not self._values:
                self._values = [retry_passing(self._read)]
            elif self._failing_since is not None or self._watch.has_changed():
                self._read_again()
            return self._values[0]

    def _read_again(self) -> None:
        try:
            self._values = [self._read()]
            self._failing_since = None
        except OSError as error:
            now = self._clock()
            self._failing_since = now if self._failing_since is None else self._failing_since
            if not is_passing(error) or now - self._failing_since > PATIENCE_S:
                raise


class NameWatch:
    """The names in a directory; none while it is missing."""

    def __init__(
        self, directory: Path, *, longest_s: float = MAX_PAUSE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = directory
        self._names = WatchedValue(directory, self._list, longest_s=longest_s, clock=clock)

    def expect_change(self) -> None:
        """Look for a change at the next call."""
        self._names.expect_change()

    def names(self) -> frozenset[str]:
        """Return the names that are there."""
        return self._names.poll()

    def _list(self) -> frozenset[str]:
        try:
            return frozenset(os.listdir(self._directory))  # noqa: PTH208 - names
        except FileNotFoundError:
            return frozenset()
