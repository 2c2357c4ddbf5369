"""The plan JSON and batch script of every shipped recipe on every site, byte for byte, and plans for real models.

After an intended change: HPCRL_UPDATE_GOLDEN=1 python -m pytest tests/golden, then read the diff.
"""

import os
from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.toml import shipped_folder
from hpcrl.errors import PlanError
from hpcrl.slurm.script import make_batch_script
from tests.support.plans import plan_recipe

GOLDEN = Path(__file__).parent / "files"
RECIPES = sorted(path.stem for path in shipped_folder("recipes").glob("*.toml"))
SITES = sorted(path.stem for path in shipped_folder("sites").glob("*.toml"))


REAL_MODELS = ("qwen3-8b", "qwen3-8b-128k", "qwen3-30b-a3b", "llama-3-70b")
"""On 4, 4, 16 and 32 nodes of the trainer, with trajectories of 32k, 128k, 16k and 32k tokens."""
CLUSTERS = {
    **{"perlmutter": "perlmutter", "leonardo": "leonardo"},
    **{name: str(Path(__file__).parent / "sites" / f"{name}.toml") for name in ("a100-40-nodes", "h100-nodes")},
}


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
    compare(made)


@pytest.mark.parametrize("site", CLUSTERS)
@pytest.mark.parametrize("recipe", REAL_MODELS)
def test_the_plan_for_a_real_model_or_its_refusal_is_as_recorded(recipe: str, site: str) -> None:
    path = Path(__file__).parent / "recipes" / f"{recipe}.toml"
    try:
        compare({f"{recipe}.{site}.json": plan_recipe(recipe=str(path), site=CLUSTERS[site]).to_json().decode()})
    except PlanError as refusal:
        compare({f"{recipe}.{site}.refusal.txt": f"{refusal}\n"})


def compare(made: dict[str, str]) -> None:
    """Compare texts with the recorded ones, or record them."""
    if os.environ.get("HPCRL_UPDATE_GOLDEN"):
        for name, text in made.items():
            (GOLDEN / name).write_text(text)
    assert {name: (GOLDEN / name).read_text() for name in made} == made
