"""A recipe with the workers of another number of GPUs, planned as any other: `hpcrl simulate --gpus N`.

plan_for_gpus   plan it with more or fewer workers of each role, without limits on nodes -> ScaledRequest
"""

from collections.abc import Iterator
from typing import NamedTuple

from hpcrl.campaign.request import CampaignRequest
from hpcrl.config.recipe import Recipe, RoleName, name_role_resources
from hpcrl.config.site import Site
from hpcrl.errors import ConfigError, PlanError
from hpcrl.plan.plan import make_plan
from hpcrl.plan.suggestions import change_fields
from hpcrl.simulation.sizes import find_sizes

UNLIMITED_NODES = 1_000_000
MAX_SHIFT = 0.1
"""Shares that differ by more than this are named."""


class ScaledRequest(NamedTuple):
    """A recipe that is planned for another number of GPUs."""

    request: CampaignRequest
    notes: list[str]
    """Differences from what was asked for."""


def plan_for_gpus(recipe: Recipe, site: Site, num_gpus: int) -> ScaledRequest:
    """Plan a recipe so that its nodes have at most `num_gpus` GPUs, divided among the roles as in its own plan.

    The plan is checked as any other, but for the number of nodes that a partition has. Raise PlanError where it is
    refused, ConfigError where the GPUs are too few for one worker of each role.
    """
    if site.scheduler == "local":
        raise ConfigError(f"--gpus {num_gpus}: site {site.name} is one machine: name the site of a cluster")
    base = _plan_own_size(recipe, site, num_gpus)
    scaled = _fill_nodes(*_find_largest(base, num_gpus), num_gpus)
    return ScaledRequest(scaled, _note_differences(base, scaled, num_gpus))


