"""Separate prefill workers, or one pool of engines that do both."""

import pytest

from hpcrl.plan.plan import Plan
from tests.support.plans import plan_recipe, refuse_plan

NONE, ONE = "resources.prefill.num_workers=0", "resources.prefill.num_workers=1"


def pools(made: Plan) -> list[str]:
    return [role.role for role in made.roles if role.role in ("prefill", "decode")]


def reasons(made: Plan) -> list[str]:
    return [line for line in made.sizes if "one pool" in line]


def test_two_kinds_of_gpus_are_two_pools() -> None:
    assert pools(plan_recipe()) == ["prefill", "decode"]
    assert reasons(plan_recipe()) == []


@pytest.mark.parametrize(
    ("site", "settings", "why"),
    [
        ("leonardo", (), "the same kind of GPU (a100-64)"),
        ("lab-hetstep", (), "one partition has one kind of GPU"),
        ("local", (), "site local has no GPUs"),
        ("lab", ("site.partitions.prefill.max_nodes=1", "site.partitions.train.max_nodes=1"), ""),
        ("lab", tuple(f"site.partitions.{name}.max_nodes=1" for name in ("prefill", "train", "decode")), "3 GPU nodes"),
    ],
)
def test_where_prefill_would_gain_nothing_there_is_one_pool_with_the_reason(
    site: str, settings: tuple[str, ...], why: str
) -> None:
    made = plan_recipe(*settings, site=site)
    assert pools(made) == (["decode"] if why else ["prefill", "decode"])
    assert [why in line for line in reasons(made)] == [True] * bool(why)


def test_a_number_of_prefill_workers_is_kept_whatever_the_site_has() -> None:
    assert pools(plan_recipe(ONE, site="leonardo")) == ["prefill", "decode"]
    assert pools(plan_recipe(NONE)) == ["decode"]
    assert reasons(plan_recipe(NONE)) == []


def test_one_pool_has_a_component_less() -> None:
    assert [component.roles[0] for component in plan_recipe(NONE, "job.layout=hetjob").components] == [
        "env",
        "decode",
        "train",
    ]


@pytest.mark.parametrize("setting", ["router.switch_roles=true", 'router.sizing="auto"'])
def test_workers_that_switch_roles_are_in_two_pools(setting: str) -> None:
    assert pools(plan_recipe(setting, site="leonardo")) == ["prefill", "decode"]
    assert "resources.prefill.num_workers = 0 leaves one pool" in refuse_plan(setting, NONE)


def test_the_engines_of_one_pool_are_sized_for_the_episodes() -> None:
    large = ("model.num_params=8000000000", "train.sharding=full", "resources.train.num_workers=4")
    made = plan_recipe(*large, NONE, "rollout.mode=sync", "rollout.max_running=512", site="perlmutter")
    assert made.role("decode").num_workers > 1
