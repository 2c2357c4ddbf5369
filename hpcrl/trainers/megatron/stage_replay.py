"""Router replay in the layers of a rank's stage: hpcrl/trainers/expert_replay.py has what it is.

Megatron's routers ask an object of theirs for the experts of a token, where there is one, and weigh these experts by
their own scores. The choices of a micro-batch are kept for each pass (kept_pass.py).

Legend: B rows of a micro-batch, T positions, S those of this rank, M all their tokens, L layers with experts of the
model, E experts, K experts of a token
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from hpcrl.learn.batch import MicroBatch
from hpcrl.trainers.context_group import ContextGroup
from hpcrl.trainers.expert_replay import check_choices, check_replay_family, choose_experts, take_choices
from hpcrl.trainers.megatron.kept_pass import KeptPass
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
        self.kept = KeptPass[Tensor]()
        """The choices of the current pass, as MLK."""
        if not is_on:
            return
        check_replay_family(dims.shape.family)
        numbers = [number for number in range(dims.shape.num_layers) if dims.has_experts(number)]
        for number, layer in layers:
            if dims.has_experts(number):
                layer.mlp.router.router_replay = _LayerChoice(self, numbers.index(number))

    @contextmanager
    def use(self, micro: MicroBatch) -> Iterator[None]:
        """Replay the choices of a micro-batch in its forward pass."""
        with self.kept.use(self._take(micro) if self._is_on else None):
            yield

    def choose(self, layer: int, own_MK: Tensor) -> Tensor:
        """Return the experts of the tokens in a layer, of which the router would choose `own_MK`."""
        given_MLK = self.kept.current
        return own_MK if given_MLK is None else choose_experts(given_MLK[:, layer], own_MK)

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
