"""Run the workers of one job: the trainer as a step, those of other roles with Parsl.

    JobRuntime      start and end the workers of a job
    StepLog         what the log of the trainer's steps has of their last start
    ask_to_end      publish a request to end
    make_pool_command   the command of a worker pool
    PARSL_ROLES, WEIGHT_ROLES, ELASTIC_EXECUTOR   roles and executors
    TRAINER_END_GRACE_S, KERNEL_STOP_TIMEOUT_S    times
    WORKER_FUNCTION                               the function of workers
    STEP_COMMAND, RANKS_COMMAND, POOL_COMMAND     what processes run

All others wait for the trainer, and Parsl takes long to import: it is imported once the trainer is starting.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.campaign_dir.paths import JobDir
from hpcrl.campaign_dir.workers import WorkerPlace
from hpcrl.config.pipeline import SCORE_FUNCTION
from hpcrl.config.recipe import RoleName
from hpcrl.config.site import Site
from hpcrl.job.batch_log import note_in_log
from hpcrl.job.courier_step import TransportCommand
from hpcrl.job.trainer_end import has_lacked_memory
from hpcrl.plan.components import JobComponent, RewardJobPlan
from hpcrl.plan.plan import Plan, RolePlan
from hpcrl.slurm.allocation import JobAllocation, name_step
from hpcrl.slurm.commands import cancel_steps
from hpcrl.slurm.script import make_reward_script
from hpcrl.slurm.step_script import StepSetup, choose_step_python, read_step_setup
from hpcrl.system.exit_codes import EXIT_DONE, EXIT_DRAINED, EXIT_OUT_OF_MEMORY
from hpcrl.system.file_watch import retry_passing
from hpcrl.system.files import publish_file
from hpcrl.system.garbage import pause_collection
from hpcrl.system.processes import do_nothing, end_groups
from hpcrl.system.variables import PARTITION_VARIABLE, TRAINER_START_VARIABLE
from hpcrl.weights.versions import TransportName

if TYPE_CHECKING:
    from hpcrl.job.executors import JobExecutors

PARSL_ROLES: tuple[RoleName, ...] = ("prefill", "decode", "env", "reward")
WEIGHT_ROLES: tuple[RoleName, ...] = ("prefill", "decode", "train")
"""Roles that publish or load weights."""
ELASTIC_EXECUTOR = "reward-jobs"
"""The executor whose blocks are started and ended with the work."""
TRAINER_END_GRACE_S = 5.0
"""The time that the steps of a trainer may take to end before another start."""
KERNEL_STOP_TIMEOUT_S = 10.0
WORKER_FUNCTION = "hpcrl.roles.__main__:work"

STEP_COMMAND = ("-m", "hpcrl.job.step")
RANKS_COMMAND = ("-m", "hpcrl.job.ranks")
POOL_COMMAND = ("-m", "hpcrl.job.worker_pool")


def make_pool_command(job: JobDir, role: str, *, python: str) -> list[str]:
    """Return the command of a worker pool, which runs in a step until the job ends; Parsl adds its options."""
    step = [python, *STEP_COMMAND, str(job.root), str(job.end)]
    return [*step, python, *POOL_COMMAND, role, str(job.campaign.root)]


def ask_to_end(path: Path) -> None:
    """Publish a request to end; where the file system refuses it for long, those that it is for are killed later."""
    try:
        retry_passing(lambda: publish_file(path, ""))
    except OSError as error:
        note_in_log(f"hpcrl: {error}")


class StepLog:
    """The log of the trainer's steps, with what srun reports about them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = 0

    def note_start(self) -> None:
        """Note that the steps are started now: what the log has is about earlier ones."""
        try:
            self._start = self._path.stat().st_size
        except OSError:
            self._start = 0

    def read(self) -> str:
        """Return what was written since then."""
        with contextlib.suppress(OSError), self._path.open("rb") as log:
            log.seek(self._start)
            return log.read().decode(errors="replace")
        return ""


