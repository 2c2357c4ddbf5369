"""Which models have their logits computed by chunks, with the log-probs of the model itself; and their ranks."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hpcrl.learn import token_head
from hpcrl.learn.batch import MicroBatch
from hpcrl.learn.loss import compute_entropies, gather_logprobs
from hpcrl.learn.token_head import HeadForm
from hpcrl.testing.ranks import run_ranks
from hpcrl.trainers.token_model import TokenModel, compute_token_logprobs, find_head_form
from hpcrl.trainers.torch_model import recompute_layers
from hpcrl.trainers.world import SINGLE_RANK
from tests.support.learners import make_model, train_torch

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 8, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "qwen3": ({}, HeadForm()),
    "llama": ({}, HeadForm()),
    "qwen3_moe": (EXPERTS, HeadForm()),
    "mixtral": (EXPERTS, HeadForm()),
    "gemma2": ({"final_logit_softcapping": 2.0}, HeadForm(cap=2.0)),
    "gemma3_text": ({"final_logit_softcapping": None}, HeadForm()),
    "cohere": ({"logit_scale": 0.25}, HeadForm(scale=0.25)),
    "granite": ({"logits_scaling": 4.0}, HeadForm(scale=0.25)),
    "minicpm3": ({"num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "dim_model_base": 8}, None),
    "phi": ({}, None),  # its output layer has a bias
}


def make_causal(family, **changed):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family][0], **changed})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def make_micro():
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(3, 9, generator=generator) < 0.6
    num = int(mask.sum())
    return MicroBatch(
        inputs_BT=torch.randint(1, 40, (3, 9), generator=generator),
        mask_BT=mask,
        targets_N=torch.randint(40, (num,), generator=generator),
        behaviour_N=torch.zeros(num),
        advantages_N=torch.zeros(num),
        rows_N=mask.nonzero()[:, 0],
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_log_probs_and_gradients_of_its_logits(family, monkeypatch):
    monkeypatch.setattr(token_head, "MAX_CHUNK_LOGITS", 40 * 4)
    causal, micro = make_causal(family), make_micro()
    assert find_head_form(causal) == FAMILIES[family][1]
    parameters = list(causal.parameters())
    logprobs = torch.log_softmax(causal(micro.inputs_BT, use_cache=False).logits[micro.mask_BT] / 0.7, -1)
    whole = gather_logprobs(logprobs, micro.targets_N)
    expected = torch.autograd.grad(whole.square().sum(), parameters, allow_unused=True)
    found, entropy = compute_token_logprobs(TokenModel(causal), micro, temperature=0.7)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, compute_entropies(logprobs.detach()), rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(found.square().sum(), parameters, allow_unused=True)
    for mine, theirs in zip(gradients, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * max(0.1, float(theirs.abs().max())))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_recomputed_layers_keep_little_and_give_the_same_gradients(family):
    causal, micro = make_causal(family), make_micro()
    parameters = list(causal.parameters())

    def differentiate():
        """Return the gradients, and how many values were kept for them."""
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor.numel()) or tensor, lambda x: x
        ):
            logprobs, _ = compute_token_logprobs(TokenModel(causal), micro, temperature=1.0)
        return torch.autograd.grad(logprobs.sum(), parameters), sum(kept)

    expected, num_all = differentiate()
    recompute_layers(causal)
    found, num_kept = differentiate()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert num_kept < num_all / 3


def train_in_chunks(world, model_dir, variants):
    """Train with each of the settings, with a few logits at once."""
    token_head.MAX_CHUNK_LOGITS = 7 * 32
    return [train_torch(world, model_dir, changed, last=2) for changed in variants]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tied", [False, True])
def test_ranks_that_chunk_give_the_numbers_of_one_that_does_not(tmp_path, tied):
    model = make_model(tmp_path / "model", tied=tied)
    changed = {"num_minibatches": 2, "entropy_coef": 0.1, "tokens_per_micro_batch": 64}
    expected = train_torch(SINGLE_RANK, model, changed, last=2)
    variants = [
        {**changed, "sharding": "none", "recompute": True},
        {**changed, "sharding": "full", "recompute": False},
    ]
    variants.append({**changed, "sharding": "full", "precision": "bf16"})
    name = "tests.unit.trainers.test_token_model:train_in_chunks"
    for *exact, rounded in run_ranks(2, name, str(model), variants):
        for mine in exact:
            for key in ("loss", "grad_norm", "entropy"):
                assert mine[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key
        assert rounded["entropy"] == pytest.approx(expected["entropy"], rel=0.02)
        assert rounded["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)
