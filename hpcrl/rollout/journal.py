"""What an env host has under way, on disk: so that its next life can book what this one did not live to book.

    EpisodeJournal   what runs
    reserve_block    a block of task numbers that no host and no earlier life of this one has used

A line is one write(2) on an O_APPEND descriptor: after a kill, all of it is there but at most a torn last line.
"""

import json
import os
from collections.abc import Collection
from pathlib import Path

from hpcrl.rollout.groups import format_end_line, format_start_line, replay_journal
from hpcrl.system.files import parse_json_lines, publish_file

MAX_JOURNAL_BYTES = 4 << 20
"""Bytes after which the journal is written anew, with only what still runs."""


class EpisodeJournal:
    """The journal of one env host; `open` it before anything is noted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._size = 0

    def open(self) -> set[str]:
        """Begin a new life; returns the episodes that the last one left running."""
        try:
            lost = replay_journal(parse_json_lines(self._path.read_bytes()))
        except FileNotFoundError:
            lost = set()
        self._rewrite([])
        return lost

    def record_start(self, episodes: Collection[str]) -> None:
        """Note that episodes begin."""
        self._append_line(format_start_line(episodes))

    def record_end(self, episode: str, *, running: Collection[str]) -> None:
        """Note that an episode was booked; `running` are those that were not."""
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
    """The number of a block that is this host's from now on."""
    block = 0
    while True:
        try:
            os.close(os.open(directory / f"{env_index}-{block}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            block += 1
        else:
            return block
