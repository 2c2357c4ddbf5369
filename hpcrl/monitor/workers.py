"""The workers of a role at one moment. Pure.

WorkerView      a worker
RoleWorkers     those of a role, and how often they failed
list_workers    the workers of a role: those that are not alive first
split_numbers   orders names by their numbers
"""

import re
from dataclasses import dataclass

from hpcrl.campaign_dir.paths import drop_job
from hpcrl.monitor.progress import WorkerProgress
from hpcrl.monitor.snapshot import SnapshotInputs
from hpcrl.system.terminal import format_duration


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """A worker as texts; what is not known is missing in `load`."""

    name: str
    node: str
    state: str
    """`alive`, `silent` with the time since its last heartbeat, or `ended`."""
    is_alive: bool
    load: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class RoleWorkers:
    """The workers of a role that have been seen in the newest job."""

    role: str
    workers: list[WorkerView]
    num_failures: int
    last_failure: str
    note: str = ""
    """The reason for having none, if that is known."""


def list_workers(inputs: SnapshotInputs, role: str) -> RoleWorkers:
    """Return the workers of a role, those that are not alive first."""
    workers = [worker for worker in inputs.job_progress(inputs.newest_job).workers.values() if worker.role == role]
    views = [_view_worker(worker, inputs) for worker in workers]
    number = inputs.newest_job.record.number if inputs.newest_job else 0
    return RoleWorkers(
        role=role,
        workers=sorted(views, key=lambda view: (view.is_alive, split_numbers(view.name))),
        num_failures=inputs.progress.worker_failures[number, role],
        last_failure=inputs.progress.worker_failure_reasons.get(role, ""),
        note=_explain_none(inputs, role),
    )


def _explain_none(inputs: SnapshotInputs, role: str) -> str:
    if role != "reward":
        return ""
    if "env" in inputs.progress.scoring_roles:
        return "env workers write the rewards that environments return"
    return "they start when trajectories wait for rewards"


def _view_worker(worker: WorkerProgress, inputs: SnapshotInputs) -> WorkerView:
    is_alive = bool(inputs.select_live([worker]))
    silent_s = inputs.now - inputs.heartbeats.get(worker.name, 0.0)
    has_ended = not worker.is_up or inputs.newest_job is None or inputs.newest_job.record.outcome is not None
    state = "alive" if is_alive else "ended" if has_ended else f"silent for {format_duration(silent_s)}"
    return WorkerView(
        name=drop_job(worker.name),
        node=worker.node,
        state=state,
        is_alive=is_alive,
        load=_format_worker_load(worker, inputs),
    )


def _format_worker_load(worker: WorkerProgress, inputs: SnapshotInputs) -> dict[str, str]:
    """Return the figures of a worker by column."""
    load: dict[str, str] = {}
    if (engine := worker.engine) is not None:
        load |= {"busy": f"{worker.recent_load.busy_share:.0%}"}
        load |= {"running": f"{engine.running:.0f}", "queue": f"{engine.waiting:.0f}"}
        load |= {"tokens/s": f"{engine.num_tokens / engine.window_s:,.0f}"} if engine.window_s > 0 else {}
        load |= {"kv": f"{engine.kv_share:.0%}"} if engine.kv_share is not None else {}
    if (counts := worker.episodes) is not None:
        load |= {"running": f"{counts.running:,}", "done": f"{counts.done + counts.truncated:,}"}
        load |= {"faulted": f"{counts.env_fault + counts.policy_fault:,}", "loop": f"{counts.loop_share:.0%}"}
    if worker.version is not None:
        load |= {"version": f"{worker.version}"}
    if worker.role == "train" and inputs.progress.steps:
        load |= {"step": f"{next(reversed(inputs.progress.steps)):,}"}
    return load


def split_numbers(name: str) -> list[tuple[int, str]]:
    """Split a name so that number 10 comes after number 9: it has more digits."""
    parts = [part.lstrip("0") if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
    return [(len(part) if number % 2 else -1, part) for number, part in enumerate(parts)]