class JobRuntime:
    """The runtime of a job: it starts and ends the workers and holds none of their data."""

    def __init__(self, plan: Plan, *, place: WorkerPlace, site: Site, allocation: JobAllocation, address: str) -> None:
        self._plan = plan
        self._campaign = place.campaign
        self._job = place.job
        self._site = site
        self._allocation = allocation
        self._address = address
        self._executors: JobExecutors | None = None
        self.step_log = StepLog(self._job.log("train-step"))
        self._trainer: list[subprocess.Popen[bytes]] = []
        self._num_starts = 0

    def start(self) -> None:
        """Start the executors; workers connect while the caller continues.

        Where all roles share one machine, reward workers start with their first task: no episode waits for them.
        """
        roles = list(filter(self._plan.has_role, (*PARSL_ROLES, *self._plan.judge_roles)))
        if not roles:  # a recipe that only imitates
            return
        from hpcrl.job.parsl_programs import skip_database

        with skip_database(), pause_collection():  # parsl is imported only here, and late
            from hpcrl.job.executors import JobExecutors

        self._executors = JobExecutors(self._job, address=self._address)
        for role in roles:
            if role != "reward" or self._plan.layout != "local":
                self._add_role(role)
        if self._plan.reward_jobs is not None:
            self._add_reward_jobs(self._plan.reward_jobs)

    def _add_role(self, role: RoleName) -> None:
        """Start the executor of a role and its worker pools."""
        from hpcrl.job.parsl_providers import StepProvider

        plan = self._plan.role(role)
        pools = StepProvider(
            prefixes=self._prefixes(plan),
            join=partial(self._make_prefix, plan) if self._has_joined_steps else None,
            log_dir=self._job.logs,
            end_signal=signal.SIGKILL if self._allocation.job_id is None else signal.SIGTERM,
        )
        python = choose_step_python(self._find_setup(self._plan.components[plan.component].partition))
        command = make_pool_command(self._job, role, python=python)
        self._started.add_pools(role, pools, command=command, workers_per_node=plan.workers_per_node)

    def _add_reward_jobs(self, reward_jobs: RewardJobPlan) -> None:
        """Add the executor of reward jobs; on a machine without a scheduler it starts processes instead."""
        from hpcrl.job.parsl_providers import JobProvider, StepProvider

        setup = self._find_setup(reward_jobs.partition)
        partition = ["env", f"{PARTITION_VARIABLE}={reward_jobs.partition}", *setup.words]

        def script(name: str, command: list[str]) -> str:
            command = [*partition, *command]
            return make_reward_script(self._plan, job=self._job, name=name, command=command)

        blocks: JobProvider | StepProvider
        if self._allocation.job_id is None:
            prefixes = {f"{ELASTIC_EXECUTOR}-{index}": partition for index in range(reward_jobs.max_jobs)}
            blocks = StepProvider(prefixes=prefixes, log_dir=self._job.logs)
        else:
            blocks = JobProvider(reward_jobs, job=self._job, script=script)
        command = make_pool_command(self._job, "reward", python=choose_step_python(setup))
        num = reward_jobs.workers_per_job
        self._started.add_elastic(ELASTIC_EXECUTOR, blocks, command=command, workers_per_node=num)

    @property
    def _started(self) -> "JobExecutors":
        assert self._executors is not None
        return self._executors

    def start_worker(self, role: RoleName, index: int) -> "Future[None]":
        """Start a long-lived worker; the future is done when the worker ends."""
        return self._started.submit(role, WORKER_FUNCTION, str(self._campaign.root), self._job.number, role, index)

    def score(self, segments: list[str], *, shard: int, num_shards: int, elastic: bool) -> "Future[None]":
        """Start a reward task for one shard of the spool "rollouts": in a reward job, or on spare cores."""
        if not elastic and not self._started.has("reward"):
            self._add_role("reward")
        return self._started.submit(
            ELASTIC_EXECUTOR if elastic else "reward",
            SCORE_FUNCTION,
            str(self._campaign.root),
            self._job.number,
            segments,
            shard,
            num_shards,
        )

    def num_reward_jobs(self) -> int:
        """Count the reward jobs that wait or run."""
        return self._started.num_blocks(ELASTIC_EXECUTOR) if self._plan.reward_jobs is not None else 0

    def start_reward_job(self) -> None:
        """Request one more reward job; if Slurm refuses, the next decision may request it again."""
        self._started.add_block(ELASTIC_EXECUTOR)

    def end_reward_jobs(self) -> None:
        """End all reward jobs."""
        self._started.cancel_blocks(ELASTIC_EXECUTOR)

    def start_trainer(self) -> None:
        """Start or restart the trainer, as a separate step on each node of its component."""
        plan = self._plan.role("train")
        if self._end_trainer(grace_s=TRAINER_END_GRACE_S) and self._allocation.job_id is not None:
            cancel_steps(self._name_step(self._num_starts - 1))  # its ranks would keep the GPUs
        python = choose_step_python(self._find_setup(self._plan.components[plan.component].partition))
        role = [python, "-m", "hpcrl.roles", "train", str(self._campaign.root), str(self._job.number)]
        master = "127.0.0.1" if self._plan.layout == "local" else self._allocation.nodes[plan.component][0]
        end = self._job.trainer_end(self._num_starts)
        environ = {TRAINER_START_VARIABLE: str(self._num_starts), "MASTER_ADDR": master}
        self._num_starts += 1
        first = 0
        self.step_log.note_start()
        step_name = self._name_step(self._num_starts - 1)
        for prefix in self._prefixes(plan).values():
            num = min(plan.workers_per_node, plan.num_workers - first)
            if num < 1:
                break
            ranks = [python, *RANKS_COMMAND, str(plan.num_workers), str(first), str(num), *role]
            step_words = [python, *STEP_COMMAND, str(self._job.root), str(end), *ranks]
            with retry_passing(lambda: self._job.log("train-step").open("ab")) as log:
                step = subprocess.Popen(
                    [*name_step(prefix, step_name), *step_words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=os.environ | environ,
                    start_new_session=True,
                )
            self._trainer.append(step)
            first += num

    def _name_step(self, start: int) -> str:
        return f"hpcrl-{self._allocation.job_id}-train-{start}"

    def _end_trainer(self, *, grace_s: float) -> bool:
        """End every step of the trainer: when one has failed the others would wait for it; return whether one hung."""
        if self._trainer:
            ask_to_end(self._job.trainer_end(self._num_starts - 1))
        deadline = time.monotonic() + grace_s
        while any(process.poll() is None for process in self._trainer) and time.monotonic() < deadline:
            time.sleep(0.1)
        is_hung = any(process.poll() is None for process in self._trainer)
        end_groups(self._trainer, grace_s=1.0)
        self._trainer.clear()
        return is_hung

    def courier_commands(self, transports: Sequence[TransportName]) -> list[TransportCommand]:
        """Return the commands of the couriers, one process on every node that publishes or loads weights."""
        indices = sorted({self._plan.role(role).component for role in WEIGHT_ROLES if self._plan.has_role(role)})
        components = [self._plan.components[index] for index in indices]
        nodes = [node for names in self._allocation.list_distinct_nodes(components).values() for node in names]
        words = ["-m", "hpcrl.weights.couriers", str(self._campaign.root), str(self._job.number)]
        words += [",".join(nodes), ",".join(self._trainer_nodes()), f"--codec={self._site.mpi.codec}"]
        commands = []
        for name in transports:
            mpi = self._site.mpi.srun_type if name == "mpi" else "none"
            steps = self._allocation.node_step_commands(
                components, partial(self._make_courier_words, [*words, f"--wire={name}"]), mpi=mpi
            )
            commands.append(TransportCommand(transport=name, commands=steps))
        return commands

    def _make_courier_words(self, words: Sequence[str], component: JobComponent) -> list[str]:
        """Return the flags of srun and the command of the couriers of a component."""
        setup = self._find_setup(component.partition)
        interfaces = [f"--interface={name}" for name in self._site.list_interfaces(component.partition)]
        return [*setup.srun_flags, *setup.words, choose_step_python(setup), *words, *interfaces]

    def _find_setup(self, partition: str) -> StepSetup:
        return read_step_setup(self._campaign, partition)

    def _trainer_nodes(self) -> list[str]:
        """Return the nodes that have ranks, that of rank 0 first."""
        plan = self._plan.role("train")
        num = -(-plan.num_workers // plan.workers_per_node)
        return self._allocation.nodes[plan.component][:num]

    def trainer_exit_code(self) -> int | None:
        """Return the exit code of the trainer; None while it runs, or if its last start was refused."""
        if not self._trainer:
            return None
        codes = [process.poll() for process in self._trainer]
        failed = [code for code in codes if code not in (None, EXIT_DONE, EXIT_DRAINED)]
        if failed and has_lacked_memory(self.step_log.read()):
            return EXIT_OUT_OF_MEMORY
        return failed[0] if failed else codes[0] if None not in codes else None

    def replace_lost_blocks(self) -> list[tuple[RoleName, str]]:
        """Start a new worker pool for every one that has ended; return their roles and nodes."""
        return [] if self._executors is None else self._executors.replace_lost()

    def drop_node(self, role: RoleName, node: str) -> bool:
        """Exclude a node from a role and from the transport of weights; False if the role has no other node."""
        if not self._started.drop_node(role, node):
            return False
        if node not in self._trainer_nodes():
            self._allocation = self._allocation.without_node(node)
        return True

    def drop_trainer_node(self, node: str) -> bool:
        """Exclude a node from the trainer and the transport of weights; False if there is none to take its place."""
        plan = self._plan.role("train")
        left = self._allocation.without_node(node)
        if len(left.nodes[plan.component]) * plan.workers_per_node < plan.num_workers:
            return False
        self._allocation = left
        return True

    def num_nodes(self, role: RoleName) -> int:
        """Count the nodes on which worker pools of a role are started."""
        return self._started.num_nodes(role)

    def close(self, *, grace_s: float, note_turn: Callable[[], object] = do_nothing) -> None:
        """End every worker pool and executor; ask first, since a step that srun ends is killed without notice.

        `note_turn` is called after each part that may take long.
        """
        deadline = time.monotonic() + grace_s
        ask_to_end(self._job.end)
        if self._executors is not None:
            while self._executors.num_pools() and time.monotonic() < deadline:
                time.sleep(0.1)
            self._executors.cancel_all()
            note_turn()
            self._executors.end_kernel(timeout_s=min(grace_s, KERNEL_STOP_TIMEOUT_S))
            self._executors.await_ends(deadline=deadline)
        note_turn()
        self._end_trainer(grace_s=deadline - time.monotonic())

    @property
    def _has_joined_steps(self) -> bool:
        return self._site.steps_per == "role" and self._allocation.job_id is not None

    def _prefixes(self, role: RolePlan) -> dict[str, list[str]]:
        return {node: self._make_prefix(role, [node]) for node in self._allocation.nodes[role.component]}

    def _make_prefix(self, role: RolePlan, nodes: Sequence[str]) -> list[str]:
        """Return the words that run a command of a role on each of these nodes."""
        component: JobComponent = self._plan.components[role.component]
        setup = self._find_setup(component.partition)
        threads_per_core = self._site.partitions[component.partition].threads_per_core
        # Steps that overlap get the same first cores and GPUs each, so that each gets all that roles share.
        cpus, gpus = component.cpus_per_node, role.gpus_per_worker * role.workers_per_node
        if self._plan.layout == "colocated" and gpus:
            gpus = component.gpus_per_node
        mem_gib = component.mem_gib_per_node if component.roles == [role.role] else role.step_mem_gib
        return [
            *self._allocation.step_prefix(component, nodes, cpus=cpus * threads_per_core, mem_gib=mem_gib, gpus=gpus),
            *(setup.srun_flags if self._allocation.job_id is not None else []),
            *setup.words,
        ]
