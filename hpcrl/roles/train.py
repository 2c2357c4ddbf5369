"""Role train: train on whole groups from "scored" and publish a version of the weights after every step.

    run                         train until the last step, or until the job drains
    TrainingLoop                the trainer, its step and its version
    DrainTimes                  the times of steps and checkpoints, and whether a step still fits
    BATCH_POLL_INTERVAL_S       the pause while there is nothing to train on
    EVALUATION_POLL_INTERVAL_S  the pause while the last evaluation runs
    WORK_FACTOR                 the time limit of a part of a step, as a multiple of `stall_s`
    NUM_MEASURED, TIME_FACTOR      how many of the last steps count, and how much longer the next may be
    LAST_CHECKPOINT_TIMEOUT_S   the time that a checkpoint has to be complete after memory ran out

A checkpoint records which trajectories it has consumed.
"""

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hpcrl.campaign_dir.checkpoints import CheckpointManifest, list_saved_steps
from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import (
    CheckpointSaved,
    FaultReported,
    FlatGroupsDropped,
    StaleDropped,
    StepFinished,
    TrainingResumed,
)
from hpcrl.campaign_dir.job_end import DrainTime
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.campaign_dir.train_progress import TrainProgress, read_train_progress, write_train_progress
from hpcrl.config.published_adapters import publishes_adapters
from hpcrl.config.published_dtype import choose_published_dtype
from hpcrl.config.recipe import make_warmup_settings
from hpcrl.errors import LostCheckpointsError, NodeResultError, TrainError
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.learn.evaluations import EvaluationStore, find_version_score, is_round_due
from hpcrl.learn.group_choice import GroupChoice, count_groups
from hpcrl.models.model_config import read_model_config
from hpcrl.models.tiny import make_tiny_model
from hpcrl.plan.job_time import estimate_save_s
from hpcrl.roles.context import WorkerContext
from hpcrl.roles.gpu_shifts import TrainerShift, open_shift_locks, open_trainer_shift
from hpcrl.roles.learning_evidence import LearningEvidence
from hpcrl.roles.memory_limits import MemoryContext, SkippedRows, limit_memory, record_shortage
from hpcrl.roles.train_queue import TrainQueue
from hpcrl.roles.warmup import WarmupData
from hpcrl.spool.episode_lengths import LengthCounts, add_length
from hpcrl.spool.ids import make_episode_id
from hpcrl.spool.rows import TRAINED, count_by_fate
from hpcrl.system.exit_codes import EXIT_DONE, EXIT_DRAINED, EXIT_OUT_OF_MEMORY
from hpcrl.system.garbage import pause_collection
from hpcrl.system.network import LOOPBACK_INTERFACE, find_interface
from hpcrl.system.pulse import expect_work, note_work
from hpcrl.system.variables import TRAINER_START_VARIABLE
from hpcrl.system.wakeups import WakeListener
from hpcrl.trainers import checkpoint
from hpcrl.trainers.base import RankTrainer, StepAbandonedError, StepMetrics, Trainer
from hpcrl.trainers.leader import RankLeader, follow_orders
from hpcrl.trainers.memory_error import StepMemoryError
from hpcrl.trainers.publishing import make_published_layout, open_shard_store
from hpcrl.trainers.step_metrics import compute_flops_utilization
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.trainers.world import World, join_world, leave_world
from hpcrl.weights.layout import TensorLayout
from hpcrl.weights.stores.file_store import FileStore
from hpcrl.weights.stores.publisher import WeightPublisher
from hpcrl.weights.stores.window_store import WindowStore
from hpcrl.weights.versions import Transport, WeightVersion
from hpcrl.weights.window.file import WindowKey, make_window_key

BATCH_POLL_INTERVAL_S = 0.05
WORK_FACTOR = 3
"""A micro-batch, or what follows a step, may take `job.stall_timeout_min` times this."""
EVALUATION_POLL_INTERVAL_S = 0.5
NUM_MEASURED = 20
TIME_FACTOR = 1.1
LAST_CHECKPOINT_TIMEOUT_S = 60.0


