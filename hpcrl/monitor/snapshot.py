"""A campaign at one moment. Pure.

CampaignSnapshot    the contract of `hpcrl monitor --json`
ComponentView, JobView, RoleView, EpisodesView, DomainView, EvaluationView, SpoolView, FailedTask    its parts
SnapshotDetail, RoleDetail          what the screen shows besides the contract
encode_snapshot                     the contract as JSON
measure_change, SeriesChange        how a figure changed from the first steps to the last
build_snapshot, SnapshotInputs      the snapshot from what was read
find_bottleneck                     the role that the others wait for
BOTTLENECK_SHARE, MIN_WAITING_ROLLOUTS    the limits of that
MIN_LATE_S, MAX_LOAD_AGE_S          the age from which on figures are not of now
MAX_END_STEPS, MIN_PACE_STEPS       the steps by whose mean a figure starts and ends, and by which pace is measured
CampaignSummary, RecipeSummary, TrainSummary, PlanSummary, ComponentSummary, RoleSummary    fields of files
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec

from hpcrl.campaign_dir.events import StepFinished
from hpcrl.config.recipe import ROLES
from hpcrl.monitor.advisories import MAX_STEP_DELAY, RECENT_STEPS, Advisory, select_untrained
from hpcrl.monitor.job_state import ALIVE_WITHIN_S, FINAL_STATES, CampaignState, JobVerdict, derive_component_state
from hpcrl.monitor.notes import MonitorNote
from hpcrl.monitor.progress import CampaignProgress, DomainProgress, JobProgress, WorkerProgress, join_loads
from hpcrl.slurm.commands import expand_nodes
from hpcrl.spool.episode_lengths import LengthSummary, summarize_lengths
from hpcrl.spool.token_fates import measure_trained_share

BOTTLENECK_SHARE = 0.8
"""The share of time from which on a role is the one that others wait for."""
MIN_WAITING_ROLLOUTS = 64
"""The fewest trajectories that wait for rewards where these are the bottleneck."""
MIN_PACE_STEPS = 5
"""The fewest steps by whose pace the time of the others is estimated."""
MIN_LATE_S = 60.0
"""A step that is late by less is usual: a checkpoint or an evaluation may come between two."""
MAX_LOAD_AGE_S = 180.0
"""An engine's load that is older is not of now: one that is idle reports it every minute."""
MAX_END_STEPS = 5
"""The first steps, and the last, whose means show how a figure changed; with few steps, half of them each."""


