"""Plan -> batch script. The only place that makes batch text; the text holds no role logic."""

import shlex
import sys
from collections.abc import Iterable, Sequence

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.site import Site
from hpcrl.config.toml import shipped_folder
from hpcrl.errors import PlanError
from hpcrl.plan.plan import Plan
from hpcrl.system.files import read_json


def make_batch_script(
    plan: Plan, *, campaign: CampaignDir, job: int, python: str, exports: Iterable[tuple[str, str]] = ()
) -> str:
    """The whole script of one job; on a site without a scheduler the same text runs as it is."""
    lines = ["#!/bin/bash"]
    if plan.layout != "local":
        lines += _make_directives(plan, campaign=campaign, job=job)
    lines += ["", "set -eu", "umask 077"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in exports]
    if plan.prologue:
        lines += ["", _read_prologue(plan.prologue).rstrip()]
    driver = [python, "-m", "hpcrl.job.driver", str(campaign.root), str(job)]
    return "\n".join([*lines, "", f"exec {shlex.join(driver)}", ""])


def make_job_script(plan: Plan, *, campaign: CampaignDir, job: int, site: Site) -> str:
    """The same for a campaign that is there, with what its first submission exported."""
    exports = read_json(campaign.manifest)["exports"].items()
    return make_batch_script(plan, campaign=campaign, job=job, python=choose_python(site), exports=exports)


def choose_python(site: Site) -> str:
    """The interpreter of the jobs."""
    return site.python or sys.executable


def make_reward_script(plan: Plan, *, campaign: CampaignDir, job: int, name: str, command: Sequence[str]) -> str:
    """The script of one small job of rewards. Slurm must not begin a preempted one again: the driver does."""
    assert plan.reward_jobs is not None
    log = str(campaign.job(job).log(name)).replace("%", "%%")
    flags = [
        f"--job-name=hpcrl-{campaign.name}-reward",
        f"--time={_format_walltime(plan.reward_jobs.walltime_min)}",
        "--export=ALL",
    ]
    flags += ["--no-requeue", f"--output={_quote_directive(log)}", "--open-mode=append", *plan.reward_jobs.slurm_flags]
    lines = ["#!/bin/bash", *(f"#SBATCH {flag}" for flag in flags), "", "set -eu", "umask 077"]
    if plan.prologue:
        lines += ["", _read_prologue(plan.prologue).rstrip()]
    return "\n".join([*lines, "", f"exec {shlex.join(command)}", ""])


def _make_directives(plan: Plan, *, campaign: CampaignDir, job: int) -> list[str]:
    """The #SBATCH lines: a block for each component, or one for all; output is asked for once, in the first."""
    log = str(campaign.job(job).log("batch")).replace("%", "%%")
    shared = [f"--job-name=hpcrl-{campaign.name}", f"--time={_format_walltime(plan.cost.walltime_min)}", "--export=ALL"]
    shared.append(f"--signal=B:USR2@{int(plan.drain_s)}")
    if plan.survive_node_loss:
        shared.append("--no-kill")
    lines: list[str] = []
    for component in plan.components if plan.layout == "hetjob" else plan.components[:1]:
        if component.index:
            lines.append("#SBATCH hetjob")
        own = [f"--output={_quote_directive(log)}", "--open-mode=append"] if component.index == 0 else []
        lines += [f"#SBATCH {flag}" for flag in (*shared, *own, *component.slurm_flags)]
    return lines


def _format_walltime(minutes: int) -> str:
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def _quote_directive(text: str) -> str:
    """As sbatch reads a directive: plain where it can be, in double quotes where it must."""
    if shlex.quote(text) == text:
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _read_prologue(name: str) -> str:
    path = shipped_folder("jobs") / name
    try:
        return path.read_text()
    except OSError as error:
        raise PlanError(f"the site's prologue {name!r} cannot be read from {path}: {error.strerror}") from error
