"""A real env worker with a real router, spool in memory and simulated engine, in virtual time."""

import asyncio
import contextlib
import json
from collections import Counter

import msgspec
import pytest

from hpcrl.campaign_dir.endpoints import EndpointReader, announce_endpoint
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.engines.sim.engine import SimEngine, SimSettings
from hpcrl.envs.base import Step
from hpcrl.envs.task_set import import_task_set
from hpcrl.hardware.cost_model import ModelShape, estimate_speed
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.learn.evaluations import EvaluationStore
from hpcrl.roles.env import make_env_worker
from hpcrl.roles.episode_player import await_version
from hpcrl.rollout.journal import TaskJournal
from hpcrl.rollout.rollout_spool import RolloutSpool
from hpcrl.rollout.routing.router import Router
from hpcrl.spool.writer import BatchLimits
from hpcrl.system import file_watch
from hpcrl.system.files import publish_json
from hpcrl.testing.memory import MemorySpool, MemorySpoolWriter
from hpcrl.testing.virtual_time import run_virtual
from hpcrl.weights.versions import WeightVersion, announce_version
from tests.support.endpoints import make_endpoint
from tests.support.episodes import is_balanced
from tests.support.plans import make_recipe
from tests.support.workers import make_worker_context

SHAPE = ModelShape(num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, num_dense=8_000_000_000)
SPEED = estimate_speed(GPU_CATALOGUE["h100"], shape=SHAPE)
ROUNDS_S = 3.0
"""A time in which the worker's loop runs many times."""


class LetterLayout:
    """One token for each letter."""

    stop_token_ids = (0,)

    def first_turn(self, observation):
        return [ord(letter) for letter in observation]

    def next_turn(self, observation, *, generated):
        return [0, *self.first_turn(observation)]

    def decode(self, token_ids):
        return "a"


class GatedEnv:
    """An environment whose one step ends when the test opens its gate, or takes no time without one."""

    def __init__(self, gate=None):
        self._gate = gate

    async def reset(self, seed):
        return "go"

    async def step(self, action):
        if self._gate is not None:
            await self._gate.wait()
        return Step(observation="", reward=1.0, done=True)

    async def close(self):
        pass


class WorkerStage:
    """A running env worker of a campaign in `root`, whose engine serves version 0."""

    def __init__(self, root, *, version=0, settings=(), make_env=GatedEnv):
        self.campaign = campaign = CampaignDir(root)
        for directory in (campaign.events, campaign.endpoints, campaign.weights, campaign.model, campaign.env_workers):
            directory.mkdir(parents=True)
        campaign.job(0).root.mkdir(parents=True)
        publish_json(campaign.model / "config.json", {"max_position_embeddings": 1024})
        announce_version(campaign.weights, WeightVersion(version=version, step=version))
        small = ("rollout.group_size=2", "train.groups_per_step=2", "rollout.groups_ahead=0", "rollout.max_running=64")
        recipe = make_recipe(*small, *settings)
        publish_json(campaign.recipe, msgspec.to_builtins(recipe))
        self.context = make_worker_context(campaign, "env", recipe)
        self.spool = MemorySpool()
        self._make_env = make_env

    def announce_engine(self):
        announce_endpoint(self.campaign.endpoints, make_endpoint(gpu="h100", num_gpus=1))

    @contextlib.asynccontextmanager
    async def open(self, *, is_announced=True):
        """Yield the worker and its engine; drain the worker at the end."""
        if is_announced:
            self.announce_engine()

        async def open_env(name, domain):
            return self._make_env()

        clock = asyncio.get_running_loop().time
        writer = MemorySpoolWriter(self.spool, batching=BatchLimits(max_age_s=0.1), clock=clock)
        rollouts = RolloutSpool(
            writer, count_sealed=lambda: {"env-0": len(self.spool.durable)}, emit=self.context.events.emit
        )
        async with (
            SimEngine(SPEED, settings=SimSettings(context_length=1024)) as engine,
            Router(EndpointReader(self.campaign.endpoints, job=0), connect=lambda _: engine, seed=0) as router,
        ):
            worker = make_env_worker(
                self.context, router=router, layout=LetterLayout(), rollouts=rollouts, open_env=open_env
            )
            running = asyncio.create_task(worker.run_until_drained())
            yield worker, engine
            self.context.end_requested.set()
            await running

    def sealed_groups(self):
        """Return the number of durable trajectories of each group."""
        return Counter(packed.id.rpartition("/")[0] for packed in self.spool.durable)


