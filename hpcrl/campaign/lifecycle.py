"""A campaign from submit to its end, on the login node. Light imports: no torch, parsl, h5py, mpi4py.

CampaignRequest, RequestSource, load_request, resolve_recipe    recipe, site and plan, loaded
check_request, check_plan        check before submission, and for a plan
PythonMissing                    the jobs' interpreter is not on this machine
preview_script, dry_run, submit                 before and at submission
start_job, write_description, write_records, digest_records        a job, and what it reads
refuse_while_alive, refuse_without_journals, find_final_failure    before another job
stop_gracefully, stop_now                       later
final_summary                                   the text at the end
read_submission, find_job_states                the recorded submission of a job, and the states of those without an end
check_model, check_lengths                      the parts of check_request about the model and a warm-up's data
CHECK_TIMEOUT_S, MODEL_CHECK_TIMEOUT_S, STOP_TIMEOUT_S  limits of checking user code and model, of stopping a job
POLL_INTERVAL_S                                 the time between looks at a job that ends
MIN_FREE_FILES                                  the room for files that a campaign asks for
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import msgspec

from hpcrl.campaign import directory
from hpcrl.campaign.fixed_settings import list_fixed_settings
from hpcrl.campaign.model_check import MISSING_PACKAGE, explain_missing_config
from hpcrl.campaign.own_gpus import add_own_gpus
from hpcrl.campaign_dir.paths import SPOOLS, CampaignDir, JobDir
from hpcrl.campaign_dir.train_progress import read_train_progress
from hpcrl.config.program import resolve_options
from hpcrl.config.recipe import (
    MIN_PARAMS,
    DomainConfig,
    ModelConfig,
    Recipe,
    WarmupConfig,
    fill_warmup_steps,
    make_recipe,
)
from hpcrl.config.site import Site, load_site
from hpcrl.config.toml import LayeredTable, load_table
from hpcrl.envs.program_files import SUBJECT_END, ProblemJudge
from hpcrl.envs.task_set import (
    DATA_SUFFIXES,
    ImitationModel,
    check_conversations,
    check_task_set,
    import_conversations,
    import_task_set,
)
from hpcrl.errors import CampaignError, ConfigError, SlurmError
from hpcrl.hardware.architecture import read_architecture, select_fields
from hpcrl.models.model_config import read_model_config
from hpcrl.monitor.job_state import (
    ALIVE_WITHIN_S,
    FINAL_JOB_STATES,
    await_new_beat,
    find_last_beat,
    judge_jobs,
    read_heartbeats,
    read_jobs,
    select_slurm_ids,
)
from hpcrl.plan.plan import Plan, make_plan
from hpcrl.plan.records import read_recipe, read_record, read_site
from hpcrl.plan.storage import estimate_storage
from hpcrl.slurm import next_job
from hpcrl.slurm import submit as slurm
from hpcrl.slurm.script import find_driver_environment, make_batch_script, make_job_script
from hpcrl.slurm.status import ACTIVE, UNKNOWN, WAITING, JobStatus, query_job_states
from hpcrl.slurm.step_script import write_step_setups
from hpcrl.system.exit_codes import EXIT_DONE, EXIT_USAGE, describe_end
from hpcrl.system.files import (
    expand_path,
    is_directory,
    is_file,
    make_private_dir,
    publish_file,
    publish_json,
    read_json,
    remove_path,
)
from hpcrl.system.free_space import find_free_space
from hpcrl.system.processes import is_alive

T = TypeVar("T", bound=msgspec.Struct)
M = TypeVar("M", bound=ModelConfig)
CHECK_TIMEOUT_S = 120
MODEL_CHECK_TIMEOUT_S = 60
STOP_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.2
MIN_FREE_FILES = 10_000
"""A campaign whose file system, or quota, has room for fewer files would soon stop."""


class RequestSource(msgspec.Struct, frozen=True, kw_only=True):
    """The words of a request, to load it again: names or absolute paths, and settings."""

    recipe: str
    site: str
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CampaignRequest:
    """The user's request: recipe and site, and the plan that maps one to the other."""

    recipe: Recipe
    site: Site
    plan: Plan
    source: RequestSource | None = None
    """None for one that was read from a campaign."""


