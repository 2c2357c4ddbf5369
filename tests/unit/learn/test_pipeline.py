"""The user's pipeline nodes: which are refused, where they run, and what they change."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from hpcrl.config.pipeline import check_user_nodes, make_pipeline, order_nodes
from hpcrl.errors import PlanError, TrainError
from hpcrl.learn.distribute import DEAL_NODES, DealWork, distribute_step, load_share_rows
from hpcrl.learn.pipeline import PipelineExecutor, check_credits
from hpcrl.plan.checks import check_recipe
from hpcrl.trainers.nodes import RANK_NODES
from hpcrl.trainers.torch import TorchTrainer
from tests.support.learners import CONTEXT, batch, make_model, settings
from tests.support.nodes import against_the_best, shaped
from tests.support.plans import make_recipe, refuse_recipe

SHAPE = {
    "shape": {"function": "tests.support.nodes:shaped", "inputs": ["score"], "role": "policy"},
    "advantage": {"inputs": ["shape"]},
}
BEST = {"advantage": {"function": "tests.support.nodes:against_the_best", "inputs": ["score"]}}
FIRST = {
    "weigh": {
        "function": "tests.support.nodes:first_tokens_only",
        "inputs": ["rows"],
        "role": "policy",
        "options": {"keep": 2},
    },
    "batches": {"inputs": ["weigh"]},
}


def train_of(nodes, **changed):
    return settings(**changed, pipeline=nodes)


def assign_credits(trajectories, train):
    """Run the nodes of rank 0; return what they distribute, with the credits of its turns."""
    executor = PipelineExecutor(train, DEAL_NODES)
    work = DealWork(
        train=train,
        executor=executor,
        trajectories=trajectories,
        num_ranks=1,
        seed=0,
        step=1,
        max_length=CONTEXT,
        segment_of=lambda _: "",
    )
    results = {"score": trajectories}
    executor.run("deal", work=work, results=results)
    dealt, credits = (results[name] for name in executor.nodes["deal"].inputs)
    return dealt, check_credits(credits, dealt, "deal")


def transform_rows(parts, train):
    """Run the nodes on the rows of each minibatch; return what is made into batches."""
    executor = PipelineExecutor(train, RANK_NODES)
    results = {"deal": None}
    work = SimpleNamespace(train=train, skipped=None, read_share=lambda: parts)
    executor.run("rows", work=work, results=results)
    return results[executor.nodes["batches"].inputs[0]]


def own(function="tests.support.nodes:shaped", inputs=("score",), role="policy"):
    return {"function": function, "inputs": list(inputs), "role": role}


def instead_of_advantage(function):
    return {"advantage": {"function": f"tests.support.nodes:{function}", "inputs": ["score"]}}


TAKEN = {"advantage": {"inputs": ["mine"]}}
REFUSED = {
    "a mistyped input": (
        {"advantage": {"function": "a:b", "inputs": ["scor"]}},
        "train.pipeline.advantage: it takes 'scor', which is not a node here: did you mean 'score'? it can take score",
    ),
    "a mistyped input of an own node": (
        {"mine": own(inputs=["scor"]), **TAKEN},
        "did you mean 'score'? it can take advantage, batches, rows, score",
    ),
    "a circle": (
        {"a": own(inputs=["b"]), "b": own(inputs=["a"])},
        "a -> b -> a",
    ),
    "itself": ({"mine": own(inputs=["mine"]), **TAKEN}, "mine -> mine"),
    "a reward": ({"mine": own(role="reward"), **TAKEN}, "a reward is domains.NAME.reward"),
    "an environment": ({"mine": own(role="rollout"), **TAKEN}, "an environment is domains.NAME.env"),
    "a critic": ({"mine": own(role="critic"), **TAKEN}, 'train.advantage = "gae"'),
    "no role": ({"mine": {"function": "a:b", "inputs": ["score"]}, **TAKEN}, 'it has no role: set role = "policy"'),
    "no function": ({"mine": {"inputs": ["score"], "role": "policy"}, **TAKEN}, "not a built-in node here (sample,"),
    "no inputs": ({"mine": own(inputs=[]), **TAKEN}, "it has no inputs: add some"),
    "no taker": ({"mine": own()}, "no node takes it"),
    "a spool": ({"mine": own(inputs=["scored"]), **TAKEN}, "use `score`"),
    "the update": ({"mine": own(inputs=["update"]), **TAKEN}, "whose result no other node can take"),
    "both kinds": ({"mine": own(inputs=["score", "rows"]), **TAKEN}, "only one of the two kinds"),
    "rows for advantages": ({"advantage": {"inputs": ["rows"]}}, "needs of the whole step"),
    "the step for the batches": ({"batches": {"inputs": ["score"]}}, "needs of each worker's own rows"),
    "two for the batches": ({"batches": {"inputs": ["rows", "rows"]}}, "it takes 1 input (the replacement"),
    "two losses": (
        {"second": own("a:b", ["batches"])},
        "train.pipeline.second: no node takes it, so it would have no effect: add it to the inputs of loss (a",
    ),
    "another loss for the update": (
        {"update": {"inputs": ["mine"]}},
        "give your function to [train.pipeline.loss]",
    ),
    "two losses for the update": ({"update": {"inputs": ["loss", "mine"]}}, "train.pipeline.update: it takes one loss"),
    "a loss on rows": ({"loss": {"function": "a:b", "inputs": ["rows"]}}, "its first input is 'batches', not 'rows'"),
    "a loss that takes rows too": (
        {"loss": {"function": "a:b", "inputs": ["batches", "rows"]}},
        "it needs a number for each token",
    ),
    "a loss with an unknown input": (
        {"loss": {"function": "a:b", "inputs": ["batches", "teachers"]}},
        "train.pipeline.loss: it takes 'teachers', which is not a node here: it can take nothing else",
    ),
    "a loss with a reference that there is not": (
        {"loss": {"function": "a:b", "inputs": ["batches", "reference"]}},
        "train.pipeline.loss: it takes 'reference', which is not a node here: there is a reference only with a KL",
    ),
    "a cycle through the loss": (
        {"mine": own("a:b", ["loss"]), "batches": {"inputs": ["mine"]}},
        "takes 'loss', whose result no other node",
    ),
    "the reference without a KL": (
        {"reference": {"model": "/m"}},
        'train.pipeline.reference: there is a reference only with a KL: set train.kl = "k1", "k2" or "k3"',
    ),
    "a critic's values without a critic": (
        {"values": {"function": "a:b"}},
        'train.pipeline.values: there are values only with a critic: set train.advantage = "gae"',
    ),
    "rewards without a critic": (
        {"rewards": {"function": "a:b"}},
        'train.pipeline.rewards: with train.advantage = "grpo" the node is called `advantage`',
    ),
    "inputs of our loss": ({"loss": {"inputs": ["batches"]}}, "hpcrl's loss takes what it needs"),
    "a model as policy": (
        {"mine": {"model": "/m", "inputs": ["batches"], "role": "policy"}},
        "its role is 'reference'",
    ),
    "a model on rows": ({"mine": {"model": "/m", "inputs": ["rows"], "role": "reference"}}, 'set inputs = ["batches"]'),
    "a model and a function": ({"mine": own() | {"model": "/m"}}, "so remove `function`"),
    "a model that nothing takes": (
        {"mine": {"model": "/m", "inputs": ["batches"], "role": "reference"}},
        "add it to the inputs of loss",
    ),
    "a model of the values": ({"rows": {"model": "/m"}}, "which only `reference` and nodes of your own"),
    "one trajectory list twice": (
        {"deal": {"inputs": ["score", "score"]}},
        'train.pipeline.deal: it takes trajectories and then advantages: set inputs = ["score", "advantage"]',
    ),
    "advantages first": ({"deal": {"inputs": ["advantage", "score"]}}, "takes trajectories and then advantages"),
    "an input that is ignored": (
        {"a": {"function": "a:b", "role": "policy", "inputs": ["score"]}, "advantage": {"inputs": ["score", "a"]}},
        "train.pipeline.advantage: hpcrl's own takes one input, and would ignore 'a'",
    ),
    "one for the deal": ({"deal": {"inputs": ["score"]}}, "it takes 2 inputs (trajectories and advantages)"),
    "our function": (
        {"deal": {"function": "a:b"}},
        "only advantage, rewards, reference, values, loss and update can have another function",
    ),
    "the rollout": ({"sample": {"function": "a:b"}}, "its function is built in; an environment is domains.NAME.env"),
    "a function for tokens that takes rows": (
        {"mine": own("a:b", ["rows", "batches"]), "loss": {"function": "a:b", "inputs": ["batches", "mine"]}},
        "train.pipeline.mine: its first input is 'batches', not 'rows'",
    ),
    "a circle of functions for tokens": (
        {
            "a": own("a:b", ["batches", "b"]),
            "b": own("a:b", ["batches", "a"]),
            "loss": {"function": "a:b", "inputs": ["batches", "a"]},
        },
        "nodes form a cycle: a -> b -> a",
    ),
    "another degree of a function": (
        {"mine": own() | {"data_parallel": 2}, **TAKEN},
        "it has data_parallel, which only nodes with a model can have",
    ),
    "the scores": ({"score": {"function": "a:b"}}, "a reward is domains.NAME.reward"),
    "our role": ({"advantage": {"role": "critic"}}, "its role is 'policy', not 'critic'"),
    "our inputs": ({"rows": {"inputs": ["score"]}}, "its inputs cannot be changed"),
    "options without a function": ({"advantage": {"options": {"a": 1}}}, "no function that takes them"),
}


@pytest.mark.parametrize(("nodes", "message"), REFUSED.values(), ids=REFUSED)
def test_an_invalid_pipeline_is_refused_with_the_reason(nodes, message):
    assert message in "; ".join(check_user_nodes(train_of(nodes)))
    recipe = make_recipe()
    with pytest.raises(PlanError):
        check_recipe(msgspec.structs.replace(recipe, train=train_of(nodes)))


@pytest.mark.parametrize(
    ("name", "changed"),
    [("update", {"weight_decay": 0.1}), ("update", {"adam_betas": (0.9, 0.95)}), ("values", {"value_clip": 0.2})],
)
def test_settings_of_a_function_that_the_users_replaces_are_refused(name, changed):
    (problem,) = check_user_nodes(
        train_of({name: {"function": "a:b"}}, advantage="gae" if name == "values" else "grpo", **changed)
    )
    assert problem.startswith(f"train.pipeline.{name}: train.{next(iter(changed))} = ")
    assert "which this function replaces: remove it" in problem


def test_a_degree_that_does_not_divide_the_ranks_is_refused():
    recipe = make_recipe("resources.train.num_workers=4", "train.groups_per_step=8", "train.kl=k3")
    for degree, refused in ((3, True), (8, True), (2, False), (1, False)):
        train = msgspec.structs.replace(
            recipe.train, pipeline=train_of({"reference": {"data_parallel": degree}}).pipeline
        )
        changed = msgspec.structs.replace(recipe, train=train)
        if refused:
            with pytest.raises(PlanError, match=rf"reference\.data_parallel = {degree} does not divide"):
                check_recipe(changed)
        else:
            check_recipe(changed)


@pytest.mark.parametrize("nodes", [SHAPE, BEST, FIRST, {**SHAPE, **FIRST}], ids=["shape", "best", "first", "both"])
def test_a_pipeline_that_can_run_is_not_refused(nodes):
    assert check_user_nodes(train_of(nodes)) == []


def test_nodes_run_in_the_order_of_the_pipeline():
    order = order_nodes(make_pipeline(train_of({**SHAPE, **FIRST}, advantage="grpo", kl="k3")))
    assert order == ["shape", "advantage", "deal", "rows", "weigh", "batches", "reference", "loss", "update"]
    with_critic = make_pipeline(train_of(FIRST, advantage="gae"))
    assert with_critic["batches"].inputs == ["weigh"]
    assert make_pipeline(train_of(SHAPE))["shape"].stage == "deal"
    assert make_pipeline(train_of(FIRST))["weigh"].stage == "rows"


def test_a_shaped_reward_changes_the_advantages_and_not_the_rewards_in_the_metrics(tmp_path):
    trajectories = batch(1)
    _, plain = assign_credits(trajectories, train_of({}))
    dealt, changed = assign_credits(trajectories, train_of(SHAPE))
    _, expected = assign_credits(shaped(trajectories), train_of({}))
    assert [one.reward for one in dealt] == [one.reward for one in trajectories]
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(changed, expected, strict=True))
    assert any(not np.array_equal(mine, theirs) for mine, theirs in zip(changed, plain, strict=True))
    trainer = TorchTrainer(make_model(tmp_path / "m"), train_of(SHAPE))
    metrics = trainer.train_step(trajectories, step=1, version=1)
    assert metrics.skipped is None
    assert metrics.reward_mean == pytest.approx(np.mean([one.reward for one in trajectories]))


def test_one_number_for_an_episode_counts_for_all_its_turns():
    trajectories = batch(1)
    _, found = assign_credits(trajectories, train_of(BEST))
    for value, turns, trajectory in zip(against_the_best(trajectories), found, trajectories, strict=True):
        assert turns.tolist() == [value] * len(trajectory.turns)


def test_a_node_between_advantage_and_deal_sees_the_advantages():
    nodes = {"twice": own("tests.support.nodes:doubled", ["advantage"]), "deal": {"inputs": ["score", "twice"]}}
    assert check_user_nodes(train_of(nodes)) == []
    trajectories = batch(1)
    _, plain = assign_credits(trajectories, train_of({}))
    _, twice = assign_credits(trajectories, train_of(nodes))
    assert all(np.array_equal(2 * each, other) for each, other in zip(plain, twice, strict=True))


def test_every_rank_transforms_its_own_rows():
    trajectories = batch(1)
    by_id = {one.id: one for one in trajectories}
    train = train_of(FIRST)
    dealt = distribute_step(trajectories, train=train, num_ranks=2, seed=0, step=1, max_length=CONTEXT)
    for share in dealt.shares:
        parts = load_share_rows(share, fetch=lambda items: [by_id[one.id] for one in items], train=train)
        parts = transform_rows(parts, train)
        assert parts[0]
        assert all(not row.credit[2:].any() for part in parts for row in part)


def weights_after_two_steps(directory, train):
    torch.manual_seed(0)
    trainer = TorchTrainer(directory, train, seed=3)
    for step in (1, 2):
        assert trainer.train_step(batch(step), step=step, version=step).skipped is None
    return trainer.tensors()


def test_a_user_node_that_calls_a_built_in_advantage_learns_the_same_bits(tmp_path):
    model = make_model(tmp_path / "m")
    options = {
        "function": "hpcrl.learn.advantage:compute_advantages",
        "options": {"advantage": "rloo"},
        "inputs": ["score"],
    }
    mine = weights_after_two_steps(model, train_of({"advantage": options}))
    theirs = weights_after_two_steps(model, settings(advantage="rloo"))
    other = weights_after_two_steps(model, settings(advantage="grpo"))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert not all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            {"shape": own("tests.support.nodes:too_few"), "advantage": {"inputs": ["shape"]}},
            "returned list of 11: its result",
        ),
        (
            instead_of_advantage("broken"),
            "advantage failed: KeyError: 'weight'",
        ),
        (instead_of_advantage("wrong_turns"), "which has 2 turns"),
        (
            instead_of_advantage("too_few"),
            "returned list of 11: it must return one number",
        ),
    ],
)
def test_a_node_whose_result_the_next_cannot_use_is_named(nodes, message):
    with pytest.raises(TrainError, match=message.replace("(", r"\(")):
        assign_credits(batch(1), train_of(nodes))


def test_a_node_on_rows_that_forgets_to_return_is_named():
    nodes = {"weigh": own("tests.support.nodes:nothing", ["rows"]), "batches": {"inputs": ["weigh"]}}
    trajectories = batch(1)
    train = train_of({})
    dealt = distribute_step(trajectories, train=train, num_ranks=1, seed=0, step=1, max_length=CONTEXT)
    parts = load_share_rows(dealt.shares[0], fetch=lambda items: trajectories[: len(items)], train=train)
    with pytest.raises(TrainError, match=r"train\.pipeline\.weigh returned NoneType None"):
        transform_rows(parts, train_of(nodes))


@pytest.mark.parametrize(
    ("function", "message"),
    [("json:absent", "has no 'absent'"), ("tests.nodez:a", "importing tests.nodez failed"),
     ("string:digits", "is not a function")],
)  # fmt: skip
def test_a_missing_function_is_refused_before_anything_is_queued(function, message):
    recipe = make_recipe()
    train = msgspec.structs.replace(recipe.train, pipeline=train_of({**SHAPE, "shape": own(function)}).pipeline)
    assert message in refuse_recipe(msgspec.structs.replace(recipe, train=train))
