"""Retirement archives or removes used segments, and a crash between any two steps does no harm."""

from pathlib import Path

import msgspec
import pytest

from hpcrl.errors import SpoolError
from hpcrl.spool import retention
from hpcrl.spool.listing import announce_changes, count_trajectories, list_segments
from hpcrl.spool.reader import DiskSpoolReader
from hpcrl.spool.record import EpisodeTurn
from hpcrl.spool.retention import (
    INTENT_FILE,
    SettledSegments,
    SpoolDirs,
    choose_retirable,
    prune_archive,
    recover_retirement,
    retire_segments,
)
from hpcrl.spool.segment import read_segment
from hpcrl.spool.writer import DiskSpoolWriter, derive_segment
from tests.support.trajectories import make_trajectory


def trajectory(name, version=0):
    turns = [EpisodeTurn(start=0, end=3, reward=0.5, generate_s=0.25)]
    return make_trajectory(name, 3, version=version, turns=turns, extra={"newer": [1, 2]})


class SettledCounts:
    """The number of settled trajectories in "rollouts" that the trainer reports to env workers."""

    def __init__(self, num):
        self.num = num

    def lower(self, segments):
        self.num = 0


def scored(one):
    return msgspec.structs.replace(one, reward=1.0)


def campaign(root, *, num_segments=3, per_segment=2):
    """Make spools with segments whose trajectories are all consumed."""
    dirs = SpoolDirs(rollouts=root / "rollouts", scored=root / "scored", archive=root / "archive")
    writer = DiskSpoolWriter(dirs.rollouts, producer="000-env-0")
    for number in range(num_segments):
        for index in range(per_segment):
            writer.append(trajectory(f"math/{number}/{index}", version=number))
        writer.flush()
    for name in list_segments(dirs.rollouts):
        derive_segment(dirs.rollouts / name, dirs.scored, scored)
    return dirs


def archived(dirs):
    return sorted(one.id for name in list_segments(dirs.archive) for one in read_segment(dirs.archive / name))


IDS = [f"math/{number}/{index}" for number in range(3) for index in range(2)]


def test_retired_segments_are_one_segment_of_the_archive(tmp_path):
    dirs = campaign(tmp_path)
    retire_segments(dirs, list_segments(dirs.scored), keep=True, lower_settled=SettledCounts(6).lower)
    assert list_segments(dirs.rollouts) == list_segments(dirs.scored) == []
    (name,) = list_segments(dirs.archive)
    assert name.startswith("versions-000000-000002-")
    assert archived(dirs) == IDS
    one = read_segment(dirs.archive / name)[0]
    assert (one.reward, one.extra, one.turns) == (1.0, {"newer": [1, 2]}, trajectory("x").turns)
    assert count_trajectories(list_segments(dirs.archive)) == 6
    assert not (dirs.archive / INTENT_FILE).exists()


def test_segments_that_are_not_kept_are_removed(tmp_path):
    dirs = campaign(tmp_path)
    retire_segments(dirs, list_segments(dirs.scored)[:2], keep=False, lower_settled=SettledCounts(4).lower)
    assert list_segments(dirs.archive) == []
    assert len(list_segments(dirs.rollouts)) == len(list_segments(dirs.scored)) == 1


def test_an_archive_limited_to_some_versions_drops_older_ones(tmp_path):
    dirs = campaign(tmp_path)
    for name in list_segments(dirs.scored):
        retire_segments(dirs, [name], keep=True, lower_settled=SettledCounts(6).lower)
    assert len(prune_archive(dirs.archive, oldest_version=2)) == 2
    assert archived(dirs) == ["math/2/0", "math/2/1"]


class Killed(BaseException):
    """A kill -9: nothing after it runs."""


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("nth", range(14))
def test_a_crash_between_any_two_steps_does_no_harm(tmp_path, monkeypatch, nth, keep):
    dirs = campaign(tmp_path)
    books = SettledCounts(6)
    seen = 0

    def dying(call):
        def step(*args, **kwargs):
            nonlocal seen
            if seen == nth:
                raise Killed
            seen += 1
            assert_sound(dirs, books)
            return call(*args, **kwargs)

        return step

    with monkeypatch.context() as patched:
        for name in ("publish_file", "write_packed", "sync_directory", "announce_changes"):
            patched.setattr(retention, name, dying(getattr(retention, name)))
        patched.setattr(Path, "unlink", dying(Path.unlink))
        try:
            retire_segments(dirs, list_segments(dirs.scored), keep=keep, lower_settled=dying(books.lower))
        except Killed:
            assert_sound(dirs, books)
    recover_retirement(dirs, lower_settled=books.lower)
    if list_segments(dirs.scored):  # killed before the intent: start again
        retire_segments(dirs, list_segments(dirs.scored), keep=keep, lower_settled=books.lower)
    assert list_segments(dirs.rollouts) == list_segments(dirs.scored) == []
    assert archived(dirs) == (IDS if keep else [])
    assert not (dirs.archive / INTENT_FILE).exists()