def load_request(recipe: str, *, site: str, settings: tuple[str, ...] = ()) -> CampaignRequest:
    """Load recipe and site, and make the plan; settings are `key=value` of the recipe, `site.key=value` of the site."""
    site_settings = tuple(s.removeprefix("site.") for s in settings if s.startswith("site."))
    recipe_settings = tuple(s for s in settings if not s.startswith("site."))
    loaded_recipe = resolve_recipe(load_table("recipes", recipe, settings=recipe_settings))
    loaded_site = add_own_gpus(load_site(site, settings=site_settings))
    if (warmup := loaded_recipe.warmup) is not None:
        loaded_recipe = fill_warmup_steps(
            loaded_recipe, warmup, num_conversations=_count_conversations(loaded_recipe, warmup, site=loaded_site)
        )
    source = RequestSource(recipe=_fix_name(recipe), site=_fix_name(site), settings=settings)
    return CampaignRequest(
        recipe=loaded_recipe, site=loaded_site, plan=make_plan(loaded_recipe, loaded_site), source=source
    )


def _fix_name(name: str) -> str:
    """Return a name that means the same file in every directory."""
    return str(expand_path(name).absolute()) if name.endswith(".toml") or "/" in name else name


def resolve_recipe(layered: LayeredTable) -> Recipe:
    """Make the recipe of a table, with absolute paths."""
    return _resolve_paths(make_recipe(layered), layered)


def _count_conversations(recipe: Recipe, warmup: WarmupConfig, *, site: Site) -> int:
    return check_conversations(warmup, model=_make_imitation_model(recipe, site))


def _make_imitation_model(recipe: Recipe, site: Site) -> ImitationModel:
    return ImitationModel(python=site.choose_python(), path=recipe.model.path)


def _resolve_paths(recipe: Recipe, layered: LayeredTable) -> Recipe:
    """Make paths absolute, as a relative one would mean another directory on the workers' nodes.

    A file is looked for beside the TOML file that sets it, then in the current directory.
    """
    evaluated = {
        name: _resolve_options(recipe.domains[name], options, layered, "evaluation", "options", name)
        if name in recipe.domains
        else options
        for name, options in recipe.evaluation.options.items()
    }
    warmup = recipe.warmup and msgspec.structs.replace(
        recipe.warmup, path=_resolve_warmup_path(recipe.warmup.path, layered)
    )
    teacher = recipe.teacher
    if teacher is not None and teacher.path is not None:
        path = str(expand_path(teacher.path).absolute())
        teacher = msgspec.structs.replace(teacher, path=path, num_params=_find_size(path, teacher.num_params))
    nodes = dict(recipe.train.pipeline)
    for name, node in nodes.items():
        if node.model is not None:
            path = str(expand_path(node.model).absolute())
            nodes[name] = msgspec.structs.replace(node, model=path, num_params=_find_size(path, node.num_params))
    return msgspec.structs.replace(
        recipe,
        model=_resolve_model(recipe.model, layered, "model"),
        domains={name: _resolve_domain(name, domain, layered) for name, domain in recipe.domains.items()},
        evaluation=msgspec.structs.replace(recipe.evaluation, options=evaluated),
        train=msgspec.structs.replace(recipe.train, pipeline=nodes),
        warmup=warmup,
        teacher=teacher,
        judge={name: _resolve_model(judge, layered, "judge", name) for name, judge in recipe.judge.items()},
    )


def _resolve_file(path: str, layered: LayeredTable, *trail: str) -> str:
    """Make the path of a file absolute; `trail` is the key of the recipe that names it."""
    near, here = layered.find_folder(*trail) / expand_path(path), expand_path(path)
    return str((near if is_file(near) or not is_file(here) else here).absolute())


def _resolve_files(paths: str | list[str], layered: LayeredTable, *trail: str) -> str | list[str]:
    if isinstance(paths, str):
        return _resolve_file(paths, layered, *trail)
    return [_resolve_file(path, layered, *trail) for path in paths]


def _resolve_warmup_path(paths: str | list[str], layered: LayeredTable) -> str | list[str]:
    """Make the paths of files absolute, and find the directories of campaigns."""
    if isinstance(paths, list):
        return [str(_resolve_warmup_path(path, layered)) for path in paths]
    if paths.endswith(DATA_SUFFIXES):
        return _resolve_file(paths, layered, "warmup", "path")
    try:
        return str(directory.find_campaign(paths).root)
    except CampaignError as error:
        suffixes = ", ".join(DATA_SUFFIXES)
        raise ConfigError(f"warmup.path = {paths!r} is not a data file ({suffixes}), and {error}") from error


