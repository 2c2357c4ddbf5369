"""The names of segments: order, counts, leftovers, without a heavy import."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.errors import SpoolError
from hpcrl.spool.listing import (
    SegmentListing,
    SegmentName,
    announce_changes,
    check_producer,
    count_trajectories,
    find_next_number,
    list_segments,
    parse_segment_name,
    sweep_leftovers,
)


def touch(directory, producer, number, count, nonce="0123abcd"):
    name = SegmentName(producer=producer, number=number, count=count, nonce=nonce)
    (directory / str(name)).touch()
    return str(name)


@given(producer=st.text(min_size=1), number=st.integers(0, 10**10), count=st.integers(0, 10**6))
def test_a_name_is_read_as_it_was_made(producer, number, count):
    name = SegmentName(producer=producer, number=number, count=count, nonce="00ff00ff")
    assert parse_segment_name(str(name)) == name


@pytest.mark.parametrize(
    "name", ["model.h5", "a-1-2-0123abcd.h5", "a-00000001-2-0123abcd.h5.tmp", "-00000001-2.h5", ""]
)
def test_other_names_are_not_segments(name):
    assert parse_segment_name(name) is None


def test_the_trajectories_of_a_spool_are_counted_by_name(tmp_path):
    touch(tmp_path, "000-env-0", 0, 3)
    touch(tmp_path, "000-env-1", 0, 4)
    touch(tmp_path, ".000-env-1", 1, 100)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "model.h5").touch()
    assert count_trajectories(list_segments(tmp_path)) == 7


def test_a_spool_without_segments_is_empty(tmp_path):
    assert list_segments(tmp_path / "absent") == []
    assert count_trajectories(list_segments(tmp_path / "absent")) == 0


def test_segments_sort_by_producer_and_then_by_number(tmp_path):
    names = [
        touch(tmp_path, producer, number, count) for producer in "ab" for number, count in ((9, 5), (10, 1), (11, 90))
    ]
    assert list_segments(tmp_path) == names


def test_numbers_continue_after_the_producers_own(tmp_path):
    touch(tmp_path, "env-1", 4, 1)
    touch(tmp_path, "env-1-b", 9, 1)
    assert (find_next_number(tmp_path, "env-1"), find_next_number(tmp_path, "env")) == (5, 0)


@pytest.mark.parametrize("producer", ["", ".hidden", "a/b", "a\0b", "x" * 161])
def test_a_producer_that_cannot_start_a_file_name_is_refused(producer):
    with pytest.raises(SpoolError, match="file name"):
        check_producer(producer)


def test_only_old_temporary_files_are_swept(tmp_path):
    old, new, other = (tmp_path / name for name in (".a.h5.12.tmp", ".b.h5.34.tmp", "c.h5"))
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (0, 0))
    assert sweep_leftovers(tmp_path) == [old.name]
    assert sorted(tmp_path.iterdir()) == sorted([new, other])


def test_counting_imports_nothing_heavy():
    code = "import sys, hpcrl.spool.listing; print(sorted({'numpy', 'h5py', 'xxhash', 'msgspec'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_listing_sees_every_segment_that_is_announced_at_once(tmp_path: Path) -> None:
    listing = SegmentListing(tmp_path)
    expected: list[str] = []
    for number in range(40):
        expected.append(touch(tmp_path, "w", number, 1))
        announce_changes(tmp_path, added=expected[-1:])
        assert listing.names() == expected
    (tmp_path / expected[7]).unlink()
    announce_changes(tmp_path, removed=[expected.pop(7)])
    assert listing.names() == expected


def test_an_unannounced_change_is_found_when_the_directory_is_listed_again(tmp_path: Path, monkeypatch: Any) -> None:
    listing = SegmentListing(tmp_path)
    assert listing.names() == []
    name = touch(tmp_path, "w", 0, 1)
    started = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: started + 31)
    assert listing.names() == [name]
    (tmp_path / name).unlink()
    monkeypatch.setattr(time, "monotonic", lambda: started + 62)
    assert listing.names() == []


def test_a_wall_clock_that_jumps_does_not_blind_a_listing(tmp_path: Path, monkeypatch: Any) -> None:
    listing = SegmentListing(tmp_path)
    for number, jump in enumerate((-1e9, 1e9)):
        monkeypatch.setattr(time, "time", lambda jump=jump: jump)
        name = touch(tmp_path, "w", number, 1)
        announce_changes(tmp_path, added=[name])
        assert name in listing.names()


@pytest.mark.parametrize("torn", [b"+w-0000000", b"garbage\n", b"\xff\n+model.h5\n", b"-w-00000000-1-0123abcd.h5\n\n"])
def test_torn_or_foreign_news_do_no_harm(tmp_path: Path, torn: bytes) -> None:
    listing = SegmentListing(tmp_path)
    assert listing.names() == []
    (tmp_path / ".news").write_bytes(torn)
    listing.names()
    name = touch(tmp_path, "w", 1, 1)
    announce_changes(tmp_path, added=["", name])
    assert listing.names() in ([name], [])
    announce_changes(tmp_path, added=[name])
    assert listing.names() == [name]


def test_announcing_does_not_fail_if_the_news_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / ".news").mkdir()
    announce_changes(tmp_path, added=["w-00000000-1-00000000.h5"])
    announce_changes(tmp_path / "absent", removed=["w-00000000-1-00000000.h5"])


def test_a_listing_of_a_missing_directory_is_empty(tmp_path: Path) -> None:
    listing = SegmentListing(tmp_path / "later")
    assert listing.names() == []
    (tmp_path / "later").mkdir()
    name = touch(tmp_path / "later", "w", 0, 1)
    announce_changes(tmp_path / "later", added=[name])
    assert listing.names() == [name]


def test_a_listing_reports_each_change_once(tmp_path: Path) -> None:
    listing = SegmentListing(tmp_path)
    first, second = touch(tmp_path, "w", 0, 1), touch(tmp_path, "w", 1, 1)
    assert listing.changes() == ({first, second}, set())
    assert listing.changes() == (set(), set())
    (tmp_path / first).unlink()
    announce_changes(tmp_path, removed=[first])
    assert listing.changes() == (set(), {first})
    announce_changes(tmp_path, removed=[second])
    announce_changes(tmp_path, added=[second])
    assert listing.changes() == ({second}, {second})
    assert listing.names() is listing.names()


def test_a_segment_that_came_and_went_between_two_calls_changes_nothing(tmp_path):
    listing = SegmentListing(tmp_path)
    announce_changes(tmp_path, added=[touch(tmp_path, "p", 0, 3)])
    listing.changes()
    brief = touch(tmp_path, "p", 1, 3)
    announce_changes(tmp_path, added=[brief])
    assert brief in listing.names()
    (tmp_path / brief).unlink()
    announce_changes(tmp_path, removed=[brief])
    assert listing.changes() == (set(), set())


def test_a_segment_that_was_removed_and_made_again_is_a_change_also_when_the_directory_is_listed(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """So is a damaged segment that is scored again: a reader that does not see this never reads it."""
    listing = SegmentListing(tmp_path)
    name = touch(tmp_path, "w", 0, 1)
    assert listing.changes() == ({name}, set())
    announce_changes(tmp_path, removed=[name])
    announce_changes(tmp_path, added=[name])
    started = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: started + 31)
    assert listing.changes() == ({name}, {name})
    assert listing.changes() == (set(), set())
