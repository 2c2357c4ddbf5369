"""The loss that balances experts: transformers' own value, the same gradient in recomputed layers, and its effect."""

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from hpcrl.errors import TrainError
from hpcrl.testing.learning import load_causal
from hpcrl.trainers.expert_balance import ExpertBalance
from hpcrl.trainers.model_files import open_causal
from hpcrl.trainers.token_model import TokenModel, compute_token_logprobs
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.trainers.torch_model import recompute_layers
from tests.support.families import make_family_model
from tests.support.learners import batch, make_model, settings
from tests.unit.trainers.test_token_model import make_micro

NUM_CHOSEN, NUM_EXPERTS = 2, 4


def measure_balance(model, micro):
    """Compute the loss of one forward pass, with a coefficient of 1."""
    balance = ExpertBalance(model, coef=1.0)
    with balance.watch(micro):
        compute_token_logprobs(TokenModel(model), micro, temperature=1.0)
    return balance.add_loss(torch.zeros(()), share=1.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_family_model(tmp_path_factory.mktemp("model"), "qwen3_moe", vocab_size=40)


def test_the_loss_of_a_layer_is_that_of_transformers_without_padding(tmp_path):
    model = load_causal(make_family_model(tmp_path, "qwen3_moe", vocab_size=40, num_hidden_layers=1))
    micro = make_micro()
    valid_BT = torch.stack([torch.arange(9) <= row.nonzero().max() for row in micro.mask_BT])
    assert not valid_BT.all()
    logits = model(micro.inputs_BT, output_router_logits=True).router_logits
    expected = load_balancing_loss_func(logits, NUM_EXPERTS, NUM_CHOSEN, valid_BT.long())
    torch.testing.assert_close(measure_balance(model, micro), expected / NUM_CHOSEN)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_a_model_that_recomputes_its_layers_has_the_same_gradient(tmp_path, family):
    directory, micro, found = make_family_model(tmp_path, family, vocab_size=40), make_micro(), []
    for recomputes in (False, True):
        model = load_causal(directory)
        if recomputes:
            recompute_layers(model)
        loss = measure_balance(model, micro)
        loss.backward()
        found.append([loss, *(parameter.grad for name, parameter in model.named_parameters() if "gate.weight" in name)])
    assert all(tensor.any() for tensor in found[0])
    torch.testing.assert_close(found[1], found[0])


def test_training_with_the_loss_balances_the_experts(model_dir):
    torch.set_num_threads(1)
    losses = {}
    for coef in (0.0, 3.0):
        trainer = TorchTrainer(model_dir, settings(moe_aux_coef=coef, learning_rate=3e-3), seed=1)
        for step in (1, 2, 3, 4):
            assert trainer.train_step(batch(step), step=step, version=step).skipped is None
        losses[coef] = float(measure_balance(trainer._policy.module, make_micro()))
    assert losses[3.0] < losses[0.0] - 0.02


def test_a_model_without_experts_is_refused(tmp_path):
    module = open_causal(make_model(tmp_path)).module
    ExpertBalance(module, coef=0.0)
    with pytest.raises(TrainError, match=r"train\.moe_aux_coef = 0\.1 needs a model with experts"):
        ExpertBalance(module, coef=0.1)
