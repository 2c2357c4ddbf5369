"""A campaign in simulated time: env workers, engines and trainer, job after job, until the last step.

simulate_campaign    runs it -> SimulationResult
make_drain_margin    how long before its walltime a job drains
SimulationSettings   what a recipe does not have
SimulatedCampaign    the parts, and what passes between them
MAX_ENV_WORKERS      the env workers that are simulated, at most

What the policies wait for takes as long as in a real campaign: groups are sealed with others, an engine loads a version
some time after its step, and an env worker looks around once in a round where nothing wakes it.
"""

import math
import random
from collections import Counter
from functools import partial
from itertools import pairwise
from statistics import fmean

from hpcrl.campaign.request import CampaignRequest
from hpcrl.campaign_dir.endpoints import EngineEndpoint
from hpcrl.campaign_dir.paths import parse_role
from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import ConfigTable, Recipe
from hpcrl.errors import ConfigError
from hpcrl.hardware.cost_model import LINK_BYTES_PER_S, WorkerSpeed, estimate_step_s
from hpcrl.job.supervision import MAX_DRAIN_SHARE, DrainMargin
from hpcrl.plan.training_work import plan_training_work
from hpcrl.rollout.routing.factory import MAX_LOAD_REQUESTS_PER_S
from hpcrl.rollout.routing.router import DEFAULT_TIMEOUTS
from hpcrl.rollout.tasks import AgentTask
from hpcrl.simulation.clock import EventQueue
from hpcrl.simulation.engine import FluidEngine
from hpcrl.simulation.result import SimulationResult, TimelineBin
from hpcrl.simulation.simulated_worker import EnvWorkerLinks, FaultSettings, SimulatedEnvWorker
from hpcrl.simulation.sizes import CampaignSizes, RoleSize
from hpcrl.simulation.trainer import SimulatedStep, SimulatedTrainer
from hpcrl.simulation.turn_router import TurnRouter
from hpcrl.simulation.workload import EpisodeSource
from hpcrl.spool.ids import get_group, parse_group_id
from hpcrl.spool.record import Trajectory

MAX_ENV_WORKERS = 4
"""Each stands for several where there are more: they share the work evenly."""
NUM_BINS = 200
MAX_SIMULATED_S = 400 * 86400.0


class SimulationSettings(ConfigTable, frozen=True, kw_only=True):
    """The settings that a recipe does not have."""

    seed: int = 0
    num_steps: int | None = None
    """Replaces the recipe's."""
    reward_s: float = 0.0
    """The time to score a trajectory, on workers that are always enough."""
    train_s: float | None = None
    """The time of a training step, in place of an estimate."""
    handover_s: float = 0.1
    """The time from when full groups are to become durable until the trainer has them, without the reward."""
    load_s: float = 0.1
    """The time from the end of a step until an engine starts to load its version, without the way there."""
    travel_s: float | None = None
    """The time that a version is on its way to the nodes of engines, in place of an estimate."""
    request_s: float = 0.01
    """The time that a request and its answer are on the way between env worker and engine, as measured on the lab."""
    episode_start_s: float = 0.002
    """The time that an env worker takes to start an episode; it starts one after the other."""
    start_s: float = 60.0
    """The time from the start of a job to its first episode; all others count from that of the first job."""
    checkpoint_s: float = 20.0
    """The time that a job takes to end, from its last step."""
    stall_s: float | None = None
    """The time that an engine pauses for new weights, in place of an estimate."""
    waits_for_old: bool = True
    """Training waits for episodes that the next version would make too old, as env workers ask; false: they are cut."""
    faults: FaultSettings = FaultSettings()


