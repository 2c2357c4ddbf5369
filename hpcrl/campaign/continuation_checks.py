"""The refusals of another job: of one beside a job that runs, with changes to what is fixed, or without any gain.

refuse_while_alive       refuse it while a job may still run
refuse_without_journals  refuse it where the tasks in flight are not recorded
refuse_short_walltime    refuse a job that could hold no step and checkpoint, by what the campaign has recorded
refuse_other_package     refuse to rewrite the records where jobs import another hpcrl, which may not read them
find_final_failure       why the trainer failed after its last step, and would again
SettingChange, list_changes, compare_settings    the settings that differ between two records: pure
check_changes            refuse those that a campaign cannot take over: pure
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, NoReturn

import msgspec

import hpcrl
from hpcrl.campaign.directory import list_jobs
from hpcrl.campaign.fixed_settings import explain_fixed_setting
from hpcrl.campaign.running_jobs import (
    STOP_POLL_INTERVAL_S,
    STOP_TIMEOUT_S,
    find_job_state,
    find_live_job,
    find_orphaned_job,
    read_submission,
)
from hpcrl.campaign_dir.event_log import EVENT_SUFFIX, EventReader
from hpcrl.campaign_dir.events import CheckpointSaved, JobStarted, StepFinished
from hpcrl.campaign_dir.job_end import read_job_end
from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.campaign_dir.train_progress import read_train_progress
from hpcrl.config.site import Site
from hpcrl.config.toml import flatten_table
from hpcrl.errors import CampaignError
from hpcrl.slurm import next_job

NUM_TIMES = 20
"""The last steps and checkpoints whose times count."""


def refuse_while_alive(job: JobDir, site: Site, *, is_done: bool) -> None:
    """Raise if the last job, or one before it, may still run: two at once would train twice on the same trajectories.

    `is_done` is whether the campaign has all its steps.
    """
    campaign = job.campaign
    outcome = _read_outcome(job)
    if outcome is None and (live := find_live_job(campaign, before=job.number)) is not None:
        _refuse_live(*live)  # the last one was cancelled before it started
    state = "gone" if outcome == "done" and is_done else find_job_state(job, site)
    if outcome is None and state == "gone":
        if find_orphaned_job(campaign) is not None:
            raise CampaignError(
                f"campaign {campaign.name!r}: the first process of job {read_submission(job).id} was killed, and "
                "others of it still run, to save a checkpoint: try again when they have ended, after job.drain_s at "
                f"most ({job.outcome} is there then)"
            )
        outcome = _read_outcome(job)
    if outcome == "done" and is_done:
        raise CampaignError(
            f"campaign {campaign.name!r} is done: there is nothing to resume; `hpcrl extend {campaign.name} --steps N` "
            "gives it more steps"
        )
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while outcome is not None and state == "running" and time.monotonic() < deadline:
        time.sleep(STOP_POLL_INTERVAL_S)  # its outcome is written, so it is about to exit
        state = find_job_state(job, site)
    if state in ("queued", "running") or (state == "unknown" and outcome is None):
        _refuse_live(job, state)


def _refuse_live(job: JobDir, state: str) -> NoReturn:
    """Raise what a user has to do about a job that is queued, runs, or may run."""
    campaign = job.campaign
    if state == "unknown":
        raise CampaignError(
            f"campaign {campaign.name!r}: Slurm does not report the state of job {read_submission(job).id}: try again "
            f"later, or, if you know that it is gone, `hpcrl stop --now {campaign.name}` first"
        )
    hint = f"`hpcrl monitor {campaign.name}` shows it, `hpcrl stop {campaign.name}` ends it"
    raise CampaignError(f"campaign {campaign.name!r}: job {read_submission(job).id} is {state}: {hint}")


def _read_outcome(job: JobDir) -> str | None:
    end = read_job_end(job)
    return None if end is None else end.outcome


def refuse_without_journals(campaign: CampaignDir) -> None:
    """Raise if the tasks in flight are not recorded where a job looks for them: it would number its tasks from 0."""
    if not campaign.env_workers.is_dir():
        list_jobs(campaign)  # raises for one that was not submitted to the end
        raise CampaignError(
            f"campaign {campaign.name!r} cannot be continued: it has no {campaign.env_workers}, as a version of hpcrl "
            f"made it that recorded its tasks elsewhere: `hpcrl export {campaign.name} --hf DIR` writes its model, for "
            "a new campaign with `model.path = DIR`"
        )


def refuse_other_package(campaign: CampaignDir, exports: Mapping[str, str]) -> None:
    """Refuse to rewrite the records of a campaign whose jobs, with these exports, import another hpcrl."""
    own = Path(hpcrl.__file__).parent
    for folder in exports.get("PYTHONPATH", "").split(os.pathsep):
        package = Path(folder, "hpcrl")
        if not folder or not (package / "__init__.py").is_file():
            continue
        if not package.samefile(own):
            raise CampaignError(
                f"campaign {campaign.name!r}: its jobs import hpcrl from {package} (PYTHONPATH at its submission), and "
                f"this is {own}: resume it with that one, which reads what it writes"
            )
        return


def find_final_failure(campaign: CampaignDir, *, num_steps: int) -> str:
    """Return why the trainer failed though all steps were made, and would in another job; empty if it did not."""
    if next_job.find_last_step(campaign) < num_steps:
        return ""
    return read_train_progress(campaign.train_progress).failure


@dataclass(frozen=True, kw_only=True)
class SettingChange:
    """A setting with its old and its new value; None for one that is absent."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} = {_show(self.new)} (was {_show(self.old)})"


