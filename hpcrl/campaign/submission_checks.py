"""The checks before a campaign is submitted, of what would otherwise fail only in the queue or in the job.

check_request     everything, for a submission
check_free_space, find_room  the space that is left where campaigns are stored
check_site_files  the images and interpreters that the site names by path
check_plan        the same for a plan, where this machine may be no login node of the site
find_unstaged     what the recipe names of the hub, and the site of registries, that the site does not have
run_model_check   the model, by the interpreter of the jobs
run_length_check  the lengths of the conversations of a warm-up
PythonMissing     that interpreter is not on this machine
CHECK_TIMEOUT_S, MODEL_CHECK_TIMEOUT_S, MIN_FREE_FILES, MIN_FREE_BYTES  limits of these checks
"""

import os
import re
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile

import msgspec

from hpcrl.campaign import directory
from hpcrl.campaign.model_check import MISSING_PACKAGE, explain_missing_config, reads_weight_files
from hpcrl.campaign.request import CampaignRequest
from hpcrl.campaign.staged_files import PULLED_IMAGES, advise_staging, find_staging_dir
from hpcrl.config.program import is_registry_image
from hpcrl.config.recipe import Recipe
from hpcrl.config.site import Site
from hpcrl.envs.program_files import SUBJECT_END, ProblemJudge
from hpcrl.envs.task_set import check_task_set
from hpcrl.errors import ConfigError, SlurmError
from hpcrl.models.weight_headers import has_served_files, has_weight_files
from hpcrl.plan.storage import forecast_storage, judge_free_space
from hpcrl.slurm import submit as slurm
from hpcrl.system.exit_codes import EXIT_DONE, EXIT_USAGE, describe_end
from hpcrl.system.files import is_directory, is_file
from hpcrl.system.free_space import FreeSpace, find_free_space
from hpcrl.system.terminal import show_wait

CHECK_TIMEOUT_S = 120
MODEL_CHECK_TIMEOUT_S = 60
MIN_FREE_FILES = 10_000
"""A campaign whose file system, or quota, has room for fewer files would soon stop."""
MIN_FREE_BYTES = 64 << 20
"""Logs, events and the first checkpoints of a tiny model."""


class PythonMissing(ConfigError):
    """The interpreter of the jobs cannot be run on this machine."""


def check_plan(request: CampaignRequest) -> list[str]:
    """Check what submission checks, but for Slurm; return notes on what is not certain here."""
    is_here = request.site.scheduler == "local" or slurm.has_slurm()
    idle = [*_list_unset_variables(request.site), *_list_missing_keys(request), *_list_idle_parts(request.recipe)]
    site_notes: list[str] = []
    for check in (check_free_space, check_site_files) if is_here else ():
        try:
            site_notes += check(request)
        except ConfigError as error:  # submission refuses it; the plan may be for another machine
            site_notes.append(str(error))
    if unstaged := find_unstaged(request):
        later = "the recipe's files and code are checked once all is staged"
        return [*idle, *site_notes, *unstaged, *_list_unknown_sizes(request.recipe), later]
    notes = [*idle, *site_notes, *([unchecked] if (unchecked := run_model_check(request)) else [])]
    if not is_here:
        why = f"this machine has no Slurm, so it is not a login node of {request.site.name}"
        return [*notes, f"the files and the code that the recipe names are not checked: {why}"]
    for name, domain in request.recipe.domains.items():
        if domain.task_set is not None:
            check_task_set(domain.task_set, domain=name, only_held_out=domain.held_out)
    notes += [] if unchecked else run_length_check(request)
    try:
        return notes + _check_user_code(request)
    except PythonMissing as error:
        return [*notes, f"the recipe's code is not checked: {error}"]


def check_request(request: CampaignRequest) -> list[str]:
    """Check everything that would otherwise fail only in the queue or in the job; return what is not certain here."""
    for problem in find_unstaged(request):
        raise ConfigError(problem)
    for setting, model in (request.recipe.served_models | request.recipe.further_models).items():
        if not is_file(Path(model) / "config.json"):
            raise ConfigError(explain_missing_config(setting, model))
    if request.site.scheduler == "slurm":
        slurm.require_slurm(request.site)
        slurm.make_site_environment(request.site)
    files = check_site_files(request)
    if unchecked := run_model_check(request):
        raise ConfigError(unchecked)
    _require_weights(request)
    space = check_free_space(request)
    notes = [*_list_missing_keys(request), *_list_idle_parts(request.recipe), *files, *space]
    return [*notes, *run_length_check(request), *_check_user_code(request)]


