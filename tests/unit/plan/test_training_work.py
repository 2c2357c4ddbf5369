"""The work of a training step under a plan: its micro-batches, and the links between ranks."""

from math import inf

import msgspec
import pytest

from hpcrl.config.recipe import Recipe
from hpcrl.config.site import Site
from hpcrl.hardware.cost_model import TrainingWork, estimate_step_s, make_model_shape
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.hardware.rank_traffic import NO_TRAFFIC, RankLinks
from hpcrl.plan.plan import Plan, make_plan
from hpcrl.plan.training_work import find_rank_links, plan_training_work
from tests.support.plans import make_recipe, make_site
from tests.unit.plan.test_trainer_ranks import EXPERTS, VLLM

GPU = GPU_CATALOGUE["a100-80"]
MILLION = 1_000_000


def plan_experts(num_ranks: int, *settings: str, of_site: tuple[str, ...] = ()) -> tuple[Recipe, Site, Plan]:
    """Return a recipe with Qwen3-30B-A3B on nodes of four A100, with its plan."""
    asked = (*VLLM, *EXPERTS, "train.tokens_per_micro_batch=16384", *settings)
    recipe = make_recipe(*asked, f"resources.train.num_workers={num_ranks}")
    site = make_site("perlmutter", *of_site)
    return recipe, site, make_plan(recipe, site)


def plan_work(request: tuple[Recipe, Site, Plan], *, num_tokens: int = MILLION) -> TrainingWork:
    recipe, site, plan = request
    architecture = recipe.model.architecture
    assert architecture is not None
    links = find_rank_links(plan, site, gpu=GPU)
    return plan_training_work(
        recipe, plan, architecture=architecture, gpu=GPU, links=links, num_tokens=num_tokens, mean_length=4000
    )


def test_links_are_those_of_the_gpu_in_one_direction_and_a_port_for_each() -> None:
    _, site, plan = plan_experts(64)
    assert find_rank_links(plan, site, gpu=GPU) == RankLinks(ranks_per_node=4, link=300e9, port=25e9)
    unknown = msgspec.structs.replace(GPU, link_gb_per_s=None)
    assert find_rank_links(plan, site, gpu=unknown) == RankLinks(ranks_per_node=4, link=inf, port=25e9)


def test_a_site_may_have_another_bandwidth_of_the_network() -> None:
    _, site, plan = plan_experts(64, of_site=("network.gbit_per_gpu=100",))
    assert find_rank_links(plan, site, gpu=GPU) == RankLinks(ranks_per_node=4, link=300e9, port=12.5e9)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_on_cpus_and_a_single_one_have_no_links(num_ranks: int) -> None:
    recipe = make_recipe(f"resources.train.num_workers={num_ranks}", "resources.train.gpus_per_worker=0")
    site = make_site("lab")
    request = recipe, site, make_plan(recipe, site)
    assert find_rank_links(request[2], site, gpu=GPU) is None
    architecture = plan_experts(64)[0].model.architecture
    assert architecture is not None
    work = plan_training_work(
        recipe, request[2], architecture=architecture, gpu=GPU, links=None, num_tokens=MILLION, mean_length=4000
    )
    assert (work.num_gpus, work.traffic) == (num_ranks, NO_TRAFFIC)


@pytest.mark.parametrize(
    ("num_tokens", "settings", "num"),
    [
        (MILLION, (), 1),
        (4 * MILLION, (), 4),
        (MILLION, ("train.num_minibatches=2",), 2),
        (4 * MILLION, ("train.pipeline_parallel=2", "train.expert_parallel=8"), 8),
        (1, (), 1),
    ],
)
def test_a_rank_has_micro_batches_for_its_share_of_the_tokens(
    num_tokens: int, settings: tuple[str, ...], num: int
) -> None:
    assert plan_work(plan_experts(64, *settings), num_tokens=num_tokens).num_micro_batches == num


def test_work_has_the_degrees_of_the_plan() -> None:
    request = plan_experts(64, "train.pipeline_parallel=2", "train.pipeline_chunks=3")
    work = plan_work(request)
    assert (work.num_gpus, work.pp, work.pp_chunks) == (64, 2, 3)
    assert request[2].train_degrees.expert > 1, "as the plan has chosen"
    assert work.traffic.within_s > 0


def test_work_has_the_sharding_of_the_plan() -> None:
    request = plan_experts(128, "train.trainer=torch")
    assert request[0].train.sharding == "auto"
    assert request[2].train_sharding == "full"
    assert len(plan_work(request).traffic.beside) == 3


def test_a_slower_network_makes_a_step_longer() -> None:
    seconds = []
    for gbit in (400, 200, 50):
        request = plan_experts(64, of_site=(f"network.gbit_per_gpu={gbit}",))
        architecture = request[0].model.architecture
        assert architecture is not None
        seconds.append(estimate_step_s(GPU, shape=make_model_shape(architecture), work=plan_work(request)))
    assert seconds == sorted(set(seconds))
