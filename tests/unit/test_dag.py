"""The pipeline as a DAG."""

from functools import reduce
from importlib import import_module

import pytest

from hpcrl.config.pipeline import Node, depths, dot, linearised, mermaid, picture, problems, ready

READY = {
    "grpo": {"advantage": "grpo"},
    "ppo": {"advantage": "gae", "num_minibatches": 4},
    "grpo with a reference": {"advantage": "grpo", "kl": "k3", "num_minibatches": 2},
    "sft": {"advantage": "sft"},
}


def node(*inputs, role="policy", function="my.module:name"):
    return Node(function=function, inputs=list(inputs), role=role)


@pytest.mark.parametrize("asked", READY.values(), ids=READY)
def test_the_ready_pipelines_can_run(asked):
    pipeline = ready(**asked)
    assert problems(pipeline) == []
    order = linearised(pipeline)
    assert all(
        order.index(taken) < order.index(name) for name in order for taken in pipeline[name].inputs if taken in order
    )


@pytest.mark.parametrize("asked", READY.values(), ids=READY)
def test_every_node_names_a_function_that_exists(asked):
    for ready_node in ready(**asked).values():
        module, _, name = ready_node.function.partition(":")
        assert callable(reduce(getattr, name.split("."), import_module(module))), ready_node.function


def test_ppo_has_a_critic_and_grpo_has_none():
    assert "values" in ready(advantage="gae")
    assert "values" not in ready(advantage="grpo")


def test_nodes_of_one_depth_run_one_after_the_other_as_they_were_declared():
    pipeline = {"rows": node("scored"), "b": node("rows"), "a": node("rows"), "end": node("a", "b")}
    assert depths(pipeline) == {"rows": 0, "b": 1, "a": 1, "end": 2}
    assert linearised(pipeline) == ["rows", "b", "a", "end"]


def test_only_the_trainers_nodes_are_its_workers():
    assert linearised(ready(advantage="grpo")) == ["advantage", "deal", "rows", "update"]


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [
        ({"a": node("b"), "b": node("a")}, "a -> b -> a"),
        ({"a": node("a")}, "a -> a"),
        ({"a": node("rolouts")}, "takes 'rolouts', which is neither a node nor a spool (a, rollouts, scored)"),
        ({"a": node()}, "takes nothing"),
        ({"a": node("scored"), "b": node("a", role="reward")}, "what the trainer makes stays on its workers"),
        ({"a": node("rollouts", role="reward")}, "nothing would be learned"),
    ],
)
def test_a_pipeline_that_cannot_run_is_told_why(pipeline, said):
    assert said in "; ".join(problems(pipeline))


def test_the_picture_shows_every_node_and_the_order():
    pipeline = ready(advantage="gae", kl="k3", num_minibatches=2)
    shown = picture(pipeline)
    assert all(name in shown for name in pipeline)
    assert shown.endswith("deal -> rows -> values -> reference -> proximal -> update -> update-critic")
    assert '"rows" -> "update";' in dot(pipeline)
    assert "  rows --> update" in mermaid(pipeline).splitlines()
