"""The policy loss, token by token.

    compute_policy_loss         the loss of a micro-batch, from log-probs and entropies
    compute_imitation_loss      the loss of conversations to imitate, likewise
    TokenInputs, LossSums       its inputs, and its sums over tokens
    PolicyLoss                  the protocol of a loss
    logprobs_and_entropy        log-probs and entropies from logits
    compute_correction_weights  the weight of each token for being off-policy
    compute_kl_weights          the same for the KL
    compute_token_shares        the share of each token in the loss
    estimate_kl                 the KL term
    compute_kl_costs            the KL as a cost in the reward
    compute_value_loss          the loss of a critic
    compute_ratio_quantiles     quantiles of the importance ratio
    compute_log_distribution    log-probs of the whole vocabulary
    gather_logprobs             log-probs of the generated tokens
    compute_entropies           entropies from log-probs
    sum_by_row, average_by_row  sums and means over rows, at every token
    sum_to_go                   discounted sums over the rest of a row, from every token on
    count_positions             the number of each token in its row

Legend: N model tokens of a micro-batch, R its rows, V vocabulary

The loss involves four policies:

- behaviour: sampled the token, perhaps some versions ago; its log-prob is stored in the trajectory
- proximal: the clip keeps the current policy near it; it is the policy at the start of the training step
  (decoupled PPO, arXiv 2505.24298), or the behaviour policy itself (PPO, arXiv 1707.06347)
- current: the policy in training
- reference: the policy that training started from; the KL term keeps the current policy near it

    loss = sum over tokens of  share * (-weight * surrogate + kl_coef * kl_weight * kl - entropy_coef * entropy)

- surrogate: min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), for A < 0 at least dual_clip * A;
  with CISPO clip(ratio) * A * log current, where the clipped ratio is a constant for the gradient
- ratio: current / proximal of the token, or the geometric mean over its sequence (GSPO)
- weight: computed from proximal / behaviour as `train.correction` selects; a constant for the gradient
- kl_weight: current / behaviour of the token or its sequence, since the samples are the behaviour policy's and the KL
  the current one's; it is bounded, and never zero
- share: the token's part in the mean, as `train.aggregation` selects

docs/learning.md names the paper of every choice.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, assert_never

import torch
from torch import Tensor

from hpcrl.config.recipe import TrainConfig

MAX_LOG_RATIO = 20.0
"""The limit of log-ratios before exp, so that one absurd token gives a large number and not infinity."""

MAX_KL_RATIO = 10.0
"""Limit of the weight of a token's KL, unless `train.max_is_ratio` is higher."""
NUM_RATIO_BINS = 80
MAX_BINNED_LOG_RATIO = 4.0
"""The range of the bins in which log importance ratios are counted, -4 to 4; bins add up over ranks."""


@dataclass(frozen=True)
class TokenInputs:
    """The inputs of the loss at the model tokens of a micro-batch, apart from the current policy."""

    behaviour_N: Tensor
    proximal_N: Tensor
    advantages_N: Tensor
    rows_N: Tensor
    """The row of each token."""
    shares_N: Tensor
    """The share of each token; the shares of an optimizer step sum to 1 over all micro-batches and ranks."""
    reference_N: Tensor | None = None
    fresh_N: Tensor | None = None
    """True where the weights that the step started from generated the token, if it is known."""
    others: tuple[Tensor, ...] = ()
    """The results of further nodes, which a loss of the user's own takes."""


