"""How many workers prefill and decode have where the recipe does not say. Pure.

    sized     the recipe with both numbers, and why they are what they are
    Turn      what a turn of the recipe's domains is like

Both follow from one signal, the tokens that can be decoded in a second, as HeteroScale sizes its pools: decode gets
as many workers as hold all running episodes, and prefill as many as compute the prompts of the turns that those say.
"""

from dataclasses import dataclass
from math import ceil

import msgspec

from hpcrl.cost import ModelShape, Pace, pace, usual_shape
from hpcrl.hardware import GPUS, Gpu
from hpcrl.recipe import Recipe, RoleName


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a turn is like, on average over the domains by their weights."""

    num_new: float
    """Tokens that the prompt has more than the conversation before it."""
    num_reply: float
    num_context: float
    """Tokens of the conversation, on average over its turns."""


def sized(recipe: Recipe, *, gpus: dict[RoleName, str | None]) -> tuple[Recipe, list[str]]:
    """Fill in what the recipe leaves at 0; `gpus` is the kind that each role gets. What it says itself stays."""
    asked = recipe.resources
    if asked.prefill.num_workers and asked.decode.num_workers:
        return recipe, []
    paces = {role: _pace(recipe, role, gpus) for role in ("prefill", "decode")}
    prefill, decode = paces["prefill"], paces["decode"]
    if prefill is None or decode is None:
        return _with(recipe, prefill=asked.prefill.num_workers or 1, decode=asked.decode.num_workers or 1), []
    turn, running = usual_turn(recipe), recipe.rollout.max_running
    most = max(1, min(recipe.engine.max_batch, int(decode.kv_tokens / turn.num_context)))
    num_decode = asked.decode.num_workers or ceil(running / most)
    batch = min(most, running / num_decode)
    tokens_per_s = num_decode * batch / decode.decode_s(batch, num_kv=batch * turn.num_context)
    busy = tokens_per_s / turn.num_reply * prefill.prefill_s(turn.num_new, num_known=turn.num_context)
    num_prefill = asked.prefill.num_workers or ceil(busy)
    told = []
    if not asked.decode.num_workers:
        told.append(
            f"decode has {num_decode} workers: each holds {most} of the {running} episodes, "
            f"of {turn.num_context:.0f} tokens on average"
        )
    if not asked.prefill.num_workers:
        told.append(
            f"prefill has {num_prefill} workers: {num_decode} decode workers say {tokens_per_s:.0f} tokens/s, and the "
            f"prompts of those turns ({turn.num_new:.0f} new tokens each) keep {busy:.2f} of them busy"
        )
    return _with(recipe, prefill=num_prefill, decode=num_decode), told


def usual_turn(recipe: Recipe) -> Turn:
    """The mean over the domains, each turn counted as often as it is played."""
    weights, news, replies, contexts = 0.0, 0.0, 0.0, 0.0
    for domain in recipe.domains.values():
        weight = domain.weight * domain.max_turns
        reply = domain.usual_reply_tokens or domain.max_new_tokens or recipe.rollout.max_new_tokens
        weights += weight
        news += weight * domain.usual_prompt_tokens
        replies += weight * reply
        contexts += weight * (domain.usual_prompt_tokens + reply) * (domain.max_turns + 1) / 2
    return Turn(num_new=news / weights, num_reply=replies / weights, num_context=contexts / weights)


def _pace(recipe: Recipe, role: RoleName, gpus: dict[RoleName, str | None]) -> Pace | None:
    """None where the model's size or the hardware is not known, or the model does not fit, which is refused later."""
    gpu: Gpu | None = GPUS.get(gpus.get(role) or "")
    num_params = recipe.model.num_params
    if gpu is None or num_params is None:
        return None
    shape: ModelShape = usual_shape(num_params)
    found = pace(gpu, shape=shape, tp=max(1, getattr(recipe.resources, role).gpus_per_worker))
    return found if found.kv_tokens else None


def _with(recipe: Recipe, *, prefill: int, decode: int) -> Recipe:
    asked, replace = recipe.resources, msgspec.structs.replace
    resources = replace(
        asked,
        prefill=replace(asked.prefill, num_workers=prefill),
        decode=replace(asked.decode, num_workers=decode),
    )
    return replace(recipe, resources=resources)