def test_no_group_starts_while_the_engines_are_too_far_behind(tmp_path):
    """Every episode would become stale in its first turn, and so would its replacement."""
    stage = WorkerStage(tmp_path, version=3, settings=("rollout.max_lag=2",))

    async def run():
        async with stage.open() as (worker, engine):
            await asyncio.sleep(ROUNDS_S)
            before = worker.accounts.groups.ledger.num_started
            await engine.load_version(1)
            await asyncio.sleep(ROUNDS_S)
            return before, worker.accounts.groups.ledger.num_started

    before, after = run_virtual(run())
    assert before == 0
    assert after > 0


def test_a_worker_that_is_woken_finds_the_engine_that_it_waits_for(tmp_path, monkeypatch):
    """After a long wait it looks rarely."""
    monkeypatch.setattr(file_watch, "PAUSE_SHARE", 1e9)
    stage = WorkerStage(tmp_path)

    async def run():
        async with stage.open(is_announced=False) as (worker, _):
            await asyncio.sleep(ROUNDS_S)
            stage.announce_engine()
            await asyncio.sleep(ROUNDS_S)
            before = worker.accounts.groups.ledger.num_started
            worker.wakeups.set()
            await asyncio.sleep(ROUNDS_S)
            return before, worker.accounts.groups.ledger.num_started

    before, after = run_virtual(run())
    assert before == 0
    assert after > 0


@pytest.mark.parametrize("mode", ["async", "sync", "one-step-off"])
def test_whole_groups_are_sealed_up_to_what_may_wait_for_training(tmp_path, mode):
    stage = WorkerStage(tmp_path, settings=(f"rollout.mode={mode}", "rollout.max_lag=1", "rollout.redundancy=1"))

    async def run():
        async with stage.open() as (worker, _):
            await asyncio.sleep(ROUNDS_S)
        return worker

    worker = run_virtual(run())
    assert set(stage.sealed_groups().values()) == {2}
    assert len(stage.sealed_groups()) == (2 if mode == "sync" else 4)  # of 2 groups a step
    assert is_balanced(worker.accounts.groups.ledger)
    assert worker.accounts.groups.num_running == worker.rollouts.num_unsealed == len(worker.runner.running) == 0


def test_a_complete_batch_cancels_its_spare_groups(tmp_path):
    made, gate = [], asyncio.Event()

    def make_env():
        made.append(GatedEnv(gate if len(made) in (2, 3) else None))
        return made[-1]

    settings = ("rollout.mode=sync", "rollout.spare_groups=1")
    stage = WorkerStage(tmp_path, settings=settings, make_env=make_env)

    async def run():
        async with stage.open() as (worker, _):
            await asyncio.sleep(ROUNDS_S)
            return len(made), len(worker.runner.running), worker.accounts.groups.endings["aborted-redundant"]

    assert run_virtual(run()) == (6, 0, 2)
    assert len(stage.sealed_groups()) == 2


