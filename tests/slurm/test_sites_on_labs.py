"""Labs that imitate sites, and campaigns on them by the sites' own files."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.site import load_site
from hpcrl.config.toml import shipped_folder
from hpcrl.errors import PlanError
from hpcrl.slurm.script import make_batch_script
from hpcrl.slurm.submit import check_script
from tests.support.campaigns import SIMULATED, events_of, hpcrl, outcome
from tests.support.described_sites import DESCRIBED, find_described
from tests.support.lab_tools import short_dir
from tests.support.plans import plan_recipe
from tests.unit.lab.test_likeness import WITH_SLURM

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

RECIPES = sorted(path.stem for path in shipped_folder("recipes").glob("*.toml"))
QUICK = ("gh200", "mi300a")
"""Two interpreters, and whole nodes; the others run with `pytest -m long`."""


@pytest.fixture
def lab_dir(needs_slurm: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a lab that a test brings up by the command line."""
    with short_dir() as folder:
        monkeypatch.setenv("HPCRL_LAB", str(folder / "l"))
        try:
            yield folder / "l"
        finally:
            hpcrl("lab", "down")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in DESCRIBED])
def test_a_cluster_of_a_few_lines_runs_a_campaign(name: str, lab_dir: Path, home: Path) -> None:
    assert f"submit quickstart --site {lab_dir}/site.toml" in hpcrl("lab", "up", "--like", find_described(name)).stdout
    hpcrl("submit", "quickstart", "--site", f"{lab_dir}/site.toml", "--name", "q", "--watch", *SIMULATED)
    campaign = CampaignDir(home / "campaigns" / "q")
    assert outcome(campaign)["outcome"] == "done"
    nodes = {event["node"].rpartition("-")[0] for event in events_of(campaign, "worker-started")}
    assert nodes <= {"gh200", "x86", "apu", "h200", "l40s", "cpu", "v100", "main"}


@pytest.mark.long
@pytest.mark.parametrize("site", WITH_SLURM)
def test_slurm_accepts_every_recipe_on_a_lab_like_the_site(site: str, lab_dir: Path, tmp_path: Path) -> None:
    hpcrl("lab", "up", "--like", site)
    path = f"{lab_dir}/site.toml"
    for recipe in RECIPES:
        script = tmp_path / f"{recipe}.sh"
        job = CampaignDir(tmp_path / recipe).job(0)
        with contextlib.suppress(PlanError):  # too long for a small job there, as tests/golden records
            script.write_text(make_batch_script(plan_recipe(recipe=recipe, site=path), job=job, python="python"))
        assert not script.exists() or "to start at" in check_script(script, site=load_site(path)), recipe
