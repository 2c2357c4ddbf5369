"""Journal of the tasks of an env worker: which were drawn, started and finished, so that its next run continues there.

    TaskJournal    the tasks of one env worker, on disk
    JournalState   what is in it: how many tasks were drawn, and those that have not ended
    OpenTask       one of those

A task is in the journal before its episodes run, and until a checkpoint of the trainer covers its group or it has
failed too often. What a killed run left before it was durable in the spool is started again by the next, with the same
number, seed and row; so is what the trainer dropped because it had become too old. Tasks are drawn in an order that the
recipe determines, so that lines which a crash of the machine lost only lead to the same draws again.

Lines are appended with write(2) to an O_APPEND descriptor: after a kill, everything is there except at most a torn last
line. Those that a full disk refuses are kept in memory, and no group is started until they are written.
"""

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.rollout.tasks import AgentTask, DrawProgress
from hpcrl.system.files import parse_json_lines, publish_file

MAX_JOURNAL_BYTES = 4 << 20
"""The size in bytes above which the journal is rewritten with only the open tasks."""
MAX_DURABLE_TASKS = 10_000
"""The number of tasks whose groups wait for a checkpoint above which the oldest are forgotten."""


class OpenTask(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A task that was drawn and has not ended."""

    task: AgentTask
    num_starts: int = 0
    """The starts of its group; those that were cancelled because it was not needed do not count."""
    released_at: float = 0.0
    """The time at which its group was full, in seconds since the epoch; 0 if it is not."""
    is_durable: bool = False
    """Its group is in the spool."""


class JournalState(msgspec.Struct, kw_only=True):
    """The state of an env worker's tasks."""

    draws: DrawProgress = msgspec.field(default_factory=DrawProgress)
    open: dict[str, OpenTask] = {}
    """The open tasks by group, in the order in which they were drawn."""

    def apply(self, line: Mapping[str, Any]) -> None:
        """Apply a line; one about an unknown task changes nothing."""
        match line:
            case {"draw": table, "weights": weights}:
                task = msgspec.convert(table, AgentTask)
                self.draws.record_draw(task, weights)
                self.open[task.group] = OpenTask(task=task)
            case {"end": group}:
                self.open.pop(group, None)
            case {"start": group} if group in self.open:
                self.open[group].num_starts += 1
            case {"release": group, "at": at} if group in self.open:
                self.open[group].released_at = at
            case {"durable": group} if group in self.open:
                self.open[group].is_durable = True
            case {"return": group, "counts": counts} if group in self.open:
                self.open[group].is_durable, self.open[group].released_at = False, 0.0
                self.open[group].num_starts -= not counts


class TaskJournal:
    """The journal of one env worker's tasks."""

    def __init__(self, path: Path) -> None:
        """Continue where the journal ends; without one, start it."""
        self._path = path
        self._fd = -1
        self._size = 0
        self._unwritten = b""
        self.state = _read_state(path)
        self._durable = {group: known.task for group, known in self.state.open.items() if known.is_durable}
        self._rewrite()

    def record_draw(self, task: AgentTask, weights: Mapping[str, float]) -> None:
        """Record that a task was drawn by these weights."""
        self._record({"draw": msgspec.to_builtins(task), "weights": dict(weights)})

    def record_start(self, task: AgentTask) -> int:
        """Record that the group of a task starts; return how often that is so now."""
        self._record({"start": task.group})
        return self.state.open[task.group].num_starts

    def record_release(self, task: AgentTask) -> None:
        """Record that the group of a task is full, and about to enter the spool."""
        self._record({"release": task.group, "at": time.time()})

    def record_durable(self, task: AgentTask) -> None:
        """Record that the group of a task is in the spool; the oldest of too many such tasks ends."""
        self._record({"durable": task.group})
        self._durable[task.group] = task
        if len(self._durable) > MAX_DURABLE_TASKS:
            self.record_end(next(iter(self._durable.values())))

    def record_return(self, task: AgentTask, *, counts: bool) -> int:
        """Record that a group has ended without its trajectories; return how often it was started.

        `counts` is False if that was only because it was not needed: this start is not counted.
        """
        self._durable.pop(task.group, None)
        self._record({"return": task.group, "counts": counts})
        return self.state.open[task.group].num_starts

    def record_end(self, task: AgentTask) -> None:
        """Record that a group is durable, or abandoned."""
        self._durable.pop(task.group, None)
        self._record({"end": task.group})
        if self._size > MAX_JOURNAL_BYTES and not self._unwritten:
            with contextlib.suppress(OSError):  # a full disk: the journal grows until there is room for a new one
                self._rewrite()

    @property
    def is_replaced(self) -> bool:
        """Return whether another process continues this journal: that of this one outlived its job."""
        try:
            return os.fstat(self._fd).st_nlink == 0
        except OSError:  # a stale handle: of a file that another node replaced
            return True

    def flush(self) -> bool:
        """Write lines that a full disk refused; return whether all are written."""
        try:
            while self._unwritten:
                written = os.write(self._fd, self._unwritten)
                self._size += written
                self._unwritten = self._unwritten[written:]
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Write what is left, if the disk allows it."""
        self.flush()
        os.close(self._fd)

    def _record(self, line: dict[str, Any]) -> None:
        self.state.apply(line)
        self._unwritten += msgspec.json.encode(line) + b"\n"
        self.flush()

    def _rewrite(self) -> None:
        publish_file(self._path, msgspec.json.encode({"state": self.state}) + b"\n")
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._size = 0


def _read_state(path: Path) -> JournalState:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return JournalState()
    state = JournalState()
    for line in parse_json_lines(data):
        with contextlib.suppress(msgspec.ValidationError, TypeError, ValueError):  # damage is skipped like a torn line
            if "state" in line:
                state = msgspec.convert(line["state"], JournalState)
            else:
                state.apply(line)
    return state
