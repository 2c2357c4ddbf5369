"""For how long the KV of a trajectory is worth keeping while its environment is at work. Pure.

keep_s    the best time to live, given how long such pauses were
Pauses    the pauses of one kind of tool (a domain), as a grid of quantiles
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

MIN_SAMPLES = 100
"""With fewer pauses seen, nothing is said of the next."""
NUM_SAMPLES = 512
NUM_QUANTILES = 32


def keep_s(quantiles: Sequence[float], *, saving_s: float) -> float:
    """The time to live t that maximises P(pause <= t) * saving_s - t; `quantiles` are of the pauses, ascending.

    A second of kept KV is counted as dear as a second of computing it anew. 0: it is not worth it.
    """
    num = len(quantiles)
    gains = ((saving_s * (index + 1) / num - seconds, seconds) for index, seconds in enumerate(quantiles))
    gain, seconds = max(gains, default=(0.0, 0.0))
    return seconds if gain > 0 else 0.0


@dataclass
class Pauses:
    """The last pauses between the turns of a domain's trajectories."""

    quantiles: list[float] = field(default_factory=list)
    """Empty until there are enough."""
    _recent: deque[float] = field(default_factory=deque)
    _sorted: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        if len(self._recent) == NUM_SAMPLES:
            self._sorted.remove(self._recent.popleft())
        self._recent.append(seconds)
        insort(self._sorted, seconds)
        num = len(self._sorted)
        if num >= MIN_SAMPLES and num % NUM_QUANTILES == 0:
            self.quantiles = [self._sorted[(index + 1) * num // NUM_QUANTILES - 1] for index in range(NUM_QUANTILES)]
