"""The contract of every spool, and the faults that a spool on a disk must survive."""

import multiprocessing
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hpcrl.errors import SpoolError
from hpcrl.spool.listing import announce_changes, count_trajectories, list_segments
from hpcrl.spool.reader import DiskSpoolReader
from hpcrl.spool.segment import read_segment, write_segment
from hpcrl.spool.writer import BatchLimits, DiskSpoolWriter, derive_segment
from hpcrl.testing.memory import MemorySpool, MemorySpoolReader, MemorySpoolWriter
from tests.support.clocks import SettableClock
from tests.support.trajectories import dump_exactly, make_odd_trajectory, make_trajectory

FORK = multiprocessing.get_context("fork")


def ids(trajectories):
    return [one.id for one in trajectories]


@dataclass
class Disk:
    directory: Path
    damage: list[tuple[str, str]] = field(default_factory=list)

    def writer(self, producer="000-env-0", **options):
        return DiskSpoolWriter(self.directory, producer=producer, **options)

    def reader(self, **options):
        return DiskSpoolReader(
            self.directory, on_damage=lambda p, reason: self.damage.append((p.name, reason)), **options
        )


class Memory:
    def __init__(self):
        self.spool = MemorySpool()

    def writer(self, producer="000-env-0", **options):
        return MemorySpoolWriter(self.spool, **options)

    def reader(self, **options):
        return MemorySpoolReader(self.spool, **options)


@pytest.fixture
def disk(tmp_path):
    return Disk(tmp_path / 'a "spool" of\nmine\'s')


@pytest.fixture(params=["disk", "memory"])
def spool(request):
    return request.getfixturevalue("disk") if request.param == "disk" else Memory()


def written(writer):
    """Wait until the batch that `flush_due` writes is durable, and return its ids."""
    deadline = time.monotonic() + 30
    while not (acknowledged := writer.flush_due()):
        assert time.monotonic() < deadline, "nothing became durable"
        time.sleep(0.001)
    return acknowledged


# --- every spool


def test_a_flushed_trajectory_is_read_to_the_bit(spool):
    sent = [
        make_odd_trajectory("math/0/0"),
        make_odd_trajectory("größe \u2028 \U0001f600/1/0", num_tokens=0, turns=[]),
        make_odd_trajectory("math/2/0", reward=float("nan"), reward_parts={"a": float("inf")}, status="truncated"),
    ]
    writer, reader = spool.writer(), spool.reader()
    for one in sent:
        writer.append(one)
    assert writer.flush() == ids(sent)
    assert dump_exactly(reader.poll()) == dump_exactly(sent)


def test_nothing_is_found_before_it_is_acknowledged(spool):
    writer, reader = spool.writer(), spool.reader()
    writer.append(make_odd_trajectory())
    assert reader.poll() == []
    assert writer.flush() == ["math/0/0"]
    assert ids(reader.poll()) == ["math/0/0"]


def test_every_reader_has_its_own_cursor_and_gets_each_trajectory_once(spool):
    writer, first = spool.writer(), spool.reader()
    writer.append(make_odd_trajectory("math/0/0"))
    writer.flush()
    assert ids(first.poll()) == ["math/0/0"]
    writer.append(make_odd_trajectory("math/0/1"))
    writer.flush()
    assert ids(first.poll()) == ["math/0/1"]
    assert first.poll() == []
    assert ids(spool.reader().poll()) == ["math/0/0", "math/0/1"]


def test_a_flush_of_nothing_acknowledges_nothing(spool):
    writer = spool.writer()
    assert writer.flush() == []
    assert writer.flush_due() == []
    assert spool.reader().poll() == []


def test_a_batch_is_due_by_count(spool):
    writer = spool.writer(batching=BatchLimits(max_count=2, max_age_s=1e9))
    writer.append(make_odd_trajectory("math/0/0"))
    assert writer.flush_due() == []
    writer.append(make_odd_trajectory("math/0/1"))
    assert written(writer) == ["math/0/0", "math/0/1"]


