"""The figures of a simulation, as they are printed.

SimulationResult    the contract of `hpcrl simulate --json`
describe_result     its lines for a person
TimelineBin         a span of the timeline
"""

import msgspec


class TimelineBin(msgspec.Struct, frozen=True, kw_only=True):
    """The mean shares of a span of time."""

    start_s: float
    decode: float
    """The share of the time of decode workers with a request."""
    prefill: float
    train: float
    env: float
    """The share of the places for episodes that environments use."""
    running: float
    """The share of the places for episodes that are taken."""


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a simulated campaign."""

    recipe: str
    site: str
    seed: int
    num_gpus: int
    """The GPUs of all nodes of a job, which are charged whether workers use them or not."""
    num_nodes: int
    workers: dict[str, int]
    """The number by role; for the trainer, its ranks."""
    num_steps: int
    is_complete: bool
    """False if the jobs of the chain ended before the last step."""
    num_jobs: int
    seconds: float
    """The simulated time of the campaign, without the time that jobs wait in the queue."""
    step_s: float | None
    """The mean time of a step, without the first one of each job; None with one step."""
    step_p95_s: float | None
    train_s: float
    """The mean time that a step trains; the rest of `step_s` is waiting for trajectories."""
    num_episodes: int
    """Episodes that were trained on."""
    num_turns: int
    tokens_per_s: float
    """The generated tokens that were trained on, per second."""
    utilisation: dict[str, float]
    """The busy share of the time by role: of engines with a request, of the trainer in steps, and of places for
    episodes whose environment is at work (env)."""
    lag_mean: float | None
    lags: dict[str, int]
    """Trained trajectories by lag."""
    waste: dict[str, float]
    """Generated tokens that are not trained on, by reason, as a share of all."""
    gpu_hours: float
    node_hours: float
    num_failures: int
    """Failures of engines."""
    notes: list[str]
    """The assumptions."""
    steps: list[float]
    """The time from the end of one step to that of the next."""
    timeline: list[TimelineBin]


def describe_result(result: SimulationResult) -> list[str]:
    """Return the lines for a person."""
    workers = ", ".join(f"{num} {role}" for role, num in result.workers.items())
    gpus, nodes = _count(result.num_gpus, "GPU"), _count(result.num_nodes, "node")
    lines = [f"{result.recipe} on {result.site}: {gpus}, {nodes} ({workers})"]
    ended = "" if result.is_complete else "; its jobs ended before the last step"
    if not result.num_steps:
        ended += ": raise job.walltime_min or job.num_jobs, or lower train.groups_per_step"
    jobs = f", {result.num_jobs} jobs" if result.num_jobs > 1 else ""
    lines.append(f"steps        {result.num_steps} in {_show_time(result.seconds)}{jobs}{ended}")
    if result.step_s is not None and result.step_p95_s is not None:
        lines.append(
            f"step time    {_show_time(result.step_s)} (95th percentile {_show_time(result.step_p95_s)}), of which "
            f"training {_show_time(result.train_s)}"
        )
    lines.append(
        f"episodes     {result.num_episodes} trained on, {result.num_turns} turns played, {result.tokens_per_s:.0f} "
        "trained tokens/s"
    )
    lines.append("busy         " + ", ".join(f"{role} {share:.0%}" for role, share in result.utilisation.items()))
    if result.lag_mean is not None:
        lags = ", ".join(f"{num} at {lag}" for lag, num in result.lags.items())
        lines.append(f"staleness    {result.lag_mean:.2f} versions on average ({lags})")
    wasted = ", ".join(f"{share:.1%} {reason}" for reason, share in result.waste.items())
    lines.append(f"waste        {sum(result.waste.values()):.1%} of generated tokens{f': {wasted}' if wasted else ''}")
    if result.num_failures:
        lines.append(f"failures     {result.num_failures} of engines")
    lines.append(f"cost         {result.gpu_hours:.4g} GPU-hours, {result.node_hours:.4g} node-hours")
    return lines + [f"assumed      {note}" for note in result.notes]


def _count(num: int, noun: str) -> str:
    return f"{num} {noun}{'s' * (num != 1)}"


def _show_time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
