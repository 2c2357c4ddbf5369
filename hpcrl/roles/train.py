"""Role train: whole groups from "scored" make a step, a step makes a version; a checkpoint knows what it consumed."""

import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hpcrl.campaign_dir.events import CheckpointSaved, FaultReported, StaleDropped, StepFinished, TrainingResumed
from hpcrl.errors import TrainError
from hpcrl.hardware.gpus import GPUS
from hpcrl.learn.consumed import Consumed
from hpcrl.learn.evaluations import Evaluations, due, score_of
from hpcrl.models.tiny import make_tiny_model
from hpcrl.roles.context import Context
from hpcrl.roles.train_queue import Stock
from hpcrl.system.exit_codes import EXIT_DONE, EXIT_DRAINED
from hpcrl.system.network import address_of
from hpcrl.system.variables import TRAINER_START_VARIABLE
from hpcrl.trainers import checkpoint
from hpcrl.trainers.base import RankTrainer, StepMetrics, Trainer
from hpcrl.trainers.leader import Leader, follow
from hpcrl.trainers.publishing import shard_store
from hpcrl.trainers.step_metrics import flops_used
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.trainers.world import World, join, leave
from hpcrl.weights.file_store import FileStore
from hpcrl.weights.publisher import Publisher
from hpcrl.weights.versions import Rung, WeightVersion
from hpcrl.weights.window.file import Key, window_key
from hpcrl.weights.window_store import WindowStore

POLL_S = 0.05
EVALUATION_POLL_S = 0.5


def run(context: Context) -> int:
    """Train until the recipe's last step, or until the job drains; the exit code says which.

    Of several ranks the first does all that is said here, and the others what it orders.
    """
    world = join(_meeting(context), environ=_surroundings(context))
    try:
        if world.rank == 0:
            _make_model(context)
        world.wait()
        mine = _trainer(context, world)
        if world.rank:
            store = shard_store(mine, _window(context), job=context.job)
            follow(mine, train=context.recipe.train, spool=context.run.spool("scored"), store=store)
            return EXIT_DONE
        return _lead(context, mine)
    finally:
        leave(world)


def _lead(context: Context, mine: RankTrainer) -> int:
    learner = Learner.begin_or_resume(context, mine)
    while learner.step < context.recipe.train.num_steps:
        if context.draining:
            learner.finish()
            return EXIT_DRAINED
        if not learner.try_step():
            learner.tend()
            time.sleep(POLL_S)
    learner.await_evaluation()
    learner.finish()
    return EXIT_DONE


def _meeting(context: Context) -> Path:
    """Where the ranks of this start of the trainer meet."""
    return context.job.ranks(int(os.environ.get(TRAINER_START_VARIABLE, "0")))


def _surroundings(context: Context) -> Mapping[str, str]:
    """What ranks meet by: on several nodes the site's interface, whose address needs no name to be known."""
    interface = context.site.network.interface
    if context.plan.layout == "local" or interface is None:
        return os.environ
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
    return os.environ | {"MASTER_ADDR": address_of(interface)}


