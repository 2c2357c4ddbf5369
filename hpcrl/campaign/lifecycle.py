"""Campaigns, seen from the login node: create, submit, list, stop, resume. Light: no torch, parsl, h5py, mpi4py."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from hpcrl.campaign import directory
from hpcrl.campaign_dir.paths import SPOOLS, JobDir, RunDir
from hpcrl.config.recipe import Recipe, load_recipe
from hpcrl.config.site import Site, load_site
from hpcrl.errors import CampaignError, ConfigError
from hpcrl.plan.plan import Plan, make_plan
from hpcrl.slurm import submit as slurm
from hpcrl.slurm.script import batch_script, python_of, script_of_job
from hpcrl.system.files import discard, private_dir, publish, publish_json, read_json
from hpcrl.system.processes import is_alive

T = TypeVar("T")
CHECK_TIMEOUT_S = 120
ENDING_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks for, checked: recipe and site, and the plan that maps one to the other."""

    recipe: Recipe
    site: Site
    plan: Plan


def request(recipe: str, *, site: str, settings: tuple[str, ...] = ()) -> Request:
    """Load and plan. Settings are `key=value` of the recipe, or `site.key=value` of the site."""
    of_site = tuple(s.removeprefix("site.") for s in settings if s.startswith("site."))
    of_recipe = tuple(s for s in settings if not s.startswith("site."))
    loaded = _with_absolute_model(load_recipe(recipe, settings=of_recipe))
    where = load_site(site, settings=of_site)
    return Request(recipe=loaded, site=where, plan=make_plan(loaded, where))


def _with_absolute_model(recipe: Recipe) -> Recipe:
    """Workers run elsewhere: a relative path would mean another directory there."""
    if recipe.model.path is None:
        return recipe
    path = Path(recipe.model.path).expanduser().absolute()
    return msgspec.structs.replace(recipe, model=msgspec.structs.replace(recipe.model, path=str(path)))


def script_of(asked: Request, *, name: str) -> str:
    """The batch script as `hpcrl plan` shows it; submitting only fills in the campaign's own path."""
    run = RunDir(directory.shown_root(asked.site) / name)
    return batch_script(asked.plan, run=run, job=0, python=python_of(asked.site), exports=_exports().items())


def submit(asked: Request, *, name: str | None = None) -> RunDir:
    """Check the user's code, make the campaign's directory, submit its first job; on failure leave nothing."""
    check(asked)
    run = directory.reserve(name, stem=asked.recipe.name, site=asked.site)
    try:
        _describe(run, asked)
        _start_job(run, asked, number=0)
    except BaseException:
        directory.release(run)
        raise
    return run


def dry_run(asked: Request) -> str:
    """Everything that submitting checks, and Slurm's own opinion where there is one; nothing is left behind."""
    check(asked)
    if asked.site.scheduler == "local":
        return "nothing to ask: the site has no scheduler"
    run = directory.reserve(None, stem=asked.recipe.name, site=asked.site)
    try:
        _describe(run, asked)
        job = _job_dir(run, 0)
        publish(job.script, script_of(asked, name=run.name), mode=0o700)
        return slurm.test_only(job.script, site=asked.site)
    finally:
        directory.release(run)


def check(asked: Request) -> None:
    """Everything that would only fail in the job, or in the queue."""
    model = asked.recipe.model.path
    if model is not None and not (Path(model) / "config.json").is_file():
        raise ConfigError(f"model.path = {model!r} is not a model directory: it has no config.json")
    if asked.site.scheduler == "slurm":
        slurm.require_slurm(asked.site)
        slurm.site_environment(asked.site)
    _check_user_code(asked)


def _check_user_code(asked: Request) -> None:
    """Import environments and rewards with the interpreter of the jobs, before anything is queued."""
    command = [python_of(asked.site), "-m", "hpcrl.envs.check"]
    try:
        done = subprocess.run(
            command,
            input=msgspec.json.encode(asked.recipe),
            capture_output=True,
            check=False,
            timeout=CHECK_TIMEOUT_S,
        )
    except OSError as error:
        raise ConfigError(f"the site's python {command[0]!r} cannot be run here: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"importing the environments of recipe {asked.recipe.name!r} took over {CHECK_TIMEOUT_S} s: "
            "importing must be quick; open files and start servers in reset()"
        ) from error
    if done.returncode:
        if message := "; ".join(done.stdout.decode(errors="replace").splitlines()):
            raise ConfigError(f"recipe {asked.recipe.name!r}: {message}")
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["its code cannot be checked"]
        if lines[-1].startswith("ModuleNotFoundError"):  # our own: what a user's code lacks is told by the check
            raise ConfigError(f"{command[0]} lacks what a job needs ({lines[-1]}): pip install 'hpcrl[local]' there")
        raise ConfigError(f"recipe {asked.recipe.name!r}: {lines[-1]}")