class SimulatedCampaign:
    """The parts of a campaign."""

    def __init__(
        self, request: CampaignRequest, sizes: CampaignSizes, source: EpisodeSource, settings: SimulationSettings
    ) -> None:
        self.request, self.sizes, self.settings = request, sizes, settings
        self.queue = EventQueue()
        self.recipe = request.recipe
        self.num_steps = settings.num_steps or self.recipe.train.num_steps
        self.num_jobs = 0
        self.num_failures = 0
        self.is_over = False
        self.samples: list[tuple[float, float, float, float, float]] = []
        """Times with the seconds so far that roles were busy, and shares of places."""
        self._job_ends: list[float] = []
        self._job_end = 0.0
        """The walltime of the job that runs."""
        self._margin = make_drain_margin(self.recipe, save_s=settings.checkpoint_s)
        self._draw = random.Random(settings.seed)
        self.trainer = SimulatedTrainer(
            queue=self.queue,
            recipe=self.recipe,
            estimate_s=self._estimate_step,
            publish=self._publish,
            list_holds=self._list_holds,
            drop=self._drop,
            count_tokens=self._count_trained,
            find_worker=lambda one: self._find_env_worker(get_group(one.id)).name,
            on_idle=self._end_step,
        )
        self.engines = {
            f"000-{role}-{index}": self._make_engine(size)
            for role, size in self._engine_roles().items()
            for index in range(size.num_workers)
        }
        self.links = EnvWorkerLinks(
            queue=self.queue,
            recipe=self.recipe,
            source=source,
            engines=self.engines,
            training=self.trainer,
            seal=self._seal,
            on_hold=self.trainer.try_step,
            faults=settings.faults,
            draw=self._draw,
            request_s=settings.request_s,
            episode_start_s=settings.episode_start_s * min(1.0, MAX_ENV_WORKERS / sizes.num_env),
        )
        self.num_trained_tokens = 0
        self.num_trained = 0
        num_env_workers = min(sizes.num_env, MAX_ENV_WORKERS)
        self.env_workers = [
            self._make_env_worker(EnvWorkerId(index, num_env_workers)) for index in range(num_env_workers)
        ]
        self._refresh_s = max(DEFAULT_TIMEOUTS.refresh_interval_s, sizes.num_env / MAX_LOAD_REQUESTS_PER_S)

    def run(self) -> None:
        """Run jobs until the last step, or the last job."""
        self._start_job()
        self._watch()
        self.queue.run(is_done=self._is_done, until=MAX_SIMULATED_S)
        if not self._is_done():
            raise ConfigError(
                f"the simulated campaign stands still after {len(self.trainer.steps)} steps: no group can be trained "
                "on; see rollout.max_running, group_size and max_lag"
            )

    def _is_done(self) -> bool:
        return self.is_over or len(self.trainer.steps) >= self.num_steps

    # ---- parts

    def _engine_roles(self) -> dict[str, RoleSize]:
        return {role: size for role, size in self.sizes.roles.items() if role != "train"}

    def _make_engine(self, size: RoleSize) -> FluidEngine:
        speed, max_batch = self._find_speed(size), self.recipe.engine.max_batch
        return FluidEngine(self.queue, speed, max_batch=max_batch, time_scale=self._time_scale)

    @property
    def _time_scale(self) -> float:
        engine = self.recipe.engine
        return 1 / engine.sim.speed if engine.backend == "sim" else 1.0

    def _find_speed(self, size: RoleSize) -> WorkerSpeed:
        return self.sizes.find_speed(size, self.recipe)

    def _make_env_worker(self, worker: EnvWorkerId) -> SimulatedEnvWorker:
        endpoints, speeds, gpus = [], dict[str, WorkerSpeed](), self.sizes.roles
        for name in self.engines:
            role = parse_role(name)
            size = gpus[role]
            speeds[name] = self._find_speed(size)
            endpoints.append(
                EngineEndpoint(
                    role=role, worker=name, node="", url=name, token="", gpu=size.gpu.name, num_gpus=size.gpus_each
                )
            )
        router = TurnRouter(
            self.engines,
            endpoints,
            seed=self.settings.seed * 1000 + worker.index,
            rules=self.recipe.router,
            weights={name: domain.weight for name, domain in self.recipe.domains.items()},
            speed_of=lambda endpoint: speeds[endpoint.worker],
            find_gpu=self.request.site.find_gpu,
        )
        return SimulatedEnvWorker(self.links, worker, router)

    # ---- what passes between them

    def _list_holds(self) -> list[int | None]:
        return [env_worker.hold for env_worker in self.env_workers] if self.settings.waits_for_old else []

    def _seal(self, env_worker: SimulatedEnvWorker, members: list[Trajectory]) -> None:
        def hand_over() -> None:
            self.trainer.waiting[env_worker.name] += len(members)
            if self.settings.waits_for_old:
                self.trainer.unscored += members
            self.queue.call_later(self.settings.reward_s, lambda: self.trainer.offer(members))
            self.queue.call_later(0.0, end_hold)  # after the trainer has them, unless it waits for their rewards

        def end_hold() -> None:
            env_worker.record_durable(members)
            self._poll_env_workers()

        self.queue.call_later(self.settings.handover_s, hand_over)

    def _drop(self, stale: list[Trajectory]) -> None:
        for one in stale:
            self.links.fates["too old for training"] += self.links.generated.pop(one.id, 0)
            self.links.lengths.pop(one.id, None)
        for group in sorted({get_group(one.id) for one in stale}):
            domain, number = _parse_group(group)
            self._find_env_worker(group).record_lost(group, AgentTask(domain=domain, number=number, seed=0))
        self._poll_env_workers()

    def _find_env_worker(self, group: str) -> SimulatedEnvWorker:
        return self.env_workers[_parse_group(group)[1] % len(self.env_workers)]

    def _estimate_step(self, chosen: list[Trajectory]) -> float:
        num_tokens = sum(self.links.lengths[one.id] for one in chosen)
        seconds = self.settings.train_s
        if seconds is None:
            work = plan_training_work(
                self.recipe,
                self.request.plan,
                architecture=self.sizes.architecture,
                gpu=self.sizes.train.gpu,
                links=self.sizes.train_links,
                num_tokens=num_tokens,
                mean_length=num_tokens / len(chosen),
            )
            seconds = estimate_step_s(self.sizes.train.gpu, shape=self.sizes.shape, work=work)
        return seconds

    def _count_trained(self, chosen: list[Trajectory]) -> int:
        """Count what was trained on; return its tokens."""
        self.num_trained += len(chosen)
        self.num_trained_tokens += sum(self.links.generated.pop(one.id, 0) for one in chosen)
        return sum(self.links.lengths.pop(one.id) for one in chosen)

    def _publish(self, version: int) -> None:
        shape, stall_s, travel_s = self.sizes.shape, self.settings.stall_s, self.settings.travel_s
        delay_s = self.settings.load_s + (self.sizes.estimate_travel_s() if travel_s is None else travel_s)
        loaded_bytes = shape.num_params * shape.weight_bytes  # or what is published, if that is less: adapters
        bytes_s = min(loaded_bytes, self.sizes.version_bytes or loaded_bytes) / LINK_BYTES_PER_S
        for name, engine in self.engines.items():
            size = self.sizes.roles[parse_role(name)]
            pause_s = bytes_s / size.gpus_each * self._time_scale if stall_s is None else stall_s
            if engine.is_up:
                self.queue.call_later(delay_s, partial(self._load, engine, version, pause_s))
        self._poll_env_workers()

    def _load(self, engine: FluidEngine, version: int, pause_s: float) -> None:
        if engine.is_up and version > engine.version:
            engine.load(version, stall_s=pause_s)

    def _end_step(self) -> None:
        self._poll_env_workers()
        step = self.trainer.steps[-1]
        self._margin.note_step(step.ended_at - step.started_at)
        if self.trainer.is_draining:
            self._end_job()
        else:
            self._await_drain(self.num_jobs)

    def _poll_env_workers(self) -> None:
        for env_worker in self.env_workers:
            env_worker.poll()

    # ---- jobs

    def _start_job(self) -> None:
        self.num_jobs += 1
        start_s = self.settings.start_s
        first_s = 0.0 if self.num_jobs == 1 else start_s
        self._job_end = self.queue.now + first_s + self._play_s
        self.queue.call_later(first_s, self._play)

    @property
    def _play_s(self) -> float:
        """The time of a job from its first episode to its walltime."""
        return max(1.0, self.recipe.job.walltime_min * 60 - self.settings.start_s)

    def _play(self) -> None:
        for engine in self.engines.values():
            engine.is_up = True
            engine.version = self.trainer.version
        for env_worker in self.env_workers:
            env_worker.router.refresh_loads(now=self.queue.now)
            env_worker.resume()
        self.trainer.resume()
        if self.settings.faults.engine_hours is not None:
            for name in self.engines:
                self._await_failure(name, self.num_jobs)
        self._await_drain(self.num_jobs)

    def _await_drain(self, job: int) -> None:
        """Drain once the job has only the time for it that was learned from its steps."""
        if job != self.num_jobs or self.is_over or self.trainer.is_draining:
            return
        drain_at = self._job_end - self._margin.find_seconds()
        if self.queue.now < drain_at:
            self.queue.call_at(drain_at, partial(self._await_drain, job))
        else:
            self._drain()

    def _drain(self) -> None:
        self.trainer.is_draining = True
        for env_worker in self.env_workers:
            env_worker.drain()
        step_end = self.trainer.step_end
        if step_end is not None and step_end + self.settings.checkpoint_s > self._job_end:
            self._abandon_step()
        if self.trainer.step_end is None:
            self._end_job()

    def _abandon_step(self) -> None:
        """End a step that the walltime would end; refuse one that no job has time for."""
        step_s = self._estimate_step(self.trainer.chosen)
        if step_s + self.settings.checkpoint_s > self._play_s:
            raise ConfigError(
                f"a training step takes {step_s / 60:.3g} min, and a job has {self._play_s / 60:.3g} min for it and a "
                f"checkpoint of {self.settings.checkpoint_s:g} s: raise job.walltime_min, or use more ranks"
            )
        self.trainer.abandon_step()

    def _end_job(self) -> None:
        self._job_ends.append(self.queue.now)
        if self.num_jobs >= self.recipe.job.num_jobs:
            self.is_over = True
            return
        for engine in self.engines.values():
            engine.fail()
        self.queue.call_later(self.settings.checkpoint_s, self._start_job)

    # ---- failures

    def _await_failure(self, name: str, job: int) -> None:
        hours = self.settings.faults.engine_hours
        if hours is not None:
            self.queue.call_later(self._draw.expovariate(1 / (hours * 3600)), partial(self._fail_engine, name, job))

    def _fail_engine(self, name: str, job: int) -> None:
        engine = self.engines[name]
        if job != self.num_jobs or not engine.is_up or self.trainer.is_draining:
            return
        self.num_failures += 1
        engine.fail()
        for env_worker in self.env_workers:
            env_worker.lose_engine(name)
        self.queue.call_later(self.settings.faults.repair_s, partial(self._repair_engine, name, job))

    def _repair_engine(self, name: str, job: int) -> None:
        if job == self.num_jobs and not self.is_over:
            self.engines[name].is_up = True
            self.engines[name].version = self.trainer.version
            self._await_failure(name, job)

    # ---- measures

    def _watch(self) -> None:
        """Refresh the loads in routers, and note what is busy, in regular intervals."""
        for env_worker in self.env_workers:
            env_worker.router.refresh_loads(now=self.queue.now)
            env_worker.try_waiting()
            env_worker.poll()
        self._sample()
        if not self.is_over:
            self.queue.call_later(self._refresh_s, self._watch)

    def _sample(self) -> None:
        busy: Counter[str] = Counter()
        for name, engine in self.engines.items():
            busy[parse_role(name)] += engine.busy_s  # type: ignore[assignment]
        in_env = sum(env_worker.num_in_env for env_worker in self.env_workers)
        running = sum(env_worker.groups.num_running for env_worker in self.env_workers)
        places = self.recipe.rollout.max_running
        self.samples.append((self.queue.now, busy["decode"], busy["prefill"], in_env / places, running / places))