def _trainer(context: Context, world: World) -> RankTrainer:
    """This rank's end of the trainer that the recipe names."""
    recipe, model = context.recipe, context.run.model
    temperature = recipe.rollout.temperature
    if recipe.train.trainer == "megatron":
        from hpcrl.trainers.megatron.trainer import MegatronTrainer  # needs a package that not every site has

        return MegatronTrainer(model, recipe.train, seed=recipe.seed, temperature=temperature, world=world)
    return TorchTrainer(model, recipe.train, seed=recipe.seed, temperature=temperature, world=world)


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
    trainer: Trainer
    leader: Leader | None
    """The same, where other ranks wait for orders."""
    publisher: Publisher
    num_params: int
    """Weights of the model."""
    stock: Stock
    consumed: Consumed
    step: int
    version: int
    saved_step: int
    num_skipped: int = 0
    """Steps in a row that changed nothing."""
    reward: float | None = None
    """Mean of the last step."""
    saving: "Future[None] | None" = None
    """The checkpoint that is being written."""
    background: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"))
    reading: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "spool"))
    """Reads what comes while a step runs."""
    waiting_since: float = field(default_factory=time.monotonic)

    @classmethod
    def begin_or_resume(cls, context: Context, mine: RankTrainer) -> "Learner":
        """From the newest whole checkpoint, or from the initial weights; either way a version is published."""
        run = context.run
        consumed, step, version = Consumed(), 0, 0
        found = checkpoint.newest(
            run.checkpoints,
            report=lambda path, why: context.events.emit(FaultReported(what="checkpoint", detail=f"{path}: {why}")),
        )
        if found is not None:
            manifest, consumed = checkpoint.read_checkpoint(found)
            step, version = manifest.step, manifest.version
        stock = Stock(context, consumed=consumed)
        leader = _leader(context, mine, stock) if mine.world.size > 1 else None
        publisher = _publisher(context, leader)
        trainer: Trainer = leader or mine
        if found is not None:
            trainer.load(found)
            context.events.emit(TrainingResumed(step=step, version=version, checkpoint=found.name))
        learner = cls(
            context=context,
            trainer=trainer,
            leader=leader,
            publisher=publisher,
            num_params=sum(math.prod(shape) for shape in mine.shapes().values()),
            stock=stock,
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
            self.context.events.emit(StaleDropped(num=len(choice.stale), version=self.version))
        if not choice.chosen:
            return False
        wait_s = time.monotonic() - self.waiting_since
        gathering = self.reading.submit(self.stock.gather)
        metrics = self.trainer.train_step(choice.chosen, step=self.step + 1, version=self.version)
        gathering.result()
        self.consumed.update(trajectory.id for trajectory in choice.chosen)
        self.step += 1
        self.version += 1
        began = time.monotonic()
        self.publish()
        times = metrics.times | {"publish": round(time.monotonic() - began, 6), "wait": round(wait_s, 6)}
        self.stock.trained(version=self.version)
        told = msgspec.structs.asdict(metrics) | {"times": times, "mfu": self.mfu(metrics)}
        self.context.events.emit(StepFinished(**told, wait_s=round(wait_s, 4)))
        self.heed(metrics)
        if self.step % recipe.train.checkpoint_every_steps == 0:
            self.begin_checkpoint()
            self.stock.retire(version=self.version)
        self.waiting_since = time.monotonic()
        return True

    def mfu(self, metrics: StepMetrics) -> float | None:
        """The share that the step had of what the trainer's GPUs can do; None without GPUs."""
        return flops_used(metrics, num_params=self.num_params, peak_flops=_peak_flops(self.context))

    def heed(self, metrics: StepMetrics) -> None:
        """A step that changed nothing is told; too many in a row end the campaign."""
        self.reward = metrics.reward_mean
        self.num_skipped = self.num_skipped + 1 if metrics.skipped else 0
        if metrics.skipped:
            detail = f"step {metrics.step} was skipped: {metrics.skipped}"
            self.context.events.emit(FaultReported(what="step", detail=detail))
        if self.num_skipped > self.context.recipe.train.max_skipped_steps:
            self.settle_checkpoint()
            raise TrainError(
                f"{self.num_skipped} steps in a row changed nothing, the last because {metrics.skipped}: lower "
                "train.learning_rate, mend the rewards, or raise train.max_skipped_steps"
            )

    def tend(self) -> None:
        """While there is nothing to train on."""
        self.publisher.tend()
        if self.saving is not None and self.saving.done():
            self.settle_checkpoint()
        if self.leader is not None:
            self.leader.tend()

    def await_evaluation(self) -> None:
        """Training is done: the last evaluation may end first, if it is not too slow and the job is not."""
        evaluation = self.context.recipe.evaluation
        record, every = Evaluations(self.context.run.evaluations), evaluation.every_versions
        deadline = time.monotonic() + evaluation.patience_s
        while every and due(record.last(), newest=self.version, every=every) and not self.context.draining:
            if time.monotonic() > deadline:
                detail = f"the evaluation of version {self.version} did not end in {evaluation.patience_s:g} s"
                self.context.events.emit(FaultReported(what="evaluation", detail=detail))
                return
            self.tend()
            self.context.pause(EVALUATION_POLL_S)

    def publish(self) -> None:
        """Give the weights to every engine."""
        weight_version = WeightVersion(version=self.version, step=self.step)
        if self.leader is not None:
            boxes, whole = self.leader.boxes(), self.trainer.tensors
            self.publisher.publish(boxes, weight_version, whole=whole)
        else:
            self.publisher.publish(self.trainer.tensors(), weight_version)

    def finish(self) -> None:
        """The last checkpoint; the newest version is in files when this returns."""
        self.begin_checkpoint()
        self.settle_checkpoint()
        self.background.shutdown()
        self.reading.shutdown()
        if self.leader is not None:
            self.leader.close()
        self.publisher.close()
        self.stock.close()

    def begin_checkpoint(self) -> None:
        """Trainer state and consumed ids, in one commit; training stands still for the copy in memory alone."""
        if self.saved_step == self.step:
            return
        self.settle_checkpoint()
        began = time.monotonic()
        moment = checkpoint.Moment(
            step=self.step,
            version=self.version,
            state=self.trainer.snapshot(),
            consumed=self.consumed.encode(),
            extra={"reward": self.reward},
        )
        self.stock.note_settled()
        self.publisher.persist()
        self.saved_step = self.step
        self.saving = self.background.submit(self._commit, moment, began, time.monotonic() - began)

    def settle_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written; what went wrong with it is raised here."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.result()

    def _commit(self, moment: checkpoint.Moment, began: float, stall_s: float) -> None:
        train = self.context.recipe.train
        saved = checkpoint.commit(self.context.run.checkpoints, moment)
        checkpoint.prune(
            self.context.run.checkpoints,
            keep=train.keep_checkpoints,
            keep_best=train.keep_best,
            score=_score(self.context),
        )
        self.stock.covered_by(saved)
        wall_s = time.monotonic() - began
        wall_s, stall_s = round(wall_s, 4), round(stall_s, 4)
        self.context.events.emit(
            CheckpointSaved(step=moment.step, version=moment.version, wall_s=wall_s, stall_s=stall_s)
        )


def _score(context: Context) -> Callable[[checkpoint.Checkpoint], float | None]:
    """How good a checkpoint is: by evaluations if the recipe has any, else by the rewards of its last step."""
    every = context.recipe.evaluation.every_versions
    if not every:
        return checkpoint.noted_reward
    results = Evaluations(context.run.evaluations).results()
    return lambda manifest: score_of(manifest.version, results, every=every)


def _leader(context: Context, mine: RankTrainer, stock: Stock) -> Leader:
    return Leader(
        mine,
        train=context.recipe.train,
        seed=context.recipe.seed,
        spool=context.run.spool("scored"),
        checkpoints=context.run.checkpoints,
        segment_of=stock.segment_of,
        upcoming=stock.upcoming,
    )


def _peak_flops(context: Context) -> float:
    """Of all GPUs of the trainer together, in bf16; 0 where it has none."""
    role = context.plan.role("train")
    gpu = context.plan.components[role.component].gpu
    num = role.gpus_per_worker * role.num_workers
    return GPUS[gpu].bf16_tflops * 1e12 * num if gpu is not None else 0.0


def _window(context: Context) -> Key:
    return window_key(context.run, node=context.place.node)


def _publisher(context: Context, leader: Leader | None) -> Publisher:
    """Where versions go, of several ranks each its part; on one machine every worker sees the window of its node."""
    run, key = context.run, _window(context)
    window = WindowStore(key, job=context.job) if leader is None else leader.window(key, job=context.job)
    files = FileStore(run.weights)
    publisher = Publisher(files, window, events=context.events, keep_versions=context.recipe.train.keep_versions)
    if context.plan.layout == "local":
        publisher.take_rung(Rung(rung="window", reason="every worker is on this node"))
    return publisher