class LossSums(NamedTuple):
    """The sums over tokens, which add up over micro-batches and ranks; divide by the number of tokens for means."""

    loss: Tensor
    """The loss, already a mean: it includes the shares."""
    clipped: Tensor
    """The tokens whose gradient the clip has stopped."""
    is_ratio: Tensor
    """The importance ratio proximal / behaviour, before truncation."""
    truncated: Tensor
    """The tokens whose importance weight is not their ratio: cut at the limit, or masked."""
    kl: Tensor
    """The estimate k3 of KL(behaviour || current)."""
    kl_fresh: Tensor
    """The same over tokens without lag."""
    num_fresh: Tensor
    """The tokens without lag."""
    kl_reference: Tensor
    """The recipe's estimate of KL(current || reference)."""
    entropy: Tensor
    num_replayed: Tensor
    """The tokens predicted with the experts that the engine chose (`train.router_replay`)."""
    ratio_bins: Tensor
    """The number of tokens in each bin of the log importance ratio."""

    @classmethod
    def zero(cls, device: torch.device | str = "cpu") -> Self:
        scalars = torch.zeros(len(cls._fields) - 1, device=device).unbind()
        return cls._make([*scalars, torch.zeros(NUM_RATIO_BINS, device=device)])

    def add(self, other: Self) -> Self:
        return type(self)._make([mine + theirs for mine, theirs in zip(self, other, strict=True)])

    def flatten(self) -> Tensor:
        """Return all fields in one tensor, to be summed over ranks."""
        return torch.cat([field.reshape(-1).double() for field in self])

    @classmethod
    def unflatten(cls, flat: Tensor) -> Self:
        scalars = len(cls._fields) - 1
        return cls._make([*flat[:scalars].unbind(), flat[scalars:]])


class PolicyLoss(Protocol):
    """The loss of one micro-batch: what to differentiate, and its sums for the metrics."""

    def __call__(
        self, logprobs_N: Tensor, *, entropy_N: Tensor, token_inputs: TokenInputs, train: TrainConfig
    ) -> tuple[Tensor, LossSums]: ...


def compute_log_distribution(logits_NV: Tensor, *, temperature: float) -> Tensor:
    """Compute the log-probs of the whole vocabulary at the sampling temperature, in float32."""
    logits_NV = logits_NV.float()
    return torch.log_softmax(logits_NV if temperature == 1.0 else logits_NV / temperature, dim=-1)


