"""A loss that the user wrote: a function of log-probs, behaviour log-probs, advantages and mask, row by row.

    adapt_loss       the user's function as the loss of a micro-batch
    arrange_by_row   columns over tokens as rows, with zeros after the last token
    mark_tokens      the mask of such rows

    def loss(logprobs, behaviour, advantages, mask):     # all of R rows and L columns
        ratio = (logprobs - behaviour).exp()
        return -(ratio * advantages)

The result is a number for each token, for each row, or one: the mean of either, as `train.aggregation` weighs tokens,
is what is differentiated, over all micro-batches and ranks. One number counts as the mean over the tokens seen.

Legend: N model tokens of a micro-batch, R its rows, L the most model tokens of a row
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hpcrl.config.recipe import TrainConfig
from hpcrl.errors import NodeResultError
from hpcrl.learn.loss import LossSums, PolicyLoss, TokenInputs, compute_policy_loss


def adapt_loss(function: Callable[..., Any]) -> PolicyLoss:
    """Make the loss of a micro-batch from a function of rows; further inputs of the node follow the mask."""

    def compute_loss(
        logprobs_N: Tensor, *, entropy_N: Tensor, token_inputs: TokenInputs, train: TrainConfig
    ) -> tuple[Tensor, LossSums]:
        rows_N = token_inputs.rows_N
        if len(rows_N):
            columns = (logprobs_N, token_inputs.behaviour_N, token_inputs.advantages_N)
            given = [arrange_by_row(column_N, rows_N) for column_N in columns]
            others = [arrange_by_row(column_N, rows_N) for column_N in token_inputs.others]
            result = _check_result(function(*given, mark_tokens(rows_N), *others), shape_RL=given[0].shape)
            loss = _weigh_result(result, token_inputs)
        else:
            loss = logprobs_N.sum()  # nothing to train on here, but every rank must run the backward pass
        with torch.no_grad():  # the drift from the behaviour policy is that of any loss, clips are not
            _, sums = compute_policy_loss(
                logprobs_N.detach(), entropy_N=entropy_N.detach(), token_inputs=token_inputs, train=train
            )
        nothing = torch.zeros_like(sums.clipped)
        return loss, sums._replace(loss=loss.detach(), clipped=nothing, truncated=nothing, kl_reference=nothing)

    return compute_loss


def arrange_by_row(values_N: Tensor, rows_N: Tensor) -> Tensor:
    """Arrange a column over tokens by rows; gradients pass through."""
    counts_R, columns_N = _find_columns(rows_N)
    return values_N.new_zeros(len(counts_R), int(counts_R.max())).index_put((rows_N, columns_N), values_N)


def mark_tokens(rows_N: Tensor) -> Tensor:
    """Return the mask of these rows: True where there is a token."""
    return arrange_by_row(torch.ones_like(rows_N, dtype=torch.bool), rows_N)


def _find_columns(rows_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of tokens of each row, and the place of each token within its row."""
    counts_R = torch.bincount(rows_N)
    starts_R = counts_R.cumsum(0) - counts_R
    return counts_R, torch.arange(len(rows_N), device=rows_N.device) - starts_R[rows_N]


def _weigh_result(result: Tensor, token_inputs: TokenInputs) -> Tensor:
    rows_N, shares_N = token_inputs.rows_N, token_inputs.shares_N
    if result.ndim == 0:
        return result * shares_N.sum()
    each_N = result[rows_N] if result.ndim == 1 else result[rows_N, _find_columns(rows_N)[1]]
    return (shares_N * each_N).sum()


def _check_result(result: Any, *, shape_RL: torch.Size) -> Tensor:
    """Refuse a result that is not a loss of these rows, or that does not depend on the log-probs."""
    num_rows, num_columns = shape_RL
    if not isinstance(result, Tensor):
        seen = type(result).__name__
    elif result.shape not in (shape_RL, shape_RL[:1], torch.Size()):
        seen = f"a tensor of shape {list(result.shape)}"
    elif not result.requires_grad:
        seen = "a tensor that does not depend on the log-probs, so nothing would be learned"
    else:
        return result
    raise NodeResultError(
        f"train.pipeline.loss returned {seen}: it must return a tensor of one number, of one for each row "
        f"([{num_rows}]) or of one for each token ([{num_rows}, {num_columns}]), computed from the log-probs"
    )