def run(context: WorkerContext) -> int:
    """Train until the recipe's last step, or until the job drains; return the exit code for it.

    A rank that runs out of memory during a step records that, and the driver starts all ranks again, from the last
    checkpoint.
    """
    world = join_world(_find_meeting_path(context), environ=_make_rank_environment(context))
    memory = limit_memory(context, world)
    try:
        code = _run_rank(memory.worker, world)
    except StepMemoryError as error:
        return _end_without_memory(memory, error, world)
    except BaseException as error:
        if isinstance(error, NodeResultError | LostCheckpointsError):  # another start would find the same
            progress = read_train_progress(context.campaign.train_progress)
            write_train_progress(context.campaign.train_progress, msgspec.structs.replace(progress, failure=str(error)))
        leave_world(world)
        raise
    leave_world(world)
    return code


def _run_rank(context: WorkerContext, world: World) -> int:
    """Run the loop on rank 0; other ranks follow its orders."""
    if world.rank == 0:
        _make_model(context)
        context.make_sender("prefill", "decode", "env").wake()
    shift = open_trainer_shift(context) if world.rank == 0 else None
    if shift is not None:
        shift.start()
    world.wait()
    shift_locks = open_shift_locks(context) if world.rank else None
    if shift_locks is not None:
        shift_locks.enter_rank()
    rank_trainer = _make_trainer(context, world)
    warmup = _open_warmup(context)
    if world.rank:
        key = _find_window_key(context)
        publishes = context.recipe.has_rollouts
        layout = _make_layout(context, rank_trainer)
        store = open_shard_store(rank_trainer, key, job=context.job, layout=layout) if publishes else None
        spool = context.campaign.spool("scored")
        follow_orders(
            rank_trainer,
            train=context.recipe.train,
            spool=spool,
            store=store,
            warmup=warmup,
            shift_locks=shift_locks,
        )
        return EXIT_DONE
    return _run_leader(context, rank_trainer, warmup, shift)


def _end_without_memory(memory: MemoryContext, error: StepMemoryError, world: World) -> int:
    """Record what ran out; return the exit code for it, or end the process where leaving the group could block."""
    limits = record_shortage(memory, error, rank=world.rank)
    seen = limits.failure or f"the next start has {limits.describe()}"
    print(f"{error.detail}\nout of memory{limits.describe_shortage()}: {seen}", flush=True)  # noqa: T201 - the worker's log
    if world.size > 1:
        os._exit(EXIT_OUT_OF_MEMORY)  # the others wait for this rank, and it would wait for them
    return EXIT_OUT_OF_MEMORY


def _report_missing_checkpoint(context: WorkerContext, *, step: int) -> None:
    """Report that the checkpoint that was saved last, of a later step than `step`, is gone: it was removed."""
    events = EventReader.for_role(context.campaign.events, "train").poll()
    last = [0, *(event.step for event in events if isinstance(event, CheckpointSaved))][-1]
    directory = context.campaign.checkpoints
    if last > step and last not in list_saved_steps(directory):
        then = f"training continues from step {step}" if step else "training starts from step 0"
        detail = f"the checkpoint of step {last} is not in {directory} any more: {then}"
        context.events.emit(FaultReported(what="checkpoint", detail=detail))


def _open_warmup(context: WorkerContext) -> WarmupData | None:
    recipe = context.recipe
    return None if recipe.warmup is None else WarmupData(context.campaign, recipe, recipe.warmup)


def _run_leader(
    context: WorkerContext, rank_trainer: RankTrainer, warmup: WarmupData | None, shift: TrainerShift | None
) -> int:
    training_loop = TrainingLoop.start_or_resume(context, rank_trainer, warmup=warmup, shift=shift)
    try:
        return _run_steps(context, training_loop)
    except StepMemoryError:
        if training_loop.saving is not None:  # it continues in the background, also on ranks that wait for this one
            wait([training_loop.saving], timeout=LAST_CHECKPOINT_TIMEOUT_S)
        raise


def _run_steps(context: WorkerContext, training_loop: "TrainingLoop") -> int:
    expect_work("finished no micro-batch, step or checkpoint", WORK_FACTOR * context.stall_s)
    while training_loop.step < context.recipe.train.num_steps:
        if context.draining:
            training_loop.finish()
            return EXIT_DRAINED
        note_work()
        try:
            has_stepped = training_loop.try_step()
        except StepAbandonedError as error:
            context.events.emit(FaultReported(what="step", detail=str(error)))
            training_loop.finish()
            return EXIT_DRAINED
        if not has_stepped:
            training_loop.poll()
            training_loop.pause()
    training_loop.leave_gpus()
    training_loop.await_evaluation()
    training_loop.finish()
    training_loop.check_evidence()
    return EXIT_DONE


