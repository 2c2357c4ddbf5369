"""The policy loss, token by token.

Legend  N model tokens of a micro-batch - V vocabulary

Three policies meet in it (decoupled PPO, arXiv 2505.24298):

    behaviour   sampled the token, perhaps some versions ago; its log-prob is stored in the trajectory
    proximal    the policy when the training step began; the clip keeps the current policy near it
    current     the one that is being trained

    loss = -1/num_tokens * sum over tokens of  weight * min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)
    ratio = current / proximal        weight = min(proximal / behaviour, max_is_ratio), a constant
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before exp, so that one absurd token gives a large number and not infinity."""


class LossSums(NamedTuple):
    """Sums over tokens, so that micro-batches add up; divide by the number of tokens for means."""

    loss: Tensor
    clipped: Tensor
    """Tokens whose gradient the clip has stopped."""
    is_ratio: Tensor
    """Importance ratio proximal / behaviour, before truncation."""
    truncated: Tensor
    """Tokens whose importance ratio was above the limit."""
    kl: Tensor
    """Estimate k3 of KL(behaviour || current)."""
    entropy: Tensor

    @classmethod
    def zero(cls, device: torch.device | str = "cpu") -> Self:
        return cls(*torch.zeros(len(cls._fields), device=device).unbind())

    def plus(self, other: Self) -> Self:
        return type(self)(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def log_distribution(logits_NV: Tensor, *, temperature: float) -> Tensor:
    """Log-probs of the whole vocabulary under the temperature that sampled, in float32."""
    logits_NV = logits_NV.float()
    return torch.log_softmax(logits_NV if temperature == 1.0 else logits_NV / temperature, dim=-1)


def chosen_logprobs(logprobs_NV: Tensor, targets_N: Tensor) -> Tensor:
    """The log-prob of each token that was said."""
    return logprobs_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)


def entropies(logprobs_NV: Tensor) -> Tensor:
    """The entropy of the distribution that each token came from, in nats."""
    return -(logprobs_NV.exp() * logprobs_NV).sum(-1)


def policy_loss(
    logprobs_N: Tensor,
    *,
    entropy_N: Tensor,
    behaviour_N: Tensor,
    proximal_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
    max_is_ratio: float,
    entropy_coef: float,
    num_tokens: int,
) -> tuple[Tensor, LossSums]:
    """The loss to differentiate, and what it saw; `num_tokens` is the whole optimizer step's, not only N."""
    proximal_N = proximal_N.detach()
    ratio_N = _ratio(logprobs_N, proximal_N)
    plain_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    is_ratio_N = _ratio(proximal_N, behaviour_N)
    surrogate = (is_ratio_N.clamp(max=max_is_ratio) * torch.minimum(plain_N, clipped_N)).sum()
    loss = -(surrogate + entropy_coef * entropy_N.sum()) / num_tokens
    with torch.no_grad():
        drift_N = (logprobs_N - behaviour_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        sums = LossSums(
            loss=loss.detach() * num_tokens,
            clipped=(clipped_N < plain_N).sum().float(),
            is_ratio=is_ratio_N.sum(),
            truncated=(is_ratio_N > max_is_ratio).sum().float(),
            kl=(drift_N.exp() - 1 - drift_N).sum(),
            entropy=entropy_N.detach().sum(),
        )
    return loss, sums


def _ratio(above_N: Tensor, below_N: Tensor) -> Tensor:
    return (above_N - below_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