def make_drain_margin(recipe: Recipe, *, save_s: float) -> DrainMargin:
    """Return the time to drain as a driver learns it, with checkpoints that take `save_s`."""
    most_s = MAX_DRAIN_SHARE * recipe.job.walltime_min * 60
    return DrainMargin(list, least_s=recipe.job.drain_s, most_s=most_s, assumed_save_s=save_s)


def simulate_campaign(
    request: CampaignRequest, sizes: CampaignSizes, source: EpisodeSource, settings: SimulationSettings
) -> SimulationResult:
    """Simulate a campaign to its last step."""
    campaign = SimulatedCampaign(request, sizes, source, settings)
    for env_worker in campaign.env_workers:
        if request.recipe.rollout.late_after_s is not None:
            env_worker.watch_late_groups()
    campaign.run()
    return _make_result(campaign)


def _make_result(campaign: SimulatedCampaign) -> SimulationResult:
    steps, sizes, links = campaign.trainer.steps, campaign.sizes, campaign.links
    seconds = campaign.queue.now
    ends = [step.ended_at for step in steps]
    first_ends = _find_first_ends(ends, campaign._job_ends)
    spans = [later - end for end, later in pairwise(ends)]
    regular = sorted(span for span, later in zip(spans, ends[1:], strict=True) if later not in first_ends)
    lags = sum((step.lags for step in steps), Counter[int]())
    wasted = {reason: num for reason, num in sorted(links.fates.items()) if num}
    generated = campaign.num_trained_tokens + sum(wasted.values())
    num_gpus = sizes.num_charged_gpus
    return SimulationResult(
        recipe=campaign.recipe.name,
        site=campaign.request.site.name,
        seed=campaign.settings.seed,
        num_gpus=num_gpus,
        num_nodes=sizes.num_nodes,
        workers={role: size.num_workers for role, size in sizes.roles.items()} | {"env": sizes.num_env},
        num_steps=len(steps),
        is_complete=len(steps) >= campaign.num_steps,
        num_jobs=campaign.num_jobs,
        seconds=round(seconds, 3),
        step_s=round(fmean(regular), 4) if regular else None,
        step_p95_s=round(regular[math.ceil(0.95 * len(regular)) - 1], 4) if regular else None,
        train_s=round(fmean(step.ended_at - step.started_at for step in steps), 4) if steps else 0.0,
        num_episodes=campaign.num_trained,
        num_turns=sum(env_worker.num_turns for env_worker in campaign.env_workers),
        tokens_per_s=round(campaign.num_trained_tokens / seconds, 2) if seconds else 0.0,
        utilisation=_measure_utilisation(campaign),
        lag_mean=round(sum(lag * num for lag, num in lags.items()) / lags.total(), 4) if lags else None,
        lags={str(lag): lags[lag] for lag in sorted(lags)},
        waste={reason: round(num / generated, 5) for reason, num in wasted.items()} if generated else {},
        gpu_hours=round(num_gpus * seconds / 3600, 4),
        node_hours=round(sizes.num_nodes * seconds / 3600, 4),
        num_failures=campaign.num_failures,
        notes=list(sizes.notes),
        steps=[round(span, 4) for span in spans],
        timeline=_make_timeline(campaign),
    )


