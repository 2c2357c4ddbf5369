"""Append-only JSON-lines events, one file a process; what they say is in hpcrl.campaign_dir.events.

A line is written by one write(2) on an O_APPEND descriptor, so a killed process tears at most its own last line.
Every line has `time` (seconds since the epoch), `event`, and who wrote it: `job`, `role`, `worker`, `node`.
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
from hpcrl.system.files import parse_json_lines


class EventLog:
    """The events of one process."""

    def __init__(self, path: Path, **origin: Any) -> None:
        self.path = path
        self._origin = origin
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def emit(self, event: CampaignEvent) -> None:
        """Append one event."""
        line = build_line(event, time=round(time.time(), 3), origin=self._origin)
        os.write(self._fd, json.dumps(line).encode() + b"\n")

    def beat(self) -> None:
        """Say "alive" without a line: touch the file."""
        os.utime(self._fd)

    def close(self) -> None:
        os.close(self._fd)


@dataclass
class EventReader:
    """Reads what is new in a directory of event files, each call from where the last one ended."""

    directory: Path
    pattern: str = "*.jsonl"
    """Of which files."""
    touched: dict[str, float] = field(default_factory=dict)
    """When each file (by its name without .jsonl) was last written or touched, as of the last call."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Why a file could not be read at the last call."""
    offsets: dict[str, int] = field(default_factory=dict)
    """How many bytes of each file have been read; whoever keeps them can go on there in another process."""

    def poll(self) -> Iterator[CampaignEvent]:
        """New events, file by file; a line still being written waits for the next call, one of no use is skipped."""
        return (event for line in self.poll_lines() if (event := parse_event(line)) is not None)

    def poll_lines(self) -> Iterator[dict[str, Any]]:
        """The same as they are written, of whatever kind."""
        self.unreadable.clear()
        for path in sorted(self.directory.glob(self.pattern)):
            try:
                data = self._new_data(path)
            except OSError as error:  # another process's file: what can be read of the others still counts
                self.unreadable[path.name] = error.strerror or str(error)
                continue
            yield from parse_json_lines(data)

    def _new_data(self, path: Path) -> bytes:
        """The complete lines that were added to one file."""
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


def read_events(directory: Path) -> list[dict[str, Any]]:
    """All lines of a campaign so far, in order of time."""
    return sorted(EventReader(directory).poll_lines(), key=lambda event: float(event.get("time", 0.0)))
