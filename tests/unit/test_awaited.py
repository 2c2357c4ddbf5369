"""What env hosts ask of training for the sake of old episodes."""

import time
from pathlib import Path

import msgspec
import pytest

from hpcrl.rollout import flow_control
from hpcrl.rollout.flow_control import STALE_S, Telling, UnderWay, Word, go_on


@pytest.fixture
def host() -> UnderWay:
    """One old episode and one young one run; versions may be one apart."""
    host = UnderWay()
    host.begin("old", version=3)
    host.begin("young", version=4)
    return host


def limit(host: UnderWay, *, newest: int = 4) -> int | None:
    return host.limit(newest=newest, max_lag=1)


def test_training_is_asked_not_to_make_the_oldest_too_old(host: UnderWay) -> None:
    assert limit(host) == 4


def test_the_next_oldest_counts_once_the_oldest_is_durable(host: UnderWay) -> None:
    host.keep("old")
    host.leave("old")
    assert limit(host) == 4
    host.drop("old")
    assert limit(host) == 5


def test_a_host_on_which_only_old_ones_run_asks_for_nothing(host: UnderWay) -> None:
    host.drop("young")
    assert limit(host) is None


def test_what_old_ones_kept_is_cut_with_them_but_what_goes_to_the_disk_is_awaited(host: UnderWay) -> None:
    host.begin("kept", version=3)
    host.keep("kept")
    host.drop("young")
    assert limit(host) is None
    host.leave("kept")
    assert limit(host) == 4


def test_what_is_too_old_already_is_not_waited_for(host: UnderWay) -> None:
    assert limit(host, newest=6) is None


def test_an_engine_that_was_behind_makes_an_episode_older(host: UnderWay) -> None:
    host.drop("old")
    host.acted("young", version=4)
    assert limit(host) == 5
    host.begin("another", version=4)
    host.acted("another", version=3)
    host.acted("another", version=4)
    assert limit(host) == 4


def test_an_unknown_episode_is_let_be(host: UnderWay) -> None:
    host.acted("evaluation", version=0)
    host.drop("evaluation")
    assert limit(host) == 4


def test_training_goes_on_as_far_as_every_host_lets_it(tmp_path: Path) -> None:
    words = [tmp_path / "a", tmp_path / "b", tmp_path / "of a host that has said nothing"]
    Telling(words[0]).tell(7, now=0.0)
    Telling(words[1]).tell(None, now=0.0)
    assert go_on(words, version=7)
    assert not go_on(words, version=8)


def test_a_word_is_written_when_it_changes_and_now_and_then(tmp_path: Path) -> None:
    word = tmp_path / "word"
    telling = Telling(word)
    telling.tell(7, now=0.0)
    word.unlink()
    telling.tell(7, now=flow_control.RENEW_S)
    assert not word.exists()
    telling.tell(8, now=flow_control.RENEW_S)
    assert not go_on([word], version=9)
    word.unlink()
    telling.tell(8, now=2.1 * flow_control.RENEW_S)
    assert word.exists()


def test_a_dead_host_stops_nobody(tmp_path: Path) -> None:
    word = tmp_path / "word"
    word.write_bytes(msgspec.json.encode(Word(limit=7, at=time.time() - STALE_S - 1)))
    assert go_on([word], version=8)
    assert flow_control.RENEW_S < STALE_S / 2, "a living one says it in time"
