"""Weights that an engine cannot load: a fault, except where the job is about to end."""

import asyncio
import itertools
from types import SimpleNamespace

import msgspec
import pytest

from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import EngineCounted
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.recipe import ModelConfig
from hpcrl.engines.base import LoadFigures
from hpcrl.errors import EngineError, WeightsError
from hpcrl.roles import serve
from hpcrl.roles.serve import LOAD_REPORT_INTERVAL_S, EngineWork, LoadReporter, WeightFollower
from hpcrl.system.files import make_private_dir
from hpcrl.system.wakeups import WakeEvent
from hpcrl.weights.versions import (
    Transport,
    VersionManifest,
    WeightVersion,
    announce_version,
    read_transport,
    write_transport,
)
from tests.support.plans import make_recipe
from tests.support.workers import make_worker_context


class BrokenEngine:
    """An engine whose weights are gone."""

    async def load_version(self, version: int) -> float:
        raise WeightsError(f"version {version} is not available")

    async def wait_until_failed(self) -> None:
        await asyncio.Event().wait()

    async def load_figures(self) -> LoadFigures:
        raise EngineError("no answer")


class LoadingEngine(BrokenEngine):
    async def load_version(self, version: int) -> float:
        return 0.0


class EmptySource:
    """A source without any version, as after the trainer's end."""

    def newest(self) -> None:
        return None


@pytest.mark.parametrize("is_ending", [False, True])
def test_a_version_that_cannot_be_loaded_is_a_fault_unless_the_job_ends(tmp_path, monkeypatch, is_ending):
    monkeypatch.setattr(serve, "FAULT_PAUSE_S", 0.01)
    campaign = CampaignDir(tmp_path)
    for directory in (campaign.events, campaign.job(0).root):
        make_private_dir(directory)
    context = make_worker_context(campaign, "decode", make_recipe())
    if is_ending:
        context.job.drain.write_text("every training step was made")
    follower = WeightFollower(BrokenEngine(), EmptySource(), context, wakeups=WakeEvent())
    asyncio.run(follower.load(VersionManifest(version=3, step=3, checksums={}, created=0.0)))
    faults = [event.detail for event in EventReader(campaign.events).poll()]
    assert faults == ([] if is_ending else ["version 3 is not available"])


@pytest.mark.parametrize(("num_params", "transport"), [(1000, "files"), (200_000_000, "mpi")])
def test_a_version_that_is_late_for_its_size_is_asked_for_as_files(tmp_path, monkeypatch, num_params, transport):
    monkeypatch.setattr(serve, "MAX_BEHIND_S", 0.0)
    campaign = CampaignDir(tmp_path)
    for directory in (campaign.events, campaign.weights, campaign.job(0).root):
        make_private_dir(directory)
    write_transport(campaign.weights, Transport(name="mpi", reason="couriers serve"))
    announce_version(campaign.weights, WeightVersion(version=1, step=1))
    recipe = make_recipe()
    recipe = msgspec.structs.replace(recipe, model=ModelConfig(path="/models/large", num_params=num_params))
    context = make_worker_context(campaign, "decode", recipe)
    follower = WeightFollower(BrokenEngine(), EmptySource(), context, wakeups=WakeEvent())

    async def run() -> None:
        following = asyncio.create_task(follower.follow(engine=BrokenEngine()))
        await asyncio.sleep(3 * serve.ROLE_ROUND_INTERVAL_S)
        context.job.drain.write_text("every training step was made")
        await following

    asyncio.run(run())
    assert read_transport(campaign.weights).name == transport


