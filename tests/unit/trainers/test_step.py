"""A training step: the order of its nodes as it is described, and the learning rate over the steps of a campaign."""

import json
import math
import re

import pytest

from hpcrl.config.pipeline import (
    STAGES,
    TRAINER_ROLES,
    check_user_nodes,
    make_pipeline,
    make_standard_nodes,
    order_nodes,
)
from hpcrl.config.recipe import TrainConfig
from hpcrl.learn.distribute import DEAL_NODES
from hpcrl.trainers import step as step_module
from hpcrl.trainers.nodes import RANK_NODES, compute_learning_rate
from hpcrl.trainers.torch import TorchTrainer
from tests.support.learners import CONTEXT, make_model, settings

HALF = {"function": "tests.support.nodes:passed_on", "inputs": ["batches", "reference"], "role": "policy"}
STRETCHED_ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}


def rates(**changed):
    train = TrainConfig(groups_per_step=1, learning_rate=1.0, **{"num_steps": 10, **changed})
    return [compute_learning_rate(step, train=train, peak=1.0) for step in range(1, train.num_steps + 1)]


def test_a_constant_rate_is_constant():
    assert rates() == [1.0] * 10


def test_the_rate_warms_up_in_even_steps():
    assert rates(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_rate_falls_to_its_final_value_at_the_last_step(schedule):
    seen = rates(schedule=schedule, warmup_steps=2, final_learning_rate=0.1)
    assert seen[1] == 1.0
    assert seen[1:] == sorted(seen[1:], reverse=True)
    assert seen[-1] == pytest.approx(0.1)


def test_a_cosine_is_half_way_at_half_time():
    assert rates(schedule="cosine")[4] == pytest.approx((1 + math.cos(math.pi / 2)) / 2)


@pytest.mark.parametrize("has_kl_reward", [False, True])
@pytest.mark.parametrize("advantage", ["grpo", "gae", "sft"])
def test_the_module_lists_the_nodes_of_a_step_in_the_order_in_which_they_run(advantage, has_kl_reward):
    lines = re.findall(r"^ {8}([\w, -]+?) {2,}(\w+)\.py (\w+)", step_module.__doc__, re.MULTILINE)
    listed = {name: f"{module}:{function}" for names, module, function in lines for name in names.split(", ")}
    nodes = make_standard_nodes(advantage=advantage, kl="k3", has_kl_reward=has_kl_reward, policy_moves=True)
    stages = list(dict.fromkeys(STAGES.values()))
    run = sorted(order_nodes(nodes), key=lambda name: stages.index(nodes[name].stage))
    assert run == [name for name in listed if name in nodes]
    loss = {"loss": "nodes:compute_gradient"}  # around the loss function that the graph names
    assert {name: listed[name] for name in run} == {
        name: node.function.rpartition(".")[2] for name, node in nodes.items() if name in run
    } | loss


@pytest.mark.parametrize("adds_node", [False, True])
@pytest.mark.parametrize("advantage", ["grpo", "gae", "sft"])
def test_the_functions_that_run_are_those_that_the_graph_names(advantage, adds_node):
    """`learn_rows` calls loss, update and update-critic itself: they are the last, whatever the user adds."""
    batches = "values" if advantage == "gae" else "batches"
    loss = {"function": "tests.support.nodes:distilled_loss", "inputs": [batches, "half", "reference"]}
    nodes = {"half": HALF, "loss": loss} if adds_node else {}
    train = settings(advantage=advantage, kl="k3", num_minibatches=2, pipeline=nodes)
    assert check_user_nodes(train) == []
    pipeline = make_pipeline(train)
    order = [name for name in order_nodes(pipeline) if name != "half"]
    called = ["loss", "update", *(["update-critic"] if advantage == "gae" else [])]
    assert [name for name in order if pipeline[name].stage == "learn"] == order[-len(called) :] == called
    tables = {"deal": DEAL_NODES, "rows": RANK_NODES, "prepare": RANK_NODES}
    for name in order[: -len(called)]:
        function = tables[pipeline[name].stage][name]
        assert pipeline[name].function == f"{function.__module__}:{function.__name__}"


def test_the_module_lists_no_node_that_no_recipe_has():
    listed = re.findall(r"^ {8}([\w, -]+?) {2,}\w+\.py", step_module.__doc__, re.MULTILINE)
    settings = {"kl": "k3", "has_kl_reward": True, "policy_moves": True}
    known = {
        name
        for advantage in ("grpo", "gae")
        for name, node in make_standard_nodes(advantage=advantage, **settings).items()
        if node.role in TRAINER_ROLES
    }
    assert {name for names in listed for name in names.split(", ")} == known


def test_rows_are_trained_up_to_the_context_that_engines_stretch(tmp_path):
    path = make_model(tmp_path / "model") / "config.json"
    config = json.loads(path.read_bytes())
    path.write_text(json.dumps(config | {"rope_parameters": STRETCHED_ROPE}))
    assert TorchTrainer(path.parent, settings()).max_length == 2 * CONTEXT
