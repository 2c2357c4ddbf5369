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
NUM_THINNED_OF_ALL, MAX_CROWDED_INTERVAL_S = 40_000, 200.0
"""The same for all workers of a job together: of many, each has fewer."""
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
        return _LineMark(self.find_interval(time), int(num_done))

    def find_interval(self, time: float) -> Hashable:
        """Return the mark of the interval of a time: those that are long ago are longer."""
        age = self.now - time
        if age < RATE_WINDOW_S:
            return (True, age // RECENT_INTERVAL_S)
        return (False, math.log(age) // math.log1p(SAMPLE_SHARE))


@dataclass(frozen=True, kw_only=True)
class CountThinning:
    """The choice of lines for a report, made now, of a campaign."""

    duration_s: float
    """The time from its creation to its newest counts."""
    now: float
    num_workers: int = 1
    """The most env workers that a job had."""

    def choose(self, data: bytes, touched: float) -> bytes:
        """Return the lines of a file without counts that are close to the next."""
        del touched
        interval_s = self.find_interval()
        if interval_s <= 1.0:  # workers write no more often
            return data
        sampling = CountSampling(now=self.now)
        first_recent = self.now - interval_s / SAMPLE_SHARE
        lines = data.split(b"\n")
        marks: list[_LineMark | None] = []
        for found in map(_COUNTS.match, lines):
            if found is None or found[2] is None:
                marks.append(None)
            elif (time := int(found[1])) < first_recent:
                marks.append(_LineMark(time // interval_s, int(found[2])))
            else:
                marks.append(_LineMark(sampling.find_interval(time), int(found[2])))
        return _join_needed(lines, marks)

    def find_interval(self) -> float:
        """Return the seconds of which one line of a worker is kept."""
        own_s = min(self.duration_s / NUM_THINNED, MAX_THINNED_INTERVAL_S)
        return max(own_s, min(self.duration_s * self.num_workers / NUM_THINNED_OF_ALL, MAX_CROWDED_INTERVAL_S))


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
