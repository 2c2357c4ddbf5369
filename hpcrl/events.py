"""Append-only JSON-lines events, one file a process; the monitor and the tests read nothing else.

A line is written by one write(2) on an O_APPEND descriptor, so a killed process tears at most its own last line.
Every line has `time` (seconds since the epoch), `event`, and who wrote it: `job`, `role`, `worker`, `node`.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrl.files import json_lines


class EventLog:
    """The events of one process."""

    def __init__(self, path: Path, **who: Any) -> None:
        self.path = path
        self._who = who
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def emit(self, event: str, **fields: Any) -> None:
        """Append one event."""
        line = json.dumps({"time": round(time.time(), 3), "event": event, **self._who, **fields})
        os.write(self._fd, line.encode() + b"\n")

    def beat(self) -> None:
        """Say "alive" without a line: touch the file."""
        os.utime(self._fd)

    def close(self) -> None:
        os.close(self._fd)


@dataclass
class EventReader:
    """Reads what is new in a directory of event files, each call from where the last one ended."""

    directory: Path
    _offsets: dict[str, int] = field(default_factory=dict)

    def poll(self) -> Iterator[dict[str, Any]]:
        """New events, file by file; a line still being written waits for the next call."""
        if not self.directory.is_dir():
            return
        for path in sorted(self.directory.glob("*.jsonl")):
            offset = self._offsets.get(path.name, 0)
            if path.stat().st_size <= offset:
                continue
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
            end = data.rfind(b"\n") + 1
            self._offsets[path.name] = offset + end
            yield from json_lines(data[:end])


def read_events(directory: Path) -> list[dict[str, Any]]:
    """All events of a campaign so far, in order of time."""
    return sorted(EventReader(directory).poll(), key=lambda event: float(event.get("time", 0.0)))
