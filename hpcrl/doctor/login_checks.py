"""The checks of the login node: what Slurm reports of partitions, accounts and limits, and the files of the jobs.

run_login_checks    all of them
SlurmAnswers, ask_for_answers   what Slurm was asked, once
check_*             one check each: pure, or of one file or program
VERSION_GATES       defects of Slurm up to a version, by the MPI plugin of srun
"""

import errno
import getpass
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from hpcrl.config.site import Site
from hpcrl.doctor.file_checks import check_rates
from hpcrl.doctor.node_meeting import MIN_TERM_S
from hpcrl.doctor.result import CheckResult, fail_check, leave_unknown, pass_check, warn_check
from hpcrl.errors import HpcrlError, PlanError
from hpcrl.plan.components import PerNode, find_account, list_job_flags, make_slurm_flags
from hpcrl.slurm.commands import run_slurm
from hpcrl.slurm.script import read_prologue
from hpcrl.slurm.site_detection import enforces_names, parse_config, parse_gres, parse_partitions
from hpcrl.slurm.submit import REQUIRED_COMMANDS, expand_path, make_site_environment
from hpcrl.system.free_space import find_free_space
from hpcrl.system.network import is_reachable

MAX_TEMPORARY_LENGTH = 39
"""The longest TMPDIR below which the names of unix sockets fit."""
MIN_FREE_GIB = 20.0
MIN_FREE_FILES = 100_000
PYTHON_TIMEOUT_S = 60.0
PROLOGUE_TIMEOUT_S = 60.0
VERSION_GATES = (
    ("cray", (23, 11, 7), "a step of one component fails in a heterogeneous job"),
    ("pmix", (25, 5, 0), "a step of one component may hang in a heterogeneous job"),
)
PYTHON_PROBE = "import hpcrl, parsl, h5py, importlib.util; print(hpcrl.__version__)"
CONTAINER_PROGRAMS = {"bubblewrap": "bwrap", "pyxis": "srun", "container-engine": "srun"}


@dataclass(frozen=True, kw_only=True)
class SlurmAnswers:
    """The answers of Slurm about itself."""

    config: dict[str, str] = field(default_factory=dict)
    partitions: dict[str, dict[str, str]] = field(default_factory=dict)
    nodes: dict[str, list[tuple[int, int, str, int]]] = field(default_factory=dict)
    """CPUs, MiB, and the type and number of GPUs of the kinds of node, by partition."""
    accounts: list[str] = field(default_factory=list)
    qos: list[str] = field(default_factory=list)
    reservations: list[str] = field(default_factory=list)
    licenses: list[str] = field(default_factory=list)


def run_login_checks(site: Site, *, campaigns: Path | None) -> Iterator[CheckResult]:
    """Yield the results, the cheap ones first; without a directory of campaigns it is not looked at."""
    if site.scheduler == "slurm":
        yield (commands := check_commands())
        if commands.state == "ok":
            yield from _check_slurm(site)
    yield from check_flags(site)
    if campaigns is not None:
        yield from check_campaigns_dir(campaigns)
    keys = {"python": site.choose_python(None)}
    keys |= {f"partitions.{label}.python": part.python for label, part in site.partitions.items() if part.python}
    yield from (check_python(python, key=key) for key, python in keys.items())
    prologues = {site.choose_prologue(label) for label in site.partitions}
    yield from (check_prologue(name) for name in sorted(filter(None, prologues)))
    yield from check_image(site)
    yield from check_temporary_dirs(site)
    yield from check_proxy(site)


def _check_slurm(site: Site) -> Iterator[CheckResult]:
    try:
        answers = ask_for_answers(site)
    except HpcrlError as error:
        yield fail_check("slurm", str(error), "run this on a login node whose Slurm answers")
        return
    yield from check_version(answers, site)
    yield from check_partitions(answers, site)
    yield from check_accounts(answers, site)
    yield from check_names(answers, site)
    yield check_kill_wait(answers)
    yield from check_grace(answers, site)