def _resolve_domain(name: str, domain: DomainConfig, layered: LayeredTable) -> DomainConfig:
    options = _resolve_options(domain, domain.options, layered, "domains", name, "options")
    python, tasks = domain.python, domain.tasks
    if python is not None and "/" in python:
        python = str(expand_path(python).absolute())
    trail = ("domains", name, "tasks")
    if isinstance(tasks, str):
        tasks = _resolve_file(tasks, layered, *trail)
    elif tasks is not None:
        held_out = tasks.held_out_path and _resolve_files(tasks.held_out_path, layered, *trail, "held_out_path")
        path = _resolve_files(tasks.path, layered, *trail, "path")
        tasks = msgspec.structs.replace(tasks, path=path, held_out_path=held_out)
    return msgspec.structs.replace(domain, options=options, python=python, tasks=tasks)


def _resolve_options(
    domain: DomainConfig, options: dict[str, Any], layered: LayeredTable, *trail: str
) -> dict[str, Any]:
    return resolve_options(domain.env, options, find_folder=partial(layered.find_folder, *trail))


def _resolve_model(model: M, layered: LayeredTable, *trail: str) -> M:
    path = model.path and str(expand_path(model.path).absolute())
    config = model.config or (_find_config(path) if path else {})
    template = model.chat_template and _resolve_file(model.chat_template, layered, *trail, "chat_template")
    return msgspec.structs.replace(model, path=path, config=config, chat_template=template)


def _find_size(model: str, num_params: int | None) -> int | None:
    """Return the number of weights of a model, by default by its config.json; None if that is not here."""
    if num_params is not None:
        return num_params
    config = _find_config(model)
    return read_architecture(config).num_params if config else None


def _find_config(model: str) -> dict[str, Any]:
    """Return what a plan needs of a model's config.json; empty if that is not here, or is of a model for tests."""
    try:
        config = select_fields(read_model_config(Path(model) / "config.json").fields)
        return config if read_architecture(config).num_params >= MIN_PARAMS else {}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def preview_script(request: CampaignRequest, *, name: str) -> str:
    """Return the batch script for `hpcrl plan`; submission only fills in the campaign's path."""
    campaign = CampaignDir(directory.show_campaigns_root(request.site) / name)
    plan, site = request.plan, request.site
    return make_batch_script(
        plan,
        job=campaign.job(0),
        python=site.choose_python(plan.components[0].partition),
        exports=_shell_exports().items(),
        environment=find_driver_environment(plan, site),
    )


def submit(
    request: CampaignRequest, *, name: str | None = None, show_note: Callable[[str], object] = str
) -> CampaignDir:
    """Check the user's code, create the campaign's directory, submit its first job; on failure leave no files.

    `show_note` is called with each problem that is found here and that nodes may not have.
    """
    for note in check_request(request):
        show_note(note)
    campaign = directory.reserve_campaign(name, stem=request.recipe.name, site=request.site)
    try:
        write_description(campaign, request)
        start_job(campaign, request, number=0, show_note=show_note)
    except BaseException:
        directory.release_campaign(campaign)
        raise
    return campaign


def dry_run(request: CampaignRequest, *, show_note: Callable[[str], object] = str) -> str:
    """Check everything that submission checks, and let Slurm test the script; leave no files. Return Slurm's answer."""
    for note in check_request(request):
        show_note(note)
    campaign = directory.reserve_campaign(None, stem=request.recipe.name, site=request.site)
    try:
        write_description(campaign, request)
        if request.site.scheduler == "local":
            return "no test by a scheduler: the site has none"
        job = _make_job_dir(campaign, 0)
        publish_file(job.script, preview_script(request, name=campaign.name), mode=0o700)
        return slurm.check_script(job.script, site=request.site)
    finally:
        directory.release_campaign(campaign)


def check_plan(request: CampaignRequest) -> list[str]:
    """Check what submission checks, but for Slurm; return notes on what is not certain here."""
    notes = [*_list_idle_parts(request.recipe), *([unchecked] if (unchecked := check_model(request)) else [])]
    if request.site.scheduler == "slurm" and not slurm.has_slurm():
        why = f"this machine has no Slurm, so it is not a login node of {request.site.name}"
        return [*notes, f"the files and the code that the recipe names are not checked: {why}"]
    for name, domain in request.recipe.domains.items():
        if domain.task_set is not None:
            check_task_set(domain.task_set, domain=name, only_held_out=domain.held_out)
    notes += [] if unchecked else check_lengths(request)
    try:
        return notes + _check_user_code(request)
    except PythonMissing as error:
        return [*notes, f"the recipe's code is not checked: {error}"]


