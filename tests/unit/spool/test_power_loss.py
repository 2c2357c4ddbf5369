"""After a power cut at any moment, each acknowledged trajectory exists once, and nothing torn is read."""

import random

import numpy as np

from hpcrl.spool.listing import list_segments
from hpcrl.spool.reader import DiskSpoolReader
from hpcrl.spool.record import pack_trajectory
from hpcrl.spool.writer import BatchLimits, DiskSpoolWriter
from tests.support.recorded_disk import Recording, acknowledged, after_power_loss
from tests.support.trajectories import make_trajectory

NUM_CUTS = 300


def trajectory(number):
    num_tokens = 50 + number * 37 % 400
    return make_trajectory(
        f"math/{number}/0",
        seed=number,
        token_ids=np.arange(num_tokens) + number,
        logprobs=np.full(num_tokens, -number),
    )


SENT = {one.id: one for one in map(trajectory, range(24))}


def recorded(directory, monkeypatch):
    """Record the disk operations of a writer of six segments."""
    recording = Recording(directory)
    with monkeypatch.context() as patched:
        recording.patch(patched)
        writer = DiskSpoolWriter(directory, producer="000-env-0", batching=BatchLimits(max_count=4))
        for one in SENT.values():
            writer.append(one)
            recording.acknowledge(writer.flush_due())
        recording.acknowledge(writer.close())
    return recording.operations


def losses(operations, directory, *, seed):
    """Return what is wrong with a spool after a power cut at a random moment."""
    rng = random.Random(seed)
    before = operations[: rng.randrange(len(operations) + 1)]
    spool = directory / str(seed)
    after_power_loss(before, spool, rng)
    damaged = []
    found = DiskSpoolReader(spool, on_damage=lambda path, _: damaged.append(path.name)).poll()
    wrong = [f"{name} was acknowledged and is lost" for name in set(acknowledged(before)) - {one.id for one in found}]
    wrong += [f"{len(found)} were found, of {len({one.id for one in found})} episodes"] * (
        len(found) != len({one.id for one in found})
    )
    for one in found:
        stored, sent = pack_trajectory(one), pack_trajectory(SENT[one.id])
        if stored.facts != sent.facts or any(
            (stored.columns[name] != sent.columns[name]).any() for name in sent.columns
        ):
            wrong.append(f"{one.id} is not as it was sent")
    return wrong + [f"{name} is listed and cannot be read" for name in damaged]


def test_a_power_cut_loses_nothing_that_was_acknowledged(tmp_path, monkeypatch):
    operations = recorded(tmp_path / "spool", monkeypatch)
    assert sorted(acknowledged(operations)) == sorted(SENT)
    assert [wrong for seed in range(NUM_CUTS) for wrong in losses(operations, tmp_path, seed=seed)] == []


def test_the_replay_detects_a_writer_that_does_not_sync_its_files(tmp_path, monkeypatch):
    operations = recorded(tmp_path / "spool", monkeypatch)
    careless = [
        operation for operation in operations if getattr(operation, "file", 0) is None or "Sync" not in repr(operation)
    ]
    assert any("cannot be read" in wrong for seed in range(100) for wrong in losses(careless, tmp_path, seed=seed))


def test_the_replay_detects_a_writer_that_does_not_sync_its_directory(tmp_path, monkeypatch):
    operations = recorded(tmp_path / "spool", monkeypatch)
    careless = [operation for operation in operations if repr(operation) != "Sync(file=None)"]
    assert any("is lost" in wrong for seed in range(100) for wrong in losses(careless, tmp_path, seed=seed))


def test_nothing_is_written_past_the_recording(tmp_path, monkeypatch):
    directory = tmp_path / "spool"
    operations = recorded(directory, monkeypatch)
    after_power_loss(operations, tmp_path / "copy", random.Random(0))
    names = list_segments(directory)
    assert all((tmp_path / "copy" / name).read_bytes() == (directory / name).read_bytes() for name in names)
    assert len(names) == 6
