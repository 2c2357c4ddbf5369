"""Functions of the user's in place of hpcrl's nodes on micro-batches, and of its optimizer."""

import msgspec
import pytest
import torch

from hpcrl.config.pipeline import check_user_nodes, make_pipeline, order_nodes
from hpcrl.errors import TrainError
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.testing.learning import load_checkpoint, save_checkpoint
from hpcrl.testing.ranks import run_ranks
from hpcrl.trainers.torch import TorchTrainer
from tests.support.learners import batch, make_model, settings, trained
from tests.support.megatron import skip_without_megatron
from tests.support.plans import make_recipe, refuse_recipe

ADAM = {"update": {"function": "tests.support.nodes:adam_update"}}


def function_node(function, *inputs, role=None, **options):
    declared = {"function": f"tests.support.nodes:{function}", "inputs": list(inputs), "options": options}
    return declared if role is None else declared | {"role": role}


def train_of(nodes, **changed):
    train = settings(**changed, pipeline=nodes)
    assert check_user_nodes(train) == []
    return train


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("nodes") / "model")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("nodes") / "teacher", seed=5)


def test_values_of_zero_learn_what_a_new_critic_does(model):
    train = train_of({"values": function_node("zero_values")}, advantage="gae", num_minibatches=2)
    assert "update-critic" not in make_pipeline(train)
    mine = trained(TorchTrainer(model, train, seed=3), last=1)
    theirs = trained(TorchTrainer(model, settings(advantage="gae", num_minibatches=2), seed=3), last=1)
    assert mine["value_loss"] == [None]
    assert (mine["loss"], mine["weights"]) == (theirs["loss"], theirs["weights"])


def test_a_function_that_computes_the_reference_is_as_good_as_its_model(model, teacher):
    changed = {"kl": "k3", "kl_coef": 1.0}
    own = function_node("own_reference", directory=str(teacher))
    mine = trained(TorchTrainer(model, train_of({"reference": own}, **changed), seed=3), last=2)
    theirs = trained(TorchTrainer(model, train_of({"reference": {"model": str(teacher)}}, **changed), seed=3), last=2)
    plain = trained(TorchTrainer(model, settings(**changed), seed=3), last=2)
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert mine["loss"] != pytest.approx(plain["loss"], rel=1e-2)


def test_a_loss_takes_what_a_function_makes_of_another_node(model, teacher):
    nodes = {
        "teacher": {"model": str(teacher), "role": "reference", "inputs": ["batches"]},
        "half": function_node("passed_on", "batches", "teacher", role="policy", factor=0.5),
        "loss": function_node("distilled_loss", "batches", "half"),
    }
    train = train_of(nodes)
    assert order_nodes(make_pipeline(train))[-4:] == ["teacher", "half", "loss", "update"]
    doubled = nodes | {"loss": function_node("distilled_loss", "batches", "twice")}
    doubled["twice"] = function_node("passed_on", "batches", "half", role="policy", factor=2.0)
    whole = nodes | {"loss": function_node("distilled_loss", "batches", "teacher")}
    del whole["half"]
    half, twice, one = (
        trained(TorchTrainer(model, train_of(each), seed=3), last=1)["loss"] for each in (nodes, doubled, whole)
    )
    assert twice == one
    assert half != one


def test_an_update_of_the_users_with_the_formula_of_adam_is_adam(model):
    mine = trained(TorchTrainer(model, train_of(ADAM, num_minibatches=2), seed=3), last=3)
    theirs = trained(TorchTrainer(model, settings(num_minibatches=2), seed=3), last=3)
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)
    for name, numbers in theirs["weights"].items():
        assert mine["weights"][name] == pytest.approx(numbers, rel=1e-4, abs=1e-4), name


def test_the_state_of_an_update_is_part_of_a_checkpoint(model, tmp_path):
    whole, first, second = (TorchTrainer(model, train_of(ADAM), seed=3) for _ in range(3))
    trained(whole, last=3)
    trained(first, last=2)
    saved = save_checkpoint(tmp_path, step=2, version=2, trainer=first, consumed=ConsumedTrajectories())
    load_checkpoint(saved, trainer=second)
    trained(second, first=3, last=3)
    expected = whole.tensors()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in second.tensors().items())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("trainer", "changed"),
    [("torch", {"sharding": "full"}), ("megatron", {"trainer": "megatron", "tensor_parallel": 2})],
)
def test_functions_of_the_users_give_the_same_on_many_ranks(model, teacher, trainer, changed):
    if trainer == "megatron":
        skip_without_megatron()
    shared = {
        "advantage": "gae",
        "kl": "k3",
        "kl_coef": 1.0,
        "num_minibatches": 2,
        "pipeline": {
            **ADAM,
            "values": function_node("zero_values"),
            "reference": function_node("own_reference", directory=str(teacher)),
        },
    }
    expected = trained(TorchTrainer(model, settings(**shared), seed=3), last=2)
    found = run_ranks(2, f"tests.support.learners:train_{trainer}", str(model), shared | changed, None, None, 1, 2)[0]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    for name, numbers in expected["weights"].items():
        assert found["weights"][name] == pytest.approx(numbers, rel=1e-3, abs=1e-3), name


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("advantage", "nodes", "spread"),
    [
        ("grpo", {}, {}),
        ("reinforce++", {}, {"reference": {"data_parallel": 2}}),
        ("gae", {"values": function_node("token_values")}, {"reference": {"data_parallel": 2}}),
    ],
)
def test_a_kl_in_the_reward_is_the_same_on_the_stages_of_megatron(model, advantage, nodes, spread):
    skip_without_megatron()
    shared = {"kl": "k1", "kl_in": "reward", "kl_coef": 0.5, "num_minibatches": 2, "advantage": advantage}
    expected = trained(TorchTrainer(model, settings(**shared, pipeline=nodes), seed=3), last=2)
    changed = shared | {"trainer": "megatron", "pipeline_parallel": 2, "pipeline": nodes | spread}
    found = run_ranks(2, "tests.support.learners:train_megatron", str(model), changed, None, None, 1, 2)[0]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("nodes", "advantage", "message"),
    [
        (
            {"values": function_node("few_values")},
            "gae",
            r"train\.pipeline\.values returned Tensor of 1: .* for each of",
        ),
        ({"values": function_node("infinite_values")}, "gae", r"values returned a number that is not finite"),
        (
            {"update": function_node("new_weight")},
            "grpo",
            r"must change weight and state in place .* returned Tensor",
        ),
        ({"update": function_node("more_state")}, "grpo", r"train\.pipeline\.update added norm to the state"),
        ({"update": function_node("zero_values")}, "grpo", r"train\.pipeline\.update failed: TypeError"),
    ],
)
def test_a_function_with_a_result_that_cannot_be_used_is_named(model, nodes, advantage, message):
    with pytest.raises(TrainError, match=message):
        TorchTrainer(model, train_of(nodes, advantage=advantage)).train_step(batch(1), step=1, version=0)


def test_an_update_with_other_arguments_is_refused_before_anything_is_queued():
    train = train_of({"update": function_node("zero_values")})
    refusal = refuse_recipe(msgspec.structs.replace(make_recipe(), train=train))
    assert "zero_values(weight, gradient, state, rate): too many positional" in refusal
