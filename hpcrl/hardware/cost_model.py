"""Estimate the cost of a plan and the speed of a worker, before a node-hour is spent. Pure.

    compute_hours                                    node-hours and GPU-hours
    ModelShape, read_model_shape, make_model_shape   the sizes of a model that decide its speed
    WorkerSpeed, estimate_speed                      seconds that one worker takes, by its GPUs and the model
    estimate_step_s, TrainingWork                    seconds of a training step
    USABLE_SHARE                                     of a GPU's memory
    LINK_BYTES_PER_S                                 between two workers
    TRAINING_PASSES                                  of a training step

The model is a roofline with fitted coefficients (`hpcrl.hardware.gpus.RooflineFit`); `python -m bench.costs` reports
its error on GPUs that it was not fitted on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import log2
from typing import Any

import msgspec

from hpcrl.hardware.architecture import ModelArchitecture, read_architecture
from hpcrl.hardware.gpus import GpuModel, RooflineFit
from hpcrl.hardware.memory_model import BYTES_BF16, GIB
from hpcrl.hardware.rank_traffic import NO_TRAFFIC, StepTraffic

USABLE_SHARE = 0.9
"""Share of a GPU's memory for weights and KV; the rest is for activations and the driver."""
LINK_BYTES_PER_S = 25e9
"""The bandwidth between two workers (one 200 Gbit/s port), for handed-over KV, new weights, ranks of the trainer."""
TRAINING_PASSES = 4
"""Passes over a token that are as much work as a forward pass: two are the backward pass, one the log-probs before."""


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
    num_kv_values: int = 0
    """Numbers kept of a token; 0: a key and a value of each layer's KV heads."""
    hidden_size: int = 0
    """0: not known, and sums over GPUs are not counted."""
    num_precise: int = 0
    """Weights of embeddings and head, which rounding leaves in bfloat16."""
    weight_bytes: float = BYTES_BF16
    factor_bytes: float | None = None
    """Bytes of a number in the products with weights; None: as those of a weight."""
    kv_bytes: float = BYTES_BF16

    @property
    def num_params(self) -> int:
        return self.num_dense + self.num_expert

    def count_held_bytes(self, num_copies: int = 1) -> float:
        """Return the bytes of the weights that each of some copies of the model has: they divide the experts."""
        precise_bytes = max(self.weight_bytes, BYTES_BF16)
        num_rounded = self.num_dense - self.num_precise + self.num_expert / num_copies
        return num_rounded * self.weight_bytes + self.num_precise * precise_bytes

    @property
    def num_active(self) -> float:
        """The number of weights that one token uses."""
        return self.num_dense + self.num_expert * self._share_per_token

    @property
    def kv_bytes_per_token(self) -> float:
        values = self.num_kv_values or 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return values * self.kv_bytes

    def bytes_read(self, batch: float, *, num_copies: int = 1) -> float:
        """Return the bytes of weights that a step over `batch` tokens reads, without experts that no token chose.

        They are those of one copy with `batch` tokens; the tokens of all copies choose among all experts.
        """
        covered = 1 - float((1 - self._share_per_token) ** (batch * num_copies))
        return (self.num_dense + self.num_expert * covered / num_copies) * self.weight_bytes

    @property
    def pair_flops(self) -> float:
        """The operations of attention between one token and one other."""
        return 4 * self.num_layers * self.num_heads * self.head_dim

    @property
    def summed_bytes_per_token(self) -> float:
        """The bytes of a token that the GPUs of an engine add up: after attention and MLP of each layer."""
        return 2 * self.num_layers * self.hidden_size * BYTES_BF16

    @property
    def exchanged_bytes_per_token(self) -> float:
        """The bytes of a token that copies of the model send each other to its experts, and back: as much as a sum."""
        return self.num_layers * self.hidden_size * BYTES_BF16 if self.num_experts else 0.0

    @property
    def _share_per_token(self) -> float:
        return self.experts_per_token / self.num_experts if self.num_experts else 0.0


