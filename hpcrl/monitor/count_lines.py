"""Leave out lines of counts before they are parsed: workers write them all the time, and few of them are needed. Pure.

    drop_superseded    of counts of episodes that follow each other, return the last
    CountSampling      the same, but for those by which rates and the newest steps are measured: for a first look

The counts of an env worker increase until its process ends, so that each line has what the one before has. A new
process first writes that it has started, and that line ends what may be left out. The loads of an engine do not add
up, but the monitor shows those of the last minutes alone.
"""

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hpcrl.monitor.progress import MAX_ENGINE_WINDOW_S, RATE_WINDOW_S

SAMPLE_INTERVAL_S = 60.0
"""The time of which one line of counts is kept: what is measured by step has this resolution."""
RECENT_INTERVAL_S = 10.0
"""The same within the window of rates, through which time moves on while a campaign is watched."""
ENGINE_HISTORY_S = 6 * MAX_ENGINE_WINDOW_S
"""The age of an engine's load from which on it hardly counts: it is halved with each window."""
_COUNTS = re.compile(rb'\{"time": (\d{1,12})(?:\.\d+)?, "event": "(episodes|engine)"')


def drop_superseded(data: bytes, touched: float) -> bytes:
    """Return the lines without those of counts of episodes that the next line has again, and more of."""
    lines = data.split(b"\n")
    kinds = [found[2] if (found := _COUNTS.match(line)) else b"" for line in lines]
    return _join_unequal(lines, [kind if kind == b"episodes" else None for kind in kinds])


@dataclass(frozen=True, kw_only=True)
class CountSampling:
    """The choice of lines for a look at this time."""

    now: float

    def choose(self, data: bytes, touched: float) -> bytes:
        """Return the lines of a file, last touched at this time, without most of those of counts."""
        lines = data.split(b"\n")
        return _join_unequal(lines, [self._find_interval(line, touched) for line in lines])

    def _find_interval(self, line: bytes, touched: float) -> Hashable:
        """Return the interval whose last line is needed; None for a line that is needed itself."""
        found = _COUNTS.match(line)
        if found is None:
            return None
        time = int(found[1])
        if found[2] == b"engine":
            return b"engine" if time < touched - ENGINE_HISTORY_S else None
        age = self.now - time
        if age < RATE_WINDOW_S:
            return True, age // RECENT_INTERVAL_S
        return False, age // SAMPLE_INTERVAL_S


def _join_unequal(lines: Sequence[bytes], intervals: Sequence[Hashable]) -> bytes:
    """Return the lines without those that the next one is in the same interval with."""
    kept = [
        line
        for line, (own, following) in zip(lines, pairwise(intervals), strict=False)
        if own is None or own != following
    ]
    return b"\n".join([*kept, lines[-1]])
