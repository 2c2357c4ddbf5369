"""Router replay in the layers of a rank's stage: hpcrl/trainers/expert_replay.py has what it is.

Megatron's routers ask an object of theirs for the experts of a token, where there is one, and weigh these experts by
their own scores. As with the loss that balances experts (stage_balance.py), several micro-batches are in a pipeline at
the same time, and a layer that is recomputed runs again later: what it needs is kept for it.

Legend: B rows of a micro-batch, T positions, S those of this rank, M all their tokens, L layers with experts of the
model, E experts, K experts of a token
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from hpcrl.errors import TrainError
from hpcrl.hardware.architecture import REPLAY_FAMILIES
from hpcrl.learn.batch import MicroBatch
from hpcrl.trainers.context_group import ContextGroup
from hpcrl.trainers.expert_replay import check_choices, choose_experts, take_choices
from hpcrl.trainers.megatron.weight_names import ModelDims


class StageReplay:
    """The choices that the routers of a stage replay, in the forward passes of micro-batches that are in use."""

    def __init__(
        self, layers: Iterable[tuple[int, Any]], *, is_on: bool, dims: ModelDims, context: ContextGroup
    ) -> None:
        """Let the routers of `layers`, each with its number in the model, replay.

        The ranks of `context` divide the positions of their rows.
        """
        self._context = context
        self._shape = dims.shape
        self._is_on = is_on
        self._current_MLK: Tensor | None = None
        if not is_on:
            return
        if dims.shape.family not in REPLAY_FAMILIES:
            raise TrainError(
                f'train.router_replay = true is not known to be right for a model of type "{dims.shape.family}": only '
                f"for {', '.join(sorted(REPLAY_FAMILIES))}; remove it"
            )
        numbers = [number for number in range(dims.shape.num_layers) if dims.has_experts(number)]
        for number, layer in layers:
            if dims.has_experts(number):
                layer.mlp.router.router_replay = _LayerChoice(self, numbers.index(number))

    @contextmanager
    def use(self, micro: MicroBatch) -> Iterator[None]:
        """Replay the choices of a micro-batch in its forward pass."""
        with self._use(self._take(micro) if self._is_on else None):
            yield

    def keep_pass(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of a layer that is recomputed, for the first time and for the second."""
        return nullcontext(), self._use(self._current_MLK)

    def choose(self, layer: int, own_MK: Tensor) -> Tensor:
        """Return the experts of the tokens in a layer, of which the router would choose `own_MK`."""
        return own_MK if self._current_MLK is None else choose_experts(self._current_MLK[:, layer], own_MK)

    def _take(self, micro: MicroBatch) -> Tensor | None:
        if micro.experts_BTLK is None:
            return None
        shape = self._shape
        check_choices(
            micro.experts_BTLK,
            num_layers=shape.num_expert_layers,
            num_chosen=shape.experts_per_token,
            num_experts=shape.num_experts,
        )
        own_BSLK = take_choices(micro.experts_BTLK, micro, context=self._context)
        return own_BSLK.transpose(0, 1).flatten(0, 1)  # Megatron's order: positions first

    @contextmanager
    def _use(self, current_MLK: Tensor | None) -> Iterator[None]:
        previous, self._current_MLK = self._current_MLK, current_MLK
        try:
            yield
        finally:
            self._current_MLK = previous


class _LayerChoice(NamedTuple):
    """The object that a router asks, as megatron-core's RouterReplay."""

    replay: StageReplay
    layer: int
    """The number of its layer among those with experts."""

    def get_replay_topk(
        self,
        scores_ME: Tensor,
        num_chosen: int,
        num_groups: int | None,
        num_chosen_groups: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of the chosen experts, and their numbers."""
        _, own_MK = choose(scores_ME, num_chosen, num_groups=num_groups, group_topk=num_chosen_groups)
        chosen_MK = self.replay.choose(self.layer, own_MK)
        return scores_ME.gather(1, chosen_MK), chosen_MK
