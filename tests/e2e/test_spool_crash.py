"""Writers that are killed at any moment lose nothing that they acknowledged and leave nothing that cannot be read."""

import contextlib
import multiprocessing
import os
import random
import time

from hpcrl.spool.reader import DiskSpoolReader
from hpcrl.spool.writer import BatchLimits, DiskSpoolWriter
from tests.support.spools import trajectory

FORK = multiprocessing.get_context("fork")
NUM_KILLS = 30


def write_until_killed(directory, life, pipe):
    """Append for ever; say in `pipe` what was acknowledged, one id a line."""
    writer = DiskSpoolWriter(directory, producer="000-env-0", batching=BatchLimits(max_count=3))
    rng = random.Random(life)
    number = 0
    while True:
        writer.append(trajectory(f"math/{life}/{number}", rng.randrange(20_000)))
        for name in writer.flush_due():
            os.write(pipe, f"{name}\n".encode())
        number += 1


def acknowledged_before_a_kill(directory, life, *, after_s):
    """Run a writer, kill it, and return what it had acknowledged."""
    ours, theirs = os.pipe()
    process = FORK.Process(target=write_until_killed, args=(directory, life, theirs))
    process.start()
    os.close(theirs)
    time.sleep(after_s)
    process.kill()
    process.join()
    with os.fdopen(ours) as lines:
        return [line.rstrip("\n") for line in lines if line.endswith("\n")]


def test_killed_writers_lose_nothing_that_they_acknowledged(tmp_path):
    rng = random.Random(20260101)
    damage, acknowledged, found = [], [], []
    live = DiskSpoolReader(tmp_path, on_damage=lambda *told: damage.append(told))
    for life in range(NUM_KILLS):
        acknowledged += acknowledged_before_a_kill(tmp_path, life, after_s=rng.uniform(0.0, 0.08))
        found += [one.id for one in live.poll()]
    late = [one.id for one in DiskSpoolReader(tmp_path, on_damage=lambda *told: damage.append(told)).poll()]
    deadline = time.monotonic() + 30
    while len(found) < len(late) and time.monotonic() < deadline:  # a killed writer may not have announced its last
        found += [one.id for one in live.poll()]
        time.sleep(0.05)
    assert len(acknowledged) > NUM_KILLS
    assert set(acknowledged) <= set(found)
    assert sorted(found) == sorted(late)
    assert len(found) == len(set(found))
    assert damage == []


def test_a_reader_at_work_sees_only_whole_segments_while_writers_are_killed(tmp_path):
    rng = random.Random(7)
    damage = []
    reader = DiskSpoolReader(tmp_path, on_damage=lambda *told: damage.append(told))
    with contextlib.ExitStack() as ended:
        for life in range(8):
            ours, theirs = os.pipe()
            ended.callback(os.close, ours)
            process = FORK.Process(target=write_until_killed, args=(tmp_path, life, theirs))
            process.start()
            os.close(theirs)
            ends = time.monotonic() + rng.uniform(0.02, 0.1)
            while time.monotonic() < ends:
                for one in reader.poll():
                    assert one.token_ids.tolist() == list(range(len(one)))
            process.kill()
            process.join()
    assert damage == []
