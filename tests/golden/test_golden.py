"""The plan and batch script of every shipped recipe on every site, byte for byte, and plans for real models.

The first five sites have a file for each plan and script, the others one file with the scripts of all recipes and what
the plans warn of: the rest of a plan is in the script.

After an intended change: HPCRL_UPDATE_GOLDEN=1 python -m pytest tests/golden, then read the diff.
"""

import contextlib
import os
import re
from itertools import product
from pathlib import Path

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.toml import shipped_folder
from hpcrl.errors import PlanError
from hpcrl.hardware.cost_model import TRAINING_PASSES, make_model_shape
from hpcrl.plan.plan import Plan
from hpcrl.slurm.script import list_separate_components, make_batch_script, make_component_script
from hpcrl.slurm.step_script import make_step_script
from tests.support.plans import make_recipe, make_site, plan_recipe
from tests.support.shell_scripts import find_script_problems

GOLDEN = Path(__file__).parent / "files"
SHIPPED = sorted(path.stem for path in shipped_folder("recipes").glob("*.toml"))
OF_REAL_SIZE = [name for name in SHIPPED if name.startswith("qwen3-")]
RECIPES = [name for name in SHIPPED if name not in OF_REAL_SIZE]
SITES = ("lab", "lab-hetstep", "local", "perlmutter", "leonardo")
MORE_SITES = sorted({path.stem for path in shipped_folder("sites").glob("*.toml")} - set(SITES))


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
    campaign = CampaignDir(Path(f"/scratch/someone/hpcrl/{recipe}-1"))
    script = make_batch_script(plan, job=campaign.job(0), python="/opt/hpcrl/bin/python")
    made = {f"{recipe}.{site}.json": plan.to_json().decode(), f"{recipe}.{site}.sh": script}
    compare(made)


@pytest.mark.parametrize("site", MORE_SITES)
def test_scripts_and_warnings_for_a_site_are_as_recorded(site: str) -> None:
    compare({f"{site}.txt": "\n".join(describe_plan(recipe, site) for recipe in RECIPES)})


@pytest.mark.parametrize("recipe", OF_REAL_SIZE)
def test_plans_of_a_recipe_of_real_size_on_every_site_are_as_recorded(recipe: str) -> None:
    sites = sorted({*SITES, *MORE_SITES})
    compare({f"{recipe}.sites.txt": "\n".join(f"##### {site}\n{describe_plan(recipe, site)}" for site in sites)})


@pytest.mark.parametrize("model", REAL_MODELS)
def test_what_gpus_and_nodes_hold_of_a_real_model_on_every_site_is_as_recorded(model: str) -> None:
    recipe = str(Path(__file__).parent / "recipes" / f"{model}.toml")
    sites = {site: site for site in sorted({*SITES, *MORE_SITES})} | CLUSTERS
    compare({f"held.{model}.txt": "\n".join(describe_memory(recipe, *site) for site in sites.items())})


def describe_memory(recipe: str, name: str, site: str) -> str:
    """Return what each GPU and node holds under the plan of a recipe."""
    try:
        plan = plan_recipe(recipe=recipe, site=site)
    except PlanError as refusal:
        return f"=== {name}\nrefused: {refusal}\n"
    trainer = plan.train_memory.describe() if plan.train_memory is not None else []
    engines = [line for memory in plan.engine_memory for line in memory.describe()]
    return "\n".join(
        [f"=== {name}: {plan.layout}, {plan.num_nodes} nodes, {plan.num_gpus} GPUs", *trainer, *engines, ""]
    )


def test_recipes_of_real_size_fit_where_their_memory_is() -> None:
    """Refused are only sites without enough GPUs or memory."""
    planned: dict[str, list[str]] = {recipe: [] for recipe in OF_REAL_SIZE}
    for recipe in OF_REAL_SIZE:
        for site in {*SITES, *MORE_SITES}:
            with contextlib.suppress(PlanError):
                plan_recipe(recipe=recipe, site=site)
                planned[recipe].append(site)
    everywhere = {"alps", "delta", "deltaai", "frontier", "jupiter", "leonardo", "lumi", "marenostrum5", "perlmutter"}
    assert all(everywhere <= set(sites) for sites in planned.values()), planned


