"""Router replay: routers send tokens to the experts that the engine's model chose for them.

Engine and trainer compute the same scores of experts, up to rounding and, in a policy that moved since, up to a few
updates. Where two scores are close, that decides between different experts, and the log-probs differ by far more than
rounding (Rollout Routing Replay, arXiv 2510.11370). With the engine's choice in place of the trainer's own, they agree.
The weights of the chosen experts are still the trainer's own scores, normalised as the model does, so that the gradient
reaches the router. A token without a choice has the trainer's.

    ExpertReplay       the routers of a model of transformers, with the choices of a micro-batch
    compute_weights    the weights of chosen experts, as a router of transformers computes them
    check_replay_family   whether this is known to be right for a model
    check_choices, take_choices, choose_experts   the choices of a micro-batch, for any trainer

Megatron's routers are in megatron/stage_replay.py.

Legend: B rows, T positions, S those of this rank, M tokens of this rank, L layers with experts, E experts, K experts of
a token
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpcrl.errors import TrainError
from hpcrl.hardware.architecture import REPLAY_FAMILIES
from hpcrl.learn.batch import MicroBatch, pad_experts
from hpcrl.models.expert_routers import find_routers
from hpcrl.trainers.context_group import WHOLE_CONTEXT, ContextGroup


class ExpertReplay:
    """The choices that a model's routers replay, while a micro-batch is in use."""

    def __init__(self, module: Any, *, is_on: bool, context: ContextGroup = WHOLE_CONTEXT) -> None:
        """Let all routers of `module` replay; the ranks of `context` divide the positions of their rows."""
        self._context = context
        self._experts_MLK: Tensor | None = None
        self._routers: list[Any] = []
        if not is_on:
            return
        self._routers, family = find_routers(module), module.config.model_type
        check_replay_family(family, has_routers=bool(self._routers))
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(partial(self._replace, layer))

    @contextmanager
    def use(self, micro: MicroBatch | None) -> Iterator[None]:
        """Replay the choices of a micro-batch, if any, in its forward pass and in that which recomputes its layers."""
        self._experts_MLK = self._take(micro) if self._routers and micro is not None else None
        try:
            yield
        finally:
            self._experts_MLK = None

    def _take(self, micro: MicroBatch) -> Tensor | None:
        """Return the choices for this rank's tokens on its device; -1 stands for none."""
        if (experts_BTLK := micro.experts_BTLK) is None:
            return None
        first = self._routers[0]
        check_choices(
            experts_BTLK, num_layers=len(self._routers), num_chosen=first.top_k, num_experts=first.num_experts
        )
        return take_choices(experts_BTLK, micro, context=self._context).flatten(0, 1)

    def _replace(self, layer: int, router: Any, _inputs: Any, outputs: Any) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return what a router would if it had chosen these experts."""
        if self._experts_MLK is None:
            return None
        logits_ME, weights_MK, own_MK = outputs
        chosen_MK = choose_experts(self._experts_MLK[:, layer], own_MK)
        return logits_ME, compute_weights(router, logits_ME, chosen_MK).to(weights_MK.dtype), chosen_MK


def check_replay_family(family: str, *, has_routers: bool = True) -> None:
    """Raise TrainError for a model in whose routers another choice is not known to be replayed right."""
    if family not in REPLAY_FAMILIES or not has_routers:
        raise TrainError(
            f'train.router_replay = true is not known to be right for a model of type "{family}": only for '
            f"{', '.join(sorted(REPLAY_FAMILIES))}; remove it"
        )


def check_choices(experts_BTLK: Tensor, *, num_layers: int, num_chosen: int, num_experts: int) -> None:
    """Raise TrainError if these cannot be choices of a model with this number of layers with experts."""
    seen = tuple(experts_BTLK.shape[2:])
    known = experts_BTLK[experts_BTLK != 0xFF] if experts_BTLK.dtype == torch.uint8 else experts_BTLK
    highest = int(known.max()) if known.numel() else 0
    if seen != (num_layers, num_chosen) or highest >= num_experts:
        raise TrainError(
            f"the engine reported {seen[1]} experts of a token in {seen[0]} layers, with numbers up to {highest}; the "
            f"model has {num_chosen} of {num_experts} in {num_layers} layers: engine and trainer must use the same "
            "model directory"
        )
    none = 0xFF if experts_BTLK.dtype == torch.uint8 else -1
    for one_BTL, other_BTL in itertools.combinations(experts_BTLK.unbind(-1), 2):
        if bool(((one_BTL == other_BTL) & (one_BTL != none)).any()):
            raise TrainError("the engine reported an expert twice for a token: its report cannot be a router's choice")


def take_choices(experts_BTLK: Tensor, micro: MicroBatch, *, context: ContextGroup) -> Tensor:
    """Return the choices for this rank's positions of a micro-batch, on its device; -1 stands for none."""
    padding = -micro.inputs_BT.shape[1] % context.size
    own_BSLK = context.take(pad_experts(experts_BTLK, (0, padding))).to(micro.inputs_BT.device)
    return own_BSLK.short().masked_fill(own_BSLK == 0xFF, -1) if own_BSLK.dtype == torch.uint8 else own_BSLK


def choose_experts(given_MK: Tensor, own_MK: Tensor) -> Tensor:
    """Return the experts that were given, or a router's own where there are none."""
    given_MK = given_MK.to(own_MK.dtype)
    return given_MK.where(given_MK >= 0, own_MK)


def compute_weights(router: Any, logits_ME: Tensor, chosen_MK: Tensor) -> Tensor:
    """Compute the weights of chosen experts from a router's logits; sigmoids are those of routers with a correction."""
    has_sigmoids = hasattr(router, "e_score_correction_bias")
    scores_ME = logits_ME.float().sigmoid() if has_sigmoids else logits_ME.softmax(-1, dtype=torch.float32)
    weights_MK = scores_ME.gather(1, chosen_MK)
    if getattr(router, "norm_topk_prob", True):  # Mixtral's routers always do
        weights_MK = weights_MK / (weights_MK.sum(-1, keepdim=True) + (1e-20 if has_sigmoids else 0.0))
    return weights_MK * getattr(router, "routed_scaling_factor", 1.0)
