"""Too few GPUs for trainer and engines: both get the same, and what sleeps meanwhile is counted."""

import pytest

from hpcrl.plan.plan import Plan
from tests.support.plans import plan_recipe, refuse_plan

ONE_NODE = (
    *("site.partitions.booster.max_nodes=1", "site.partitions.dcgp.max_nodes=1"),
    "site.partitions.booster.gpus_per_node=2",
)
TWO = ("resources.train.num_workers=2", "resources.decode.num_workers=2")
COLOCATED = "job.layout=colocated"
SIZED = "model.num_params=1000000000"


def list_shared(made: Plan) -> dict[str, list[bool]]:
    """Return for each role which of its workers have a GPU of the trainer."""
    return {role.role: [made.shares_gpus(role.role, index) for index in range(role.num_workers)] for role in made.roles}


def test_a_site_with_one_node_of_two_gpus_uses_them_in_turns() -> None:
    made = plan_recipe(*ONE_NODE, *TWO, site="leonardo")
    assert (made.layout, made.has_gpu_shifts) == ("colocated", True)
    assert list_shared(made) == {"env": [False], "decode": [True] * 2, "train": [True] * 2, "reward": [False]}
    assert "too few nodes" in made.layout_reason
    assert any("use 2 GPUs in turns" in line for line in made.sizes)
    assert made.components[0].gpus_per_node == 2


def test_gpus_that_are_enough_for_all_are_not_shared() -> None:
    made = plan_recipe(*ONE_NODE, site="leonardo")
    assert (made.layout, made.has_gpu_shifts) == ("colocated", False)
    assert made.role("decode").first_gpu == made.role("train").num_workers == 1


def test_an_engine_without_a_gpu_of_the_trainer_keeps_its_own() -> None:
    made = plan_recipe(*ONE_NODE, "resources.decode.num_workers=2", site="leonardo")
    assert list_shared(made)["decode"] == [True, False]


def test_judges_keep_gpus_of_their_own() -> None:
    judged = (
        "judge.grader.tiny.hidden_size=64",
        'domains.lake.judges=["grader"]',
        "judge.grader.resources.num_workers=1",
    )
    settings = (COLOCATED, "site.partitions.booster.max_nodes=1", *judged)
    made = plan_recipe(*settings, "resources.train.num_workers=3", "resources.decode.num_workers=2", site="leonardo")
    assert made.role("judge-grader").first_gpu == 3
    assert (list_shared(made)["judge-grader"], list_shared(made)["decode"]) == ([False], [True] * 2)


def test_the_node_has_memory_for_what_sleeps() -> None:
    own = plan_recipe(COLOCATED, SIZED, site="leonardo")
    shared = plan_recipe(COLOCATED, SIZED, "site.partitions.booster.gpus_per_node=1", site="leonardo")
    assert (own.has_gpu_shifts, shared.has_gpu_shifts) == (False, True)
    billion_gib = 1e9 / 2**30
    asleep = {
        "train": 12 * billion_gib,
        "decode": 4 * billion_gib,
    }  # weights and moments; the embedded engine's weights
    for role, gib in asleep.items():
        assert shared.role(role).step_mem_gib - own.role(role).step_mem_gib == pytest.approx(gib, abs=0.1)
    assert shared.train_memory.node_state_gib == pytest.approx(12 * billion_gib, abs=0.1)
    assert shared.train_memory.gpu_gib == own.train_memory.gpu_gib, "each has the whole GPU while it works"


def test_what_cannot_use_gpus_in_turns_is_refused() -> None:
    assert "has 2 jobs" not in refuse_plan(*ONE_NODE, *TWO, "job.survive_node_loss=true", site="leonardo")
    message = refuse_plan(COLOCATED, *TWO, "train.trainer=megatron", *ONE_NODE, site="leonardo")
    assert "all roles need 4 GPUs, and a node of booster has 2" in message