def _find_first_ends(ends: list[float], job_ends: list[float]) -> set[float]:
    """Return the ends of the first steps of jobs after the first job."""
    firsts = (next((end for end in ends if end > job_end), None) for job_end in job_ends)
    return {end for end in firsts if end is not None}


def _measure_utilisation(campaign: SimulatedCampaign) -> dict[str, float]:
    """Return the busy shares from the end of the first step to the end of the last one."""
    steps, samples = campaign.trainer.steps, campaign.samples
    start = steps[0].ended_at if len(steps) > 1 else 0.0
    within = [one for one in samples if start <= one[0] <= steps[-1].ended_at] if steps else []
    if len(within) < 2:
        within = samples
    first, last = within[0], within[-1]
    elapsed = max(last[0] - first[0], 1e-9)
    sizes = campaign.sizes
    found = {"decode": (last[1] - first[1]) / elapsed / sizes.decode.num_workers}
    if sizes.prefill is not None:
        found["prefill"] = (last[2] - first[2]) / elapsed / sizes.prefill.num_workers
    trained = sum(step.ended_at - max(step.started_at, start) for step in steps[1:] or steps)
    found["train"] = trained / max(steps[-1].ended_at - start, 1e-9) if steps else 0.0
    found["env"] = fmean(one[3] for one in within)
    found["places"] = fmean(one[4] for one in within)
    return {role: round(min(1.0, share), 4) for role, share in found.items()}


