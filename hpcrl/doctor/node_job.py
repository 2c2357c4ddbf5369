"""Short jobs of one or two nodes, one for each partition of a site, that run the checks of nodes.

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

from hpcrl.campaign.directory import find_campaigns_root
from hpcrl.config.site import Site, SitePartition
from hpcrl.doctor.login_checks import run_login_checks
from hpcrl.doctor.node_checks import NodeRequest, run_machine_checks
from hpcrl.doctor.node_meeting import MeetingFiles, collect_links, introduce_nodes, judge_term
from hpcrl.doctor.result import (
    MARKS,
    CheckResult,
    DoctorReport,
    fail_check,
    leave_unknown,
    print_results,
    write_facts,
)
from hpcrl.errors import HpcrlError, SlurmError
from hpcrl.plan.components import PerNode, find_account, list_job_flags, make_memory_flags, make_slurm_flags
from hpcrl.slurm.commands import ask_slurm, cancel_jobs, queue_script
from hpcrl.slurm.script import read_prologue
from hpcrl.slurm.step_script import make_step_script, make_step_setup
from hpcrl.slurm.submit import make_job_environment
from hpcrl.system.files import make_private_dir, publish_file, read_last_line, remove_path
from hpcrl.system.processes import do_nothing
from hpcrl.system.terminal import print_json, print_line, print_to_stderr, show_wait

WALLTIME_MIN = 20
FOLDER_PREFIX = "doctor-"
EXIT_FOUND_FAULTS = 1
NUM_CPUS = 2
MEM_GIB = 2
MAX_ENGINE_MEM_GIB = 32
"""The most memory that a node with a vLLM server is asked for, of a GPU's share of it."""
LINKS_TIMEOUT_S = 60.0
END_TIMEOUT_S = 90.0
"""The time that cancelled jobs may take to end: nodes note for 20 s whether they are still alive."""
RESULT_POLL_INTERVAL_S = 1.0
NUM_NODES = 2
"""The nodes of a partition's job: MPI, files and connections are tried between them."""
ENDLESS_REASONS = ("PartitionDown", "PartitionInactive", "BadConstraints", "AccountNotAllowed", "QOSNotAllowed")
"""Slurm's reasons with which a job does not start, however long the queue is."""
PATIENCE_S = 60.0
"""The time for which nodes that are done wait for jobs in the queue, which may wait for these nodes."""
OLD_S = 86400.0
"""The age at which folders of earlier runs are removed."""
SIGNAL_PATIENCE_S = 20.0
"""The time after which the login node makes the file that a node waits for, if no second one has."""
MEETING_CHECKS = ("routes", "signals")
"""The checks that are unknown where the jobs of partitions have not run at the same time."""


def run_node_jobs(
    site: Site, *, folder: Path, timeout_s: float, show: Callable[[str], object] = do_nothing
) -> list[CheckResult]:
    """Submit the jobs, make the file that each waits for, and return what the nodes found."""
    make_private_dir(folder)
    results, ids = [], {}
    try:
        env = make_job_environment(site, variables=())
    except HpcrlError as error:  # of a prologue
        return [fail_check("node-job", str(error), "correct prologue")]
    for label in site.partitions:
        files = MeetingFiles(folder, label)
        try:
            _write_request(site, files)
            ids[files] = queue_script(files.script, env=env)
            show(f"partition {label}: job {ids[files]}")
        except HpcrlError as error:
            change = f"correct partitions.{label}, so that Slurm accepts a job there"
            results.append(_place(fail_check("node-job", str(error), change), label))
    try:
        states = _await_results(ids, env=env, timeout_s=timeout_s)
        met = [files for files in ids if files.results.exists() and ids[files] in states]
        if met:
            show("the nodes try to reach each other, and are sent SIGTERM: half a minute")
            _await_links(introduce_nodes(met))
    finally:
        cancel_jobs(ids.values(), env=env)
    _await_end(ids.values(), env=env)
    for files, id in ids.items():
        state = states.get(id)
        results += [_place(result, files.label) for result in _read_results(files, state=state, timeout_s=timeout_s)]
        for node in (files, files.second):
            results += [_place(result, node.label) for result in collect_links(node)]
        if files in met:
            results.append(_place(judge_term(files), files.label))
            if not files.links.exists():
                results.append(_place(leave_unknown("routes", "the node has not tried to reach others"), files.label))
        elif files.results.exists():
            why = "its job ended before those of the other partitions ran: try again when queues are shorter"
            results += [_place(leave_unknown(name, why), files.label) for name in MEETING_CHECKS]
    return results


def _await_results(ids: dict[MeetingFiles, str], *, env: dict[str, str], timeout_s: float) -> dict[str, str]:
    """Wait until every node has stored its results, or cannot any more; return the states of the jobs that are left."""
    deadline = time.monotonic() + timeout_s
    blocked_since: float | None = None
    while True:
        waiting = [files for files in ids if not files.results.exists()]
        states = _query_states(ids.values(), env=env)
        done = [ids[files] for files in ids if files not in waiting and ids[files] in states]
        if done and list_blocked([states.get(ids[files], "") for files in waiting]):
            blocked_since = blocked_since or time.monotonic()
            if time.monotonic() - blocked_since > PATIENCE_S:
                cancel_jobs(done, env=env)
        else:
            blocked_since = None
        left = [states[ids[files]] for files in waiting if ids[files] in states]
        if all(any(word in state for word in ENDLESS_REASONS) for state in left) or time.monotonic() > deadline:
            return states
        _make_signals(waiting)
        time.sleep(RESULT_POLL_INTERVAL_S)