def ask_for_answers(site: Site) -> SlurmAnswers:
    """Ask Slurm once for everything; what it does not answer stays empty."""
    env = {**os.environ, **make_site_environment(site)}

    def ask(*command: str) -> str:
        done = run_slurm(command, env=env)
        return done.stdout if done.returncode == 0 else ""

    nodes: dict[str, list[tuple[int, int, str, int]]] = {}
    for line in ask("sinfo", "-h", "-o", "%R|%c|%m|%G").splitlines():
        name, cpus, memory, gres = line.split("|")
        nodes.setdefault(name, []).append((int(cpus.rstrip("+")), int(memory.rstrip("+")), *parse_gres(gres)))
    user = getpass.getuser()
    return SlurmAnswers(
        config=parse_config(ask("scontrol", "show", "config")),
        partitions=parse_partitions(ask("scontrol", "show", "partition", "-o")),
        nodes=nodes,
        accounts=ask("sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=account").splitlines(),
        qos=re.findall(r"[^,\s]+", ask("sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=qos"))
        or ask("sacctmgr", "-nP", "show", "qos", "format=name").splitlines(),
        reservations=re.findall(r"ReservationName=(\S+)", ask("scontrol", "show", "reservation")),
        licenses=re.findall(r"LicenseName=(\S+)", ask("scontrol", "show", "licenses")),
    )


def check_commands() -> CheckResult:
    """Check that Slurm's commands are installed."""
    missing = [name for name in REQUIRED_COMMANDS if shutil.which(name) is None]
    if missing:
        return fail_check(
            "slurm-commands", f"missing: {', '.join(missing)}", "log in to a login node, or load Slurm's module"
        )
    return pass_check("slurm-commands", ", ".join(REQUIRED_COMMANDS))


def check_version(answers: SlurmAnswers, site: Site) -> Iterator[CheckResult]:
    """Check Slurm's version against the site's and against known defects."""
    text = answers.config.get("SLURM_VERSION", "")
    numbers = tuple(map(int, re.findall(r"\d+", text)[:3]))
    if not numbers:
        yield leave_unknown("slurm-version", "scontrol does not report it")
        return
    wanted = tuple(map(int, re.findall(r"\d+", site.slurm_min or "")))
    if numbers[: len(wanted)] < wanted:
        change = f"check the site file again and set slurm_min = {text!r}"
        yield warn_check("slurm-version", f"{text}, older than slurm_min = {site.slurm_min}", change)
    else:
        yield pass_check("slurm-version", text)
    for plugin, fixed, defect in VERSION_GATES:
        if numbers < fixed and site.het_jobs != "no" and plugin in site.mpi.srun_type:
            found = f"{text}: with --mpi={site.mpi.srun_type} {defect} before {'.'.join(map(str, fixed))}"
            yield warn_check("slurm-defect", found, 'if jobs hang, set het_jobs = "no"')


def check_partitions(answers: SlurmAnswers, site: Site) -> Iterator[CheckResult]:
    """Compare each partition with what Slurm has."""
    for label, part in site.partitions.items():
        name, where = f"partition {label}", f"partitions.{label}"
        if part.slurm_partition is None:
            yield leave_unknown(name, "chosen by constraint and QOS: `hpcrl submit --dry-run` lets Slurm judge it")
            continue
        fields = answers.partitions.get(part.slurm_partition)
        if fields is None:
            known = ", ".join(answers.partitions) or "none"
            change = f"correct {where}.slurm_partition: Slurm has {known}"
            yield fail_check(name, f"Slurm has no partition {part.slurm_partition!r}", change)
            continue
        if fields.get("State") != "UP":
            yield warn_check(name, f"it is {fields.get('State', 'in no state')}", "wait, or choose another partition")
            continue
        allowed = _read_minutes(fields.get("MaxTime", ""))
        if allowed is not None and allowed < part.max_walltime_min:
            change = f"set {where}.max_walltime_min = {allowed}"
            yield fail_check(name, f"walltimes up to {allowed} minutes are allowed", change)
        yield _compare_nodes(label, answers, site)


