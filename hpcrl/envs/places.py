"""Memory on a host for environments in processes of their own: a bounded number of places, some for those made ahead.

Whoever runs holds a place for the whole of its episode, so that no deadline runs while it waits for one. Those made
ahead have places of their own and wait for none: else they could hold what the episodes before them need to end.
"""

import asyncio


class Places:
    """The environments in processes of their own that one host may have at once."""

    def __init__(self, most: int, *, ahead: int) -> None:
        """`ahead`: how many of them may be made before their episodes begin, if that leaves half to those that run."""
        assert most > 0, f"{most} places"
        self._num_free_ahead = min(ahead, most // 2)
        self.running = asyncio.Semaphore(most - self._num_free_ahead)
        """For `async with`: the place of one episode."""

    def reserve(self, wanted: int) -> int:
        """Places for environments made ahead: as many of those wanted as are free. `give_back` each of them."""
        given = min(wanted, self._num_free_ahead)
        self._num_free_ahead -= given
        return given

    def give_back(self) -> None:
        """One that was made ahead has its episode now, or is gone."""
        self._num_free_ahead += 1
