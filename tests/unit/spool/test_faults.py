"""A disk that is full, broken, slow or gone is reported clearly, and no acknowledged or held trajectory is lost."""

import errno
import itertools
import os

import h5py  # noqa: TID251
import pytest

from hpcrl.errors import SpoolError
from hpcrl.spool import hdf5
from hpcrl.spool.listing import list_segments
from hpcrl.spool.reader import DiskSpoolReader
from hpcrl.spool.segment import read_facts, read_segment, write_segment
from hpcrl.spool.writer import BatchLimits, DiskSpoolWriter
from tests.support.clocks import SettableClock
from tests.support.disks import largest_file
from tests.support.trajectories import dump_exactly, make_trajectory


def trajectory(number=0, num_tokens=500):
    return make_trajectory(f"math/{number}/0", num_tokens, seed=number)


def found(directory):
    damage = []
    trajectories = DiskSpoolReader(directory, on_damage=lambda *report: damage.append(report)).poll()
    assert damage == []
    return sorted(one.id for one in trajectories)


def failing(call, code, *, times):
    """Return a system call that fails `times` times and then works again."""
    left = times

    def sometimes(*args, **kwargs):
        nonlocal left
        if left:
            left -= 1
            raise OSError(code, os.strerror(code))
        return call(*args, **kwargs)

    return sometimes


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE])
@pytest.mark.parametrize("call", ["open", "pwritev", "fsync", "rename"])
def test_a_failing_disk_is_reported_and_held_trajectories_are_written_later(tmp_path, monkeypatch, call, code):
    writer = DiskSpoolWriter(tmp_path, producer="000-env-0")
    writer.append(trajectory(0))
    assert writer.flush() == ["math/0/0"]
    writer.append(trajectory(1))
    with monkeypatch.context() as broken:
        broken.setattr(os, call, failing(getattr(os, call), code, times=1))
        with pytest.raises(SpoolError, match=rf"{os.strerror(code)}: 1 trajectories .*kept in memory"):
            writer.flush()
    assert "math/0/0" in found(tmp_path)
    assert writer.flush() == ["math/1/0"]
    assert found(tmp_path) == ["math/0/0", "math/1/0"]
    assert [name for name in os.listdir(tmp_path) if name.endswith(".tmp")] == []  # noqa: PTH208


def test_a_rename_that_was_not_made_durable_is_not_acknowledged(tmp_path, monkeypatch):
    writer = DiskSpoolWriter(tmp_path, producer="000-env-0")
    writer.append(trajectory(0))
    with monkeypatch.context() as broken:
        broken.setattr("hpcrl.system.files.sync_directory", failing(None, errno.EIO, times=1))
        with pytest.raises(SpoolError, match="kept in memory"):
            writer.flush()
    assert writer.flush() == ["math/0/0"]
    assert found(tmp_path) == ["math/0/0"]  # stored twice, delivered once


def test_a_full_disk_keeps_what_was_acknowledged(tmp_path):
    writer = DiskSpoolWriter(tmp_path, producer="000-env-0", batching=BatchLimits(max_count=2))
    for number in range(4):
        writer.append(trajectory(number))
        writer.flush_due()
    writer.append(trajectory(4, num_tokens=10_000))
    with largest_file(20_000), pytest.raises(SpoolError, match="kept in memory"):
        writer.flush()
    assert found(tmp_path) == [f"math/{number}/0" for number in range(4)]
    assert set(writer.flush()) >= {"math/4/0"}
    assert found(tmp_path) == [f"math/{number}/0" for number in range(5)]


def test_ids_that_became_durable_before_an_error_are_returned_after_it(tmp_path, monkeypatch):
    writer = DiskSpoolWriter(tmp_path, producer="000-env-0", batching=BatchLimits(max_count=1))
    writer.append(trajectory(0))
    writer.flush_due()
    writer.append(trajectory(1))
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", failing(None, errno.ENOSPC, times=9))
        with pytest.raises(SpoolError, match="No space left"):
            writer.flush()
    assert writer.flush() == ["math/0/0", "math/1/0"]


def test_a_disk_that_keeps_failing_is_tried_less_often_and_at_least_every_five_seconds(tmp_path, monkeypatch):
    clock, attempts = SettableClock(), []

    def full(*_, **__):
        attempts.append(clock.now)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = DiskSpoolWriter(tmp_path, producer="000-env-0", batching=BatchLimits(max_count=1), clock=clock)
    writer.append(trajectory(0))
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", full)
        for _ in range(1200):
            clock.now += 0.1
            try:
                writer.flush_due()
            except SpoolError as error:
                assert "No space left" in str(error)  # noqa: PT017 - most calls do not fail
    pauses = [round(later - earlier) for earlier, later in itertools.pairwise(attempts)]
    assert pauses == sorted(pauses)
    assert 20 < len(attempts) < 30
    assert pauses[-1] == 5
    assert writer.flush() == ["math/0/0"]


