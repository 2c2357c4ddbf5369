"""Role train: whole groups from "scored" make a step, a step makes a version; a checkpoint knows what it consumed."""

import time
from dataclasses import dataclass, field

import msgspec

from hpcrl.endpoints import this_node
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.learn.consumed import Consumed
from hpcrl.processes import EXIT_DONE, EXIT_DRAINED
from hpcrl.roles.context import Context
from hpcrl.roles.stock import Stock
from hpcrl.trainers import checkpoint
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.weights.publisher import Publisher
from hpcrl.weights.store import FileStore, WindowStore
from hpcrl.weights.versions import Rung
from hpcrl.weights.window import window_key

POLL_S = 0.05


def run(context: Context) -> int:
    """Train until the recipe's last step, or until the job drains; the exit code says which."""
    _make_model(context)
    learner = Learner.begin_or_resume(context)
    while learner.step < context.recipe.train.num_steps:
        if context.draining:
            learner.finish()
            return EXIT_DRAINED
        if not learner.try_step():
            learner.publisher.tend()
            time.sleep(POLL_S)
    learner.finish()
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
    publisher: Publisher
    stock: Stock
    consumed: Consumed
    step: int
    version: int
    saved_step: int
    waiting_since: float = field(default_factory=time.monotonic)

    @classmethod
    def begin_or_resume(cls, context: Context) -> "Learner":
        """From the newest whole checkpoint, or from the initial weights; either way a version is published."""
        recipe, run = context.recipe, context.run
        trainer = TorchTrainer(
            run.model, recipe.train, seed=recipe.seed, temperature=recipe.rollout.temperature, device=_device()
        )
        publisher = _publisher(context)
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
            publisher=publisher,
            stock=Stock(context, consumed=consumed),
            consumed=consumed,
            step=step,
            version=version,
            saved_step=step if found is not None else -1,
        )
        learner.stock.recover()
        newest = publisher.newest_version()
        if newest != version or publisher.newest_readable() != version:
            # Versions never go back: what was published after the checkpoint belongs to a lost past.
            learner.version = version if newest is None else max(version, newest + 1)
            learner.publish()
            publisher.persist()
        return learner

    def try_step(self) -> bool:
        """One step, if there are groups for it."""
        recipe = self.context.recipe
        choice = self.stock.choose(version=self.version)
        if choice.stale:
            self.context.events.emit("stale", num=len(choice.stale), version=self.version)
        if not choice.chosen:
            return False
        wait_s = time.monotonic() - self.waiting_since
        metrics = self.trainer.train_step(choice.chosen, step=self.step + 1, version=self.version)
        self.consumed.update(trajectory.id for trajectory in choice.chosen)
        self.step += 1
        self.version += 1
        self.publish()
        self.stock.trained()
        self.context.events.emit("step", **msgspec.structs.asdict(metrics), wait_s=round(wait_s, 4))
        if self.step % recipe.train.checkpoint_every_steps == 0:
            self.checkpoint()
            self.stock.retire(version=self.version)
        self.waiting_since = time.monotonic()
        return True

    def publish(self) -> None:
        """Give the weights to every engine."""
        self.publisher.publish(self.trainer.tensors(), version=self.version, step=self.step)

    def finish(self) -> None:
        """The last checkpoint; the newest version is in files when this returns."""
        self.checkpoint()
        self.publisher.close()
        self.stock.close()

    def checkpoint(self) -> None:
        """Trainer state and consumed ids, in one commit."""
        if self.saved_step == self.step:
            return
        began = time.monotonic()
        saved = checkpoint.save(
            self.context.run.checkpoints,
            step=self.step,
            version=self.version,
            trainer=self.trainer,
            consumed=self.consumed,
        )
        checkpoint.prune(self.context.run.checkpoints, keep=self.context.recipe.train.keep_checkpoints)
        self.publisher.persist()
        self.stock.covered_by(saved)
        self.saved_step = self.step
        wall_s = round(time.monotonic() - began, 4)
        self.context.events.emit("checkpoint", step=self.step, version=self.version, wall_s=wall_s)


def _publisher(context: Context) -> Publisher:
    """Where versions go; on one machine every worker sees the window of its node."""
    run = context.run
    window = WindowStore(window_key(run, node=this_node()), job=context.job)
    files = FileStore(run.weights)
    publisher = Publisher(files, window, events=context.events, keep_versions=context.recipe.train.keep_versions)
    if context.plan.layout == "local":
        publisher.take_rung(Rung(rung="window", reason="every worker is on this node"))
    return publisher


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