def list_blocked(states: list[str]) -> list[str]:
    """Return the states of jobs that may wait for the nodes of those that are done, if no other one runs."""
    if any(state.startswith("RUNNING") for state in states):
        return []
    return [state for state in states if state.startswith("PENDING")]


def _await_links(met: list[MeetingFiles]) -> None:
    """Wait until the nodes have tried to reach each other."""
    deadline = time.monotonic() + LINKS_TIMEOUT_S
    while not all(files.links.exists() for files in met) and time.monotonic() < deadline:
        time.sleep(RESULT_POLL_INTERVAL_S)


def _await_end(ids: Iterable[str], *, env: dict[str, str]) -> None:
    """Wait until cancelled jobs have ended."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while _query_states(ids, env=env) and time.monotonic() < deadline:
        time.sleep(RESULT_POLL_INTERVAL_S)


def make_node_script(site: Site, label: str, *, request: Path, log: Path) -> str:
    """Return the batch script that runs the checks on the nodes of a partition."""
    part = site.partitions[label]
    gpus = part.gpus_per_node if part.exclusive else min(part.gpus_per_node, 1)
    cpus = max(NUM_CPUS, gpus * (part.cores_per_gpu or 0))
    if part.exclusive:
        cpus = part.cores_per_node
    mem_gib = _find_memory(part)
    per_node = PerNode(cpus, mem_gib, gpus)
    num_nodes = min(part.max_nodes, NUM_NODES)
    flags = make_slurm_flags(num_nodes, per_node, label, account=find_account(site, part), site=site)
    flags += [f"--job-name=hpcrl-doctor-{label}", f"--time={WALLTIME_MIN}", "--no-requeue", f"--output={log}"]
    flags += list_job_flags(site, flags)
    prologue, binds = site.choose_prologue(label), [str(request.parent), *site.image_binds]
    step = make_step_script(site, label, driver_prologue=prologue, binds=binds)
    script = request.with_suffix(".step.sh") if step is not None else None
    if script is not None and step is not None:
        publish_file(script, step, mode=0o700)
    setup = make_step_setup(site, label, script=script, binds=binds)
    size = [f"--cpus-per-task={NUM_CPUS * part.threads_per_core}", *make_memory_flags(part, mem_gib)]
    size += ["--gres=gpu:1"] if part.gpus_per_node else []
    python = setup.python or site.choose_python(label)
    start = ["srun", "--nodes=1", "--ntasks=1", *size, "--mpi=none"]
    words = [*setup.srun_flags, *setup.words, python, "-m", "hpcrl.doctor.node_checks", str(request)]
    steps = [shlex.join([*start, "--relative=1", *words, "second"]) + " &"] if num_nodes > 1 else []
    steps.append(shlex.join([*start, "--relative=0", *words]))
    lines = ["#!/bin/bash", *(f"#SBATCH {flag}" for flag in flags), "set -u"]
    if path := os.environ.get("PYTHONPATH"):
        lines.append(f"export PYTHONPATH={shlex.quote(path)}")
    lines += ["set +u", read_prologue(prologue)] if prologue else []
    return "\n".join(
        [*lines, "unset SLURM_CPUS_PER_TASK SLURM_MEM_PER_NODE SLURM_MEM_PER_CPU SLURM_NTASKS SLURM_NPROCS", *steps, ""]
    )


def _find_memory(part: SitePartition) -> int:
    """Return the memory of a node's step: all, or what is enough, and a vLLM server needs more."""
    if part.exclusive:
        return int(part.mem_gib_per_node)
    if not part.gpus_per_node:
        return MEM_GIB
    share = int(part.mem_gib_per_gpu or part.mem_gib_per_node / part.gpus_per_node)
    return max(min(share, MAX_ENGINE_MEM_GIB), MEM_GIB)


def _write_request(site: Site, files: MeetingFiles) -> None:
    label = files.label
    part = site.partitions[label]
    publish_file(files.script, make_node_script(site, label, request=files.request, log=files.log), mode=0o700)
    request = NodeRequest(
        site=site,
        partition=label,
        cpus=NUM_CPUS * part.threads_per_core,
        mem_gib=_find_memory(part) if part.mem_flag else None,
        has_engine=label in list_engine_partitions(site),
    )
    publish_file(files.request, msgspec.json.encode(request))


def list_engine_partitions(site: Site) -> list[str]:
    """List the partitions whose node starts a vLLM server: the first with each kind of GPU, and way to start Python."""
    found: dict[tuple[str | None, str, str | None], str] = {}
    for label, part in site.partitions.items():
        if part.gpus_per_node:
            found.setdefault((part.gpu, site.choose_python(label), site.choose_image(label)), label)
    return list(found.values())


