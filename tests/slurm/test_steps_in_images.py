"""Campaigns whose steps run in an image, on the lab; bubblewrap over an unpacked root file system is its apptainer."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from tests.support.campaigns import SIMULATED, hpcrl, outcome
from tests.support.lab_tools import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

FAKE = Path(__file__).parents[1] / "support" / "fakes" / "apptainer_bwrap"
SYSTEM = ("/usr", "/etc", "/opt", "/var/lib")
LINKS = ("bin", "sbin", "lib", "lib64")


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root file system with links only, and the program that runs commands in it."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: apt-get install bubblewrap")
    programs = tmp_path / "programs"
    programs.mkdir()
    shutil.copy(FAKE, programs / "apptainer")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    root = tmp_path / "image"
    root.mkdir()
    for name in LINKS:
        (root / name).symlink_to(f"usr/{name}")
    return root


def test_the_steps_of_all_roles_run_in_the_image(lab: Lab, campaigns: Path, image: Path) -> None:
    places = {*SYSTEM, sys.prefix, sys.base_prefix, str(Path(__file__).parents[2])}
    binds = ", ".join(f'"{path}"' for path in sorted(places))
    settings = ["container=apptainer", f"image={image}", f"image_python={sys.executable}", f"image_binds=[{binds}]"]
    named = [word for setting in settings for word in ("-s", f"site.{setting}")]
    hpcrl("submit", "quickstart", "--site", "lab", "--name", "i", "--watch", *SIMULATED, *named)
    campaign = CampaignDir(campaigns / "i")
    assert outcome(campaign)["outcome"] == "done"
    ran = (image.parent / "runs").read_text()
    for part in ("hpcrl.roles train", "hpcrl.job.worker_pool", "hpcrl.weights.couriers"):
        assert part in ran
    assert "hpcrl.job.driver" not in ran, "the driver starts steps, and needs Slurm's commands"
