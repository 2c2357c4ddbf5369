"""Compare the cost model with measured servers: `fit` on one GPU type, `errors` on another.

read_points   the measured servers of a CSV file whose model's shape is known
fit           the four coefficients that predict the time per output token best
errors        relative errors of a fit
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from hpcrl.hardware.cost_model import ModelShape, RooflineFit, estimate_speed, read_model_shape
from hpcrl.hardware.gpus import GPU_CATALOGUE

SYSTEMS = {"h100_sxm": "h100", "b200_sxm": "b200"}
WEIGHT_BYTES = {"": 2.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.56}
"""Bytes per weight; fp4 includes the scale of every block of 16 or 32."""
CONFIGS = {
    "Qwen/Qwen3-32B": dict(
        hidden_size=5120, num_hidden_layers=64, num_attention_heads=64, num_key_value_heads=8, head_dim=128,
        intermediate_size=25600, vocab_size=151936,
    ),
    "meta-llama/Llama-3.1-8B-Instruct": dict(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, vocab_size=128256,
    ),
    "meta-llama/Llama-3.1-70B": dict(
        hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        intermediate_size=28672, vocab_size=128256,
    ),
    "Qwen/Qwen3-235B-A22B-FP8": dict(
        hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, num_key_value_heads=4, head_dim=128,
        intermediate_size=12288, moe_intermediate_size=1536, num_experts=128, num_experts_per_tok=8,
        vocab_size=151936,
    ),
    "openai/gpt-oss-120b": dict(
        hidden_size=2880, num_hidden_layers=36, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
        intermediate_size=2880, num_local_experts=128, num_experts_per_tok=4, vocab_size=201088,
    ),
}  # fmt: skip
TERMS = ("layer_s", "read", "compute", "prefill")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measured server under a steady load."""

    gpu: str
    terms: tuple[float, ...]
    """Seconds per output token that each coefficient of 1 would give."""
    token_s: float


def read_points(path: Path) -> list[Point]:
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model_path"] in CONFIGS and row["system"] in SYSTEMS]
    return [point for row in rows if (point := _point(row)) is not None]


def _point(row: dict[str, str]) -> Point | None:
    """Return the point, or None if its KV cannot fit: requests queued, so the time per token has no meaning."""
    if row["attention_dp_size"] not in ("", "1"):
        return None
    shape = msgspec.structs.replace(
        read_model_shape(CONFIGS[row["model_path"]]), weight_bytes=WEIGHT_BYTES[row["precision"]]
    )
    gpu, tp = SYSTEMS[row["system"]], int(row["tp_size"])
    batch, num_prompt, num_new = (int(row[name]) for name in ("batch_size", "isl", "osl"))
    if batch * (num_prompt + num_new) > estimate_speed(GPU_CATALOGUE[gpu], shape=shape, tp=tp).kv_tokens:
        return None
    terms = tuple(
        _token_s(
            gpu, shape, tp, RooflineFit(**{name: float(name == term) for name in TERMS}), batch, num_prompt, num_new
        )
        for term in TERMS
    )
    return Point(gpu=gpu, terms=terms, token_s=float(row["silicon_tpot_ms"]) / 1e3)


def _token_s(
    gpu: str, shape: ModelShape, tp: int, fit: RooflineFit, batch: int, num_prompt: int, num_new: int
) -> float:
    """Return the time of a decode step, with the prefills of other requests in between."""
    one = estimate_speed(GPU_CATALOGUE[gpu], shape=shape, tp=tp, fit=fit)
    prefill_s = (batch - 1) * one.prefill_s(num_prompt) / num_new
    return one.decode_s(batch, num_kv=batch * (num_prompt + num_new / 2)) + prefill_s


def fit(points: list[Point]) -> RooflineFit:
    """Fit for the least relative errors, by reweighted least squares, which limits the weight of a few odd servers."""
    terms = np.array([point.terms for point in points])
    relative = terms / np.array([point.token_s for point in points])[:, None]
    weights = np.ones(len(points))
    for _ in range(50):
        found = np.linalg.lstsq(relative * weights[:, None], weights, rcond=None)[0]
        weights = 1 / np.sqrt(np.abs(relative @ found - 1) + 0.02)
    return RooflineFit(**dict(zip(TERMS, map(float, found), strict=True)))


def errors(points: list[Point], found: RooflineFit) -> list[float]:
    coefficients = [getattr(found, term) for term in TERMS]
    return [
        abs(sum(term * by for term, by in zip(point.terms, coefficients, strict=True)) / point.token_s - 1)
        for point in points
    ]