def test_the_thread_that_waits_for_the_disk_hands_its_error_to_the_caller(tmp_path, monkeypatch):
    clock = SettableClock()
    writer = DiskSpoolWriter(tmp_path, producer="000-env-0", batching=BatchLimits(max_count=1), clock=clock)
    writer.append(trajectory(0))
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", failing(os.fsync, errno.EIO, times=1))
        assert writer.flush_due() == []  # written, not durable yet
        writer.append(trajectory(1))
        with pytest.raises(SpoolError, match="Input/output error"):
            writer.flush_due()
    assert sorted(writer.close()) == ["math/0/0", "math/1/0"]
    assert found(tmp_path) == ["math/0/0", "math/1/0"]


def test_a_directory_without_permission_is_reported_by_writer_and_reader(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    child = os.fork()
    if child == 0:
        tmp_path.parent.chmod(0o755)
        code = 1
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            writer = DiskSpoolWriter(closed, producer="000-env-0")
            writer.append(trajectory())
            reports = []
            for act in (writer.flush, DiskSpoolReader(closed, on_damage=reports.append).poll):
                try:
                    act()
                except SpoolError as error:
                    reports.append(str(error))
            code = 0 if len(reports) == 2 and all("Permission denied" in text for text in reports) else 2
        finally:
            os._exit(code)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    closed.chmod(0o700)
    assert ended == 0


# --- compression


@pytest.mark.parametrize("compression", ["zstd", "lz4", "blosc"])
def test_a_compressed_segment_is_smaller_and_the_same_to_the_bit(tmp_path, compression):
    batch = [trajectory(number, 5000) for number in range(8)]
    write_segment(tmp_path / "plain.h5", batch)
    write_segment(tmp_path / "small.h5", batch, compression=compression)
    assert (tmp_path / "small.h5").stat().st_size < (tmp_path / "plain.h5").stat().st_size / 2
    assert dump_exactly(read_segment(tmp_path / "small.h5")) == dump_exactly(batch)


@pytest.mark.parametrize("batch", [[], [trajectory(0, 0)], [trajectory(0, 1)]], ids=["none", "empty", "one token"])
def test_a_compressed_segment_with_almost_no_content_is_read(tmp_path, batch):
    write_segment(tmp_path / "a.h5", batch, compression="zstd")
    assert dump_exactly(read_segment(tmp_path / "a.h5")) == dump_exactly(batch)


def test_a_damaged_compressed_segment_is_refused(tmp_path):
    batch = [trajectory(number, 5000) for number in range(4)]
    write_segment(tmp_path / "a.h5", batch, compression="zstd")
    raw = (tmp_path / "a.h5").read_bytes()
    for place in range(0, len(raw), 97):
        flipped = bytearray(raw)
        flipped[place] ^= 4
        (tmp_path / "a.h5").write_bytes(flipped)
        try:
            seen = dump_exactly(read_segment(tmp_path / "a.h5"))
        except SpoolError:
            continue
        assert seen == dump_exactly(batch), f"a flip at byte {place}"


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_the_facts_of_a_segment_are_read_without_its_columns(tmp_path, compression):
    batch, path = [trajectory(number, 5000) for number in range(4)], tmp_path / "a.h5"
    write_segment(path, batch, compression=compression)
    assert list(read_facts(path)) == list(read_segment(path).facts)
    if compression != "none":
        with h5py.File(path) as file:
            stored = file["token_ids"].id.read_direct_chunk((0,))[1]
        path.write_bytes(path.read_bytes().replace(stored, bytes(len(stored))))
        with pytest.raises(SpoolError):
            read_segment(path, verify=False)
        assert [facts.id for facts in read_facts(path)] == [one.id for one in batch]


def test_a_segment_that_is_cut_off_has_no_facts(tmp_path):
    write_segment(tmp_path / "a.h5", [trajectory(number) for number in range(4)])
    raw = (tmp_path / "a.h5").read_bytes()
    for end in range(0, len(raw), 97):
        (tmp_path / "a.h5").write_bytes(raw[:end])
        with pytest.raises(SpoolError, match="cannot read segment"):
            read_facts(tmp_path / "a.h5")


def test_a_spool_may_be_compressed(tmp_path):
    writer = DiskSpoolWriter(tmp_path, producer="000-env-0", compression="lz4")
    writer.append(trajectory(3))
    writer.flush()
    assert found(tmp_path) == ["math/3/0"]


def test_compression_without_the_plugin_is_refused_with_a_hint(tmp_path, monkeypatch):
    write_segment(tmp_path / "a.h5", [trajectory()], compression="zstd")
    monkeypatch.setitem(__import__("sys").modules, "hdf5plugin", None)
    with pytest.raises(SpoolError, match=r'spool.compression = "zstd".*pip install'):
        write_segment(tmp_path / "b.h5", [trajectory()], compression="zstd")
    with pytest.raises(SpoolError, match=r"is compressed.*pip install"):
        read_segment(tmp_path / "a.h5")
    write_segment(tmp_path / "c.h5", [trajectory()])
    assert list_segments(tmp_path) == ["a.h5", "c.h5"]


def test_hdf5_itself_never_touches_the_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hdf5._make_template.cache_clear()
    write_segment(tmp_path / "a.h5", [trajectory()])
    assert [path.name for path in tmp_path.iterdir()] == ["a.h5"]
