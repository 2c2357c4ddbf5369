"""One checkpoint from several ranks, written behind training: they meet in a directory and never wait for each other.

    begun       rank 0: where the parts of a checkpoint are left
    leave       another rank: write its part there, and then say so
    Together    rank 0: its own part, and those of the others once they are there

No collective: the ranks train on meanwhile, and what they tell each other then must not get out of step.
"""

import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from hpcrl.system.files import discard, private_dir, publish, sync_directory, sync_file
from hpcrl.trainers.base import Writable

LOOK_S = 0.02
WAIT_S = 1800.0
"""Longer than this no rank writes its part."""


def begun(checkpoints: Path) -> Path:
    """A directory of a name that no earlier life of this trainer used; `checkpoint.prune` clears what is left of it."""
    private_dir(checkpoints)
    directory = checkpoints / f".parts-{secrets.token_hex(6)}.tmp"
    directory.mkdir(mode=0o700)
    return directory


def leave(state: Writable, directory: Path, *, rank: int) -> None:
    """Write a rank's part, durable, then its mark, which also tells rank 0 what went wrong."""
    own, error = directory / f"rank-{rank}", ""
    try:
        own.mkdir(mode=0o700)
        state.write(own)
        for path in own.iterdir():
            sync_file(path)
        sync_directory(own)
    except OSError as found:
        error = str(found) or type(found).__name__
        discard(own)  # a full disk must have room for the mark
    publish(_mark(directory, rank), error.encode())


@dataclass(frozen=True)
class Together:
    """The state of all ranks."""

    own: Writable
    directory: Path
    """Where the others leave theirs."""
    size: int

    def write(self, directory: Path) -> None:
        """Rank 0's part, then the others' moved beside it."""
        self.own.write(directory)
        for rank in range(1, self.size):
            self._await(rank)
            for path in (self.directory / f"rank-{rank}").iterdir():
                path.rename(directory / path.name)
        discard(self.directory)

    def _await(self, rank: int) -> None:
        mark, deadline = _mark(self.directory, rank), time.monotonic() + WAIT_S
        while not mark.exists():
            if time.monotonic() > deadline:
                raise OSError(f"rank {rank} has not written its part within {WAIT_S:g} s: see its log")
            time.sleep(LOOK_S)
        if error := mark.read_text():
            raise OSError(f"rank {rank}: {error}")


def _mark(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.done"
