"""Other plans for the same recipe and site, with what they cost. Pure.

suggest_plans     up to MAX_SUGGESTIONS of them by their size, the cheapest first
choose_frontier   up to MAX_SUGGESTIONS of them by time and cost of the whole campaign, where these are known
list_plans        all of them, with the plan that was made
add_settings      a plan that was made from another, with the settings of both
change_fields     a recipe, or a site, with other values
show_suggestions  the lines of text for them
suggest_fitting      those for a recipe that is refused as it stands
advise_repair        the setting that helps where no plan can be made
PlanSuggestion    one of them: the settings that lead to it, and its size
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast, get_args

import msgspec

from hpcrl.config.recipe import Recipe
from hpcrl.config.site import Site
from hpcrl.errors import PlanError
from hpcrl.plan.layout import JobLayout
from hpcrl.plan.plan import Plan, make_plan

MAX_SUGGESTIONS = 3
MAX_TRIED_RANKS = 5
"""The most smaller numbers of the trainer's ranks that are tried for a refused recipe."""
MAX_TOLERANCE = 0.15
"""A plan that takes more than this beyond another is not as good, however uncertain that is."""
ADAPTER_RANK = 16
"""The rank of the adapters that are tried where the whole model cannot be trained."""
NUM_RANKS = "resources.train.num_workers"
T = TypeVar("T", bound=msgspec.Struct | dict[str, Any])


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
    """Workers of prefill and decode together; an engine over several nodes is one."""
    num_ranks: int
    """Ranks of the trainer."""
    campaign_hours: float | None = None
    """The simulated time until the last step, without waiting in the queue; None if nothing was simulated."""
    campaign_node_hours: float | None = None
    campaign_gpu_hours: float | None = None
    campaign_error: float | None = None
    """The standard error of these three, as a share: they are those of some steps, which differ."""
    campaign_jobs: int | None = None
    missing_jobs: int = 0
    """The jobs among them that `job.num_jobs` does not have."""

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
        return f"{words}: {self.layout}, {sizes}, {self.describe_cost()}"

    def describe_cost(self) -> str:
        """Return what a job may cost at most, and what the whole campaign takes, if that was simulated."""
        each_job = f"{self.node_hours:g} node-hours and {self.gpu_hours:g} GPU-hours a job"
        if self.campaign_hours is None:
            return each_job
        whole = f"{self.campaign_node_hours:.3g} node-hours and {self.campaign_gpu_hours:.3g} GPU-hours in all"
        hours = self.campaign_hours
        time = f"{hours:.3g} h" if hours >= 2 else f"{hours * 60:.3g} min"
        error = f" ± {self.campaign_error:.0%}" if self.campaign_error else ""
        jobs = f" in {self.campaign_jobs} jobs" if self.campaign_jobs and self.campaign_jobs > 1 else ""
        missing = f" ({self.missing_jobs} more than job.num_jobs)" if self.missing_jobs else ""
        return f"{each_job}; the last step after {time}{error}{jobs}{missing}, {whole}"

    def list_costs(self) -> tuple[float, float, float]:
        """Return the time of the campaign, and what it uses of nodes and GPUs."""
        return self.campaign_hours or 0.0, self.campaign_node_hours or 0.0, self.campaign_gpu_hours or 0.0

    def is_as_good_as(self, other: "PlanSuggestion") -> bool:
        """Return whether a campaign under this plan is as fast and as cheap as under another, as far as is known."""
        pairs = zip(self.list_costs()[:2], other.list_costs()[:2], strict=True)
        tolerance = min(self.find_error(other), MAX_TOLERANCE)
        return all(mine <= others * (1 + tolerance) for mine, others in pairs)

    def find_error(self, other: "PlanSuggestion") -> float:
        """Return the share by which two simulated times differ by chance."""
        return math.hypot(self.campaign_error or 0.0, other.campaign_error or 0.0)


class PlannedRecipe(NamedTuple):
    """A recipe with its plan, as a suggestion."""

    suggestion: PlanSuggestion
    recipe: Recipe
    plan: Plan


def suggest_plans(recipe: Recipe, site: Site, plan: Plan) -> tuple[PlanSuggestion, list[PlanSuggestion]]:
    """Return the plan that was made, and others that the site can hold: cheaper ones, and the next larger one."""
    made, *others = (one.suggestion for one in list_plans(recipe, site, plan))
    ranked = sorted(others, key=lambda one: one.node_hours)
    cheaper = [one for one in ranked if one.node_hours <= made.node_hours]
    larger = [one for one in ranked if one.node_hours > made.node_hours]
    num_larger = max(MAX_SUGGESTIONS - len(cheaper), 1)
    return made, [*cheaper[: MAX_SUGGESTIONS - min(num_larger, len(larger))], *larger[:num_larger]]


