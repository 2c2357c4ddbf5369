"""Continue a campaign that has ended, also with changes; give one that runs more steps or jobs.

resume          a new job from the last checkpoint
extend          more steps, more jobs, in whatever state the campaign is

The recipe, the site and the plan of a campaign are records of its submission. `-s` changes them. `--accept` takes over
what has changed by other hands: the files that were submitted, the records themselves, or the version of hpcrl.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hpcrl.campaign import directory
from hpcrl.campaign.continuation_checks import (
    SettingChange,
    check_changes,
    compare_settings,
    find_final_failure,
    list_changes,
    refuse_other_package,
    refuse_short_walltime,
    refuse_while_alive,
    refuse_without_journals,
)
from hpcrl.campaign.fixed_settings import list_fixed_settings
from hpcrl.campaign.request import CampaignRequest, RequestSource, load_request, resolve_recipe
from hpcrl.campaign.running_jobs import find_job_states, read_submission
from hpcrl.campaign.staged_files import find_staging_dir
from hpcrl.campaign.submission import claim_job, make_environment, queue_next_jobs, start_job, write_records
from hpcrl.campaign.submission_checks import check_request, find_room
from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import CheckpointSaved
from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.config.recipe import Recipe
from hpcrl.config.site import Site
from hpcrl.config.toml import apply_settings, drop_unknown, to_struct
from hpcrl.errors import CampaignError, ConfigError, HpcrlError, SlurmError
from hpcrl.plan.plan import Plan, make_plan
from hpcrl.plan.records import digest_records, list_edited_records, read_plan, read_record
from hpcrl.slurm import next_job
from hpcrl.system.files import is_file, publish_file, publish_json, read_json, remove_path
from hpcrl.system.json_records import decode_record
from hpcrl.system.processes import do_nothing
from hpcrl.system.terminal import show_wait

T = TypeVar("T", bound=msgspec.Struct)
ShowNote = Callable[[str], object]

MAX_SHOWN = 8
"""The number of changes that a message lists."""


def resume(
    name: str, *, settings: tuple[str, ...] = (), accept: bool = False, show_note: ShowNote = do_nothing
) -> CampaignDir:
    """Continue a campaign from the last checkpoint in a new job, with changes if there are any."""
    campaign = directory.find_continuable(name)
    recorded, dropped = _read_request(campaign, accept=accept)
    request, others = _apply_changes(campaign, recorded, settings=settings, accept=accept)
    changes = _list_all_changes(recorded, request)
    last = _find_last_job(campaign)
    with show_wait("the last job is looked at, and what the campaign has recorded is read"):
        is_done = next_job.find_last_step(campaign) >= request.recipe.train.num_steps
        refuse_while_alive(last, recorded.site, is_done=is_done)
        refuse_short_walltime(campaign, walltime_min=request.recipe.job.walltime_min)
        if not accept:
            _refuse_lost_checkpoints(campaign)
    if failure := find_final_failure(campaign, num_steps=request.recipe.train.num_steps):
        raise CampaignError(
            f"campaign {campaign.name!r} cannot be resumed: all {request.recipe.train.num_steps} steps were made, and "
            f"another job would fail as the last one did: {failure}"
        )
    for note in (*dropped, *others):
        show_note(note)
    is_new = bool(changes or dropped or accept)
    if is_new:
        refuse_other_package(campaign, _read_manifest(campaign)["exports"])
        _check_new_plan(recorded.plan, request.plan)
        for note in check_request(request):
            show_note(note)
    else:
        find_room(request.site)
    job, was_stopped = claim_job(campaign, last.number + 1), campaign.stop.exists()  # only one process can
    try:
        with (
            _record_changes(campaign, request, changes, settings=settings, job=job)
            if is_new
            else contextlib.nullcontext()
        ):
            remove_path(campaign.stop)
            submitted = start_job(job, request)
    except BaseException:
        if was_stopped:
            publish_file(campaign.stop, "")
        remove_path(job.root)  # last: from here on another process may make it
        raise
    queue_next_jobs(job, request, submitted, show_note=show_note)
    for change in changes:
        show_note(f"changed: {change}")
    return campaign


def _refuse_lost_checkpoints(campaign: CampaignDir) -> None:
    """Raise CampaignError if checkpoints were made and none is there: a job would train from the start."""
    if next_job.has_checkpoint(campaign):
        return
    events = EventReader.for_role(campaign.events, "train").poll()
    saved = [event.step for event in events if isinstance(event, CheckpointSaved)]
    if saved:
        raise CampaignError(
            f"the checkpoint of step {saved[-1]} is gone, and no other is in {campaign.checkpoints}: restore them "
            f"there, or let training start from step 0 by `hpcrl resume {campaign.name} --accept`"
        )


def extend(name: str, *, steps: int | None = None, jobs: int = 0, show_note: ShowNote = do_nothing) -> str:
    """Give a campaign more steps, or let more jobs follow; resume it if it has ended. Return a message."""
    campaign = directory.find_continuable(name)
    recorded, _ = _read_request(campaign, accept=False)
    site, recorded_steps = recorded.site, recorded.recipe.train.num_steps
    num_steps = recorded_steps if steps is None else steps
    if num_steps < recorded_steps:
        raise ConfigError(f"--steps {num_steps}: campaign {campaign.name!r} has {recorded_steps} already")
    _refuse_edited(campaign, _list_edited(campaign))
    settings = (f"train.num_steps={num_steps}",) if num_steps > recorded_steps else ()
    states = find_job_states(directory.list_jobs(campaign), site)
    if "unknown" in states.values():
        raise SlurmError(
            f"Slurm does not report whether campaign {campaign.name!r} still runs: try again later, or, if you know "
            f"that its job is gone, `hpcrl stop --now {campaign.name}` first"
        )
    live = [job for job, state in states.items() if state != "gone"]
    if not live:
        resumed = resume(name, settings=(*settings, *([f"job.num_jobs={jobs}"] if jobs else [])), show_note=show_note)
        job = directory.list_jobs(resumed)[-1]
        return f"campaign {campaign.name}: job {read_submission(job).id} continues up to step {num_steps}"
    if campaign.stop.exists():
        raise CampaignError(
            f"campaign {campaign.name!r} was asked to stop, and its job still runs: repeat this when it has ended"
        )
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
    submitted = read_submission(last)
    if submitted.scheduler == "local":
        return []
    plan, site, env = request.plan, request.site, make_environment(request)
    if not site.nodes_may_submit:
        return next_job.queue_all_next_jobs(last, plan=plan, site=site, slurm_id=submitted.id, env=env)
    id = next_job.queue_next_job(last, plan=plan, site=site, waits_for=submitted.id, env=env)
    return [] if id is None else [id]


def _find_last_job(campaign: CampaignDir) -> JobDir:
    """Return the newest job that was submitted; a killed `hpcrl resume` leaves a directory without a submission."""
    jobs = directory.list_jobs(campaign)
    return next((job for job in reversed(jobs) if job.submission.exists()), jobs[-1])


def _read_request(campaign: CampaignDir, *, accept: bool) -> tuple[CampaignRequest, list[str]]:
    """Read the records; if they are accepted, also those of another version, and list what was dropped for that."""
    refuse_without_journals(campaign)  # accepting another version would only lead to this
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
            table = decode_record(path.read_bytes())
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
    manifest = _read_manifest(campaign)
    edited = _list_edited(campaign)
    if not accept:
        _refuse_edited(campaign, edited)
    fixed = list_fixed_settings(recorded.recipe)
    check_changes(compare_settings(manifest.get("fixed", fixed), fixed), campaign=campaign)
    base = recorded
    notes = [f"{name} is used as it was edited after the last submission" for name in edited]
    newer, problem = (None, "") if edited else _load_source(manifest)
    if problem and accept:
        raise CampaignError(f"what was submitted cannot be read again: {problem}; without --accept it is not used")
    if newer is not None and (found := _list_all_changes(recorded, newer)):
        if accept:
            base = newer
        else:
            more = f" and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
            what = "; ".join(map(str, found[:MAX_SHOWN])) + more
            notes.append(f"what was submitted has changed since, and is not used without --accept: {what}")
    if problem:
        notes = [f"what was submitted has changed since, and is not used: {problem}"]
    if not settings and base is recorded and not edited and not accept:
        return recorded, notes
    changed = _change_settings(campaign, base, settings)
    check_changes(list_changes(recorded.recipe, changed.recipe), campaign=campaign)
    if changed.site.name != recorded.site.name:
        raise CampaignError(f"site.name = {changed.site.name!r}: a campaign stays on its site ({recorded.site.name})")
    return changed, notes


def _read_manifest(campaign: CampaignDir) -> dict[str, Any]:
    """Read campaign.json; CampaignError if it is damaged."""
    try:
        manifest: dict[str, Any] = read_json(campaign.manifest)
    except ValueError as error:
        raise CampaignError(f"{campaign.manifest} is damaged: {error}") from error
    has_all = isinstance(manifest, dict) and {"created", "exports"} <= manifest.keys()
    if not has_all or not all(isinstance(manifest.get(key, {}), dict) for key in ("exports", "digests")):
        raise CampaignError(f"{campaign.manifest} is damaged: it lacks what hpcrl writes into it")
    return manifest


def _change_settings(campaign: CampaignDir, base: CampaignRequest, settings: Sequence[str]) -> CampaignRequest:
    """Return a request with other settings, and a new plan."""
    own = [setting for setting in settings if not setting.startswith("site.")]
    of_site = [setting.removeprefix("site.") for setting in settings if setting.startswith("site.")]
    site_file = (str(campaign.site), msgspec.to_builtins(base.site))
    site = to_struct(apply_settings("sites", [site_file], settings=of_site), Site)
    recipe_file = (str(campaign.recipe), msgspec.to_builtins(base.recipe))
    layered = apply_settings("recipes", [recipe_file], settings=own)
    recipe = resolve_recipe(layered, staging=find_staging_dir(site))
    return CampaignRequest(recipe=recipe, site=site, plan=make_plan(recipe, site))


def _list_edited(campaign: CampaignDir) -> list[str]:
    """Return the names of the records that are not as the last submission left them."""
    _read_manifest(campaign)  # raises for a damaged one
    return list_edited_records(campaign)


def _refuse_edited(campaign: CampaignDir, edited: Sequence[str]) -> None:
    if edited:
        were = "was" if len(edited) == 1 else "were"
        raise CampaignError(
            f"{' and '.join(edited)} in {campaign.root} {were} edited after the last submission: `hpcrl resume "
            f"{campaign.name} --accept` plans with them again, `-s key=value` changes a setting without editing"
        )


def _load_source(manifest: dict[str, Any]) -> tuple[CampaignRequest | None, str]:
    """Load again what was submitted; None if it is not there any more, or cannot be read, and why in that case."""
    try:
        source = msgspec.convert(manifest.get("source"), RequestSource)
    except msgspec.ValidationError:  # of an older version
        return None, ""
    try:
        return load_request(source.recipe, site=source.site, settings=source.settings), ""
    except (HpcrlError, OSError) as error:
        is_gone = "/" in source.recipe and not is_file(Path(source.recipe))
        return None, "" if is_gone else str(error)


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
        write_records(campaign, request)
        manifest = _read_manifest(campaign)
        if (source := manifest.get("source")) is not None:
            source["settings"] = [*source["settings"], *settings]
        changed = {change.key: [change.old, change.new] for change in changes}
        history = [*manifest.get("changes", []), {"job": job.number, "time": time.time(), "changed": changed}]
        digests = digest_records(campaign)
        publish_json(campaign.manifest, manifest | {"changes": history, "digests": digests})
        yield
    except BaseException:
        for path, data in old.items():
            publish_file(path, data)
        raise