def resume(name: str) -> RunDir:
    """Go on from the last checkpoint in a new job."""
    run = directory.find(name)
    asked = Request(recipe=_read(run.recipe, Recipe), site=_read(run.site, Site), plan=_read(run.plan, Plan))
    number = run.job_numbers()[-1]
    _refuse_while_alive(run, run.job(number), asked.site)
    discard(run.stop)
    _start_job(run, asked, number=number + 1)
    return run


def _refuse_while_alive(run: RunDir, job: JobDir, site: Site) -> None:
    """Two jobs of one campaign at once would train twice on the same trajectories."""
    outcome = read_json(job.outcome)["outcome"] if job.outcome.exists() else None
    if outcome == "done":
        raise CampaignError(f"campaign {run.name!r} is done: there is nothing to resume")
    state = _state(job, site)
    deadline = time.monotonic() + ENDING_S
    while outcome is not None and state == "running" and time.monotonic() < deadline:
        time.sleep(0.5)  # it has said how it ended, and is about to be gone
        state = _state(job, site)
    if state in ("queued", "running"):
        cure = f"`hpcrl monitor {run.name}` shows it, `hpcrl stop {run.name}` ends it"
        raise CampaignError(f"campaign {run.name!r}: job {submitted(job).id} is {state}: {cure}")
    if state == "unknown" and outcome is None:
        raise CampaignError(
            f"campaign {run.name!r}: Slurm does not say what became of job {submitted(job).id}: try again later, "
            f"or, if you know that it is gone, `hpcrl stop --now {run.name}` first"
        )


def stop_gracefully(name: str) -> str:
    """Ask a campaign to make a checkpoint and end; returns what was done. A job that is only queued is cancelled."""
    run = directory.find(name)
    if (ended := _describe_end(run)) is not None:
        return ended
    job, site = _request_stop(run)
    if site.scheduler == "slurm" and _state(job, site) == "queued":
        return _end_job(run, job, site)
    return f"campaign {run.name} is asked to stop: it makes a checkpoint and ends (`hpcrl monitor {run.name}` shows it)"


def stop_now(name: str) -> str:
    """End a campaign without a checkpoint; returns what was done."""
    run = directory.find(name)
    return _describe_end(run) or _end_job(run, *_request_stop(run))


def _describe_end(run: RunDir) -> str | None:
    """The text for a campaign that has ended already; None if its last job may still run."""
    last = run.job(run.job_numbers()[-1])
    if not last.outcome.exists():
        return None
    outcome = read_json(last.outcome)
    return f"campaign {run.name} has ended already ({outcome['outcome']}: {outcome['reason']})"


def _request_stop(run: RunDir) -> tuple[JobDir, Site]:
    """Publish the wish to stop, and cancel a job that only waits for the running one; returns the job that is left."""
    publish(run.stop, "")
    *before, last = map(run.job, run.job_numbers())
    site = _read(run.site, Site)
    if last.follows.exists() and not before[-1].outcome.exists() and _state(last, site) == "queued":
        slurm.cancel(submitted(last), site=site)
        discard(last.root)
        last = before[-1]
    return last, site


def _end_job(run: RunDir, job: JobDir, site: Site) -> str:
    """End a job without a checkpoint: it is interrupted, and cancelled by its recorded id if it does not end."""
    resumable = f"`hpcrl resume {run.name}` goes on from the last checkpoint"
    if _state(job, site) == "running":
        slurm.interrupt(submitted(job), site=site)
        deadline = time.monotonic() + ENDING_S
        while not job.outcome.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        if job.outcome.exists():
            return f"campaign {run.name}: job {submitted(job).id} has ended; {resumable}"
    slurm.cancel(submitted(job), site=site)
    publish_json(job.outcome, {"outcome": "stopped", "reason": "cancelled (hpcrl stop --now)", "time": time.time()})
    return f"campaign {run.name}: job {submitted(job).id} is cancelled; {resumable}"


