"""A loss of the user's own, and models that the user adds: on both trainers, with the numbers of hpcrl's loss."""

import msgspec
import pytest
import torch

from hpcrl.config.pipeline import check_user_nodes, make_pipeline
from hpcrl.errors import TrainError
from hpcrl.learn.user_loss import arrange_by_row, mark_tokens
from hpcrl.testing.ranks import run_ranks
from hpcrl.trainers.torch import TorchTrainer
from tests.support.learners import batch, make_model, settings, trained
from tests.support.megatron import skip_without_megatron
from tests.support.plans import make_recipe, refuse_recipe

NO_CLIP = {"clip_low": 0.99, "clip_high": 1e6, "correction": "none", "proximal": "behaviour", "num_minibatches": 2}
TEACHER_INPUTS = ["batches", "teacher"]


def own_loss(function, *, inputs=(), **options):
    return {"loss": {"function": f"tests.support.nodes:{function}", "inputs": list(inputs), "options": options}}


def train_of(nodes, **changed):
    return settings(**{"num_minibatches": 2, **changed}, pipeline=nodes)


def teacher_node(directory):
    return {"teacher": {"model": str(directory), "role": "reference", "inputs": ["batches"]}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("own") / "model")


def test_columns_over_tokens_become_rows_and_gradients_pass():
    values_N = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    rows_N = torch.tensor([0, 2, 2])
    arranged = arrange_by_row(values_N, rows_N)
    assert arranged.tolist() == [[1, 0], [0, 0], [2, 3]]
    assert mark_tokens(rows_N).tolist() == [[True, False], [False, False], [True, True]]
    arranged[2].sum().backward()
    assert values_N.grad.tolist() == [0, 1, 1]


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_a_loss_of_three_lines_learns_what_hpcrl_learns_without_a_clip(model, rows):
    assert check_user_nodes(train_of(own_loss("plain_loss"))) == []
    mine = trained(TorchTrainer(model, train_of(own_loss("plain_loss"), rows=rows), seed=3), last=2)
    theirs = trained(TorchTrainer(model, settings(**NO_CLIP, rows=rows), seed=3), last=2)
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-7)
    assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    for name, numbers in theirs["weights"].items():
        assert mine["weights"][name] == pytest.approx(numbers, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize(("function", "aggregation"), [("mean_loss", "token"), ("row_loss", "sequence")])
def test_one_number_and_a_number_for_each_row_are_means(model, function, aggregation):
    changed = {"aggregation": aggregation}
    mine = trained(TorchTrainer(model, train_of(own_loss(function), **changed), seed=3), last=1)
    theirs = trained(TorchTrainer(model, train_of(own_loss("plain_loss"), **changed), seed=3), last=1)
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-7)
    assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


def test_a_second_reference_is_a_teacher_of_the_users_loss(model, tmp_path):
    teacher = TorchTrainer(make_model(tmp_path / "teacher"), settings(learning_rate=0.05), seed=3)
    trained(teacher, last=2)
    torch.manual_seed(0)
    module = teacher._policy.module
    module.save_pretrained(tmp_path / "teacher")
    nodes = teacher_node(tmp_path / "teacher") | own_loss("distilled_loss", inputs=TEACHER_INPUTS, weight=1.0)
    student = TorchTrainer(model, train_of(nodes, learning_rate=0.01), seed=3)
    assert check_user_nodes(train_of(nodes)) == []
    assert make_pipeline(train_of(nodes))["teacher"].output == "tokens"
    losses = [student.train_step(batch(1), step=step, version=0).loss for step in range(1, 9)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("changed", [{"kl": "k3"}, {"clip_high": 0.28}, {"entropy_coef": 0.1}, {"ratio": "sequence"}])
def test_settings_of_the_loss_that_a_users_loss_replaces_are_refused(changed):
    (problem,) = check_user_nodes(train_of(own_loss("plain_loss"), **changed))
    name, value = next(iter(changed.items()))
    assert problem.startswith(f"train.pipeline.loss: train.{name} = {value!r} is of hpcrl's loss")


def test_a_users_loss_takes_the_reference_of_a_kl():
    nodes = own_loss("distilled_loss", inputs=["batches", "reference"])
    assert check_user_nodes(train_of(nodes, kl="k3")) == []


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("constant_loss", "does not depend on the log-probs"),
        ("lost_loss", r"a tensor of shape .* for each token"),
        ("against_the_best", "train.pipeline.loss failed: TypeError"),
    ],
)
def test_a_loss_that_cannot_be_used_is_named(model, function, message):
    with pytest.raises(TrainError, match=message):
        trained(TorchTrainer(model, train_of(own_loss(function)), seed=3), last=1)


def test_a_teacher_with_another_vocabulary_or_no_model_is_refused(model, tmp_path):
    config = msgspec.json.decode((model / "config.json").read_bytes())
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config | {"vocab_size": 7}))
    nodes = own_loss("distilled_loss", inputs=TEACHER_INPUTS)
    with pytest.raises(TrainError, match="has a vocabulary of 7 tokens"):
        TorchTrainer(model, train_of(teacher_node(tmp_path) | nodes))
    with pytest.raises(TrainError, match=r"train\.pipeline\.teacher\.model = .* is not a model directory"):
        TorchTrainer(model, train_of(teacher_node(tmp_path / "none") | nodes))


def test_a_loss_with_other_arguments_is_refused_before_anything_is_queued():
    recipe = make_recipe()
    refusal = refuse_recipe(msgspec.structs.replace(recipe, train=train_of(own_loss("distilled_loss"))))
    assert "distilled_loss(logprobs, behaviour, advantages, mask): missing a required argument: 'teacher'" in refusal


@pytest.mark.timeout(900)
def test_megatron_trains_the_users_loss_with_a_teacher_as_torch_does(model, tmp_path):
    skip_without_megatron()
    nodes = teacher_node(make_model(tmp_path / "teacher", family="llama")) | own_loss(
        "distilled_loss", inputs=TEACHER_INPUTS
    )
    expected = trained(TorchTrainer(model, train_of(nodes), seed=3), last=2)
    for parallel in ({"tensor_parallel": 2}, {"pipeline_parallel": 2}):
        changed = {"trainer": "megatron", "num_minibatches": 2, "pipeline": nodes, **parallel}
        found = run_ranks(2, "tests.support.learners:train_megatron", str(model), changed, None, None, 1, 2)[0]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.timeout(900)
def test_the_kl_of_megatron_is_that_of_torch(model):
    skip_without_megatron()
    changed = {"kl": "k3", "kl_coef": 1.0, "num_minibatches": 2}
    expected = trained(TorchTrainer(model, settings(**changed), seed=3), last=2)
    parallel = {"trainer": "megatron", "pipeline_parallel": 2}
    found = run_ranks(2, "tests.support.learners:train_megatron", str(model), changed | parallel, None, None, 1, 2)[0]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
