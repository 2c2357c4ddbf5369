"""Flow control between env workers and the trainer: two small files close a loop in which neither calls the other.

- settled.json (trainer -> env workers): how many trajectories of each env worker are settled (trained on, dropped, or
  seen twice), and the version of the weights from which that is so. Env workers subtract it from what is durable: the
  difference still waits for training, and admission starts that many fewer groups.
- N-hold.json (env worker N -> trainer): the version that the trainer should not pass yet, since a later one would make
  running episodes of this worker too old.

Training thus frees room for new episodes, and running episodes delay training; each side reads only its own input, as
often as it likes, and a file that is missing (or old, of a killed env worker) holds up neither side.

    SettledCount, SettledWriter, read_settled   the trainer's half
    TrainerProgress                             how far the trainer is, as an env worker reads it
    InFlightState, InFlightVersions             the versions at which a worker's unfinished episodes started
    StalenessHold, HoldWriter                   an env worker's hold, and how it is written
    allows_version                              whether one env worker's hold lets training continue
    HoldWatch                                   whether the holds of all env workers let training continue
    RewardWatch                                 the durable groups that have no reward yet
    find_start_versions                         the versions at which groups started that may be trained on
    should_await_rewards                        whether a step should wait for rewards of older groups

An episode that is cut for its age is wasted, and if every long one were cut, only short tasks would be trained on.
Training therefore waits while old episodes end, but only while their worker has others to play: when only old ones
run there, waiting would cost more than cutting. A hold ends when its episodes are durable; the trainer sees by itself
which of these have no reward yet, and waits for them too.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from hpcrl.errors import SpoolError
from hpcrl.rollout.groups import GroupOutcome
from hpcrl.spool.listing import SegmentListing
from hpcrl.spool.record import TRAINABLE, TrajectoryFacts
from hpcrl.spool.segment import read_facts
from hpcrl.system.file_watch import LONG_PAUSE_S, WatchedValue
from hpcrl.system.files import replace_file
from hpcrl.system.processes import do_nothing
from hpcrl.weights.versions import find_newest_version

RENEW_INTERVAL_S = 10.0
"""The interval at which an env worker writes its hold again."""
HOLD_TIMEOUT_S = 30.0
"""The age above which a hold is ignored: its env worker may be dead."""

InFlightState = Literal["running", "kept", "leaving"]


class SettledCount(msgspec.Struct, frozen=True, kw_only=True):
    """The content of settled.json."""

    num: int = 0
    """Trajectories since the campaign started that neither wait for training nor are being trained on."""
    version: int = 0
    """The trainer's version; it may still be on its way to the engines."""
    workers: dict[str, int] = {}
    """The same number by the env worker that played them."""


class SettledWriter:
    """The trainer's settled.json, written when it changes."""

    def __init__(self, path: Path, *, on_change: Callable[[], object] = do_nothing) -> None:
        """Write to `path`; `on_change` is called when something else was written."""
        self._path = path
        self._on_change = on_change
        self._written: SettledCount | None = None

    def write(self, settled: SettledCount) -> None:
        """Publish the count to all env workers; on a full file system, with a later call."""
        if settled != self._written:
            with contextlib.suppress(OSError):  # an older count only lets fewer episodes start
                replace_file(self._path, msgspec.json.encode(settled))
                self._written = settled
                self._on_change()


def read_settled(path: Path) -> SettledCount:
    """Read how much the trainer has settled; 0 until it has written the file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=SettledCount)
    except (FileNotFoundError, msgspec.DecodeError):  # a crash of the machine may leave an empty file
        return SettledCount()


class TrainerProgress:
    """The newest version and what is settled; the version may be announced before its weights are readable."""

    def __init__(self, *, weights: Path, settled: Path) -> None:
        self._settled = WatchedValue(settled, lambda: read_settled(settled))
        self._newest = WatchedValue(weights, lambda: find_newest_version(weights), longest_s=LONG_PAUSE_S)
        self.newest_version = 0
        self.settled: Mapping[str, int] = {}
        """The trajectories that are settled, by the env worker that played them."""

    def expect_change(self) -> None:
        """Look for changes at the next call."""
        self._settled.expect_change()
        self._newest.expect_change()

    def poll(self) -> None:
        """Read what has changed."""
        settled = self._settled.poll()
        self.settled = settled.workers
        self.newest_version = max(self.newest_version, settled.version, self._newest.poll() or 0)


class InFlightVersions:
    """The episodes that one env worker has in flight, by the version at which they started. Pure."""

    def __init__(self) -> None:
        self._episodes: dict[str, tuple[InFlightState, int]] = {}
        self._unseen: set[str] = set()
        """Episodes of which no turn has ended."""
        self._counts: dict[InFlightState, Counter[int]] = {
            "running": Counter(),
            "kept": Counter(),
            "leaving": Counter(),
        }

    def start(self, episode: str, *, version: int) -> None:
        """Record an episode that starts with this version or a later one."""
        self._put(episode, "running", version)
        self._unseen.add(episode)

    def record_version(self, episode: str, *, version: int) -> None:
        """Record the version that an engine used: with the first an episode has started, a later one may be older."""
        known = self._episodes.get(episode)
        if known is not None and (version < known[1] or episode in self._unseen):
            self._put(episode, known[0], version)

    def mark_kept(self, episode: str) -> None:
        """Mark an episode that has ended and waits for others of its group."""
        self._put(episode, "kept", self._episodes[episode][1])

    def mark_leaving(self, episode: str) -> None:
        """Mark an episode whose group is full and being written to disk."""
        self._put(episode, "leaving", self._episodes[episode][1])

    def drop(self, episode: str) -> None:
        """Forget an episode that is durable, or that will not be used."""
        known = self._episodes.pop(episode, None)
        self._unseen.discard(episode)
        if known is not None:
            self._uncount(*known)

    def end(self, episode: str, *, is_kept: bool) -> None:
        """Record the end of an episode."""
        if is_kept:
            self.mark_kept(episode)
        else:
            self.drop(episode)

    def apply(self, outcome: GroupOutcome) -> None:
        """Record what an ending means for the other episodes of its group."""
        for kept in outcome.released:
            self.mark_leaving(kept.id)
        for dropped in outcome.dropped:
            self.drop(dropped)

    def limit(self, *, newest: int, max_lag: int) -> int | None:
        """Return the version that training should not pass yet; None for no limit."""
        oldest_useful = newest - max_lag
        starts = {state: [start for start in num if start >= oldest_useful] for state, num in self._counts.items()}
        has_other_work = any(start > oldest_useful for start in starts["running"])
        counted = starts["leaving"] + starts["running"] + starts["kept"]
        if not has_other_work:
            counted = [start for start in counted if start > oldest_useful or start in starts["leaving"]]
        return min(counted) + max_lag if counted else None

    def _put(self, episode: str, state: InFlightState, version: int) -> None:
        self.drop(episode)
        self._episodes[episode] = state, version
        self._counts[state][version] += 1

    def _uncount(self, state: InFlightState, version: int) -> None:
        self._counts[state][version] -= 1
        if not self._counts[state][version]:
            del self._counts[state][version]


class StalenessHold(msgspec.Struct, frozen=True, kw_only=True):
    """The hold of one env worker, as stored."""

    limit: int | None
    at: float
    """Seconds since the epoch."""


class HoldWriter:
    """Writes an env worker's hold when it changes, and every RENEW_INTERVAL_S to show that the worker is alive."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written_limit: int | None = None
        self._written_at = float("-inf")

    def write(self, limit: int | None, *, now: float) -> bool:
        """Write the hold if that is due; return whether the limit has changed. `now` is by the caller's clock."""
        is_other = limit != self._written_limit
        is_due = limit is not None and now - self._written_at > RENEW_INTERVAL_S  # without a limit, old is as good
        if is_other or is_due or self._written_at == float("-inf"):
            with contextlib.suppress(OSError):  # a full file system: training does not wait for this worker
                replace_file(self._path, msgspec.json.encode(StalenessHold(limit=limit, at=time.time())))
                self._written_limit, self._written_at = limit, now
        return is_other and self._written_limit == limit


