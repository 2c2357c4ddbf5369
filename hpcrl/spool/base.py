"""The protocols of a spool: its writers and its readers, whatever stores the trajectories.

SpoolWriter   append, flush_due, flush, close
SpoolReader   poll, take
"""

from typing import Protocol

from hpcrl.spool.reader import EVERYTHING, TrajectoryFilter
from hpcrl.spool.record import Trajectory


class SpoolWriter(Protocol):
    """A producer's access to a spool. Every method may be called from any thread."""

    def append(self, trajectory: Trajectory) -> None:
        """Hold a trajectory in memory. After an error it is not held."""

    def flush_due(self) -> list[str]:
        """Start to write the batch if it is full or old; to be called regularly.

        Returns the ids that became durable and were not returned yet. It waits only for a batch that is still being
        written when the next is due. An error is that of an earlier batch, which is kept and tried again later.
        """

    def flush(self) -> list[str]:
        """Make all that is held durable; returns every id not returned yet. An error loses nothing; call again."""

    def close(self) -> list[str]:
        """Refuse further trajectories, then `flush`."""


class SpoolReader(Protocol):
    """A consumer's access to a spool. A trajectory that `where` does not admit is skipped for good."""

    def poll(self, where: TrajectoryFilter = EVERYTHING) -> list[Trajectory]:
        """Return the trajectories that became durable since the last call, each once."""

    def take(self, num: int, where: TrajectoryFilter = EVERYTHING) -> list[Trajectory]:
        """Return the next `num` of them, or all if there are fewer; the rest wait for the next call."""

    @property
    def num_duplicates(self) -> int:
        """The number of trajectories dropped because their episode had been delivered."""
