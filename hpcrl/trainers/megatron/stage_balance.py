"""The loss that balances experts, in the layers of a rank's stage: the numbers of hpcrl/trainers/expert_balance.py.

Only the last stage has a loss to add it to. So its gradient is attached to the routing weights of each layer: they pass
through a function that leaves them as they are, and starts the gradient of the layer's term when it gets theirs.

A router needs the padding of its micro-batch, which is kept for each pass (kept_pass.py).

Legend: B rows of a micro-batch, T positions, S those of this rank, M all their tokens, E experts
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcrl.learn.batch import MicroBatch
from hpcrl.trainers.context_group import ContextGroup
from hpcrl.trainers.expert_balance import compute_balance, compute_probabilities, mark_row_tokens
from hpcrl.trainers.megatron.kept_pass import KeptPass


class _WatchedPass(NamedTuple):
    """The forward pass of a micro-batch, as a router needs it."""

    valid_M: Tensor
    """True for the tokens of this rank's positions, in Megatron's order, that are not padding."""
    weight: float
    """The weight of a layer's term in the loss of the minibatch."""


class StageBalance:
    """The balance loss of the routers of a stage, in the forward passes that are watched."""

    def __init__(self, layers: Iterable[Any], *, coef: float, context: ContextGroup) -> None:
        """Watch the routers of `layers`; without a coefficient they are left alone.

        The ranks of `context` divide the positions of their rows: shares are those over all of them, and each rank has
        the gradient of its tokens.
        """
        self._coef = coef
        self._context = context
        self.kept = KeptPass[_WatchedPass]()
        for layer in layers if coef else ():
            router = getattr(layer.mlp, "router", None)
            if router is not None:  # the first layers of some models have no experts
                router.routing = partial(self._route, router.score_function, router.routing)

    @contextmanager
    def watch(self, micro: MicroBatch, *, num_tokens: float) -> Iterator[None]:
        """Add the loss to the forward pass of a micro-batch; its minibatch has `num_tokens` over all ranks."""
        watched = None
        if self._coef:
            own_BS = self._context.take(mark_row_tokens(micro))
            watched = _WatchedPass(own_BS.T.reshape(-1), self._coef * micro.num_tokens / max(num_tokens, 1))
        with self.kept.use(watched):
            yield

    def _route(
        self,
        score_function: str,
        routing: Callable[..., tuple[Tensor, Tensor]],
        logits_SBE: Tensor,
        *given: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Do what a router does with its logits, and attach the gradient of its layer's term."""
        weights_ME, chosen_ME = routing(logits_SBE, *given, **options)
        watched = self.kept.current
        if watched is None:
            return weights_ME, chosen_ME
        probabilities_ME = compute_probabilities(logits_SBE.flatten(0, 1).float(), score_function=score_function)
        term = compute_balance(probabilities_ME, chosen_ME, watched.valid_M, context=self._context)
        attached_ME: Tensor = _AttachLoss.apply(weights_ME, watched.weight * term)  # type: ignore[no-untyped-call]
        return attached_ME, chosen_ME


class _AttachLoss(torch.autograd.Function):
    """A function that passes on activations, and adds a term to the loss that they end in."""

    @staticmethod
    def forward(_ctx: Any, activations: Tensor, _term: Tensor) -> Tensor:
        return activations.view_as(activations)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_ones((), dtype=torch.float32)