def _require_weights(request: CampaignRequest) -> None:
    """Raise ConfigError for a model whose directory has no weights, which are not needed for a plan."""
    recipe = request.recipe
    engines = {f"judge.{name}.path": judge.engine for name, judge in recipe.judge.items()}
    for setting, model in (recipe.served_models | recipe.further_models).items():
        engine, path = engines.get(setting), Path(model)
        if engine is not None and not reads_weight_files(engine):
            continue
        is_for_vllm = engine is not None and engine.backend == "vllm"
        if not (has_served_files(path) if is_for_vllm else has_weight_files(setting, path)):
            raise ConfigError(
                f"{setting} = {model!r} has no weights (*.safetensors): download them too, or name the model by its "
                f"id on the hub: {advise_staging(request.shown_recipe, request.site.name, ())}"
            )


def check_site_files(request: CampaignRequest) -> list[str]:
    """Check that the images and interpreters with an absolute path exist, where their directories do.

    Return notes on those of directories that only nodes may have.
    """
    notes = []
    for key, path in _list_site_files(request).items():
        if not path.startswith("/") or "$" in path or os.path.lexists(path):  # a link may lead to what nodes have
            continue
        if is_directory(Path(path).parent):
            advice = "correct the path" if key.endswith("python") else "correct the path, or build it (`hpcrl image`)"
            raise ConfigError(f"site.{key} = {path!r} does not exist: {advice}")
        notes.append(f"site.{key} = {path!r} is not checked: {Path(path).parent} is not on this machine")
    return notes


def _list_site_files(request: CampaignRequest) -> dict[str, str]:
    """Return the images and interpreters that the site names for the partitions of the plan, by their keys."""
    plan, site = request.plan, request.site
    labels = dict.fromkeys(component.partition for component in plan.components)
    labels |= {} if plan.reward_jobs is None else {plan.reward_jobs.partition: None}
    found: dict[str, str | None] = {}
    for label in labels:
        own, image = site.partitions[label], site.choose_image(label)
        found["image" if own.image is None else f"partitions.{label}.image"] = image
        if image is None or label == plan.components[0].partition:  # the driver runs outside images
            found["python" if own.python is None else f"partitions.{label}.python"] = own.python or site.python
    return {key: path for key, path in found.items() if path is not None}


def _list_unset_variables(site: Site) -> list[str]:
    """Return a note on variables that the plan shows as they are, since they have a value on the site only."""
    try:
        directory.find_campaigns_root(site)
    except SlurmError as error:
        return [f"site.campaigns_dir: {error}; the batch script below has its name"]
    return []


def _list_missing_keys(request: CampaignRequest) -> list[str]:
    """Return a note on each variable of a key that the recipe names and that is not set here."""
    site, hint = request.site, "jobs will not have it unless a prologue sets it" if request.plan.prologue else ""
    return [
        f"{setting}: the variable {name} is not set here, so {hint or 'jobs will not have it'}: export it"
        for setting, name in request.recipe.key_variables.items()
        if name not in os.environ and name not in site.environment
    ]


def _list_idle_parts(recipe: Recipe) -> list[str]:
    """Return a note on what has no effect where every step is one of the warm-up, though there are domains."""
    if not recipe.domains or recipe.has_rollouts:
        return []
    return [
        f"train.num_steps = {recipe.train.num_steps} are all of the warm-up: [domains], [rollout] and train.pipeline "
        "have no effect until it is more than warmup.steps"
    ]