def gather_logprobs(logprobs_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Return the log-prob of each generated token."""
    return logprobs_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)


def compute_entropies(logprobs_NV: Tensor) -> Tensor:
    """Compute the entropy of the distribution of each token, in nats."""
    return -(logprobs_NV.exp() * logprobs_NV).sum(-1)


def logprobs_and_entropy(
    logits_NV: Tensor, targets_N: Tensor, *, temperature: float, has_entropy_bonus: bool
) -> tuple[Tensor, Tensor]:
    """Compute the log-prob of each generated token, and the entropy of the distribution that it came from.

    Without an entropy bonus the entropy needs no gradient, and then it costs a dot product.
    """
    if has_entropy_bonus:
        logprobs_NV = compute_log_distribution(logits_NV, temperature=temperature)
        return gather_logprobs(logprobs_NV, targets_N), compute_entropies(logprobs_NV)
    scaled_NV = logits_NV.float() if temperature == 1.0 else logits_NV.float() / temperature
    logprobs_N, entropy_N = _LogprobsAndEntropy.apply(scaled_NV, targets_N)  # type: ignore[no-untyped-call]
    return logprobs_N, entropy_N


class _LogprobsAndEntropy(torch.autograd.Function):
    """A function that computes the probabilities once, for the entropy now and the gradient later."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        chances_NV = logprobs_NV.exp()
        entropy_N = -torch.linalg.vecdot(chances_NV, logprobs_NV)
        ctx.save_for_backward(chances_NV, targets_N)
        ctx.mark_non_differentiable(entropy_N)
        return gather_logprobs(logprobs_NV, targets_N), entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        chances_NV, targets_N = ctx.saved_tensors
        grad_N1 = grads[0].unsqueeze(-1)
        grad_NV = chances_NV * -grad_N1
        return grad_NV.scatter_add_(-1, targets_N.unsqueeze(-1), grad_N1), None


def compute_policy_loss(
    logprobs_N: Tensor, *, entropy_N: Tensor, token_inputs: TokenInputs, train: TrainConfig
) -> tuple[Tensor, LossSums]:
    """Compute the loss to differentiate, and its sums for the metrics."""
    log_ratio_N = _clamp_log_ratio(logprobs_N - token_inputs.proximal_N.detach())
    if train.ratio == "sequence":
        log_ratio_N = average_by_row(log_ratio_N, token_inputs.rows_N)
    match train.surrogate:
        case "cispo":
            surrogate_N, clipped_N = _compute_cispo_surrogate(log_ratio_N, logprobs_N, token_inputs.advantages_N, train)
        case "clip":
            surrogate_N, clipped_N = _compute_surrogate(log_ratio_N.exp(), token_inputs.advantages_N, train)
        case other:
            assert_never(other)
    log_is_N = _clamp_log_ratio(token_inputs.proximal_N.detach() - token_inputs.behaviour_N)
    weights_N, truncated_N = compute_correction_weights(log_is_N, token_inputs.rows_N, train)
    terms_N = -weights_N * surrogate_N
    kl_N = torch.zeros_like(logprobs_N)
    if token_inputs.reference_N is not None:
        kl_N = estimate_kl(logprobs_N, token_inputs.reference_N, estimator=train.kl)
        if train.kl_in == "loss":
            log_now_N = _clamp_log_ratio(logprobs_N.detach() - token_inputs.behaviour_N)
            kl_weights_N = compute_kl_weights(log_now_N, token_inputs.rows_N, train)
            terms_N = terms_N + train.kl_coef * kl_weights_N * kl_N
    if train.entropy_coef:
        terms_N = terms_N - train.entropy_coef * entropy_N
    loss = (token_inputs.shares_N * terms_N).sum()
    with torch.no_grad():
        drift_N = _clamp_log_ratio(logprobs_N - token_inputs.behaviour_N)
        drift_kl_N = drift_N.exp() - 1 - drift_N
        fresh_N = torch.zeros_like(drift_N, dtype=torch.bool) if token_inputs.fresh_N is None else token_inputs.fresh_N
        sums = LossSums(
            loss=loss.detach(),
            clipped=clipped_N.sum().float(),
            is_ratio=log_is_N.exp().sum(),
            truncated=truncated_N.sum().float(),
            kl=drift_kl_N.sum(),
            kl_fresh=drift_kl_N.where(fresh_N, 0.0).sum(),
            num_fresh=fresh_N.sum().float(),
            kl_reference=kl_N.detach().sum(),
            entropy=entropy_N.detach().sum(),
            num_replayed=torch.zeros_like(loss.detach()),
            ratio_bins=_count_ratio_bins(log_is_N),
        )
    return loss, sums


def compute_imitation_loss(
    logprobs_N: Tensor, *, entropy_N: Tensor, token_inputs: TokenInputs, train: TrainConfig
) -> tuple[Tensor, LossSums]:
    """Compute the cross-entropy of tokens to imitate (SFT): they were not sampled, so no ratio and no clip exist."""
    loss = -(token_inputs.shares_N * token_inputs.advantages_N * logprobs_N).sum()
    no_drift_N = torch.zeros_like(logprobs_N.detach())
    sums = LossSums.zero(logprobs_N.device)._replace(
        loss=loss.detach(),
        is_ratio=no_drift_N.exp().sum(),
        entropy=entropy_N.detach().sum(),
        ratio_bins=_count_ratio_bins(no_drift_N),
    )
    return loss, sums


def _compute_surrogate(ratio_N: Tensor, advantages_N: Tensor, train: TrainConfig) -> tuple[Tensor, Tensor]:
    """Compute the objective to maximise, and where the clip has stopped it (dual clip: arXiv 1912.09729)."""
    plain_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1 - train.clip_low, 1 + train.clip_high) * advantages_N
    surrogate_N, clipped_N = torch.minimum(plain_N, bounded_N), bounded_N < plain_N
    if train.dual_clip is None:
        return surrogate_N, clipped_N
    floor_N = train.dual_clip * advantages_N
    too_low_N = (advantages_N < 0) & (surrogate_N < floor_N)
    return torch.where(too_low_N, floor_N, surrogate_N), clipped_N | too_low_N


