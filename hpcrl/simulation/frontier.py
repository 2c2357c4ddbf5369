"""Other plans with the time and the cost of the whole campaign: `hpcrl simulate --suggest`, `hpcrl plan --suggest`.

time_plans   simulate some steps of the plan and of others
"""

import contextlib
import math
from dataclasses import replace
from statistics import stdev

import msgspec

from hpcrl.campaign.request import CampaignRequest
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError
from hpcrl.plan.suggestions import PlannedRecipe, PlanSuggestion, add_settings, list_plans
from hpcrl.simulation.campaign import SimulationSettings, make_drain_margin, simulate_campaign
from hpcrl.simulation.result import SimulationResult
from hpcrl.simulation.sizes import find_sizes
from hpcrl.simulation.workload import DrawnEpisodes, LatencySettings
from hpcrl.system.terminal import track_progress

MIN_STEPS, MAX_STEPS = 8, 24
"""The numbers of simulated steps, whose mean time is that of all. With 24 it was within 10 % for four recipes."""
MAX_JOBS = 1000
"""The simulated steps may need more jobs than the recipe has."""
MIN_SPANS, UNKNOWN_ERROR = 3, 0.5
"""The error of fewer steps is not known, and counts as this."""
MAX_ROUNDS = 3
"""After the first round, the smaller ones of the cheapest plan so far are tried."""
MAX_TURNS = 40_000
"""The turns that are simulated at most for a plan, unless they are fewer than the least steps. The plans of a 32B model
take 40 to 50 s of CPU together."""


def time_plans(
    request: CampaignRequest, latencies: LatencySettings, settings: SimulationSettings
) -> list[PlanSuggestion]:
    """Return the plan that was made, then others, each with its simulated time and cost; those that stall are left out.

    Raise ConfigError if the plan itself cannot be simulated.
    """
    plans = list_plans(request.recipe, request.site, request.plan)
    seen = {planned.suggestion.size for planned in plans}
    made = _time_plan(plans.pop(0), request, latencies, settings)
    found = [made]
    for _ in range(MAX_ROUNDS):
        found += _time_plans(plans, request, latencies, settings)
        cheapest = min(found, key=lambda one: one.suggestion.campaign_node_hours or 0.0)
        others = (add_settings(cheapest, one) for one in list_plans(cheapest.recipe, request.site, cheapest.plan))
        nodes = cheapest.suggestion.nodes
        plans = [one for one in others if one.suggestion.nodes < nodes and one.suggestion.size not in seen]
        seen |= {planned.suggestion.size for planned in plans}
    return [planned.suggestion for planned in found]


def _time_plans(
    plans: list[PlannedRecipe], request: CampaignRequest, latencies: LatencySettings, settings: SimulationSettings
) -> list[PlannedRecipe]:
    found = []
    for planned in track_progress(plans, "plans are simulated"):
        with contextlib.suppress(ConfigError):  # its engines do not hold the model, or no job has time for a step
            found.append(_time_plan(planned, request, latencies, settings))
    return found


def _time_plan(
    planned: PlannedRecipe, request: CampaignRequest, latencies: LatencySettings, settings: SimulationSettings
) -> PlannedRecipe:
    """Return the plan with its time and cost."""
    recipe = planned.recipe
    endless = msgspec.structs.replace(recipe.job, num_jobs=MAX_JOBS)
    request = replace(request, recipe=msgspec.structs.replace(recipe, job=endless), plan=planned.plan)
    num_steps = min(settings.num_steps or _choose_steps(recipe), recipe.train.num_steps)
    sizes = find_sizes(request)
    source = DrawnEpisodes(recipe, latencies, seed=settings.seed)
    short = msgspec.structs.replace(settings, num_steps=num_steps)
    result = simulate_campaign(request, sizes, source, short)
    if not result.is_complete:
        raise ConfigError(f"a job of {recipe.job.walltime_min} min is too short for {num_steps} steps")
    first_s = result.seconds - sum(result.steps)
    step_s = result.step_s if result.step_s is not None else first_s
    num_steps = recipe.train.num_steps
    num_jobs = math.ceil(num_steps / _count_steps_per_job(recipe, settings, result, first_s=first_s, step_s=step_s))
    each_job_s = settings.start_s + first_s + settings.checkpoint_s
    hours = (num_jobs * each_job_s + (num_steps - num_jobs) * step_s) / 3600
    num_spans, error = len(result.steps), UNKNOWN_ERROR
    if num_spans >= MIN_SPANS:
        error = stdev(result.steps) / math.sqrt(num_spans) / step_s
    timed = msgspec.structs.replace(
        planned.suggestion,
        campaign_hours=round(hours, 4),
        campaign_node_hours=round(planned.suggestion.nodes * hours, 4),
        campaign_gpu_hours=round(planned.suggestion.gpus * hours, 4),
        campaign_error=round(error, 4),
        campaign_jobs=num_jobs,
        missing_jobs=max(0, num_jobs - recipe.job.num_jobs),
    )
    return planned._replace(suggestion=timed)


def _count_steps_per_job(
    recipe: Recipe, settings: SimulationSettings, result: SimulationResult, *, first_s: float, step_s: float
) -> int:
    """Return the steps of a job whose first one ends after `first_s`: none starts in the drain, or ends too late."""
    play_s = recipe.job.walltime_min * 60 - settings.start_s
    margin = make_drain_margin(recipe, save_s=settings.checkpoint_s)
    margin.note_step(result.train_s)
    step_s = max(step_s, 1e-3)
    num_in_time = 1 + math.floor((play_s - settings.checkpoint_s - first_s) / step_s)
    num_before_drain = 1 + math.ceil((play_s - margin.find_seconds() - first_s) / step_s)
    return max(1, min(num_in_time, num_before_drain))


def _choose_steps(recipe: Recipe) -> int:
    max_turns = max(domain.max_turns for domain in recipe.domains.values())
    turns_per_step = recipe.train.groups_per_step * recipe.rollout.group_size * max_turns
    return min(MAX_STEPS, max(MIN_STEPS, MAX_TURNS // turns_per_step))