def find_unstaged(request: CampaignRequest) -> list[str]:
    """Return what the recipe names of the hub, and the site of registries, that is not on the site's file system."""
    recipe, site = request.recipe, request.site
    staging = find_staging_dir(site)
    named: dict[str, str] = recipe.served_models | recipe.further_models
    for name, domain in recipe.domains.items():
        if (tasks := domain.task_set) is not None:
            for key, paths in (("path", tasks.path), ("held_out_path", tasks.held_out_path or [])):
                files = [paths] if isinstance(paths, str) else paths
                named |= {f"domains.{name}.tasks.{key}" + f"[{n}]" * bool(n): file for n, file in enumerate(files)}
    problems = {setting: staging.describe_problem(path) for setting, path in named.items()}
    if site.network.internet_on_compute == "no" and site.container in PULLED_IMAGES:
        images = {component.partition: site.choose_image(component.partition) for component in request.plan.components}
        problems |= {
            f"the image of partition {label}": f"{image} is not staged, and nodes have no internet"
            for label, image in images.items()
            if is_registry_image(image)
        }
    source = request.source
    words = (source.recipe, source.site, source.settings) if source is not None else (recipe.name, site.name, ())
    advice = advise_staging(*words)
    return [f"{setting}: {problem}: {advice}" for setting, problem in problems.items() if problem]


def _list_unknown_sizes(recipe: Recipe) -> list[str]:
    model = recipe.model
    if model.path is None or model.architecture is not None:
        return []
    advice = "give fields of its config.json in [model.config], or model.num_params"
    return [f"the size of the model is unknown until it is staged, so memory and speed are not checked: {advice}"]


def check_free_space(request: CampaignRequest) -> list[str]:
    """Compare what a campaign needs with what the file system and the quotas leave; raise ConfigError for too little.

    Return how long it lasts, if the size of the model is known.
    """
    found = find_room(request.site)
    if found is None:
        return []
    existing, free = found
    train_gpu = request.plan.components[request.plan.role("train").component].gpu
    forecast = forecast_storage(request.recipe, train_gpu=request.site.find_gpu(train_gpu))
    if forecast is None:
        return []
    free_gib = free.num_bytes / 2**30
    return [
        judge_free_space(
            forecast, free_gib=free_gib, place=f"{existing} has {free_gib:.3g} GiB free (by {free.source})"
        )
    ]


def find_room(site: Site) -> tuple[Path, FreeSpace] | None:
    """Return where campaigns are stored, and what is free there; raise ConfigError if that is next to nothing.

    None if a variable of the site is unset here.
    """
    try:
        root = directory.find_campaigns_root(site)
    except SlurmError:
        return None
    existing = next(path for path in (root, *root.parents) if path.exists())
    free = find_free_space(existing)
    if free.num_files < MIN_FREE_FILES:
        raise ConfigError(
            f"{existing} has room for {free.num_files:.0f} more files (by {free.source}), and a campaign makes "
            "thousands: remove some (`hpcrl gc` lists what old campaigns no longer need), or set site.campaigns_dir"
        )
    if free.num_bytes < MIN_FREE_BYTES:
        raise ConfigError(
            f"{existing} has {free.num_bytes / 2**20:.3g} MiB free (by {free.source}), too little for the logs of a "
            "job: free space (`hpcrl gc` lists what old campaigns no longer need), or set site.campaigns_dir"
        )
    return existing, free


def run_model_check(request: CampaignRequest) -> str:
    """Check the model with the interpreter of the jobs; raise ConfigError, or return a note on what was not checked."""
    recipe, path = request.recipe, request.recipe.model.path
    for setting, model in recipe.served_models.items():
        if not is_directory(Path(model)):
            return f"{setting} = {model!r} is not on this machine, so the model is not checked"
    if path is None and recipe.model.chat_template is None and not recipe.judge and not recipe.further_models:
        return ""
    command = [request.site.choose_python(), "-m", "hpcrl.campaign.model_check"]
    try:
        with show_wait("the model is checked"):
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
        raise ConfigError(f"recipe {request.shown_recipe!r}: {message or lines[-1]}")
    return ""


