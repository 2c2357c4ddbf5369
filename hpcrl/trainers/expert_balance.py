"""The balance of experts: a loss that keeps the routers of a model from sending most tokens to a few experts.

For each layer with experts it is (Switch Transformer, arXiv 2101.03961)

    E * sum over experts of  (share of the assignments of tokens to it) * (mean probability of it)

which is 1 if all experts are used alike, and E / K if all tokens use the same K experts. Its gradient is that of the
probabilities. Tokens are those of a micro-batch without padding; layers are summed, as in Megatron.

    ExpertBalance   records what the routers of a model do
    find_routers    the routers of a model of transformers

Legend: B rows of a micro-batch, T positions, M all their tokens, E experts, K experts of a token
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hpcrl.errors import TrainError
from hpcrl.learn.batch import MicroBatch
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
        valid_BT = micro.mask_BT.flip(1).cumsum(1).flip(1) > 0  # rows end with a model token
        self._valid_M = self._context.take(valid_BT).reshape(-1)
        self._is_watching = True
        try:
            yield
        finally:
            self._is_watching = False

    def add_loss(self, loss: Tensor, *, share: float) -> Tensor:
        """Return the loss of a micro-batch with that of its routers, of which this is the share in the minibatch."""
        for router, logits_ME, chosen_MK in self._routed:
            term = _compute_balance(
                _compute_probabilities(router, logits_ME.float()), chosen_MK, self._valid_M, context=self._context
            )
            loss = loss + self._coef * share * term
        self._routed.clear()
        return loss

    def _record(self, router: Any, inputs: Any, outputs: Any) -> None:
        if self._is_watching:  # nothing is computed here: a layer that is recomputed must do the same both times
            logits_ME, _, chosen_MK = outputs
            self._routed.append((router, logits_ME, chosen_MK))


def _compute_probabilities(router: Any, logits_ME: Tensor) -> Tensor:
    if hasattr(router, "e_score_correction_bias"):
        scores_ME = logits_ME.sigmoid()
        return scores_ME / scores_ME.sum(-1, keepdim=True)
    return logits_ME.softmax(-1)


def _compute_balance(probabilities_ME: Tensor, chosen_MK: Tensor, valid_M: Tensor, *, context: ContextGroup) -> Tensor:
    """Compute the part of this rank's tokens in the loss of one layer."""
    num_chosen, num_experts = chosen_MK.shape[-1], probabilities_ME.shape[-1]
    weight_M = valid_M.to(probabilities_ME.dtype)
    num_tokens = context.sum(weight_M.sum()).clamp(min=1)
    used_E = torch.zeros_like(probabilities_ME[0])
    used_E.index_add_(0, chosen_MK.reshape(-1), weight_M.repeat_interleave(num_chosen))
    context.sum(used_E)
    mean_E = (probabilities_ME * weight_M[:, None]).sum(0) / num_tokens
    return num_experts * (used_E / (num_tokens * num_chosen) * mean_E).sum()


def find_routers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the router of each layer that has experts."""
    gates = [each.gate for each in module.modules() if hasattr(each, "experts") and hasattr(each, "gate")]
    return [gate for gate in gates if isinstance(gate, torch.nn.Module) and hasattr(gate, "top_k")]
