"""The pipeline as a DAG."""

from functools import reduce
from importlib import import_module

import pytest

from hpcrl.config.pipeline import (
    DagNode,
    compute_depths,
    find_problems,
    make_standard_nodes,
    order_nodes,
    render_dot,
    render_mermaid,
    render_text,
)

READY = {
    "grpo": {"advantage": "grpo"},
    "ppo": {"advantage": "gae", "num_minibatches": 4},
    "grpo with a reference": {"advantage": "grpo", "kl": "k3", "num_minibatches": 2},
    "sft": {"advantage": "sft"},
}


def node(*inputs, role="policy", function="my.module:name"):
    return DagNode(function=function, inputs=list(inputs), role=role)


@pytest.mark.parametrize("asked", READY.values(), ids=READY)
def test_the_ready_pipelines_can_run(asked):
    pipeline = make_standard_nodes(**asked)
    assert find_problems(pipeline) == []
    order = order_nodes(pipeline)
    assert all(
        order.index(taken) < order.index(name) for name in order for taken in pipeline[name].inputs if taken in order
    )


@pytest.mark.parametrize("asked", READY.values(), ids=READY)
def test_every_node_names_a_function_that_exists(asked):
    for ready_node in make_standard_nodes(**asked).values():
        module, _, name = ready_node.function.partition(":")
        assert callable(reduce(getattr, name.split("."), import_module(module))), ready_node.function


def test_ppo_has_a_critic_and_grpo_has_none():
    assert "values" in make_standard_nodes(advantage="gae")
    assert "values" not in make_standard_nodes(advantage="grpo")


def test_nodes_of_one_depth_run_one_after_the_other_as_they_were_declared():
    pipeline = {"rows": node("scored"), "b": node("rows"), "a": node("rows"), "end": node("a", "b")}
    assert compute_depths(pipeline) == {"rows": 0, "b": 1, "a": 1, "end": 2}
    assert order_nodes(pipeline) == ["rows", "b", "a", "end"]


def test_only_the_trainers_nodes_are_its_workers():
    assert order_nodes(make_standard_nodes(advantage="grpo")) == ["advantage", "deal", "rows", "update"]


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
    assert said in "; ".join(find_problems(pipeline))


def test_the_picture_shows_every_node_and_the_order():
    pipeline = make_standard_nodes(advantage="gae", kl="k3", num_minibatches=2)
    shown = render_text(pipeline)
    assert all(name in shown for name in pipeline)
    assert shown.endswith("deal -> rows -> values -> reference -> proximal -> update -> update-critic")
    assert '"rows" -> "update";' in render_dot(pipeline)
    assert "  rows --> update" in render_mermaid(pipeline).splitlines()
