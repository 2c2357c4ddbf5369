"""Small jobs: all roles on one node, whose GPUs, cores and memory they share."""

from math import ceil

import pytest

from hpcrl.plan.demand import DRIVER_MEM_GIB
from hpcrl.plan.plan import Plan, RolePlan
from tests.support.plans import plan_recipe, refuse_plan

COLOCATED = "job.layout=colocated"
NONE = "resources.prefill.num_workers=0"
TWO_AND_TWO = ("resources.train.num_workers=2", "resources.decode.num_workers=2", "resources.env.mem_gib_per_worker=1")
SMALL = ("resources.train.mem_gib_per_worker=1", "resources.decode.mem_gib_per_worker=1")


def list_gpus(role: RolePlan) -> list[int]:
    return list(range(role.first_gpu, role.first_gpu + role.num_workers * role.gpus_per_worker))


def describe_flags(made: Plan) -> set[str]:
    (component,) = made.components
    return {flag for flag in component.slurm_flags if not flag.startswith("--ntasks")}


def test_the_gpus_of_one_node_are_dealt_to_the_roles() -> None:
    made = plan_recipe(COLOCATED, *TWO_AND_TWO, *SMALL)
    assert made.layout == "colocated"
    assert (list_gpus(made.role("train")), list_gpus(made.role("decode"))) == ([0, 1], [2, 3])
    assert made.components[0].roles == ["env", "decode", "train", "reward"]


def test_one_node_is_requested_with_the_sum_of_all_roles() -> None:
    own = ("site.partitions.prefill.cores_per_gpu=1", "site.partitions.prefill.mem_gib_per_gpu=1")
    made = plan_recipe(COLOCATED, *TWO_AND_TWO, *SMALL, *own)
    expected = {"--nodes=1", "--cpus-per-task=7", "--mem=8G", "--gres=gpu:h100:4", "--partition=prefill"}
    assert describe_flags(made) == expected


def test_the_window_of_weights_is_counted_once_on_one_node() -> None:
    little = "site.partitions.booster.mem_gib_per_gpu=1"
    made = plan_recipe(COLOCATED, "model.num_params=1000000000", little, site="leonardo")
    workers_gib = sum(role.mem_gib_per_worker * role.num_workers for role in made.roles if role.role != "train")
    assert made.components[0].mem_gib_per_node == ceil(made.role("train").step_mem_gib) + workers_gib + DRIVER_MEM_GIB
    assert made.role("train").step_mem_gib > made.train_memory.node_window_gib > 0


def test_gpus_come_with_their_share_of_the_node() -> None:
    made = plan_recipe("job.layout=hetjob", NONE, site="leonardo")
    train = made.components[made.role("train").component]
    assert (train.gpus_per_node, train.cpus_per_node, train.mem_gib_per_node) == (1, 8, 120)
    assert made.components[0].cpus_per_node == 3


@pytest.mark.parametrize("site", ["leonardo", "lab-hetstep"])
def test_a_small_job_is_on_one_node_with_the_reason(site: str) -> None:
    made = plan_recipe(site=site)
    assert made.layout == "colocated"
    assert "is enough for all roles, with 2 of its 4 GPUs" in made.layout_reason
    assert sum(component.nodes for component in made.components) == 1


@pytest.mark.parametrize(
    "settings",
    [
        ("resources.train.num_workers=4",),
        ("resources.env.cpus_per_worker=40",),
        ("job.survive_node_loss=true",),
        ("job.layout=hetjob",),
        ("resources.prefill.num_workers=1",),
        ("model.num_params=8000000000", "resources.train.num_workers=4", "rollout.max_running=2048"),
    ],
)
def test_what_asks_for_more_than_a_node_or_for_several_has_more(settings: tuple[str, ...]) -> None:
    assert plan_recipe(*settings, site="leonardo").layout == "hetjob"


def test_roles_that_gain_from_different_gpus_stay_apart() -> None:
    assert plan_recipe().layout == "hetjob"
    assert plan_recipe(NONE).layout == "colocated"


def test_what_one_node_cannot_hold_is_refused_by_partition() -> None:
    single = [f"site.partitions.{label}.max_nodes=1" for label in ("prefill", "decode", "train")]
    message = refuse_plan(COLOCATED, "resources.train.num_workers=4", "train.trainer=megatron", *SMALL, *single)
    assert "all roles need 5 GPUs, and a node of train has 4" in message
    assert "env has no GPUs" in message
    assert "job.survive_node_loss = true needs two nodes a role" in refuse_plan(COLOCATED, "job.survive_node_loss=true")


def test_the_step_of_a_role_may_use_the_window_of_its_node() -> None:
    made = plan_recipe("model.num_params=1000000000", "job.layout=hetjob", NONE, site="leonardo")
    assert made.role("decode").step_mem_gib > made.role("decode").mem_gib_per_worker
    assert made.role("env").step_mem_gib == made.role("env").mem_gib_per_worker
    for role in made.roles:
        assert role.step_mem_gib <= made.components[role.component].mem_gib_per_node


FOUR_AND_FOUR = ("resources.train.num_workers=4", "resources.decode.num_workers=4", *SMALL)


def test_roles_that_one_node_cannot_hold_share_the_fewest_nodes_that_can() -> None:
    made = plan_recipe(COLOCATED, *FOUR_AND_FOUR)
    [component] = made.components
    assert (made.layout, component.nodes, component.gpus_per_node) == ("colocated", 2, 4)
    assert not made.is_on_one_node
    assert "--nodes=2" in component.slurm_flags
    sizes = {role.role: (role.num_workers, role.workers_per_node, role.first_gpu) for role in made.roles}
    assert (sizes["train"], sizes["decode"]) == ((4, 2, 0), (4, 2, 2))
    assert "2 nodes of prefill hold all roles" in made.layout_reason
    assert made.cost.node_hours == pytest.approx(2 * made.cost.walltime_min / 60, abs=0.01)
    assert not made.has_gpu_shifts


def test_a_site_of_two_nodes_shares_them_rather_than_their_gpus_in_turns() -> None:
    few = ("site.partitions.dcgp.preemptible=true", "site.partitions.booster.max_nodes=2")
    made = plan_recipe(*few, "resources.train.num_workers=4", "resources.decode.num_workers=4", site="leonardo")
    assert (made.layout, made.num_nodes, made.has_gpu_shifts) == ("colocated", 2, False)
    assert "too few nodes" in made.layout_reason
