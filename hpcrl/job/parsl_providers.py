"""Parsl blocks of two kinds.

StepProvider        blocks as steps of this job, one on each node of a component, or one on all
JobProvider         blocks as separate small Slurm jobs, started and ended with the work
STATUS_INTERVAL_S   how often Parsl asks for the status of jobs
MIN_LOST_AGE_S      the least age of a pool that is taken for lost
LOST_GRACE_S        the time in which a step that was lost must end
"""

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parsl.jobs.states import JobState, JobStatus  # noqa: TID251
from parsl.providers.base import ExecutionProvider  # noqa: TID251

from hpcrl.campaign_dir.paths import JobDir
from hpcrl.errors import SlurmError
from hpcrl.job.batch_log import note_in_log
from hpcrl.plan.components import RewardJobPlan
from hpcrl.slurm import commands
from hpcrl.system.files import publish_file
from hpcrl.system.processes import MIN_RESTART_INTERVAL_S, end_group

STATUS_INTERVAL_S = 30
COUNT_INTERVAL_S = 10.0
"""The time for which a count of jobs stands: all decisions in it need one squeue."""
MIN_REFUSAL_PAUSE_S, MAX_REFUSAL_PAUSE_S = 10.0, 600.0
"""The times after a refusal in which Slurm is asked for no other job: each is twice the one before."""
MIN_LOST_AGE_S = 40.0
"""A pool that Parsl reports as lost has been silent for 20 s; one that was started since then is another."""
LOST_GRACE_S = 15.0
"""The time after which srun abandons a step whose node does not answer: it waits for KillWait and 2 s."""


@dataclass
class _NodePool:
    """The worker pool of one node, and the process of its step, which pools of other nodes may share."""

    process: "subprocess.Popen[bytes]"
    started_at: float
    is_lost: bool = False
    """True if it is gone while its step runs on, for pools of other nodes."""

    def is_over(self) -> bool:
        return self.is_lost or self.process.poll() is not None


