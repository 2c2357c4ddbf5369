"""What env hosts ask of training for the sake of old episodes."""

import time
from pathlib import Path

import msgspec
import pytest

from hpcrl.rollout import flow_control
from hpcrl.rollout.flow_control import HOLD_TIMEOUT_S, HoldWriter, InFlightVersions, StalenessHold, may_publish


@pytest.fixture
def host() -> InFlightVersions:
    """One old episode and one young one run; versions may be one apart."""
    host = InFlightVersions()
    host.start("old", version=3)
    host.start("young", version=4)
    return host


def limit(host: InFlightVersions, *, newest: int = 4) -> int | None:
    return host.limit(newest=newest, max_lag=1)


def test_training_is_asked_not_to_make_the_oldest_too_old(host: InFlightVersions) -> None:
    assert limit(host) == 4


def test_the_next_oldest_counts_once_the_oldest_is_durable(host: InFlightVersions) -> None:
    host.mark_kept("old")
    host.mark_leaving("old")
    assert limit(host) == 4
    host.drop("old")
    assert limit(host) == 5


def test_a_host_on_which_only_old_ones_run_asks_for_nothing(host: InFlightVersions) -> None:
    host.drop("young")
    assert limit(host) is None


def test_what_old_ones_kept_is_cut_with_them_but_what_goes_to_the_disk_is_awaited(host: InFlightVersions) -> None:
    host.start("kept", version=3)
    host.mark_kept("kept")
    host.drop("young")
    assert limit(host) is None
    host.mark_leaving("kept")
    assert limit(host) == 4


def test_what_is_too_old_already_is_not_waited_for(host: InFlightVersions) -> None:
    assert limit(host, newest=6) is None


def test_an_engine_that_was_behind_makes_an_episode_older(host: InFlightVersions) -> None:
    host.drop("old")
    host.record_version("young", version=4)
    assert limit(host) == 5
    host.start("another", version=4)
    host.record_version("another", version=3)
    host.record_version("another", version=4)
    assert limit(host) == 4


def test_an_unknown_episode_is_let_be(host: InFlightVersions) -> None:
    host.record_version("evaluation", version=0)
    host.drop("evaluation")
    assert limit(host) == 4


def test_training_goes_on_as_far_as_every_host_lets_it(tmp_path: Path) -> None:
    words = [tmp_path / "a", tmp_path / "b", tmp_path / "of a host that has said nothing"]
    HoldWriter(words[0]).write(7, now=0.0)
    HoldWriter(words[1]).write(None, now=0.0)
    assert may_publish(words, version=7)
    assert not may_publish(words, version=8)


def test_a_word_is_written_when_it_changes_and_now_and_then(tmp_path: Path) -> None:
    word = tmp_path / "word"
    telling = HoldWriter(word)
    telling.write(7, now=0.0)
    word.unlink()
    telling.write(7, now=flow_control.RENEW_INTERVAL_S)
    assert not word.exists()
    telling.write(8, now=flow_control.RENEW_INTERVAL_S)
    assert not may_publish([word], version=9)
    word.unlink()
    telling.write(8, now=2.1 * flow_control.RENEW_INTERVAL_S)
    assert word.exists()


def test_a_dead_host_stops_nobody(tmp_path: Path) -> None:
    word = tmp_path / "word"
    word.write_bytes(msgspec.json.encode(StalenessHold(limit=7, at=time.time() - HOLD_TIMEOUT_S - 1)))
    assert may_publish([word], version=8)
    assert flow_control.RENEW_INTERVAL_S < HOLD_TIMEOUT_S / 2, "a living one says it in time"