def choose_frontier(made: PlanSuggestion, others: Sequence[PlanSuggestion]) -> list[PlanSuggestion]:
    """Return other plans beside which none is both as fast and as cheap, the fastest first.

    If there are too many, the fastest and the cheapest stay, with one between them: faster and cheaper than the plan
    that was made, if any is.
    """
    best: list[PlanSuggestion] = []
    for one in sorted(others, key=PlanSuggestion.list_costs):
        if not any(better.is_as_good_as(one) for better in (made, *best)):
            best.append(one)
    if len(best) <= MAX_SUGGESTIONS:
        return best
    between = [one for one in best[1:-1] if one.is_as_good_as(made)] or best[1:-1]
    return [best[0], between[len(between) // 2], best[-1]]


def list_plans(recipe: Recipe, site: Site, plan: Plan) -> list[PlannedRecipe]:
    """Return the plan that was made, then others of other sizes that the site can hold."""
    made = _measure_plan(plan, [])
    found = {made.size: PlannedRecipe(made, recipe, plan)}
    for changes in _list_changes(recipe, plan):
        changed = change_fields(recipe, changes)
        try:
            other = make_plan(changed, site)
        except PlanError:
            continue
        if (other.layout == "colocated" and not other.is_on_one_node) or other.has_gpu_shifts != plan.has_gpu_shifts:
            continue  # the simulation times neither weights that go by files nor turns on shared GPUs
        suggestion = _measure_plan(other, _show_changes(changes))
        found.setdefault(suggestion.size, PlannedRecipe(suggestion, changed, other))
    return list(found.values())


def show_suggestions(suggestions: Sequence[PlanSuggestion], made: PlanSuggestion, *, site: str) -> list[str]:
    """Return the lines for the plan that was made, and for others."""
    line = f"planned   {made.layout}, {made.describe_cost()}"
    if not suggestions:
        why = "no other size that was tried, and that the site can hold, is faster or cheaper"
        return [line, why if made.campaign_hours is not None else f"site {site} can hold none of the other sizes"]
    return [line, *(f"or        {one.describe()}{_describe_savings(one, made)}" for one in suggestions)]


def _describe_savings(suggestion: PlanSuggestion, made: PlanSuggestion) -> str:
    """Return what a suggestion saves that is as fast and as cheap as the plan that was made; "" for any other."""
    if not suggestion.is_as_good_as(made):
        return ""
    pairs = zip(("time", "node-hours"), suggestion.list_costs(), made.list_costs(), strict=False)
    shares = [(what, 1 - mine / planned) for what, mine, planned in pairs if planned]
    saved = [f"{share:.0%} of the {what}" for what, share in shares if share >= max(0.005, suggestion.find_error(made))]
    return f": saves {' and '.join(saved)} of the plan above" if saved else ""


def _list_changes(recipe: Recipe, plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield settings that change the size of a job: another layout, one pool or two, other numbers of workers."""
    for layout in get_args(JobLayout):
        if layout not in ("local", "multi-job", plan.layout):  # of the same size as a heterogeneous job
            yield {"job.layout": layout}
    if not plan.has_role("decode"):
        return
    yield {"resources.prefill.num_workers": 0 if plan.has_role("prefill") else 1}
    num_decode = plan.role("decode").num_whole
    if num_decode > 1:
        yield {"resources.decode.num_workers": num_decode // 2}
    num_ranks = recipe.resources.train.num_workers
    if num_ranks > 1:
        yield {"resources.train.num_workers": num_ranks // 2}
    yield {"resources.decode.num_workers": num_decode * 2}
    yield {"resources.train.num_workers": num_ranks * 2}
    yield {"resources.decode.num_workers": num_decode * 2, "resources.train.num_workers": num_ranks * 2}


def change_fields(table: T, changes: Mapping[str, Any]) -> T:
    """Return a struct or a dictionary with fields replaced, whose names are paths: `resources.decode.num_workers`."""
    found: Any = table
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        if isinstance(found, dict):
            found = found | {name: change_fields(found[name], {rest: value}) if rest else value}
        else:
            changed = change_fields(getattr(found, name), {rest: value}) if rest else value
            found = msgspec.structs.replace(found, **{name: changed})
    return cast("T", found)


def _show_changes(changes: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in changes.items()]


def _measure_plan(plan: Plan, settings: list[str]) -> PlanSuggestion:
    return PlanSuggestion(
        settings=settings,
        layout=plan.layout,
        nodes=plan.num_nodes,
        gpus=plan.num_gpus,
        node_hours=plan.cost.node_hours,
        gpu_hours=plan.cost.gpu_hours,
        num_engines=sum(role.num_whole for role in plan.roles if role.role in ("prefill", "decode")),
        num_ranks=plan.role("train").num_workers,
    )


def suggest_fitting(recipe: Recipe, site: Site, *, refusal: str) -> list[PlanSuggestion]:
    """Return plans for a recipe that is refused as it stands, the most like it first.

    Raise PlanError with the refusal, and a further reason if there is one, if nothing that is tried fits.
    """
    refusals: dict[int, str] = {}
    found: list[PlannedRecipe] = []
    for changes in _list_repairs(recipe, site):
        try:
            found.append(_plan_changed(recipe, site, changes))
        except PlanError as error:
            if num_ranks := changes.get(NUM_RANKS):
                refusals[num_ranks] = str(error)
        if len(found) == MAX_SUGGESTIONS:
            break
    if not found:
        num_ranks, reason = _find_reason(refusals, site)
        _refuse_misfit(recipe, site, reason=reason or refusal)
        is_new = reason and not refusal.startswith(reason)
        detail = f": with -s {NUM_RANKS}={num_ranks}, {reason}" if is_new else ""
        raise PlanError(f"{refusal}. Nothing else that was tried fits{detail}")
    first = found[0]
    more = [*found[1:], *(add_settings(first, one) for one in list_plans(first.recipe, site, first.plan)[1:])]
    sizes = {one.suggestion.size: one.suggestion for one in reversed(more)}
    sizes.pop(first.suggestion.size, None)
    cheapest = sorted(sizes.values(), key=lambda one: one.node_hours)
    return [first.suggestion, *cheapest[: MAX_SUGGESTIONS - 1]]


def _list_repairs(recipe: Recipe, site: Site) -> list[dict[str, Any]]:
    """Return settings with which a refused recipe may fit: other numbers of ranks, one pool of engines, any layout."""
    resources, num_ranks = recipe.resources, recipe.resources.train.num_workers
    fewer: list[dict[str, Any]] = [{NUM_RANKS: number} for number in _list_fewer_ranks(recipe, site)]
    others: dict[str, tuple[Any, Any]] = {
        "job.layout": (recipe.job.layout, "auto"),
        "resources.decode.num_workers": (resources.decode.num_workers, "auto"),
        "resources.prefill.num_workers": (resources.prefill.num_workers, 0),
    }
    more = [{NUM_RANKS: num_ranks * factor} for factor in (2, 4)]
    changed = [{key: value} for key, (asked, value) in others.items() if asked != value]
    return [*fewer, *changed, *more, *_list_adapters(recipe)]


def _list_fewer_ranks(recipe: Recipe, site: Site) -> list[int]:
    """Return numbers of the trainer's ranks to try, the largest first: powers of two, and those that fill nodes."""
    asked = recipe.resources.train.num_workers
    powers = {2**exponent for exponent in range(asked.bit_length())}
    of_nodes = {partition.gpus_per_node for partition in site.partitions.values() if partition.gpus_per_node}
    full = {(asked - 1) // num_gpus * num_gpus for num_gpus in of_nodes}
    return sorted((number for number in powers | of_nodes | full if 0 < number < asked), reverse=True)[:MAX_TRIED_RANKS]


def _plan_changed(recipe: Recipe, site: Site, changes: Mapping[str, Any]) -> PlannedRecipe:
    changed = change_fields(recipe, changes)
    plan = make_plan(changed, site)
    return PlannedRecipe(_measure_plan(plan, _show_changes(changes)), changed, plan)


def add_settings(first: PlannedRecipe, other: PlannedRecipe) -> PlannedRecipe:
    """Return a plan that was made from another changed recipe, with the settings of both."""
    both = [*first.suggestion.settings, *other.suggestion.settings]
    settings = list({setting.partition("=")[0]: setting for setting in both}.values())
    return other._replace(suggestion=msgspec.structs.replace(other.suggestion, settings=settings))


def _find_reason(refusals: Mapping[int, str], site: Site) -> tuple[int, str]:
    """Return what a trainer on the GPUs of a node lacks: more ranks need more nodes, and fewer more memory each.

    The number of its ranks comes first.
    """
    most_gpus = max(partition.gpus_per_node for partition in site.partitions.values())
    num_ranks = max((number for number in refusals if number <= most_gpus), default=min(refusals, default=0))
    return num_ranks, refusals.get(num_ranks, "").partition(". ")[0]


def _refuse_misfit(recipe: Recipe, site: Site, *, reason: str) -> None:
    """Raise PlanError if only more ranks would give the trainer enough memory, for which the site has too few GPUs."""
    _, needs, shortage = reason.partition(f": it needs {NUM_RANKS}")
    if needs:
        raise PlanError(
            f"recipe {recipe.name!r} does not fit on site {site.name!r}: for its memory the trainer needs "
            f"{NUM_RANKS}{shortage}"
        )


def advise_repair(recipe: Recipe, site: Site, *, refusal: str) -> str:
    """Return the setting with which a refused recipe fits: the most ranks that do, else adapters; or "".

    Adapters are the last resort: where the refusal names a setting, they are not tried.
    """
    fewer = ({NUM_RANKS: number} for number in _list_fewer_ranks(recipe, site))
    for changes in [*fewer, *([] if ": set " in refusal else _list_adapters(recipe))]:
        with contextlib.suppress(PlanError):
            (setting,) = _plan_changed(recipe, site, changes).suggestion.settings
            return f". It fits with -s {setting}"
    return ""


def _list_adapters(recipe: Recipe) -> list[dict[str, Any]]:
    """Return the setting that trains adapters in place of the model, the last resort, where a recipe has none."""
    return [] if recipe.train.lora_rank else [{"train.lora_rank": ADAPTER_RANK}]