def _compare_nodes(label: str, answers: SlurmAnswers, site: Site) -> CheckResult:
    part, name, where = site.partitions[label], f"partition {label}", f"partitions.{label}"
    assert part.slurm_partition is not None
    kinds = answers.nodes.get(part.slurm_partition, [])
    with_gpus = [kind for kind in kinds if bool(kind[3]) == bool(part.gpus_per_node)]
    if not kinds:
        return leave_unknown(name, "sinfo reports none of its nodes")
    if not with_gpus:
        found = "no node with GPUs" if part.gpus_per_node else "only nodes with GPUs"
        return fail_check(name, f"Slurm reports {found}", f"correct {where}.gpu and gpus_per_node")
    cpus, memory_mib, gpu, num_gpus = max(with_gpus, key=lambda kind: (kind[3], kind[0]))
    wanted_cpus = part.cores_per_node * part.threads_per_core
    checks = (
        (
            cpus >= wanted_cpus,
            f"{cpus} CPUs a node",
            f"lower {where}.cores_per_node (with threads_per_core: {wanted_cpus})",
        ),
        (
            memory_mib >= part.mem_gib_per_node * 1024,
            f"{memory_mib} MiB a node",
            f"set {where}.mem_gib_per_node = {memory_mib // 1024}",
        ),
        (num_gpus >= part.gpus_per_node, f"{num_gpus} GPUs a node", f"set {where}.gpus_per_node = {num_gpus}"),
        (part.gres_type in (None, gpu), f"GPUs of type {gpu!r}", f"set {where}.gres_type = {gpu!r}"),
    )
    wrong = [(found, change) for is_right, found, change in checks if not is_right]
    if wrong:
        return fail_check(name, ", ".join(found for found, _ in wrong), "; ".join(change for _, change in wrong))
    return pass_check(name, f"{cpus} CPUs, {memory_mib // 1024} GiB, {num_gpus} GPUs {gpu}".rstrip())


def _read_minutes(text: str) -> int | None:
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):\d+", text)
    if found is None:
        return None
    days, hours, minutes = (int(number or 0) for number in found.groups())
    return (days * 24 + hours) * 60 + minutes


def check_accounts(answers: SlurmAnswers, site: Site) -> Iterator[CheckResult]:
    """Check that the user may charge the site's accounts."""
    wanted = {
        part.account or (site.account + part.account_suffix if site.account else None)
        for part in site.partitions.values()
    }
    for account in sorted(filter(None, wanted)):
        if account in answers.accounts:
            yield pass_check("account", account)
        elif answers.accounts:
            yours = ", ".join(dict.fromkeys(answers.accounts))
            problem = f"{account!r} is not yours, or has expired"
            is_enforced = enforces_names(answers.config, "associations")
            yield _refuse_name("account", problem, f"set account to one of: {yours}", is_enforced=is_enforced)
        else:
            yield leave_unknown("account", "sacctmgr reports no account of yours")
    if None in wanted and site.account_required:
        yield fail_check("account", "none is given", f'write account = "..." into your own {site.name}.toml')


def check_names(answers: SlurmAnswers, site: Site) -> Iterator[CheckResult]:
    """Check that QOS, reservations and licences exist."""
    wanted: list[tuple[str, str, list[str]]] = []
    for label, part in site.partitions.items():
        wanted += [(f"partitions.{label}.qos", part.qos, answers.qos)] if part.qos else []
        if part.reservation:
            wanted.append((f"partitions.{label}.reservation", part.reservation, answers.reservations))
    wanted += [("licenses", name.partition(":")[0], answers.licenses) for name in site.licenses]
    for key, name, known in wanted:
        if name in known:
            yield pass_check(key, name)
        elif not known and key.endswith(".qos"):
            yield leave_unknown(key, f"sacctmgr reports no QOS: whether {name!r} is yours is not known")
        else:
            found = ", ".join(dict.fromkeys(known)) or "none"
            is_enforced = not key.endswith(".qos") or enforces_names(answers.config, "qos")
            problem = f"Slurm has no {name!r} for you"
            yield _refuse_name(key, problem, f"correct {key}: there is {found}", is_enforced=is_enforced)


