"""The pipeline as a DAG."""

from functools import reduce
from importlib import import_module

import pytest

from hpcrl.config.pipeline import (
    DagNode,
    add_judges,
    compute_depths,
    find_problems,
    make_pipeline,
    make_running_pipeline,
    make_standard_nodes,
    order_nodes,
    render_dot,
    render_mermaid,
    render_text,
)
from tests.support.plans import make_recipe

BUILT_IN = {
    "grpo": {"advantage": "grpo"},
    "ppo": {"advantage": "gae", "policy_moves": True},
    "grpo with a reference": {"advantage": "grpo", "kl": "k3", "policy_moves": True},
    "sft": {"advantage": "sft"},
}


def node(*inputs, role="policy", function="my.module:name"):
    return DagNode(function=function, inputs=list(inputs), role=role, output="step")


@pytest.mark.parametrize("settings", BUILT_IN.values(), ids=BUILT_IN)
def test_the_built_in_pipelines_can_run(settings):
    pipeline = make_standard_nodes(**settings)
    assert find_problems(pipeline) == []
    order = order_nodes(pipeline)
    assert all(
        order.index(source) < order.index(name) for name in order for source in pipeline[name].inputs if source in order
    )


@pytest.mark.parametrize("settings", BUILT_IN.values(), ids=BUILT_IN)
def test_every_node_names_a_function_that_exists(settings):
    for built_in_node in make_standard_nodes(**settings).values():
        module, _, name = built_in_node.function.partition(":")
        assert callable(reduce(getattr, name.split("."), import_module(module))), built_in_node.function


def test_ppo_has_a_critic_and_grpo_has_none():
    assert "values" in make_standard_nodes(advantage="gae")
    assert "values" not in make_standard_nodes(advantage="grpo")


def test_nodes_of_equal_depth_run_one_after_the_other_as_declared():
    pipeline = {"rows": node("scored"), "b": node("rows"), "a": node("rows"), "end": node("a", "b")}
    assert compute_depths(pipeline) == {"rows": 0, "b": 1, "a": 1, "end": 2}
    assert order_nodes(pipeline) == ["rows", "b", "a", "end"]


def test_trainer_workers_run_only_the_nodes_of_the_trainer_roles():
    assert order_nodes(make_standard_nodes(advantage="grpo")) == [
        "advantage",
        "deal",
        "rows",
        "batches",
        "loss",
        "update",
    ]


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ({"a": node("b"), "b": node("a")}, "a -> b -> a"),
        ({"a": node("a")}, "a -> a"),
        ({"a": node("rolouts")}, "takes 'rolouts', which is neither a node nor a spool (a, rollouts, scored)"),
        ({"a": node()}, "has no inputs"),
        ({"a": node("scored"), "b": node("a", role="reward")}, "results of the trainer stay on its workers"),
        ({"a": node("rollouts", role="reward")}, "nothing would be learned"),
    ],
)
def test_a_pipeline_that_cannot_run_gets_the_reason(pipeline, message):
    assert message in "; ".join(find_problems(pipeline))


def test_judges_that_domains_call_are_shown_between_sample_and_score():
    settings = ("judge.grader.path=/models/grader", "judge.idle.path=/models/idle", 'domains.lake.judges=["grader"]')
    recipe = make_recipe(*settings)
    pipeline = add_judges(make_pipeline(recipe.train), recipe)
    assert find_problems(pipeline) == []
    assert pipeline["score"].inputs == ["sample", "judge-grader"]
    assert pipeline["judge-grader"].model == "/models/grader"
    assert "judge-idle" not in pipeline
    assert order_nodes(pipeline) == order_nodes(make_pipeline(recipe.train))


IMITATION = ["conversations", "advantage", "deal", "rows", "batches", "loss", "update"]


@pytest.mark.parametrize(
    ("name", "settings", "nodes"),
    [
        ("sft", (), IMITATION),
        ("quickstart", ("warmup.steps=9", "warmup.path=x.jsonl", "train.num_steps=9", "train.kl=k3"), IMITATION),
        (
            "quickstart",
            ("warmup.steps=8", "warmup.path=x.jsonl", "train.num_steps=9"),
            ["sample", "score", *IMITATION[1:]],
        ),
    ],
    ids=["alone", "all-steps", "before-others"],
)
def test_what_is_shown_of_a_recipe_that_only_imitates_is_what_runs(name, settings, nodes):
    pipeline = make_running_pipeline(make_recipe(*settings, name=name))
    assert list(pipeline) == nodes
    assert ("compute_imitation_loss" in pipeline["loss"].function) == (nodes == IMITATION)
    assert all(source in pipeline for node in pipeline.values() for source in node.inputs)


def test_rendered_pipelines_show_every_node_and_the_order():
    pipeline = make_standard_nodes(advantage="gae", kl="k3", policy_moves=True)
    shown = render_text(pipeline)
    assert all(name in shown for name in pipeline)
    assert shown.endswith("rows -> batches -> reference -> proximal -> values -> loss -> update -> update-critic")
    assert '"loss" -> "update";' in render_dot(pipeline)
    assert "  values --> loss" in render_mermaid(pipeline).splitlines()
