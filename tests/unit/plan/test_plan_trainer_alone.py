"""The plan of a recipe that only imitates: the trainer and nothing else."""

import pytest

from hpcrl.errors import PlanError
from hpcrl.plan.demand import compute_node_needs
from hpcrl.plan.plan import Plan
from tests.support.plans import make_recipe, plan_recipe


def imitation(*settings: str, steps: int, site: str = "lab") -> Plan:
    """Plan the quickstart with a warm-up of some of its 40 steps."""
    warmup = (f"warmup.steps={steps}", "warmup.path=x.jsonl")
    return plan_recipe("train.num_steps=40", *warmup, *settings, site=site)


@pytest.mark.parametrize("site", ["lab", "lab-hetstep", "local"])
def test_a_recipe_whose_steps_are_all_of_the_warm_up_gets_one_component_for_the_trainer(site: str) -> None:
    made = imitation("reward.placement=elastic", steps=40, site=site)
    assert [role.role for role in made.roles] == ["train"]
    assert [component.roles for component in made.components] == [["train"]]
    assert made.layout == ("local" if site == "local" else "hetstep")
    assert made.reward_jobs is None


@pytest.mark.parametrize(("steps", "settings"), [(39, ()), (40, ("evaluation.every_versions=1",))])
def test_a_recipe_with_other_steps_or_evaluations_has_every_role(steps: int, settings: tuple[str, ...]) -> None:
    assert len(imitation(*settings, steps=steps).roles) == 5


def test_the_node_of_a_trainer_alone_also_holds_the_driver_and_no_second_copy_of_the_weights() -> None:
    alone, among = (
        compute_node_needs("train", make_recipe("model.num_params=10_000_000_000", name=name), workers_per_node=1)
        for name in ("sft", "quickstart")
    )
    process, snapshot, driver, window = 3, 112, 2, 75
    assert alone == (2, process + snapshot + driver), "the driver also has a core"
    assert among[1] == process + snapshot + window


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("train.num_steps=9", "warmup.steps=3"), "train.num_steps = 9 and warmup.steps = 3: without"),
        (("evaluation.every_versions=1",), r"every_versions = 1, and the recipe has no \[domains\] to evaluate"),
        (("teacher.path=/x",), "teacher is set, and every step is one of the warm-up"),
    ],
)
def test_settings_that_cannot_act_without_domains_are_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_recipe(*settings, recipe="sft")
