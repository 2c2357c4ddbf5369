"""A checkpoint that several ranks write in the background: their parts are in one commit, or it fails."""

import threading
from dataclasses import dataclass

import pytest

from hpcrl.errors import TrainError
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.trainers import checkpoint
from hpcrl.trainers.leader import Together, leave_state
from hpcrl.weights.stores.part_files import make_parts_directory


@dataclass(frozen=True)
class Part:
    """The state of one rank."""

    rank: int
    error: str = ""

    def write(self, directory):
        if self.error:
            raise OSError(self.error)
        (directory / f"state-{self.rank}").write_text(f"of rank {self.rank}")


def pending(state, *, step=3):
    return checkpoint.PendingCheckpoint(
        step=step, version=step, state=state, consumed=ConsumedTrajectories().encode(), extra={}
    )


def refuse(path, why):
    raise AssertionError(f"{path}: {why}")


def test_the_parts_of_all_ranks_are_in_one_commit(tmp_path):
    directory = make_parts_directory(tmp_path)
    late = threading.Timer(0.2, leave_state, args=(Part(2), directory), kwargs={"rank": 2})
    late.start()
    leave_state(Part(1), directory, rank=1)
    path = checkpoint.commit_checkpoint(tmp_path, pending(Together(Part(0), directory, 3)))
    late.join()
    assert [(path / f"state-{rank}").read_text() for rank in range(3)] == [f"of rank {rank}" for rank in range(3)]
    assert checkpoint.find_newest(tmp_path, report=refuse) == path
    assert [left.name for left in tmp_path.iterdir()] == [path.name]


def test_a_rank_that_cannot_write_is_named_and_the_checkpoint_before_stays(tmp_path):
    before = checkpoint.commit_checkpoint(tmp_path, pending(Part(0), step=1))
    directory = make_parts_directory(tmp_path)
    leave_state(Part(1, error="no space left"), directory, rank=1)
    with pytest.raises(TrainError, match=r"rank 1 cannot write its part: no space left.*free\s+space"):
        checkpoint.commit_checkpoint(tmp_path, pending(Together(Part(0), directory, 2)))
    assert checkpoint.find_newest(tmp_path, report=refuse) == before


def test_a_rank_that_never_writes_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("hpcrl.weights.stores.part_files.PART_TIMEOUT_S", 0.1)
    with pytest.raises(TrainError, match="rank 1 has not written its part"):
        checkpoint.commit_checkpoint(tmp_path, pending(Together(Part(0), make_parts_directory(tmp_path), 2)))


def test_the_leftovers_of_a_killed_trainer_are_removed_with_the_next_checkpoint(tmp_path):
    leave_state(Part(1), make_parts_directory(tmp_path), rank=1)
    path = checkpoint.commit_checkpoint(tmp_path, pending(Part(0)))
    checkpoint.prune_checkpoints(tmp_path, keep=2)
    assert [left.name for left in tmp_path.iterdir()] == [path.name]