def test_an_engine_that_loads_each_version_late_asks_for_no_files(tmp_path, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(serve, "MAX_BEHIND_S", 10.0)
    monkeypatch.setattr(serve, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    campaign = CampaignDir(tmp_path)
    for directory in (campaign.events, campaign.weights, campaign.job(0).root):
        make_private_dir(directory)
    write_transport(campaign.weights, Transport(name="mpi", reason="couriers serve"))
    context = make_worker_context(campaign, "decode", make_recipe())
    follower = WeightFollower(LoadingEngine(), EmptySource(), context, wakeups=WakeEvent())

    async def run() -> None:
        for version in range(1, 20):
            announce_version(campaign.weights, WeightVersion(version=version, step=version))
            follower._check_lag()
            await follower.load(VersionManifest(version=version - 1, step=version - 1, checksums={}, created=0.0))

    asyncio.run(run())
    assert next(clock) > 40
    assert read_transport(campaign.weights).name == "mpi"


def test_the_load_of_an_engine_is_one_event_a_window():
    now, emitted = [0.0], []
    reporter = LoadReporter(None, emitted.append, clock=lambda: now[0])

    for second, num_running in enumerate([0, 4, 2, 2]):
        now[0] = second * LOAD_REPORT_INTERVAL_S / 3
        figures = LoadFigures(
            version=2, num_running=num_running, num_waiting=1, num_generated_tokens=100 * second, running_tokens=30,
            free_kv_tokens=70, num_places=8,
        )  # fmt: skip
        reporter.add_sample(figures)

    assert emitted == [
        EngineCounted(
            window_s=10.0,
            version=2,
            busy_share=0.75,
            running=2.0,
            waiting=1.0,
            num_places=8,
            kv_share=0.3,
            num_tokens=300,
        )
    ]


def test_the_load_of_an_engine_has_what_its_prefix_cache_held_and_the_preemptions_of_the_window():
    now, emitted = [0.0], []
    reporter = LoadReporter(None, emitted.append, clock=lambda: now[0])
    counters = [(100, 40, 1), (300, 90, 1), (50, 50, 0)]  # the last one of an engine that was started again
    for window, (num_queries, num_hits, num_preemptions) in enumerate(counters, start=1):
        now[0] = window * LOAD_REPORT_INTERVAL_S
        figures = LoadFigures(
            version=0, num_running=1, num_waiting=0, num_generated_tokens=0, num_prefix_queries=num_queries,
            num_prefix_hits=num_hits, num_preemptions=num_preemptions,
        )  # fmt: skip
        reporter.add_sample(figures)
    counted = [(event.num_prefix_queries, event.num_prefix_hits, event.num_preemptions) for event in emitted]
    assert counted == [(100, 40, 1), (200, 50, 0), (50, 50, 0)]


def test_an_engine_that_stays_idle_reports_once_a_minute_and_with_its_first_work():
    now, emitted = [0.0], []
    reporter = LoadReporter(None, emitted.append, clock=lambda: now[0])
    for second in range(120):
        now[0] = float(second)
        is_busy = second >= 100
        figures = LoadFigures(
            version=2, num_running=is_busy, num_waiting=0, num_generated_tokens=max(second - 99, 0) * 5
        )  # fmt: skip
        reporter.add_sample(figures)
    assert [(event.window_s, event.busy_share) for event in emitted] == [(10, 0), (60, 0), (30, 0), (10, 1)]
    assert sum(event.num_tokens for event in emitted) == 55


class CountedEngine:
    """An engine with settable figures."""

    def __init__(self, *, num_running: int) -> None:
        self.num_running, self.num_generated = num_running, 0

    async def load_figures(self) -> LoadFigures:
        return LoadFigures(
            version=0, num_running=self.num_running, num_waiting=0, num_generated_tokens=self.num_generated
        )


@pytest.mark.parametrize(
    ("num_running", "num_new", "has_tokens", "num_noted"),
    [(0, 0, True, 3), (4, 0, True, 1), (4, 7, True, 3), (4, 0, False, 3)],
)
def test_an_engine_that_runs_requests_works_only_while_it_generates(
    monkeypatch, num_running, num_new, has_tokens, num_noted
):
    noted = []
    monkeypatch.setattr(serve, "note_work", lambda: noted.append(1))
    monkeypatch.setattr(serve, "WORK_INTERVAL_S", 0.0)
    engine, work = CountedEngine(num_running=num_running), EngineWork(has_tokens=has_tokens)

    async def look_thrice() -> None:
        for _ in range(3):
            await work.look(engine)
            engine.num_generated += num_new

    asyncio.run(look_thrice())
    assert len(noted) == num_noted