def test_a_batch_is_due_by_bytes(spool):
    writer = spool.writer(batching=BatchLimits(max_bytes=20_000, max_age_s=1e9))
    writer.append(make_odd_trajectory("math/0/0", num_tokens=1000))
    assert writer.flush_due() == []
    writer.append(make_odd_trajectory("math/0/1", num_tokens=1000))
    assert written(writer) == ["math/0/0", "math/0/1"]


def test_a_batch_is_due_by_the_age_of_its_oldest(spool):
    clock = SettableClock(100.0)
    writer = spool.writer(batching=BatchLimits(max_age_s=2.0), clock=clock)
    writer.append(make_odd_trajectory("math/0/0"))
    clock.now += 1.9
    writer.append(make_odd_trajectory("math/0/1"))
    assert writer.flush_due() == []
    clock.now += 0.2
    assert written(writer) == ["math/0/0", "math/0/1"]
    clock.now += 100
    assert writer.flush_due() == []


def test_a_writer_that_holds_too_much_refuses_more_and_keeps_what_it_has(spool):
    writer = spool.writer(batching=BatchLimits(max_bytes=30_000))
    for index in range(4):
        writer.append(make_odd_trajectory(f"math/0/{index}", num_tokens=1000))
    with pytest.raises(SpoolError, match=r"'math/0/4' was refused: others .*flush before"):
        writer.append(make_odd_trajectory("math/0/4", num_tokens=1000))
    assert writer.flush() == [f"math/0/{index}" for index in range(4)]
    writer.append(make_odd_trajectory("math/0/4", num_tokens=1000))
    assert writer.flush() == ["math/0/4"]


def test_a_trajectory_larger_than_the_batch_is_taken(spool):
    writer = spool.writer(batching=BatchLimits(max_bytes=1000))
    writer.append(make_odd_trajectory(num_tokens=100_000))
    assert written(writer) == ["math/0/0"]


def test_a_closed_writer_has_flushed_and_refuses_more(spool):
    writer = spool.writer()
    writer.append(make_odd_trajectory("math/0/0"))
    assert writer.close() == ["math/0/0"]
    with pytest.raises(SpoolError, match="'math/0/1' comes after the writer was closed"):
        writer.append(make_odd_trajectory("math/0/1"))
    assert writer.close() == []


def test_a_late_duplicate_is_dropped_and_counted(spool):
    reader = spool.reader()
    for producer in ("000-env-0", "001-env-0"):
        writer = spool.writer(producer)
        writer.append(make_odd_trajectory("math/0/0", producer=producer))
        writer.close()
    assert [one.producer for one in reader.poll()] == ["000-env-0"]
    assert reader.num_duplicates == 1


def test_the_retry_of_a_failed_episode_is_not_a_duplicate(spool):
    writer, reader = spool.writer(), spool.reader()
    for status in ("env-fault", "env-fault", "done", "done"):
        writer.append(make_odd_trajectory(status=status))
    writer.flush()
    assert [one.status for one in reader.poll()] == ["env-fault", "done"]
    assert reader.num_duplicates == 2


def test_a_trajectory_in_the_checkpoint_is_not_delivered_again(spool):
    writer = spool.writer()
    for index in range(3):
        writer.append(make_odd_trajectory(f"math/0/{index}"))
    writer.flush()
    reader = spool.reader(consumed={"math/0/0", "math/0/2"})
    assert ids(reader.poll()) == ["math/0/1"]
    assert reader.num_duplicates == 0


def test_a_trajectory_that_cannot_be_stored_is_refused_alone(spool):
    writer = spool.writer()
    writer.append(make_odd_trajectory("math/0/0"))
    with pytest.raises(SpoolError, match="'math/0/1'"):
        writer.append(make_odd_trajectory("math/0/1", logprobs=np.zeros(1, np.float32)))
    assert writer.flush() == ["math/0/0"]