def _find_meeting_path(context: WorkerContext) -> Path:
    """Return the path by which the ranks of this start of the trainer find each other."""
    return context.job.ranks(int(os.environ.get(TRAINER_START_VARIABLE, "0")))


def _make_rank_environment(context: WorkerContext) -> Mapping[str, str]:
    """Return the environment for joining ranks: at the site's interface, or on one machine at its loopback."""
    is_local = context.plan.layout == "local"
    names = [LOOPBACK_INTERFACE] if is_local else context.site.list_interfaces(context.partition)
    interface, address = find_interface(names)
    if interface is not None:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
    return os.environ | {"MASTER_ADDR": address}


def _make_trainer(context: WorkerContext, world: World) -> RankTrainer:
    """Make this rank's part of the trainer that the recipe names."""
    recipe, model = context.recipe, context.campaign.model
    temperature, train = recipe.rollout.temperature, recipe.train
    if recipe.warmup is not None and not recipe.has_rollouts:
        train = make_warmup_settings(train, recipe.warmup)  # no critic and no reference are loaded
    train = train.with_degrees(context.plan.train_degrees)
    if train.trainer == "torch":
        train = msgspec.structs.replace(train, sharding=context.plan.train_sharding)
    config = read_model_config(model / "config.json")
    train = msgspec.structs.replace(
        train, publish_lora="adapters" if publishes_adapters(recipe, config.fields) else "merged"
    )
    if (memory := context.plan.train_memory) is not None:
        train = msgspec.structs.replace(train, recompute=memory.recompute)
    reference = None if recipe.teacher is None or recipe.teacher.path is None else Path(recipe.teacher.path)
    is_scored = bool(recipe.teacher_name)
    make_trainer: Callable[..., RankTrainer] = TorchTrainer
    if train.trainer == "megatron":
        with pause_collection():
            from hpcrl.trainers.megatron.trainer import MegatronTrainer  # needs a package that not every site has

        make_trainer = MegatronTrainer
    return make_trainer(
        model,
        train,
        seed=recipe.seed,
        temperature=temperature,
        world=world,
        reference_dir=reference,
        has_scored_reference=is_scored,
    )


def _make_model(context: WorkerContext) -> None:
    """Make the directory from which all roles load architecture and tokenizer."""
    model, directory = context.recipe.model, context.campaign.model
    if directory.exists():
        return
    if model.path is not None:
        directory.symlink_to(model.path, target_is_directory=True)
    else:
        assert model.tiny is not None  # make_recipe checks it
        make_tiny_model(directory, model.tiny, seed=context.recipe.seed)


@dataclass
class DrainTimes:
    """The seconds that the last steps took, with their publishing, and the last checkpoints."""

    steps: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_MEASURED))
    saves: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_MEASURED))
    assumed_save_s: float = 0.0
    """The time of a checkpoint before one was measured."""

    @classmethod
    def read_earlier(cls, campaign: CampaignDir, *, assumed_save_s: float = 0.0) -> "DrainTimes":
        """Read those of the jobs before this one: the first drain of a trainer may come before its first checkpoint."""
        times, reader = cls(assumed_save_s=assumed_save_s), EventReader.for_role(campaign.events, "train")
        reader.skip_to_tails()
        for event in reader.poll_merged():
            if isinstance(event, StepFinished):
                times.steps.append((event.step_s or 0.0) + event.times.get("publish", 0.0))
            elif isinstance(event, CheckpointSaved):
                times.saves.append(event.wall_s or 0.0)
        return times

    def is_too_late(self, *, step_age_s: float, left_s: float, save_age_s: float | None = None) -> bool:
        """Return whether the rest of a step that has run for a while, and a checkpoint, need more time than is left.

        A checkpoint that has been written for `save_age_s` so far ends first. Steps that were not measured count as
        nothing.
        """
        save_s = TIME_FACTOR * max(self.saves, default=self.assumed_save_s)
        rest_s = max(TIME_FACTOR * max(self.steps, default=0.0) - step_age_s, 0.0)
        if save_age_s is not None:
            rest_s = max(rest_s, save_s - save_age_s)
        return left_s < rest_s + save_s


