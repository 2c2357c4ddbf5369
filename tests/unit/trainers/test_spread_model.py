"""A node whose data-parallel degree is not the trainer's: the same numbers, and tokens are sent only then."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from hpcrl.learn.batch import make_micro_batches, make_packed_batches
from hpcrl.testing.ranks import run_ranks
from hpcrl.trainers.context_group import ContextGroup
from hpcrl.trainers.spread_model import SpreadModel, pack_inputs, unpack_inputs
from hpcrl.trainers.token_model import compute_token_logprobs
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.trainers.torch_model import load_fixed
from hpcrl.trainers.world import SINGLE_RANK
from tests.support.learners import make_model, settings, trained
from tests.support.megatron import skip_without_megatron
from tests.support.training_rows import make_training_row

KL = {"kl": "k3", "kl_coef": 1.0, "num_minibatches": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("spread") / "model")


@pytest.mark.parametrize("make", [make_micro_batches, make_packed_batches])
def test_packed_inputs_are_the_same_when_unpacked(make):
    made = make(
        [make_training_row(length, seed=length) for length in (3, 9, 9, 17, 40)],
        tokens_per_micro_batch=40,
    )
    assert len(made) > 1
    for before, after in zip(made, unpack_inputs(pack_inputs(made)), strict=True):
        for name in ("inputs_BT", "mask_BT", "targets_N", "positions_BT"):
            mine, theirs = getattr(before, name), getattr(after, name)
            assert (mine is None and theirs is None) or torch.equal(mine, theirs), name
    assert unpack_inputs(pack_inputs([])) == []


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_log_probs_come_back_to_every_rank_of_two_replicas(model, degree):
    found = run_ranks(4, "tests.support.learners:spread_logprobs", str(model), degree)
    assert [one["has_model"] for one in found] == [rank % (4 // degree) == 0 for rank in range(4)]
    for rank, one in enumerate(found):
        assert one["errors"] == pytest.approx([0.0] * (6 + rank // 2), abs=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_model_has_the_precision_of_the_trainer_and_packed_rows_need_no_mask(model, precision):
    train = settings(rows="packed", precision=precision)
    spread = SpreadModel(model, train, data_parallel=1, share=0, world=SINGLE_RANK, temperature=1.0)
    dtypes = {weight.dtype for weight in spread._model.parameters()}
    assert dtypes == {torch.bfloat16 if precision == "bf16" else torch.float32}
    rows = [make_training_row(length, seed=length) for length in (700, 900, 400)]
    (micro,) = make_packed_batches(rows, tokens_per_micro_batch=2000)
    found = load_fixed(model, train=train, world=SINGLE_RANK, context=ContextGroup(is_packed=True))
    with torch.no_grad():
        expected_N, _ = compute_token_logprobs(found, micro, temperature=1.0)
    masks = []
    with torch.no_grad(), MaskWatch(masks):
        found_N = spread._compute_column(pack_inputs([micro]))
    assert masks == []
    assert torch.equal(found_N, expected_N)


class MaskWatch(TorchFunctionMode):
    """A mode that collects the masks of attention."""

    def __init__(self, masks):
        super().__init__()
        self._masks = masks

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention and kwargs.get("attn_mask") is not None:
            self._masks.append(kwargs["attn_mask"])
        return func(*args, **kwargs)


def nodes_of(degree):
    return KL | {"pipeline": {"reference": {"data_parallel": degree}}}


@pytest.mark.timeout(900)
def test_half_of_the_ranks_have_the_reference_of_all(model):
    alone = run_ranks(2, "tests.support.learners:train_counted", str(model), "torch", nodes_of(2))
    spread = run_ranks(2, "tests.support.learners:train_counted", str(model), "torch", nodes_of(1))
    assert [one["num_exchanges"] for one in alone] == [0, 0]
    assert [one["has_model"] for one in alone] == [[], []]
    assert [one["num_exchanges"] for one in spread] == [4, 4], "tokens and log-probs, in each of two steps"
    assert [one["has_model"] for one in spread] == [[True], [False]]
    for name in ("loss", "grad_norm", "entropy"):
        assert spread[0][name] == pytest.approx(alone[0][name], rel=1e-5), name


@pytest.mark.timeout(900)
def test_every_rank_of_a_megatron_replica_has_the_reference(model):
    skip_without_megatron()
    expected = trained(TorchTrainer(model, settings(**KL), seed=3), last=2)
    changed = nodes_of(2) | {"trainer": "megatron", "pipeline_parallel": 2}
    found = run_ranks(2, "tests.support.learners:train_counted", str(model), "megatron", changed)
    assert [one["has_model"] for one in found] == [[True], [True]]
    assert [one["num_exchanges"] for one in found] == [4, 4]
    for name in ("loss", "grad_norm"):
        assert found[0][name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