def assert_sound(dirs, books):
    """Check that nothing would be scored and delivered again, and that the settled count is not too high."""
    assert set(list_segments(dirs.rollouts)) <= set(list_segments(dirs.scored))
    assert books.num <= count_trajectories(list_segments(dirs.rollouts))


def test_a_damaged_segment_is_quarantined_and_its_twin_is_scored_again(tmp_path):
    dirs = campaign(tmp_path)
    first, *_ = names = list_segments(dirs.scored)
    (dirs.scored / first).write_bytes(b"rot")
    intent = retire_segments(dirs, names, keep=True, lower_settled=SettledCounts(6).lower)
    assert intent.segments == names[1:]
    assert list_segments(dirs.rollouts) == [first]
    assert list_segments(dirs.scored) == []
    assert (dirs.scored / "quarantine" / first).read_bytes() == b"rot"


def test_an_unreadable_intent_is_reported_with_a_hint(tmp_path):
    dirs = campaign(tmp_path)
    dirs.archive.mkdir()
    (dirs.archive / INTENT_FILE).write_text("{")
    with pytest.raises(SpoolError, match=r"\.retiring\.json.*remove it"):
        recover_retirement(dirs, lower_settled=SettledCounts(0).lower)


def test_a_reader_forgets_retired_segments_and_its_counts_stay_right(tmp_path):
    dirs = campaign(tmp_path)
    reader = DiskSpoolReader(dirs.scored, on_damage=pytest.fail)
    assert len(reader.poll()) == reader.passed.total() == 6
    assert sorted(reader.finished_segments([])) == list_segments(dirs.scored)
    retire_segments(dirs, list_segments(dirs.scored)[:2], keep=True, lower_settled=reader.forget)
    assert reader.passed.total() == 2
    assert reader.poll() == []
    assert reader.passed.total() == count_trajectories(list_segments(dirs.rollouts)) == 2
    assert reader.finished_segments([]) == list_segments(dirs.scored)


def test_a_segment_with_a_trajectory_that_waits_is_not_finished(tmp_path):
    dirs = campaign(tmp_path)
    reader = DiskSpoolReader(dirs.scored, on_damage=pytest.fail)
    first, *_, last = reader.poll()
    assert reader.finished_segments([first, last]) == list_segments(dirs.scored)[1:2]


def test_a_trajectory_outlives_the_retirement_of_its_segment(tmp_path):
    dirs = campaign(tmp_path)
    held = DiskSpoolReader(dirs.scored, on_damage=pytest.fail).poll()
    retire_segments(dirs, list_segments(dirs.scored), keep=False, lower_settled=SettledCounts(6).lower)
    assert [one.token_ids.tolist() for one in held] == [[0, 1, 2]] * 6


def test_segments_are_due_when_every_kept_checkpoint_records_them_and_the_grace_is_over():
    clock = [0.0]
    settled = SettledSegments(grace_s=10, clock=lambda: clock[0])
    settled.note(["a"])
    settled.cover(7)
    settled.note(["a", "b"])
    clock[0] = 9.0
    assert settled.due(oldest_checkpoint=7) == []
    clock[0] = 11.0
    assert settled.due(oldest_checkpoint=6) == []
    assert settled.due(oldest_checkpoint=7) == ["a"]
    settled.cover(8)
    assert settled.due(oldest_checkpoint=8) == ["a", "b"]
    settled.drop(["a"])
    assert settled.due(oldest_checkpoint=8) == ["b"]


def test_a_merge_waits_until_it_is_worth_it(tmp_path, monkeypatch):
    dirs = campaign(tmp_path)
    names = list_segments(dirs.scored)
    size = (dirs.scored / names[0]).stat().st_size
    assert choose_retirable(names, dirs.scored, max_bytes=1 << 30) == []
    assert choose_retirable(names, dirs.scored, max_bytes=2 * size) == names[:2]
    monkeypatch.setattr(retention, "MAX_MERGED_SEGMENTS", 3)
    assert choose_retirable(["gone", *names], dirs.scored, max_bytes=1 << 30) == names


def test_a_failed_retirement_is_completed_by_the_next(tmp_path, monkeypatch):
    dirs = campaign(tmp_path)
    first, second, third = list_segments(dirs.scored)
    with monkeypatch.context() as patched:
        patched.setattr(retention, "sync_directory", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="Input/output"):
            retire_segments(dirs, [first], keep=True, lower_settled=SettledCounts(6).lower)
    retire_segments(dirs, [second, third], keep=True, lower_settled=SettledCounts(4).lower)
    assert archived(dirs) == IDS
    assert list_segments(dirs.rollouts) == list_segments(dirs.scored) == []
    announce_changes(dirs.scored)
