"""The workers of one job: started, and started again when they end too early.

JobWorkers         all of them; how often each has failed
LongLivedWorker    a worker that runs until the job ends
LONG_LIVED_ROLES   the roles of those, but for judges
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.campaign_dir.event_log import EVENT_SUFFIX, find_worker_node
from hpcrl.campaign_dir.events import CampaignEvent, FaultReported, WorkerFailed, WorkerRestarted
from hpcrl.campaign_dir.job_end import EndCause, JobError
from hpcrl.campaign_dir.paths import JobDir, make_worker_name
from hpcrl.campaign_dir.train_progress import read_train_progress
from hpcrl.config.recipe import RoleName, name_role_resources
from hpcrl.job.job_drain import CLOCK_SKEW_S
from hpcrl.job.memory_watch import TrainerMemoryWatch
from hpcrl.job.progress_watch import MAX_BEAT_AGE_S, RANK_LOOK_INTERVAL_S, RankBeats
from hpcrl.job.reward_tasks import is_lost_worker
from hpcrl.job.supervision import LookInterval, RestartBudget, find_quorum
from hpcrl.job.trainer_end import RankFailure, find_first_failure, find_hang, is_gpu_fault, is_lost_peer
from hpcrl.plan.plan import Plan, RolePlan
from hpcrl.slurm.allocation import JobAllocation
from hpcrl.slurm.commands import StepFailure, find_step_failure
from hpcrl.slurm.end_policy import find_bad_nodes
from hpcrl.slurm.status import query_failed_nodes, query_lost_nodes, query_restarted_nodes
from hpcrl.system.exit_codes import EXIT_OUT_OF_MEMORY, decode_exit_code, describe_end
from hpcrl.system.file_watch import PATIENCE_S, names_outage
from hpcrl.system.files import publish_file, read_error_line, read_last_line
from hpcrl.system.memory import KILLED

if TYPE_CHECKING:
    from hpcrl.job.runtime import JobRuntime

LONG_LIVED_ROLES: tuple[RoleName, ...] = ("prefill", "decode", "env")
MIN_STEP_PAUSE_S, MAX_STEP_PAUSE_S = 15.0, 240.0
"""The time before a trainer is started again that Slurm or a node has ended: each is twice the one before."""
STEADY_S = 600.0
"""The time after which a trainer that was started counts as working."""
PROBE_BYTES = 1 << 20
"""The size of a file by which the driver finds out whether the file system takes one."""


@dataclass
class LongLivedWorker:
    """The current process of a long-lived worker."""

    role: RoleName
    index: int
    future: "Future[None]"
    rests_for: str = ""
    """The name of what has failed too often, while the worker is not restarted for that."""

    @property
    def is_resting(self) -> bool:
        return bool(self.rests_for)

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


@dataclass(kw_only=True)
class JobWorkers:
    """The workers of one job, and their failures."""

    job: JobDir
    plan: Plan
    quorum: float
    """The share of a role's workers, and of its nodes, without which the job ends."""
    budget: RestartBudget
    memory: TrainerMemoryWatch
    silence_s: float
    """The time that a worker may stand still."""
    start_timeout_s: float
    """The time that a trainer may take to start."""
    emit: Callable[[CampaignEvent], object]
    inner_domains: Sequence[str] = ()
    """The domains whose environments run in the processes of env workers, and may end them."""
    allocation: JobAllocation | None = None
    long_lived: list[LongLivedWorker] = field(default_factory=list)
    is_trainer_due: bool = False
    """True from the end of a trainer until it has been started again, which the file system may refuse for a while."""
    trainer_started_at: float = 0.0
    trainer_pause_s: float = MIN_STEP_PAUSE_S
    trainer_due_at: float = 0.0
    """The earliest time, by the monotonic clock, for the next start of the trainer."""

    def __post_init__(self) -> None:
        names = [make_worker_name(self.job.number, "train", rank) for rank in range(self._trainer.num_workers)]
        self.beat_looks = LookInterval(RANK_LOOK_INTERVAL_S)
        self.beats = RankBeats([self.job.campaign.events / f"{name}{EVENT_SUFFIX}" for name in names])

    @property
    def _trainer(self) -> RolePlan:
        return self.plan.role("train")

    def start_trainer(self, runtime: "JobRuntime") -> None:
        """Start the trainer, or start it again after the end of what is left of it."""
        runtime.start_trainer()
        self.trainer_started_at = time.time()
        self.beats.restart()

    def start(self, runtime: "JobRuntime") -> None:
        """Start the long-lived workers."""
        for role in filter(self.plan.has_role, (*LONG_LIVED_ROLES, *self.plan.judge_roles)):
            for index in range(self.plan.role(role).num_workers):
                future = runtime.start_worker(role, index)
                self.long_lived.append(LongLivedWorker(role=role, index=index, future=future))

    def restart_failed(self, runtime: "JobRuntime", *, trainer_code: int | None) -> bool:
        """Restart what ended too early, each within its own limit; return whether the job continues without a node."""
        num_nodes = len(self._list_trainer_nodes())
        if not self.is_trainer_due:
            self.is_trainer_due = self._has_trainer_failed(runtime, trainer_code)
        if self.is_trainer_due and time.monotonic() >= self.trainer_due_at:
            self.start_trainer(runtime)
            self.is_trainer_due = False
            self.emit(WorkerRestarted(of="train-0"))
        is_without = [len(self._list_trainer_nodes()) < num_nodes]
        is_without += [self._count_lost_pool(runtime, role, node) for role, node in runtime.replace_lost_blocks()]
        for worker in self.long_lived:
            if worker.is_resting:
                if not self.budget.is_used_up(worker.rests_for):
                    worker.rests_for, worker.future = "", runtime.start_worker(worker.role, worker.index)
                    self.emit(WorkerRestarted(of=worker.name))
            elif worker.future.done():
                error = worker.future.exception()
                self._count_worker_failure(worker, self._explain_end(worker, error))
                if not worker.is_resting:
                    worker.future = runtime.start_worker(worker.role, worker.index)
        return any(is_without)

    def note_suspension(self) -> None:
        """Note that all processes of the job stood still: their heartbeats continue from now on."""
        self.beats.restart()

    def await_ends(self, *, timeout_s: float) -> None:
        """Wait until the long-lived workers have ended."""
        wait([worker.future for worker in self.long_lived], timeout=timeout_s)

    def list_bad_nodes(self) -> list[str]:
        """Return the nodes on which more fails than on others."""
        if self.allocation is None or self.allocation.job_id is None:
            return []
        nodes = {plan.role: self.allocation.nodes[plan.component] for plan in self.plan.roles}
        return find_bad_nodes(self.budget.list_records(), nodes)

    def describe_trainer_end(self, runtime: "JobRuntime", code: int) -> str:
        """Return why the trainer ended; `code` is the exit code of the first of its steps that was seen to end."""
        step_log = runtime.step_log.read()
        return self._describe_end(step_log, code, failed=self._find_failed_rank(step_log, code))

    def _describe_end(self, step_log: str, code: int, *, failed: RankFailure) -> str:
        if code == EXIT_OUT_OF_MEMORY:
            return f"{KILLED}: raise resources.train.mem_gib_per_worker"
        if hang := find_hang(step_log):
            return hang
        rank = "" if self._trainer.num_workers == 1 else f"rank {failed.rank}"
        if failed.was_killed:  # its log ends with a step
            return f"{rank or 'it'} {describe_end(decode_exit_code(failed.code))}"
        error = read_error_line(self._find_rank_log(failed.rank))
        return f"exit code {failed.code}{rank and f' of {rank}'}: {error}"

    def _find_rank_log(self, rank: int) -> Path:
        """Return the log of a rank; if it never started, its step has written why."""
        log = self.job.log(f"train-{rank}")
        return log if log.exists() else self.job.log("train-step")

    def _find_failed_rank(self, step_log: str, code: int) -> RankFailure:
        """Return the rank that failed by itself; the first one with the code of a step if no step names one."""
        return find_first_failure(step_log, self._read_rank_error) or RankFailure(0, code)

    def _read_rank_error(self, rank: int) -> str:
        return read_error_line(self.job.log(f"train-{rank}"))

    def _has_trainer_failed(self, runtime: "JobRuntime", code: int | None) -> bool:
        """Count a trainer that has ended, or whose node is gone; return whether it has to be started again."""
        if code is None:
            if reason := self._find_lost_ranks(runtime):
                self._count_trainer_failure(reason, cause="node-failure")
            return bool(reason)
        self._refuse_restart()
        self._probe_disk()
        if not self.memory.report_shortage(code):
            self._drop_lost_nodes(runtime, self._list_trainer_nodes())
            step_log = runtime.step_log.read()
            failed = self._find_failed_rank(step_log, code)
            reason, rank = self._describe_end(step_log, code, failed=failed), failed.rank
            if failure := find_step_failure(step_log):
                self._count_step_failure(failure)
            elif is_gpu_fault(reason):
                self._count_gpu_fault(runtime, rank, reason)
            elif names_outage(reason) or names_outage(read_last_line(self.job.log(f"train-{rank}"))):
                # It has passed, as the probe shows: those of other causes are counted apart.
                self.emit(WorkerFailed(of="train-0", reason=reason))
                self.budget.count_failure("the disk of train-0", reason, cause="infrastructure")
            else:
                log = self._find_rank_log(rank)
                self._count_trainer_failure(reason, cause=_find_trainer_cause(code, reason), log=log)
        return True

    def _count_step_failure(self, failure: StepFailure) -> None:
        """Count that Slurm or a node has ended the trainer, and let it wait before the next start: that may pass."""
        self.emit(WorkerFailed(of="train-0", reason=failure.line))
        if failure.node in self._list_trainer_nodes():
            self.budget.note_node("train", str(failure.node))
        if time.time() - self.trainer_started_at > STEADY_S:
            self.trainer_pause_s = MIN_STEP_PAUSE_S
        self.trainer_due_at = time.monotonic() + self.trainer_pause_s
        self.trainer_pause_s = min(2 * self.trainer_pause_s, MAX_STEP_PAUSE_S)
        cause: EndCause = "node-failure" if failure.node is not None else "infrastructure"
        self.budget.count_failure("a step of train-0", failure.line, cause=cause)

    def _count_gpu_fault(self, runtime: "JobRuntime", rank: int, reason: str) -> None:
        """Count that a GPU of a rank has failed: the trainer continues on another node, or tries this one again."""
        self.emit(WorkerFailed(of=f"train-{rank}", reason=reason))
        nodes = self._list_trainer_nodes()
        node = nodes[rank // self._trainer.workers_per_node] if nodes else "this machine"
        if nodes and self._continue_without(runtime, node):
            return
        subject = f"a GPU of {node}"
        if not self.budget.note_failure(subject):
            bad = [node] if nodes else []
            raise JobError(self.budget.describe(subject, reason), cause="node-failure", nodes=bad)

    def _continue_without(self, runtime: "JobRuntime", node: str) -> bool:
        """Continue the trainer without one of its nodes; return False if there is none to take its place."""
        if self.allocation is None or not runtime.drop_trainer_node(node):
            return False
        self.allocation = self.allocation.without_node(node)
        self.emit(FaultReported(what="node", detail=f"train continues without {node}"))
        return True

    def _probe_disk(self) -> None:
        """Raise OSError while the file system is full or away: the driver waits for it, and counts no failure."""
        probe = self.job.root / "probe"
        publish_file(probe, " " * PROBE_BYTES)
        probe.unlink()

    def _count_trainer_failure(self, reason: str, *, cause: EndCause, log: Path | None = None) -> None:
        self.emit(WorkerFailed(of="train-0", reason=reason))
        self.budget.count_failure("train-0", reason, cause=cause, log=log)

    def _list_trainer_nodes(self) -> list[str]:
        """Return the nodes of the trainer, the first of which have its ranks; none on a machine without Slurm."""
        if self.allocation is None or self.allocation.job_id is None:
            return []
        return self.allocation.nodes[self._trainer.component]

    def _find_lost_ranks(self, runtime: "JobRuntime") -> str:
        """Return why ranks of the trainer count as lost, though srun waits for them; empty if none does."""
        every = self._list_trainer_nodes()
        if not every or not self.beat_looks.is_due():
            return ""
        silent = self.beats.find_silent(max_age_s=MAX_BEAT_AGE_S, max_start_s=MAX_BEAT_AGE_S)
        nodes = list(dict.fromkeys(every[rank // self._trainer.workers_per_node] for rank in silent))
        if not nodes:
            return ""
        if lost := self._drop_lost_nodes(runtime, nodes):
            return f"{', '.join(lost)} failed"
        since = self.trainer_started_at + CLOCK_SKEW_S
        if restarted := query_restarted_nodes(nodes, since=since, env=os.environ):
            return f"{', '.join(restarted)} was started again, and the trainer's processes there are gone"
        longest_s = self.silence_s + PATIENCE_S
        if self.beats.find_silent(max_age_s=longest_s, max_start_s=max(longest_s, self.start_timeout_s)):
            return f"the trainer on {', '.join(nodes)} has sent no heartbeat for {longest_s:g} s"
        return ""

    def _drop_lost_nodes(self, runtime: "JobRuntime", nodes: list[str]) -> list[str]:
        """Continue without the nodes of the trainer that have failed, and return them; too few left end the job."""
        failed = query_lost_nodes(nodes, env=os.environ)
        for node in failed:
            if not self._continue_without(runtime, node):
                reason = f"{', '.join(failed)} of the trainer failed, and it has no other node in this job"
                raise JobError(reason, cause="node-failure", nodes=failed)
        return failed

    def _refuse_restart(self) -> None:
        """Raise what ended the trainer if it would only fail again."""
        if failure := read_train_progress(self.job.campaign.train_progress).failure:
            raise JobError(failure, cause="user-code")

    def _count_lost_pool(self, runtime: "JobRuntime", role: RoleName, node: str) -> bool:
        """Count that a worker pool has ended; after too many ends, continue without the node if enough are left.

        Return whether the job does.
        """
        self.emit(FaultReported(what="worker-pool", detail=f"{role} on {node} ended and was started again"))
        self.budget.note_node(role, node)
        pool = f"the worker pool of {role} on {node}"
        if self.budget.note_failure(pool):
            return False
        least = find_quorum(self.plan.components[self.plan.role(role).component].nodes, share=self.quorum)
        if runtime.num_nodes(role) > least and runtime.drop_node(role, node):
            self.emit(FaultReported(what="node", detail=f"{role} continues without {node}"))
            return True
        is_slurm = self.allocation is not None and self.allocation.job_id is not None
        failed = query_failed_nodes([node], env=os.environ) if is_slurm else []
        reason = self.budget.describe(pool, f"see parsl.{role}.block-*.log")
        cause: EndCause = "node-failure" if failed or node in self.list_bad_nodes() else "infrastructure"
        raise JobError(reason, cause=cause, nodes=failed)

    def _explain_end(self, worker: LongLivedWorker, error: BaseException | None) -> str:
        """Return why a worker has ended; an environment can end the process that it runs in, and leaves no trace."""
        if error is None:
            return "it ended by itself"
        if worker.role != "env" or not self.inner_domains or not is_lost_worker(error) or KILLED in str(error):
            return str(error)
        return (
            f"{error}: the environments of {', '.join(self.inner_domains)} run in its process, and one may have ended "
            'it: domains.NAME.isolation = "process" keeps them apart'
        )

    def _count_worker_failure(self, worker: LongLivedWorker, reason: str) -> None:
        """Count that a worker has ended; after too many ends, continue without it if enough are left."""
        is_short = KILLED in reason
        if is_short:
            reason = f"{reason}: raise {name_role_resources(worker.role)}.mem_gib_per_worker"
        has_code = "exit code" in reason  # one that was killed leaves the last line of an earlier end
        is_disk = names_outage(reason) or (has_code and names_outage(read_last_line(self.job.log(worker.name))))
        if is_disk:
            self._probe_disk()
        self.emit(WorkerFailed(of=worker.name, reason=reason))
        if node := find_worker_node(self.job.campaign, self.job.number, worker.role, worker.index):
            self.budget.note_node(worker.role, node)
        name = f"the disk of {worker.name}" if is_disk else worker.name  # counted apart
        if self.budget.note_failure(name):
            self.emit(WorkerRestarted(of=worker.name))
            return
        worker.rests_for = name
        alike = [other for other in self.long_lived if other.role == worker.role]
        num_left = sum(not other.is_resting for other in alike)
        reason = self.budget.describe(name, reason, log=self.job.log(worker.name))
        if num_left < find_quorum(len(alike), share=self.quorum):
            by_default: EndCause = "user-code" if worker.role == "env" and not is_disk else "infrastructure"
            by_default = "out-of-memory" if is_short else by_default
            raise JobError(reason, cause="node-failure" if self.list_bad_nodes() else by_default)
        left = f"{worker.role} continues with {num_left} of {len(alike)} workers"
        self.emit(FaultReported(what="quorum", detail=f"{reason}; {left}"))


def _find_trainer_cause(code: int, reason: str) -> EndCause:
    """Return what has ended the trainer, of what its own ranks may end for."""
    if code == EXIT_OUT_OF_MEMORY:
        return "out-of-memory"
    return "infrastructure" if is_lost_peer(reason) else "user-code"