def check_request(request: CampaignRequest) -> list[str]:
    """Check everything that would otherwise fail only in the queue or in the job; return what is not certain here."""
    for setting, model in (_list_model_paths(request.recipe) | request.recipe.further_models).items():
        if not is_file(Path(model) / "config.json"):
            raise ConfigError(explain_missing_config(setting, model))
    if request.site.scheduler == "slurm":
        slurm.require_slurm(request.site)
        slurm.make_site_environment(request.site)
    if unchecked := check_model(request):
        raise ConfigError(unchecked)
    _check_free_space(request)
    return [*_list_idle_parts(request.recipe), *check_lengths(request), *_check_user_code(request)]


def _check_free_space(request: CampaignRequest) -> None:
    """Raise ConfigError if the file system of the campaigns has no room for checkpoints and weights."""
    need = estimate_storage(request.recipe)
    try:
        root = directory.find_campaigns_root(request.site)
    except SlurmError:  # a variable of the site is unset here
        return
    existing = next(path for path in (root, *root.parents) if path.exists())
    free = find_free_space(existing)
    if free.num_files < MIN_FREE_FILES:
        raise ConfigError(
            f"{existing} has room for {free.num_files:.0f} more files (by {free.source}), and a campaign makes "
            "thousands: remove some (`hpcrl gc` lists what old campaigns no longer need), or set site.campaigns_dir"
        )
    if need is not None and need.gib > free.num_bytes / 2**30:
        raise ConfigError(
            f"{existing} has {free.num_bytes / 2**30:.3g} GiB free (by {free.source}), and this campaign needs up to "
            f"{need.describe()}: set site.campaigns_dir to a larger file system, lower train.keep_checkpoints, "
            "keep_best or keep_versions, or free space (`hpcrl gc`)"
        )


class PythonMissing(ConfigError):
    """The interpreter of the jobs cannot be run on this machine."""


def check_model(request: CampaignRequest) -> str:
    """Check the model with the interpreter of the jobs; raise ConfigError, or return a note on what was not checked."""
    recipe, path = request.recipe, request.recipe.model.path
    for setting, model in _list_model_paths(recipe).items():
        if not is_directory(Path(model)):
            return f"{setting} = {model!r} is not on this machine, so the model is not checked"
    if path is None and recipe.model.chat_template is None and not recipe.judge and not recipe.further_models:
        return ""
    command = [request.site.choose_python(), "-m", "hpcrl.campaign.model_check"]
    try:
        completed = _run_check(command, request, timeout_s=MODEL_CHECK_TIMEOUT_S)
    except OSError as error:
        return f"the model is not checked: the site's python {command[0]!r} cannot be run here ({error.strerror})"
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"model.path = {path!r}: its chat template did not render a short conversation in "
            f"{MODEL_CHECK_TIMEOUT_S} s: set model.chat_template to one that ends"
        ) from error
    message = " ".join(completed.stdout.decode(errors="replace").splitlines())
    if completed.returncode == MISSING_PACKAGE:
        return f"the model is not checked: {command[0]} lacks the package {message}: pip install 'hpcrl[local]' there"
    if completed.returncode:
        lines = completed.stderr.decode(errors="replace").strip().splitlines() or ["its check ended without a message"]
        raise ConfigError(f"recipe {request.recipe.name!r}: {message or lines[-1]}")
    return ""


def _list_idle_parts(recipe: Recipe) -> list[str]:
    """Return a note on what has no effect where every step is one of the warm-up, though there are domains."""
    if not recipe.domains or recipe.has_rollouts:
        return []
    return [
        f"train.num_steps = {recipe.train.num_steps} are all of the warm-up: [domains], [rollout] and train.pipeline "
        "have no effect until it is more than warmup.steps"
    ]


