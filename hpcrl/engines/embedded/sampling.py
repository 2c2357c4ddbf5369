"""Sampling with one uniform number per (seed, position): a token does not depend on the rest of the batch.

    draw_uniforms     the numbers
    compute_logprobs  the distribution that each row is sampled from
    find_likeliest    the likeliest tokens
    sample_tokens     the tokens

Legend: B rows, V vocabulary.
"""

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def draw_uniforms(seeds: list[int], positions: list[int]) -> NDArray[np.float64]:
    """Return numbers in [0, 1 - 2**-52], each a hash of a seed and a token's position."""
    counters_B = np.array([seed & _MASK for seed in seeds], np.uint64)
    hashed_B = _splitmix64(_splitmix64(counters_B) ^ np.array(positions, np.uint64))
    # 52 bits, not 53: u * total then rounds to less than total, so a search for it stays below the end.
    return (hashed_B >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def compute_logprobs(
    logits_BV: torch.Tensor, *, temperatures: list[float], top_ps: list[float], top_ks: list[int]
) -> torch.Tensor:
    """Return the normalized log-probabilities of each row; -inf for tokens that its top_p or top_k excludes."""
    scale_B1 = torch.tensor([[t or 1.0] for t in temperatures], device=logits_BV.device)
    logprobs_BV = torch.log_softmax(logits_BV.float() / scale_B1, dim=-1)
    cut = [row for row, (top_p, top_k) in enumerate(zip(top_ps, top_ks, strict=True)) if top_p < 1 or top_k]
    if cut:
        logprobs_BV[cut] = _cut_unlikely(logprobs_BV[cut], [top_ps[row] for row in cut], [top_ks[row] for row in cut])
    return logprobs_BV


def _cut_unlikely(logprobs_BV: torch.Tensor, top_ps: list[float], top_ks: list[int]) -> torch.Tensor:
    """Keep the likeliest tokens, and always the first of them."""
    sorted_BV, order_BV = logprobs_BV.sort(dim=-1, descending=True, stable=True)
    probability_BV = sorted_BV.double().exp()
    before_BV = probability_BV.cumsum(dim=-1) - probability_BV
    p_B1 = torch.tensor(top_ps, dtype=torch.float64, device=logprobs_BV.device)[:, None]
    k_B1 = torch.tensor([k or logprobs_BV.shape[1] for k in top_ks], device=logprobs_BV.device)[:, None]
    rank_V = torch.arange(logprobs_BV.shape[1], device=logprobs_BV.device)
    left_out_BV = ((before_BV >= p_B1) | (rank_V >= k_B1)) & (rank_V > 0)
    kept_BV = torch.empty_like(logprobs_BV).scatter_(1, order_BV, sorted_BV.masked_fill(left_out_BV, -torch.inf))
    return torch.log_softmax(kept_BV, dim=-1)


def find_likeliest(logprobs_BV: torch.Tensor, counts: list[int]) -> list[dict[int, float]]:
    """Return the `counts` likeliest tokens of each row with their log-probabilities."""
    if not any(counts):
        return [{} for _ in counts]
    values, ids = logprobs_BV.topk(min(max(counts), logprobs_BV.shape[1]), dim=-1)
    rows = zip(ids.tolist(), values.tolist(), counts, strict=True)
    return [
        {token: logprob for token, logprob in zip(i[:num], v[:num], strict=True) if logprob > -torch.inf}
        for i, v, num in rows
    ]


def sample_tokens(
    logprobs_BV: torch.Tensor, *, temperatures: list[float], seeds: list[int], positions: list[int]
) -> tuple[list[int], list[float]]:
    """Sample a token for every row; temperature 0 takes the likeliest, with its log-probability at temperature 1.

    Returns the tokens and their log-probabilities.
    """
    ids_B = logprobs_BV.argmax(dim=-1)
    if any(temperatures):
        u_B = torch.from_numpy(draw_uniforms(seeds, positions)).to(logprobs_BV.device)
        greedy_B = torch.tensor([t == 0 for t in temperatures], device=logprobs_BV.device)
        ids_B = torch.where(greedy_B, ids_B, _invert_cdf(logprobs_BV, u_B))
    chosen_B = logprobs_BV.gather(1, ids_B[:, None])[:, 0]
    return ids_B.tolist(), chosen_B.tolist()


def _invert_cdf(logprobs_BV: torch.Tensor, u_B: torch.Tensor) -> torch.Tensor:
    """Return the first token whose cumulative probability exceeds u; never one of probability 0."""
    cdf_BV = logprobs_BV.double().exp_().cumsum(dim=-1)
    drawn_B1 = torch.searchsorted(cdf_BV, (u_B * cdf_BV[:, -1])[:, None], right=True)
    return drawn_B1[:, 0].clamp_(max=cdf_BV.shape[1] - 1)  # beyond the end only if the logits are NaN
