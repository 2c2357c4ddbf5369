"""Many processes use one spool, and consumers are killed at any moment."""

import multiprocessing
import os
import random
import time

from hpcrl.spool.reader import DiskSpoolReader
from hpcrl.spool.writer import BatchLimits, DiskSpoolWriter
from hpcrl.system.files import publish_json, read_json
from tests.support.trajectories import make_trajectory

FORK = multiprocessing.get_context("fork")
NUM_WRITERS = 16
NUM_CONSUMERS = 4
PER_WRITER = 40
NUM_KILLS = 30


def refuse(path, reason):
    raise AssertionError(f"{path}: {reason}")


def write(directory, number):
    writer = DiskSpoolWriter(directory, producer=f"000-env-{number}", batching=BatchLimits(max_count=7))
    acknowledged = []
    for index in range(PER_WRITER):
        writer.append(make_trajectory(f"math-{number}/{index}/0", index * 10))
        acknowledged += writer.flush_due()
    acknowledged += writer.close()
    assert acknowledged == [f"math-{number}/{index}/0" for index in range(PER_WRITER)]


def consume_all(directory):
    reader = DiskSpoolReader(directory, on_damage=refuse)
    seen = set()
    while len(seen) < NUM_WRITERS * PER_WRITER:
        for one in reader.poll():
            assert one.id not in seen
            assert one.token_ids.tolist() == list(range(len(one)))
            seen.add(one.id)
        time.sleep(0.002)
    assert reader.num_duplicates == 0


def test_four_consumers_get_every_trajectory_of_sixteen_writers_once(tmp_path):
    targets = [(consume_all, tmp_path)] * NUM_CONSUMERS + [(write, tmp_path, number) for number in range(NUM_WRITERS)]
    processes = [FORK.Process(target=target, args=args) for target, *args in targets]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * len(processes)


def consume_until_killed(directory, commit):
    """Use trajectories, a few at a time, and commit their ids, as a trainer does with its checkpoint."""
    used = read_json(commit) if commit.exists() else []
    reader = DiskSpoolReader(directory, on_damage=refuse, consumed=frozenset(used))
    while True:
        new = [one.id for one in reader.poll()]
        for start in range(0, len(new), 3):
            used += new[start : start + 3]
            publish_json(commit, used)
        time.sleep(0.001)


def test_a_consumer_that_is_killed_at_any_moment_uses_everything_once(tmp_path):
    rng = random.Random(11)
    spool, commit = tmp_path / "spool", tmp_path / "commit.json"
    writer = DiskSpoolWriter(spool, producer="000-env-0", batching=BatchLimits(max_count=4))
    acknowledged = []
    for run in range(NUM_KILLS):
        for index in range(6):
            writer.append(make_trajectory(f"math/{run * 6 + index}/0", rng.randrange(2000)))
        consumer = FORK.Process(target=consume_until_killed, args=(spool, commit))
        consumer.start()
        time.sleep(rng.uniform(0.0, 0.05))
        acknowledged += writer.flush()
        time.sleep(rng.uniform(0.0, 0.05))
        assert consumer.is_alive()
        consumer.kill()
        consumer.join()
    last = FORK.Process(target=consume_until_killed, args=(spool, commit))
    last.start()
    deadline = time.monotonic() + 60
    while len(read_json(commit) if commit.exists() else []) < len(acknowledged):
        assert time.monotonic() < deadline, "not everything was used"
        time.sleep(0.05)
    last.kill()
    last.join()
    used = read_json(commit)
    assert sorted(used) == sorted(acknowledged)
    assert len(used) == len(set(used)) == 6 * NUM_KILLS
    assert [name for name in os.listdir(spool) if name == "quarantine"] == []  # noqa: PTH208
