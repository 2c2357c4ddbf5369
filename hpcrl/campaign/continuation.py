"""Continue a campaign that has ended, also with changes; give one that runs more steps or jobs.

resume          a new job from the last checkpoint
extend          more steps, more jobs, in whatever state the campaign is
list_changes    the settings that differ between two records: pure
check_changes   refuse those that a campaign cannot take over: pure
refuse_short_walltime   refuse a job that could hold no step and checkpoint, by what the campaign has recorded

The recipe, the site and the plan of a campaign are records of its submission. `-s` changes them. `--accept` takes over
what has changed by other hands: the files that were submitted, the records themselves, or the version of hpcrl.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import msgspec

from hpcrl.campaign import directory, lifecycle
from hpcrl.campaign.fixed_settings import explain_fixed_setting, flatten_table, list_fixed_settings
from hpcrl.campaign.lifecycle import CampaignRequest, RequestSource
from hpcrl.campaign_dir.event_log import EVENT_SUFFIX, EventReader
from hpcrl.campaign_dir.events import CheckpointSaved, JobStarted, StepFinished
from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.config.recipe import Recipe
from hpcrl.config.site import Site
from hpcrl.config.toml import apply_settings, drop_unknown, to_struct
from hpcrl.errors import CampaignError, ConfigError, HpcrlError, SlurmError
from hpcrl.plan.plan import Plan, make_plan
from hpcrl.plan.records import read_plan, read_recipe, read_record, read_site
from hpcrl.slurm import next_job
from hpcrl.slurm.submit import make_site_environment
from hpcrl.system.files import publish_file, publish_json, read_json, remove_path

T = TypeVar("T", bound=msgspec.Struct)
ShowNote = Callable[[str], object]

MAX_SHOWN = 8
"""The number of changes that a message lists."""
NUM_TIMES = 20
"""The last steps and checkpoints whose times count."""


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
    return _compare(before, after, prefix=prefix)


def _compare(before: Mapping[str, Any], after: Mapping[str, Any], *, prefix: str = "") -> list[SettingChange]:
    keys = [*before, *(key for key in after if key not in before)]
    return [
        SettingChange(key=prefix + key, old=before.get(key), new=after.get(key))
        for key in keys
        if before.get(key) != after.get(key)
    ]


def check_changes(changes: Sequence[SettingChange]) -> None:
    """Raise CampaignError for a change of what checkpoints and tasks in flight depend on."""
    for change in changes:
        why = explain_fixed_setting(change.key)
        if change.key.startswith("domains.") and change.key.endswith(".env") and None in (change.old, change.new):
            why = "a campaign keeps its domains"
        if why is not None:
            raise CampaignError(
                f"{change} cannot change in a campaign: {why}; `hpcrl export CAMPAIGN --hf DIR` writes its model, for "
                "a new campaign with `model.path = DIR`"
            )


def resume(
    name: str, *, settings: tuple[str, ...] = (), accept: bool = False, show_note: ShowNote = str
) -> CampaignDir:
    """Continue a campaign from the last checkpoint in a new job, with changes if there are any."""
    campaign = directory.find_campaign(name)
    recorded, dropped = _read_request(campaign, accept=accept)
    request, others = _apply_changes(campaign, recorded, settings=settings, accept=accept)
    changes = _list_all_changes(recorded, request)
    last = _find_last_job(campaign)
    lifecycle.refuse_while_alive(
        last, recorded.site, is_done=next_job.find_last_step(campaign) >= request.recipe.train.num_steps
    )
    lifecycle.refuse_without_journals(campaign)
    refuse_short_walltime(campaign, walltime_min=request.recipe.job.walltime_min)
    if failure := lifecycle.find_final_failure(campaign, num_steps=request.recipe.train.num_steps):
        raise CampaignError(
            f"campaign {campaign.name!r} cannot be resumed: all {request.recipe.train.num_steps} steps were made, and "
            f"another job would fail as the last one did: {failure}"
        )
    for note in (*dropped, *others):
        show_note(note)
    is_new = bool(changes or dropped or accept)
    if is_new:
        _check_new_plan(recorded.plan, request.plan)
        for note in lifecycle.check_request(request):
            show_note(note)
    number = last.number + 1
    with (
        _record_changes(campaign, request, changes, settings=settings, job=last.next_job)
        if is_new
        else contextlib.nullcontext()
    ):
        remove_path(campaign.stop)
        lifecycle.start_job(campaign, request, number=number, show_note=show_note)
    for change in changes:
        show_note(f"changed: {change}")
    return campaign


def extend(name: str, *, steps: int | None = None, jobs: int = 0, show_note: ShowNote = str) -> str:
    """Give a campaign more steps, or let more jobs follow; resume it if it has ended. Return a message."""
    campaign = directory.find_campaign(name)
    recorded = CampaignRequest(recipe=read_recipe(campaign), site=read_site(campaign), plan=read_plan(campaign))
    site, recorded_steps = recorded.site, recorded.recipe.train.num_steps
    num_steps = recorded_steps if steps is None else steps
    if num_steps < recorded_steps:
        raise ConfigError(f"--steps {num_steps}: campaign {campaign.name!r} has {recorded_steps} already")
    if campaign.stop.exists():
        raise CampaignError(
            f"campaign {campaign.name!r} was asked to stop: `hpcrl resume {campaign.name} -s train.num_steps="
            f"{num_steps}` continues it"
        )
    _refuse_edited(campaign, _list_edited(campaign))
    settings = (f"train.num_steps={num_steps}",) if num_steps > recorded_steps else ()
    states = lifecycle.find_job_states(directory.list_jobs(campaign), site)
    if "unknown" in states.values():
        raise SlurmError(f"Slurm does not report whether campaign {campaign.name!r} still runs: try again later")
    live = [job for job, state in states.items() if state != "gone"]
    if not live:
        resumed = resume(name, settings=(*settings, *([f"job.num_jobs={jobs}"] if jobs else [])), show_note=show_note)
        job = directory.list_jobs(resumed)[-1]
        return f"campaign {campaign.name}: job {lifecycle.read_submission(job).id} continues up to step {num_steps}"
    if site.scheduler == "local" and jobs:
        raise ConfigError("--jobs: without a scheduler no job follows another; `hpcrl resume` starts the next one")
    last = live[-1]
    is_last = states[last] != "queued" and next_job.count_jobs_left(last) < 1
    if site.scheduler != "local" and is_last and settings:
        jobs = max(jobs, 1)  # for the steps that the running job does not make
    request = replace(_change_settings(campaign, recorded, settings), plan=recorded.plan)  # the jobs' plan
    changes = _list_all_changes(recorded, request)
    with _record_changes(campaign, request, changes, settings=settings, job=last.next_job):
        if jobs:  # the newest may be about to be submitted, and has its number already
            newest = directory.list_jobs(campaign)[-1]
            plan = next_job.allow_more_jobs(newest if newest.chain_marker.exists() else last, jobs, plan=request.plan)
            request = replace(request, plan=plan)
        queued = _queue_more(last, request) if states[last] == "running" or not site.nodes_may_submit else []
    done = [f"up to step {num_steps}"] * bool(changes)
    done += [f"job {id} is queued" for id in queued]
    done += [f"{jobs} more job{'s' * (jobs > 1)} may follow"] if jobs and not queued else []
    if site.scheduler == "local" and changes:
        done.append(f"`hpcrl resume {campaign.name}` makes the further ones when this job has ended")
    return f"campaign {campaign.name}: {'; '.join(done) or 'nothing was changed'}"


def _queue_more(last: JobDir, request: CampaignRequest) -> list[str]:
    """Queue what may follow the last job, from here: a driver that runs has looked for it already."""
    submitted = lifecycle.read_submission(last)
    if submitted.scheduler == "local":
        return []
    plan, site = request.plan, request.site
    if not site.nodes_may_submit:
        return next_job.queue_chain(last, plan=plan, site=site, slurm_id=submitted.id)
    env = os.environ | make_site_environment(site)
    id = next_job.queue_next_job(last, plan=plan, site=site, slurm_id=submitted.id, env=env)
    return [] if id is None else [id]


def _find_last_job(campaign: CampaignDir) -> JobDir:
    """Return the newest job that was submitted; a killed `hpcrl resume` leaves a directory without a submission."""
    jobs = directory.list_jobs(campaign)
    return next((job for job in reversed(jobs) if job.submission.exists()), jobs[-1])


def _read_request(campaign: CampaignDir, *, accept: bool) -> tuple[CampaignRequest, list[str]]:
    """Read the records; if they are accepted, also those of another version, and list what was dropped for that."""
    recipe, dropped = _read_tolerantly(campaign, campaign.recipe, Recipe, accept=accept)
    site, dropped_too = _read_tolerantly(campaign, campaign.site, Site, accept=accept)
    try:
        plan = read_plan(campaign)
    except CampaignError as error:
        if not accept:
            raise CampaignError(f"{error}; `hpcrl resume {campaign.name} --accept` makes another plan") from error
        plan = make_plan(recipe, site)
    return CampaignRequest(recipe=recipe, site=site, plan=plan), [*dropped, *dropped_too]


def _read_tolerantly(campaign: CampaignDir, path: Path, kind: type[T], *, accept: bool) -> tuple[T, list[str]]:
    try:
        return read_record(path, kind), []
    except CampaignError as error:
        try:
            table = msgspec.json.decode(path.read_bytes())
            dropped = drop_unknown(table, kind)
            record = msgspec.convert(table, kind)
        except (OSError, msgspec.MsgspecError, LookupError, AttributeError, TypeError):
            raise error from None
        if not accept:
            raise CampaignError(
                f"{path} was written by another version of hpcrl: `hpcrl resume {campaign.name} --accept` reads it all "
                f"the same ({'; '.join(dropped) or error})"
            ) from error
        return record, [f"{path.name}: {what}" for what in dropped]


def _apply_changes(
    campaign: CampaignDir, recorded: CampaignRequest, *, settings: tuple[str, ...], accept: bool
) -> tuple[CampaignRequest, list[str]]:
    """Return the request with its changes, and notes on those that were found and not asked for."""
    manifest = read_json(campaign.manifest)
    edited = _list_edited(campaign)
    if not accept:
        _refuse_edited(campaign, edited)
    fixed = list_fixed_settings(recorded.recipe)
    check_changes(_compare(manifest.get("fixed", fixed), fixed))
    base, notes = recorded, []
    newer = None if edited else _load_source(manifest)
    if newer is not None and (found := _list_all_changes(recorded, newer)):
        if accept:
            base = newer
        else:
            more = f" and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
            what = "; ".join(map(str, found[:MAX_SHOWN])) + more
            notes = [f"what was submitted has changed since, and is not used without --accept: {what}"]
    if not settings and base is recorded and not edited and not accept:
        return recorded, notes
    changed = _change_settings(campaign, base, settings)
    check_changes(list_changes(recorded.recipe, changed.recipe))
    if changed.site.name != recorded.site.name:
        raise CampaignError(f"site.name = {changed.site.name!r}: a campaign stays on its site ({recorded.site.name})")
    return changed, notes


def _change_settings(campaign: CampaignDir, base: CampaignRequest, settings: Sequence[str]) -> CampaignRequest:
    """Return a request with other settings, and a new plan."""
    own = [setting for setting in settings if not setting.startswith("site.")]
    of_site = [setting.removeprefix("site.") for setting in settings if setting.startswith("site.")]
    recipe_file = (str(campaign.recipe), msgspec.to_builtins(base.recipe))
    recipe = lifecycle.resolve_recipe(apply_settings("recipes", [recipe_file], settings=own))
    site_file = (str(campaign.site), msgspec.to_builtins(base.site))
    site = to_struct(apply_settings("sites", [site_file], settings=of_site), Site)
    return CampaignRequest(recipe=recipe, site=site, plan=make_plan(recipe, site))


def _list_edited(campaign: CampaignDir) -> list[str]:
    """Return the names of the records that are not as the last submission left them."""
    digests = read_json(campaign.manifest).get("digests", {})
    now = lifecycle.digest_records(campaign)
    return [name for name, digest in now.items() if digests.get(name, digest) != digest]


def _refuse_edited(campaign: CampaignDir, edited: Sequence[str]) -> None:
    if edited:
        raise CampaignError(
            f"{' and '.join(edited)} in {campaign.root} were edited after the last submission: `hpcrl resume "
            f"{campaign.name} --accept` plans with them again, `-s key=value` changes a setting without editing"
        )


def _load_source(manifest: dict[str, Any]) -> CampaignRequest | None:
    """Load again what was submitted; None if it is not there any more, or not valid."""
    try:
        source = msgspec.convert(manifest.get("source"), RequestSource)
        return lifecycle.load_request(source.recipe, site=source.site, settings=source.settings)
    except (HpcrlError, msgspec.ValidationError, OSError):
        return None


def _list_all_changes(old: CampaignRequest, new: CampaignRequest) -> list[SettingChange]:
    return [*list_changes(old.recipe, new.recipe), *list_changes(old.site, new.site, prefix="site.")]


def _check_new_plan(old: Plan, new: Plan) -> None:
    """Raise CampaignError if the tasks in flight would be divided among another number of env workers."""
    before, after = (plan.role("env").num_workers if plan.has_role("env") else 0 for plan in (old, new))
    if before != after:
        raise CampaignError(
            f"this would run {after} env workers in place of {before}, among which the campaign's tasks are divided: "
            f"set resources.env.num_workers = {before}"
        )


@contextlib.contextmanager
def _record_changes(
    campaign: CampaignDir,
    request: CampaignRequest,
    changes: Sequence[SettingChange],
    *,
    settings: tuple[str, ...],
    job: JobDir,
) -> Iterator[None]:
    """Write the changed records before a job is submitted with them; restore the old ones if that fails."""
    before = campaign.job(job.number - 1).chain_marker
    paths = (campaign.recipe, campaign.site, campaign.plan, campaign.manifest, before)
    old = {path: path.read_bytes() for path in paths if path.exists()}
    try:
        lifecycle.write_records(campaign, request)
        manifest = read_json(campaign.manifest)
        if (source := manifest.get("source")) is not None:
            source["settings"] = [*source["settings"], *settings]
        changed = {change.key: [change.old, change.new] for change in changes}
        history = [*manifest.get("changes", []), {"job": job.number, "time": time.time(), "changed": changed}]
        digests = lifecycle.digest_records(campaign)
        publish_json(campaign.manifest, manifest | {"changes": history, "digests": digests})
        yield
    except BaseException:
        for path, data in old.items():
            publish_file(path, data)
        raise


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
