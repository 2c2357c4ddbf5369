"""Attention with heads of unequal sizes: the numbers of the plain computation, and no matrix of all pairs of tokens."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

from hpcrl.testing.fake_steps import make_micro_batch
from hpcrl.trainers.attention import attend_causally
from hpcrl.trainers.context_group import ContextGroup
from hpcrl.trainers.token_model import TokenModel, compute_token_logprobs
from tests.support.families import make_family_model
from tests.support.megatron import skip_without_megatron

NUM_TOKENS = 24
KEY_SIZE, VALUE_SIZE = 24, 16
SCALE = 0.3
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
"""The kernels that have no matrix of all pairs; where none of them serves, a call within this choice fails."""


def make_heads(value_size: int = VALUE_SIZE, num_kv_heads: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, KEY_SIZE), (num_kv_heads, KEY_SIZE), (num_kv_heads, value_size))
    return [torch.randn(2, num, NUM_TOKENS, size, generator=generator).requires_grad_() for num, size in sizes]


def attend_plainly(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    scores = SCALE * query @ key.mT
    hidden = torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ value


def attend_as_megatron(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    skip_without_megatron()
    from hpcrl.trainers.megatron.layers import CausalAttention

    found = CausalAttention(softmax_scale=SCALE)(*(each.permute(2, 0, 1, 3) for each in (query, key, value)))
    return found.unflatten(2, (query.shape[1], -1)).permute(1, 2, 0, 3)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend_causally(query, key, value, scale=SCALE)


@pytest.mark.parametrize("function", [attend, attend_as_megatron])
@pytest.mark.parametrize(("value_size", "num_kv_heads"), [(VALUE_SIZE, 4), (VALUE_SIZE, 2), (KEY_SIZE, 2)])
def test_fused_attention_has_the_output_and_the_gradients_of_the_plain_computation(
    function: Callable[..., Tensor], value_size: int, num_kv_heads: int
) -> None:
    mine, plain = (make_heads(value_size, num_kv_heads) for _ in range(2))
    with sdpa_kernel(FUSED):
        found = function(*mine)
        weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
        (found * weights).sum().backward()
    expected = attend_plainly(*plain)
    (expected * weights).sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for each, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(each.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_values_of_another_size_than_keys_have_no_fused_kernel_on_cpus() -> None:
    with sdpa_kernel(FUSED), pytest.raises(RuntimeError, match="kernel"):
        torch.nn.functional.scaled_dot_product_attention(*make_heads(), is_causal=True)


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_family_model(tmp_path_factory.mktemp("models") / "model", "deepseek_v3"))


def compute_gradients(model: Any, logprobs_N: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    logprobs_N.sum().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_model_with_compressed_attention_makes_no_matrix_of_all_pairs(compressed: Path, is_packed: bool) -> None:
    micro = make_micro_batch(NUM_TOKENS, is_packed=is_packed, has_mask=True)
    micro.targets_N.copy_(torch.arange(NUM_TOKENS) % 7)  # and the inputs with them
    model = AutoModelForCausalLM.from_pretrained(compressed)
    # Transformers' own attention, before TokenModel has replaced it.
    logprobs_TV = model(micro.inputs_BT).logits[0].log_softmax(-1)
    wanted = compute_gradients(model, logprobs_TV.gather(1, micro.targets_N[:, None]))
    called = TokenModel(model, context=ContextGroup(is_packed=is_packed))
    with sdpa_kernel(FUSED):
        found = compute_gradients(model, compute_token_logprobs(called, micro, temperature=1.0)[0])
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        torch.testing.assert_close(found[name], each, rtol=1e-3, atol=1e-5)
