"""Short jobs of one node, one for each partition of a site, that run the checks of nodes.

run_doctor        check a site, also by such jobs, print the results, and return the exit code
run_node_jobs     submit them, wait for them, and return the results
make_node_script  the batch script of one
"""

import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path

import msgspec

from hpcrl.campaign.directory import show_campaigns_root
from hpcrl.config.site import Site
from hpcrl.doctor.login_checks import run_login_checks
from hpcrl.doctor.node_checks import NodeRequest
from hpcrl.doctor.result import MARKS, CheckResult, DoctorReport, fail_check, print_results, write_facts
from hpcrl.errors import ConfigError, HpcrlError, SlurmError
from hpcrl.plan.components import PerNode, find_account, make_slurm_flags
from hpcrl.slurm.commands import ask_slurm, cancel_jobs, queue_script
from hpcrl.slurm.script import read_prologue
from hpcrl.slurm.step_script import make_step_script, make_step_setup
from hpcrl.slurm.submit import make_site_environment
from hpcrl.system.files import make_private_dir, publish_file, read_last_line, remove_path
from hpcrl.system.processes import do_nothing
from hpcrl.system.terminal import print_json, print_line, print_to_stderr, show_wait

WALLTIME_MIN = 10
EXIT_FOUND_FAULTS = 1
NUM_CPUS = 2
MEM_GIB = 2
RESULT_POLL_INTERVAL_S = 1.0
SIGNAL_DELAY_S = 3.0
"""The time between a node's first look for a file and the making of it: file systems remember that it was absent."""


def run_node_jobs(
    site: Site, *, folder: Path, timeout_s: float, show: Callable[[str], object] = do_nothing
) -> list[CheckResult]:
    """Submit the jobs, make the file that each waits for, and return what the nodes found."""
    env = {**os.environ, **make_site_environment(site)}
    make_private_dir(folder)
    results, ids = [], {}
    for label in site.partitions:
        try:
            ids[label] = queue_script(_write_request(site, label, folder=folder), env=env)
            show(f"partition {label}: job {ids[label]}")
        except HpcrlError as error:
            change = f"correct partitions.{label}, so that Slurm accepts a job there"
            results.append(_place(fail_check("node-job", str(error), change), label))
    deadline = time.monotonic() + timeout_s
    try:
        while waiting := [label for label in ids if not _find_results(folder, label).exists()]:
            _make_signals(folder, waiting)
            if time.monotonic() > deadline or not _are_alive(ids.values(), env=env):
                break
            time.sleep(RESULT_POLL_INTERVAL_S)
    finally:
        cancel_jobs(ids.values(), env=env)
    for label in ids:
        results += _read_results(folder, label, timeout_s=timeout_s)
    return results


def make_node_script(site: Site, label: str, *, request: Path, log: Path) -> str:
    """Return the batch script that runs the checks on a node of a partition."""
    part = site.partitions[label]
    gpus = part.gpus_per_node if part.exclusive else min(part.gpus_per_node, 1)
    cpus = max(NUM_CPUS, gpus * (part.cores_per_gpu or 0))
    if part.exclusive:
        cpus = part.cores_per_node
    per_node = PerNode(cpus, MEM_GIB, gpus)
    flags = make_slurm_flags(1, per_node, part, account=find_account(site, part), site=site)
    flags += [f"--job-name=hpcrl-doctor-{label}", f"--time={WALLTIME_MIN}", "--no-requeue", f"--output={log}"]
    flags += [f"--licenses={','.join(site.licenses)}"] if site.licenses else []
    prologue, binds = site.choose_prologue(label), [str(request.parent), *site.image_binds]
    step = make_step_script(site, label, driver_prologue=prologue, binds=binds)
    script = request.with_suffix(".step.sh") if step is not None else None
    if script is not None and step is not None:
        publish_file(script, step, mode=0o700)
    setup = make_step_setup(site, label, script=script, binds=binds)
    size = [f"--cpus-per-task={NUM_CPUS * part.threads_per_core}"]
    size += [f"--mem={MEM_GIB}G"] if part.mem_flag and not part.exclusive else []
    size += ["--gres=gpu:1"] if part.gpus_per_node else []
    python = setup.python or site.choose_python(label)
    command = ["srun", "--nodes=1", "--ntasks=1", *size, "--mpi=none", *setup.srun_flags, *setup.words]
    command += [python, "-m", "hpcrl.doctor.node_checks", str(request)]
    lines = ["#!/bin/bash", *(f"#SBATCH {flag}" for flag in flags), "set -u"]
    if path := os.environ.get("PYTHONPATH"):
        lines.append(f"export PYTHONPATH={shlex.quote(path)}")
    lines += ["set +u", read_prologue(prologue)] if prologue else []
    return "\n".join(
        [*lines, "unset SLURM_CPUS_PER_TASK SLURM_MEM_PER_NODE SLURM_MEM_PER_CPU", shlex.join(command), ""]
    )