@dataclass
class TrainingLoop:
    """The trainer and its place in the campaign."""

    context: WorkerContext
    trainer: Trainer
    leader: RankLeader | None
    """The trainer itself if other ranks wait for its orders; else None."""
    publisher: WeightPublisher | None
    """None where nothing is played: the checkpoints have the weights."""
    num_params: int
    """The number of the model's parameters."""
    train_queue: TrainQueue
    skipped_rows: SkippedRows
    consumed: ConsumedTrajectories
    step: int
    version: int
    saved_step: int
    warmup: WarmupData | None = None
    num_skipped: int = 0
    """Steps in a row that changed nothing."""
    progress: TrainProgress = field(default_factory=TrainProgress)
    evidence: LearningEvidence = field(default_factory=LearningEvidence)
    num_flat_groups: Counter[str] = field(default_factory=Counter)
    """The groups dropped as flat, by domain."""
    num_seen_groups: Counter[str] = field(default_factory=Counter)
    """The groups dropped as flat or trained on, by domain."""
    reward: float | None = None
    """The mean reward of the last step."""
    saving: "Future[None] | None" = None
    """The checkpoint that is being written."""
    saving_since: float = 0.0
    """The time at which it was started."""
    background: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"))
    reading: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "spool"))
    """The thread that reads new trajectories while a step runs."""
    waiting_since: float = field(default_factory=time.monotonic)
    step_started_at: float = field(default_factory=time.monotonic)
    times: DrainTimes = field(default_factory=DrainTimes)
    listener: WakeListener | None = None
    """Ends its pauses when another worker has something for it."""
    shift: TrainerShift | None = None
    """None where no engine has the trainer's GPUs too."""

    def __post_init__(self) -> None:
        self.drain_time = DrainTime(self.context.job)

    @classmethod
    def start_or_resume(
        cls,
        context: WorkerContext,
        rank_trainer: RankTrainer,
        *,
        warmup: WarmupData | None = None,
        shift: TrainerShift | None = None,
    ) -> "TrainingLoop":
        """Start from the newest complete checkpoint or from the initial weights; then publish a version if needed.

        The first version is of the weights after the warm-up: nothing is played before.
        """
        campaign = context.campaign
        consumed, step, version, evidence = ConsumedTrajectories(), 0, 0, LearningEvidence()
        found = checkpoint.find_newest(
            campaign.checkpoints,
            report=lambda path, why: context.events.emit(FaultReported(what="checkpoint", detail=f"{path}: {why}")),
        )
        if found is not None:
            manifest, consumed = checkpoint.read_checkpoint(found)
            step, version, evidence = manifest.step, manifest.version, LearningEvidence.from_checkpoint(manifest.extra)
        _report_missing_checkpoint(context, step=step)
        train_queue = TrainQueue(context, consumed=consumed, on_settled=context.make_sender("env").wake)
        leader = _make_leader(context, rank_trainer, train_queue, warmup) if rank_trainer.world.size > 1 else None
        publisher = _make_publisher(context, rank_trainer, leader) if context.recipe.has_rollouts else None
        trainer: Trainer = leader or rank_trainer
        if found is not None:
            trainer.load(found)
            context.events.emit(TrainingResumed(step=step, version=version, checkpoint=found.name))
        elif publisher is not None and publisher.newest_version():
            context.events.emit(TrainingResumed(step=0))
        save_s = estimate_save_s(context.recipe, num_nodes=context.plan.components[context.role_plan.component].nodes)
        training_loop = cls(
            context=context,
            trainer=trainer,
            leader=leader,
            publisher=publisher,
            num_params=rank_trainer.num_params,
            train_queue=train_queue,
            skipped_rows=SkippedRows(context, max_length=rank_trainer.max_length),
            consumed=consumed,
            step=step,
            version=version,
            saved_step=step if found is not None else -1,
            warmup=warmup,
            evidence=evidence,
            listener=context.open_listener(),
            shift=shift,
            times=DrainTimes.read_earlier(campaign, assumed_save_s=save_s),
        )
        training_loop.train_queue.recover()
        write_train_progress(context.campaign.train_progress, training_loop.progress)  # not that of an earlier start
        if publisher is not None and not training_loop.is_warming_up:
            training_loop._publish_start(publisher)
        return training_loop

    def enter_gpus(self) -> float:
        """Move the state to the GPUs once no engine is there; return the seconds that it took.

        An engine that is being started leaves them only when it is up: raise StepAbandonedError if the job drains
        before, since what was trained has still to be saved.
        """
        started = time.monotonic()
        if self.shift is not None and not self.shift.is_held:
            if not self.shift.start(should_end=lambda: self.context.draining):
                raise StepAbandonedError(f"step {self.step + 1} was not started: the job ends, engines have the GPUs")
            self.trainer.wake()
        return time.monotonic() - started

    def leave_gpus(self) -> None:
        """Move the state to host memory, and leave the GPUs to the engines that have them too."""
        if self.shift is not None and self.shift.is_held:
            self.trainer.sleep()
            self.shift.end()

    def _publish_start(self, publisher: WeightPublisher) -> None:
        """Publish the weights that training starts from, unless they are the newest version."""
        newest = publisher.newest_version()
        if newest != self.version or publisher.newest_readable() != self.version:
            self._publish_above(newest)
            publisher.persist()

    def _publish_above(self, newest: int | None) -> None:
        """Publish the weights as a version above all others: those after the checkpoint are obsolete.

        It is as far above the newest as that is above the checkpoint, so that the lag of an episode is at least the
        number of updates that separate its policy from these weights.
        """
        if newest is not None and newest >= self.version:
            num_lost = min(newest - self.version, self.context.recipe.rollout.max_lag + 1)
            self.version = newest + max(1, num_lost)
        self.publish()

    @property
    def is_warming_up(self) -> bool:
        """Return whether the next step is one of the warm-up."""
        return self.warmup is not None and self.warmup.covers(self.step + 1)

    def warm_up(self, warmup: WarmupData) -> None:
        """Make one step of the warm-up; after the last one, publish the version that episodes start with."""
        conversations = warmup.choose(self.step + 1)
        self.note_progress(num_warmup_steps=self.step, is_training=True)
        self.step_started_at = time.monotonic()
        metrics = self.trainer.train_step(
            conversations,
            step=self.step + 1,
            version=self.version,
            train=warmup.train,
            must_abandon=self.must_abandon_step,
        )
        self.times.steps.append(time.monotonic() - self.step_started_at)
        self.step += 1
        no_rewards = {"reward_mean": None, "reward_std": None, "num_flat_groups": 0, "lag_mean": 0.0, "lag_max": 0}
        metrics = msgspec.structs.replace(metrics, **no_rewards, lags={})
        self.report_step(StepFinished(**msgspec.structs.asdict(metrics), mfu=self.compute_mfu(metrics)))
        self.check_skipped(metrics)
        if not self.is_warming_up and self.publisher is not None:
            self.check_evidence()  # nothing is played with a model that imitated nothing
            self.evidence.start_rewards()
            self._publish_above(self.publisher.newest_version())
            self.trainer.restart_optimizer()  # its moments are those of another loss: rewards would move it too far
        if not self.is_warming_up or self.step % self.context.recipe.train.checkpoint_every_steps == 0:
            self.start_checkpoint()
        self.waiting_since = time.monotonic()

    def must_abandon_step(self) -> bool:
        """Return whether the job ends before the step that runs would be made, published and saved."""
        if not self.context.draining:
            return False
        age_s = time.monotonic() - self.step_started_at
        is_saving = self.saving is not None and not self.saving.done()
        save_age_s = time.monotonic() - self.saving_since if is_saving else None
        left_s = self.drain_time.read_left()
        return self.times.is_too_late(step_age_s=age_s, left_s=left_s, save_age_s=save_age_s)

    def try_step(self) -> bool:
        """Make one step; return False if there are not enough groups for it."""
        recipe = self.context.recipe
        if self.warmup is not None and self.is_warming_up:
            self.enter_gpus()
            self.warm_up(self.warmup)
            return True
        choice = self.train_queue.choose(version=self.version)
        lost_groups = self.report_lost_groups(choice)
        self.report_flat_groups(choice)
        self.evidence.note_rewards([*choice.flat, *choice.chosen], recipe.domains)
        self.note_groups(choice, num_lost=len(lost_groups))
        if not choice.chosen:
            self.leave_gpus()
            return False
        wait_s = time.monotonic() - self.waiting_since
        self.step_started_at = time.monotonic()
        shift_s = self.enter_gpus()
        gathering = self.reading.submit(self.train_queue.gather)
        metrics = self.trainer.train_step(
            choice.chosen, step=self.step + 1, version=self.version, must_abandon=self.must_abandon_step
        )
        gathering.result()
        self.consumed.update(trajectory.id for trajectory in choice.chosen)
        self.step += 1
        self.version += 1
        started = time.monotonic()
        self.publish()
        self.times.steps.append(time.monotonic() - self.step_started_at)
        times = metrics.times | {"publish": round(time.monotonic() - started, 6), "wait": round(wait_s, 6)}
        if self.shift is not None:
            times["shift"] = round(shift_s, 6)
        self.train_queue.mark_trained(version=self.version)
        values = msgspec.structs.asdict(metrics) | {"times": times, "mfu": self.compute_mfu(metrics)}
        lengths: LengthCounts = {}
        for trajectory in choice.chosen:
            add_length(lengths, count_by_fate(trajectory).total())
        self.report_step(StepFinished(**values, wait_s=round(wait_s, 4), lengths=lengths))
        self.check_skipped(metrics)
        if self.step % recipe.train.checkpoint_every_steps == 0:
            self.start_checkpoint()
            self.train_queue.retire(version=self.version)
        self.waiting_since = time.monotonic()
        return True

    def report_step(self, event: StepFinished) -> None:
        """Emit the event of a step, and write a line to the log."""
        self.context.events.emit(event)
        figures = [("reward", event.reward_mean), ("loss", event.loss), ("gradient", event.grad_norm)]
        shown = "  ".join(f"{name} {value:.4g}" for name, value in figures if value is not None)
        print(f"step {event.step}  version {event.version}  {shown}  {event.step_s or 0:.3g} s", flush=True)  # noqa: T201 - the log

    def report_lost_groups(self, choice: GroupChoice) -> set[str]:
        """Report what was dropped for its age or a fault; return the groups of which nothing is left."""
        if not choice.stale:
            return set()
        lost: Counter[str] = Counter()
        for trajectory in choice.stale:
            lost[trajectory.domain] += count_by_fate(trajectory)[TRAINED]
        lost_groups = {one.group for one in choice.stale} - {one.group for one in [*choice.chosen, *choice.rest]}
        self.context.events.emit(
            StaleDropped(
                num=len(choice.stale),
                version=self.version,
                token_counts=dict(lost),
                groups=sorted(group for group in lost_groups if make_episode_id(group, 0) not in self.consumed),
            )
        )
        return lost_groups

    def note_groups(self, choice: GroupChoice, *, num_lost: int) -> None:
        """Note for the driver what the choice of groups means for the next step."""
        if choice.chosen:
            self.note_progress(num_ready_groups=0, num_flat_groups=0, num_lost_groups=0, is_training=True)
            return
        sizes = Counter(one.group for one in choice.rest if one.reward is not None)
        self.note_progress(
            num_ready_groups=sum(size >= self.context.recipe.rollout.group_size for size in sizes.values()),
            num_flat_groups=self.progress.num_flat_groups + count_groups(choice.flat).total(),
            num_lost_groups=self.progress.num_lost_groups + num_lost,
            is_training=False,  # not noted at the end of a step: each note is a durable file
            reward_error="" if self.evidence.has_reward else self.evidence.reward_error,
        )

    def note_progress(self, **changes: int | str) -> None:
        """Write the trainer's progress for the driver, if it changed."""
        progress = msgspec.structs.replace(self.progress, **changes)
        if progress != self.progress:
            self.progress = progress
            write_train_progress(self.context.campaign.train_progress, progress)

    def report_flat_groups(self, choice: GroupChoice) -> None:
        """Report the groups that were dropped because they are flat, and their share of all."""
        dropped, trained = count_groups(choice.flat), count_groups(choice.chosen)
        self.num_flat_groups += dropped
        self.num_seen_groups += dropped + trained
        if dropped:
            shares = {name: round(self.num_flat_groups[name] / self.num_seen_groups[name], 4) for name in dropped}
            self.context.events.emit(
                FlatGroupsDropped(
                    num=dropped.total(),
                    version=self.version,
                    domains=dict(dropped),
                    groups=sorted({one.group for one in choice.flat}),
                    shares=shares,
                )
            )

    def compute_mfu(self, metrics: StepMetrics) -> float | None:
        """Return the share of the trainer's peak FLOPS that the step used; None without GPUs."""
        return compute_flops_utilization(
            metrics, num_params=self.num_params, peak_flops=_compute_peak_flops(self.context)
        )

    def check_skipped(self, metrics: StepMetrics) -> None:
        """Report rows that were left out, and a step that changed nothing; raise TrainError after too many in a row."""
        self.skipped_rows.note_step(metrics)
        self.reward = metrics.reward_mean
        self.evidence.note_step(metrics.skipped, num_too_long=metrics.num_too_long)
        self.num_skipped = self.num_skipped + 1 if metrics.skipped else 0
        if metrics.skipped:
            detail = f"step {metrics.step} was skipped: {metrics.skipped}"
            self.context.events.emit(FaultReported(what="step", detail=detail))
        if self.num_skipped > self.context.recipe.train.max_skipped_steps:
            self.await_checkpoint()
            fix = "lower train.learning_rate, fix the rewards"
            if metrics.num_too_long and not metrics.num_tokens:
                fix = "let episodes be shorter (engine.max_model_len), since all rows of that step are too long"
            raise TrainError(
                f"{self.num_skipped} steps in a row changed nothing, the last because {metrics.skipped}: {fix}, or "
                "raise train.max_skipped_steps"
            )

    def check_evidence(self) -> None:
        """Raise TrainError if nothing was learned so far, though all these steps were made."""
        of_warmup = self.warmup is not None and self.warmup.covers(self.step)
        if problem := self.evidence.find_problem(of_warmup=of_warmup):
            self.note_progress(failure=problem)
            raise TrainError(problem)
        for detail in self.evidence.list_failing_domains():
            self.context.events.emit(FaultReported(what="reward", detail=detail))

    def pause(self) -> None:
        """Wait a moment, or until other workers have something for training."""
        if self.listener is None:
            time.sleep(BATCH_POLL_INTERVAL_S)
        elif self.listener.wait(BATCH_POLL_INTERVAL_S):
            self.train_queue.expect_change()

    def poll(self) -> None:
        """Do background work while there is nothing to train on."""
        if self.publisher is not None:
            self.publisher.poll()
        if self.saving is not None and self.saving.done():
            self.await_checkpoint()
        if self.leader is not None:
            self.leader.keep_ranks_alive()

    def await_evaluation(self) -> None:
        """Wait for the last evaluation after training, up to `patience_s` and until the job drains."""
        evaluation = self.context.recipe.evaluation
        record, every = EvaluationStore(self.context.campaign.evaluations), evaluation.every_versions
        deadline = time.monotonic() + evaluation.patience_s
        while (
            every and is_round_due(record.last_result(), newest=self.version, every=every) and not self.context.draining
        ):
            if time.monotonic() > deadline:
                detail = f"the evaluation of version {self.version} did not end in {evaluation.patience_s:g} s"
                self.context.events.emit(FaultReported(what="evaluation", detail=detail))
                return
            self.poll()
            self.context.pause(EVALUATION_POLL_INTERVAL_S)

    def publish(self) -> None:
        """Publish the weights for every engine."""
        assert self.publisher is not None, "episodes are played, or nothing is published"
        weight_version = WeightVersion(version=self.version, step=self.step)
        if self.leader is not None:
            shards, whole = self.leader.weight_shards, self.trainer.tensors
            self.publisher.publish(shards, weight_version, gather_tensors=whole)
        else:
            self.publisher.publish(self.trainer.tensors(), weight_version)

    def finish(self) -> None:
        """Save the last checkpoint and close; the newest version is in files when this returns."""
        self.start_checkpoint()
        self.await_checkpoint()
        self.background.shutdown()
        self.reading.shutdown()
        if self.leader is not None:
            self.leader.close()
        if self.publisher is not None:
            self.publisher.close()
        self.train_queue.close()
        if self.listener is not None:
            self.listener.close()

    def start_checkpoint(self) -> None:
        """Save trainer state and consumed ids in one commit; training pauses only for the copy in memory."""
        if self.saved_step == self.step:
            return
        self.await_checkpoint()
        started = time.monotonic()
        moment = checkpoint.PendingCheckpoint(
            step=self.step,
            version=self.version,
            state=self.trainer.snapshot(),
            consumed=self.consumed.encode(),
            extra={"reward": self.reward, "evidence": msgspec.to_builtins(self.evidence)},
        )
        self.train_queue.note_settled()
        if self.publisher is not None:
            self.publisher.persist()
        self.saved_step, self.saving_since = self.step, started
        self.saving = self.background.submit(self._commit_checkpoint, moment, started, time.monotonic() - started)

    def await_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written, and raise its error if it failed."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.result()

    def _commit_checkpoint(self, moment: checkpoint.PendingCheckpoint, started: float, stall_s: float) -> None:
        train = self.context.recipe.train
        saved = checkpoint.commit_checkpoint(self.context.campaign.checkpoints, moment)
        checkpoint.prune_checkpoints(
            self.context.campaign.checkpoints,
            keep=train.keep_checkpoints,
            keep_best=train.keep_best,
            score=_make_checkpoint_score(self.context),
        )
        self.train_queue.mark_covered(saved)
        wall_s = time.monotonic() - started
        self.times.saves.append(wall_s)
        wall_s, stall_s = round(wall_s, 4), round(stall_s, 4)
        self.context.events.emit(
            CheckpointSaved(step=moment.step, version=moment.version, wall_s=wall_s, stall_s=stall_s)
        )