class ComponentView(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    partition: str
    state: str
    num_nodes: int
    """The nodes that it has, or those planned while they are not known."""
    nodes: list[str]
    roles: list[str]


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    id: str
    """Slurm's id (of the leader), or `local-<pid>`."""
    state: str
    reason: str
    components: list[ComponentView]


class RoleView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The workers of a role; what is not known is left out."""

    workers: int
    """Number of workers planned, or seen if there are more; of rewards, planned or alive."""
    alive: int
    done_by: str = ""
    """The role whose workers do its work as well: env workers write the rewards that environments return."""
    busy_share: float | None = None
    """The share of the last minutes (of the trainer: of the last steps) in which it worked."""
    queue: int | None = None
    """The work that waits for it: requests in engines, trajectories before rewards and trainer."""
    tokens_per_s: float | None = None
    """Generated tokens of all its workers."""
    kv_share: float | None = None
    """The share of KV memory in use, the mean of its engines."""
    version: int | None = None
    """The oldest version of the weights that a worker serves; of the trainer, the newest that it made."""
    is_nearly_empty: bool = False
    """Its engines are busy with few requests for their many places: more of them would not be faster."""


class EpisodesView(msgspec.Struct, frozen=True, kw_only=True):
    done: int
    """Episodes of this status: they ended by themselves."""
    truncated: int
    """Episodes that were cut off at a limit; they are trained on as well."""
    aborted: int
    faulted: int
    """Episodes lost to infrastructure: they have no reward."""
    failed: int
    """The episodes lost, and those to train on that are scored for a failure (`spool.outcome.is_failure`)."""
    running: int
    loop_share: float
    """The share of a core that the busiest event loop of an env worker uses."""
    loop_delay_s: float
    """The longest that calls waited for one."""

    @property
    def num_kept(self) -> int:
        """Return the number of episodes to train on."""
        return self.done + self.truncated


class DomainView(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards of the trajectories of one domain, also of those that were not trained on."""

    scored: int
    reward_mean: float | None
    """Mean of all of them."""
    reward_recent: float | None
    """Mean of the last 256."""
    trained_share: float | None
    """The share of the tokens of ended episodes that is trained; None if no event counts them."""
    token_fates: dict[str, int]
    """The fate of those tokens: `trained`, or why they are not."""
    outcomes: dict[str, int]
    """Ended episodes by outcome, each under one; those whose reward function failed are under that."""
    failed: int
    """The number of them that failed."""


class EvaluationView(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one evaluation on held-out tasks."""

    version: int
    """The newest weights at its start."""
    reward_mean: float | None
    """None: no episode could be scored."""
    num_episodes: int


class SeriesChange(NamedTuple):
    """The change of a figure of steps by means: the last steps get what took longest, so one alone misleads."""

    first: float
    """The mean of the first steps: it stays the same once there are 10."""
    last: float
    """The mean of the same number of last steps."""
    num: int
    """The steps in each."""


def measure_change(values: Sequence[float | None]) -> SeriesChange | None:
    """Measure how a figure changed: all that shows a first and a last reward has it from here; None without any."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    num = max(min(MAX_END_STEPS, len(known) // 2), 1)
    return SeriesChange(fmean(known[:num]), fmean(known[-num:]), num)


class SpoolView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    depth: int
    """Trajectories that are durable and that the next stage has not consumed."""


class RoleDetail(msgspec.Struct, frozen=True, kw_only=True):
    partitions: list[str]
    nodes: list[str]


class SnapshotDetail(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that the screen shows besides the contract."""

    now: float
    reason: str = ""
    """Reason for the campaign's state, if known."""
    job_id: str = ""
    elapsed_s: float | None = None
    """Time since the start of the newest job that has started."""
    left_s: float | None = None
    """Time until the end of its allocation."""
    training_left_s: float | None = None
    """The time of jobs that the other steps take at the pace of recent ones; None without enough of these."""
    start_estimate: float | None = None
    """Slurm's estimate of the start of a queued job."""
    last_step: StepFinished | None = None
    losses: list[float | None] = []
    """One per step."""
    memory: str = ""
    """The changes of the trainer for lack of memory, if any."""
    engine_versions: list[int] = []
    """Versions that the engine workers serve now: oldest and newest."""
    num_tokens: int = 0
    remote_prefill_share: float | None = None
    roles: dict[str, RoleDetail] = {}
    notes: list[MonitorNote] = []
    """Recent notes, oldest first."""
    num_notes: int = 0
    """Number of lines to print since the start: a cause counts the 1st, 10th, 100th time."""
    problems: list[str] = []
    """Files that could not be read, and queries that failed."""


class FailedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task that was abandoned, since its group never finished."""

    group: str
    seed: int
    place: int | None
    reason: str


class CampaignSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A campaign at one moment."""

    name: str
    state: CampaignState
    is_partial: bool
    """It made every step, but a domain trained nothing."""
    recipe: str | None
    site: str | None
    created: float | str | None
    jobs: list[JobView]
    roles: dict[str, RoleView]
    version: int
    """The newest version of the weights."""
    step: int
    """The newest training step."""
    num_steps: int | None
    """Number of steps in the recipe."""
    episodes: EpisodesView
    accounts: dict[str, int]
    """Ended episodes by status; they sum to those of `episodes` that do not run."""
    domains: dict[str, DomainView]
    reward_mean: list[float | None]
    """One per step; of a step that was repeated after a resume, the last result counts."""
    evaluations: list[EvaluationView]
    """Evaluations in the order in which they were made."""
    lengths: dict[str, LengthSummary]
    """The lengths in generated tokens of the episodes that were started (those cut off as far as they came), that
    finished, and that were trained on."""
    failed_tasks: list[FailedTask]
    """The tasks that were abandoned."""
    tokens_per_s: float
    """Generated tokens: over the last minute while a job runs, else over all the time that jobs ran."""
    spools: list[SpoolView]
    advisories: list[Advisory]
    """The findings about what is wrong, the worst first."""
    detail: SnapshotDetail

    @property
    def state_word(self) -> str:
        """Return the state as people are shown it."""
        return "partial" if self.is_partial else self.state

    @property
    def has_rollouts(self) -> bool:
        """Return whether episodes are played; false for a campaign with nothing but a trainer."""
        return list(self.roles) != ["train"]


def encode_snapshot(snapshot: CampaignSnapshot) -> bytes:
    """Encode the contract as JSON, without the detail."""
    fields = {name: getattr(snapshot, name) for name in snapshot.__struct_fields__ if name != "detail"}
    return msgspec.json.format(msgspec.json.encode(fields), indent=2) + b"\n"


class CampaignSummary(msgspec.Struct, kw_only=True):
    """The fields used of campaign.json."""

    name: str
    site: str | None = None
    created: float | str | None = None


class TrainSummary(msgspec.Struct, kw_only=True):
    num_steps: int
    checkpoint_every_steps: int | None = None


class RecipeSummary(msgspec.Struct, kw_only=True):
    """The fields used of recipe.json."""

    name: str
    train: TrainSummary


class ComponentSummary(msgspec.Struct, kw_only=True):
    index: int
    partition: str
    roles: list[str]
    nodes: int = 0


class RoleSummary(msgspec.Struct, kw_only=True):
    role: str
    num_workers: int


class PlanSummary(msgspec.Struct, kw_only=True):
    """The fields used of plan.json: few, so that a plan of another hpcrl version can be watched too."""

    layout: str = "hetjob"
    components: list[ComponentSummary] = []
    roles: list[RoleSummary] = []


@dataclass(frozen=True, kw_only=True)
class SnapshotInputs:
    """The facts collected for one snapshot."""

    now: float
    directory: str
    campaign: CampaignSummary | None
    recipe: RecipeSummary | None
    plan: PlanSummary
    state: CampaignState
    lost_jobs: str = ""
    """The reason for an unknown state without any job."""
    verdicts: Sequence[JobVerdict]
    progress: CampaignProgress
    heartbeats: Mapping[str, float]
    num_durable: Mapping[str, int]
    """Trajectories in each spool."""
    num_settled: int
    """Trajectories still in "scored" that the trainer has used or dropped."""
    problems: list[str]
    advisories: Sequence[Advisory] = ()

    @property
    def newest_job(self) -> JobVerdict | None:
        """The newest job that is not merely queued."""
        return next((verdict for verdict in reversed(self.verdicts) if verdict.state != "queued"), None)

    @property
    def is_partial(self) -> bool:
        """True if every step was made, but a domain trained nothing."""
        end = self.verdicts[-1].record.outcome if self.verdicts else None
        is_untrained = (end is not None and end.is_partial) or bool(select_untrained(self.advisories))
        return self.state == "done" and is_untrained

    @property
    def current_job(self) -> JobVerdict | None:
        """The job that runs or drains now, else the last."""
        working = [verdict for verdict in self.verdicts if verdict.state in {"running", "draining"}]
        return next(reversed(working or self.verdicts), None)

    def job_progress(self, verdict: JobVerdict | None) -> JobProgress:
        """Return the progress of a job, from its events."""
        return self.progress.jobs.get(verdict.record.number, JobProgress()) if verdict else JobProgress()

    def select_live(self, workers: Iterable[WorkerProgress]) -> list[WorkerProgress]:
        """Return those with a recent heartbeat and no end event; a job that has ended has none."""
        newest = self.newest_job
        if newest is None or newest.record.outcome is not None or self.state in FINAL_STATES:
            return []
        since, heartbeats = self.now - ALIVE_WITHIN_S, self.heartbeats
        return [worker for worker in workers if worker.is_up and heartbeats.get(worker.name, 0.0) > since]


def build_snapshot(inputs: SnapshotInputs) -> CampaignSnapshot:
    """Build the snapshot from the collected facts."""
    progress = inputs.progress
    workers = list(inputs.job_progress(inputs.newest_job).workers.values())
    live_workers = inputs.select_live(workers)
    return CampaignSnapshot(
        name=inputs.directory,
        state=inputs.state,
        is_partial=inputs.is_partial,
        recipe=inputs.recipe.name if inputs.recipe else None,
        site=inputs.campaign.site if inputs.campaign else None,
        created=inputs.campaign.created if inputs.campaign else None,
        jobs=[_build_job_view(verdict, inputs) for verdict in inputs.verdicts],
        roles=_build_role_views(inputs, workers, live_workers),
        version=progress.version,
        step=next(reversed(progress.steps), 0),
        num_steps=inputs.recipe.train.num_steps if inputs.recipe else None,
        episodes=_build_episodes_view(progress, live_workers),
        accounts=progress.settle_totals().count_ended(),
        domains={
            name: _build_domain_view(progress.domains[name], progress.token_fates(name))
            for name in sorted(progress.domains)
        },
        reward_mean=[step.reward_mean for step in progress.steps.values()],
        evaluations=[
            EvaluationView(
                version=evaluation.version, reward_mean=evaluation.reward_mean, num_episodes=evaluation.num_episodes
            )
            for evaluation in progress.evaluations.values()
        ],
        lengths={
            name: summary
            for name, counts in progress.join_lengths().items()
            if (summary := summarize_lengths(counts)) is not None
        },
        failed_tasks=[
            FailedTask(group=task.id, seed=task.seed, place=task.place, reason=task.reason)
            for task in progress.failed_tasks.values()
        ],
        tokens_per_s=round(_choose_tokens_per_s(inputs), 1),
        spools=_build_spool_views(inputs),
        advisories=list(inputs.advisories),
        detail=_build_detail(inputs, workers, live_workers),
    )


def _build_job_view(verdict: JobVerdict, inputs: SnapshotInputs) -> JobView:
    slurm = {component.index: component for component in verdict.slurm.components} if verdict.slurm else {}
    is_shared = inputs.plan.layout == "hetstep"  # Slurm lists one component then, with all nodes
    components = []
    for component in inputs.plan.components:
        status = slurm.get(0 if is_shared else component.index)
        known_nodes = expand_nodes(status.nodes) if status and not is_shared else []
        nodes = known_nodes or _component_nodes(component, inputs.job_progress(verdict), is_shared=is_shared)
        components.append(
            ComponentView(
                index=component.index,
                partition=status.partition if status and status.partition else component.partition,
                state=derive_component_state(status.state) if status and not verdict.record.outcome else verdict.state,
                num_nodes=len(known_nodes) or max(component.nodes, len(nodes)),
                nodes=nodes,
                roles=list(component.roles),
            )
        )
    record = verdict.record
    return JobView(
        number=record.number, id=record.submitted.id, state=verdict.state, reason=verdict.reason, components=components
    )


def _component_nodes(component: ComponentSummary, progress: JobProgress, *, is_shared: bool) -> list[str]:
    """Return the nodes of a component: the driver's report in a shared allocation, else the nodes of its workers."""
    if is_shared and component.index < len(progress.nodes):
        return progress.nodes[component.index]
    return sorted(
        {worker.node for worker in progress.workers.values() if worker.node and worker.role in component.roles}
    )


def _build_role_views(
    inputs: SnapshotInputs, workers: Sequence[WorkerProgress], live_workers: Sequence[WorkerProgress]
) -> dict[str, RoleView]:
    planned = {role.role: role.num_workers for role in inputs.plan.roles}
    seen, alive = _group_by_role(workers), _group_by_role(live_workers)
    return {
        role: RoleView(
            workers=max(planned.get(role, 0), len((alive if role == "reward" else seen).get(role, ()))),
            alive=len(alive.get(role, ())),
            done_by="env" if role == "reward" and "env" in inputs.progress.scoring_roles else "",
            **_measure_load(role, inputs, alive.get(role, ())),
        )
        for role in dict.fromkeys([*ROLES, *planned])
        if role in planned or role in seen
    }


def _measure_load(role: str, inputs: SnapshotInputs, workers: Sequence[WorkerProgress]) -> dict[str, Any]:
    """Return the fields of a role's load that are known."""
    waiting = {spool.name: spool.depth for spool in _build_spool_views(inputs)}
    is_running = inputs.state in {"running", "draining"}
    if role == "reward":  # it has a queue also while none of its workers is up
        return {"queue": waiting["rollouts"]} if workers or is_running else {}
    if role == "train" and workers:
        load = _measure_trainer_load(inputs.progress) | {"queue": waiting["scored"]}
        return load | ({"busy_share": None} if _is_step_late(inputs) else {})
    known = [(worker, worker.engine) for worker in workers if worker.engine is not None]
    current = [(worker, load) for worker, load in known if inputs.now - load.time <= MAX_LOAD_AGE_S]
    loads = [load for _, load in current]
    if not loads:
        return {}
    kv_shares = [load.kv_share for load in loads if load.kv_share is not None]
    recent = join_loads(worker.recent_load for worker, _ in current)
    return {
        "busy_share": round(recent.busy_share, 3),
        "is_nearly_empty": recent.is_nearly_empty,
        "queue": round(sum(load.waiting for load in loads)),
        "tokens_per_s": round(sum(load.num_tokens / load.window_s for load in loads if load.window_s > 0), 1),
        "kv_share": round(fmean(kv_shares), 3) if kv_shares else None,
        "version": min(load.version for load in loads),
    }


def _measure_trainer_load(progress: CampaignProgress) -> dict[str, Any]:
    steps = [progress.steps[number] for number in itertools.islice(reversed(progress.steps), RECENT_STEPS)]
    known = [(step.step_s, step.wait_s) for step in steps if step.step_s is not None and step.wait_s is not None]
    total_s = sum(step_s + wait_s for step_s, wait_s in known)
    if not total_s:
        return {}
    return {"busy_share": round(sum(step_s for step_s, _ in known) / total_s, 3), "version": progress.version}


def find_bottleneck(roles: Mapping[str, RoleView], spools: Sequence[SpoolView]) -> str:
    """Return the role that all others wait for, as far as the figures show one; "" if they show none."""
    depths = {spool.name: spool.depth for spool in spools}
    shares = {role: view.busy_share for role, view in roles.items() if view.busy_share is not None}
    if "train" not in shares:
        return ""
    if shares["train"] >= BOTTLENECK_SHARE:
        return "train"
    if depths.get("rollouts", 0) > max(depths.get("scored", 0), MIN_WAITING_ROLLOUTS):
        return "reward"
    engines = {role: share for role, share in shares.items() if role != "train"}
    full = {role: share for role, share in engines.items() if not roles[role].is_nearly_empty}
    busiest = max(full, key=lambda role: full[role], default="")
    if busiest and full[busiest] >= BOTTLENECK_SHARE:
        return busiest
    return "env" if engines else ""


def _group_by_role(workers: Sequence[WorkerProgress]) -> dict[str, list[WorkerProgress]]:
    workers_by_role: dict[str, list[WorkerProgress]] = {}
    for worker in workers:
        workers_by_role.setdefault(worker.role, []).append(worker)
    return workers_by_role


def _build_episodes_view(progress: CampaignProgress, live_workers: Sequence[WorkerProgress]) -> EpisodesView:
    totals = progress.settle_totals()
    counts = [worker.episodes for worker in live_workers if worker.episodes]
    return EpisodesView(
        done=totals.done,
        truncated=totals.truncated,
        aborted=totals.aborted_stale + totals.aborted_redundant,
        faulted=totals.env_fault + totals.policy_fault,
        failed=progress.count_failed(),
        running=sum(one.running for one in counts),
        loop_share=max((one.loop_share for one in counts), default=0.0),
        loop_delay_s=max((one.loop_delay_s for one in counts), default=0.0),
    )


def _build_domain_view(rewards: DomainProgress, fates: dict[str, int]) -> DomainView:
    return DomainView(
        scored=rewards.num,
        reward_mean=rewards.total / rewards.num if rewards.num else None,
        reward_recent=sum(rewards.recent) / len(rewards.recent) if rewards.recent else None,
        trained_share=measure_trained_share(fates),
        token_fates=fates,
        outcomes=dict(rewards.settle_outcomes().most_common()),
        failed=rewards.count_failed(),
    )


def _choose_tokens_per_s(inputs: SnapshotInputs) -> float:
    if inputs.state in {"running", "draining"}:
        return inputs.progress.token_rate.per_second(inputs.now)
    return inputs.progress.mean_tokens_per_s()


def _build_spool_views(inputs: SnapshotInputs) -> list[SpoolView]:
    """Count what the next stage has not consumed: rewards score all rollouts, the trainer consumes what is scored."""
    rollouts, scored = inputs.num_durable["rollouts"], inputs.num_durable["scored"]
    depths = {"rollouts": rollouts - scored, "scored": scored - inputs.num_settled}
    return [SpoolView(name=name, depth=max(depth, 0)) for name, depth in depths.items()]


def _build_detail(
    inputs: SnapshotInputs, workers: Sequence[WorkerProgress], live_workers: Sequence[WorkerProgress]
) -> SnapshotDetail:
    progress = inputs.progress
    current = inputs.current_job
    versions = [worker.version for worker in live_workers if worker.version is not None]
    turns = progress.totals.turns
    elapsed_s, left_s = _measure_job_times(inputs)
    return SnapshotDetail(
        now=inputs.now,
        reason=current.reason if current else inputs.lost_jobs,
        job_id=current.record.submitted.id if current else "",
        elapsed_s=elapsed_s,
        left_s=left_s,
        training_left_s=_estimate_training(inputs),
        start_estimate=current.slurm.start if current and current.slurm and current.state == "queued" else None,
        last_step=next(reversed(progress.steps.values()), None),
        losses=[step.loss for step in progress.steps.values()],
        memory=progress.describe_memory(),
        engine_versions=[min(versions), max(versions)] if versions else [],
        num_tokens=progress.totals.num_tokens,
        remote_prefill_share=progress.totals.remote_prefills / turns if turns else None,
        roles=_build_role_details(inputs.plan, workers),
        notes=list(progress.notes),
        num_notes=progress.notes.num_due,
        problems=inputs.problems,
    )


def _build_role_details(plan: PlanSummary, workers: Sequence[WorkerProgress]) -> dict[str, RoleDetail]:
    """Return where the workers of each role are; a role without any has the partitions that are planned for it."""
    seen = _group_by_role(workers)
    planned: dict[str, set[str]] = {}
    for component in plan.components:
        for role in component.roles:
            planned.setdefault(role, set()).add(component.partition)
    return {
        role: RoleDetail(
            partitions=sorted({worker.partition for worker in seen.get(role, ()) if worker.partition})
            or sorted(planned.get(role, ())),
            nodes=sorted({worker.node for worker in seen.get(role, ()) if worker.node}),
        )
        for role in dict.fromkeys([*seen, *planned])
    }


def _estimate_training(inputs: SnapshotInputs) -> float | None:
    """Estimate the time of the steps that are left by the newest ones of the job that runs."""
    pace_s = _measure_pace(inputs.progress)
    if inputs.state != "running" or inputs.recipe is None or pace_s is None or _is_step_late(inputs):
        return None
    return max(inputs.recipe.train.num_steps - next(reversed(inputs.progress.steps), 0), 0) * pace_s


def _measure_pace(progress: CampaignProgress) -> float | None:
    """Return the mean time from step to step of the newest ones of one job, in which a long pause counts little."""
    newest_first = list(itertools.islice(reversed(progress.steps.values()), RECENT_STEPS + 1))
    times = [step.time for step in newest_first if step.job == newest_first[0].job]
    gaps = [max(later - earlier, 0.0) for later, earlier in itertools.pairwise(times)]  # a clock may jump
    if len(gaps) < MIN_PACE_STEPS:
        return None
    longest_s = MAX_STEP_DELAY * median(gaps)
    return fmean(min(gap, longest_s) for gap in gaps)


def _is_step_late(inputs: SnapshotInputs) -> bool:
    """Return whether no step has come for so long that the figures of the last ones are not of now."""
    last, pace_s = next(reversed(inputs.progress.steps.values()), None), _measure_pace(inputs.progress)
    if last is None or pace_s is None:
        return False
    return inputs.now - last.time > max(MAX_STEP_DELAY * pace_s, MIN_LATE_S)


def _measure_job_times(inputs: SnapshotInputs) -> tuple[float | None, float | None]:
    """Return how long the newest job has run, and how long it may still run."""
    newest, progress = inputs.newest_job, inputs.job_progress(inputs.newest_job)
    if newest is None or progress.started_at is None:
        return None, None
    if newest.state not in {"running", "draining", "unknown"}:
        return max(progress.last_event_time - progress.started_at, 0.0), None
    end = progress.end_time or (newest.slurm.end if newest.slurm else None)
    return max(inputs.now - progress.started_at, 0.0), max(end - inputs.now, 0.0) if end else None
