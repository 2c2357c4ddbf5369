"""Segments are exact, mapped and checked; damaged or foreign files are named and refused."""

import json
import math
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import h5py  # noqa: TID251
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from hpcrl.errors import SpoolError
from hpcrl.spool import hdf5
from hpcrl.spool import segment as segment_module
from hpcrl.spool.record import COLUMNS
from hpcrl.spool.segment import read_segment, write_segment
from tests.support.disks import largest_file
from tests.support.trajectories import dump_exactly, make_odd_trajectory


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "a.h5"
    write_segment(path, [make_odd_trajectory(f"math/{number}/0", 5 + number, seed=number) for number in range(3)])
    return path


@st.composite
def trajectories(draw):
    num_tokens = draw(st.integers(0, 20))
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
    columns = {
        name: draw(npst.arrays(dtype, num_tokens, elements={"allow_nan": True} if dtype.kind == "f" else None))
        for name, dtype in COLUMNS.items()
    }
    return make_odd_trajectory(
        num_tokens=num_tokens,
        id=draw(text),
        domain=draw(text),
        seed=draw(st.integers()),
        status=draw(st.sampled_from(["done", "aborted-stale", "env-fault"])),
        reward=draw(st.none() | st.floats()),
        reward_parts=draw(st.dictionaries(text, st.floats(), max_size=2)),
        **columns,
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(batch=st.lists(trajectories(), max_size=5))
def test_any_trajectories_come_back_to_the_bit(tmp_path, batch):
    path = tmp_path / "any.h5"
    write_segment(path, batch)
    assert dump_exactly(read_segment(path)) == dump_exactly(batch)


def test_every_nan_keeps_its_payload(tmp_path):
    logprobs = np.array([0x7FC00000, 0x7FC00001, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    write_segment(tmp_path / "a.h5", [make_odd_trajectory(num_tokens=4, logprobs=logprobs)])
    assert read_segment(tmp_path / "a.h5")[0].logprobs.tobytes() == logprobs.tobytes()


def test_columns_are_aligned_read_only_views_of_one_map(written):
    segment = read_segment(written)
    for name in COLUMNS:
        column = getattr(segment[1], name)
        assert np.shares_memory(column, segment.columns[name])
        assert not column.flags.owndata
        assert not column.flags.writeable
        assert column.flags.aligned
    assert segment.offsets.flags.aligned


def test_trajectories_outlive_the_file(written):
    before = dump_exactly(read_segment(written))
    segment = read_segment(written)
    written.unlink()
    assert dump_exactly(segment) == before


def test_any_hdf5_tool_reads_a_segment(written):
    with h5py.File(written) as file:
        assert file["offsets"][:].tolist() == [0, 5, 11, 18]
        assert file["token_ids"][5:11].tolist() == list(range(1000, 1006))
        assert file["loss_mask"].dtype == np.bool_
        assert [row["id"] for row in json.loads(file["metadata"][()])] == ["math/0/0", "math/1/0", "math/2/0"]


def test_a_segment_is_private_and_alone(written):
    assert written.stat().st_mode & 0o777 == 0o600
    assert list(written.parent.iterdir()) == [written]


@pytest.mark.parametrize("name", ["a b.h5", 'it\'s "quoted".h5', "two\nlines.h5", "$(id);*?.h5", "\udcff.h5"])
def test_a_segment_can_have_any_path(tmp_path, name):
    directory = tmp_path / name.removesuffix(".h5")
    directory.mkdir()
    write_segment(directory / name, [make_odd_trajectory()])
    assert dump_exactly(read_segment(directory / name)) == dump_exactly([make_odd_trajectory()])


def test_no_flipped_bit_changes_what_is_read(written):
    raw, before = written.read_bytes(), dump_exactly(read_segment(written))
    rng = random.Random(1)
    num_refused = 0
    for place in rng.sample(range(len(raw)), 600):
        flipped = bytearray(raw)
        flipped[place] ^= 1 << rng.randrange(8)
        written.write_bytes(flipped)
        try:
            found = dump_exactly(read_segment(written))
        except SpoolError:
            num_refused += 1
        else:
            assert found == before, f"a flip at byte {place}"  # in a gap that nothing uses
    assert num_refused > 300


def test_no_truncated_file_is_read(written):
    raw = written.read_bytes()
    for length in range(0, len(raw), 17):
        written.write_bytes(raw[:length])
        with pytest.raises(SpoolError, match=r"cannot read segment .*a\.h5"):
            read_segment(written)


def test_a_damaged_column_is_named(written):
    raw = bytearray(written.read_bytes())
    with h5py.File(written) as file:
        raw[file["logprobs"].id.get_offset()] ^= 1
    written.write_bytes(raw)
    with pytest.raises(SpoolError, match="logprobs does not match its checksum"):
        read_segment(written)
    assert len(read_segment(written, verify=False)) == 3


def test_two_swapped_columns_are_refused(written):
    with h5py.File(written, "r+") as file:
        file.move("token_ids", "other")
        file.move("versions", "token_ids")
        file.move("other", "versions")
    with pytest.raises(SpoolError, match="HDF5 structures do not match"):
        read_segment(written)


def test_foreign_files_are_refused(tmp_path):
    text, other = tmp_path / "text.h5", tmp_path / "other.h5"
    text.write_text("hello\n" * 1000)
    with h5py.File(other, "w") as file:
        file["x"] = [1, 2, 3]
    with pytest.raises(SpoolError, match=r"text\.h5.*damaged or foreign"):
        read_segment(text)
    with pytest.raises(SpoolError, match=r"other\.h5.*not one of hpcrl"):
        read_segment(other)
    with pytest.raises(SpoolError, match=r"absent\.h5.*No such file"):
        read_segment(tmp_path / "absent.h5")
    with pytest.raises(SpoolError, match="cannot read segment"):
        read_segment(tmp_path)


def test_a_newer_major_version_is_refused_with_a_hint(tmp_path, monkeypatch):
    with monkeypatch.context() as newer:
        newer.setattr(segment_module, "SCHEMA_MAJOR", 5)
        write_segment(tmp_path / "a.h5", [make_odd_trajectory()])
    with pytest.raises(SpoolError, match=r"a\.h5.*schema 5\.\d, this hpcrl reads 1\.x to 4\.x: use the version"):
        read_segment(tmp_path / "a.h5")


def test_a_newer_minor_version_is_read_and_kept(tmp_path, monkeypatch):
    with monkeypatch.context() as newer:
        newer.setattr(segment_module, "SCHEMA_MINOR", 7)
        write_segment(tmp_path / "a.h5", [make_odd_trajectory(extra={"tool_calls": 3})])
    write_segment(tmp_path / "b.h5", read_segment(tmp_path / "a.h5"))
    assert read_segment(tmp_path / "b.h5")[0].extra == {"tool_calls": 3}


@pytest.mark.parametrize("num_bytes", [0, 100, 3000, 6000])
def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path, num_bytes):
    with largest_file(num_bytes), pytest.raises(SpoolError, match=r"cannot write segment .*a\.h5"):
        write_segment(tmp_path / "a.h5", [make_odd_trajectory(num_tokens=2000)])
    assert list(tmp_path.iterdir()) == []
    write_segment(tmp_path / "a.h5", [make_odd_trajectory(num_tokens=2000)])
    assert dump_exactly(read_segment(tmp_path / "a.h5")) == dump_exactly([make_odd_trajectory(num_tokens=2000)])


def test_a_system_that_writes_little_at_a_time_gets_everything(tmp_path, monkeypatch):
    batch = [make_odd_trajectory(f"math/{number}/0", 50, seed=number) for number in range(40)]
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: os.pwrite(fd, buffers[0][:37], offset))
    write_segment(tmp_path / "a.h5", batch)
    assert dump_exactly(read_segment(tmp_path / "a.h5")) == dump_exactly(batch)


def test_more_trajectories_than_one_system_call_takes(tmp_path):
    batch = [make_odd_trajectory(f"math/{number}/0", 1, seed=number) for number in range(1500)]
    write_segment(tmp_path / "a.h5", batch)
    assert dump_exactly(read_segment(tmp_path / "a.h5")) == dump_exactly(batch)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_threads_write_segments_at_the_same_time(tmp_path, compression):
    hdf5._make_template.cache_clear()  # the first segments of a process are written at the same time too
    start = threading.Barrier(8)

    def write(number):
        start.wait()
        write_segment(
            tmp_path / f"{number}.h5",
            [make_odd_trajectory(f"math/{number}/0", 50, seed=number)],
            compression=compression,
        )

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert [dump_exactly(read_segment(tmp_path / f"{number}.h5")) for number in range(8)] == [
        dump_exactly([make_odd_trajectory(f"math/{number}/0", 50, seed=number)]) for number in range(8)
    ]


def test_a_segment_can_be_empty(tmp_path):
    write_segment(tmp_path / "a.h5", [])
    assert list(read_segment(tmp_path / "a.h5")) == []


def test_a_trajectory_that_cannot_be_stored_writes_nothing(tmp_path):
    with pytest.raises(SpoolError, match="cannot be stored"):
        write_segment(tmp_path / "a.h5", [make_odd_trajectory(), make_odd_trajectory(extra={"loss": math.nan})])
    assert list(tmp_path.iterdir()) == []