def check_lengths(request: CampaignRequest) -> list[str]:
    """Count the warm-up's conversations that are too long, and return notes; raise ConfigError if all are."""
    warmup = request.recipe.warmup
    if warmup is None or any(is_directory(Path(path)) for path in warmup.paths):
        return []  # the trajectories of a campaign were within the context of its model
    command = [request.site.choose_python(), "-m", "hpcrl.roles.warmup_check"]
    try:
        completed = _run_check(command, request, timeout_s=CHECK_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"warmup.path: the lengths of its conversations are not checked: {error}"]
    text = " ".join(completed.stdout.decode(errors="replace").splitlines())
    if completed.returncode == EXIT_USAGE:
        raise ConfigError(f"recipe {request.recipe.name!r}: {text}")
    if completed.returncode:
        last = completed.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return [f"warmup.path: the lengths of its conversations are not checked: {last}"]
    return [text] if text else []


def _list_model_paths(recipe: Recipe) -> dict[str, str]:
    """Return the directories of the model and of the judges by their settings in the recipe."""
    tables = {"model": recipe.model, **{f"judge.{name}": judge for name, judge in recipe.judge.items()}}
    return {f"{table}.path": model.path for table, model in tables.items() if model.path is not None}


def _run_check(
    command: list[str], request: CampaignRequest, *, timeout_s: float
) -> "subprocess.CompletedProcess[bytes]":
    """Run a check of the recipe, which it reads from its standard input."""
    recipe = msgspec.json.encode(request.recipe)
    return subprocess.run(command, input=recipe, capture_output=True, check=False, timeout=timeout_s)


def _check_user_code(request: CampaignRequest) -> list[str]:
    """Import environments and rewards with the interpreter of the jobs, before anything is queued.

    Return the problems that are found here and that nodes may not have.
    """
    judge = ProblemJudge(
        is_local=request.site.scheduler == "local",
        has_prologue=request.plan.prologue is not None,
        campaigns=str(directory.show_campaigns_root(request.site)),
    )
    command = [request.site.choose_python(), "-m", "hpcrl.envs.check", msgspec.json.encode(judge).decode()]
    try:
        completed = _run_check(command, request, timeout_s=CHECK_TIMEOUT_S)
    except OSError as error:
        raise PythonMissing(f"the site's python {command[0]!r} cannot be run here: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"importing the environments of recipe {request.recipe.name!r} took over {CHECK_TIMEOUT_S} s: "
            "importing must be quick; open files and start servers in reset()"
        ) from error
    *subjects, answer = completed.stdout.decode(errors="replace").split(SUBJECT_END)
    last = completed.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if not subjects and last.startswith("ModuleNotFoundError"):  # no user code ran yet: hpcrl's own imports
        raise ConfigError(f"{command[0]} lacks what a job needs ({last}): pip install 'hpcrl[local]' there")
    if not subjects or subjects[-1] or completed.returncode not in (EXIT_DONE, EXIT_USAGE):
        subject = next((name for name in reversed(subjects) if name), "its code cannot be checked")
        raise ConfigError(
            f"recipe {request.recipe.name!r}: {subject}: the process that checks it "
            f"{describe_end(completed.returncode)}" + f", its last output: {last[-300:]}" * bool(last)
        )
    if completed.returncode:
        raise ConfigError(f"recipe {request.recipe.name!r}: {'; '.join(answer.splitlines())}")
    return answer.splitlines()


def refuse_while_alive(job: JobDir, site: Site, *, is_done: bool) -> None:
    """Raise if the last job may still run: two jobs at once would train twice on the same trajectories.

    `is_done` is whether the campaign has all its steps.
    """
    campaign = job.campaign
    outcome = _read_outcome(job)
    state = "gone" if outcome == "done" and is_done else _find_job_state(job, site)
    if outcome is None and state == "gone":
        _refuse_while_draining(job)
        outcome = _read_outcome(job)
    if outcome == "done" and is_done:
        raise CampaignError(
            f"campaign {campaign.name!r} is done: there is nothing to resume; `hpcrl extend {campaign.name} --steps N` "
            "gives it more steps"
        )
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while outcome is not None and state == "running" and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)  # its outcome is written, so it is about to exit
        state = _find_job_state(job, site)
    if state in ("queued", "running"):
        hint = f"`hpcrl monitor {campaign.name}` shows it, `hpcrl stop {campaign.name}` ends it"
        raise CampaignError(f"campaign {campaign.name!r}: job {read_submission(job).id} is {state}: {hint}")
    if state == "unknown" and outcome is None:
        raise CampaignError(
            f"campaign {campaign.name!r}: Slurm does not report the state of job {read_submission(job).id}: try again "
            f"later, or, if you know that it is gone, `hpcrl stop --now {campaign.name}` first"
        )