def test_an_episode_that_is_cancelled_before_its_first_step_holds_up_no_group(tmp_path):
    """As a replaced episode is, if a batch becomes complete in the same round of the event loop."""
    stage = WorkerStage(tmp_path, make_env=lambda: GatedEnv(asyncio.Event()))

    async def run():
        async with stage.open() as (worker, _):
            await asyncio.sleep(ROUNDS_S)
            running = dict(worker.runner.running)
            task = worker.task_queue.take_task(now=asyncio.get_running_loop().time())
            worker.runner.start_group(task)
            started = worker.runner.running.keys() - running.keys()
            for episode in started:
                worker.runner.running[episode].cancel()
            await asyncio.sleep(ROUNDS_S)
            left = started & worker.runner.running.keys(), started & worker.accounts.in_flight._episodes.keys()
            return len(started), left, worker.accounts.groups.num_running, len(worker.runner.running)

    num_started, left, num_running, num_episodes = run_virtual(run())
    assert num_started == 2
    assert left == (set(), set())
    assert num_running == num_episodes


def test_a_worker_that_drains_aborts_what_runs_and_loses_nothing(tmp_path):
    stage = WorkerStage(tmp_path, make_env=lambda: GatedEnv(asyncio.Event()))

    async def run():
        async with stage.open() as (worker, _):
            await asyncio.sleep(ROUNDS_S)
            num_running = len(worker.runner.running)
        return num_running, worker.accounts.groups.endings["aborted-redundant"]

    num_running, num_aborted = run_virtual(run())
    assert num_running == num_aborted > 0
    left = TaskJournal(stage.campaign.journal(0)).state.open.values()
    assert sum(known.num_starts for known in left) == num_running / 2


def test_an_evaluation_is_played_beside_training_and_enters_neither_spool_nor_ledger(tmp_path):
    settings = ("evaluation.every_versions=1", "evaluation.num_episodes=3", "rollout.max_lag=0")
    stage = WorkerStage(tmp_path, settings=settings)

    async def run():
        async with stage.open() as (worker, _):
            await asyncio.sleep(ROUNDS_S)
            return worker.accounts.groups.ledger.num_started

    assert run_virtual(run()) == len(stage.spool.durable) == 4
    result = EvaluationStore(stage.campaign.evaluations).last_result()
    assert result is not None
    assert (result.num_episodes, result.num_faults) == (3, 0)


class RowEnv(GatedEnv):
    """An environment that records the seeds and rows that it is reset to."""

    def __init__(self, seen):
        super().__init__()
        self._seen = seen

    async def reset(self, seed, task):
        self._seen.append((seed, task))
        return "go"


@pytest.mark.parametrize("groups_ahead", [0, 1])
def test_the_seed_of_a_row_is_that_of_its_task(tmp_path, groups_ahead):
    """It reaches the environment, prepared or not, and the trajectory, by which rewards are computed."""
    (tmp_path / "rows.jsonl").write_text('{"seed": 70, "n": 1}\n{"seed": 71, "n": 2}\n')
    settings = (f'domains.lake.tasks="{tmp_path}/rows.jsonl"', f"rollout.groups_ahead={groups_ahead}")
    seen = []
    stage = WorkerStage(tmp_path / "campaign", settings=settings, make_env=lambda: RowEnv(seen))
    stage.campaign.tasks.mkdir()
    task_set = stage.context.recipe.domains["lake"].task_set
    import_task_set(task_set, domain="lake", directory=stage.campaign.tasks)

    async def run():
        async with stage.open():
            await asyncio.sleep(ROUNDS_S)

    run_virtual(run())
    assert {seed for seed, task in seen} == {70, 71}
    assert all(task == {"seed": seed, "n": seed - 69} for seed, task in seen)
    assert {json.loads(packed.facts)["seed"] for packed in stage.spool.durable} == {70, 71}


def test_programs_start_once_an_engine_has_the_version_that_they_need():
    versions = [0, 0]

    async def run() -> bool:
        waiting = asyncio.create_task(await_version(lambda: versions, 2))
        await asyncio.sleep(1.0)
        is_early = waiting.done()
        versions[1] = 2
        await waiting
        await await_version(list, 2)  # without engines there is none to wait for
        versions[1] = 0
        await await_version(lambda: versions, 2)  # after a while it starts anyway
        return is_early

    assert not run_virtual(run())