def test_threads_may_append_while_another_flushes(spool):
    writer = spool.writer(batching=BatchLimits(max_count=5))
    acknowledged = []

    def append(thread):
        for index in range(100):
            writer.append(make_odd_trajectory(f"math/{thread}/{index}"))
            acknowledged.extend(writer.flush_due())

    threads = [threading.Thread(target=append, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    acknowledged.extend(writer.close())
    reader = spool.reader()
    assert sorted(acknowledged) == sorted(f"math/{thread}/{index}" for thread in range(4) for index in range(100))
    assert sorted(ids(reader.poll())) == sorted(acknowledged)
    assert reader.num_duplicates == 0


def test_a_full_writer_has_no_room(spool):
    writer = spool.writer(batching=BatchLimits(max_bytes=5_000))
    assert writer.has_room
    writer.append(make_odd_trajectory(num_tokens=1000))
    assert not writer.has_room
    writer.flush()
    assert writer.has_room


# --- a spool on a disk


def test_a_restarted_producer_continues_after_its_segments(disk):
    for index in range(3):
        writer = disk.writer()
        writer.append(make_odd_trajectory(f"math/0/{index}"))
        writer.close()
    assert ids(disk.reader().poll()) == ["math/0/0", "math/0/1", "math/0/2"]
    assert count_trajectories(list_segments(disk.directory)) == 3


def test_two_processes_with_one_producer_name_lose_nothing(disk):
    first, second = disk.writer(), disk.writer()
    for index, writer in enumerate((first, second, first, second)):  # both use number 1
        writer.append(make_odd_trajectory(f"math/0/{index}"))
        assert writer.flush() == [f"math/0/{index}"]
    assert sorted(ids(disk.reader().poll())) == [f"math/0/{index}" for index in range(4)]


def test_a_batch_that_could_not_be_written_is_kept_and_written_later(disk):
    disk.directory.write_text("in the way")
    writer = disk.writer()
    writer.append(make_odd_trajectory("math/0/0"))
    with pytest.raises(SpoolError, match="1 trajectories of '000-env-0' are kept in memory"):
        writer.flush()
    writer.append(make_odd_trajectory("math/0/1"))
    disk.directory.unlink()
    assert writer.flush() == ["math/0/0", "math/0/1"]
    assert ids(disk.reader().poll()) == ["math/0/0", "math/0/1"]


def test_a_directory_that_vanishes_is_reported_by_writer_and_reader(disk):
    writer, reader = disk.writer(), disk.reader()
    writer.append(make_odd_trajectory("math/0/0"))
    writer.flush()
    assert ids(reader.poll()) == ["math/0/0"]
    aside = disk.directory.with_name("aside")
    disk.directory.rename(aside)
    writer.append(make_odd_trajectory("math/0/1"))
    with pytest.raises(SpoolError, match=r"No such file or directory.*kept in memory"):
        writer.flush()
    with pytest.raises(SpoolError, match="is gone"):
        reader.poll()
    aside.rename(disk.directory)
    assert writer.flush() == ["math/0/1"]
    assert ids(reader.poll()) == ["math/0/1"]


def test_a_reader_may_start_before_the_first_writer(disk):
    assert disk.reader().poll() == []


def test_a_path_that_is_not_a_directory_is_reported(disk):
    disk.directory.write_text("")
    with pytest.raises(SpoolError, match=r"cannot list spool .*Not a directory"):
        disk.reader().poll()


def test_a_damaged_segment_is_reported_once_and_the_others_are_delivered(disk):
    writer = disk.writer(batching=BatchLimits(max_count=1))
    for index in range(3):
        writer.append(make_odd_trajectory(f"math/0/{index}"))
        writer.flush()
    damaged = disk.directory / list_segments(disk.directory)[1]
    raw = bytearray(damaged.read_bytes())
    raw[len(raw) // 2 :] = raw[: len(raw) // 2]
    damaged.write_bytes(raw)
    (disk.directory / "model.h5").write_text("foreign")
    (disk.directory / "notes.txt").write_text("not the name of a segment, so it is ignored")
    reader = disk.reader()
    assert ids(reader.poll()) == ["math/0/0", "math/0/2"]
    assert reader.poll() == []
    assert [name for name, _ in disk.damage] == [damaged.name, "model.h5"]
    assert reader.damaged == dict(disk.damage)
    assert "damaged or foreign" in reader.damaged[damaged.name]
    assert not damaged.exists()
    aside = disk.directory / "quarantine" / damaged.name
    assert aside.read_bytes() == raw
    assert "damaged or foreign" in aside.with_name(f"{aside.name}.reason").read_text()


def test_a_segment_that_is_made_again_after_its_quarantine_is_read(disk):
    writer, reader = disk.writer(), disk.reader()
    writer.append(make_odd_trajectory())
    writer.flush()
    (name,) = list_segments(disk.directory)
    whole = (disk.directory / name).read_bytes()
    (disk.directory / name).write_bytes(whole[:-1])
    assert reader.poll() == []
    (disk.directory / name).write_bytes(whole)
    announce_changes(disk.directory, added=[name])
    assert ids(reader.poll()) == ["math/0/0"]
    assert reader.damaged == {}
    assert [reported for reported, _ in disk.damage] == [name]


def test_a_segment_out_of_reach_is_reported_once_and_read_when_it_is_back(disk):
    writer, reader = disk.writer(), disk.reader()
    writer.append(make_odd_trajectory())
    writer.flush()
    (name,) = list_segments(disk.directory)
    away = disk.directory.with_name("away.h5")
    (disk.directory / name).rename(away)
    (disk.directory / name).symlink_to(disk.directory / "nowhere")
    assert reader.poll() == reader.poll() == []
    assert [reported for reported, _ in disk.damage] == [name]
    away.rename(disk.directory / name)
    assert ids(reader.poll()) == ["math/0/0"]
    assert reader.damaged == {}


def test_temporary_files_of_a_killed_writer_are_not_read(disk):
    writer = disk.writer()
    writer.append(make_odd_trajectory())
    writer.flush()
    (name,) = list_segments(disk.directory)
    shutil.copy(disk.directory / name, disk.directory / f".{name}.0123456789ab.tmp")
    reader = disk.reader()
    assert ids(reader.poll()) == ["math/0/0"]
    assert (reader.num_duplicates, disk.damage) == (0, [])


def scored(record):
    return msgspec.structs.replace(record, reward=float(len(record)))


def test_a_derived_segment_has_the_same_name_and_the_new_facts(disk):
    writer = disk.writer()
    writer.append(make_odd_trajectory("math/0/0", num_tokens=3))
    writer.append(make_odd_trajectory("math/0/1", num_tokens=4))
    writer.flush()
    (name,) = list_segments(disk.directory)
    target = derive_segment(disk.directory / name, disk.directory.with_name("scored"), scored)
    assert target.name == name
    assert [one.reward for one in read_segment(target)] == [3.0, 4.0]


def test_a_segment_that_is_derived_already_is_left_alone(disk):
    source, target_dir = disk.directory / "a.h5", disk.directory / "scored"
    disk.directory.mkdir()
    write_segment(source, [make_odd_trajectory()])
    before = derive_segment(source, target_dir, scored).read_bytes()
    assert derive_segment(source, target_dir, pytest.fail).read_bytes() == before


def test_a_transformation_that_fails_leaves_nothing(disk):
    disk.directory.mkdir()
    write_segment(disk.directory / "a.h5", [make_odd_trajectory()])
    with pytest.raises(ZeroDivisionError):
        derive_segment(disk.directory / "a.h5", disk.directory / "scored", lambda _: 1 / 0)
    assert not (disk.directory / "scored").exists()


def test_a_segment_that_is_removed_before_it_is_read_is_forgotten(disk):
    writer, reader = disk.writer(), disk.reader()
    writer.append(make_odd_trajectory("math/0/0"))
    writer.flush()
    assert ids(reader.poll()) == ["math/0/0"]
    for index in (1, 2):
        writer.append(make_odd_trajectory(f"math/0/{index}"))
        writer.flush()
    first, second, third = list_segments(disk.directory)
    (disk.directory / second).unlink()
    announce_changes(disk.directory, removed=[second, third])
    announce_changes(disk.directory, added=[third])
    assert ids(reader.poll()) == ["math/0/2"]
    assert reader.poll() == []
    assert (reader.passed.total(), reader.num_duplicates, disk.damage) == (2, 0, [])
    assert sorted(reader.finished_segments([])) == [first, third]


# --- several processes


def run_all(targets):
    """Run each (function, *args) in a separate process; all must succeed."""
    processes = [FORK.Process(target=function, args=args) for function, *args in targets]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(processes)


def derive_when_all_are_ready(barrier, source, target_dir):
    def slow(record):
        barrier.wait(30)
        return scored(record)

    derive_segment(source, target_dir, slow)


def test_racing_derivations_leave_one_complete_segment(disk):
    disk.directory.mkdir()
    source, target_dir = disk.directory / "a.h5", disk.directory / "scored"
    write_segment(source, [make_odd_trajectory()])
    barrier = FORK.Barrier(4)
    run_all([(derive_when_all_are_ready, barrier, source, target_dir)] * 4)
    assert {path.name for path in target_dir.iterdir()} == {"a.h5", ".news"}
    assert [one.reward for one in read_segment(target_dir / "a.h5")] == [6.0]


def produce(disk, producer, num):
    writer = disk.writer(producer, batching=BatchLimits(max_count=7))
    acknowledged = []
    for index in range(num):
        writer.append(make_odd_trajectory(f"{producer}/{index}", num_tokens=index % 50))
        acknowledged += writer.flush_due()
    acknowledged += writer.close()
    assert acknowledged == [f"{producer}/{index}" for index in range(num)]


def consume(disk, wanted):
    reader = disk.reader()
    found = []
    while len(found) < len(wanted):
        found += ids(reader.poll())
    assert sorted(found) == sorted(wanted)
    assert (reader.num_duplicates, disk.damage) == (0, [])


def test_readers_get_every_trajectory_of_working_writers_once(disk):
    producers = [f"000-env-{index}" for index in range(4)]
    wanted = [f"{producer}/{index}" for producer in producers for index in range(60)]
    run_all([*((consume, disk, wanted) for _ in range(2)), *((produce, disk, name, 60) for name in producers)])


def test_a_segment_whose_trajectories_have_rewards_is_its_own_twin(tmp_path):
    rollouts, scored, sealed = tmp_path / "rollouts", tmp_path / "scored", []
    writer = DiskSpoolWriter(
        rollouts, producer="w", scored=scored, on_sealed=lambda name, twin: sealed.append([one.reward for one in twin])
    )
    writer.append(make_trajectory("math/0/0", reward=1.0), make_trajectory("math/0/1", reward=0.5))
    writer.flush()
    (name,) = list_segments(scored)
    assert (scored / name).samefile(rollouts / name)
    assert sealed == [[1.0, 0.5]]


def test_a_segment_with_one_trajectory_that_has_no_reward_gets_no_twin(tmp_path):
    rollouts, scored, sealed = tmp_path / "rollouts", tmp_path / "scored", []
    writer = DiskSpoolWriter(
        rollouts, producer="w", scored=scored, on_sealed=lambda name, twin: sealed.append(list(twin))
    )
    writer.append(make_trajectory("math/0/0", reward=1.0), make_trajectory("math/0/1"))
    writer.flush()
    assert (list_segments(scored), len(list_segments(rollouts)), sealed) == ([], 1, [[]])


def test_the_writer_acknowledges_a_segment_before_the_hook_is_called(tmp_path):
    seen = []
    writer = DiskSpoolWriter(tmp_path / "rollouts", producer="w", on_sealed=lambda *_: seen.append(writer.needs_flush))
    writer.append(make_trajectory("math/0/0", reward=1.0))
    writer.flush_early()
    while not seen:
        time.sleep(0.001)
    assert seen == [True]


def test_a_twin_that_cannot_be_linked_is_left_to_a_reward_worker(tmp_path):
    rollouts, scored = tmp_path / "rollouts", tmp_path / "scored"
    scored.touch()  # no directory
    writer = DiskSpoolWriter(rollouts, producer="w", scored=scored)
    writer.append(make_trajectory("math/0/0", reward=1.0))
    assert writer.flush() == ["math/0/0"]
    assert len(list_segments(rollouts)) == 1
