"""Holds by which env workers delay training for old episodes, and the rewards that training waits for."""

import time
from pathlib import Path

import msgspec
import pytest

from hpcrl.rollout import flow_control
from hpcrl.rollout.flow_control import (
    HOLD_TIMEOUT_S,
    HoldWatch,
    HoldWriter,
    InFlightVersions,
    RewardWatch,
    SettledCount,
    SettledWriter,
    StalenessHold,
    TrainerProgress,
    find_start_versions,
    should_await_rewards,
)
from hpcrl.spool.listing import list_segments
from hpcrl.spool.writer import DiskSpoolWriter, link_segment
from hpcrl.weights.versions import WeightVersion, announce_version
from tests.support.clocks import SettableClock
from tests.support.trajectories import make_trajectory


@pytest.fixture
def in_flight() -> InFlightVersions:
    """One old episode and one young one that run; versions may be one apart."""
    in_flight = InFlightVersions()
    in_flight.start("old", version=3)
    in_flight.start("young", version=4)
    return in_flight


def limit(in_flight: InFlightVersions, *, newest: int = 4) -> int | None:
    return in_flight.limit(newest=newest, max_lag=1)


def test_training_is_held_before_it_makes_the_oldest_too_old(in_flight: InFlightVersions) -> None:
    assert limit(in_flight) == 4


def test_an_episode_is_as_old_as_it_may_be_until_its_first_turn_ends(in_flight: InFlightVersions) -> None:
    in_flight.record_version("old", version=4)
    assert limit(in_flight) == 5
    in_flight.record_version("old", version=5)
    assert limit(in_flight) == 5, "only its first turn makes it younger"
    in_flight.record_version("old", version=3)
    assert limit(in_flight) == 4


def test_the_next_oldest_counts_once_the_oldest_is_durable(in_flight: InFlightVersions) -> None:
    in_flight.mark_kept("old")
    in_flight.mark_leaving("old")
    assert limit(in_flight) == 4
    in_flight.drop("old")
    assert limit(in_flight) == 5


def test_a_worker_with_only_old_episodes_holds_nothing(in_flight: InFlightVersions) -> None:
    in_flight.drop("young")
    assert limit(in_flight) is None


def test_old_kept_episodes_are_cut_but_those_being_written_are_awaited(in_flight: InFlightVersions) -> None:
    in_flight.start("kept", version=3)
    in_flight.mark_kept("kept")
    in_flight.drop("young")
    assert limit(in_flight) is None
    in_flight.mark_leaving("kept")
    assert limit(in_flight) == 4


def test_an_episode_already_too_old_is_not_waited_for(in_flight: InFlightVersions) -> None:
    assert limit(in_flight, newest=6) is None


def test_an_engine_that_was_behind_makes_an_episode_older(in_flight: InFlightVersions) -> None:
    in_flight.drop("old")
    in_flight.record_version("young", version=4)
    assert limit(in_flight) == 5
    in_flight.start("another", version=4)
    in_flight.record_version("another", version=3)
    in_flight.record_version("another", version=4)
    assert limit(in_flight) == 4


def test_an_unknown_episode_is_ignored(in_flight: InFlightVersions) -> None:
    in_flight.record_version("evaluation", version=0)
    in_flight.drop("evaluation")
    assert limit(in_flight) == 4


def test_training_continues_as_far_as_every_hold_allows(tmp_path: Path) -> None:
    holds = [tmp_path / "a", tmp_path / "b", tmp_path / "missing"]
    HoldWriter(holds[0]).write(7, now=0.0)
    HoldWriter(holds[1]).write(None, now=0.0)
    assert HoldWatch().may_publish(holds, version=7)
    assert not HoldWatch().may_publish(holds, version=8)


def test_a_hold_is_written_when_it_changes_and_renewed_regularly(tmp_path: Path) -> None:
    path = tmp_path / "word"
    writer = HoldWriter(path)
    writer.write(7, now=0.0)
    path.unlink()
    writer.write(7, now=flow_control.RENEW_INTERVAL_S)
    assert not path.exists()
    writer.write(8, now=flow_control.RENEW_INTERVAL_S)
    assert not HoldWatch().may_publish([path], version=9)
    path.unlink()
    writer.write(8, now=2.1 * flow_control.RENEW_INTERVAL_S)
    assert path.exists()


def test_a_dead_worker_does_not_stop_training(tmp_path: Path) -> None:
    path = tmp_path / "word"
    path.write_bytes(msgspec.json.encode(StalenessHold(limit=7, at=time.time() - HOLD_TIMEOUT_S - 1)))
    assert HoldWatch().may_publish([path], version=8)
    assert flow_control.RENEW_INTERVAL_S < HOLD_TIMEOUT_S / 2, "a live worker renews it in time"


