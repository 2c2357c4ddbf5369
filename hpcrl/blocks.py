"""Parsl blocks that are small Slurm jobs of their own; with hpcrl.runtime the only module that imports parsl.

The blocks inside the job are hpcrl.runtime.Steps.
"""

from collections.abc import Callable, Sequence

from parsl.jobs.states import JobState, JobStatus
from parsl.providers.base import ExecutionProvider

from hpcrl.errors import SlurmError
from hpcrl.files import publish
from hpcrl.plan import RewardJobs
from hpcrl.rundir import JobDir
from hpcrl.slurm import side

SETTLE_S = 5


class Jobs(ExecutionProvider):
    """Worker pools in jobs beside this one; Slurm may preempt them, and then they are simply gone."""

    def __init__(self, wanted: RewardJobs, *, job: JobDir, script: Callable[[str, list[str]], str]) -> None:
        """`script(name, command)` is the batch script that runs a worker pool's command."""
        self.init_blocks = self.min_blocks = 0
        self.max_blocks = wanted.max_jobs
        self.nodes_per_block = 1
        self.parallelism = 1.0
        self.cores_per_node = self.mem_per_node = None
        self.script_dir = str(job.logs)
        self.resources: dict[object, object] = {}
        self._job = job
        self._script = script
        self._begun: list[str] = []
        """Jobs that have not been seen to end."""

    def submit(self, command: str, tasks_per_node: int, job_name: str = "block") -> str | None:
        """Begin a job; None where Slurm refuses, which is no reason for the campaign to end."""
        del tasks_per_node
        path = self._job.root / f"{job_name}.sh"
        publish(path, self._script(job_name, command.split("\n")))
        try:
            id = side.begin(path, record=self._job.reward_jobs)
        except SlurmError:
            return None
        self._begun.append(id)
        return id

    def status(self, job_ids: Sequence[object]) -> list[JobStatus]:
        alive = side.alive([str(job_id) for job_id in job_ids])
        if alive is None:
            return [JobStatus(JobState.UNKNOWN) for _ in job_ids]
        return [JobStatus(_state(alive.get(str(job_id)))) for job_id in job_ids]

    def cancel(self, job_ids: Sequence[object]) -> list[bool]:
        """End these jobs; one that Slurm does not end now ends with its walltime."""
        ids = [str(job_id) for job_id in job_ids]
        try:
            side.cancel(ids)
        except SlurmError:
            return [False for _ in ids]
        self._begun = [id for id in self._begun if id not in ids]
        return [True for _ in ids]

    def num_running(self) -> int:
        """Jobs that wait or run; those that Slurm says nothing of count as they did before."""
        alive = side.alive(self._begun)
        if alive is not None:
            self._begun = [id for id in self._begun if id in alive]
        return len(self._begun)

    def cancel_all(self) -> None:
        """End every job that this provider began."""
        self.cancel(list(self._begun))

    @property
    def label(self) -> str:
        return "jobs"

    @property
    def status_polling_interval(self) -> int:
        return SETTLE_S


def _state(runs: bool | None) -> JobState:
    match runs:
        case None:
            return JobState.COMPLETED
        case True:
            return JobState.RUNNING
        case False:
            return JobState.PENDING
