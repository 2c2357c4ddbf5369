"""Names of segments: order, counts, leftovers, without a heavy import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.errors import SpoolError
from hpcrl.spool.names import (
    Listing,
    SegmentName,
    check_producer,
    listed,
    next_number,
    num_trajectories,
    parse,
    sweep_leftovers,
)


def touch(directory, producer, number, count, nonce="0123abcd"):
    name = SegmentName(producer=producer, number=number, count=count, nonce=nonce)
    (directory / str(name)).touch()
    return str(name)


@given(producer=st.text(min_size=1), number=st.integers(0, 10**10), count=st.integers(0, 10**6))
def test_a_name_is_read_as_it_was_made(producer, number, count):
    name = SegmentName(producer=producer, number=number, count=count, nonce="00ff00ff")
    assert parse(str(name)) == name


@pytest.mark.parametrize(
    "name", ["model.h5", "a-1-2-0123abcd.h5", "a-00000001-2-0123abcd.h5.tmp", "-00000001-2.h5", ""]
)
def test_other_names_are_not_segments(name):
    assert parse(name) is None


def test_the_trajectories_of_a_spool_are_counted_by_name(tmp_path):
    touch(tmp_path, "000-env-0", 0, 3)
    touch(tmp_path, "000-env-1", 0, 4)
    touch(tmp_path, ".000-env-1", 1, 100)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "model.h5").touch()
    assert num_trajectories(tmp_path) == 7


def test_a_spool_that_nobody_wrote_to_is_empty(tmp_path):
    assert listed(tmp_path / "absent") == []
    assert num_trajectories(tmp_path / "absent") == 0


def test_segments_sort_by_producer_and_then_by_number(tmp_path):
    names = [
        touch(tmp_path, producer, number, count) for producer in "ab" for number, count in ((9, 5), (10, 1), (11, 90))
    ]
    assert listed(tmp_path) == names


def test_numbers_go_on_after_the_producers_own(tmp_path):
    touch(tmp_path, "env-1", 4, 1)
    touch(tmp_path, "env-1-b", 9, 1)
    assert (next_number(tmp_path, "env-1"), next_number(tmp_path, "env")) == (5, 0)


@pytest.mark.parametrize("producer", ["", ".hidden", "a/b", "a\0b", "x" * 161])
def test_a_producer_that_cannot_begin_a_file_name_is_refused(producer):
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
    code = "import sys, hpcrl.spool.names; print(sorted({'numpy', 'h5py', 'xxhash', 'msgspec'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_listing_sees_every_segment_that_appears_and_goes(tmp_path: Path) -> None:
    listing = Listing(tmp_path)
    expected: list[str] = []
    for number in range(40):
        name = f"w-{number:08d}-1-00000000.h5"
        (tmp_path / name).touch()
        expected.append(name)
        assert listing.names() == expected
    (tmp_path / expected.pop(7)).unlink()
    assert listing.names() == expected


def test_a_listing_that_has_settled_still_sees_the_next_change(tmp_path: Path) -> None:
    listing = Listing(tmp_path)
    (tmp_path / "w-00000000-1-00000000.h5").touch()
    os.utime(tmp_path, (1, 1))
    assert len(listing.names()) == len(listing.names()) == 1
    (tmp_path / "w-00000001-1-00000000.h5").touch()
    assert len(listing.names()) == 2


def test_a_listing_of_a_directory_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    listing = Listing(tmp_path / "later")
    assert listing.names() == []
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "w-00000000-1-00000000.h5").touch()
    assert len(listing.names()) == 1