def _read_outcome(job: JobDir) -> str | None:
    return str(read_json(job.outcome)["outcome"]) if job.outcome.exists() else None


def _refuse_while_draining(job: JobDir) -> None:
    """Raise if processes of a job that ended without an outcome still run: its first one alone was killed.

    Only a heartbeat that changes shows this, as clocks differ: a silence is waited for.
    """
    silence_s = max(time.time() - find_last_beat(job), 0.0)
    if await_new_beat(job, timeout_s=ALIVE_WITHIN_S - silence_s, is_over=job.outcome.exists):
        raise CampaignError(
            f"campaign {job.campaign.name!r}: the first process of job {read_submission(job).id} was killed, and "
            "others of it still run, to save a checkpoint: try again when they have ended, after job.drain_s at "
            f"most ({job.outcome} is there then)"
        )


def refuse_without_journals(campaign: CampaignDir) -> None:
    """Raise if the tasks in flight are not recorded where a job looks for them: it would number its tasks from 0."""
    if not campaign.env_workers.is_dir():
        raise CampaignError(
            f"campaign {campaign.name!r} cannot be resumed: it has no {campaign.env_workers}, as a version of hpcrl "
            f"made it that recorded its tasks elsewhere: `hpcrl export {campaign.name} --hf DIR` writes its model, for "
            "a new campaign with `model.path = DIR`"
        )


def find_final_failure(campaign: CampaignDir, *, num_steps: int) -> str:
    """Return why the trainer failed though all steps were made, and would in another job; empty if it did not."""
    if next_job.find_last_step(campaign) < num_steps:
        return ""
    return read_train_progress(campaign.train_progress).failure


def stop_gracefully(name: str) -> str:
    """Ask a campaign to make a checkpoint and end, or cancel a job that is only queued. Return a message."""
    campaign = directory.find_campaign(name)
    if (ended := _describe_end(campaign)) is not None:
        return ended
    job, site = _request_stop(campaign)
    if site.scheduler == "slurm" and _find_job_state(job, site) == "queued":
        return _end_job(job, site)
    hint = f"`hpcrl monitor {campaign.name}` shows it"
    return f"campaign {campaign.name} is stopping: it makes a checkpoint and ends ({hint})"


def stop_now(name: str) -> str:
    """End a campaign without a checkpoint. Return a message."""
    campaign = directory.find_campaign(name)
    return _describe_end(campaign) or _end_job(*_request_stop(campaign))


def _describe_end(campaign: CampaignDir) -> str | None:
    """Return the message for a campaign that has ended already; None if its last job may still run."""
    jobs = read_jobs(campaign)[-1:]
    heartbeats = read_heartbeats(campaign.events)
    ids = select_slurm_ids(jobs)
    statuses = _query_states(ids, read_site(campaign, skips_unknown=True)) if ids else {}
    _, verdicts = judge_jobs(campaign, jobs, statuses=statuses, events={}, heartbeats=heartbeats, now=time.time())
    if not verdicts or verdicts[0].state not in FINAL_JOB_STATES:
        return None
    return f"campaign {campaign.name} has ended already ({verdicts[0].state}: {verdicts[0].reason})"


def _query_states(ids: list[str], site: Site) -> dict[str, JobStatus]:
    return query_job_states(ids, env=os.environ | slurm.make_site_environment(site))


def _request_stop(campaign: CampaignDir) -> tuple[JobDir, Site]:
    """Publish the stop request, and cancel the jobs that only wait for another one. Return the job that is left."""
    every, site = directory.list_jobs(campaign), read_site(campaign, skips_unknown=True)
    publish_file(campaign.stop, "")
    *_, last = [job for job in every if job.submission.exists()] or every
    states = find_job_states(every, site)
    first = next((job for job, state in states.items() if state != "gone"), last)
    next_job.cancel_next_jobs(first, env=os.environ | slurm.make_site_environment(site))
    return first, site


def _end_job(job: JobDir, site: Site) -> str:
    """End a job without a checkpoint: interrupt it, and cancel it by its recorded id if it does not end."""
    campaign = job.campaign
    resumable = f"`hpcrl resume {campaign.name}` continues from the last checkpoint"
    if _find_job_state(job, site) == "running":
        slurm.interrupt_job(read_submission(job), site=site)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while not job.outcome.exists() and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)
        if job.outcome.exists():
            return f"campaign {campaign.name}: job {read_submission(job).id} has ended; {resumable}"
    slurm.cancel_job(read_submission(job), site=site)
    publish_json(job.outcome, {"outcome": "stopped", "reason": "cancelled (hpcrl stop --now)", "time": time.time()})
    return f"campaign {campaign.name}: job {read_submission(job).id} is cancelled; {resumable}"