def run_length_check(request: CampaignRequest) -> list[str]:
    """Count the warm-up's conversations that are too long, and return notes; raise ConfigError if all are."""
    warmup = request.recipe.warmup
    if warmup is None or any(is_directory(Path(path)) for path in warmup.paths):
        return []  # the trajectories of a campaign were within the context of its model
    command = [request.site.choose_python(), "-m", "hpcrl.roles.warmup_check"]
    try:
        with show_wait("the conversations of the warm-up are counted"):
            completed = _run_check(command, request, timeout_s=CHECK_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"warmup.path: the lengths of its conversations are not checked: {error}"]
    text = " ".join(completed.stdout.decode(errors="replace").splitlines())
    if completed.returncode == EXIT_USAGE:
        raise ConfigError(f"recipe {request.shown_recipe!r}: {text}")
    if completed.returncode:
        last = completed.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return [f"warmup.path: the lengths of its conversations are not checked: {last}"]
    return [text] if text else []


def _check_user_code(request: CampaignRequest) -> list[str]:
    """Import environments and rewards with the variables of the jobs, before anything is queued.

    Where the site has a prologue, which may set more, code that needs other variables of this shell is only noted.
    Return the problems that are found here and that nodes may not have.
    """
    site = request.site
    own = {name: os.path.expandvars(value) for name, value in site.environment.items()}
    try:
        return _import_user_code(request, env=slurm.choose_exports(site, variables=request.recipe.variables) | own)
    except ConfigError as error:
        if request.plan.prologue is None:
            raise
        notes = _import_user_code(request, env=os.environ | own)
        advice = "unless the prologue sets what is missing, name it in site.exports"
        return [*notes, f"{error}; with all variables of this shell it is imported: {advice}"]


def _import_user_code(request: CampaignRequest, *, env: Mapping[str, str]) -> list[str]:
    """Import environments and rewards with the interpreter of the jobs and these variables; return notes."""
    judge = ProblemJudge(
        is_local=request.site.scheduler == "local",
        has_prologue=request.plan.prologue is not None,
        campaigns=str(directory.show_campaigns_root(request.site)),
    )
    python = request.site.choose_python()
    try:
        with show_wait("the environments and rewards are imported"), NamedTemporaryFile() as file:
            command = [python, "-m", "hpcrl.envs.check", file.name, msgspec.json.encode(judge).decode()]
            completed = _run_check(command, request, timeout_s=CHECK_TIMEOUT_S, env=env)
            *subjects, answer = file.read().decode(errors="replace").split(SUBJECT_END)
    except OSError as error:
        raise PythonMissing(f"the site's python {python!r} cannot be run here: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"importing the environments of recipe {request.shown_recipe!r} took over {CHECK_TIMEOUT_S} s: "
            "importing must be quick; open files and start servers in reset()"
        ) from error
    last = completed.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if not subjects and last.startswith("ModuleNotFoundError"):  # no user code ran yet: hpcrl's own imports
        raise ConfigError(f"{python} lacks what a job needs ({last}): pip install 'hpcrl[local]' there")
    if not subjects or subjects[-1] or completed.returncode not in (EXIT_DONE, EXIT_USAGE):
        subject = next((name for name in reversed(subjects) if name), "its code cannot be checked")
        raise ConfigError(
            f"recipe {request.shown_recipe!r}: {subject}: the process that checks it "
            f"{describe_end(completed.returncode)}" + f", its last output: {last[-300:]}" * bool(last)
        )
    if completed.returncode:
        hidden = [
            name
            for name in os.environ.keys() - env.keys()
            if len(name) > 2 and re.search(rf"\b{re.escape(name)}\b", answer)
        ]
        hint = f" (jobs do not get {', '.join(sorted(hidden))} of this shell: add it to site.exports)" if hidden else ""
        raise ConfigError(f"recipe {request.shown_recipe!r}: {'; '.join(answer.splitlines())}{hint}")
    return answer.splitlines()


def _run_check(
    command: list[str], request: CampaignRequest, *, timeout_s: float, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[bytes]":
    """Run a check of the recipe, which it reads from its standard input, and end what it leaves behind.

    Its output goes to files: a program that user code starts and leaves would keep pipes open.
    """
    with TemporaryFile() as recipe, TemporaryFile() as out, TemporaryFile() as err:
        recipe.write(msgspec.json.encode(request.recipe))
        recipe.seek(0)
        process = subprocess.Popen(command, stdin=recipe, stdout=out, stderr=err, start_new_session=True, env=env)
        try:
            process.wait(timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, out.read(), err.read())
