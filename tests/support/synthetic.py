"""Make campaign directories as real processes leave them, without the processes."""

import os
import weakref
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.campaign_dir.event_log import EventLog
from hpcrl.campaign_dir.events import (
    CampaignEvent,
    JobStarted,
    LayoutChosen,
    StepFinished,
    VersionPublished,
    WorkerStarted,
)
from hpcrl.campaign_dir.paths import SPOOLS, CampaignDir
from hpcrl.system.files import make_private_dir, publish_json
from hpcrl.system.processes import read_start_ticks

T0 = 1_800_000_000.0
PARTITIONS = {"env": "env", "reward": "env", "prefill": "prefill", "decode": "decode", "train": "train"}


class SyntheticCampaign:
    """A campaign directory with the files that submit, driver and workers write; `now` is its clock."""

    def __init__(self, root: Path, *, num_steps: int = 10, workers: int = 1) -> None:
        self.directory = CampaignDir(root)
        self.now = T0
        make_private_dir(root)
        for path in (self.directory.jobs, self.directory.events, *(self.directory.spool(name) for name in SPOOLS)):
            make_private_dir(path)
        publish_json(self.directory.recipe, {"name": "quickstart", "train": {"num_steps": num_steps}, "seed": 0})
        publish_json(self.directory.plan, _plan(workers))
        publish_json(self.directory.site, {"name": "lab"})
        publish_json(self.directory.manifest, {"name": root.name, "recipe": "quickstart", "site": "lab", "created": T0})
        self._logs: dict[str, EventLog] = {}
        weakref.finalize(self, _close_logs, self._logs)

    def submit(self, number: int = 0, *, job: str = "123") -> None:
        self._submitted(number, id=job, scheduler="slurm", pid=None, start_ticks=None)

    def submit_local(self, number: int = 0, *, pid: int | None = None) -> None:
        driver = pid or os.getpid()
        self._submitted(
            number, id=f"local-{driver}", scheduler="local", pid=driver, start_ticks=read_start_ticks(driver) or 1
        )

    def outcome(self, outcome: str, reason: str = "", *, number: int = 0, **changed: Any) -> None:
        record = {"outcome": outcome, "reason": reason, "time": self.now} | changed
        publish_json(self.directory.job(number).outcome, record)

    def emit(self, worker: str, event: CampaignEvent, *, job: int = 0) -> None:
        """Log an event of `worker` ("decode-0", "driver") at the campaign's clock."""
        name = f"{job:03d}-{worker}"
        role = worker.rpartition("-")[0] or worker
        if name not in self._logs:
            fields = {"job": job, "role": role, "worker": name, "node": f"{role}0"}
            if role in PARTITIONS:
                fields["partition"] = PARTITIONS[role]
            self._logs[name] = EventLog(self.directory.events / f"{name}.jsonl", **fields)
        self._logs[name].emit(msgspec.structs.replace(event, time=self.now))
        self.beat(name)

    def beat(self, name: str) -> None:
        os.utime(self.directory.events / f"{name}.jsonl", (self.now, self.now))

    def beat_all(self) -> None:
        for name in self._logs:
            self.beat(name)

    def start(self, *, job: int = 0, workers: int = 1) -> None:
        """Log the start of the driver and all workers."""
        self.emit("driver", JobStarted(slurm_id="123", end_time=self.now + 3600), job=job)
        self.emit("driver", LayoutChosen(layout="hetjob", reason="site lab runs heterogeneous jobs"), job=job)
        for role in PARTITIONS:
            for index in range(workers):
                self.emit(f"{role}-{index}", WorkerStarted(pid=1, gpus=[]), job=job)

    def step(self, step: int, *, job: int = 0, reward: float | None = None, num_trajectories: int = 8) -> None:
        self.emit("train-0", VersionPublished(version=step, step=step, wall_s=0.1), job=job)
        figures = {"loss": 0.1, "kl": 0.002, "entropy": 1.5, "lag_mean": 0.5, "step_s": 2.0, "wait_s": 0.4}
        value = step / 10 if reward is None else reward
        self.emit(
            "train-0", StepFinished(
                step=step, version=step - 1, reward_mean=value, num_trajectories=num_trajectories, **figures
            ), job=job,
        )  # fmt: skip

    def segment(self, spool: str, number: int, count: int) -> None:
        (self.directory.spool(spool) / f"000-env-0-{number:08d}-{count}-0123abcd.h5").touch()

    def close(self) -> None:
        _close_logs(self._logs)

    def _submitted(self, number: int, **record: Any) -> None:
        make_private_dir(self.directory.job(number).root)
        publish_json(self.directory.job(number).submission, {"time": self.now, **record})


def _close_logs(logs: dict[str, EventLog]) -> None:
    """Close the logs, also of a campaign that no test has closed: `select` takes no descriptor above 1,023."""
    for log in logs.values():
        log.close()


def _plan(workers: int) -> dict[str, Any]:
    components = [
        {"index": index, "partition": PARTITIONS[role], "roles": ["env", "reward"] if role == "env" else [role]}
        for index, role in enumerate(("env", "prefill", "decode", "train"))
    ]
    roles = [{"role": role, "component": 0, "num_workers": workers} for role in PARTITIONS]
    plan: dict[str, Any] = msgspec.to_builtins({"layout": "hetjob", "components": components, "roles": roles})
    return plan
