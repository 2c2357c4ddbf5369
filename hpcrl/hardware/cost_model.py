"""Estimate the cost of a plan and the speed of a worker, before a node-hour is spent. Pure.

    compute_hours                                    node-hours and GPU-hours
    ModelShape, read_model_shape, guess_model_shape  the sizes of a model that decide its speed, read or guessed
    WorkerSpeed, estimate_speed                      seconds that one worker takes, by its GPUs and the model
    RooflineFit                                      coefficients of the estimate
    USABLE_SHARE                                     of a GPU's memory
    LINK_BYTES_PER_S                                 between two workers

The model is a roofline with four fitted coefficients; `python -m bench.router` reports its error on GPUs that it was
not fitted on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from hpcrl.hardware.gpus import GpuModel
from hpcrl.hardware.memory_model import BYTES_BF16, GIB

USABLE_SHARE = 0.9
"""Share of a GPU's memory for weights and KV; the rest is for activations and the driver."""
LINK_BYTES_PER_S = 25e9
"""The bandwidth between two workers (one 200 Gbit/s port), for handed-over KV and new weights."""


def compute_hours(num: int, *, walltime_min: int) -> float:
    """Return the node-hours (or GPU-hours) of `num` nodes (or GPUs) held for the whole walltime."""
    return round(num * walltime_min / 60, 2)


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a causal LM that decide its speed."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_dense: int
    """Weights that every token uses."""
    num_expert: int = 0
    """Weights of all experts."""
    num_experts: int = 0
    experts_per_token: int = 0
    weight_bytes: float = BYTES_BF16
    kv_bytes: float = BYTES_BF16

    @property
    def num_params(self) -> int:
        return self.num_dense + self.num_expert

    @property
    def num_active(self) -> float:
        """The number of weights that one token uses."""
        return self.num_dense + self.num_expert * self._share_per_token

    @property
    def kv_bytes_per_token(self) -> float:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_bytes

    def bytes_read(self, batch: float) -> float:
        """Return the bytes of weights that a step over `batch` tokens reads, without experts that no token chose."""
        covered = 1 - float((1 - self._share_per_token) ** batch)
        return (self.num_dense + self.num_expert * covered) * self.weight_bytes

    @property
    def _share_per_token(self) -> float:
        return self.experts_per_token / self.num_experts if self.num_experts else 0.0


def read_model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Compute the shape from the fields of a config.json: attention, gated MLP or experts, embeddings."""
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    experts = next((config[key] for key in _EXPERT_COUNTS if config.get(key)), 0)
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = 0 if experts else 3 * hidden * config["intermediate_size"]
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return ModelShape(
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_dense=layers * (attention + mlp) + embeddings,
        num_expert=layers * experts * 3 * hidden * inner,
        num_experts=experts,
        experts_per_token=config.get("num_experts_per_tok", 0) if experts else 0,
    )


def guess_model_shape(num_params: int) -> ModelShape:
    """Guess the shape of a dense model from its size alone.

    From 8 billion weights on, Qwen and Llama models have these layers and this KV within a third; smaller models may
    have half or a fifth of this KV.
    """
    billions = num_params / 1e9
    num_heads = max(1, round(13 * billions**0.42))
    return ModelShape(
        num_layers=max(1, round(19 * billions**0.32)),
        num_heads=num_heads,
        num_kv_heads=min(8, num_heads),
        head_dim=128,
        num_dense=num_params,
    )


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of a config.json that may hold the number of experts."""


class RooflineFit(msgspec.Struct, frozen=True, kw_only=True):
    """The four coefficients between the roofline and a real server, fitted on published H100 measurements."""

    layer_s: float = 9.5e-5
    """Time per layer of every step, whatever the batch: launching kernels."""
    read: float = 1.0
    """Time of reading weights and KV, relative to full bandwidth."""
    compute: float = 1.9
    """Time of a decode step's arithmetic, relative to peak; the inverse of its efficiency."""
    prefill: float = 1.4
    """Time of prefill's arithmetic, relative to peak."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpeed:
    """The speed of one worker with one model: all factors of a step's duration, computed once."""

    shape: ModelShape
    step_s: float
    """Time of an empty step."""
    byte_s: float
    """Time per byte of weights or KV read."""
    row_s: float
    """Time per sequence that is decoded in a step, besides reading."""
    token_s: float
    """Time per prefilled token, besides its attention."""
    pair_s: float
    """Time per pair of a prefilled token and one that it attends to."""
    kv_tokens: int
    """Tokens of KV that fit beside the weights; 0: the weights do not fit."""

    def prefill_s(self, num_new: float, *, num_known: float = 0) -> float:
        """Return the time to compute the KV of `num_new` tokens after `num_known` cached ones."""
        return self.token_s * num_new + self.pair_s * num_new * (num_known + num_new / 2)

    def decode_s(self, batch: float, *, num_kv: float) -> float:
        """Return the time of a step that generates a token for each of `batch` sequences, over `num_kv` KV tokens."""
        return self.base_step_s(batch) + self.row_s * batch + self._kv_s(num_kv)

    def reply_s(self, num_new: float, *, num_context: float, batch: float) -> float:
        """Return a sequence's share of the steps that generate its `num_new` tokens in a batch of `batch`."""
        return num_new * (self.base_step_s(batch) / batch + self.row_s + self._kv_s(num_context + num_new / 2))

    def base_step_s(self, batch: float) -> float:
        """Return the fixed time of a step over `batch` tokens: launching kernels and reading weights."""
        return self.step_s + self.byte_s * self.shape.bytes_read(batch)

    def _kv_s(self, num_kv: float) -> float:
        return self.byte_s * self.shape.kv_bytes_per_token * num_kv


@cache
def estimate_speed(gpu: GpuModel, *, shape: ModelShape, tp: int = 1, fit: RooflineFit = RooflineFit()) -> WorkerSpeed:  # noqa: B008 (frozen)
    """Estimate the speed of a worker with `tp` GPUs."""
    flops = gpu.bf16_tflops * 1e12 * tp * BYTES_BF16 / shape.weight_bytes  # tensor cores: half the bytes, twice as fast
    byte_s = fit.read / (gpu.memory_tb_per_s * 1e12 * tp)
    free_bytes = gpu.memory_gib * GIB * tp * USABLE_SHARE - shape.num_params * shape.weight_bytes
    return WorkerSpeed(
        shape=shape,
        step_s=fit.layer_s * shape.num_layers,
        byte_s=byte_s,
        row_s=fit.compute * 2 * shape.num_active / flops,
        token_s=fit.prefill * 2 * shape.num_active / flops,
        pair_s=fit.prefill * 4 * shape.num_layers * shape.num_heads * shape.head_dim / (gpu.bf16_tflops * 1e12 * tp),
        kv_tokens=max(0, int(free_bytes / shape.kv_bytes_per_token)),
    )
