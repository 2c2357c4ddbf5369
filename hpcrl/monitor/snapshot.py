"""A campaign at one moment: the JSON contract of `hpcrl monitor --json`, and what only the view shows beside it.

`build(facts) -> Snapshot`: pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from hpcrl.campaign_dir.events import StepFinished
from hpcrl.config.recipe import ROLES
from hpcrl.monitor.job_state import BEAT_S, JobVerdict, State, component_state
from hpcrl.monitor.progress import Job, Note, Progress, Rewards, Worker
from hpcrl.slurm.commands import expand_nodes
from hpcrl.spool.status import STATUSES


class ComponentView(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    partition: str
    state: str
    nodes: list[str]
    roles: list[str]


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    id: str
    """Slurm's id (of the leader), or `local-<pid>`."""
    state: str
    reason: str
    components: list[ComponentView]


class RoleView(msgspec.Struct, frozen=True, kw_only=True):
    workers: int
    """Planned, or seen where there are more."""
    alive: int


class EpisodesView(msgspec.Struct, frozen=True, kw_only=True):
    done: int
    """Ended by themselves or cut at a limit: what is trained on."""
    aborted: int
    faulted: int
    running: int


class DomainView(msgspec.Struct, frozen=True, kw_only=True):
    """What the trajectories of one domain have earned, also those that were not trained on."""

    scored: int
    reward_mean: float | None
    """Of all of them."""
    reward_recent: float | None
    """Of the last 256."""