def test_a_dead_worker_with_a_hold_of_the_future_stops_training_no_longer_than_another(tmp_path: Path) -> None:
    """Its clock was ahead, or that of the trainer was set back."""
    path, clock = tmp_path / "word", SettableClock()
    path.write_bytes(msgspec.json.encode(StalenessHold(limit=7, at=time.time() + 6 * 3600)))
    watch = HoldWatch(clock=clock)
    assert not watch.may_publish([path], version=8)
    clock.now = HOLD_TIMEOUT_S + 1
    assert watch.may_publish([path], version=8)
    path.write_bytes(msgspec.json.encode(StalenessHold(limit=7, at=time.time() + 6 * 3600 + 10)))
    assert not watch.may_publish([path], version=8), "it is alive"


def test_the_newest_version_is_known_from_its_announcement_or_from_its_weights(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    progress = TrainerProgress(weights=tmp_path / "weights", settled=tmp_path / "settled.json")
    seen = []

    def poll() -> None:
        progress.poll()
        seen.append((progress.newest_version, dict(progress.settled)))

    poll()
    announce_version(tmp_path / "weights", WeightVersion(version=2, step=2))
    poll()
    writer = SettledWriter(tmp_path / "settled.json")
    writer.write(SettledCount(num=16, version=3, workers={"env-0": 16}))
    poll()
    writer.write(
        SettledCount(num=16, version=0, workers={"env-0": 16})
    )  # of a trainer that restarted: no version is taken back
    poll()
    assert seen == [(0, {}), (2, {}), (3, {"env-0": 16}), (3, {"env-0": 16})]


class RewardSpools:
    """Groups of two that are durable, and a watch of their rewards."""

    def __init__(self, root: Path) -> None:
        self.rollouts, self.scored, self.clock = root / "rollouts", root / "scored", SettableClock()
        self.scored.mkdir()
        self.watch = RewardWatch(self.rollouts, self.scored, patience_s=60.0, clock=self.clock)

    def seal(self, group: int, *, version: int) -> None:
        writer = DiskSpoolWriter(self.rollouts, producer=f"000-env-{group}")
        writer.append(*(make_trajectory(f"lake/{group}/{index}", version=version + index) for index in range(2)))
        writer.flush()

    def list_versions(self) -> list[int]:
        return sorted(self.watch.list_versions(consumed=()))


@pytest.fixture
def spools(tmp_path: Path) -> RewardSpools:
    spools = RewardSpools(tmp_path)
    spools.seal(0, version=3)
    spools.seal(1, version=4)
    return spools


def test_the_rewards_of_a_group_are_missing_until_its_segment_has_a_scored_twin(spools: RewardSpools) -> None:
    assert spools.list_versions() == [3, 4]
    link_segment(spools.rollouts / list_segments(spools.rollouts)[0], spools.scored)
    assert spools.list_versions() == [4]


def test_training_waits_for_a_reward_that_never_comes_no_longer_than_one_may_take(spools: RewardSpools) -> None:
    assert spools.list_versions() == [3, 4]
    spools.clock.now = 61.0
    spools.seal(2, version=5)
    assert spools.list_versions() == [5]


def test_training_does_not_wait_for_the_rewards_of_segments_that_are_damaged_or_gone(spools: RewardSpools) -> None:
    first, second = (spools.rollouts / name for name in list_segments(spools.rollouts))
    first.write_bytes(b"damaged")
    second.unlink()
    assert spools.list_versions() == []


def test_a_group_with_a_member_that_cannot_be_trained_on_has_no_reward_to_wait_for() -> None:
    failed = make_trajectory("lake/0/0", version=3, status="env-fault")
    assert find_start_versions([failed, make_trajectory("lake/0/1", version=3), make_trajectory("lake/1/0")]) == [0]


@pytest.mark.parametrize(
    ("unscored", "chosen", "waits"),
    [
        ([3], [4], True),
        ([3], [3, 4], True),
        ([3], [3, 3], False),
        ([2], [4], False),
        ([4], [4], False),
        ([], [4], False),
    ],
)
def test_training_waits_for_rewards_that_would_come_too_late_while_younger_groups_are_trained_on(
    unscored: list[int], chosen: list[int], waits: bool
) -> None:
    members = [make_trajectory(version=version) for version in chosen]
    assert should_await_rewards(unscored, members, version=4, max_lag=1) == waits
