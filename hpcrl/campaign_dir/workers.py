"""The identity of a worker, as frozen records that are passed as one parameter.

EnvWorkerId    the index of an env worker
WorkerPlace    the job, with its campaign, and the node
"""

from dataclasses import dataclass

from hpcrl.campaign_dir.paths import CampaignDir, JobDir


@dataclass(frozen=True)
class EnvWorkerId:
    """The index of an env worker among all; tasks, room and evaluations are divided by it."""

    index: int
    count: int

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.count, f"env worker {self.index} of {self.count}"


@dataclass(frozen=True)
class WorkerPlace:
    """The job of a process, and the node that it runs on."""

    job: JobDir
    node: str

    @property
    def campaign(self) -> CampaignDir:
        return self.job.campaign