class EvaluationView(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured on held-out tasks."""

    version: int
    """The newest weights when it began."""
    reward_mean: float | None
    """None: no episode could be scored."""
    num_episodes: int


class SpoolView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    depth: int
    """Trajectories that are durable and that the next stage has not consumed."""


class RoleDetail(msgspec.Struct, frozen=True, kw_only=True):
    partitions: list[str]
    nodes: list[str]


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """What the view shows besides the contract."""

    now: float
    reason: str = ""
    """Why the campaign is in its state, if there is something to say."""
    job_id: str = ""
    elapsed_s: float | None = None
    """Of the newest job that has started."""
    left_s: float | None = None
    """Until the end of its allocation."""
    start_estimate: float | None = None
    """When Slurm thinks that a queued job starts."""
    last_step: StepFinished | None = None
    engine_versions: list[int] = []
    """Versions that the engine workers serve now: oldest and newest."""
    num_tokens: int = 0
    remote_prefill_share: float | None = None
    roles: dict[str, RoleDetail] = {}
    notes: list[Note] = []
    """What happened of late, oldest first."""
    num_notes: int = 0
    """Since the beginning; those before the ones in `notes` are forgotten."""
    problems: list[str] = []
    """What could not be read or asked."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A campaign at one moment."""

    name: str
    state: State
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
    """How many the recipe asks for."""
    episodes: EpisodesView
    accounts: dict[str, int]
    """How the episodes that have ended did so; they sum to those of `episodes` that do not run."""
    domains: dict[str, DomainView]
    reward_mean: list[float | None]
    """One per step; a step that was repeated after a resume counts as it was done last."""
    evaluations: list[EvaluationView]
    """In the order in which they were made."""
    tokens_per_s: float
    """Generated: over the last minute while a job runs, else over all the time that jobs ran."""
    spools: list[SpoolView]
    detail: Detail


def to_json(snapshot: Snapshot) -> bytes:
    """The contract, without what only the view shows."""
    fields = {name: getattr(snapshot, name) for name in snapshot.__struct_fields__ if name != "detail"}
    return msgspec.json.format(msgspec.json.encode(fields), indent=2) + b"\n"


_ENDINGS = tuple(status.replace("-", "_") for status in STATUSES)


class Campaign(msgspec.Struct, kw_only=True):
    """What is used of campaign.json."""

    name: str
    site: str | None = None
    created: float | str | None = None


class Train(msgspec.Struct, kw_only=True):
    num_steps: int


class Recipe(msgspec.Struct, kw_only=True):
    """What is used of recipe.json."""

    name: str
    train: Train


class Component(msgspec.Struct, kw_only=True):
    index: int
    partition: str
    roles: list[str]


class RolePlan(msgspec.Struct, kw_only=True):
    role: str
    num_workers: int


class Plan(msgspec.Struct, kw_only=True):
    """What is used of plan.json: little, so that a plan of another hpcrl version can be watched too."""

    layout: str = "hetjob"
    components: list[Component] = []
    roles: list[RolePlan] = []


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that was read, asked and judged for one snapshot."""

    now: float
    directory: str
    campaign: Campaign | None
    recipe: Recipe | None
    plan: Plan
    state: State
    verdicts: Sequence[JobVerdict]
    progress: Progress
    beats: Mapping[str, float]
    durable: Mapping[str, int]
    """Trajectories in each spool."""
    num_settled: int
    """Of those in "scored": used or dropped by the trainer, and still there."""
    problems: list[str]

    @property
    def newest(self) -> JobVerdict | None:
        """The newest job that is not merely queued."""
        return next((verdict for verdict in reversed(self.verdicts) if verdict.state != "queued"), None)

    @property
    def current(self) -> JobVerdict | None:
        """The one that works now, else the last."""
        working = [verdict for verdict in self.verdicts if verdict.state in {"running", "draining"}]
        return next(reversed(working or self.verdicts), None)

    def told(self, verdict: JobVerdict | None) -> Job:
        """What the events say of a job."""
        return self.progress.jobs.get(verdict.record.number, Job()) if verdict else Job()

    def is_alive(self, worker: Worker) -> bool:
        """A sign of life of late, no word of its end, and a driver that has not ended (it ends its workers)."""
        ended = self.newest is None or self.newest.record.outcome is not None
        return not ended and worker.up and self.now - self.beats.get(worker.name, 0.0) < BEAT_S


def build(facts: Facts) -> Snapshot:
    """Everything that is shown of a campaign."""
    progress = facts.progress
    workers = list(facts.told(facts.newest).workers.values())
    living = [worker for worker in workers if facts.is_alive(worker)]
    return Snapshot(
        name=facts.campaign.name if facts.campaign else facts.directory,
        state=facts.state,
        recipe=facts.recipe.name if facts.recipe else None,
        site=facts.campaign.site if facts.campaign else None,
        created=facts.campaign.created if facts.campaign else None,
        jobs=[_job(verdict, facts) for verdict in facts.verdicts],
        roles=_roles(facts.plan, workers, living),
        version=progress.version,
        step=next(reversed(progress.steps), 0),
        num_steps=facts.recipe.train.num_steps if facts.recipe else None,
        episodes=_episodes(progress, living),
        accounts={status: getattr(progress.totals, status) for status in _ENDINGS},
        domains={name: _domain(progress.domains[name]) for name in sorted(progress.domains)},
        reward_mean=[step.reward_mean for step in progress.steps.values()],
        evaluations=[
            EvaluationView(version=told.version, reward_mean=told.reward_mean, num_episodes=told.num_episodes)
            for told in progress.evaluations.values()
        ],
        tokens_per_s=round(_tokens_per_s(facts), 1),
        spools=_spools(facts),
        detail=_detail(facts, workers, living),
    )


def _job(verdict: JobVerdict, facts: Facts) -> JobView:
    slurm = {part.index: part for part in verdict.slurm.components} if verdict.slurm else {}
    is_shared = facts.plan.layout == "hetstep"  # Slurm knows one component then, with all nodes
    components = []
    for part in facts.plan.components:
        status = slurm.get(0 if is_shared else part.index)
        told = expand_nodes(status.nodes) if status and not is_shared else []
        components.append(
            ComponentView(
                index=part.index,
                partition=status.partition if status and status.partition else part.partition,
                state=component_state(status.state) if status and not verdict.record.outcome else verdict.state,
                nodes=told or _nodes(part, facts.told(verdict), is_shared=is_shared),
                roles=list(part.roles),
            )
        )
    record = verdict.record
    return JobView(
        number=record.number, id=record.submitted.id, state=verdict.state, reason=verdict.reason, components=components
    )


def _nodes(part: Component, told: Job, *, is_shared: bool) -> list[str]:
    """What the driver says that a component got, where nobody else knows; else what its workers named."""
    if is_shared and part.index < len(told.nodes):
        return told.nodes[part.index]
    return sorted({worker.node for worker in told.workers.values() if worker.node and worker.role in part.roles})


def _roles(plan: Plan, workers: Sequence[Worker], living: Sequence[Worker]) -> dict[str, RoleView]:
    planned = {role.role: role.num_workers for role in plan.roles}
    seen, alive = _by_role(workers), _by_role(living)
    return {
        role: RoleView(workers=max(planned.get(role, 0), len(seen.get(role, ()))), alive=len(alive.get(role, ())))
        for role in ROLES
        if role in planned or role in seen
    }


def _by_role(workers: Sequence[Worker]) -> dict[str, list[Worker]]:
    found: dict[str, list[Worker]] = {}
    for worker in workers:
        found.setdefault(worker.role, []).append(worker)
    return found


def _episodes(progress: Progress, living: Sequence[Worker]) -> EpisodesView:
    totals = progress.totals
    return EpisodesView(
        done=totals.done + totals.truncated,
        aborted=totals.aborted_stale + totals.aborted_redundant,
        faulted=totals.env_fault + totals.policy_fault,
        running=sum(worker.episodes.running for worker in living if worker.episodes),
    )


def _domain(rewards: Rewards) -> DomainView:
    return DomainView(
        scored=rewards.num,
        reward_mean=rewards.total / rewards.num if rewards.num else None,
        reward_recent=sum(rewards.recent) / len(rewards.recent) if rewards.recent else None,
    )


def _tokens_per_s(facts: Facts) -> float:
    if facts.state in {"running", "draining"}:
        return facts.progress.rate.per_second(facts.now)
    return facts.progress.mean_tokens_per_s()


def _spools(facts: Facts) -> list[SpoolView]:
    """What the next stage has yet to take: rewards score all rollouts, the trainer consumes what is scored."""
    rollouts, scored = facts.durable["rollouts"], facts.durable["scored"]
    depths = {"rollouts": rollouts - scored, "scored": scored - facts.num_settled}
    return [SpoolView(name=name, depth=max(depth, 0)) for name, depth in depths.items()]


def _detail(facts: Facts, workers: Sequence[Worker], living: Sequence[Worker]) -> Detail:
    progress = facts.progress
    current = facts.current
    versions = [worker.version for worker in living if worker.version is not None]
    turns = progress.totals.turns
    elapsed_s, left_s = _times(facts)
    return Detail(
        now=facts.now,
        reason=current.reason if current else "",
        job_id=current.record.submitted.id if current else "",
        elapsed_s=elapsed_s,
        left_s=left_s,
        start_estimate=current.slurm.start if current and current.slurm and current.state == "queued" else None,
        last_step=next(reversed(progress.steps.values()), None),
        engine_versions=[min(versions), max(versions)] if versions else [],
        num_tokens=progress.totals.num_tokens,
        remote_prefill_share=progress.totals.remote_prefills / turns if turns else None,
        roles={
            role: RoleDetail(
                partitions=sorted({worker.partition for worker in group if worker.partition}),
                nodes=sorted({worker.node for worker in group if worker.node}),
            )
            for role, group in _by_role(workers).items()
        },
        notes=list(progress.notes),
        num_notes=progress.num_notes,
        problems=facts.problems,
    )


def _times(facts: Facts) -> tuple[float | None, float | None]:
    """How long the newest job has run, and how long it may go on."""
    newest, told = facts.newest, facts.told(facts.newest)
    if newest is None or told.started is None:
        return None, None
    if newest.state not in {"running", "draining", "unknown"}:
        return max(told.last - told.started, 0.0), None
    end = told.end_time or (newest.slurm.end if newest.slurm else None)
    return max(facts.now - told.started, 0.0), max(end - facts.now, 0.0) if end else None
