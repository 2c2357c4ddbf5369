"""Other plans for the same recipe and site, with what they cost. Pure.

suggest_plans     up to MAX_SUGGESTIONS of them, the cheapest first
show_suggestions  the lines of text for them
PlanSuggestion    one of them: the settings that lead to it, and its size
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_args

import msgspec

from hpcrl.config.recipe import Recipe
from hpcrl.config.site import Site
from hpcrl.errors import PlanError
from hpcrl.plan.layout import JobLayout
from hpcrl.plan.plan import Plan, make_plan

MAX_SUGGESTIONS = 3
S = TypeVar("S", bound=msgspec.Struct)


class PlanSuggestion(msgspec.Struct, frozen=True, kw_only=True):
    """Another plan: the settings (`-s`) that lead to it, and its size beside the one that was made."""

    settings: list[str]
    """The values that are changed, as `key=value`."""
    layout: JobLayout
    nodes: int
    gpus: int
    """The GPUs that are charged, on all nodes."""
    node_hours: float
    """The most that one job may use: its whole walltime."""
    gpu_hours: float
    num_engines: int
    """Workers of prefill and decode together; an engine over several nodes counts once for each."""
    num_ranks: int
    """Ranks of the trainer."""

    @property
    def size(self) -> tuple[object, ...]:
        """The sizes that make two plans the same for a user."""
        return self.layout, self.nodes, self.gpus, self.num_engines, self.num_ranks

    def describe(self) -> str:
        """Return the suggestion in a line."""
        each = (
            ("node", self.nodes),
            ("GPU", self.gpus),
            ("engine worker", self.num_engines),
            ("rank", self.num_ranks),
        )
        sizes = ", ".join(f"{num} {noun}{'s' * (num != 1)}" for noun, num in each)
        words = " ".join(f"-s {setting}" for setting in self.settings)
        return f"{words}: {self.layout}, {sizes}, {self.node_hours:g} node-hours and {self.gpu_hours:g} GPU-hours a job"


def suggest_plans(recipe: Recipe, site: Site, plan: Plan) -> list[PlanSuggestion]:
    """Return other plans that the site can hold, of other sizes than `plan`: cheaper ones, and the next larger one."""
    made = _measure_plan(plan, [])
    found: dict[tuple[object, ...], PlanSuggestion] = {}
    for changes in _list_changes(recipe, plan):
        try:
            other = make_plan(_change_struct(recipe, changes), site)
        except PlanError:
            continue
        suggestion = _measure_plan(other, [f"{key}={value}" for key, value in changes.items()])
        if suggestion.size != made.size:
            found.setdefault(suggestion.size, suggestion)
    ranked = sorted(found.values(), key=lambda one: one.node_hours)
    cheaper = [one for one in ranked if one.node_hours <= made.node_hours]
    larger = [one for one in ranked if one.node_hours > made.node_hours]
    num_larger = max(MAX_SUGGESTIONS - len(cheaper), 1)
    return [*cheaper[: MAX_SUGGESTIONS - min(num_larger, len(larger))], *larger[:num_larger]]


def show_suggestions(suggestions: list[PlanSuggestion], plan: Plan) -> list[str]:
    """Return the lines for the plan that was made, and for others."""
    cost = plan.cost
    made = f"planned   {plan.layout}, {cost.node_hours:g} node-hours and {cost.gpu_hours:g} GPU-hours a job"
    if not suggestions:
        return [made, f"site {plan.site} can hold it in none of the other sizes that were tried"]
    return [made, *(f"or        {suggestion.describe()}" for suggestion in suggestions)]


def _list_changes(recipe: Recipe, plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield settings that change the size of a job: another layout, one pool or two, other numbers of workers."""
    for layout in get_args(JobLayout):
        if layout not in ("local", plan.layout):
            yield {"job.layout": layout}
    if not plan.has_role("decode"):
        return
    yield {"resources.prefill.num_workers": 0 if plan.has_role("prefill") else 1}
    num_decode = plan.role("decode").num_workers // plan.role("decode").nodes_per_engine
    if num_decode > 1:
        yield {"resources.decode.num_workers": num_decode // 2}
    yield {"resources.decode.num_workers": num_decode * 2}
    yield {"resources.train.num_workers": recipe.resources.train.num_workers * 2}


def _change_struct(struct: S, changes: Mapping[str, Any]) -> S:
    """Return a struct with fields replaced, whose names are paths: `resources.decode.num_workers`."""
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        struct = msgspec.structs.replace(
            struct, **{name: _change_struct(getattr(struct, name), {rest: value}) if rest else value}
        )
    return struct


def _measure_plan(plan: Plan, settings: list[str]) -> PlanSuggestion:
    return PlanSuggestion(
        settings=settings,
        layout=plan.layout,
        nodes=sum(component.nodes for component in plan.components),
        gpus=sum(component.nodes * component.gpus_per_node for component in plan.components),
        node_hours=plan.cost.node_hours,
        gpu_hours=plan.cost.gpu_hours,
        num_engines=sum(role.num_workers for role in plan.roles if role.role in ("prefill", "decode")),
        num_ranks=plan.role("train").num_workers,
    )