def final_summary(
    campaign: CampaignDir,
    *,
    state: str,
    rewards: Sequence[float | None],
    losses: Sequence[float | None] = (),
    untrained: Sequence[str] = (),
) -> list[str]:
    """Return the final lines of a campaign: what was done, where the results are, and what to try next.

    The losses are named where no step has a reward: conversations were imitated. `untrained` is why
    domains train nothing.
    """
    hpcrl = _command_name()
    known_rewards = [reward for reward in rewards if reward is not None]
    what, values = (
        ("mean reward", known_rewards) if known_rewards else ("loss", [loss for loss in losses if loss is not None])
    )
    learned = f": {what} {_describe_change(values, num_steps=len(rewards))}" if values else ""
    if state in ("queued", "running", "draining"):
        return []  # what watched it has printed how to see it again
    if state != "done":
        failure = find_final_failure(campaign, num_steps=read_recipe(campaign).train.num_steps)
        then = "" if failure else f", then `{hpcrl} resume {campaign.name}`"
        hint = f"see `{hpcrl} logs {campaign.name}`{then}"
        return [f"campaign {campaign.name} ended as {state}{learned}; {hint}"]
    recipe = _read_recipe_name(campaign)
    if read_site(campaign, skips_unknown=True).scheduler == "local":
        elsewhere = (f"plan {recipe} --site lab", "the same as a heterogeneous Slurm job; `lab up` makes a Slurm here")
    else:
        elsewhere = (f"plan {recipe} --site perlmutter -s site.account=m1234", "the same on a large machine")
    commands = [
        (f"monitor {campaign.name} --once", "how it went"),
        (f"traj show {campaign.name} --best", "what the model has learned to generate")
        if known_rewards
        else (f"export {campaign.name} --hf DIR", "the model, as a directory for transformers and vLLM"),
        elsewhere,
    ]
    width = max(len(command) for command, _ in commands)
    return [
        f"campaign {campaign.name} made every step, but did not train everything{learned}"
        if untrained
        else f"campaign {campaign.name} is done{learned}",
        *(f"  not trained   {why}" for why in untrained),
        f"  in            {campaign.root}",
        *([f"  weights       {campaign.weights}"] if known_rewards else []),
        f"  checkpoints   {campaign.checkpoints}",
        *([f"  trajectories  {campaign.spool('scored')}"] if known_rewards else []),
        "next:",
        *(f"  {hpcrl} {command:<{width}}   # {why}" for command, why in commands),
    ]


def _read_recipe_name(campaign: CampaignDir) -> str:
    """Return the recipe as it was named at submission."""
    try:
        return shlex.quote(str(read_json(campaign.manifest)["source"]["recipe"]))
    except (OSError, ValueError, KeyError, TypeError):
        return "quickstart"