def allows_version(limit: int | None, version: int) -> bool:
    """Return whether an env worker with this limit lets training continue to a version."""
    return limit is None or version <= limit


class HoldWatch:
    """The holds of env workers, as the trainer reads them; one that is not renewed, of a killed worker, is void.

    A hold may be of the future, by a clock that has jumped since: one that does not change is void as well.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Path, tuple[StalenessHold, float]] = {}
        """The last hold of each worker, and when it was new."""

    def may_publish(self, paths: list[Path], *, version: int) -> bool:
        """Return whether the holds of all env workers allow this version."""
        return all([self._is_allowed(path, version) for path in paths])  # all are looked at

    def _is_allowed(self, path: Path, version: int) -> bool:
        try:
            hold = msgspec.json.decode(path.read_bytes(), type=StalenessHold)
        except (OSError, msgspec.DecodeError):  # an env worker without a readable hold waits for nothing
            return True
        seen, since = self._seen.get(path, (None, 0.0))
        if hold != seen:
            since = self._clock()
            self._seen[path] = hold, since
        is_void = max(time.time() - hold.at, self._clock() - since) > HOLD_TIMEOUT_S
        return is_void or allows_version(hold.limit, version)


class RewardWatch:
    """The durable groups that have no reward yet, as the trainer reads them; each is waited for only so long."""

    def __init__(
        self, rollouts: Path, scored: Path, *, patience_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = rollouts
        self._rollouts, self._scored = SegmentListing(rollouts), SegmentListing(scored)
        self._patience_s = patience_s
        self._clock = clock
        self._seen: dict[str, tuple[float, list[int]]] = {}
        """Segments without a twin: the time at which each was first seen, and the start versions of its groups."""

    def list_versions(self, *, consumed: Container[str]) -> list[int]:
        """Return the versions at which groups started whose rewards may come soon."""
        try:
            names = self._rollouts.name_set() - self._scored.name_set()
        except OSError:  # a spool that cannot be listed is reported by its reader
            return []
        now = self._clock()
        for name in self._seen.keys() - names:
            del self._seen[name]
        for name in names - self._seen.keys():
            with contextlib.suppress(SpoolError):  # it is damaged, was retired, or is not visible here yet
                self._seen[name] = now, find_start_versions(read_facts(self._directory / name), consumed=consumed)
        return [
            version
            for seen_at, versions in self._seen.values()
            if now - seen_at <= self._patience_s
            for version in versions
        ]


def find_start_versions(members: Iterable[TrajectoryFacts], *, consumed: Container[str] = ()) -> list[int]:
    """Return the version of the oldest member of each group that may be trained on."""
    groups: dict[str, list[TrajectoryFacts]] = {}
    for one in members:
        groups.setdefault(one.group, []).append(one)
    return [
        min(one.start_version for one in group)
        for group in groups.values()
        if all(one.status in TRAINABLE and one.id not in consumed for one in group)
    ]


def should_await_rewards(
    unscored: Collection[int], chosen: Iterable[TrajectoryFacts], *, version: int, max_lag: int
) -> bool:
    """Return whether a step should wait for the rewards of groups that started with these versions.

    It should if they would be too old after it, and take the places of younger ones in it.
    """
    oldest_useful = version - max_lag
    return oldest_useful in unscored and any(one.start_version > oldest_useful for one in chosen)
