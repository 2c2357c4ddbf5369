"""Make batch scripts from a plan. No other module makes batch text, and the text has no role logic.

make_batch_script   the script of one job
make_job_script     the same for an existing campaign
make_reward_script  the script of one reward job
quote_expanding     the quotes of a value in which $NAME is expanded
make_mark           the comment of one job
list_excluded_nodes  the nodes that the next job avoids
list_requests        the components that Slurm is asked for
read_prologue       the text of a site's prologue
find_driver_environment  the site's variables for the driver
EXCLUSION_S         how long a node is avoided
"""

import hashlib
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hpcrl.campaign_dir.job_end import read_job_end
from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.config.site import Site
from hpcrl.config.toml import shipped_folder, user_folder
from hpcrl.errors import PlanError, show_error
from hpcrl.plan.components import EXCLUDE_FLAG, JobComponent
from hpcrl.plan.plan import Plan
from hpcrl.system.files import expand_path, is_file, read_json

EXCLUSION_S = 24 * 3600.0
"""The time for which a node that failed is avoided: it may be repaired."""


def make_batch_script(
    plan: Plan,
    *,
    job: JobDir,
    python: str,
    exports: Iterable[tuple[str, str]] = (),
    environment: Mapping[str, str] | None = None,
    excluded_nodes: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Return the script of one job; a site without a scheduler runs the same text in bash.

    In `environment`, which follows the prologue, $NAME is expanded on the node; `excluded_nodes` are by partition.
    """
    lines = ["#!/bin/bash"]
    if plan.layout != "local":
        lines += _make_directives(plan, job=job, excluded_nodes=excluded_nodes or {})
    lines += ["", "set -eu", "umask 077"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in exports]
    lines += _make_prologue(plan)
    lines += [f"export {name}={quote_expanding(value)}" for name, value in (environment or {}).items()]
    driver = [python, "-m", "hpcrl.job.driver", str(job.campaign.root), str(job.number)]
    return "\n".join([*lines, "", f"exec {shlex.join(driver)}", ""])


def make_job_script(plan: Plan, *, job: JobDir, site: Site) -> str:
    """Return the script of one job of an existing campaign, with the exports of its first submission."""
    exports = read_json(job.campaign.manifest)["exports"].items()
    excluded = list_excluded_nodes(job.campaign, plan=plan, site=site, now=time.time())
    python = site.choose_python(plan.components[0].partition)
    environment = find_driver_environment(plan, site)
    return make_batch_script(
        plan, job=job, python=python, exports=exports, environment=environment, excluded_nodes=excluded
    )


def find_driver_environment(plan: Plan, site: Site) -> dict[str, str]:
    """Return the site's variables for the driver, which is on a node of the first component."""
    offline = {"HF_HUB_OFFLINE": "1"} if site.network.internet_on_compute == "no" else {}
    return offline | site.environment | site.partitions[plan.components[0].partition].environment


def list_excluded_nodes(campaign: CampaignDir, *, plan: Plan, site: Site, now: float) -> dict[str, list[str]]:
    """Map each partition to the nodes that failed in the last jobs, newest first; no more than it can spare."""
    ends = [end for number in reversed(campaign.job_numbers()) if (end := read_job_end(campaign.job(number)))]
    named = dict.fromkeys(node for end in ends if now - end.time < EXCLUSION_S for node in end.nodes)
    needed: Counter[str] = Counter()
    for part in plan.components:
        needed[part.partition] += part.nodes
    return {label: list(named)[: max(site.partitions[label].max_nodes - num, 0)] for label, num in needed.items()}


def make_mark(job: JobDir) -> str:
    """Return the comment by which Slurm's queue shows this job of this campaign, and no other.

    The path of a campaign differs between nodes, and between commands, where it has symbolic links.
    """
    campaign = job.campaign
    origin = os.fspath(campaign.root)  # of a preview
    if campaign.manifest.exists():
        origin = f"{campaign.name}:{read_json(campaign.manifest)['created']}"
    digest = hashlib.blake2b(os.fsencode(origin), digest_size=8).hexdigest()
    return f"hpcrl:{digest}:{job.number}"


def make_reward_script(plan: Plan, *, job: JobDir, name: str, command: Sequence[str]) -> str:
    """Return the script of one reward job. Slurm must not requeue it when it is preempted: the driver replaces it."""
    assert plan.reward_jobs is not None
    log = str(job.log(name)).replace("%", "%%")
    flags = [
        f"--job-name=hpcrl-{job.campaign.name}-reward",
        f"--time={_format_walltime(plan.reward_jobs.walltime_min)}",
        "--export=ALL",
    ]
    flags += ["--no-requeue", f"--output={_quote_directive(log)}", "--open-mode=append", *plan.reward_jobs.slurm_flags]
    lines = ["#!/bin/bash", *(f"#SBATCH {flag}" for flag in flags), "", "set -eu", "umask 077"]
    lines += _make_prologue(plan)
    return "\n".join([*lines, "", f"exec {shlex.join(command)}", ""])


def list_requests(plan: Plan) -> list[JobComponent]:
    """Return the components that Slurm is asked for one by one; the others have nodes of the first."""
    return plan.components if plan.layout == "hetjob" else plan.components[:1]


def _make_directives(plan: Plan, *, job: JobDir, excluded_nodes: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the #SBATCH lines: a block for each component, or one for all; the first block sets the output file."""
    log = str(job.log("batch")).replace("%", "%%")
    name = job.campaign.name
    shared = [f"--job-name=hpcrl-{name}", f"--time={_format_walltime(plan.cost.walltime_min)}", "--export=ALL"]
    shared.append(f"--comment={make_mark(job)}")
    shared += [f"--signal=B:USR2@{int(plan.drain_s)}", "--no-requeue"]  # the next job continues, not this one again
    if plan.survive_node_loss:
        shared.append("--no-kill")
    lines: list[str] = []
    for component in list_requests(plan):
        if component.index:
            lines.append("#SBATCH hetjob")
        own = [f"--output={_quote_directive(log)}", "--open-mode=append"] if component.index == 0 else []
        flags = _exclude_also(component.slurm_flags, excluded_nodes.get(component.partition, ()))
        lines += [f"#SBATCH {flag}" for flag in (*shared, *own, *flags)]
    return lines


def _exclude_also(flags: Sequence[str], nodes: Sequence[str]) -> list[str]:
    """Return the flags of a component with more nodes to avoid: Slurm takes only one such flag."""
    named = [name for flag in flags if flag.startswith(EXCLUDE_FLAG) for name in flag[len(EXCLUDE_FLAG) :].split(",")]
    others = [flag for flag in flags if not flag.startswith(EXCLUDE_FLAG)]
    avoided = list(dict.fromkeys([*nodes, *named]))
    return [*([f"{EXCLUDE_FLAG}{','.join(avoided)}"] if avoided else []), *others]


def quote_expanding(text: str) -> str:
    """Quote a text for bash so that $NAME in it, and nothing else, is expanded."""
    if "$" not in text:
        return shlex.quote(text)
    return '"' + re.sub(r'([\\"`]|\$(?![A-Za-z_{]))', r"\\\1", text) + '"'


def _format_walltime(minutes: int) -> str:
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def _quote_directive(text: str) -> str:
    """Quote a directive as sbatch expects: double quotes, and only where they are needed."""
    if shlex.quote(text) == text:
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _make_prologue(plan: Plan) -> list[str]:
    """Return the lines of the site's prologue; `module` and `conda` fail where unset variables are errors."""
    return ["", "set +eu", read_prologue(plan.prologue).rstrip(), "set -eu"] if plan.prologue else []


def read_prologue(name: str) -> str:
    """Return the text of a prologue, the user's own before a shipped one."""
    own = expand_path(name) if "/" in name else user_folder("jobs") / name
    path = own if "/" in name or is_file(own) else shipped_folder("jobs") / name
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"the site's prologue {name!r} cannot be read from {path} ({show_error(error)}): give its path, or put it "
            f"into {own.parent}"
        ) from error
