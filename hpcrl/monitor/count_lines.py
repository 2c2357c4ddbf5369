"""Leave out lines of counts before they are parsed: workers write them all the time, and few of them are needed. Pure.

    drop_superseded    of counts of episodes that follow each other, return the last
    CountSampling      the same, but for those by which rates and the newest steps are measured: for a first look
    CountThinning      the same, but for as many as a report of the whole time shows

The counts of an env worker increase until its process ends, so that each line has what the one before has. A new
process first writes that it has started, and has fewer episodes; both end what may be left out. The loads of an engine
do not add up, but the monitor shows those of the last minutes alone.
"""

import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from hpcrl.monitor.progress import MAX_ENGINE_WINDOW_S, RATE_WINDOW_S

SAMPLE_SHARE = 0.1
"""The time of which one line of counts is kept, as a share of its age: what is measured by step has this resolution."""
RECENT_INTERVAL_S = 10.0
"""The same in seconds within the window of rates, through which time moves on while a campaign is watched."""
ENGINE_HISTORY_S = 6 * MAX_ENGINE_WINDOW_S
"""The age of an engine's load from which on it hardly counts: it is halved with each window."""
NUM_THINNED, MAX_THINNED_INTERVAL_S = 600, 20.0
"""The lines of counts of a worker that a report keeps at least, and the longest time of which it keeps only one."""
_COUNTS = re.compile(rb'\{"time": (\d{1,12})(?:\.\d+)?, "event": "(?:engine"|episodes".*?"done": (\d{1,16}))')


class _LineMark(NamedTuple):
    """The mark of a line of counts: it is left out if the next one has the same interval, and no fewer episodes."""

    interval: Hashable
    num_done: int


def drop_superseded(data: bytes, touched: float) -> bytes:
    """Return the lines without those of counts of episodes that the next line has again, and more of."""
    lines = data.split(b"\n")
    found = map(_COUNTS.match, lines)
    return _join_needed(lines, [_LineMark("", int(one[2])) if one and one[2] else None for one in found])


@dataclass(frozen=True, kw_only=True)
class CountSampling:
    """The choice of lines for a look at this time."""

    now: float

    def choose(self, data: bytes, touched: float) -> bytes:
        """Return the lines of a file, last touched at this time, without most of those of counts."""
        lines = data.split(b"\n")
        return _join_needed(lines, [self._mark_line(line, touched) for line in lines])

    def _mark_line(self, line: bytes, touched: float) -> _LineMark | None:
        """Return the mark of a line; None for one that is needed itself."""
        found = _COUNTS.match(line)
        if found is None:
            return None
        time, num_done = int(found[1]), found[2]
        if num_done is None:
            return _LineMark("engine", 0) if time < touched - ENGINE_HISTORY_S else None
        age = self.now - time
        if age < RATE_WINDOW_S:
            return _LineMark((True, age // RECENT_INTERVAL_S), int(num_done))
        return _LineMark((False, math.log(age) // math.log1p(SAMPLE_SHARE)), int(num_done))


@dataclass(frozen=True, kw_only=True)
class CountThinning:
    """The choice of lines for a report of a campaign that was made at this time."""

    created: float

    def choose(self, data: bytes, touched: float) -> bytes:
        """Return the lines of a file, last touched at this time, without counts that are close to the next."""
        interval_s = min((touched - self.created) / NUM_THINNED, MAX_THINNED_INTERVAL_S)
        if interval_s <= 1.0:  # workers write no more often
            return data
        lines = data.split(b"\n")
        found = map(_COUNTS.match, lines)
        marks = [_LineMark(int(one[1]) // interval_s, int(one[2])) if one and one[2] else None for one in found]
        return _join_needed(lines, marks)


def _join_needed(lines: Sequence[bytes], marks: Sequence[_LineMark | None]) -> bytes:
    """Return the lines without those that the next one has again."""
    kept = [
        line for line, (own, following) in zip(lines, pairwise(marks), strict=False) if not _has_again(following, own)
    ]
    return b"\n".join([*kept, lines[-1]])


def _has_again(later: _LineMark | None, earlier: _LineMark | None) -> bool:
    if later is None or earlier is None:
        return False
    return later.interval == earlier.interval and later.num_done >= earlier.num_done
