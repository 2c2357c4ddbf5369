"""Build the report of a campaign from its directory: while it runs, after its end, and after a crash.

build_report      one campaign
build_document    several, with their comparison
"""

import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from hpcrl import __version__
from hpcrl.campaign_dir.campaign_format import describe_newer_format
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.toml import flatten_table
from hpcrl.monitor.collect import SnapshotCollector, make_slurm_query
from hpcrl.monitor.job_state import read_json_as
from hpcrl.monitor.progress import JobProgress
from hpcrl.monitor.snapshot import CampaignSnapshot, JobView, measure_change
from hpcrl.monitor.workers import split_numbers
from hpcrl.report.charts import (
    build_engine_charts,
    build_reward_charts,
    build_stability_charts,
    build_staleness_charts,
    build_time_charts,
    thin_chart,
)
from hpcrl.report.comparison import compare_reports
from hpcrl.report.figures import (
    REPORT_VERSION,
    CampaignReport,
    DomainRewards,
    EngineFigures,
    FailureFigures,
    JobFigures,
    KeyFigures,
    ProvenanceEntry,
    ReportDocument,
    RoleFigures,
    TrajectoryFigures,
)
from hpcrl.report.gantt import build_gantt
from hpcrl.report.history import CampaignHistory, RoleWork, WorkerSpan
from hpcrl.slurm.submit import SubmittedJob
from hpcrl.spool.listing import describe_lost_spools
from hpcrl.spool.outcome import MAX_FAILED_SHARE, OUTCOME_EXIT, OUTCOME_REWARD_ERROR, OUTCOME_TIMEOUT
from hpcrl.spool.token_fates import TRAINED, measure_trained_share
from hpcrl.system.json_numbers import finite_or_none, load_json
from hpcrl.system.processes import do_nothing

MAX_FAILURE_ROWS = 60
POINTS_OF_PAGE, MIN_POINTS = 1600, 40
"""The points of a chart over all campaigns of a page, which stays below 5 MB, and the least of each."""
MAX_REASON_CHARS = 2000
MAX_NUMBER = 2**53
"""No node or worker count of a plan is larger."""
_POLICY_FAULTS = frozenset({OUTCOME_EXIT, OUTCOME_REWARD_ERROR, OUTCOME_TIMEOUT, "reward"})

TrajectoryReader = Callable[[CampaignDir], TrajectoryFigures]


