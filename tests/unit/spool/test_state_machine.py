"""Write, seal, score, train, commit, crash, recover and retire in any order: nothing is lost or used twice."""

import shutil
import tempfile
from pathlib import Path

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.spool.listing import count_trajectories, list_segments
from hpcrl.spool.reader import DiskSpoolReader
from hpcrl.spool.retention import SettledSegments, SpoolDirs, recover_retirement, retire_segments
from hpcrl.spool.segment import read_segment
from hpcrl.spool.writer import DiskSpoolWriter, derive_segment
from tests.support.trajectories import make_trajectory

NUM_KEPT = 2
"""The number of checkpoints that are kept."""


def scored(one):
    return msgspec.structs.replace(one, reward=1.0)


class Campaign(RuleBasedStateMachine):
    """Two producers and one trainer; the disk outlives them all."""

    @initialize()
    def start(self):
        self.root = Path(tempfile.mkdtemp())
        self.dirs = SpoolDirs(
            rollouts=self.root / "rollouts", scored=self.root / "scored", archive=self.root / "archive"
        )
        self.acknowledged = set()
        self.num_sent = 0
        self.checkpoints = [(0, ConsumedTrajectories().encode(), [])]
        self.writers = {}
        for producer in ("env-0", "env-1"):
            self.start_writer(producer)
        self.resume()

    def teardown(self):
        if hasattr(self, "root"):
            self.finish()
            shutil.rmtree(self.root)

    def start_writer(self, producer):
        self.writers[producer] = DiskSpoolWriter(self.dirs.rollouts, producer=producer)

    # The producers

    @rule(producer=st.sampled_from(["env-0", "env-1"]), num=st.integers(1, 3))
    def write(self, producer, num):
        for _ in range(num):
            self.writers[producer].append(make_trajectory(f"math/{self.num_sent}/0", 1, producer="env"))
            self.num_sent += 1

    @rule(producer=st.sampled_from(["env-0", "env-1"]), number=st.integers(0, 30))
    def write_again(self, producer, number):
        """Write an episode again, as a retry does whose first run was stored after all."""
        if number < self.num_sent:
            self.writers[producer].append(make_trajectory(f"math/{number}/0", 1, producer="env"))

    @rule(producer=st.sampled_from(["env-0", "env-1"]))
    def seal(self, producer):
        self.acknowledged.update(self.writers[producer].flush())

    @rule(producer=st.sampled_from(["env-0", "env-1"]), num=st.integers(1, 3), trained=st.integers(2, 6))
    def do_one_round(self, producer, num, trained):
        """Do the usual sequence, without which few runs would get far."""
        self.write(producer, num)
        self.seal(producer)
        self.score()
        self.train(trained)
        self.checkpoint()

    @rule(producer=st.sampled_from(["env-0", "env-1"]))
    def crash_producer(self, producer):
        self.start_writer(producer)

    # The rewards

    @rule()
    def score(self):
        for name in set(list_segments(self.dirs.rollouts)) - set(list_segments(self.dirs.scored)):
            derive_segment(self.dirs.rollouts / name, self.dirs.scored, scored)

    @precondition(lambda self: list_segments(self.dirs.scored))
    @rule(data=st.data())
    def rot(self, data):
        """Damage a scored segment before the trainer reads it; it is quarantined and scored again."""
        unread = set(list_segments(self.dirs.scored)) - self.reader._known.keys()
        if unread:
            (self.dirs.scored / data.draw(st.sampled_from(sorted(unread)))).write_bytes(b"rot")

    # The trainer

    def resume(self):
        """Resume from the newest checkpoint, as after a crash."""
        self.number, consumed, trained = self.checkpoints[-1]
        self.consumed, self.trained = ConsumedTrajectories.decode(consumed), list(trained)
        recover_retirement(self.dirs, lower_settled=lambda _: None)
        self.damaged = []
        self.reader = DiskSpoolReader(
            self.dirs.scored, on_damage=lambda path, _: self.damaged.append(path.name), consumed=self.consumed
        )
        self.waiting = []
        self.settled = SettledSegments(grace_s=0.0)

    @rule(num=st.integers(1, 3))
    def train(self, num):
        self.waiting += self.reader.poll()
        chosen, self.waiting = self.waiting[:num], self.waiting[num:]
        for one in chosen:
            assert one.id not in self.consumed
            assert one.reward == 1.0
            self.consumed.add(one.id)
            self.trained.append(one.id)

    @rule()
    def checkpoint(self):
        self.number += 1
        self.checkpoints.append((self.number, self.consumed.encode(), list(self.trained)))
        self.checkpoints = self.checkpoints[-NUM_KEPT:]
        self.settled.note(self.reader.finished_segments(self.waiting))
        self.settled.cover(self.number)

    @rule()
    def crash_trainer(self):
        self.resume()

    @precondition(lambda self: len(self.checkpoints) > 1)
    @rule()
    def crash_and_lose_the_newest_checkpoint(self):
        self.checkpoints.pop()
        self.resume()

    @precondition(lambda self: self.due())
    @rule(keep=st.booleans())
    def retire(self, keep):
        intent = retire_segments(self.dirs, self.due(), keep=keep, lower_settled=self.reader.forget)
        self.settled.drop(intent.segments)

    def due(self):
        return self.settled.due(oldest_checkpoint=self.checkpoints[0][0])

    # What must hold

    @invariant()
    def nothing_is_trained_on_twice(self):
        if hasattr(self, "trained"):
            assert len(self.trained) == len(set(self.trained))

    @invariant()
    def the_books_fit_the_disk(self):
        if hasattr(self, "reader"):
            assert self.reader.passed.total() <= count_trajectories(list_segments(self.dirs.rollouts))

    def finish(self):
        """Check that training gets every acknowledged trajectory once, whatever happened."""
        for _ in range(2):  # a damaged segment is scored again
            self.score()
            self.train(1 << 30)
        assert self.acknowledged <= set(self.trained)
        assert len(self.trained) == len(set(self.trained))
        archive = [
            one.id for name in list_segments(self.dirs.archive) for one in read_segment(self.dirs.archive / name)
        ]
        assert set(archive) <= set(self.trained)


Campaign.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestAnyOrderOfEvents = Campaign.TestCase


def test_a_segment_that_the_oldest_checkpoint_needs_is_kept():
    campaign = Campaign()
    campaign.start()
    campaign.do_one_round("env-0", num=3, trained=6)
    assert not campaign.due()  # a resume from before it would need it
    campaign.do_one_round("env-0", num=3, trained=6)
    assert len(campaign.due()) == 1
    campaign.retire(keep=True)
    campaign.crash_and_lose_the_newest_checkpoint()
    campaign.do_one_round("env-1", num=1, trained=6)
    campaign.teardown()
