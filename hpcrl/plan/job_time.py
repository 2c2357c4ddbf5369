"""The time that a job needs at least until its first checkpoint, against its walltime. Pure.

check_job_time     refuse a walltime that cannot hold a step and its checkpoint; warn of one of which they take most
estimate_save_s    the least time for a checkpoint, until one was measured
NODE_GIB_PER_S, MIN_VLLM_START_S, MAX_OVERHEAD_SHARE   constants
"""

import math

from hpcrl.config.recipe import Recipe
from hpcrl.errors import PlanError
from hpcrl.plan.storage import DAY_S, StorageForecast, forecast_storage

NODE_GIB_PER_S = 5.0
"""Checkpoints and weights move between a node and the file system no faster; most sites are slower."""
MIN_VLLM_START_S = 40.0
"""Imports, compilation and the first answer of a vLLM engine, of a small model on an idle node."""
MAX_OVERHEAD_SHARE = 0.5


def estimate_save_s(recipe: Recipe, *, num_nodes: int) -> float:
    """Return the least time for a checkpoint of a trainer with `num_nodes`; 0 if the size of the model is not known."""
    forecast = forecast_storage(recipe) if recipe.model.config else None
    return 0.0 if forecast is None else _estimate_move_s(forecast, num_nodes=num_nodes)


def _estimate_move_s(forecast: StorageForecast, *, num_nodes: int) -> float:
    """Return the least time to write a checkpoint, or to read it; rank 0 reads all of it besides, for its checksums."""
    return forecast.checkpoint_gib * (1 / num_nodes + 1) / NODE_GIB_PER_S


def check_job_time(recipe: Recipe, forecast: StorageForecast | None, *, num_nodes: int) -> list[str]:
    """Return warnings about the time of a job whose trainer has `num_nodes`; raise PlanError if nothing fits.

    The need is a lower bound, so that a walltime which might do is not refused.
    """
    walltime_s, drain_s, found = recipe.job.walltime_min * 60, recipe.job.drain_s, []
    if drain_s > MAX_OVERHEAD_SHARE * walltime_s:
        found.append(
            f"job.drain_s = {drain_s:g} is most of job.walltime_min = {recipe.job.walltime_min}: a job makes steps in "
            f"the first {walltime_s - drain_s:.0f} s alone, its start included"
        )
    if forecast is None or forecast.steps_per_day is None:
        return found
    step_s = DAY_S / forecast.steps_per_day
    save_s = _estimate_move_s(forecast, num_nodes=num_nodes)
    start_s = save_s + (MIN_VLLM_START_S if recipe.engine.backend == "vllm" and recipe.has_rollouts else 0.0)
    needed_s = start_s + max(step_s + save_s, drain_s)
    needs = (
        f"a job needs {needed_s:.0f} s or more: {start_s:.0f} s to start and read a checkpoint, {step_s:.0f} s for a "
        f"step, and {save_s:.0f} s to write {forecast.checkpoint_gib:.3g} GiB at {NODE_GIB_PER_S:g} GiB/s and node, "
        f"and to read them on one for their checksums (job.drain_s = {drain_s:g})"
    )
    if needed_s > walltime_s:
        raise PlanError(
            f"job.walltime_min = {recipe.job.walltime_min} cannot hold a step and its checkpoint: {needs}: raise it to "
            f"{math.ceil(needed_s / MAX_OVERHEAD_SHARE / 60)}, or lower train.groups_per_step"
        )
    if needed_s > MAX_OVERHEAD_SHARE * walltime_s:
        found.append(f"most of job.walltime_min = {recipe.job.walltime_min} is start and end: {needs}")
    if save_s > drain_s:
        found.append(
            f"job.drain_s = {drain_s:g} is less than a checkpoint takes ({save_s:.0f} s or more): the first "
            "job to be preempted or cancelled would end without one"
        )
    return found
