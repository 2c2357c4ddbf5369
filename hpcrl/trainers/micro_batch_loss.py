"""The loss of one micro-batch, from its logits.

Legend: N model tokens of a micro-batch, V vocabulary
"""

from typing import NamedTuple

from torch import Tensor

from hpcrl.config.recipe import TrainConfig
from hpcrl.learn.batch import MicroBatch
from hpcrl.learn.loss import LossSums, TokenInputs, compute_policy_loss, compute_token_shares, logprobs_and_entropy


class MinibatchTotals(NamedTuple):
    """The counts of one minibatch over all ranks."""

    num_tokens: float
    """The tokens that the model generated."""
    num_sequences: float
    num_not_finite: float
    """The rewards and log-probs that are not finite."""
    num_padded_tokens: float


class PriorLogprobs(NamedTuple):
    """The log-probs of a micro-batch's tokens, computed before the first optimizer step of a training step."""

    proximal_N: Tensor | None = None
    """None where the policy cannot have changed since: then they equal the current ones."""
    reference_N: Tensor | None = None


def compute_micro_batch_loss(
    micro: MicroBatch,
    logits_NV: Tensor,
    *,
    prior: PriorLogprobs,
    totals: MinibatchTotals,
    train: TrainConfig,
    temperature: float,
    max_length: int,
) -> tuple[Tensor, LossSums]:
    """Compute the loss to differentiate; a token's share does not depend on its micro-batch or rank."""
    logprobs_N, entropy_N = logprobs_and_entropy(logits_NV, micro.targets_N, temperature=temperature, train=train)
    proximal_N = micro.behaviour_N if train.proximal == "behaviour" else prior.proximal_N
    token_inputs = TokenInputs(
        behaviour_N=micro.behaviour_N,
        proximal_N=logprobs_N.detach() if proximal_N is None else proximal_N,
        advantages_N=micro.advantages_N,
        rows_N=micro.rows_N,
        shares_N=compute_token_shares(
            micro.rows_N,
            aggregation=train.aggregation,
            num_tokens=totals.num_tokens,
            num_sequences=totals.num_sequences,
            max_length=max_length,
        ),
        reference_N=prior.reference_N,
    )
    return compute_policy_loss(logprobs_N, entropy_N=entropy_N, token_inputs=token_inputs, train=train)