def _write_request(site: Site, label: str, *, folder: Path) -> Path:
    path, script = folder / f"{label}.json", folder / f"{label}.sh"
    part = site.partitions[label]
    publish_file(script, make_node_script(site, label, request=path, log=folder / f"{label}.log"), mode=0o700)
    request = NodeRequest(
        site=site,
        partition=label,
        cpus=NUM_CPUS * part.threads_per_core,
        signal_file=str(folder / f"{label}.signal"),
        script=str(script),
    )
    publish_file(path, msgspec.json.encode(request))
    return script


def _make_signals(folder: Path, labels: list[str]) -> None:
    """Make the files of the nodes that have looked for theirs long enough."""
    for label in labels:
        looked, signal_file = folder / f"{label}.looked", folder / f"{label}.signal"
        if looked.exists() and not signal_file.exists() and time.time() - looked.stat().st_mtime > SIGNAL_DELAY_S:
            publish_file(signal_file, str(time.time()))


def _are_alive(ids: Iterable[str], *, env: dict[str, str]) -> bool:
    """Return whether one of the jobs waits or runs; True if Slurm does not answer."""
    try:
        states = ask_slurm(["squeue", "-h", "--me", "-o", "%A"], env=env).split()
    except SlurmError:
        return True
    return any(id in states for id in ids)


def _read_results(folder: Path, label: str, *, timeout_s: float) -> list[CheckResult]:
    path = _find_results(folder, label)
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=list[CheckResult])
    log = folder / f"{label}.log"
    if log.exists():
        found = f"the job ended without results: {read_last_line(log)}"
        change = f"see {log}: a prologue, an interpreter or an image that fails on the node"
    else:
        found = f"no job ran within {timeout_s:.0f} s"
        change = "try again when the queue is shorter (--timeout)"
    return [_place(fail_check("node-job", found, change), label)]


def _find_results(folder: Path, label: str) -> Path:
    return folder / f"{label}.results"


def _place(result: CheckResult, label: str) -> CheckResult:
    return msgspec.structs.replace(result, place=label)


def run_doctor(site: Site, *, has_job: bool, as_json: bool, timeout_s: float) -> int:
    """Check a site; the exit code is 1 if a check failed."""
    campaigns = show_campaigns_root(site)
    with show_wait(f"this machine and its Slurm are compared with site {site.name}"):
        results = list(run_login_checks(site, campaigns=campaigns))
    if not as_json:
        print_line(f"{site.name}: {site.description}")
        print_line(f"facts: {', '.join(site.sources) or 'no sources'}, {site.checked_on or 'no date'}")
        print_results(results)
    if has_job:
        if site.scheduler != "slurm":
            raise ConfigError(f"site {site.name!r} has no Slurm, so that no job can check its nodes: leave out --job")
        folder = Path(tempfile.mkdtemp(prefix="doctor-", dir=make_private_dir(campaigns)))
        with show_wait("Slurm starts a job on each partition, which checks its node"):
            found = run_node_jobs(site, folder=folder, timeout_s=timeout_s, show=print_to_stderr)
        if all(result.name != "node-job" for result in found):
            remove_path(folder)
        if not as_json:
            print_results(found)
        results += found
    has_failed = any(result.state == "failed" for result in results)
    if as_json:
        print_json(DoctorReport(site=site.name, time=time.time(), results=results))
    else:
        counts = {state: sum(result.state == state for result in results) for state in MARKS}
        print_line(", ".join(f"{num} {state}" for state, num in counts.items() if num))
    if has_job and not has_failed:
        path = write_facts(site.name, results, today=date.today())
        print_to_stderr(f"{path}: the site is verified now")
    return EXIT_FOUND_FAULTS if has_failed else 0