def closing_words(run: RunDir, *, state: str, rewards: Sequence[float | None]) -> list[str]:
    """What was done, where it lies, and what to try next."""
    hpcrl = _command()
    seen = [reward for reward in rewards if reward is not None]
    learned = f": mean reward {seen[0]:.2f} -> {seen[-1]:.2f} in {len(rewards)} steps" if seen else ""
    if state in ("queued", "running", "draining"):
        return [f"campaign {run.name} goes on; `{hpcrl} monitor {run.name}` shows it again"]
    if state != "done":
        cure = f"see `{hpcrl} logs {run.name}`, then `{hpcrl} resume {run.name}`"
        return [f"campaign {run.name} ended as {state}{learned}; {cure}"]
    if site_of(run).scheduler == "local":
        elsewhere = ("plan quickstart --site lab", "the same as a heterogeneous Slurm job; `lab up` makes a Slurm here")
    else:
        elsewhere = ("plan quickstart --site perlmutter -s site.account=m1234", "the same on a large machine")
    commands = [
        (f"monitor {run.name} --once", "how it went"),
        (f"traj show {run.name} --best", "what the model says now"),
        elsewhere,
    ]
    width = max(len(command) for command, _ in commands)
    return [
        f"campaign {run.name} is done{learned}",
        f"  in            {run.root}",
        f"  weights       {run.weights}",
        f"  checkpoints   {run.checkpoints}",
        f"  trajectories  {run.spool('scored')}",
        "next:",
        *(f"  {hpcrl} {command:<{width}}   # {why}" for command, why in commands),
    ]


def _command() -> str:
    """How the user calls hpcrl: by name where that works, else as it was just called."""
    called = Path(sys.argv[0])
    return os.path.relpath(called) if called.name == "hpcrl" and not shutil.which("hpcrl") else "hpcrl"


def submitted(job: JobDir) -> slurm.Submitted:
    """What is recorded of a job."""
    return _read(job.submitted, slurm.Submitted)


def site_of(run: RunDir) -> Site:
    """The site that a campaign runs on, as it was resolved at its submission."""
    return _read(run.site, Site)


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise CampaignError(
            f"{path} cannot be read ({error}): the campaign is damaged or of another version"
        ) from error


def _state(job: JobDir, site: Site) -> str:
    """queued, running, gone or unknown: what the scheduler says of a job."""
    record = submitted(job)
    if record.scheduler == "local":
        return "running" if is_alive(record.pid, record.start_ticks) else "gone"
    from hpcrl.slurm.status import ACTIVE, UNKNOWN, WAITING, job_states

    match job_states([record.id], env=os.environ | slurm.site_environment(site))[record.id].state:
        case state if state in WAITING:
            return "queued"
        case state if state in ACTIVE:
            return "running"
        case state if state == UNKNOWN:
            return "unknown"
    return "gone"


def _start_job(run: RunDir, asked: Request, *, number: int) -> None:
    job = _job_dir(run, number)
    try:
        script = script_of_job(asked.plan, run=run, job=number, site=asked.site)
        slurm.submit(script, job=job, site=asked.site)
    except BaseException:
        discard(job.root)
        raise


def _job_dir(run: RunDir, number: int) -> JobDir:
    job = run.job(number)
    private_dir(run.jobs)
    try:
        job.root.mkdir(mode=0o700)
    except FileExistsError:
        raise CampaignError(f"campaign {run.name!r}: job {number} is being submitted by somebody else") from None
    private_dir(job.logs)
    return job


def _describe(run: RunDir, asked: Request) -> None:
    """What was asked, as it was resolved; campaign.json comes last and makes it a campaign."""
    for folder in _folders(run):
        private_dir(folder)
    for path, value in ((run.recipe, asked.recipe), (run.site, asked.site)):
        publish(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    publish(run.plan, asked.plan.to_json())
    named = {"name": run.name, "recipe": asked.recipe.name, "site": asked.site.name}
    publish_json(run.campaign, {**named, "created": time.time(), "exports": _exports()})


def _folders(run: RunDir) -> list[Path]:
    spools = [run.spool(name) for name in SPOOLS]
    return [run.events, run.endpoints, run.weights, run.checkpoints, run.task_blocks, *spools]


def _exports() -> dict[str, str]:
    """What jobs, also resumed ones, need from the submitting shell to find the user's own code."""
    path = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(str(Path(p).absolute()) for p in path.split(os.pathsep))} if path else {}
