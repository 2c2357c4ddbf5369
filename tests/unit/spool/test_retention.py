"""Retirement: what training is done with goes to the archive or away, and a crash between any two steps ends well."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from hpcrl.errors import SpoolError
from hpcrl.spool import retention
from hpcrl.spool.listing import announce_changes, count_spool_trajectories, list_segments
from hpcrl.spool.reader import DiskSpoolReader
from hpcrl.spool.record import EpisodeTurn, Trajectory
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


def trajectory(name, version=0):
    return Trajectory(
        id=name,
        group=name.rpartition("/")[0],
        domain="math",
        seed=1,
        status="done",
        producer="000-env-0",
        created=0.0,
        start_version=version,
        end_version=version,
        turns=[EpisodeTurn(start=0, end=3, reward=0.5, generate_s=0.25)],
        token_ids=np.arange(3, dtype=np.int32),
        logprobs=np.zeros(3, np.float32),
        versions=np.full(3, version, np.int32),
        loss_mask=np.ones(3, np.bool_),
        extra={"newer": [1, 2]},
    )


class Books:
    """What the trainer tells env hosts: how many of the trajectories in "rollouts" are settled."""

    def __init__(self, num):
        self.num = num

    def lower(self, segments):
        self.num = 0


def scored(one):
    return msgspec.structs.replace(one, reward=1.0)


def campaign(root, *, num_segments=3, per_segment=2):
    """Shelves with segments whose every trajectory is consumed."""
    shelves = SpoolDirs(rollouts=root / "rollouts", scored=root / "scored", archive=root / "archive")
    writer = DiskSpoolWriter(shelves.rollouts, producer="000-env-0")
    for number in range(num_segments):
        for index in range(per_segment):
            writer.append(trajectory(f"math/{number}/{index}", version=number))
        writer.flush()
    for name in list_segments(shelves.rollouts):
        derive_segment(shelves.rollouts / name, shelves.scored, scored)
    return shelves


def archived(shelves):
    return sorted(one.id for name in list_segments(shelves.archive) for one in read_segment(shelves.archive / name))


IDS = [f"math/{number}/{index}" for number in range(3) for index in range(2)]


def test_retired_segments_are_one_segment_of_the_archive(tmp_path):
    shelves = campaign(tmp_path)
    retire_segments(shelves, list_segments(shelves.scored), keep=True, lower_settled=Books(6).lower)
    assert list_segments(shelves.rollouts) == list_segments(shelves.scored) == []
    (name,) = list_segments(shelves.archive)
    assert name.startswith("versions-000000-000002-")
    assert archived(shelves) == IDS
    one = read_segment(shelves.archive / name)[0]
    assert (one.reward, one.extra, one.turns) == (1.0, {"newer": [1, 2]}, trajectory("x").turns)
    assert count_spool_trajectories(shelves.archive) == 6
    assert not (shelves.archive / INTENT_FILE).exists()


def test_what_is_not_kept_is_removed(tmp_path):
    shelves = campaign(tmp_path)
    retire_segments(shelves, list_segments(shelves.scored)[:2], keep=False, lower_settled=Books(4).lower)
    assert list_segments(shelves.archive) == []
    assert len(list_segments(shelves.rollouts)) == len(list_segments(shelves.scored)) == 1


def test_an_archive_of_some_versions_forgets_what_is_older(tmp_path):
    shelves = campaign(tmp_path)
    for name in list_segments(shelves.scored):
        retire_segments(shelves, [name], keep=True, lower_settled=Books(6).lower)
    assert len(prune_archive(shelves.archive, oldest_version=2)) == 2
    assert archived(shelves) == ["math/2/0", "math/2/1"]


class Killed(BaseException):
    """As kill -9: nothing after it runs."""


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("nth", range(14))
def test_a_crash_between_any_two_steps_ends_well(tmp_path, monkeypatch, nth, keep):
    shelves = campaign(tmp_path)
    books = Books(6)
    seen = 0

    def dying(call):
        def step(*args, **kwargs):
            nonlocal seen
            if seen == nth:
                raise Killed
            seen += 1
            assert_sound(shelves, books)
            return call(*args, **kwargs)

        return step

    with monkeypatch.context() as patched:
        for name in ("publish_file", "write_packed", "sync_directory", "announce_changes"):
            patched.setattr(retention, name, dying(getattr(retention, name)))
        patched.setattr(Path, "unlink", dying(Path.unlink))
        try:
            retire_segments(shelves, list_segments(shelves.scored), keep=keep, lower_settled=dying(books.lower))
        except Killed:
            assert_sound(shelves, books)
    recover_retirement(shelves, lower_settled=books.lower)
    if list_segments(shelves.scored):  # killed before the intent: begin again
        retire_segments(shelves, list_segments(shelves.scored), keep=keep, lower_settled=books.lower)
    assert list_segments(shelves.rollouts) == list_segments(shelves.scored) == []
    assert archived(shelves) == (IDS if keep else [])
    assert not (shelves.archive / INTENT_FILE).exists()


def assert_sound(shelves, books):
    """Nothing that would be scored and delivered again, and no room for episodes that there is no room for."""
    assert set(list_segments(shelves.rollouts)) <= set(list_segments(shelves.scored))
    assert books.num <= count_spool_trajectories(shelves.rollouts)


def test_a_damaged_segment_is_put_aside_and_its_twin_is_scored_again(tmp_path):
    shelves = campaign(tmp_path)
    first, *_ = names = list_segments(shelves.scored)
    (shelves.scored / first).write_bytes(b"rot")
    intent = retire_segments(shelves, names, keep=True, lower_settled=Books(6).lower)
    assert intent.segments == names[1:]
    assert list_segments(shelves.rollouts) == [first]
    assert list_segments(shelves.scored) == []
    assert (shelves.scored / "quarantine" / first).read_bytes() == b"rot"


def test_an_intent_that_cannot_be_read_is_told_with_the_cure(tmp_path):
    shelves = campaign(tmp_path)
    shelves.archive.mkdir()
    (shelves.archive / INTENT_FILE).write_text("{")
    with pytest.raises(SpoolError, match=r"\.retiring\.json.*remove it"):
        recover_retirement(shelves, lower_settled=Books(0).lower)


def test_a_reader_forgets_what_was_retired_and_its_books_stay_right(tmp_path):
    shelves = campaign(tmp_path)
    reader = DiskSpoolReader(shelves.scored, on_damage=pytest.fail)
    assert len(reader.poll()) == reader.num_passed == 6
    assert sorted(reader.finished_segments([])) == list_segments(shelves.scored)
    retire_segments(shelves, list_segments(shelves.scored)[:2], keep=True, lower_settled=reader.forget)
    assert reader.num_passed == 2
    assert reader.poll() == []
    assert reader.num_passed == count_spool_trajectories(shelves.rollouts) == 2
    assert reader.finished_segments([]) == list_segments(shelves.scored)


def test_a_segment_with_a_trajectory_that_waits_is_not_finished(tmp_path):
    shelves = campaign(tmp_path)
    reader = DiskSpoolReader(shelves.scored, on_damage=pytest.fail)
    first, *_, last = reader.poll()
    assert reader.finished_segments([first, last]) == list_segments(shelves.scored)[1:2]


def test_a_trajectory_outlives_the_retirement_of_its_segment(tmp_path):
    shelves = campaign(tmp_path)
    held = DiskSpoolReader(shelves.scored, on_damage=pytest.fail).poll()
    retire_segments(shelves, list_segments(shelves.scored), keep=False, lower_settled=Books(6).lower)
    assert [one.token_ids.tolist() for one in held] == [[0, 1, 2]] * 6


def test_segments_are_due_when_every_kept_checkpoint_knows_them_and_the_grace_is_over():
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
    shelves = campaign(tmp_path)
    names = list_segments(shelves.scored)
    size = (shelves.scored / names[0]).stat().st_size
    assert choose_retirable(names, shelves.scored, max_bytes=1 << 30) == []
    assert choose_retirable(names, shelves.scored, max_bytes=2 * size) == names[:2]
    monkeypatch.setattr(retention, "MAX_MERGED_SEGMENTS", 3)
    assert choose_retirable(["gone", *names], shelves.scored, max_bytes=1 << 30) == names


def test_a_retirement_that_failed_goes_on_with_the_next(tmp_path, monkeypatch):
    shelves = campaign(tmp_path)
    first, second, third = list_segments(shelves.scored)
    with monkeypatch.context() as patched:
        patched.setattr(retention, "sync_directory", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="Input/output"):
            retire_segments(shelves, [first], keep=True, lower_settled=Books(6).lower)
    retire_segments(shelves, [second, third], keep=True, lower_settled=Books(4).lower)
    assert archived(shelves) == IDS
    assert list_segments(shelves.rollouts) == list_segments(shelves.scored) == []
    announce_changes(shelves.scored)
