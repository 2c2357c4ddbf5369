"""What an env host has under way, on disk: so that its next life can book what this one did not live to book.

    Journal          what runs
    reserve_block    a block of task numbers that no host and no earlier life of this one has used

A line is one write(2) on an O_APPEND descriptor: after a kill, all of it is there but at most a torn last line.
"""

import json
import os
from collections.abc import Collection
from pathlib import Path

from hpcrl.rollout.groups import begun, ended, replay
from hpcrl.system.files import json_lines, publish

LARGEST = 4 << 20
"""Bytes after which the journal is written anew, with only what still runs."""


class Journal:
    """The journal of one env host; `open` it before anything is noted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._size = 0

    def open(self) -> set[str]:
        """Begin a new life; returns the episodes that the last one left running."""
        try:
            lost = replay(json_lines(self._path.read_bytes()))
        except FileNotFoundError:
            lost = set()
        self._start_anew([])
        return lost

    def begun(self, episodes: Collection[str]) -> None:
        """Note that episodes begin."""
        self._note(begun(episodes))

    def ended(self, episode: str, *, running: Collection[str]) -> None:
        """Note that an episode was booked; `running` are those that were not."""
        self._note(ended(episode))
        if self._size > LARGEST:
            self._start_anew(running)

    def close(self) -> None:
        os.close(self._fd)

    def _note(self, line: dict[str, object]) -> None:
        self._size += os.write(self._fd, json.dumps(line).encode() + b"\n")

    def _start_anew(self, running: Collection[str]) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        publish(self._path, json.dumps(begun(running)) + "\n")
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._size = 0


def reserve_block(directory: Path, *, host: int) -> int:
    """The number of a block that is this host's from now on."""
    block = 0
    while True:
        try:
            os.close(os.open(directory / f"{host}-{block}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            block += 1
        else:
            return block