def build_document(
    campaigns: Sequence[CampaignDir],
    *,
    read_trajectories: TrajectoryReader,
    show_progress: Callable[[str], object] = do_nothing,
) -> ReportDocument:
    """Return the reports of campaigns, and their comparison if they are several."""
    reports = []
    sites = [dict(flatten_table(_read_table(campaign.site))) for campaign in campaigns]
    for campaign in campaigns:
        show_progress(f"{campaign.name}: reading events")
        report = build_report(
            campaign,
            read_trajectories=read_trajectories,
            show_progress=show_progress,
            share_of_page=1 / len(campaigns),
        )
        reports.append(_thin_charts(report, most=max(POINTS_OF_PAGE // len(campaigns), MIN_POINTS)))
    return ReportDocument(
        report=REPORT_VERSION,
        hpcrl=__version__,
        created=time.time(),
        campaigns=reports,
        comparison=compare_reports(reports, sites=sites) if len(reports) > 1 else None,
    )


def _thin_charts(report: CampaignReport, *, most: int) -> CampaignReport:
    """Return a report whose charts have at most this many points."""
    names = ("reward_charts", "stability_charts", "time_charts", "staleness_charts", "engine_charts")
    thin = {name: [thin_chart(chart, most=most) for chart in getattr(report, name)] for name in names}
    return msgspec.structs.replace(report, **thin)


def build_report(
    campaign: CampaignDir,
    *,
    read_trajectories: TrajectoryReader,
    show_progress: Callable[[str], object] = do_nothing,
    share_of_page: float = 1.0,
) -> CampaignReport:
    """Return the report of one campaign, which may fill a share of a page."""
    history = CampaignHistory()
    snapshot = SnapshotCollector(campaign, query=make_slurm_query(campaign), progress=history).poll()
    show_progress(f"{campaign.name}: reading trajectories")
    trajectories = read_trajectories(campaign)
    recipe = _read_table(campaign.recipe)
    plan = _read_table(campaign.plan)
    jobs: list[JobFigures] = []
    for view in snapshot.jobs:
        ended = max((job.ended for job in jobs if job.ended is not None), default=-math.inf)
        jobs.append(_build_job(view, campaign, history, plan, now=snapshot.detail.now, last_ended=ended))
    figures = _build_key_figures(snapshot, history, jobs, plan, num_trajectories=trajectories.num_kept)
    has_jobs = bool(jobs) or campaign.has_results()
    problems = list(dict.fromkeys([*snapshot.detail.problems, *_list_gaps(campaign, has_jobs=has_jobs)]))
    in_env = {"reward"} if _is_scored_in_env(snapshot, history) else set()
    return CampaignReport(
        name=snapshot.name,
        state=snapshot.state,
        is_partial=snapshot.is_partial,
        reason=snapshot.detail.reason,
        verdict=describe_verdict(snapshot, figures, num_problems=len(problems), num_damaged=len(trajectories.problems)),
        advisories=snapshot.advisories,
        key_figures=figures,
        provenance=_build_provenance(campaign, recipe, plan),
        reward_charts=build_reward_charts(history),
        rewards=_build_rewards(snapshot, history),
        stability_charts=build_stability_charts(history),
        time_charts=build_time_charts(history),
        staleness_charts=build_staleness_charts(history),
        engine_charts=build_engine_charts(history),
        engines=_build_engines(history),
        jobs=jobs,
        roles=_build_roles(history, jobs, plan, in_env=in_env),
        workers=build_gantt(history.spans, share=share_of_page),
        outcomes={name: view.outcomes for name, view in snapshot.domains.items()},
        failed={name: view.failed for name, view in snapshot.domains.items()},
        token_fates={name: view.token_fates for name, view in snapshot.domains.items() if view.token_fates},
        failures=_build_failures(history),
        trajectories=trajectories,
        recipe={key: json.dumps(value) for key, value in flatten_table(recipe)},
        problems=problems,
    )  # fmt: skip


def describe_verdict(
    snapshot: CampaignSnapshot, figures: KeyFigures, *, num_problems: int = 0, num_damaged: int = 0
) -> str:
    """Return one sentence: how far it is, what was learned, and how much needs attention.

    `num_problems` records or queries gave no answer, and `num_damaged` trajectories or segments are damaged.
    """
    steps = f"{figures.step:,}" + (f" of {figures.num_steps:,}" if figures.num_steps is not None else "") + " steps"
    heads = {
        "done": f"Done {'in part ' * snapshot.is_partial}after {steps}",
        "running": f"Running: {steps} so far",
        "draining": f"Ending: {steps} so far",
        "failed": f"Failed after {steps}",
        "stopped": f"Stopped after {steps}",
        "queued": f"Waiting in the queue after {steps}",
        "planned": "Not submitted yet",
    }
    parts = [heads.get(snapshot.state, f"In an unknown state after {steps}"), *_describe_results(figures)]
    num_ended = figures.num_episodes + figures.num_faulted
    if figures.num_failed > MAX_FAILED_SHARE * num_ended:
        parts.append(f"{figures.num_failed:,} of {num_ended:,} episodes failed")
    parts += _describe_findings(snapshot, figures, is_whole=not num_problems + num_damaged)
    if num_damaged:
        parts.append(f"its records are damaged: `hpcrl traj verify {snapshot.name}`")
    if num_problems:
        parts.append(f"{num_problems} thing{'s' * (num_problems > 1)} could not be read")
    return "; ".join(parts) + "."


def _describe_results(figures: KeyFigures) -> Iterator[str]:
    """Describe what was learned."""
    first, last = figures.reward_first, figures.reward_last
    if first is not None and last is not None:
        yield _describe_change(first, last, noise=figures.reward_noise)
    elif figures.step:
        yield "no step has a reward"
    if figures.evaluation_last is not None:
        yield f"held-out tasks give {figures.evaluation_last:.3f}"


def _describe_findings(snapshot: CampaignSnapshot, figures: KeyFigures, *, is_whole: bool) -> Iterator[str]:
    """Describe what is left to do, if anything; that nothing is needs records that could all be read."""
    num_left = (figures.num_steps or 0) - figures.step
    is_cut = snapshot.state == "stopped" and num_left > 0
    if is_cut:
        yield f"{num_left:,} step{'s are' if num_left > 1 else ' is'} left: `hpcrl resume {snapshot.name}`"
    num_notices = sum(advisory.severity == "notice" for advisory in snapshot.advisories)
    num_urgent = len(snapshot.advisories) - num_notices
    if num_urgent:
        yield f"{num_urgent} finding{'s need' if num_urgent > 1 else ' needs'} attention"
    elif num_notices:
        yield f"{num_notices} notice{'s' * (num_notices > 1)}, nothing urgent"
    elif snapshot.state not in {"failed", "unknown"} and not is_cut and is_whole:
        yield "nothing needs attention"


def _list_gaps(campaign: CampaignDir, *, has_jobs: bool) -> list[str]:
    """List what a report lacks of a campaign's records: those that are missing, and what is newer than this version."""
    found = []
    if problem := describe_newer_format(campaign):
        found.append(f"{problem}: what is new in it is not shown")
    if has_jobs:  # they are made before the first job is submitted
        records = (campaign.recipe, campaign.plan, campaign.site)
        found += [f"{path.name} is missing" for path in records if not path.exists()]
        found += filter(None, [describe_lost_spools(campaign)])
    return found


def _is_scored_in_env(snapshot: CampaignSnapshot, history: CampaignHistory) -> bool:
    """Return whether env workers score, and no reward worker does."""
    view = snapshot.roles.get("reward")
    return view is not None and view.done_by == "env" and "reward" not in history.scoring_roles


def _describe_change(first: float, last: float, *, noise: float | None) -> str:
    """Describe a change of the reward: one that cannot be seen, or that is within its noise, is none."""
    if noise is None:
        return f"the reward is {last:.3f}"
    if f"{first:.3f}" == f"{last:.3f}":
        return f"the reward did not change: {last:.3f}"
    if abs(last - first) <= noise:
        return f"the reward did not change beyond its noise: {first:.3f}, then {last:.3f}"
    return f"the reward {'rose' if last > first else 'fell'} from {first:.3f} to {last:.3f}"


def _measure_noise(rewards: Sequence[float], size: int) -> float | None:
    """Return two standard errors of the difference of two means of `size` rewards, by neighbours' differences."""
    if len(rewards) < 2:
        return None
    variance = fmean((later - earlier) ** 2 for earlier, later in itertools.pairwise(rewards)) / 2
    return 2 * math.sqrt(2 * variance / size)


def _read_table(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        table = load_json(path.read_bytes())
        if isinstance(table, dict):
            return table
    return {}


def _list_tables(table: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = table.get(name)
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _list_texts(table: Mapping[str, Any], name: str) -> list[str]:
    value = table.get(name)
    return [str(one) for one in value] if isinstance(value, list) else []


def _get_table(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = table.get(name)
    return value if isinstance(value, dict) else {}


def _number(table: Mapping[str, Any], name: str, default: float = 0) -> float:
    value = table.get(name, default)
    return value if isinstance(value, int | float) and abs(value) < MAX_NUMBER else default


def _count_nodes(plan: Mapping[str, Any], progress: JobProgress | None) -> list[int]:
    """Count the nodes of each component of a job: those that it had, or else those of the newest plan."""
    if progress and any(progress.nodes):
        return [len(nodes) for nodes in progress.nodes]
    return [int(_number(component, "nodes")) for component in _list_tables(plan, "components")]


def _build_job(
    view: JobView,
    campaign: CampaignDir,
    history: CampaignHistory,
    plan: Mapping[str, Any],
    *,
    now: float,
    last_ended: float,
) -> JobFigures:
    """Build the figures of a job; one that was queued while an earlier one ran has waited since the end of that."""
    submitted = read_json_as(campaign.job(view.number).submission, SubmittedJob, [])
    progress = history.jobs.get(view.number)
    started = progress.started_at if progress else None
    is_open = view.state in {"running", "draining"}
    steps = [step.step for step in history.steps.values() if step.job == view.number]
    return JobFigures(
        number=view.number,
        id=view.id,
        state=view.state,
        reason=view.reason,
        queued=max(submitted.time, last_ended) if submitted else None,
        started=started,
        ended=None if started is None or progress is None else now if is_open else progress.last_event_time,
        component_nodes=_count_nodes(plan, progress),
        first_step=min(steps, default=None),
        last_step=max(steps, default=None),
    )


def _build_key_figures(
    snapshot: CampaignSnapshot,
    history: CampaignHistory,
    jobs: Sequence[JobFigures],
    plan: Mapping[str, Any],
    *,
    num_trajectories: int,
) -> KeyFigures:
    rewards = [value for value in map(finite_or_none, snapshot.reward_mean) if value is not None]
    change = measure_change(rewards)
    evaluations = [
        one.reward_mean
        for one in snapshot.evaluations
        if one.reward_mean is not None and math.isfinite(one.reward_mean)
    ]
    wall_s = sum(job.run_s for job in jobs)
    queued_s = sum(max(job.started - job.queued, 0.0) for job in jobs if job.started is not None and job.queued)
    gpus = [_number(component, "gpus_per_node") for component in _list_tables(plan, "components")]
    fates: dict[str, int] = {}
    for view in snapshot.domains.values():
        for name, num in view.token_fates.items():
            fates[name] = fates.get(name, 0) + num
    return KeyFigures(
        step=snapshot.step,
        num_steps=snapshot.num_steps,
        version=snapshot.version,
        reward_first=change.first if change else None,
        reward_last=change.last if change else None,
        reward_noise=_measure_noise(rewards, change.num) if change else None,
        reward_best=max(rewards, default=None),
        evaluation_last=evaluations[-1] if evaluations else None,
        evaluation_best=max(evaluations, default=None),
        num_episodes=max(snapshot.episodes.num_kept, num_trajectories),
        num_uncounted=max(num_trajectories - snapshot.episodes.num_kept, 0),
        num_failed=snapshot.episodes.failed,
        num_faulted=snapshot.episodes.faulted,
        num_aborted=snapshot.episodes.aborted,
        num_tokens=history.totals.num_tokens,
        num_trained_tokens=sum(step.num_tokens or 0 for step in history.steps.values() if step.skipped is None),
        tokens_per_s=round(history.mean_tokens_per_s(), 1),
        wall_s=wall_s,
        queued_s=queued_s,
        node_hours=sum(job.num_nodes * job.run_s for job in jobs) / 3600,
        gpu_hours=sum(_count_gpus(job, gpus) * job.run_s for job in jobs) / 3600,
        num_fit_tokens=fates.get(TRAINED, 0),
        trained_share=measure_trained_share(fates),
    )


def _count_gpus(job: JobFigures, gpus: Sequence[float]) -> float:
    """Count the GPUs of a job by those of a node of each component; a job of another layout had nodes with the most."""
    if len(job.component_nodes) != len(gpus):
        return job.num_nodes * max(gpus, default=0.0)
    return sum(num * each for num, each in zip(job.component_nodes, gpus, strict=True))


def _count_held(role: str, spans: Sequence[WorkerSpan], jobs: Sequence[JobFigures], *, num_planned: int) -> float:
    """Count the worker-seconds of a role; jobs before the last may have had other numbers of workers than its plan."""
    started: dict[int, set[str]] = {}
    for span in spans:
        started.setdefault(span.job, set()).add(span.worker)
    held_s = 0.0
    for job in jobs:
        is_planned = job is jobs[-1] or role == "reward"  # reward workers come and go
        held_s += job.run_s * (num_planned if is_planned else len(started.get(job.number, ())) or num_planned)
    return held_s


def _build_rewards(snapshot: CampaignSnapshot, history: CampaignHistory) -> list[DomainRewards]:
    last = history.evaluations[max(history.evaluations)].domains if history.evaluations else {}
    views = snapshot.domains
    return [
        DomainRewards(
            domain=name,
            num_scored=views[name].scored if name in views else 0,
            mean=finite_or_none(views[name].reward_mean) if name in views else None,
            recent=finite_or_none(views[name].reward_recent) if name in views else None,
            evaluation=finite_or_none(last.get(name)),
        )
        for name in sorted(views.keys() | last.keys())
    ]


def _build_roles(
    history: CampaignHistory, jobs: Sequence[JobFigures], plan: Mapping[str, Any], *, in_env: Collection[str]
) -> list[RoleFigures]:
    """Build the figures of each role; those in `in_env` have no processes."""
    spans_by_role: dict[str, list[WorkerSpan]] = {}
    for span in history.spans:
        spans_by_role.setdefault(span.role, []).append(span)
    components = _list_tables(plan, "components")
    roles = []
    tables = _list_tables(plan, "roles")
    num_with_nodes = max(len([table for table in tables if str(table.get("role")) not in in_env]), 1)
    for table in tables:
        role = str(table.get("role"))
        if role in in_env:
            roles.append(msgspec.structs.replace(_build_role(role, [], RoleWork()), done_by="env"))
            continue
        spans, work = spans_by_role.get(role, []), history.work.get(role, RoleWork())
        index = int(_number(table, "component"))
        component = components[index] if 0 <= index < len(components) else {}
        num_sharing = max(len([name for name in _list_texts(component, "roles") if name not in in_env]), 1)
        num_planned = int(_number(table, "num_workers", 1))
        node_s = 0.0
        for job in jobs if component else ():
            is_alike = len(job.component_nodes) == len(components)
            nodes = job.component_nodes[index] / num_sharing if is_alike else job.num_nodes / num_with_nodes
            node_s += nodes * job.run_s
        held_s = _count_held(role, spans, jobs, num_planned=max(num_planned, 1))
        roles.append(_build_role(role, spans, work, num_planned=num_planned, held_s=held_s, node_hours=node_s / 3600))
    return roles


def _build_role(
    role: str,
    spans: Sequence[WorkerSpan],
    work: RoleWork,
    *,
    num_planned: int = 0,
    held_s: float = 0.0,
    node_hours: float = 0.0,
) -> RoleFigures:
    up_s = sum(span.end - span.start for span in spans) + work.launch_s
    total_s = max(held_s, up_s)
    if total_s <= 0:
        return RoleFigures(
            role=role, num_workers=num_planned, node_hours=0.0, busy_share=None, waiting_share=None, starting_share=0.0,
            idle_share=0.0, tokens_per_s=None, num_pauses=0, pause_s=0.0,
        )  # fmt: skip
    # The leader of a trainer reports for all its ranks.
    factor = len({span.worker for span in spans if span.job == spans[0].job}) if role == "train" and spans else 1
    busy_s = min(work.busy_s * factor, up_s)
    starting_s = min(work.starting_s * factor + work.launch_s, up_s - busy_s)
    is_measured = work.busy_s > 0 or work.starting_s > 0
    return RoleFigures(
        role=role,
        num_workers=num_planned,
        node_hours=node_hours,
        busy_share=busy_s / total_s if is_measured else None,
        waiting_share=(up_s - busy_s - starting_s) / total_s if is_measured else None,
        starting_share=starting_s / total_s,
        idle_share=max(total_s - up_s, 0.0) / total_s,
        tokens_per_s=work.num_tokens / up_s if work.num_tokens and up_s else None,
        num_pauses=work.num_pauses,
        pause_s=work.pause_s / work.num_pauses if work.num_pauses else 0.0,
    )


def _build_engines(history: CampaignHistory) -> list[EngineFigures]:
    known = [(name, work) for name, work in history.engines.items() if work.window_s > 0]
    return [
        EngineFigures(
            engine=name,
            role=work.role,
            node=work.node,
            up_s=work.window_s,
            busy_share=work.busy_s / work.window_s,
            running=work.running_s / work.window_s,
            waiting=work.waiting_s / work.window_s,
            kv_share=work.kv_s / work.kv_window_s if work.kv_window_s else None,
            kv_most=work.kv_most if work.kv_window_s else None,
            tokens_per_s=work.num_tokens / work.window_s,
            prefix_hit_share=(work.num_prefix_hits or 0) / work.num_prefix_queries if work.num_prefix_queries else None,
            num_preemptions=work.num_preemptions,
        )
        for name, work in sorted(known, key=lambda one: (one[1].role, split_numbers(one[0])))
    ]


def _build_failures(history: CampaignHistory) -> list[FailureFigures]:
    found = [
        FailureFigures(
            what=cause.what,
            kind="policy" if cause.what in _POLICY_FAULTS else "infrastructure",
            domain=cause.domain,
            node=cause.node,
            num=num,
            is_least=cause in history.repeated_faults and num > 1,
            newest=history.newest_faults[cause].text[:MAX_REASON_CHARS],
            time=history.newest_faults[cause].time,
        )
        for cause, num in history.faults.most_common(MAX_FAILURE_ROWS)
    ]
    return sorted(found, key=lambda one: (one.kind, -one.num))


def _build_provenance(
    campaign: CampaignDir, recipe: Mapping[str, Any], plan: Mapping[str, Any]
) -> list[ProvenanceEntry]:
    manifest = _read_table(campaign.manifest)
    source, model, engine = _get_table(manifest, "source"), _get_table(recipe, "model"), _get_table(recipe, "engine")
    entries = {
        "recipe": recipe.get("name"),
        "description": recipe.get("description"),
        "recipe file": source.get("recipe"),
        "settings": " ".join(_list_texts(source, "settings")),
        "site": manifest.get("site"),
        "layout": plan.get("layout"),
        "model": model.get("path") or ("tiny, made at the start" if model.get("tiny") else None),
        "engine": engine.get("backend"),
        "seed": recipe.get("seed"),
        "version of hpcrl": manifest.get("hpcrl"),
        "format": manifest.get("format"),
        **_describe_software(manifest.get("software")),
        "created": _format_created(manifest.get("created")),
        "directory": str(campaign.root),
        "digest of recipe.json": _get_table(manifest, "digests").get("recipe.json"),
    }
    changes = manifest.get("changes")
    for number, change in enumerate(changes if isinstance(changes, list) else [], start=1):
        entries[f"change {number}"] = json.dumps(change)
    components = [
        f"{component.get('nodes')} x {component.get('partition')}"
        + (f" ({component.get('gpus_per_node')} {component.get('gpu')} each)" if component.get("gpus_per_node") else "")
        + f": {', '.join(_list_texts(component, 'roles'))}"
        for component in _list_tables(plan, "components")
    ]
    entries["nodes"] = "; ".join(components)
    return [
        ProvenanceEntry(name=name, value=str(value)) for name, value in entries.items() if value not in (None, "", [])
    ]


def _describe_software(software: Any) -> dict[str, str | None]:
    """Return the versions and revisions that were recorded at submission; nothing of a campaign without them."""
    software = software if isinstance(software, dict) else {}
    git, packages = software.get("git"), software.get("packages")
    entries: dict[str, str | None] = {
        "Python": software.get("python"),
        "packages": ", ".join(f"{name} {one}" for name, one in packages.items()) if isinstance(packages, dict) else "",
    }
    for name, found in git.items() if isinstance(git, dict) else ():
        if isinstance(found, dict) and found.get("commit"):
            changed = found.get("changed")
            state = ", perhaps with changes" if not isinstance(changed, bool) else " with changes" if changed else ""
            entries[f"commit of {name}"] = f"{found['commit']}{state} ({found.get('directory')})"
    return entries


def _format_created(value: object) -> str | None:
    if not isinstance(value, int | float):
        return None
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(value))
    except (OverflowError, ValueError, OSError):
        return None