def _make_timeline(campaign: SimulatedCampaign) -> list[TimelineBin]:
    samples, sizes, steps = campaign.samples, campaign.sizes, campaign.trainer.steps
    stride = max(1, -(-len(samples) // NUM_BINS))
    chosen = samples[::stride]
    num_prefill = sizes.prefill.num_workers if sizes.prefill else 1
    return [
        TimelineBin(
            start_s=round(one[0], 3),
            decode=_share(later[1] - one[1], later[0] - one[0], sizes.decode.num_workers),
            prefill=_share(later[2] - one[2], later[0] - one[0], num_prefill),
            train=_share(_sum_training(steps, one[0], later[0]), later[0] - one[0], 1),
            env=round(one[3], 4),
            running=round(one[4], 4),
        )
        for one, later in pairwise(chosen)
    ]


def _parse_group(group: str) -> tuple[str, int]:
    """Return the domain and the number of a group's task."""
    parsed = parse_group_id(group)
    assert parsed is not None
    return parsed


def _sum_training(steps: list[SimulatedStep], start: float, end: float) -> float:
    """Return the seconds of a span in which the trainer was in a step."""
    return sum(max(0.0, min(step.ended_at, end) - max(step.started_at, start)) for step in steps)


def _share(busy_s: float, elapsed_s: float, num: int) -> float:
    return round(min(1.0, max(0.0, busy_s / max(elapsed_s, 1e-9) / num)), 4)