def _refuse_name(key: str, problem: str, change: str, *, is_enforced: bool) -> CheckResult:
    """Fail, or warn of a name that Slurm does not look at when it takes a job."""
    if is_enforced:
        return fail_check(key, problem, change)
    return warn_check(key, f"{problem}; this Slurm takes jobs with any", change)


def check_kill_wait(answers: SlurmAnswers) -> CheckResult:
    """Check the time between SIGTERM and SIGKILL."""
    found = re.match(r"\d+", answers.config.get("KillWait", ""))
    if found is None:
        return leave_unknown("kill-wait", "scontrol does not report KillWait")
    if int(found[0]) < MIN_TERM_S:
        change = "after scancel a checkpoint may not be finished: end campaigns by `hpcrl stop`"
        return warn_check("kill-wait", f"KillWait = {found[0]} s", change)
    return pass_check("kill-wait", f"{found[0]} s")


def check_grace(answers: SlurmAnswers, site: Site) -> Iterator[CheckResult]:
    """Check the time that jobs on preemptible partitions have left."""
    for label, part in site.partitions.items():
        fields = answers.partitions.get(part.slurm_partition or "", {})
        if part.preemptible and fields:
            grace = fields.get("GraceTime", "0")
            if grace == "0":
                change = "what runs there is lost when it is preempted: use it for rewards only"
                yield warn_check(f"grace {label}", "GraceTime = 0", change)
            else:
                yield pass_check(f"grace {label}", f"{grace} s")


def check_campaigns_dir(root: Path) -> Iterator[CheckResult]:
    """Check that campaigns can be stored: by making a folder, writing and syncing small files."""
    existing = next(path for path in (root, *root.parents) if path.exists())
    try:
        rates = list(check_rates(existing))
    except OSError as error:
        change = "set campaigns_dir to a directory of yours on a file system that all nodes share"
        yield fail_check("campaigns-dir", f"{existing}: {error.strerror}", change)
        return
    yield pass_check("campaigns-dir", str(root))
    yield _check_free_space(existing)
    yield from rates


def _check_free_space(existing: Path) -> CheckResult:
    """Check what the file system and the user's quotas leave."""
    free = find_free_space(existing)
    free_gib, place = free.num_bytes / 2**30, f"{existing} (by {free.source})"
    change = "set campaigns_dir to a larger file system, or ask for a higher quota (`hpcrl gc` names what can go)"
    if free_gib < MIN_FREE_GIB:
        return warn_check("free-space", f"{free_gib:.3g} GiB in {place}", change)
    if free.num_files < MIN_FREE_FILES:
        return warn_check("free-space", f"room for {free.num_files:.0f} files in {place}", change)
    return pass_check("free-space", f"{free_gib:.0f} GiB")


def check_flags(site: Site) -> Iterator[CheckResult]:
    """Check that no further flag contradicts what hpcrl asks Slurm for."""
    for label, part in site.partitions.items() if site.scheduler == "slurm" else ():
        size = PerNode(cpus=1, mem_gib=1, gpus=min(part.gpus_per_node, 1))
        try:
            list_job_flags(site, make_slurm_flags(1, size, label, account=find_account(site, part), site=site))
        except PlanError as error:
            yield fail_check(f"partition {label}", str(error), "remove the flag")