def _make_signals(waiting: list[MeetingFiles]) -> None:
    """Make the files of nodes for which no second node has."""
    for files in waiting:
        looked = files.looked
        if looked.exists() and not files.signal.exists() and time.time() - looked.stat().st_mtime > SIGNAL_PATIENCE_S:
            publish_file(files.signal, str(time.time()))


def _query_states(ids: Iterable[str], *, env: dict[str, str]) -> dict[str, str]:
    """Return the state and the reason of each job that waits or runs; if Slurm does not answer, all do."""
    try:
        rows = ask_slurm(["squeue", "-h", "--me", "-o", "%A %T %r"], env=env).splitlines()
    except SlurmError:
        return dict.fromkeys(ids, "")
    states = {id: state for id, _, state in (row.partition(" ") for row in rows)}
    return {id: states[id] for id in ids if id in states}


def _read_results(files: MeetingFiles, *, state: str | None, timeout_s: float) -> list[CheckResult]:
    """Return what a node has stored, or why it has not; `state` is that of its job when the wait ended."""
    if files.results.exists():
        return msgspec.json.decode(files.results.read_bytes(), type=list[CheckResult])
    log = files.log
    if state is not None and state.startswith("RUNNING"):
        found, change = f"its checks were not finished within {timeout_s:.0f} s", "raise --timeout"
    elif log.exists():
        found = f"the job ended without results: {read_last_line(log)}"
        change = f"see {log}: a prologue, an interpreter or an image that fails on the node"
    else:
        found = f"no job ran within {timeout_s:.0f} s" + (f": it is {state}" if state else "")
        change = "try again when the queue is shorter (--timeout)"
        if any(word in (state or "") for word in ENDLESS_REASONS):
            found, change = f"its job would not start: it is {state}", "wait, or choose another partition"
    return [fail_check("node-job", found, change)]


def _place(result: CheckResult, label: str) -> CheckResult:
    return msgspec.structs.replace(result, place=label)


def _run_in_folder(site: Site, campaigns: Path, *, has_job: bool, timeout_s: float) -> list[CheckResult]:
    """Run the checks of nodes, or of this machine; their files are kept if one has failed, and named."""
    for old in campaigns.glob(f"{FOLDER_PREFIX}*"):
        if time.time() - old.stat().st_mtime > OLD_S:
            remove_path(old)
    folder, is_kept = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=make_private_dir(campaigns))), False
    try:
        if site.scheduler == "local":
            with show_wait("the parts of this machine are tried"):
                found = list(run_machine_checks(site, folder=folder, has_engine=has_job))
        else:
            with show_wait("Slurm starts a job on each partition, which checks its nodes"):
                found = run_node_jobs(site, folder=folder, timeout_s=timeout_s, show=print_to_stderr)
        is_kept = any(result.state == "failed" for result in found) and any(folder.iterdir())
    except KeyboardInterrupt:
        print_to_stderr("interrupted: what it had submitted is cancelled")
        raise
    finally:
        if not is_kept:
            remove_path(folder)
    if is_kept:
        print_to_stderr(f"what they have logged is in {folder}")
    return found


def run_doctor(site: Site, *, has_job: bool, as_json: bool, timeout_s: float, is_changed: bool) -> int:
    """Check a site; the exit code is 1 if a check failed. Nothing is recorded of one that settings have changed."""
    campaigns: Path | None = None
    results: list[CheckResult] = []
    try:
        campaigns = find_campaigns_root(site)
    except HpcrlError as error:
        results.append(fail_check("campaigns-dir", str(error), ""))
    with show_wait(f"this machine and its Slurm are compared with site {site.name}"):
        results += run_login_checks(site, campaigns=campaigns)
    if not as_json:
        print_line(f"{site.name}: {site.description}")
        print_line(f"facts: {', '.join(site.sources) or 'no sources'}, {site.checked_on or 'no date'}")
        print_results(results)
    if campaigns is not None and (has_job or site.scheduler == "local"):
        found = _run_in_folder(site, campaigns, has_job=has_job, timeout_s=timeout_s)
        if not as_json:
            print_results(found)
        results += found
    has_failed = any(result.state == "failed" for result in results)
    if as_json:
        print_json(DoctorReport(site=site.name, time=time.time(), results=results))
    else:
        counts = {state: sum(result.state == state for result in results) for state in MARKS}
        print_line(", ".join(f"{num} {state}" for state, num in counts.items() if num))
    skipped = [one.place for one in results if one.state == "unknown" and one.name in MEETING_CHECKS]
    if has_job and not has_failed and is_changed:
        print_to_stderr("nothing is recorded: the site was changed by -s")
    elif has_job and not has_failed and skipped:
        print_to_stderr(f"the site is not verified: connections and signals of {', '.join(dict.fromkeys(skipped))}")
    elif has_job and not is_changed:
        knows = site.network.internet_on_compute != "unknown"
        path = write_facts(site.name, results, today=date.today(), knows_internet=knows)
        if path is not None:
            print_to_stderr(f"{path}: the site is {'not ' * has_failed}verified now")
    return EXIT_FOUND_FAULTS if has_failed else 0
