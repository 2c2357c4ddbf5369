"""The identity of a worker: frozen records that travel as one parameter.

EnvWorkerId    which of the env workers
WorkerPlace    the campaign, the job and the node
"""

from dataclasses import dataclass

from hpcrl.campaign_dir.paths import CampaignDir, JobDir


@dataclass(frozen=True)
class EnvWorkerId:
    """The position of an env worker among all of them; they share tasks, room and evaluations by it."""

    index: int
    count: int

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.count, f"env worker {self.index} of {self.count}"


@dataclass(frozen=True)
class WorkerPlace:
    """The campaign and job that a process works for, and the node that it runs on."""

    campaign: CampaignDir
    job: JobDir
    node: str