class StepProvider(ExecutionProvider):
    """Parsl blocks as steps of the running job: one for each node of a component, or one for all that have none."""

    def __init__(
        self,
        *,
        prefixes: Mapping[str, Sequence[str]],
        join: Callable[[Sequence[str]], Sequence[str]] | None = None,
        log_dir: Path,
        end_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        """Take for each node the words that run a command there.

        `join` returns those that run it on several nodes, in one step; without it each node has its own.
        `end_signal` ends a block without notice: srun takes SIGTERM for that, a step itself SIGKILL.
        """
        self.max_blocks = len(prefixes)
        self.init_blocks = self.min_blocks = 0
        self.nodes_per_block = 1
        self.parallelism = 1.0
        self.cores_per_node = self.mem_per_node = None
        self.script_dir = str(log_dir)
        self.resources: dict[object, Any] = {}
        self._join = join
        self._nodes = list(prefixes)
        self._prefixes = list(prefixes.values())
        self._pools: list[_NodePool | None] = [None] * len(prefixes)
        self._end_signal = end_signal
        self._lost: dict[int, float] = {}
        """The processes of steps that were lost, and when they were asked to end."""
        self._log_dir = log_dir
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def submit(self, command: str, tasks_per_node: int, job_name: str = "block") -> str | None:
        """Start a worker pool on a free node, the one with the least recent start, or joined ones on all free nodes.

        None if no node is free.
        """
        del tasks_per_node
        free = [slot for slot, pool in enumerate(self._pools) if pool is None or pool.is_over()]
        if not free:
            return None
        if self._join is None or len(free) == 1:
            free = [min(free, key=self._read_start)]
            prefix = self._prefixes[free[0]]
        else:
            prefix = self._join([self._nodes[slot] for slot in free])
        with (self._log_dir / f"{job_name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*prefix, *command.split("\n")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        for slot in free:
            self._pools[slot] = _NodePool(process, time.monotonic())
        self._processes[str(process.pid)] = process
        return str(process.pid)

    def _read_start(self, slot: int) -> float:
        pool = self._pools[slot]
        return -math.inf if pool is None else pool.started_at

    def status(self, job_ids: Sequence[object]) -> list[JobStatus]:
        return [self._status(self._processes[str(job_id)]) for job_id in job_ids]

    def cancel(self, job_ids: Sequence[object]) -> list[bool]:
        """End the process groups of these blocks; srun passes the signal on to its step."""
        for job_id in job_ids:
            process = self._processes[str(job_id)]
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        return [True for _ in job_ids]

    def num_running(self) -> int:
        """Count the blocks that have not ended."""
        return sum(process.poll() is None for process in self._processes.values())

    def cancel_all(self) -> None:
        """End every block."""
        self.cancel(list(self._processes))

    def wait(self, *, deadline: float) -> None:
        """Wait until `deadline` (monotonic) for blocks to end, then kill the rest."""
        for process in self._processes.values():
            end_group(process, grace_s=deadline - time.monotonic())

    def end_lost(self, host: str) -> None:
        """End the block on a host whose worker pool Parsl has lost: srun waits forever for a node that restarted.

        A step that has pools on other nodes too continues, a pool that still runs there ends when it gets no answer.
        """
        name, latest = host.partition(".")[0], time.monotonic() - MIN_LOST_AGE_S
        for node, pool in zip(self._nodes, self._pools, strict=True):
            is_there = node.partition(".")[0] == name or len(self._nodes) == 1
            if not is_there or pool is None or pool.is_over() or pool.started_at > latest:
                continue
            if self._is_shared(pool):
                pool.is_lost = True
            elif pool.process.pid not in self._lost:
                os.killpg(pool.process.pid, self._end_signal)
                self._lost[pool.process.pid] = time.monotonic()

    def _is_shared(self, pool: _NodePool) -> bool:
        """Return whether another pool of the same step is there."""
        return any(
            other and other is not pool and other.process is pool.process and not other.is_lost for other in self._pools
        )

    def lost_nodes(self) -> list[str]:
        """Return the nodes whose pool has ended and may be started again."""
        self._kill_lost()
        latest = time.monotonic() - MIN_RESTART_INTERVAL_S
        pools = zip(self._nodes, self._pools, strict=True)
        return [node for node, pool in pools if pool is not None and pool.is_over() and pool.started_at <= latest]

    def _kill_lost(self) -> None:
        """Kill what did not end in time after it was lost."""
        for pid, since in list(self._lost.items()):
            if self._processes[str(pid)].poll() is not None:
                del self._lost[pid]
            elif time.monotonic() > since + LOST_GRACE_S:
                os.killpg(pid, signal.SIGKILL)

    def drop_node(self, node: str) -> bool:
        """Start nothing more on a node; return False if it is the only one left."""
        if len(self._nodes) == 1:
            return False
        index = self._nodes.index(node)
        del self._nodes[index], self._prefixes[index], self._pools[index]
        return True

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    @property
    def num_first_blocks(self) -> int:
        """The blocks that have the pools of all nodes."""
        return len(self._nodes) if self._join is None else 1

    @property
    def label(self) -> str:
        return "steps"

    @property
    def status_polling_interval(self) -> int:
        return 5

    @staticmethod
    def _status(process: subprocess.Popen[bytes]) -> JobStatus:
        match process.poll():
            case None:
                return JobStatus(JobState.RUNNING)
            case 0:
                return JobStatus(JobState.COMPLETED)
            case code:
                return JobStatus(JobState.FAILED, exit_code=code)


class JobProvider(ExecutionProvider):
    """Parsl blocks as separate Slurm jobs; Slurm may preempt them at any time."""

    def __init__(self, reward_jobs: RewardJobPlan, *, job: JobDir, script: Callable[[str, list[str]], str]) -> None:
        """Take `script(name, command)`, which returns the batch script that runs a worker pool's command."""
        self.init_blocks = self.min_blocks = 0
        self.max_blocks = reward_jobs.max_jobs
        self.nodes_per_block = 1
        self.parallelism = 1.0
        self.cores_per_node = self.mem_per_node = None
        self.script_dir = str(job.logs)
        self.resources: dict[object, object] = {}
        self._job = job
        self._script = script
        self._started_ids: list[str] = []
        """Jobs that are not known to have ended."""
        self._counted_at = self._refused_until = float("-inf")
        self._pause_s = MIN_REFUSAL_PAUSE_S

    def submit(self, command: str, tasks_per_node: int, job_name: str = "block") -> str | None:
        """Start a job; None if Slurm refuses, or has a short time ago, which does not end the campaign."""
        del tasks_per_node
        if time.monotonic() < self._refused_until:
            return None
        path = self._job.block_script(job_name)
        publish_file(path, self._script(job_name, command.split("\n")))
        try:
            id = commands.queue_recorded_script(path, record=self._job.reward_jobs)
        except SlurmError as error:
            note_in_log(f"hpcrl: no reward job for {self._pause_s:g} s: {error}")
            self._refused_until = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, MAX_REFUSAL_PAUSE_S)
            return None
        self._pause_s = MIN_REFUSAL_PAUSE_S
        self._started_ids.append(id)
        return id

    def status(self, job_ids: Sequence[object]) -> list[JobStatus]:
        alive = commands.query_live_jobs([str(job_id) for job_id in job_ids])
        if alive is None:
            return [JobStatus(JobState.UNKNOWN) for _ in job_ids]
        return [JobStatus(_parsl_state(alive.get(str(job_id)))) for job_id in job_ids]

    def cancel(self, job_ids: Sequence[object]) -> list[bool]:
        """End these jobs; a job that Slurm does not end now ends at its walltime."""
        ids = [str(job_id) for job_id in job_ids]
        try:
            commands.cancel_jobs(ids)
        except SlurmError:
            return [False for _ in ids]
        self._started_ids = [id for id in self._started_ids if id not in ids]
        return [True for _ in ids]

    def num_running(self) -> int:
        """Count the jobs that wait or run; while Slurm does not answer, and for some time, the last count stands."""
        if time.monotonic() < self._counted_at + COUNT_INTERVAL_S:
            return len(self._started_ids)
        self._counted_at = time.monotonic()
        alive = commands.query_live_jobs(self._started_ids)
        if alive is not None:
            self._started_ids = [id for id in self._started_ids if id in alive]
        return len(self._started_ids)

    def cancel_all(self) -> None:
        """End every job that this provider started."""
        self.cancel(list(self._started_ids))

    @property
    def label(self) -> str:
        return "jobs"

    @property
    def status_polling_interval(self) -> int:
        return STATUS_INTERVAL_S


def _parsl_state(is_running: bool | None) -> JobState:
    match is_running:
        case None:
            return JobState.COMPLETED
        case True:
            return JobState.RUNNING
        case False:
            return JobState.PENDING
