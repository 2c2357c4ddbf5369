"""Writers that are killed at any moment lose no acknowledged trajectory and leave no unreadable segment."""

import contextlib
import multiprocessing
import os
import random
import time

from hpcrl.spool.reader import DiskSpoolReader
from hpcrl.spool.writer import BatchLimits, DiskSpoolWriter
from tests.support.trajectories import make_trajectory

FORK = multiprocessing.get_context("fork")
NUM_KILLS = 30


def write_until_killed(directory, run, pipe):
    """Write a byte to `pipe`, then append until killed and write the acknowledged ids, one per line."""
    os.write(pipe, b"+")
    writer = DiskSpoolWriter(directory, producer="000-env-0", batching=BatchLimits(max_count=3))
    rng = random.Random(run)
    number = 0
    while True:
        writer.append(make_trajectory(f"math/{run}/{number}", rng.randrange(20_000)))
        for name in writer.flush_due():
            os.write(pipe, f"{name}\n".encode())
        number += 1


def acknowledged_before_a_kill(directory, run, *, after_s):
    """Run a writer, kill it, and return what it had acknowledged."""
    ours, theirs = os.pipe()
    process = FORK.Process(target=write_until_killed, args=(directory, run, theirs))
    process.start()
    os.close(theirs)
    assert os.read(ours, 1) == b"+", "the writer has started"
    time.sleep(after_s)
    process.kill()
    process.join()
    with os.fdopen(ours) as lines:
        return [line.rstrip("\n") for line in lines if line.endswith("\n")]


def test_killed_writers_lose_nothing_that_they_acknowledged(tmp_path):
    rng = random.Random(20260101)
    damage, acknowledged, found = [], [], []
    live = DiskSpoolReader(tmp_path, on_damage=lambda *report: damage.append(report))
    for run in range(NUM_KILLS):
        acknowledged += acknowledged_before_a_kill(tmp_path, run, after_s=rng.uniform(0.0, 0.08))
        found += [one.id for one in live.poll()]
    late = [one.id for one in DiskSpoolReader(tmp_path, on_damage=lambda *report: damage.append(report)).poll()]
    deadline = time.monotonic() + 30
    while len(found) < len(late) and time.monotonic() < deadline:  # the last segment may be unannounced
        found += [one.id for one in live.poll()]
        time.sleep(0.05)
    assert len(acknowledged) > NUM_KILLS
    assert set(acknowledged) <= set(found)
    assert sorted(found) == sorted(late)
    assert len(found) == len(set(found))
    assert damage == []


def test_a_reader_gets_only_complete_segments_while_writers_are_killed(tmp_path):
    rng = random.Random(7)
    damage = []
    reader = DiskSpoolReader(tmp_path, on_damage=lambda *report: damage.append(report))
    with contextlib.ExitStack() as ended:
        for run in range(8):
            ours, theirs = os.pipe()
            ended.callback(os.close, ours)
            process = FORK.Process(target=write_until_killed, args=(tmp_path, run, theirs))
            process.start()
            os.close(theirs)
            ends = time.monotonic() + rng.uniform(0.02, 0.1)
            while time.monotonic() < ends:
                for one in reader.poll():
                    assert one.token_ids.tolist() == list(range(len(one)))
            process.kill()
            process.join()
    assert damage == []
