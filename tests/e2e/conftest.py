"""Fixtures of the suites that run whole campaigns on this machine."""

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from tests.support.campaigns import (
    SIMULATED,
    driver_of,
    end_campaigns,
    hpcrl,
    outcome,
    processes_of,
    snapshot,
    steps,
    until,
    windows_of,
)
from tests.support.shared_gpus import pretend_gpus


@pytest.fixture
def campaigns(home: Path) -> Iterator[Path]:
    """The directory of campaigns; at the end no process may be left of any."""
    yield home / "campaigns"
    end_campaigns(home)


@pytest.fixture
def own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the tests' rewards, curricula and nodes importable in campaigns."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@dataclass
class CrashedCampaign:
    """A campaign whose driver was killed, and which was resumed to its end; what was seen meanwhile."""

    campaign: CampaignDir
    num_steps: int = 40
    reports: dict[str, Path] = field(default_factory=dict)
    """Its report while it ran, after the crash and after its end."""
    ended: dict[str, Any] = field(default_factory=dict)
    """The outcome of the first job."""
    left: list[str] = field(default_factory=list)
    """Windows of weights that the crash left."""
    seen: dict[str, Any] = field(default_factory=dict)
    """What `hpcrl monitor` shows in the end."""
    model: Path = Path()
    """The exported model."""

    def report(self, state: str) -> None:
        self.reports[state] = self.model.parent / f"{state}.html"
        hpcrl("report", self.campaign.name, "-o", str(self.reports[state]))


@pytest.fixture(scope="session")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashedCampaign]:
    """Run the campaign, with two ranks and two engines on a machine that seems to have two GPUs."""
    folder = tmp_path_factory.mktemp("crashed")
    home = folder / "home"
    crashed = CrashedCampaign(CampaignDir(home / "campaigns" / "two"), model=folder / "model")
    campaign = crashed.campaign
    settings = (
        *(*SIMULATED, "-s", "resources.train.num_workers=2", "-s", "resources.decode.num_workers=2"),
        *("-s", 'train.sharding="full"', "-s", 'train.publish_dtype="bfloat16"'),
        *("-s", "train.checkpoint_every_steps=1", "-s", f"train.num_steps={crashed.num_steps}"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPCRL_HOME", str(home))
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.setenv("PATH", pretend_gpus(folder / "programs", 2))
        try:
            hpcrl("submit", "quickstart", "--site", "local", "--name", "two", *settings)
            until(lambda: len(steps(campaign)) >= 3, what="three steps were made")
            assert windows_of(campaign)
            crashed.report("running")
            os.kill(driver_of(campaign), signal.SIGKILL)
            crashed.ended = outcome(campaign)
            until(lambda: not processes_of(home), what="no process is left", timeout_s=60)
            crashed.left = windows_of(campaign)
            until(lambda: snapshot("two")["state"] == "failed", what="the campaign has failed")
            crashed.report("crashed")
            hpcrl("resume", "two", "--watch")
            crashed.report("finished")
            crashed.seen = snapshot("two")
            hpcrl("export", "two", "--hf", str(crashed.model))
        finally:
            end_campaigns(home)
    yield crashed
    shutil.rmtree(home, ignore_errors=True)
