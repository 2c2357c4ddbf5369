"""The executors of a job: worker pools of Parsl, one for each role over its component, and one for reward jobs.

    JobExecutors      start, use and end them
    HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S   times
    INTERCHANGE_COMMAND, POOL_OPTIONS           what processes run

Every node of a role's component is one Parsl block, started as a separate Slurm step (so that a lost node ends only
one step), or as a process group on a machine without a scheduler; a site may have one step for all nodes of a role.
Task arguments are names, never data.
"""

import logging
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

import parsl  # noqa: TID251
from parsl.config import Config  # noqa: TID251
from parsl.executors import HighThroughputExecutor  # noqa: TID251
from parsl.executors.high_throughput.errors import ManagerLost  # noqa: TID251
from parsl.jobs.error_handlers import noop_error_handler  # noqa: TID251

from hpcrl.campaign_dir.paths import JobDir
from hpcrl.job.parsl_providers import JobProvider, StepProvider
from hpcrl.job.worker_pool import call_by_name

HEARTBEAT_INTERVAL_S = 5
HEARTBEAT_TIMEOUT_S = 20

INTERCHANGE_COMMAND = ("-m", "hpcrl.job.interchange")
POOL_OPTIONS = (
    "{max_workers_per_node}",
    "--addresses={addresses}",
    "--prefetch={prefetch_capacity}",
    "--cores_per_worker={cores_per_worker}",
    "--mem_per_worker={mem_per_worker}",
    "--poll={poll_period}",
    "--port={worker_port}",
    "--cert_dir={cert_dir}",
    "--logdir={logdir}",
    "--logconf={logconf}",
    "--block_id={{block_id}}",
    "--hb_period={heartbeat_period}",
    "--hb_threshold={heartbeat_threshold}",
    "--drain_period={drain_period}",
    "--cpu-affinity={cpu_affinity}",
    "--mpi-launcher={mpi_launcher}",
)
"""The options of Parsl's worker pool, one a line, so that paths may contain spaces; `StepProvider` splits them."""


class JobExecutors:
    """The executors of a job, by name, and the worker pools of roles."""

    def __init__(self, job: JobDir, *, address: str) -> None:
        logging.getLogger("parsl").setLevel(logging.WARNING)
        self._address = address
        self._pools: dict[str, StepProvider] = {}
        """The providers of executors that have a pool on each of their nodes."""
        self._elastic: dict[str, StepProvider | JobProvider] = {}
        """The providers of executors whose blocks are started and ended with the work."""
        self._executors: dict[str, HighThroughputExecutor] = {}
        self._lost_pools: SimpleQueue[tuple[str, str]] = SimpleQueue()
        """The executors and hosts of worker pools that have fallen silent."""
        self._kernel = parsl.DataFlowKernel(
            Config(
                executors=[],
                exit_mode="skip",
                initialize_logging=False,
                run_dir=str(job.parsl),
                strategy="none",
                usage_tracking=0,
            )
        )

    def add_pools(self, name: str, pools: StepProvider, *, command: Sequence[str], workers_per_node: int) -> None:
        """Add an executor, and start its worker pools, which `command` does."""
        self._pools[name] = pools
        executor = self._add_executor(name, pools, command=command, workers_per_node=workers_per_node)
        executor.scale_out_facade(pools.num_first_blocks)  # Parsl itself would start them 5 s later

    def add_elastic(
        self, name: str, blocks: StepProvider | JobProvider, *, command: Sequence[str], workers_per_node: int
    ) -> None:
        """Add an executor without a pool."""
        self._elastic[name] = blocks
        self._add_executor(name, blocks, command=command, workers_per_node=workers_per_node)

    def has(self, name: str) -> bool:
        return name in self._executors

    def submit(self, name: str, function: str, *args: Any) -> "Future[None]":
        """Call a function, given by its name, in a worker of an executor."""
        future: Future[None] = self._kernel.submit(
            call_by_name,
            app_args=(function, *args),
            executors=[name],
            cache=False,
            ignore_for_cache=[],
            app_kwargs={},
        )
        future.add_done_callback(partial(self._note_lost_pool, name))
        return future

    def add_block(self, name: str) -> None:
        """Start one more block; if Slurm refuses it, a later request may be granted."""
        self._executors[name].scale_out_facade(1)

    def num_blocks(self, name: str) -> int:
        """Count the blocks of an elastic executor that wait or run."""
        return self._elastic[name].num_running()

    def cancel_blocks(self, name: str) -> None:
        """End the blocks of an elastic executor."""
        self._elastic[name].cancel_all()

    def replace_lost(self) -> list[tuple[str, str]]:
        """Start a new worker pool for every one that has ended; return their executors and nodes."""
        while not self._lost_pools.empty():
            name, host = self._lost_pools.get()
            if name in self._pools:
                self._pools[name].end_lost(host)
        lost = [(name, node) for name, pools in self._pools.items() for node in pools.lost_nodes()]
        for name, _ in lost:
            self.add_block(name)
        return lost

    def drop_node(self, name: str, node: str) -> bool:
        """Start no more pools of an executor on a node; False if it has no other."""
        return self._pools[name].drop_node(node)

    def num_nodes(self, name: str) -> int:
        """Count the nodes on which worker pools of an executor are started."""
        return self._pools[name].num_nodes

    def num_pools(self) -> int:
        """Count the blocks of worker pools that run."""
        return sum(pools.num_running() for pools in self._pools.values())

    def cancel_all(self) -> None:
        """End all blocks."""
        for provider in self._list_providers():
            provider.cancel_all()

    def end_kernel(self, *, timeout_s: float) -> None:
        """End Parsl, but do not wait forever for an interchange that was killed: the guardian ends what is left."""
        cleanup = threading.Thread(target=self._kernel.cleanup, name="parsl's end", daemon=True)
        cleanup.start()
        cleanup.join(timeout_s)

    def await_ends(self, *, deadline: float) -> None:
        """Wait until `deadline` (monotonic) for the blocks of this job to end, then kill the rest."""
        for provider in self._list_providers():
            if isinstance(provider, StepProvider):
                provider.wait(deadline=deadline)

    def _list_providers(self) -> list[StepProvider | JobProvider]:
        return [*self._pools.values(), *self._elastic.values()]

    def _add_executor(
        self, name: str, provider: StepProvider | JobProvider, *, command: Sequence[str], workers_per_node: int
    ) -> HighThroughputExecutor:
        self._executors[name] = HighThroughputExecutor(
            label=name,
            provider=provider,
            address=self._address,
            launch_cmd="\n".join([*map(_escape_template, command), *POOL_OPTIONS]),
            interchange_launch_cmd=[sys.executable, *INTERCHANGE_COMMAND],
            max_workers_per_node=workers_per_node,
            cores_per_worker=1e-6,  # the plan counts the workers, not Parsl by the cores of the node
            heartbeat_period=HEARTBEAT_INTERVAL_S,
            heartbeat_threshold=HEARTBEAT_TIMEOUT_S,
            block_error_handler=noop_error_handler,
            encrypted=True,
        )
        self._kernel.add_executors([self._executors[name]])
        return self._executors[name]

    def _note_lost_pool(self, name: str, future: "Future[None]") -> None:
        """Note the worker pool of a task that was lost with it; a thread of Parsl calls this."""
        error = None if future.cancelled() else future.exception()
        if isinstance(error, ManagerLost):
            self._lost_pools.put((name, error.hostname))


def _escape_template(word: str) -> str:
    """Escape a word of Parsl's command, which is passed through str.format twice."""
    return word.replace("{", "{{{{").replace("}", "}}}}")
