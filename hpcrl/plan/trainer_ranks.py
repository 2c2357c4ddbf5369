"""The division of a model over the ranks of the trainer, where the recipe leaves it open. Pure.

    list_trainer_settings   the settings to try, the first that fits being the choice
    explain_choice          what was chosen, and why

Trainer "torch" has the whole model on each rank, then shards of it, then shards and ranks that divide the positions of
rows. Trainer "megatron" has as few ranks for a copy of the model as it fits on, and then as few stages, which wait for
one another.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from hpcrl.config.recipe import Recipe, TrainConfig
from hpcrl.config.site import Site
from hpcrl.errors import PlanError
from hpcrl.hardware.architecture import find_parallel_conflict
from hpcrl.hardware.degrees import DEGREES, ParallelDegrees
from hpcrl.plan.demand import find_longest_row
from hpcrl.plan.trainer_checks import find_share_conflict
from hpcrl.plan.trainer_memory import (
    MAX_TENSOR_RANKS,
    list_context_sizes,
    list_recipe_divisions,
    may_fit,
    may_hold_state,
)


def list_trainer_settings(recipe: Recipe, site: Site) -> Iterator[TrainConfig]:
    """Yield the settings to try, one by one, since the first mostly fits; PlanError if a step is too small for all."""
    listed = _list_divided(recipe, site) if recipe.train.trainer == "megatron" else _list_sharded(recipe)
    conflicts = [find_share_conflict(replace(recipe, train=train)) for train in listed]
    if (conflict := conflicts[-1]) is not None and all(conflicts):
        raise PlanError(conflict)
    found = [train for train, conflict in zip(listed, conflicts, strict=True) if conflict is None]
    checks = [may_fit] if recipe.model.config else [may_fit, may_hold_state]  # the tokens' need may be a guess
    for check in checks:
        has_any = False
        for train in found:
            if check(replace(recipe, train=train), site):
                has_any = True
                yield train
        if has_any:
            return
    yield from [train for train in found if train.degrees == recipe.train.degrees] or found[:1]


def explain_choice(recipe: Recipe, chosen: TrainConfig) -> list[str]:
    """Explain what was chosen in place of the whole model on every rank."""
    train, found = recipe.train, []
    if train.sharding == "auto" and chosen.sharding == "full" and not train.offload:
        found.append('train.sharding = "full": the whole model does not fit on each rank')
    asked = train.degrees.settings
    shown = [f"train.{name} = {num}" for name, num in chosen.degrees.settings.items() if num != asked[name]]
    if not shown:
        return found
    what = "the trainer"
    if train.trainer == "torch":
        least = 1 if train.tokens_per_micro_batch == "auto" else train.tokens_per_micro_batch
        what = "the longest trajectory" if find_longest_row(recipe) >= least else "a micro-batch"
    reason = f"{what} does not fit on fewer ranks"
    if find_share_conflict(replace(recipe, train=chosen.with_degrees(train.degrees))) is not None:
        reason += ", or a step has too few trajectories for more shares"
    return [*found, f"{' and '.join(shown)}: {reason}"]


def _list_sharded(recipe: Recipe) -> list[TrainConfig]:
    """List the settings of trainer "torch"."""
    train, num_ranks = recipe.train, recipe.resources.train.num_workers
    found = [train]
    if train.sharding == "auto" and num_ranks > 1:
        found = [replace(train, sharding="none")] * (not train.offload) + [replace(train, sharding="full")]
    return [*found, *(replace(found[-1], context_parallel=size) for size in list_context_sizes(recipe))]


def _list_divided(recipe: Recipe, site: Site) -> list[TrainConfig]:
    """List the settings of trainer "megatron"; the ranks that share a layer are on one node."""
    train, num_ranks, shape = recipe.train, recipe.resources.train.num_workers, recipe.model.architecture
    if shape is None:
        return [train]
    fixed = [name for name in DEGREES if getattr(train, f"{name}_parallel") != "auto"]
    most = max(each.gpus_per_node for each in site.partitions.values()) or MAX_TENSOR_RANKS
    tried = list_recipe_divisions(recipe, shape, fixed=fixed)
    ordered = sorted(
        (
            each
            for each in tried
            if num_ranks % each.num_divided == 0 and each.tensor <= max(most, train.degrees.tensor)
        ),
        key=_rank_division,
    )
    if not ordered and recipe.model.config:
        conflict = find_parallel_conflict(shape, train.degrees, num_chunks=train.pipeline_chunks)
        if conflict is not None:
            raise PlanError(conflict)
    return [train.with_degrees(each) for each in ordered] or [train]


def _rank_division(degrees: ParallelDegrees) -> tuple[int, ...]:
    return degrees.num_together, degrees.pipeline, degrees.tensor, degrees.expert
