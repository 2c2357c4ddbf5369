"""Make batch scripts from a plan. No other module makes batch text, and the text has no role logic.

make_batch_script   the script of one job
make_job_script     the same for an existing campaign
make_component_script  the script of the job of a component, in the layout "multi-job"
make_reward_script  the script of one reward job
quote_expanding     the quotes of a value in which $NAME is expanded
make_mark           the comment of one job
list_excluded_nodes  the nodes that the next job avoids
list_requests        the components that Slurm is asked for
list_separate_components  those that are jobs of their own
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
    directives = _make_directives(plan, job=job, excluded_nodes=excluded_nodes or {}) if plan.layout != "local" else []
    driver = [python, "-m", "hpcrl.job.driver", str(job.campaign.root), str(job.number)]
    return _join_script(
        directives, exports=exports, prologue=plan.prologue, environment=environment or {}, command=driver
    )


def make_job_script(plan: Plan, *, job: JobDir, site: Site) -> str:
    """Return the script of one job of an existing campaign, with the exports of its first submission."""
    exports = read_json(job.campaign.manifest)["exports"].items()
    excluded = list_excluded_nodes(job.campaign, plan=plan, site=site, now=time.time())
    python = site.choose_python(plan.components[0].partition)
    environment = find_driver_environment(plan, site)
    return make_batch_script(
        plan, job=job, python=python, exports=exports, environment=environment, excluded_nodes=excluded
    )


def make_component_script(
    plan: Plan,
    component: JobComponent,
    *,
    job: JobDir,
    site: Site,
    exports: Iterable[tuple[str, str]] = (),
    excluded_nodes: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Return the script of a job that holds the nodes of a component; where it waits too long it is queued again."""
    log = str(job.log(f"component-{component.index}")).replace("%", "%%")
    flags = _list_shared_flags(plan, job=job, mark=make_mark(job, component=component.index))
    flags += ["--requeue", f"--output={_quote_directive(log)}", "--open-mode=append"]
    flags += _exclude_also(component.slurm_flags, (excluded_nodes or {}).get(component.partition, ()))
    python = site.choose_python(component.partition)
    holder = [python, "-m", "hpcrl.job.component_holder", str(job.campaign.root), str(job.number)]
    return _join_script(
        [f"#SBATCH {flag}" for flag in flags],
        exports=exports,
        prologue=site.choose_prologue(component.partition),
        environment=site.environment | site.partitions[component.partition].environment,
        command=[*holder, str(component.index)],
    )


def _join_script(
    directives: Sequence[str],
    *,
    exports: Iterable[tuple[str, str]],
    prologue: str | None,
    environment: Mapping[str, str],
    command: Sequence[str],
) -> str:
    lines = ["#!/bin/bash", *directives, "", "set -eu", "umask 077"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in exports]
    lines += _make_prologue(prologue)
    lines += [f"export {name}={quote_expanding(value)}" for name, value in environment.items()]
    return "\n".join([*lines, "", f"exec {shlex.join(command)}", ""])


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


def make_mark(job: JobDir, *, component: int = 0) -> str:
    """Return the comment by which Slurm's queue shows this job of this campaign, and no other.

    The path of a campaign differs between nodes, and between commands, where it has symbolic links.
    """
    campaign = job.campaign
    origin = os.fspath(campaign.root)  # of a preview
    if campaign.manifest.exists():
        origin = f"{campaign.name}:{read_json(campaign.manifest)['created']}"
    digest = hashlib.blake2b(os.fsencode(origin), digest_size=8).hexdigest()
    return f"hpcrl:{digest}:{job.number}" + (f":{component}" if component else "")


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
    directives = [f"#SBATCH {flag}" for flag in flags]
    return _join_script(directives, exports=(), prologue=plan.prologue, environment={}, command=command)


def list_requests(plan: Plan) -> list[JobComponent]:
    """Return the components that Slurm is asked for one by one; the others have nodes of the first."""
    return [*_list_joint_components(plan), *list_separate_components(plan)]


def list_separate_components(plan: Plan) -> list[JobComponent]:
    """Return the components that are jobs of their own, beside the first one with the driver."""
    return plan.components[1:] if plan.layout == "multi-job" else []


def _list_joint_components(plan: Plan) -> list[JobComponent]:
    """Return the components that the job with the driver asks for."""
    return plan.components if plan.layout == "hetjob" else plan.components[:1]


def _make_directives(plan: Plan, *, job: JobDir, excluded_nodes: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the #SBATCH lines: a block for each component, or one for all; the first block sets the output file."""
    log = str(job.log("batch")).replace("%", "%%")
    shared = _list_shared_flags(plan, job=job, mark=make_mark(job))
    shared[4:4] = [f"--signal=B:USR2@{int(plan.drain_s)}", "--no-requeue"]  # the next job continues, not this one again
    lines: list[str] = []
    for component in _list_joint_components(plan):
        if component.index:
            lines.append("#SBATCH hetjob")
        own = [f"--output={_quote_directive(log)}", "--open-mode=append"] if component.index == 0 else []
        flags = _exclude_also(component.slurm_flags, excluded_nodes.get(component.partition, ()))
        lines += [f"#SBATCH {flag}" for flag in (*shared, *own, *flags)]
    return lines


def _list_shared_flags(plan: Plan, *, job: JobDir, mark: str) -> list[str]:
    """Return the flags of every component, and of every job of one."""
    name, walltime = job.campaign.name, _format_walltime(plan.cost.walltime_min)
    flags = [f"--job-name=hpcrl-{name}", f"--time={walltime}", "--export=ALL", f"--comment={mark}"]
    return [*flags, "--no-kill"] if plan.survive_node_loss else flags


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


def _make_prologue(prologue: str | None) -> list[str]:
    """Return the lines of the site's prologue; `module` and `conda` fail where unset variables are errors."""
    return ["", "set +eu", read_prologue(prologue).rstrip(), "set -eu"] if prologue else []


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
