"""The books of episodes: each one that is begun ends in them exactly once, under one of six headings. Pure.

Accounts    what runs, what ended and how; a second ending of the same episode is no ending
replay      the accounts that lines of a journal lead to, so that a new life of a host knows what the last one left

A retry is not an ending: the episode goes on running. What ran when a host died is booked by its next life, as an
infrastructure fault: the agent had no part in it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from hpcrl.spool.record import Status


class Accounts:
    """The books of one env host."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        """Episodes that have not ended, those being aborted included: they hold their place until they have."""
        self.endings: Counter[Status] = Counter()
        """Episodes that ended, by how."""
        self.num_begun = 0
        self.num_late = 0
        """Endings that came twice, or for an episode that never began here; they changed nothing."""

    @property
    def balanced(self) -> bool:
        """Whether every episode that was begun runs or has ended once."""
        return self.num_begun == len(self.running) + self.endings.total()

    def begin(self, episodes: Iterable[str]) -> None:
        """Book the beginning of episodes."""
        new = set(episodes)
        assert not new & self.running, f"episodes begun twice: {sorted(new & self.running)}"
        self.running |= new
        self.num_begun += len(new)

    def end(self, episode: str, status: Status) -> bool:
        """Book the end of an episode; False for one that is not running, which changes nothing."""
        if episode not in self.running:
            self.num_late += 1
            return False
        self.running.remove(episode)
        self.endings[status] += 1
        return True

    def lose(self, episodes: Iterable[str]) -> int:
        """Book what a dead host was running; returns how many there were."""
        lost = set(episodes)
        self.begin(lost)
        for episode in lost:
            self.end(episode, "env-fault")
        return len(lost)


def begun(episodes: Iterable[str]) -> dict[str, Any]:
    """The journal's line for episodes that begin."""
    return {"begin": list(episodes)}


def ended(episode: str) -> dict[str, Any]:
    """The journal's line for an episode that was booked."""
    return {"end": episode}


def replay(lines: Iterable[Mapping[str, Any]]) -> set[str]:
    """The episodes that were begun and never booked, by the journal; a torn last line is as good as none."""
    running: set[str] = set()
    for line in lines:
        running.update(line.get("begin", ()))
        running.discard(line.get("end", ""))
    return running