def _describe_change(values: Sequence[float], *, num_steps: int) -> str:
    """Describe how a figure of steps changed, by means: the last steps get what took longest, so one alone misleads."""
    num = max(len(values) // 10, 1)
    first, last = fmean(values[:num]), fmean(values[-num:])
    means = f" (means of the first and last {num})" if num > 1 else ""
    return f"{first:.2f} -> {last:.2f} in {num_steps} steps{means}"


def _command_name() -> str:
    """Return the command that runs hpcrl: its name if it is on PATH, else the path that was just called."""
    called = Path(sys.argv[0])
    return os.path.relpath(called) if called.name == "hpcrl" and not shutil.which("hpcrl") else "hpcrl"


def read_submission(job: JobDir) -> slurm.SubmittedJob:
    """Read the recorded submission of a job."""
    return read_record(job.submission, slurm.SubmittedJob)


def _find_job_state(job: JobDir, site: Site) -> str:
    return _ask_job_states([job], site)[job]


def find_job_states(jobs: Iterable[JobDir], site: Site) -> dict[JobDir, str]:
    """Ask the scheduler once for the states of jobs: queued, running, gone or unknown.

    Jobs that were never submitted, and those whose end is recorded, are left out.
    """
    return _ask_job_states([job for job in jobs if job.submission.exists() and not job.outcome.exists()], site)


def _ask_job_states(jobs: Iterable[JobDir], site: Site) -> dict[JobDir, str]:
    records = {job: read_submission(job) for job in jobs}
    ids = [record.id for record in records.values() if record.scheduler != "local"]
    statuses = _query_states(ids, site) if ids else {}
    return {job: _describe_state(record, statuses.get(record.id)) for job, record in records.items()}


def _describe_state(record: slurm.SubmittedJob, status: JobStatus | None) -> str:
    if status is None:
        return "running" if is_alive(record.pid, record.start_ticks) else "gone"
    match status.state:
        case state if state in WAITING:
            return "queued"
        case state if state in ACTIVE:
            return "running"
        case state if state == UNKNOWN:
            return "unknown"
    return "gone"


def start_job(
    campaign: CampaignDir, request: CampaignRequest, *, number: int, show_note: Callable[[str], object] = str
) -> None:
    """Submit a job; with it those that may follow, if its nodes may not submit them."""
    job = _make_job_dir(campaign, number)
    try:
        script = make_job_script(request.plan, job=job, site=request.site)
        submitted = slurm.submit_job(script, job=job, site=request.site)
    except BaseException:
        remove_path(job.root)
        raise
    if submitted.scheduler == "slurm" and not request.site.nodes_may_submit:
        try:
            next_job.queue_chain(job, plan=request.plan, site=request.site, slurm_id=submitted.id)
        except SlurmError as error:
            num = len(next_job.list_followers(job))
            show_note(f"{num} of {request.plan.num_jobs - 1} jobs that may follow are queued: {error}")


def _make_job_dir(campaign: CampaignDir, number: int) -> JobDir:
    job = campaign.job(number)
    make_private_dir(campaign.jobs)
    if not next_job.claim_job_dir(job):
        raise CampaignError(
            f"campaign {campaign.name!r}: another process is submitting job {number}; if it was killed, try again "
            f"{next_job.CLAIM_TIMEOUT_S / 60:.0f} minutes after it"
        )
    make_private_dir(job.logs)
    return job


def write_description(campaign: CampaignDir, request: CampaignRequest) -> None:
    """Write the recipe, the site and the plan; campaign.json is written last and marks a complete campaign."""
    for folder in _campaign_folders(campaign):
        make_private_dir(folder)
    write_records(campaign, request)
    _import_task_sets(campaign, request.recipe, request.site)
    named = {"name": campaign.name, "recipe": request.recipe.name, "site": request.site.name}
    source = {
        "source": msgspec.to_builtins(request.source),
        "digests": digest_records(campaign),
        "fixed": list_fixed_settings(request.recipe),
    }
    publish_json(campaign.manifest, {**named, "created": time.time(), "exports": _shell_exports(), **source})


def write_records(campaign: CampaignDir, request: CampaignRequest) -> None:
    """Write the recipe, the site and the plan, which jobs read."""
    for path, value in ((campaign.recipe, request.recipe), (campaign.site, request.site)):
        publish_file(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    publish_file(campaign.plan, request.plan.to_json())
    paths = (_list_model_paths(request.recipe) | request.recipe.further_models).values()
    write_step_setups(campaign, request.plan, request.site, paths=paths)


def digest_records(campaign: CampaignDir) -> dict[str, str]:
    """Return the digests of recipe and site, by which an edited one is known."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (campaign.recipe, campaign.site)}


def _import_task_sets(campaign: CampaignDir, recipe: Recipe, site: Site) -> None:
    """Copy the rows of the domains' task sets, and the conversations of the warm-up, into the campaign."""
    if recipe.warmup is not None:
        make_private_dir(campaign.warmup)
        model = _make_imitation_model(recipe, site)
        import_conversations(recipe.warmup, directory=campaign.warmup, model=model)
    for name, domain in recipe.domains.items():
        if domain.task_set is not None:
            make_private_dir(campaign.tasks)
            import_task_set(domain.task_set, domain=name, directory=campaign.tasks, only_held_out=domain.held_out)


def _campaign_folders(campaign: CampaignDir) -> list[Path]:
    spools = [campaign.spool(name) for name in SPOOLS]
    return [campaign.events, campaign.endpoints, campaign.weights, campaign.checkpoints, campaign.env_workers, *spools]


def _shell_exports() -> dict[str, str]:
    """Return the variables of this shell that jobs, also resumed ones, need to find the user's code."""
    path = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(str(Path(p).absolute()) for p in path.split(os.pathsep))} if path else {}
