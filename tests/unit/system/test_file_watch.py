"""Shared files are looked at by one stat, ever more rarely, and read in spite of errors that pass."""

import errno
import os
from collections import Counter
from pathlib import Path

import pytest

from hpcrl.system import file_watch
from hpcrl.system.file_watch import NameWatch, PathWatch, PollPace, WatchedValue, retry_passing
from tests.support.clocks import SettableClock

SHARE = file_watch.PAUSE_SHARE


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SettableClock:
    monkeypatch.setattr(file_watch, "PAUSE_SHARE", SHARE)
    return SettableClock(1000.0)


@pytest.fixture
def num_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of the file system."""
    counts: Counter[str] = Counter()
    for name in ("stat", "listdir"):
        call = getattr(os, name)

        def count(*args, name=name, call=call):
            counts[name] += 1
            return call(*args)

        monkeypatch.setattr(os, name, count)
    return counts


def poll_for(seconds: float, clock: SettableClock, look) -> list:
    """Look ten times a second."""
    seen = []
    for _ in range(round(seconds * 10)):
        clock.now += 0.1
        seen.append(look())
    return seen


def test_a_quiet_file_is_looked_at_once_in_the_longest_pause(tmp_path, clock, num_calls):
    (tmp_path / "a").write_text("1")
    watch = PathWatch(tmp_path / "a", longest_s=2.0, clock=clock)
    poll_for(60, clock, watch.has_changed)
    num_calls.clear()
    poll_for(60, clock, watch.has_changed)
    assert 25 <= num_calls["stat"] <= 31


def test_a_quiet_directory_is_listed_only_to_ask_the_server_itself(tmp_path, clock, num_calls):
    watch = NameWatch(tmp_path, clock=clock)
    poll_for(60, clock, watch.names)
    num_calls.clear()
    poll_for(60, clock, watch.names)
    assert num_calls["listdir"] == 60 // file_watch.REREAD_INTERVAL_S


def test_a_change_is_seen_within_a_share_of_the_time_since_the_last(tmp_path, clock):
    path = tmp_path / "a"
    path.write_text("1")
    value = WatchedValue(path, path.read_text, longest_s=100.0, clock=clock)
    poll_for(10, clock, value.poll)
    path.write_text("22")
    seen = poll_for(1.2, clock, value.poll)
    assert seen[-1] == "22"


def test_two_changes_with_one_time_stamp_are_both_seen(tmp_path, clock):
    path = tmp_path / "a"
    path.write_text("1")
    value = WatchedValue(path, path.read_text, clock=clock)
    value.poll()
    os.utime(path, ns=(0, 0))
    poll_for(0.5, clock, value.poll)
    path.write_text("2")
    os.utime(path, ns=(0, 0))
    assert poll_for(0.5, clock, value.poll)[-1] == "2"


def test_an_absent_file_is_looked_for_by_listing_its_directory(tmp_path, clock, num_calls):
    """The client of a network file system believes that a name is absent until its directory is read."""
    watch = PathWatch(tmp_path / "absent", clock=clock)
    poll_for(60, clock, watch.has_changed)
    assert num_calls["listdir"] >= 60 // file_watch.REREAD_INTERVAL_S


def test_the_last_value_is_used_while_reading_fails_for_a_while(tmp_path, clock):
    path, errors = tmp_path / "a", []

    def read() -> str:
        if errors:
            raise errors[0]
        return path.read_text()

    path.write_text("1")
    value = WatchedValue(path, read, clock=clock)
    value.poll()
    errors.append(OSError(errno.ESTALE, "stale"))
    path.write_text("22")
    assert set(poll_for(60, clock, value.poll)) == {"1"}
    errors.clear()
    assert poll_for(1, clock, value.poll)[-1] == "22"
    errors.append(OSError(errno.EIO, "lost"))
    path.write_text("333")
    with pytest.raises(OSError, match="lost"):
        poll_for(file_watch.PATIENCE_S + 60, clock, value.poll)


def test_an_error_that_does_not_pass_is_raised_at_once(tmp_path, clock):
    with pytest.raises(NotADirectoryError):
        WatchedValue(tmp_path, lambda: list(Path(__file__).iterdir()), clock=clock).poll()


def test_a_read_is_tried_again_after_an_error_that_passes():
    errors = [OSError(errno.ESTALE, "stale"), OSError(errno.EIO, "lost")]

    def read() -> int:
        if errors:
            raise errors.pop()
        return 7

    assert retry_passing(read) == 7


def test_a_pace_is_fast_again_after_a_change(clock):
    pace = PollPace(longest_s=5.0, clock=clock)
    poll_for(120, clock, pace.is_due)
    assert sum(poll_for(20, clock, pace.is_due)) == 4
    pace.note_change()
    assert pace.is_due()
    assert sum(poll_for(1, clock, pace.is_due)) == 10