def _compute_cispo_surrogate(
    log_ratio_N: Tensor, logprobs_N: Tensor, advantages_N: Tensor, train: TrainConfig
) -> tuple[Tensor, Tensor]:
    """Compute the objective of CISPO (arXiv 2506.13585), in which no token loses its gradient, and where it is clipped.

    Its value is that of PPO's clipped term; its gradient that of the clipped ratio times the log-prob.
    """
    ratio_N = log_ratio_N.detach().exp()
    bounded_N = ratio_N.clamp(1 - train.clip_low, 1 + train.clip_high)
    return bounded_N * advantages_N * (1 + logprobs_N - logprobs_N.detach()), bounded_N != ratio_N


def compute_correction_weights(log_is_N: Tensor, rows_N: Tensor, train: TrainConfig) -> tuple[Tensor, Tensor]:
    """Compute each token's weight for being off-policy, and where that is not the ratio itself."""
    ratio_N = log_is_N.exp()
    if train.correction in ("sequence", "mask-sequence"):
        ratio_N = _clamp_log_ratio(sum_by_row(log_is_N, rows_N)).exp()
    elif train.correction in ("geometric", "mask-geometric"):
        ratio_N = average_by_row(log_is_N, rows_N).exp()
    match train.correction:
        case "none":
            return torch.ones_like(ratio_N), torch.zeros_like(ratio_N, dtype=torch.bool)
        case "token" | "sequence" | "geometric":
            return ratio_N.clamp(max=train.max_is_ratio), ratio_N > train.max_is_ratio
        case "mask-token" | "mask-sequence" | "mask-geometric":
            outside_N = (ratio_N > train.max_is_ratio) | (ratio_N < train.min_is_ratio)
            return ratio_N.masked_fill(outside_N, 0.0), outside_N


def compute_kl_weights(log_now_N: Tensor, rows_N: Tensor, train: TrainConfig) -> Tensor:
    """Compute the weights of the KL for samples of another policy: never zero, and 1 where that is the current one.

    What a correction does to the surrogate, to bound its variance, would leave the KL out where it is largest.
    """
    if train.correction in ("sequence", "mask-sequence"):
        log_now_N = _clamp_log_ratio(sum_by_row(log_now_N, rows_N))
    return log_now_N.exp().clamp(max=max(train.max_is_ratio, MAX_KL_RATIO))


def estimate_kl(logprobs_N: Tensor, reference_N: Tensor, *, estimator: str) -> Tensor:
    """Estimate KL(current || reference) from the generated tokens: Schulman's k1, k2, k3.

    In the loss the gradient of k2 is that of this KL, the gradient of k3 that of KL(reference || current), and the
    gradient of k1 zero on average, which is why k1 is only a cost in the reward.
    """
    drift_N = _clamp_log_ratio(reference_N - logprobs_N)
    match estimator:
        case "k1":
            return -drift_N
        case "k2":
            return drift_N.square() / 2
        case _:
            return drift_N.exp() - 1 - drift_N


def compute_kl_costs(started_N: Tensor, reference_N: Tensor, rows_N: Tensor, *, train: TrainConfig) -> Tensor:
    """Compute what the KL costs each token: k1 from the policy at the start of the step, times its coefficient.

    A critic gets each token's own cost. Else a later token of its row counts, `train.kl_gamma` for each token between.
    With 1 the gradient is exactly that of KL(current || reference) over whole sequences, with 0 that of the KL of
    single tokens in the states that the policy visits.
    """
    costs_N = train.kl_coef * _clamp_log_ratio(started_N - reference_N)
    return costs_N if train.advantage == "gae" else sum_to_go(costs_N, rows_N, gamma=train.kl_gamma)


def compute_value_loss(
    values_N: Tensor, *, before_N: Tensor, returns_N: Tensor, shares_N: Tensor, clip: float | None
) -> Tensor:
    """Compute half the squared error of a critic, which may move at most `clip` from its earlier values (PPO)."""
    error_N = (values_N - returns_N).square()
    if clip is not None:
        near_N = before_N + (values_N - before_N).clamp(-clip, clip)
        error_N = torch.maximum(error_N, (near_N - returns_N).square())
    return (shares_N * error_N).sum() / 2


