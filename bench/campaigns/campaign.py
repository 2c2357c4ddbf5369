"""A campaign that runs while it is measured: `open_campaign` submits it, and ends it.

MeasuredCampaign   its steps, its CPU time, its trajectories
open_campaign      submit one, and end it with the block
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from hpcrl.campaign_dir.endpoints import EngineEndpoint, list_endpoints
from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import CampaignEvent, StepFinished, WorkerStarted
from hpcrl.campaign_dir.paths import CampaignDir

T = TypeVar("T", bound=CampaignEvent)

NAME = "whole"
LOOK_INTERVAL_S = 0.1
START_TIMEOUT_S = 240.0
END_TIMEOUT_S = 60.0
ROOT = Path(__file__).parents[2]


@dataclass
class MeasuredCampaign:
    """A running campaign."""

    home: Path
    site: str
    name: str = NAME
    submitted_at: float = 0.0
    events: list[CampaignEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory = CampaignDir(self.home / "campaigns" / self.name)
        self._reader = EventReader(self.directory.events)

    def command(self, *arguments: str) -> None:
        environ = os.environ | {"HPCRL_HOME": str(self.home), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "hpcrl.cli", *arguments]
        subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, check=True, timeout=300)

    def submit(self, recipe: Path, *settings: str) -> None:
        options = [word for setting in settings for word in ("-s", setting)]
        self.submitted_at = time.time()
        self.command("submit", str(recipe), "--site", self.site, "--name", NAME, *options)

    def list_events(self, kind: type[T]) -> list[T]:
        """Return the events of one kind so far, by time."""
        with contextlib.suppress(FileNotFoundError):
            self.events += self._reader.poll()
        return sorted((event for event in self.events if isinstance(event, kind)), key=lambda event: event.time)

    def list_steps(self) -> list[StepFinished]:
        return self.list_events(StepFinished)

    def await_condition(self, condition: Callable[[], bool], *, timeout_s: float) -> None:
        """Wait for a condition; raise the ends of the logs if the job ends before, or it takes too long."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            has_ended = self.directory.job(0).outcome.exists()
            if has_ended or time.monotonic() > deadline:
                logs = sorted(self.directory.job(0).logs.glob("*.log"))
                ends = "\n".join(f"{path.name}: {path.read_text(errors='replace')[-500:]}" for path in logs)
                raise RuntimeError(f"the campaign {'has ended' if has_ended else 'did not get there in time'}:\n{ends}")
            time.sleep(LOOK_INTERVAL_S)

    def await_steps(self, num: int) -> None:
        self.await_condition(lambda: len(self.list_steps()) >= num, timeout_s=START_TIMEOUT_S)

    def read_endpoint(self) -> EngineEndpoint:
        """Return the endpoint of its first decode worker."""
        return next(one for one in list_endpoints(self.directory.endpoints) if one.role == "decode")

    def suspend_all_but_engines(self) -> None:
        """Leave the cores to the engines, until the end of the campaign."""
        started = self.list_events(WorkerStarted)
        engines = {event.pid for event in started if event.role in ("prefill", "decode")}
        for process in self.list_processes():
            with contextlib.suppress(psutil.Error):
                parents = {parent.pid for parent in process.parents()}
                if process.pid not in engines and not parents & engines:
                    process.suspend()

    def list_processes(self) -> list[psutil.Process]:
        """Return what runs for this campaign on this machine."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("HPCRL_HOME") == str(self.home):
                    found.append(process)
        return found

    def read_cpu_s(self) -> float:
        """Return the CPU time, user and system, of all processes that run now."""
        total = 0.0
        for process in self.list_processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total


@contextlib.contextmanager
def open_campaign(home: Path, recipe: Path, *settings: str, site: str = "local") -> Iterator[MeasuredCampaign]:
    """Submit a campaign with its files in `home`; end it and remove them at the end of the block."""
    campaign = MeasuredCampaign(home=home, site=site)
    try:
        campaign.submit(recipe, *settings)
        yield campaign
    finally:
        for process in campaign.list_processes():
            with contextlib.suppress(psutil.Error):
                process.resume()
        with contextlib.suppress(subprocess.SubprocessError):
            campaign.command("stop", NAME, "--now")
        deadline = time.monotonic() + END_TIMEOUT_S
        while campaign.list_processes() and time.monotonic() < deadline:
            time.sleep(LOOK_INTERVAL_S)
        shutil.rmtree(home, ignore_errors=True)
