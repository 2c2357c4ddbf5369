"""A recipe on another number of GPUs is planned and checked as any other."""

import pytest

from hpcrl.campaign.request import CampaignRequest, load_files, load_request
from hpcrl.errors import ConfigError, PlanError
from hpcrl.simulation.campaign import SimulationSettings, simulate_campaign
from hpcrl.simulation.scaling import plan_for_gpus
from hpcrl.simulation.sizes import find_sizes
from hpcrl.simulation.workload import DrawnEpisodes, LatencySettings

ACCOUNT = "site.account=m1"
MEGATRON = ("train.trainer=megatron", "train.tensor_parallel=4", "train.expert_parallel=8")


def scale(recipe: str, num_gpus: int, *settings: str, site: str) -> CampaignRequest:
    return plan_for_gpus(*load_files(recipe, site=site, settings=settings), num_gpus).request


@pytest.mark.parametrize("factor", [2, 4])
def test_all_roles_grow_with_the_gpus_as_in_the_plan(factor: int) -> None:
    own = load_request("qwen3-32b", site="jupiter", settings=(ACCOUNT,)).plan
    plan = scale("qwen3-32b", factor * own.num_gpus, ACCOUNT, site="jupiter").plan
    assert (plan.num_gpus, plan.num_nodes) == (factor * own.num_gpus, factor * own.num_nodes)
    for role in (role for role in own.roles if role.role != "reward"):
        expected = pytest.approx(factor * role.num_workers, rel=0.1)
        assert plan.role(role.role).num_workers == expected, role.role  # env workers share a node, which leaves GPUs


@pytest.mark.parametrize("num_gpus", [28, 29, 30, 64, 201])
def test_whole_nodes_have_the_gpus_asked_for_or_a_node_less(num_gpus: int) -> None:
    plan = scale("qwen3-30b-a3b", num_gpus, ACCOUNT, site="perlmutter").plan
    assert num_gpus - 4 < plan.num_gpus <= num_gpus
    assert plan.train_memory is not None  # as it is checked for a plan


def test_training_has_the_gpus_of_whole_models() -> None:
    for num_gpus in (64, 201):
        num_ranks = (
            scale("qwen3-30b-a3b", num_gpus, ACCOUNT, *MEGATRON, site="perlmutter").plan.role("train").num_workers
        )
        assert num_ranks >= 8
        assert num_ranks % 8 == 0


def test_a_model_that_the_gpus_of_training_do_not_hold_is_refused() -> None:
    with pytest.raises(PlanError, match=r"--gpus 12: a train worker needs .* GiB"):
        scale("qwen3-32b", 12, ACCOUNT, site="jupiter")


def test_a_recipe_that_needs_more_ranks_than_it_asks_for_is_planned_for_more_gpus() -> None:
    settings = (ACCOUNT, "resources.train.num_workers=2")
    with pytest.raises(PlanError, match="a train worker needs"):
        load_request("qwen3-32b", site="jupiter", settings=settings)
    assert scale("qwen3-32b", 128, *settings, site="jupiter").plan.num_gpus == 128
    with pytest.raises(PlanError, match="a train worker needs"):
        scale("qwen3-32b", 16, *settings, site="jupiter")


def test_more_nodes_than_the_site_has_are_named() -> None:
    assert not [note for note in find_sizes(scale("quickstart", 6, site="lab")).notes if "allows" in note]
    notes = find_sizes(scale("quickstart", 40, site="lab")).notes
    assert "partition decode has 3 nodes; site lab allows 2" in notes


def test_env_workers_are_at_most_those_that_have_a_group_each() -> None:
    request = scale("quickstart", 400, "rollout.max_running=64", "train.groups_per_step=64", site="lab")
    assert request.plan.role("env").num_workers == 64 // request.recipe.rollout.episodes_per_group


def test_judges_grow_too() -> None:
    judge = (
        "judge.second.path=/models/second",
        "judge.second.num_params=8000000000",
        "judge.second.resources.num_workers=2",
    )
    base = scale("qwen3-32b", 80, ACCOUNT, *judge, site="jupiter").plan
    larger = scale("qwen3-32b", 160, ACCOUNT, *judge, site="jupiter").plan
    assert base.role("judge-second").num_workers < larger.role("judge-second").num_workers
    assert larger.num_gpus <= 160


@pytest.mark.parametrize(
    ("num_gpus", "site", "refusal"),
    [
        (
            1,
            "lab",
            r"--gpus 1: one worker of each role needs 3 GPUs \(1 for train, 1 for decode, 1 for prefill\): give more",
        ),
        (64, "local", "--gpus 64: site local is one machine: name the site of a cluster"),
    ],
)
def test_gpus_that_cannot_be_are_refused(num_gpus: int, site: str, refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        scale("quickstart", num_gpus, site=site)


@pytest.mark.parametrize(
    ("num_gpus", "refusal"),
    [
        (7, r"--gpus 7: one worker of each role needs 3 GPUs \(.*\), on nodes with 12 together: give more"),
        (9, r"--gpus 9: whole nodes would have 12 GPUs; with fewer workers, a train worker needs 139 GiB"),
    ],
)
def test_gpus_that_are_too_few_for_whole_nodes_are_refused_with_those_that_are_not(num_gpus: int, refusal: str) -> None:
    with pytest.raises((ConfigError, PlanError), match=refusal):
        scale("qwen3-8b-math", num_gpus, ACCOUNT, site="perlmutter")
    assert scale("qwen3-8b-math", 12, ACCOUNT, site="perlmutter").plan.num_gpus == 12


@pytest.mark.parametrize(
    ("recipe", "site", "num_gpus", "expected"),
    [
        ("qwen3-32b-swe", "leonardo", 33, 32),  # 20 ranks make up groups that divide rows, and 21 do not
        ("qwen3-32b", "perlmutter", 20, 20),  # with one decode engine less, training has its memory
        ("qwen3-8b-math", "frontier", 101, 96),  # a node more than the shares of the plan fill
    ],
)
def test_what_fits_into_fewer_gpus_fits_into_more(recipe: str, site: str, num_gpus: int, expected: int) -> None:
    assert scale(recipe, num_gpus, ACCOUNT, site=site).plan.num_gpus == expected


def test_gpus_that_are_left_and_other_shares_are_noted() -> None:
    loaded = load_files("qwen3-8b-math", site="frontier", settings=(ACCOUNT,))
    assert plan_for_gpus(*loaded, 31).notes == [
        "24 of 31 GPUs are reserved: one more worker of a role takes more, or is refused",
        "training has 50% of the workers' GPUs; in the plan of the recipe it has 70%",
    ]
    assert plan_for_gpus(*loaded, 96).notes == []


def test_a_refusal_asks_for_more_gpus_and_not_for_ranks() -> None:
    with pytest.raises(PlanError, match=r"give more GPUs, or choose GPUs with more memory$") as caught:
        scale("qwen3-8b-math", 3, ACCOUNT, site="perlmutter")
    assert "num_workers" not in str(caught.value)


def test_what_is_simulated_is_what_is_planned() -> None:
    request = scale("qwen3-32b", 100, ACCOUNT, site="jupiter")
    source = DrawnEpisodes(request.recipe, LatencySettings(), seed=0)
    result = simulate_campaign(request, find_sizes(request), source, SimulationSettings(num_steps=1))
    assert (result.num_nodes, result.num_gpus) == (request.plan.num_nodes, request.plan.num_gpus)
    assert result.workers["env"] == request.plan.role("env").num_workers