def compute_token_shares(
    rows_N: Tensor, *, aggregation: str, num_tokens: float, num_sequences: float, budget: int
) -> Tensor:
    """Compute the share of each token in the loss; `num_tokens` and `num_sequences` are the whole optimizer step's.

    token      every token the same (DAPO, arXiv 2503.14476)
    sequence   every sequence the same, whatever its length (GRPO, arXiv 2402.03300; GSPO, arXiv 2507.18071)
    fixed      every token the same, divided by the response budget and not by the lengths seen (Dr. GRPO)
    """
    ones_N = torch.ones(len(rows_N), device=rows_N.device)
    match aggregation:
        case "sequence":
            return ones_N / (sum_by_row(ones_N, rows_N) * num_sequences)
        case "fixed":
            return ones_N / (num_sequences * budget)
        case _:
            return ones_N / num_tokens


def sum_by_row(values_N: Tensor, rows_N: Tensor) -> Tensor:
    """Return the sum over its row, at every token."""
    num_rows = int(rows_N.max()) + 1 if len(rows_N) else 0
    sums_R = values_N.new_zeros(num_rows).index_add(0, rows_N, values_N)
    return sums_R[rows_N]


def sum_to_go(values_N: Tensor, rows_N: Tensor, *, gamma: float) -> Tensor:
    """Return the discounted sum from each token to the end of its row; the tokens of a row follow one another.

    In each round a token's sum reaches twice as far, so that a row of thousands of tokens takes a dozen operations.
    """
    sums_N, reach, weight = values_N.double(), 1, gamma
    while weight and reach < len(rows_N):
        same_N = rows_N[reach:] == rows_N[:-reach]
        later_N = weight * sums_N[reach:].where(same_N, 0.0)
        sums_N = torch.cat([sums_N[:-reach] + later_N, sums_N[-reach:]])
        reach, weight = 2 * reach, weight * weight
    return sums_N.to(values_N.dtype)


def count_positions(rows_N: Tensor) -> Tensor:
    """Return the number of each token in its row, from 0; the tokens of a row follow one another."""
    lengths_R = torch.bincount(rows_N)
    starts_R = lengths_R.cumsum(0) - lengths_R
    return torch.arange(len(rows_N), device=rows_N.device) - starts_R[rows_N]


def average_by_row(values_N: Tensor, rows_N: Tensor) -> Tensor:
    """Return the mean over its row, at every token."""
    return sum_by_row(values_N, rows_N) / sum_by_row(torch.ones_like(values_N), rows_N)


def compute_ratio_quantiles(bins: Tensor, quantiles: tuple[float, ...]) -> list[float | None]:
    """Compute quantiles of the importance ratio, to the width of the bins (0.1 in the logarithm)."""
    total = float(bins.sum())
    if not total > 0:
        return [None] * len(quantiles)
    reached = bins.double().cumsum(0) / total
    width = 2 * MAX_BINNED_LOG_RATIO / NUM_RATIO_BINS
    centres = -MAX_BINNED_LOG_RATIO + width * (torch.arange(NUM_RATIO_BINS, dtype=torch.double) + 0.5)
    positions = [int((reached < quantile).sum().clamp(max=NUM_RATIO_BINS - 1)) for quantile in quantiles]
    return [round(float(centres[position].exp()), 4) for position in positions]


def _count_ratio_bins(log_is_N: Tensor) -> Tensor:
    inner_N = log_is_N.detach().float().nan_to_num(0.0).clamp(-MAX_BINNED_LOG_RATIO, MAX_BINNED_LOG_RATIO)
    index_N = (
        ((inner_N + MAX_BINNED_LOG_RATIO) * (NUM_RATIO_BINS / (2 * MAX_BINNED_LOG_RATIO)))
        .long()
        .clamp(max=NUM_RATIO_BINS - 1)
    )
    return torch.bincount(index_N, minlength=NUM_RATIO_BINS).float()


def _clamp_log_ratio(log_ratio_N: Tensor) -> Tensor:
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
