"""Plan -> batch script. The only place that makes batch text; the text holds no role logic."""

import shlex
import sys
from collections.abc import Iterable, Sequence

from hpcrl.campaign_dir.paths import RunDir
from hpcrl.config.site import Site
from hpcrl.config.toml import shipped
from hpcrl.errors import PlanError
from hpcrl.plan.plan import Plan
from hpcrl.system.files import read_json


def batch_script(plan: Plan, *, run: RunDir, job: int, python: str, exports: Iterable[tuple[str, str]] = ()) -> str:
    """The whole script of one job; on a site without a scheduler the same text runs as it is."""
    lines = ["#!/bin/bash"]
    if plan.layout != "local":
        lines += _directives(plan, run=run, job=job)
    lines += ["", "set -eu", "umask 077"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in exports]
    if plan.prologue:
        lines += ["", _prologue(plan.prologue).rstrip()]
    driver = [python, "-m", "hpcrl.job.driver", str(run.root), str(job)]
    return "\n".join([*lines, "", f"exec {shlex.join(driver)}", ""])


def script_of_job(plan: Plan, *, run: RunDir, job: int, site: Site) -> str:
    """The same for a campaign that is there, with what its first submission exported."""
    exports = read_json(run.campaign)["exports"].items()
    return batch_script(plan, run=run, job=job, python=python_of(site), exports=exports)


def python_of(site: Site) -> str:
    """The interpreter of the jobs."""
    return site.python or sys.executable


def reward_script(plan: Plan, *, run: RunDir, job: int, name: str, command: Sequence[str]) -> str:
    """The script of one small job of rewards. Slurm must not begin a preempted one again: the driver does."""
    assert plan.reward_jobs is not None
    log = str(run.job(job).log(name)).replace("%", "%%")
    flags = [f"--job-name=hpcrl-{run.name}-reward", f"--time={_clock(plan.reward_jobs.walltime_min)}", "--export=ALL"]
    flags += ["--no-requeue", f"--output={_quoted(log)}", "--open-mode=append", *plan.reward_jobs.slurm_flags]
    lines = ["#!/bin/bash", *(f"#SBATCH {flag}" for flag in flags), "", "set -eu", "umask 077"]
    if plan.prologue:
        lines += ["", _prologue(plan.prologue).rstrip()]
    return "\n".join([*lines, "", f"exec {shlex.join(command)}", ""])


def _directives(plan: Plan, *, run: RunDir, job: int) -> list[str]:
    """The #SBATCH lines: a block for each component, or one for all; output is asked for once, in the first."""
    log = str(run.job(job).log("batch")).replace("%", "%%")
    shared = [f"--job-name=hpcrl-{run.name}", f"--time={_clock(plan.cost.walltime_min)}", "--export=ALL"]
    shared.append(f"--signal=B:USR2@{int(plan.drain_s)}")
    if plan.survive_node_loss:
        shared.append("--no-kill")
    lines: list[str] = []
    for component in plan.components if plan.layout == "hetjob" else plan.components[:1]:
        if component.index:
            lines.append("#SBATCH hetjob")
        own = [f"--output={_quoted(log)}", "--open-mode=append"] if component.index == 0 else []
        lines += [f"#SBATCH {flag}" for flag in (*shared, *own, *component.slurm_flags)]
    return lines


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def _quoted(text: str) -> str:
    """As sbatch reads a directive: plain where it can be, in double quotes where it must."""
    if shlex.quote(text) == text:
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _prologue(name: str) -> str:
    path = shipped("jobs") / name
    try:
        return path.read_text()
    except OSError as error:
        raise PlanError(f"the site's prologue {name!r} cannot be read from {path}: {error.strerror}") from error
