"""A writer, a scorer and a consumer in a directory, as small as they can be and with the real parts between them.

    Writer      appends numbered episodes; starts again after the last one that was acknowledged, as a driver would
    Scorer      makes "scored" from "rollouts"
    Consumer    trains on what it finds, commits the real checkpoint with what it consumed, retires what is settled
    judge       what is wrong in the end: lost, trained on twice, unreadable

The consumer's "weights" are the ids that it trained on, in order, so a committed checkpoint shows whether it
saw a trajectory twice.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from bench.peers import records
from hpcrl.campaign_dir.checkpoints import parse_commit_number
from hpcrl.errors import HpcrlError, SpoolError
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.learn.group_choice import choose_groups
from hpcrl.spool.listing import list_segments
from hpcrl.spool.reader import DiskSpoolReader
from hpcrl.spool.record import COLUMNS, Trajectory
from hpcrl.spool.retention import SettledSegments, SpoolDirs, choose_retirable, recover_retirement, retire_segments
from hpcrl.spool.writer import BatchLimits, DiskSpoolWriter, derive_segment
from hpcrl.testing.learning import load_checkpoint, save_checkpoint
from hpcrl.trainers import checkpoint
from hpcrl.trainers.base import Trainer

KEEP_CHECKPOINTS = 2
_GROUPS_PER_STEP = 4
_STEPS_PER_CHECKPOINT = 2
_ANY_LAG = 1 << 30
_MERGE_BYTES = 256 << 10
"""Small, so that segments are retired all the time."""


@dataclass(kw_only=True)
class Losses:
    """What must be zero."""

    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    def add(self, other: "Losses") -> None:
        self.lost += other.lost
        self.twice += other.twice
        self.unreadable += other.unreadable


def spools_of(root: Path) -> SpoolDirs:
    return SpoolDirs(rollouts=root / "rollouts", scored=root / "scored", archive=root / "archive")


class Writer:
    """Episodes from `first` on; three make a batch."""

    def __init__(self, root: Path, *, first: int, seed: int, mean_tokens: int) -> None:
        self._writer = DiskSpoolWriter(
            spools_of(root).rollouts, producer="000-env-0", batching=BatchLimits(max_count=3)
        )
        self._rng = random.Random(seed)
        self._mean_tokens = mean_tokens
        self._next = first

    def step(self) -> list[str]:
        """Append one; the ids that were acknowledged."""
        self._writer.append(episode(self._next, num_tokens=1 + self._rng.randrange(2 * self._mean_tokens)))
        self._next += 1
        return self._writer.flush_due()


def episode(number: int, *, num_tokens: int) -> Trajectory:
    """`math/NUMBER/0`, a separate group; its tokens follow from its number and length."""
    (one,) = records.of_lengths([num_tokens], first=number)
    return one


class Scorer:
    """What driver and role reward do together."""

    def __init__(self, root: Path) -> None:
        self._spools = spools_of(root)

    def step(self) -> None:
        """Score every segment that was not."""
        rollouts, scored = self._spools.rollouts, self._spools.scored
        for name in list_segments(rollouts):
            try:
                derive_segment(rollouts / name, scored, lambda one: one)
            except SpoolError as error:
                if not isinstance(error.__cause__, FileNotFoundError):  # else it was retired since it was listed
                    raise


class Ledger:
    """A trainer whose weights are the ids that it trained on."""

    def __init__(self) -> None:
        self.trained: list[str] = []

    def train(self, chosen: Sequence[Trajectory]) -> None:
        for one in chosen:
            written = episode(int(one.id.split("/")[1]), num_tokens=len(one))
            assert all(np.array_equal(getattr(one, name), getattr(written, name)) for name in COLUMNS), one.id
        self.trained += [one.id for one in chosen]

    def snapshot(self) -> "Ledger":
        return self  # it is written before the next step is made

    def write(self, directory: Path) -> None:
        (directory / "ledger.json").write_text(json.dumps(self.trained))

    def load(self, directory: Path) -> None:
        self.trained = json.loads((directory / "ledger.json").read_text())


class Consumer:
    """What role train does between two steps."""

    def __init__(self, root: Path, *, on_damage: Callable[[str], None]) -> None:
        self.ledger = Ledger()
        self._checkpoints, self._spools = root / "checkpoints", spools_of(root)
        self._consumed, self._step, self._saved = ConsumedTrajectories(), 0, 0
        self._waiting: list[Trajectory] = []
        self._settled = SettledSegments(grace_s=0.0)

        def report(path: Path, reason: str) -> None:
            on_damage(f"{path.name}: {reason}")

        found = checkpoint.find_newest(self._checkpoints, report=report)
        if found is not None:
            manifest, self._consumed = load_checkpoint(found, trainer=self._trainer())
            self._step = self._saved = manifest.step
        recover_retirement(self._spools, lower_settled=_count_nothing)
        self._reader = DiskSpoolReader(self._spools.scored, on_damage=report, consumed=self._consumed)

    def step(self) -> bool:
        """Train on up to four groups; False if there were none."""
        self._waiting += self._reader.poll()
        choice = choose_groups(
            self._waiting,
            groups_per_step=min(_GROUPS_PER_STEP, len({one.group for one in self._waiting})),
            group_size=1,
            version=0,
            max_lag=_ANY_LAG,
            consumed=self._consumed,
        )
        self._waiting = choice.rest
        if not choice.chosen:
            return False
        self.ledger.train(choice.chosen)
        self._consumed.update(one.id for one in choice.chosen)
        self._step += 1
        if self._step - self._saved >= _STEPS_PER_CHECKPOINT:
            self.commit()
        return True

    def commit(self) -> None:
        self._settled.note(self._reader.finished_segments(self._waiting))
        saved = save_checkpoint(
            self._checkpoints, step=self._step, version=self._step, trainer=self._trainer(), consumed=self._consumed
        )
        checkpoint.prune_checkpoints(self._checkpoints, keep=KEEP_CHECKPOINTS)
        self._settled.cover(parse_commit_number(saved))
        self._saved = self._step
        self._retire()

    def _retire(self) -> None:
        oldest = checkpoint.find_oldest_number(self._checkpoints, keep=KEEP_CHECKPOINTS)
        assert oldest is not None
        due = self._settled.due(oldest_checkpoint=oldest)
        if chosen := choose_retirable(due, self._spools.scored, max_bytes=_MERGE_BYTES):
            self._reader.forget(chosen)
            retire_segments(self._spools, chosen, keep=True, lower_settled=_count_nothing)
            self._settled.drop(chosen)

    def _trainer(self) -> Trainer:
        """`checkpoint` asks a trainer for `snapshot` and `load` alone."""
        return cast(Trainer, self.ledger)


def judge(root: Path, acknowledged: Iterable[str]) -> Losses:
    """Let a last scorer and consumer finish; look at what was committed, and at what is kept of it."""
    losses = Losses()
    try:
        trained = _finish(root, on_damage=losses.unreadable.append)
        kept = _kept(spools_of(root), losses.unreadable)
    except HpcrlError as error:  # the next job would not get any further
        return Losses(lost=sorted(set(acknowledged)), unreadable=[*losses.unreadable, str(error)])
    losses.twice = [name for name, count in trained.items() if count > 1]
    losses.lost = sorted(set(acknowledged) - (trained.keys() & kept))
    return losses


def _finish(root: Path, *, on_damage: Callable[[str], None]) -> Counter[str]:
    """How often each id was trained on, by the last checkpoint."""
    Scorer(root).step()
    consumer = Consumer(root, on_damage=on_damage)
    while consumer.step():
        pass
    consumer.commit()
    return Counter(Consumer(root, on_damage=on_damage).ledger.trained)


def _kept(spools: SpoolDirs, unreadable: list[str]) -> set[str]:
    """The ids in "scored" and in the archive."""
    kept = set()
    for directory in (spools.scored, spools.archive):
        reader = DiskSpoolReader(directory, on_damage=lambda path, why: unreadable.append(f"{path.name}: {why}"))
        kept |= {one.id for one in reader.poll()}
    return kept


def _count_nothing(segments: list[str]) -> None:
    """In a campaign this lowers the count that env workers use."""