def read_model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Compute the shape from the fields of a config.json; KeyError if one that cannot be left out is absent."""
    return make_model_shape(read_architecture(config))


def make_model_shape(architecture: ModelArchitecture) -> ModelShape:
    """Return the sizes of an architecture that decide its speed."""
    return ModelShape(
        num_layers=architecture.num_layers,
        num_heads=architecture.num_heads,
        num_kv_heads=1 if architecture.kv_rank else architecture.num_kv_heads,  # compressed KV is one for all heads
        head_dim=architecture.head_dim,
        num_dense=architecture.num_params - architecture.num_expert_params,
        num_expert=architecture.num_expert_params,
        num_experts=architecture.num_experts,
        experts_per_token=architecture.experts_per_token,
        num_kv_values=architecture.kv_values_per_token,
        hidden_size=architecture.hidden_size,
        num_precise=architecture.embedding_params + architecture.head_params,
    )


@dataclass(frozen=True, kw_only=True)
class WorkerSpeed:
    """The speed of one worker with one model: all factors of a step's duration, computed once."""

    shape: ModelShape
    step_s: float
    """Time of an empty step."""
    byte_s: float
    """Time per byte of weights read."""
    kv_byte_s: float
    """Time per byte of KV read."""
    row_s: float
    """Time per sequence that is decoded in a step, besides reading."""
    token_s: float
    """Time per prefilled token, besides its attention."""
    pair_s: float
    """Time per pair of a prefilled token and one that it attends to."""
    kv_tokens: int
    """Tokens of KV that fit beside the weights; 0: the weights do not fit."""
    num_parts: int = 1
    """Stages of a pipeline, in each copy of the model: each has an equal part of the batch at any time."""
    num_copies: int = 1
    """Copies of the model, which divide its experts."""

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
        return self._find_base_step_s(batch)

    @cached_property
    def _find_base_step_s(self) -> Callable[[float], float]:
        """Compute the time, once for each of the usual batches: routers ask again and again."""
        return lru_cache(maxsize=4096)(
            lambda batch: (
                self.step_s + self.byte_s * self.shape.bytes_read(batch / self.num_parts, num_copies=self.num_copies)
            )
        )

    @cached_property
    def _kv_token_s(self) -> float:
        """The time per token of KV read."""
        return self.kv_byte_s * self.shape.kv_bytes_per_token

    def _kv_s(self, num_kv: float) -> float:
        return self._kv_token_s * num_kv


@cache
def estimate_speed(
    gpu: GpuModel, *, shape: ModelShape, tp: int = 1, pp: int = 1, num_copies: int = 1, fit: RooflineFit | None = None
) -> WorkerSpeed:
    """Estimate the speed of a worker with `tp` * `pp` GPUs for each copy, of which the peak figures are known.

    `tp` GPUs share each layer, and each of the `pp` stages has a share of the layers. Experts count as shared evenly,
    whether each is divided or has its GPU. The copies share requests and experts evenly, and send each other all tokens
    at the experts. `fit` takes the place of the coefficients of the GPU.
    """
    assert gpu.bf16_tflops is not None
    assert gpu.memory_tb_per_s is not None
    by = fit or gpu.fit
    bf16_flops = gpu.bf16_tflops * 1e12 * tp
    factor_bytes = shape.factor_bytes or shape.weight_bytes
    flops = bf16_flops * BYTES_BF16 / factor_bytes  # tensor cores: half the bytes, twice as fast
    bandwidth = gpu.memory_tb_per_s * 1e12 * tp
    kv_copies = max(1.0, tp / shape.num_kv_heads)  # a head is not divided
    link_s = by.link / (gpu.link_gb_per_s * 1e9) if gpu.link_gb_per_s else 0.0
    sum_s = link_s * shape.summed_bytes_per_token if tp > 1 else 0.0
    exchange_s = link_s * shape.exchanged_bytes_per_token if num_copies > 1 else 0.0
    free_bytes = gpu.memory_gib * GIB * tp * pp * USABLE_SHARE - shape.count_held_bytes(num_copies)
    num_parts = pp * num_copies
    return WorkerSpeed(
        shape=shape,
        step_s=(by.layer_s + by.expert_layer_s * (shape.num_experts > 0) + by.hop_s * log2(tp)) * shape.num_layers,
        byte_s=by.read / bandwidth,
        kv_byte_s=by.kv * kv_copies / (bandwidth * num_parts),
        row_s=(by.compute * 2 * shape.num_active / flops + sum_s) / num_parts + exchange_s / pp,
        token_s=(by.prefill * 2 * shape.num_active / flops + sum_s) / num_parts + exchange_s / pp,
        pair_s=by.prefill * shape.pair_flops / (bf16_flops * num_parts),
        kv_tokens=num_copies * max(0, int(free_bytes / (shape.kv_bytes_per_token * kv_copies))),
        num_parts=num_parts,
        num_copies=num_copies,
    )


@dataclass(frozen=True, kw_only=True)
class TrainingWork:
    """The work of a training step, and the ranks that share it."""

    num_tokens: float
    mean_length: float
    """Tokens of a row, which attend to each other."""
    num_gpus: int
    pp: int = 1
    pp_chunks: int = 1
    """The parts of the model on each stage."""
    num_micro_batches: int = 8
    """The micro-batches of a rank; with stages, the fewer they are, the longer stages wait for each other."""
    num_passes: float = TRAINING_PASSES
    traffic: StepTraffic = NO_TRAFFIC
    """The time in which the ranks send each other what they need."""


def estimate_step_s(gpu: GpuModel, *, shape: ModelShape, work: TrainingWork) -> float:
    """Estimate the time of a training step, of GPUs whose FLOP/s are known.

    Stages wait for each other while others compute, and while others send within their layers.
    """
    assert gpu.bf16_tflops is not None
    each = 2 * shape.num_active + shape.pair_flops * work.mean_length / 2
    bubble = 1 + (work.pp - 1) / (work.num_micro_batches * work.pp_chunks)
    peak_s = work.num_passes * each * work.num_tokens / (gpu.bf16_tflops * 1e12 * work.num_gpus)
    compute_s, traffic = gpu.fit.train * peak_s, work.traffic
    exposed_s = traffic.exposed_s(compute_s / work.num_passes)
    return (compute_s + traffic.within_s) * bubble + exposed_s + traffic.after_s
