"""Journal of the running episodes of an env worker, from which a restarted worker records what was lost.

    EpisodeJournal   the running episodes, on disk
    reserve_block    reserves a block of task numbers that no env worker has used, in this run or an earlier one

A line is one write(2) on an O_APPEND descriptor: after a kill, everything is there except at most a torn last line.
"""

import json
import os
from collections.abc import Collection
from pathlib import Path

from hpcrl.rollout.groups import format_end_line, format_start_line, replay_journal
from hpcrl.system.files import parse_json_lines, publish_file

MAX_JOURNAL_BYTES = 4 << 20
"""The size in bytes above which the journal is rewritten with only the running episodes."""


class EpisodeJournal:
    """The journal of one env worker; `open` it before recording anything."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._size = 0

    def open(self) -> set[str]:
        """Start a new journal; return the episodes that the previous run left running."""
        try:
            lost = replay_journal(parse_json_lines(self._path.read_bytes()))
        except FileNotFoundError:
            lost = set()
        self._rewrite([])
        return lost

    def record_start(self, episodes: Collection[str]) -> None:
        """Record that episodes start."""
        self._append_line(format_start_line(episodes))

    def record_end(self, episode: str, *, running: Collection[str]) -> None:
        """Record that an episode ended; `running` are those that have not."""
        self._append_line(format_end_line(episode))
        if self._size > MAX_JOURNAL_BYTES:
            self._rewrite(running)

    def close(self) -> None:
        os.close(self._fd)

    def _append_line(self, line: dict[str, object]) -> None:
        self._size += os.write(self._fd, json.dumps(line).encode() + b"\n")

    def _rewrite(self, running: Collection[str]) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        publish_file(self._path, json.dumps(format_start_line(running)) + "\n")
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._size = 0


def reserve_block(directory: Path, *, env_index: int) -> int:
    """Reserve a block for this env worker; return its number."""
    block = 0
    while True:
        try:
            os.close(os.open(directory / f"{env_index}-{block}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            block += 1
        else:
            return block