def _make_checkpoint_score(context: WorkerContext) -> Callable[[CheckpointManifest], float | None]:
    """Return the score of a checkpoint: by evaluations if the recipe has any, else by the reward of its last step."""
    every = context.recipe.evaluation.every_versions
    if not every:
        return checkpoint.read_recorded_reward
    results = EvaluationStore(context.campaign.evaluations).results()
    return lambda manifest: find_version_score(manifest.version, results, every=every)


def _make_leader(
    context: WorkerContext, rank_trainer: RankTrainer, train_queue: TrainQueue, warmup: WarmupData | None
) -> RankLeader:
    return RankLeader(
        rank_trainer,
        train=context.recipe.train,
        seed=context.recipe.seed,
        spool=context.campaign.spool("scored"),
        checkpoints=context.campaign.checkpoints,
        segment_of=train_queue.segment_of,
        upcoming=train_queue.preview_choice,
        warmup=warmup,
    )


def _compute_peak_flops(context: WorkerContext) -> float:
    """Return the bf16 peak of all GPUs of the trainer together, in FLOPS; 0 without GPUs, or if it is not known."""
    role = context.plan.role("train")
    gpu = context.site.find_gpu(context.plan.components[role.component].gpu)
    num = role.gpus_per_worker * role.num_workers
    return (gpu.bf16_tflops or 0.0) * 1e12 * num if gpu is not None else 0.0


def _find_window_key(context: WorkerContext) -> WindowKey:
    return make_window_key(context.campaign, node=context.place.node)


def _make_layout(context: WorkerContext, rank_trainer: RankTrainer) -> TensorLayout:
    """Return the layout of versions, in the dtype of this recipe and the model's config.json."""
    config = read_model_config(context.campaign.model / "config.json")
    return make_published_layout(rank_trainer, choose_published_dtype(context.recipe, config.fields))


def _make_publisher(context: WorkerContext, rank_trainer: RankTrainer, leader: RankLeader | None) -> WeightPublisher:
    """Make the publisher of versions; several ranks write one part each. On one machine the window is enough."""
    campaign, job, key = context.campaign, context.job, _find_window_key(context)
    layout = _make_layout(context, rank_trainer)
    window = WindowStore(key, job=job, layout=layout) if leader is None else leader.window(key, job=job, layout=layout)
    publisher = WeightPublisher(
        FileStore(campaign.weights),
        window,
        events=context.events,
        keep_versions=context.recipe.train.keep_versions,
        layout=layout,
        on_readable=context.make_sender("prefill", "decode").wake,
    )
    if context.plan.is_on_one_node:
        publisher.set_transport(Transport(name="window", reason="every worker is on this node"))
    return publisher
