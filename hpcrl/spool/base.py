"""The protocols of a spool: what a writer and a reader offer, whatever stores the trajectories."""

from typing import Protocol

from hpcrl.spool.reader import EVERYTHING, TrajectoryFilter
from hpcrl.spool.record import Trajectory


class SpoolWriter(Protocol):
    """One producer's way into a spool. Every method may be called from any thread."""

    def append(self, trajectory: Trajectory) -> None:
        """Take a trajectory into memory. An error means that it was not taken."""

    def flush_due(self) -> list[str]:
        """Begin to write the batch if it is full or old; call it now and then.

        Returns the ids that became durable and were not told yet. It waits only for a batch that is still being
        written when the next is due. An error is that of an earlier batch, which is kept and tried again later.
        """

    def flush(self) -> list[str]:
        """Make all that was taken durable; returns every id not told yet. An error loses nothing; call again."""

    def close(self) -> list[str]:
        """`flush`, then take no more."""


class SpoolReader(Protocol):
    """One consumer's way out of a spool. What `where` does not admit is passed over for good."""

    def poll(self, where: TrajectoryFilter = EVERYTHING) -> list[Trajectory]:
        """Trajectories that became durable since the last call, each once."""

    def take(self, num: int, where: TrajectoryFilter = EVERYTHING) -> list[Trajectory]:
        """The next `num` of them, or as many as there are; the others wait for the next call."""

    @property
    def num_duplicates(self) -> int:
        """How many were dropped because their episode had been delivered."""
