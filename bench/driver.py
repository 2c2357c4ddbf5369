"""Measure the driver of a job with 4,096 workers, and with 64: `python -m bench.driver`.

A real driver runs a heterogeneous job, half of its workers env workers and half engines, with Parsl's executors and
their interchanges. Only the cluster is pretended: srun, squeue and the like are small programs on PATH, so each step is
a process that waits, and no worker pool connects. In place of the workers this process writes what they would: events
and heartbeats at the intervals that real workers have in a campaign of that size. Once the driver has started
everything, its CPU time and its largest memory are read from /proc for a while; the interchanges are counted apart.
What pools send through the interchanges (a heartbeat of each node every 5 s) is left out.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.figures import Figure, main
from bench.monitor import find_intervals, make_counts, make_load, make_step
from hpcrl.campaign.request import load_request
from hpcrl.campaign.submission import write_description
from hpcrl.campaign_dir.event_log import BEAT_INTERVAL_S, EventLog
from hpcrl.campaign_dir.events import WorkerStarted
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.plan.plan import Plan
from hpcrl.system.files import make_private_dir
from hpcrl.system.processes import end_groups

FEW, MANY = 64, 4096
SECONDS, SECONDS_FULL = 60.0, 300.0
SETTLE_S = 20.0
"""The time after the last start in which the driver still works on what has just come."""
START_TIMEOUT_S = 300.0
MAX_MEMORY_BYTES = 2 << 30
MAX_COST_RATIO = 1.5
ENGINES_PER_NODE, ENVS_PER_NODE = 4, 16
SITE = f"""
name = "vast"
description = "a pretended cluster"
scheduler = "slurm"
het_jobs = "yes"
verified = true
checked_on = "2026-11-28"
[network]
interface = "lo"
[mpi]
flavour = "none"
[partitions.envs]
slurm_partition = "envs"
cores_per_node = {ENVS_PER_NODE}
mem_gib_per_node = 1024
max_walltime_min = 1440
max_nodes = 4096
[partitions.engines]
slurm_partition = "engines"
cores_per_node = {ENGINES_PER_NODE}
mem_gib_per_node = 1024
max_walltime_min = 1440
max_nodes = 4096
gpu = "h100"
gpus_per_node = {ENGINES_PER_NODE}
"""
PROGRAMS = {
    "srun": "exec sleep 1000000",
    "squeue": 'case "$*" in *EndTime*) echo "RUNNING $(date -d +10hours +%Y-%m-%dT%H:%M:%S) N/A";; esac',
    "sbatch": "echo 4712",
    "scancel": "exit 0",
    "sacct": "exit 0",
    "sinfo": "exit 0",
    "scontrol": "exit 0",
}
"""What is pretended of Slurm."""


@dataclass(frozen=True)
class DriverCost:
    """What a driver needs."""

    num_workers: int
    cpu_share: float
    """The share of a core."""
    interchange_share: float
    memory_bytes: int
    start_s: float


def measure(full: bool) -> list[Figure]:
    few, many = (_measure_driver(num, seconds=SECONDS_FULL if full else SECONDS) for num in (FEW, MANY))
    ratio = (many.cpu_share / many.num_workers) / (few.cpu_share / few.num_workers)
    return [
        Figure(name=f"{MANY:,} workers: driver's share of a core", value=many.cpu_share, bar=1.0, better="lower"),
        Figure(
            name=f"{MANY:,} workers: driver's memory / 2 GiB",
            value=many.memory_bytes / MAX_MEMORY_BYTES,
            bar=1.0,
            better="lower",
        ),
        Figure(
            name=f"CPU time per worker: {MANY:,} workers / {FEW} workers",
            value=ratio,
            bar=MAX_COST_RATIO,
            better="lower",
        ),
        Figure(name=f"{MANY:,} workers: interchanges' share of a core", value=many.interchange_share),
        Figure(name=f"{MANY:,} workers: until all is started", value=many.start_s, unit="s"),
        Figure(name=f"{FEW} workers: driver's share of a core", value=few.cpu_share),
        Figure(name=f"{FEW} workers: driver's memory", value=few.memory_bytes / (1 << 20), unit="MiB"),
        Figure(name=f"{FEW} workers: until all is started", value=few.start_s, unit="s"),
    ]


def _measure_driver(num_workers: int, *, seconds: float) -> DriverCost:
    scratch = Path(tempfile.mkdtemp(prefix="hpcrl-bench-driver-"))
    try:
        with _run_job(scratch, num_workers) as job:
            start_s = job.await_start()
            job.work(SETTLE_S)
            before = job.read_cpu()
            started = time.monotonic()
            job.work(seconds)
            passed_s = time.monotonic() - started
            after = job.read_cpu()
            return DriverCost(
                num_workers=num_workers,
                cpu_share=(after[0] - before[0]) / passed_s,
                interchange_share=(after[1] - before[1]) / passed_s,
                memory_bytes=_read_peak(job.driver.pid),
                start_s=start_s,
            )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class PretendedJob:
    """A job whose driver is real, and whose workers this process plays."""

    def __init__(self, campaign: CampaignDir, process: "subprocess.Popen[bytes]", plan: Plan) -> None:
        self._campaign, self._process, self._plan = campaign, process, plan
        self._logs = {
            role.role: [
                EventLog.open(campaign, role.role, index, job=0, role=role.role, node=f"n{index}")
                for index in range(role.num_workers)
            ]
            for role in plan.roles
            if role.role in ("env", "decode", "train")
        }
        self._second = 0

    @property
    def driver(self) -> psutil.Process:
        """The driver, the child of the guardian."""
        return psutil.Process(self._process.pid).children()[0]

    def await_start(self) -> float:
        """Wait until every step runs; return how long it took."""
        started = time.monotonic()
        for logs in self._logs.values():
            for log in logs:
                log.emit(WorkerStarted(pid=1))
        while self._process.poll() is None and time.monotonic() < started + START_TIMEOUT_S:
            if len(self._list_children(are_steps=True)) >= self._count_steps():
                return time.monotonic() - started
            self.work(0.5)
        batch_log = self._campaign.job(0).log("batch").read_text()
        raise SystemExit(f"the driver has not started its steps: {batch_log}")

    def _count_steps(self) -> int:
        """Count the steps of the job: one for each role on each of its nodes."""
        return sum(self._plan.components[role.component].nodes for role in self._plan.roles)

    def work(self, seconds: float) -> None:
        """Write for a time what the workers write."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            self._write_second(self._second)
            self._second += 1
            time.sleep(max(0.0, min(now + 1.0, until) - time.monotonic()))

    def _write_second(self, second: int) -> None:
        env, engines = self._logs["env"], self._logs["decode"]
        count_s, load_s = find_intervals(num_env=len(env), num_engines=len(engines))
        beat_s = int(BEAT_INTERVAL_S)
        for logs, event, interval_s in ((env, make_counts(second), count_s), (engines, make_load(second), load_s)):
            for index, log in enumerate(logs):
                if index % interval_s == second % interval_s:
                    log.emit(event)
                elif index % beat_s == second % beat_s:
                    log.beat()
        for log in self._logs["train"]:
            log.emit(make_step(second))

    def read_cpu(self) -> tuple[float, float]:
        """Return the CPU time of the driver, and of its interchanges."""
        return _sum_cpu([self.driver]), _sum_cpu(self._list_children(are_steps=False))

    def _list_children(self, *, are_steps: bool) -> list[psutil.Process]:
        """Return the processes that the driver has started: its steps, or the others."""
        found = []
        for child in self.driver.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if (child.name() == "sleep") == are_steps:
                    found.append(child)
        return found