def test_training_consumes_no_more_than_the_peak_of_the_gpus_that_it_gets() -> None:
    """The figure that engines are balanced against is that of the placement, and not of better GPUs."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    own = [str(Path(__file__).parent / "recipes" / f"{name}.toml") for name in REAL_MODELS]
    for recipe, site in [*product(OF_REAL_SIZE, (*SITES, *MORE_SITES)), *product(own, CLUSTERS.values())]:
        with contextlib.suppress(PlanError):
            plan = plan_recipe(recipe=recipe, site=site)
            for tokens_per_s in re.findall(r"training consumes about (\d+)", "\n".join(plan.sizes)):
                found[recipe, site] = compare_with_peak(plan, recipe, site, tokens_per_s=float(tokens_per_s))
    assert found
    assert not {where: both for where, both in found.items() if both[0] >= both[1]}


def compare_with_peak(plan: Plan, recipe: str, site: str, *, tokens_per_s: float) -> tuple[float, float]:
    """Return the TFLOPS that each GPU of the trainer needs for so many tokens, and its peak."""
    train, shape = plan.role("train"), make_recipe(name=recipe).model.architecture
    gpu = make_site(site).find_gpu(plan.components[train.component].gpu)
    assert shape is not None
    assert gpu is not None
    assert gpu.bf16_tflops is not None
    token_flops = 2 * TRAINING_PASSES * make_model_shape(shape).num_active
    return tokens_per_s * token_flops / (train.num_workers * train.gpus_per_worker) / 1e12, gpu.bf16_tflops


def test_the_scripts_of_separate_jobs_are_as_recorded(tmp_path: Path) -> None:
    site = str(Path(__file__).parent / "sites" / "no-het-jobs.toml")
    plan = plan_recipe("job.survive_node_loss=true", recipe="quickstart", site=site)
    job = CampaignDir(Path("/scratch/someone/hpcrl/q-1")).job(0)
    assert plan.layout == "multi-job"
    scripts = {"separate-0.sh": make_batch_script(plan, job=job, python="/opt/hpcrl/bin/python")}
    for part in list_separate_components(plan):
        script = make_component_script(plan, part, job=job, site=make_site(site))
        scripts[f"separate-{part.index}.sh"] = script
    assert find_script_problems(scripts, tmp_path) == ""
    compare(scripts)


def describe_plan(recipe: str, site: str) -> str:
    """Return the script of a recipe, and what else its plan has to report."""
    try:
        plan = plan_recipe(recipe=recipe, site=site)
    except PlanError as refusal:
        return f"=== {recipe}\nrefused: {refusal}\n"
    job = CampaignDir(Path(f"/scratch/someone/hpcrl/{recipe}-1")).job(0)
    script = make_batch_script(plan, job=job, python="/opt/hpcrl/bin/python")
    remarks = [f"{plan.layout}: {plan.layout_reason}", *plan.sizes, *plan.fallbacks, *plan.warnings]
    return "\n".join([f"=== {recipe}", *remarks, script])


@pytest.mark.parametrize("site", SITES + tuple(MORE_SITES))
def test_scripts_are_bash(site: str, tmp_path: Path) -> None:
    job = CampaignDir(tmp_path / "c").job(0)
    scripts = {}
    for recipe in RECIPES:
        with contextlib.suppress(PlanError):  # which is recorded
            plan = plan_recipe(recipe=recipe, site=site)
            scripts[f"{recipe}.sh"] = make_batch_script(plan, job=job, python="python")
    loaded = make_site(site)
    for label in loaded.partitions:
        setup = make_step_script(loaded, label, driver_prologue=None, binds=["/campaigns/a b"])
        scripts |= {} if setup is None else {f"step-{label}.sh": setup}
    assert find_script_problems(scripts, tmp_path) == ""


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
