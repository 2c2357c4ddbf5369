"""The event files of a campaign: append-only JSON lines, one file a process, of hpcrl.campaign_dir.events.

EventLog     append events
EventReader  read new events
find_worker_node   the node on which a worker has last run

A line is written by one write(2) on an O_APPEND descriptor, so a killed process tears at most its own last line.
Every line has `time` (seconds since the epoch), `event`, and its writer: `job`, `role`, `worker`, `node`.
"""

import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrl.campaign_dir.events import CampaignEvent, build_line, parse_event
from hpcrl.campaign_dir.paths import CampaignDir, make_worker_name
from hpcrl.system.files import parse_json_lines

EVENT_SUFFIX = ".jsonl"
TAIL_BYTES = 1 << 16


class EventLog:
    """The event file of one process."""

    def __init__(self, path: Path, **origin: Any) -> None:
        self.path = path
        self._origin = origin
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @classmethod
    def open(cls, campaign: CampaignDir, *name: str | int, job: int, role: str, **origin: Any) -> "EventLog":
        """Open the log of one worker of a job; `name` is its role and its index or node."""
        worker = make_worker_name(job, *name)
        return cls(campaign.events / f"{worker}{EVENT_SUFFIX}", job=job, role=role, worker=worker, **origin)

    def emit(self, event: CampaignEvent) -> None:
        """Append one event."""
        line = build_line(event, time=round(time.time(), 3), origin=self._origin)
        os.write(self._fd, json.dumps(line).encode() + b"\n")

    def beat(self) -> None:
        """Touch the file, as a heartbeat."""
        os.utime(self._fd)

    def close(self) -> None:
        os.close(self._fd)


@dataclass
class EventReader:
    """A reader of a directory of event files; each call continues where the last one ended."""

    directory: Path
    pattern: str = f"*{EVENT_SUFFIX}"
    """Pattern of the files to read."""
    touched: dict[str, float] = field(default_factory=dict)
    """Time when each file (by its name without .jsonl) was last written or touched, as of the last call."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Files that could not be read at the last call, with the reason."""
    offsets: dict[str, int] = field(default_factory=dict)
    """Bytes read of each file; another process can continue with them."""

    @classmethod
    def for_role(cls, directory: Path, role: str, *, job: int | None = None) -> "EventReader":
        """Return a reader of the workers of one role, in one job or in all."""
        number = "*" if job is None else make_worker_name(job)
        return cls(directory, pattern=f"{number}-{role}-*{EVENT_SUFFIX}")

    def poll(self) -> Iterator[CampaignEvent]:
        """Return new events, file by file; incomplete lines wait for the next call, unknown ones are skipped."""
        return (event for line in self.poll_lines() if (event := parse_event(line)) is not None)

    def poll_lines(self) -> Iterator[dict[str, Any]]:
        """Yield new lines of every kind as dicts."""
        self.unreadable.clear()
        for path in sorted(self.directory.glob(self.pattern)):
            try:
                data = self._new_data(path)
            except OSError as error:  # one unreadable file must not hide the others
                self.unreadable[path.name] = error.strerror or str(error)
                continue
            yield from parse_json_lines(data)

    def _new_data(self, path: Path) -> bytes:
        """Return the complete lines that were added to one file."""
        facts = path.stat()
        self.touched[path.stem] = facts.st_mtime
        offset = self.offsets.get(path.name, 0)
        if facts.st_size <= offset or not stat.S_ISREG(facts.st_mode):
            return b""
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self.offsets[path.name] = offset + end
        return data[:end]


def find_worker_node(campaign: CampaignDir, job: int, role: str, index: int) -> str | None:
    """Return the node on which a worker has last run, by its newest event; None without one."""
    path = campaign.events / f"{make_worker_name(job, role, index)}{EVENT_SUFFIX}"
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - TAIL_BYTES, 0))
            lines = list(parse_json_lines(file.read()))
    except OSError:
        return None
    return next((str(line["node"]) for line in reversed(lines) if line.get("node")), None)
