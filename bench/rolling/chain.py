"""A chain of jobs of one campaign in virtual time, each but the last killed; spool and checkpoints are on disk.

    run_chain    runs the jobs until the first tasks are all trained on -> ChainOutcome
    run_chains   runs several, one a core at once
    PlayedEpisode    the task, length and reward of an episode

The env worker, its journal and its spool are those of a real campaign. The trainer chooses groups, drops stale ones and
saves what it has consumed as the real one does; it resumes from its last checkpoint, so that some steps are repeated.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from bench.rolling.campaign import ENV_WORKER, LOOK_S, RollingSetting, make_context, open_engines, run_side_by_side
from bench.rolling.world import Lengths, Play, RollingWorld
from hpcrl.campaign_dir.event_log import EventLog, EventReader
from hpcrl.campaign_dir.events import CheckpointSaved, StaleDropped, TaskFailed
from hpcrl.campaign_dir.paths import CampaignDir, make_worker_name
from hpcrl.config.recipe import DomainConfig
from hpcrl.engines.sim.engine import SimEngine
from hpcrl.envs.base import Env
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.learn.group_choice import GroupChoice, choose_groups
from hpcrl.roles.context import WorkerContext
from hpcrl.roles.env import make_env_worker
from hpcrl.rollout.flow_control import HoldWatch, SettledCount, SettledWriter
from hpcrl.rollout.rollout_spool import RolloutSpool
from hpcrl.rollout.tasks import stable_hash
from hpcrl.spool.ids import parse_group_id
from hpcrl.spool.listing import SegmentListing, count_trajectories
from hpcrl.spool.reader import DiskSpoolReader
from hpcrl.spool.record import Trajectory
from hpcrl.spool.writer import BatchLimits, DiskSpoolWriter
from hpcrl.system.files import publish_file, publish_json
from hpcrl.testing.virtual_time import run_virtual
from hpcrl.weights import versions

CHECKPOINT_EVERY_STEPS = 3
MISSING_INTERVAL_S = 5.0
"""The interval at which the trainer looks which tasks are missing."""


class PlayedEpisode(NamedTuple):
    """An episode as it was meant to be, whatever became of it."""

    number: int
    """The number of its task."""
    length: int
    reward: float


@dataclass(frozen=True)
class ChainOutcome:
    """What a chain of jobs has played and trained of the first tasks."""

    started: list[PlayedEpisode]
    trained: list[PlayedEpisode]
    trained_ids: list[str]
    """The episodes of `trained`; one that was trained on twice is here twice."""
    num_abandoned: int
    """The tasks that were started too often and never finished."""
    seconds: float
    """The virtual time of the last job."""
    num_killed: int

    @property
    def dropped(self) -> list[PlayedEpisode]:
        """Those of `started` that were not trained on."""
        return list((Counter(self.started) - Counter(self.trained)).elements())

    def count_groups(self, group_size: int) -> Counter[int]:
        """Count how often each task was trained on."""
        return Counter(
            {number: num // group_size for number, num in Counter(one.number for one in self.trained).items()}
        )


def run_chain(setting: RollingSetting, *, num_tasks: int, kill_after_s: Sequence[float] = ()) -> ChainOutcome:
    """Run one job for each time after which it is killed, and then one until the first `num_tasks` are trained on."""
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as directory:
        root, num_killed = Path(directory), 0
        for job, limit in enumerate([*kill_after_s, None]):
            process = multiprocessing.get_context("fork").Process(  # forked: plays are functions in functions
                target=_run_job, args=(root, setting, job, num_tasks, limit)
            )
            process.start()
            process.join()
            num_killed += process.exitcode == -signal.SIGKILL
            if process.exitcode not in (0, -signal.SIGKILL):
                raise RuntimeError(f"job {job} of the chain ended with {process.exitcode}")
        lines = (root / "started").read_text().splitlines()
        started = [PlayedEpisode(*json.loads(line)) for line in lines]
        state = json.loads((root / "state.json").read_bytes())
        trained = [(name, PlayedEpisode(*one)) for name, one in state["trained"] if one[0] < num_tasks]
        return ChainOutcome(
            started=[one for one in started if one.number < num_tasks],
            trained=[one for _, one in trained],
            trained_ids=[name for name, _ in trained],
            num_abandoned=sum(number < num_tasks for number in state["abandoned"]),
            seconds=json.loads((root / "seconds").read_text()),
            num_killed=num_killed,
        )


ChainPlan = tuple[RollingSetting, int, Sequence[float]]
"""The setting of a chain, its number of tasks, and the times after which jobs are killed."""


def run_chains(chains: Sequence[ChainPlan]) -> list[ChainOutcome]:
    """Run several chains."""
    return run_side_by_side(
        [
            partial(run_chain, setting, num_tasks=num_tasks, kill_after_s=kill_after_s)
            for setting, num_tasks, kill_after_s in chains
        ]
    )


def _run_job(root: Path, setting: RollingSetting, job: int, num_tasks: int, kill_after_s: float | None) -> None:
    run_virtual(_play_job(root, setting, job, num_tasks, kill_after_s))


async def _play_job(root: Path, setting: RollingSetting, job: int, num_tasks: int, kill_after_s: float | None) -> None:
    loop = asyncio.get_running_loop()
    if kill_after_s is not None:
        loop.call_later(kill_after_s, os.kill, os.getpid(), signal.SIGKILL)
    async with contextlib.AsyncExitStack() as stack:
        context = make_context(root, setting, job=job)
        numbers = {stable_hash(context.recipe.seed, "world", number, bits=31): number for number in range(num_tasks)}
        log = os.open(root / "started", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

        def note_start(seed: int, play: Play) -> None:
            number = numbers.get(seed, num_tasks)
            os.write(log, json.dumps([number, play.num_generated, play.reward]).encode() + b"\n")

        made = count()

        async def open_env(_: str, __: DomainConfig) -> Env:
            return RollingWorld(setting.plays, random.Random(f"{job}/{next(made)}"), note_start=note_start)

        engines, router = await open_engines(stack, setting, context, num_tokens=Counter())
        spool = context.campaign.spool("rollouts")
        listing = SegmentListing(spool)
        writer = DiskSpoolWriter(spool, producer=context.name, batching=BatchLimits(max_age_s=LOOK_S), clock=loop.time)
        worker = make_env_worker(
            context,
            router=router,
            layout=Lengths(),
            rollouts=RolloutSpool(
                writer,
                count_sealed=lambda: {ENV_WORKER: count_trajectories(listing.names())},
                emit=context.events.emit,
            ),
            open_env=open_env,
        )
        trainer = ChainTrainer(root, setting, context, engines=engines)
        await trainer.resume()
        playing = asyncio.create_task(worker.run_until_drained())
        training = asyncio.create_task(trainer.run(num_tasks=num_tasks))
        await asyncio.wait({playing, training}, return_when=asyncio.FIRST_COMPLETED)
        await training if training.done() else playing.result()
        (root / "seconds").write_text(json.dumps(loop.time()))
        context.end_requested.set()
        await playing


class ChainTrainer:
    """A trainer that consumes batches and saves checkpoints like the real one, and only takes time."""

    def __init__(
        self, root: Path, setting: RollingSetting, context: WorkerContext, *, engines: Sequence[SimEngine]
    ) -> None:
        self._state_path = root / "state.json"
        self._setting = setting
        self._campaign: CampaignDir = context.campaign
        self._engines = engines
        job = context.job.number
        name = make_worker_name(job, "train", 0)
        path = self._campaign.events / f"{name}.jsonl"
        self._events = EventLog(path, job=job, role="train", worker=name, node="n")
        self._consumed = ConsumedTrajectories()
        self._reader = DiskSpoolReader(
            self._campaign.spool("rollouts"), on_damage=_refuse_damage, consumed=self._consumed
        )
        self._waiting: list[Trajectory] = []
        self._trained: list[tuple[str, PlayedEpisode]] = []
        self._step = self._version = self._num_saved = 0
        self._settled_writer = SettledWriter(self._campaign.settled)
        self._env_events = EventReader.for_role(self._campaign.events, "env")
        self._abandoned: set[int] = set()
        self._looked_at = float("-inf")
        self._missing: set[int] = set()

    async def resume(self) -> None:
        """Continue from the last checkpoint, with a version that is newer than all that were published."""
        if self._state_path.exists():
            state = json.loads(self._state_path.read_bytes())
            self._step, self._num_saved = state["step"], state["num_saved"]
            self._trained = [(name, PlayedEpisode(*one)) for name, one in state["trained"]]
            self._consumed.update(name for name, _ in self._trained)
            self._version = versions.find_newest_version(self._campaign.weights) or 0
            await self._publish()
        self._campaign.spool("rollouts").mkdir(parents=True, exist_ok=True)

    async def run(self, *, num_tasks: int) -> None:
        """Train until the first tasks are all trained on, or abandoned."""
        loop = asyncio.get_running_loop()
        while not self._has_all(num_tasks, now=loop.time()):
            choice = self._choose()
            self._waiting = choice.rest
            self._report_stale(choice)
            self._settle(num_training=len(choice.chosen))
            if not choice.chosen:
                await asyncio.sleep(LOOK_S)
                continue
            await asyncio.sleep(self._setting.train_s)
            self._consumed.update(one.id for one in choice.chosen)
            self._trained += [(one.id, _describe(one)) for one in choice.chosen]
            self._step += 1
            await self._publish()
            self._settle()
            if self._step % CHECKPOINT_EVERY_STEPS == 0:
                self._save()
        self._save()

    def _has_all(self, num_tasks: int, *, now: float) -> bool:
        if now - self._looked_at > MISSING_INTERVAL_S:
            self._looked_at = now
            failed = [parse_group_id(event.id) for event in self._env_events.poll() if isinstance(event, TaskFailed)]
            self._abandoned.update(task[1] for task in failed if task is not None)
            self._missing = set(range(num_tasks)) - {one.number for _, one in self._trained} - self._abandoned
        return not self._missing

    def _choose(self) -> GroupChoice:
        new = [
            msgspec.structs.replace(one, reward=sum(turn.reward for turn in one.turns)) for one in self._reader.poll()
        ]
        choice = choose_groups(
            [*self._waiting, *new],
            groups_per_step=self._setting.groups_per_step,
            group_size=self._setting.group_size,
            version=self._version,
            max_lag=self._setting.max_lag,
            consumed=self._consumed,
        )
        if choice.chosen and not HoldWatch().may_publish(self._campaign.holds(), version=self._version + 1):
            return choice._replace(chosen=[], rest=[*choice.chosen, *choice.rest])
        return choice

    def _report_stale(self, choice: GroupChoice) -> None:
        if choice.stale:
            left = {one.group for one in [*choice.chosen, *choice.rest]}
            groups = sorted({one.group for one in choice.stale if one.id not in self._consumed} - left)
            self._events.emit(StaleDropped(num=len(choice.stale), version=self._version, groups=groups))

    async def _publish(self) -> None:
        self._version += 1
        versions.announce_version(
            self._campaign.weights, versions.WeightVersion(version=self._version, step=self._step)
        )
        await asyncio.gather(*(engine.load_version(self._version) for engine in self._engines))

    def _settle(self, *, num_training: int = 0) -> None:
        num = self._reader.passed.total() - len(self._waiting) - num_training
        self._settled_writer.write(SettledCount(num=num, version=self._version, workers={ENV_WORKER: num}))

    def _save(self) -> None:
        """Save a checkpoint, in the form in which env workers read it, with what was trained on up to it."""
        self._num_saved += 1
        state: dict[str, Any] = {"step": self._step, "num_saved": self._num_saved, "trained": self._trained}
        state["abandoned"] = sorted(self._abandoned)
        directory = self._campaign.checkpoints / f"{self._num_saved:06d}-step-{self._step:06d}"
        directory.mkdir(parents=True)
        data = self._consumed.encode()
        publish_file(directory / "consumed.json", data)
        checksum = {"consumed.json": {"xxh3": xxhash.xxh3_128_hexdigest(data)}}
        publish_json(directory / "checkpoint.json", {"files": checksum})
        publish_json(self._state_path, state)
        self._events.emit(CheckpointSaved(step=self._step, version=self._version))


def _describe(trajectory: Trajectory) -> PlayedEpisode:
    task = parse_group_id(trajectory.group)
    assert task is not None
    return PlayedEpisode(task[1], int(trajectory.loss_mask.sum()), float(trajectory.reward or 0.0))


def _refuse_damage(path: Path, reason: str) -> None:
    raise RuntimeError(f"{path}: {reason}")