@contextlib.contextmanager
def _run_job(scratch: Path, num_workers: int) -> Iterator[PretendedJob]:
    programs = scratch / "bin"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        path = programs / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o700)
    site = scratch / "vast.toml"
    site.write_text(SITE)
    half = num_workers // 2
    settings = (
        f"resources.env.num_workers={half}",
        "resources.env.cpus_per_worker=1",
        "resources.env.mem_gib_per_worker=1",
        f"resources.decode.num_workers={half}",
        "resources.decode.cpus_per_worker=1",
        "resources.decode.mem_gib_per_worker=1",
        "resources.prefill.num_workers=0",
        f"rollout.max_running={half * 8}",
        "job.walltime_min=600",
        'reward.placement="spare"',
    )
    request = load_request("quickstart", site=str(site), settings=settings)
    campaign = CampaignDir(scratch / "campaign")
    write_description(campaign, request)
    job = campaign.job(0)
    make_private_dir(job.logs)
    environ = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_END_TIME": str(int(time.time() + 36_000)),
    }
    for component in request.plan.components:
        names = ",".join(f"g{component.index}n{index}" for index in range(component.nodes))
        environ[f"SLURM_JOB_NODELIST_HET_GROUP_{component.index}"] = names
    command = [sys.executable, "-m", "hpcrl.job.driver", str(campaign.root), "0"]
    with job.log("batch").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, start_new_session=True)
    try:
        time.sleep(1.0)
        yield PretendedJob(campaign, process, request.plan)
    finally:
        _end_job(process)


def _end_job(process: "subprocess.Popen[bytes]") -> None:
    """End the guardian, the driver and all that they have started."""
    started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    end_groups([process], grace_s=1.0)
    for each in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def _sum_cpu(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU time of processes that still run."""
    total = 0.0
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def _read_peak(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main("driver", measure))