def check_python(python: str, *, key: str = "python") -> CheckResult:
    """Check that an interpreter of the jobs has hpcrl and what a driver needs; `key` names it in the site file."""
    if python.startswith("/") and not Path(python).exists():
        return fail_check("python", f"{key}: {python} does not exist here", f"correct {key}")
    change = f"install hpcrl there (`{python} -m pip install 'hpcrl[local]'`), or correct {key}"
    try:
        done = subprocess.run(
            [python, "-c", PYTHON_PROBE], capture_output=True, text=True, timeout=PYTHON_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOEXEC:  # of nodes with another kind of processor
            return warn_check(
                "python", f"{python} is not for this machine: `hpcrl doctor --job` runs it on its nodes", ""
            )
        return fail_check("python", f"{python} does not run here: {error}", change)
    if done.returncode:
        return fail_check("python", f"{python}: {done.stderr.strip().rpartition(chr(10))[2]}", change)
    return pass_check("python", f"{python} has hpcrl {done.stdout.strip()}")


def check_prologue(name: str) -> CheckResult:
    """Check that a prologue can be read, and what it does here."""
    try:
        text = read_prologue(name)
    except PlanError as error:
        return fail_check("prologue", str(error), "give its path, or put it into ~/.config/hpcrl/jobs/")
    syntax = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    if syntax.returncode:
        return fail_check("prologue", f"{name}: {syntax.stderr.strip()}", "correct the file")
    script = f"set +eu\n{text}\ntrue"
    try:
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, timeout=PROLOGUE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return fail_check(
            "prologue", f"{name} does not end within {PROLOGUE_TIMEOUT_S:g} s", "it must not wait for input"
        )
    if done.returncode:
        return fail_check(
            "prologue", f"{name} ends the script with {done.returncode}", "remove `exit` and `exec` from it"
        )
    if done.stderr.strip():
        return warn_check(
            "prologue", f"{name} prints: {done.stderr.strip().splitlines()[-1]}", "see whether that is meant"
        )
    return pass_check("prologue", name)


def check_image(site: Site) -> Iterator[CheckResult]:
    """Check that images exist, and the program that runs them."""
    images = sorted({image for label in site.partitions if (image := site.choose_image(label))})
    if not images or site.container is None:
        return
    program = CONTAINER_PROGRAMS.get(site.container, site.container)
    if shutil.which(program) is None:
        change = "it may be on the nodes alone (`--job` sees that); else correct `container`"
        yield warn_check("container", f"{program} is not on PATH here", change)
    else:
        yield pass_check("container", program)
    for image in images:
        if "/" not in image or "://" in image:
            continue
        try:
            path = Path(expand_path(image))
        except HpcrlError as error:
            yield fail_check("image", str(error), "export the variable, or write the path out")
            continue
        if path.exists():
            yield pass_check("image", str(path))
        else:
            yield fail_check("image", f"{path} does not exist", "build it, or correct `image`")


def check_temporary_dirs(site: Site) -> Iterator[CheckResult]:
    """Check that unix sockets fit below the directories of temporary files."""
    named = {part.temporary_dir or site.temporary_dir for part in site.partitions.values()}
    for folder in sorted(filter(None, named)):
        length = len(os.path.expandvars(folder))
        if length > MAX_TEMPORARY_LENGTH:
            change = (
                f"set temporary_dir to one of at most {MAX_TEMPORARY_LENGTH} characters: names of sockets end at 107"
            )
            yield fail_check("temporary-dir", f"{folder} has {length} characters", change)


def check_proxy(site: Site) -> Iterator[CheckResult]:
    """Check that the proxy of the site's variables answers."""
    for name in ("https_proxy", "HTTPS_PROXY", "http_proxy", "all_proxy"):
        address = urlsplit(site.environment.get(name, ""))
        if address.hostname is None:
            continue
        port = address.port or 3128
        if is_reachable(address.hostname, port):
            yield pass_check("proxy", f"{address.hostname}:{port}")
        else:
            change = f"correct environment.{name}, or stage files first and set HF_HUB_OFFLINE"
            yield warn_check("proxy", f"{address.hostname}:{port} does not answer here", change)
        return
    if site.network.internet_on_compute == "proxy":
        change = "set environment.https_proxy to it"
        yield warn_check("proxy", 'network.internet_on_compute = "proxy", and no proxy is named', change)
