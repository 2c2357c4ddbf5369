"""Role train: whole groups from "scored" make a step, a step makes a version; a checkpoint knows what it consumed."""

import time
from dataclasses import dataclass, field

import msgspec

from hpcrl.engines.tiny import make_tiny_model
from hpcrl.files import publish_json
from hpcrl.learn.batch import choose_groups
from hpcrl.learn.consumed import Consumed
from hpcrl.processes import EXIT_DONE, EXIT_DRAINED
from hpcrl.roles.context import Context
from hpcrl.spool.record import Trajectory
from hpcrl.spool.spool import DiskSpoolReader
from hpcrl.trainers import checkpoint
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.weights.store import FileStore

POLL_S = 0.05


def run(context: Context) -> int:
    """Train until the recipe's last step, or until the job drains; the exit code says which."""
    _make_model(context)
    learner = Learner.begin_or_resume(context)
    while learner.step < context.recipe.train.num_steps:
        if context.draining:
            learner.checkpoint()
            return EXIT_DRAINED
        if not learner.try_step():
            time.sleep(POLL_S)
    learner.checkpoint()
    return EXIT_DONE


def _make_model(context: Context) -> None:
    """The directory that all roles load architecture and tokenizer from."""
    model, where = context.recipe.model, context.run.model
    if where.exists():
        return
    if model.path is not None:
        where.symlink_to(model.path, target_is_directory=True)
    else:
        assert model.tiny is not None  # load_recipe checks it
        make_tiny_model(where, model.tiny, seed=context.recipe.seed)


@dataclass
class Learner:
    """The trainer and its place in the campaign."""

    context: Context
    trainer: TorchTrainer
    store: FileStore
    reader: DiskSpoolReader
    consumed: Consumed
    step: int
    version: int
    saved_step: int
    waiting: list[Trajectory] = field(default_factory=list)
    num_settled: int = 0
    waiting_since: float = field(default_factory=time.monotonic)

    @classmethod
    def begin_or_resume(cls, context: Context) -> "Learner":
        """From the newest whole checkpoint, or from the initial weights; either way a version is published."""
        recipe, run = context.recipe, context.run
        trainer = TorchTrainer(
            run.model, recipe.train, seed=recipe.seed, temperature=recipe.rollout.temperature, device=_device()
        )
        store = FileStore(run.weights)
        consumed, step, version = Consumed(), 0, 0
        found = checkpoint.newest(
            run.checkpoints,
            report=lambda path, why: context.events.emit("fault", what="checkpoint", detail=f"{path}: {why}"),
        )
        if found is not None:
            manifest, consumed = checkpoint.load(found, trainer=trainer)
            step, version = manifest.step, manifest.version
            context.events.emit("resumed", step=step, version=version, checkpoint=found.name)
        learner = cls(
            context=context,
            trainer=trainer,
            store=store,
            reader=DiskSpoolReader(
                run.spool("scored"),
                on_damage=lambda path, why: context.events.emit("fault", what="spool", detail=f"{path}: {why}"),
            ),
            consumed=consumed,
            step=step,
            version=version,
            saved_step=step if found is not None else -1,
        )
        newest = store.newest()
        if newest is None or newest.version != version:
            # Versions never go back: what was published after the checkpoint belongs to a lost past.
            learner.version = max(version, newest.version + 1 if newest else 0)
            learner.publish()
        return learner

    def try_step(self) -> bool:
        """One step, if there are groups for it."""
        recipe = self.context.recipe
        for trajectory in self.reader.poll():
            if trajectory.id in self.consumed:
                self.num_settled += 1
            else:
                self.waiting.append(trajectory)
        choice = choose_groups(
            self.waiting,
            groups_per_step=recipe.train.groups_per_step,
            group_size=recipe.rollout.group_size,
            version=self.version,
            max_lag=recipe.rollout.max_lag,
            consumed=self.consumed,
        )
        self.waiting = choice.rest
        if choice.stale:
            self.context.events.emit("stale", num=len(choice.stale), version=self.version)
            self._settle(len(choice.stale))
        if not choice.chosen:
            return False
        wait_s = time.monotonic() - self.waiting_since
        metrics = self.trainer.train_step(choice.chosen, step=self.step + 1, version=self.version)
        self.consumed.update(trajectory.id for trajectory in choice.chosen)
        self.step += 1
        self.version += 1
        self.publish()
        self._settle(len(choice.chosen))
        self.context.events.emit("step", **msgspec.structs.asdict(metrics), wait_s=round(wait_s, 4))
        if self.step % recipe.train.checkpoint_every_steps == 0:
            self.checkpoint()
        self.waiting_since = time.monotonic()
        return True

    def publish(self) -> None:
        """Give the weights to every engine."""
        began = time.monotonic()
        self.store.publish(self.trainer.tensors(), version=self.version, step=self.step)
        self.store.prune(keep=self.context.recipe.train.keep_versions)
        wall_s = round(time.monotonic() - began, 4)
        self.context.events.emit("published", version=self.version, step=self.step, wall_s=wall_s)

    def checkpoint(self) -> None:
        """Trainer state and consumed ids, in one commit."""
        if self.saved_step == self.step:
            return
        began = time.monotonic()
        checkpoint.save(
            self.context.run.checkpoints,
            step=self.step,
            version=self.version,
            trainer=self.trainer,
            consumed=self.consumed,
        )
        checkpoint.prune(self.context.run.checkpoints, keep=self.context.recipe.train.keep_checkpoints)
        self.saved_step = self.step
        wall_s = round(time.monotonic() - began, 4)
        self.context.events.emit("checkpoint", step=self.step, version=self.version, wall_s=wall_s)

    def _settle(self, num: int) -> None:
        """Tell env hosts how many trajectories are used or dropped, so that they may begin as many new ones."""
        self.num_settled += num
        publish_json(self.context.run.settled, {"num": self.num_settled})


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
