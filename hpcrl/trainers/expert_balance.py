"""The balance of experts: a loss that keeps the routers of a model from sending most tokens to a few experts.

For each layer with experts it is (Switch Transformer, arXiv 2101.03961)

    E * sum over experts of  (share of the assignments of tokens to it) * (mean probability of it)

which is 1 if all experts are used alike, and E / K if all tokens use the same K experts. Its gradient is that of the
probabilities. Tokens are those of a micro-batch without padding; layers are summed, as in Megatron.

    ExpertBalance           records what the routers of a model of transformers do
    mark_row_tokens         the tokens of a micro-batch without padding
    compute_probabilities   the probabilities of experts, from a router's logits
    compute_balance         the loss of one layer

Megatron's layers have the same loss: see megatron/stage_balance.py.

Legend: B rows of a micro-batch, T positions, M all their tokens, E experts, K experts of a token
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hpcrl.errors import TrainError
from hpcrl.learn.batch import MicroBatch
from hpcrl.models.expert_routers import find_routers
from hpcrl.trainers.context_group import WHOLE_CONTEXT, ContextGroup


class ExpertBalance:
    """The balance loss of a model's forward passes, while they are watched."""

    def __init__(self, module: torch.nn.Module, *, coef: float, context: ContextGroup = WHOLE_CONTEXT) -> None:
        """Watch all routers of `module`; without a coefficient nothing is recorded.

        The ranks of `context` divide the positions of their rows: shares are those over all of them.
        """
        self._coef = coef
        self._context = context
        self._is_watching = False
        self._valid_M = torch.zeros(0, dtype=torch.bool)
        self._routed: list[tuple[Any, Tensor, Tensor]] = []
        if not coef:
            return
        routers = find_routers(module)
        if not routers:
            raise TrainError(
                f"train.moe_aux_coef = {coef:g} needs a model with experts, whose routers transformers calls `gate`, "
                f"and a {type(module).__name__} has none that are known: remove it"
            )
        for router in routers:
            router.register_forward_hook(self._record)

    @contextmanager
    def watch(self, micro: MicroBatch) -> Iterator[None]:
        """Record the forward pass of a micro-batch; passes that recompute a layer come later, and are not recorded."""
        self._routed.clear()
        self._valid_M = self._context.take(mark_row_tokens(micro)).reshape(-1)
        self._is_watching = True
        try:
            yield
        finally:
            self._is_watching = False

    def add_loss(self, loss: Tensor, *, share: float) -> Tensor:
        """Return the loss of a micro-batch with that of its routers, of which this is the share in the minibatch."""
        for router, logits_ME, chosen_MK in self._routed:
            probabilities_ME = compute_probabilities(
                logits_ME.float(),
                score_function="sigmoid" if hasattr(router, "e_score_correction_bias") else "softmax",
            )
            chosen_ME = torch.zeros_like(probabilities_ME, dtype=torch.bool).scatter_(1, chosen_MK, True)
            term = compute_balance(probabilities_ME, chosen_ME, self._valid_M, context=self._context)
            loss = loss + self._coef * share * term
        self._routed.clear()
        return loss

    def _record(self, router: Any, inputs: Any, outputs: Any) -> None:
        if self._is_watching:  # nothing is computed here: a layer that is recomputed must do the same both times
            logits_ME, _, chosen_MK = outputs
            self._routed.append((router, logits_ME, chosen_MK))


def mark_row_tokens(micro: MicroBatch) -> Tensor:
    """Mark the tokens of a micro-batch that are not padding: rows end with a model token."""
    return micro.mask_BT.flip(1).cumsum(1).flip(1) > 0


def compute_probabilities(logits_ME: Tensor, *, score_function: str) -> Tensor:
    """Compute the probabilities of experts; sigmoids, which do not add up to one, are divided by their sum."""
    if score_function == "sigmoid":
        scores_ME = logits_ME.sigmoid()
        return scores_ME / scores_ME.sum(-1, keepdim=True)
    return logits_ME.softmax(-1)


def compute_balance(probabilities_ME: Tensor, chosen_ME: Tensor, valid_M: Tensor, *, context: ContextGroup) -> Tensor:
    """Compute the part of this rank's tokens in the loss of one layer; the ranks of `context` exchange their counts."""
    weight_M = valid_M.to(probabilities_ME.dtype)
    own_E = (chosen_ME & valid_M[:, None]).sum(0, dtype=weight_M.dtype)
    counts = context.sum(torch.cat([own_E, weight_M.sum()[None]]))
    used_E, num_tokens = counts[:-1], counts[-1].clamp(min=1)
    mean_E = (probabilities_ME * weight_M[:, None]).sum(0) / num_tokens
    balance: Tensor = (used_E / used_E.sum().clamp(min=1) * mean_E).sum()
    return len(own_E) * balance