def _show(value: Any) -> str:
    return "unset" if value is None else msgspec.json.encode(value).decode()


def list_changes(old: msgspec.Struct, new: msgspec.Struct, *, prefix: str = "") -> list[SettingChange]:
    """Return the settings that differ; `prefix` comes before their keys."""
    before, after = (dict(flatten_table(msgspec.to_builtins(one))) for one in (old, new))
    return compare_settings(before, after, prefix=prefix)


def compare_settings(before: Mapping[str, Any], after: Mapping[str, Any], *, prefix: str = "") -> list[SettingChange]:
    """Return the settings that differ between two tables of dotted keys."""
    keys = [*before, *(key for key in after if key not in before)]
    return [
        SettingChange(key=prefix + key, old=before.get(key), new=after.get(key))
        for key in keys
        if before.get(key) != after.get(key)
    ]


def check_changes(changes: Sequence[SettingChange], *, campaign: CampaignDir) -> None:
    """Raise CampaignError for a change of what checkpoints and tasks in flight depend on."""
    for change in changes:
        why = explain_fixed_setting(change.key)
        if change.key.startswith("domains.") and change.key.endswith(".env") and None in (change.old, change.new):
            why = "a campaign keeps its domains"
        if why is not None:
            raise CampaignError(
                f"{change} cannot change in a campaign: {why}; `hpcrl export {campaign.name} --hf DIR` writes its "
                "model, for a new campaign with `model.path = DIR`"
            )


class JobNeeds(NamedTuple):
    """The times that one job takes, in seconds: to start, for a step, and for a checkpoint."""

    start_s: float
    step_s: float
    save_s: float

    @property
    def total_s(self) -> float:
        return self.start_s + self.step_s + self.save_s


def refuse_short_walltime(campaign: CampaignDir, *, walltime_min: float) -> None:
    """Raise CampaignError if a job would end before it has made a step and a checkpoint: it would gain nothing."""
    needs = _measure_needs(campaign)
    if needs is None or walltime_min * 60 >= needs.total_s:
        return
    least = math.ceil(needs.total_s * 1.3 / 60)
    raise CampaignError(
        f"job.walltime_min = {walltime_min:g} cannot hold a step and its checkpoint: by the events of this campaign a "
        f"job takes {needs.start_s:.0f} s until its first step, {needs.step_s:.0f} s for a step and "
        f"{needs.save_s:.0f} s for a checkpoint. Resume it with -s job.walltime_min={least}, or lower "
        "train.groups_per_step"
    )


def _measure_needs(campaign: CampaignDir) -> JobNeeds | None:
    """Return what jobs have needed, by their events; None if no step was made."""
    started = {
        event.job: event.time
        for event in EventReader(campaign.events, pattern=f"*-driver{EVENT_SUFFIX}").poll()
        if isinstance(event, JobStarted)
    }
    steps: list[StepFinished] = []
    save_times: list[float] = []
    for event in EventReader.for_role(campaign.events, "train").poll():
        if isinstance(event, StepFinished):
            steps.append(event)
        elif isinstance(event, CheckpointSaved) and event.wall_s is not None:
            save_times.append(event.wall_s)
    if not steps:
        return None
    firsts = {step.job: step for step in reversed(steps)}
    starts = [step.time - _measure_step(step) - started[job] for job, step in firsts.items() if job in started]
    step_times = [_measure_step(step) for step in steps]
    return JobNeeds(max(min(starts, default=0.0), 0.0), _find_median(step_times), _find_median(save_times))


def _measure_step(step: StepFinished) -> float:
    """Return the time from one step to the next."""
    return (step.wait_s or 0.0) + (step.step_s or 0.0) + step.times.get("publish", 0.0)


def _find_median(times: Sequence[float]) -> float:
    return median(times[-NUM_TIMES:]) if times else 0.0
