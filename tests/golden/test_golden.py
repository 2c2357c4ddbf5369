"""The plan JSON and batch script of every shipped recipe on every site, byte for byte.

After an intended change: HPCRL_UPDATE_GOLDEN=1 python -m pytest tests/golden, then read the diff.
"""

import os
from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.toml import shipped_folder
from hpcrl.slurm.script import make_batch_script
from tests.support.plans import plan_recipe

GOLDEN = Path(__file__).parent / "files"
RECIPES = sorted(path.stem for path in shipped_folder("recipes").glob("*.toml"))
SITES = sorted(path.stem for path in shipped_folder("sites").glob("*.toml"))


def test_there_are_recipes_and_sites() -> None:
    assert "quickstart" in RECIPES
    assert {"local", "lab", "perlmutter", "leonardo"} <= set(SITES)


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_plan_and_script_are_as_recorded(recipe: str, site: str) -> None:
    plan = plan_recipe(recipe=recipe, site=site)
    run = CampaignDir(Path(f"/scratch/someone/hpcrl/{recipe}-1"))
    script = make_batch_script(plan, job=run.job(0), python="/opt/hpcrl/bin/python")
    made = {f"{recipe}.{site}.json": plan.to_json().decode(), f"{recipe}.{site}.sh": script}
    if os.environ.get("HPCRL_UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        for name, text in made.items():
            (GOLDEN / name).write_text(text)
    assert {name: (GOLDEN / name).read_text() for name in made} == made