def _find_largest(base: CampaignRequest, num_gpus: int) -> tuple[CampaignRequest, dict[RoleName, int]]:
    """Plan the same shares of the GPUs; return the largest plan that they hold, with its numbers of workers."""
    budget, num_reserved = num_gpus, 0
    while True:
        numbers = _divide_gpus(base, budget, num_gpus=num_gpus, num_reserved=num_reserved)
        try:
            scaled, numbers = _plan_about(base, numbers)
        except PlanError as error:
            more = f"whole nodes would have {num_reserved} GPUs; with fewer workers, " if num_reserved else ""
            shortage, _, advice = str(error).partition(": set resources.train.num_workers")
            instead = ": give more GPUs, or choose GPUs with more memory" if advice else ""
            raise PlanError(f"--gpus {num_gpus}: {more}{shortage}{instead}") from None
        num_reserved = find_sizes(scaled).num_charged_gpus
        if num_reserved <= num_gpus:
            return scaled, numbers
        budget = min(budget - 1, budget * num_gpus // num_reserved)


def _plan_about(base: CampaignRequest, numbers: dict[RoleName, int]) -> tuple[CampaignRequest, dict[RoleName, int]]:
    """Plan these numbers of workers; where that is refused, a few ranks less, or fewer engines and more ranks."""
    refusal: PlanError | None = None
    for tried in _list_divisions(base, numbers):
        try:
            return _plan_with(base.recipe, base.site, tried), tried
        except PlanError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _list_divisions(base: CampaignRequest, numbers: dict[RoleName, int]) -> Iterator[dict[RoleName, int]]:
    """Yield numbers of workers with the same GPUs: those given, then with fewer and fewer engines.

    Each comes with the ranks that have the rest, and with multiples of 2, 4 and 8: groups of ranks may divide rows.
    """
    gpus_each = {role: size.gpus_each for role, size in find_sizes(base).roles.items() if role != "train"}
    step, numbers = _count_replica_ranks(base), dict(numbers)
    while True:
        ranks = (numbers["train"] // (step * factor) * step * factor for factor in (1, 2, 4, 8))
        yield from (numbers | {"train": num} for num in dict.fromkeys(ranks) if num)
        shrinking = [role for role in gpus_each if numbers[role] > 1]
        if not shrinking:
            return
        role = max(shrinking, key=lambda role: numbers[role] * gpus_each[role])
        numbers[role] -= 1
        numbers["train"] = (numbers["train"] + gpus_each[role]) // step * step


def _note_differences(base: CampaignRequest, scaled: CampaignRequest, num_gpus: int) -> list[str]:
    """Return a line for GPUs that are left, and one for shares that are others than those of the recipe's plan."""
    notes, used = [], find_sizes(scaled).num_charged_gpus
    if used < num_gpus:
        notes.append(f"{used} of {num_gpus} GPUs are reserved: one more worker of a role takes more, or is refused")
    share, planned = (_find_train_share(request) for request in (scaled, base))
    if abs(share - planned) > MAX_SHIFT:
        notes.append(f"training has {share:.0%} of the workers' GPUs; in the plan of the recipe it has {planned:.0%}")
    return notes


def _find_train_share(request: CampaignRequest) -> float:
    sizes = find_sizes(request)
    return sizes.train.num_gpus / sizes.num_gpus


def _plan_own_size(recipe: Recipe, site: Site, num_gpus: int) -> CampaignRequest:
    """Plan the recipe as it stands; where that is refused, with the fewest times the ranks with which it is not."""
    try:
        return CampaignRequest(recipe=recipe, site=site, plan=make_plan(recipe, site))
    except PlanError as error:
        refusal = error
    train = recipe.resources.train
    factor = 1
    while factor * train.num_workers * max(1, train.gpus_per_worker) <= num_gpus:
        try:
            return _plan_with(recipe, site, {"train": factor * train.num_workers})
        except PlanError:
            factor *= 2
    raise refusal


def _plan_with(recipe: Recipe, site: Site, numbers: dict[RoleName, int]) -> CampaignRequest:
    """Plan a recipe with these numbers of workers, on any number of nodes."""
    changes = {f"{name_role_resources(role)}.num_workers": number for role, number in numbers.items()}
    changed = change_fields(recipe, changes)
    sizes = {f"partitions.{label}.max_nodes": UNLIMITED_NODES for label in site.partitions}
    return CampaignRequest(recipe=changed, site=site, plan=make_plan(changed, change_fields(site, sizes)))


def _fill_nodes(request: CampaignRequest, numbers: dict[RoleName, int], num_gpus: int) -> CampaignRequest:
    """Add workers of one role after the other while all nodes together have at most `num_gpus` GPUs."""
    growing = list(find_sizes(request).roles)
    while growing:
        for role in list(growing):
            more = numbers | {role: numbers[role] + (_count_replica_ranks(request) if role == "train" else 1)}
            try:
                larger = _plan_with(request.recipe, request.site, more)
            except PlanError:
                growing.remove(role)
                continue
            if find_sizes(larger).num_charged_gpus > num_gpus:
                growing.remove(role)
                continue
            request, numbers = larger, more
    return request


def _divide_gpus(base: CampaignRequest, budget: int, *, num_gpus: int, num_reserved: int) -> dict[RoleName, int]:
    """Return the numbers of workers that have `budget` GPUs together; training has what engines leave of them."""
    plan = base.plan
    roles = [role for role in plan.roles if role.role != "reward"]
    planned = {role.role: role.num_whole for role in roles}
    gpus_each = {role: plan.role(role).gpus_per_engine for role in plan.judge_roles}
    gpus_each |= {role: size.gpus_each for role, size in find_sizes(base).roles.items()}
    factor = budget / sum(planned[role] * num for role, num in gpus_each.items())
    num_ranks = _count_replica_ranks(base)
    gpus_each["train"] *= num_ranks
    if budget < (least := sum(gpus_each.values())):
        each = ", ".join(f"{num} for {role}" for role, num in gpus_each.items())
        nodes = f", on nodes with {num_reserved} together" if num_reserved else ""
        raise ConfigError(f"--gpus {num_gpus}: one worker of each role needs {least} GPUs ({each}){nodes}: give more")
    numbers = {role: max(1, round(num * factor)) for role, num in planned.items()}
    rollout = base.recipe.rollout
    numbers["env"] = min(numbers["env"], max(1, rollout.max_running // rollout.episodes_per_group))
    engines = [role for role, num in gpus_each.items() if role != "train" and num]
    while (left := budget - sum(numbers[role] * gpus_each[role] for role in engines)) < gpus_each["train"]:
        numbers[max(engines, key=lambda role: (numbers[role] > 1, numbers[role] * gpus_each[role]))] -= 1
    return numbers | {"train": left // gpus_each["train"] * num_ranks}


def _count_replica_ranks(request: CampaignRequest) -> int:
    """Return the ranks that hold one copy of the model together; each has one GPU."""
    return request.plan.train_degrees.num_divided
