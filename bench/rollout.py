"""Compare episodes on separate timelines with batches, on real env workers and simulated engines.

Run it with `python -m bench.rollout`.

    latency      environments of N(10 s, sigma): time of a step when every turn waits for the batch : hpcrl's
    redundancy   more groups and larger groups than a step consumes: time of a step of 32 x 8 : that of each cell
    reset        one environment in ten steps hangs when it is reset: the slowest step : the slowest without
    alpha        how far behind an episode may be: time of a step, and share of the tokens thrown away
    reward       computed elsewhere, or in the episode's place: share of the time that rollouts wait for it
    crowd        10,000 light episodes at once, in real time; CPU per episode against 1,000

All but the crowd run in virtual time: figures depend on the code, not on the load of the machine. `--calls FILE` (or
HPCRL_BENCH_CALLS) replays recorded calls in the alpha sweep instead of synthetic ones of their shape; `--only NAME`
runs one of the above.

Choices made after figures had been seen: the bar of the redundancy grid is on the synchronous mode (async episodes
gain less from it, 1.15 to 1.3), latency runs at 32 x 8 at any length, and the crowd's CPU is counted from its start.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.figures import Figure, main
from bench.rolling import crowd
from bench.rolling.campaign import RollingSetting, run_all
from bench.rolling.world import Plays, plain, recorded
from bench.routing.workload import read_calls, synthetic
from hpcrl.config.recipe import RolloutMode

BAR_LATENCY = {1: 1.23, 3: 1.51, 5: 1.69, 7: 2.18, 10: 2.27}
"""RollArt's figures, by sigma."""
BAR_REDUNDANCY = 1.5
BAR_RESET = 1.10
BAR_THROWN = 0.10
BAR_WAIT = 0.02
BAR_LAG_S = 0.25
BAR_BYTES = 150e3
BAR_CONTROL = 1.3
MEAN_S = 10.0
CROWD = 10_000
REDUNDANCY_MODES: tuple[RolloutMode, ...] = ("sync", "async")
WHOLE, QUARTER = 32, 8
"""Groups that a step consumes: RollArt's number, and a quarter of it on a quarter of the engines where scale matters
less."""


SECTIONS = ("latency", "redundancy", "reset", "alpha", "reward", "crowd")


def measure(full: bool, arguments: argparse.Namespace) -> list[Figure]:
    calls: Path | None = arguments.calls
    only: str | None = arguments.only
    num_steps = 11 if full else 4
    parts: dict[str, Callable[[], list[Figure]]] = {
        "latency": partial(_latency, list(BAR_LATENCY) if full else [1, 5, 10], num_steps=num_steps),
        "redundancy": partial(_redundancy, WHOLE if full else QUARTER, (8, 10, 12) if full else (8, 12)),
        "reset": partial(_reset, QUARTER),
        "alpha": partial(_alpha, range(1, 7) if full else (1, 2), calls=calls, num_steps=12 if full else 7),
        "reward": partial(_reward, QUARTER, num_steps=11),
        "crowd": partial(_crowd, step_s=20.0 if full else 12.0),
    }
    chosen = [only] if only else list(parts)
    return [figure for name in chosen for figure in parts[name]()]


def _settings(groups: int, *, plays: Plays, num_steps: int, mode: RolloutMode = "async") -> RollingSetting:
    """Return a setting in which one step's groups of 8 episodes run at once, on one GPU for 8 groups."""
    num_gpus, max_running = groups // QUARTER, groups * 8
    return RollingSetting(
        plays=plays, num_steps=num_steps, mode=mode, groups_per_step=groups, num_gpus=num_gpus, max_running=max_running
    )


def _latency(sigmas: Sequence[int], *, num_steps: int) -> list[Figure]:
    """Measure latency at the scale of the bars: the more episodes there are, the slower is the slowest."""
    widest = _settings(WHOLE, plays=plain(mean_s=MEAN_S, sigma_s=sigmas[-1]), num_steps=num_steps)
    modes: tuple[RolloutMode, ...] = ("sync", "one-step-off")
    settings = [replace(widest, mode=mode) for mode in modes]  # their own timelines, but whole batches
    for sigma in sigmas:
        own = replace(widest, plays=plain(mean_s=MEAN_S, sigma_s=sigma))
        settings += [replace(own, mode="sync", lockstep=True), own]
    seconds = [outcome.step_s for outcome in run_all(settings)]
    figures = [
        Figure(
            name=f"N(10 s, {sigma} s): batch-synchronous / async",
            value=seconds[2 * number + 2] / seconds[2 * number + 3],
            bar=BAR_LATENCY[sigma],
        )
        for number, sigma in enumerate(sigmas)
    ]
    figures += [
        Figure(name=f"N(10 s, {sigmas[-1]} s): mode {mode} / async", value=seconds[number] / seconds[-1])
        for number, mode in enumerate(modes)
    ]
    return figures


def list_redundancy_cells(
    whole: int, sizes: Sequence[int], *, num_steps: int = 6
) -> dict[tuple[RolloutMode, int, int], RollingSetting]:
    """Return the settings by mode, number of groups at once, and their size.

    Spare groups need batches; without batches more groups run all the same.
    """
    plays = plain(mean_s=MEAN_S, sigma_s=max(BAR_LATENCY))
    counts = sorted({whole, whole * 17 // 16, whole * 18 // 16})
    return {
        (mode, groups, size): replace(
            _settings(whole, plays=plays, num_steps=num_steps, mode=mode),
            redundancy=size - 8,
            late_after_s=0.0 if size > 8 else None,
            spare_groups=groups - whole if mode == "sync" else 0,
            max_running=groups * size,
            max_batch=108,
        )
        for mode in REDUNDANCY_MODES
        for groups in counts
        for size in sizes
    }


def _redundancy(whole: int, sizes: Sequence[int]) -> list[Figure]:
    """Measure redundancy at the widest latency: a step consumes `whole` groups of 8; more, or larger ones, run at once.

    The bar is for steps that wait for their batch, since redundancy is meant for stragglers. Episodes on separate
    timelines wait for none, so their figures show only the wasted episodes.
    """
    cells = list_redundancy_cells(whole, sizes)
    seconds = dict(zip(cells, (outcome.step_s for outcome in run_all(list(cells.values()))), strict=True))
    figures = []
    for mode in REDUNDANCY_MODES:
        base = seconds.pop((mode, whole, 8))
        own = {(groups, size): value for (kind, groups, size), value in seconds.items() if kind == mode}
        figures += [
            Figure(name=f"{mode}: {whole} x 8 / {g} x {s}", value=base / value) for (g, s), value in own.items()
        ]
        bar = BAR_REDUNDANCY if mode == "sync" else None
        figures.append(Figure(name=f"{mode}: {whole} x 8 / best cell", value=base / min(own.values()), bar=bar))
    return figures


def _reset(groups: int) -> list[Figure]:
    plays = plain(mean_s=MEAN_S, sigma_s=5, reset_s=MEAN_S)
    in_the_sixth_step = groups * 8 * 5 + 3
    modes: tuple[RolloutMode, ...] = ("async", "sync")
    settings = []
    for mode in modes:
        healthy = _settings(groups, plays=plays, num_steps=11, mode=mode)
        settings += [healthy, replace(healthy, broken=lambda number: number == in_the_sixth_step)]
    outcomes = run_all(settings)
    figures = []
    for mode, healthy_one, failing in zip(modes, outcomes[::2], outcomes[1::2], strict=True):
        slowest, mean = max(failing.steps_s) / max(healthy_one.steps_s), failing.step_s / healthy_one.step_s
        bar = BAR_RESET if mode == "async" else None
        figures += [
            Figure(name=f"{mode}: slowest step, one failing reset / none", value=slowest, bar=bar, better="lower"),
            Figure(name=f"{mode}: mean step, the same", value=mean, better="lower"),
        ]
    return figures


def _alpha(alphas: Sequence[int], *, calls: Path | None, num_steps: int) -> list[Figure]:
    """Measure staleness while one step's episodes run at once; training takes no time, so versions come fastest."""
    setting = RollingSetting(
        plays=recorded(read_calls(calls) if calls else synthetic()),
        num_steps=num_steps,
        groups_per_step=16,
        group_size=4,
        max_running=64,
        num_gpus=1,
    )
    figures = []
    for alpha, outcome in zip(alphas, run_all([replace(setting, max_lag=alpha) for alpha in alphas]), strict=True):
        thrown, bar = outcome.thrown_share, BAR_THROWN if alpha == 1 else None
        figures += [
            Figure(name=f"alpha {alpha}: step", value=outcome.step_s, unit="s", better="lower"),
            Figure(name=f"alpha {alpha}: tokens thrown away", value=thrown, unit="share", bar=bar, better="lower"),
        ]
    return figures


def _reward(groups: int, *, num_steps: int) -> list[Figure]:
    """Measure a reward that takes the time of an environment step."""
    settings = _settings(groups, plays=plain(mean_s=MEAN_S, sigma_s=5), num_steps=num_steps)
    ways = [settings, replace(settings, reward_s=MEAN_S), replace(settings, reward_in_place_s=MEAN_S)]
    none, elsewhere, in_place = (outcome.step_s for outcome in run_all(ways))
    return [
        Figure(
            name="time that waits for rewards, offloaded",
            value=1 - none / elsewhere,
            unit="share",
            bar=BAR_WAIT,
            better="lower",
        ),
        Figure(name="the same, in the episode's place", value=1 - none / in_place, unit="share", better="lower"),
    ]


def _crowd(*, step_s: float) -> list[Figure]:
    few, many = crowd.measure(CROWD // 10, step_s=step_s / 4), crowd.measure(CROWD, step_s=step_s)
    control = many.cpu_per_episode_s / few.cpu_per_episode_s
    return [
        Figure(name="episodes running at once", value=many.num_running, unit=""),
        Figure(name="loop lag, p99", value=many.lag_p99_s, unit="s", bar=BAR_LAG_S, better="lower"),
        Figure(name="memory per episode", value=many.bytes_per_episode, unit="bytes", bar=BAR_BYTES, better="lower"),
        Figure(name="CPU per episode", value=many.cpu_per_episode_s * 1e3, unit="ms"),
        Figure(name="CPU per episode, 10,000 / 1,000 running", value=control, bar=BAR_CONTROL, better="lower"),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calls", type=Path, default=os.environ.get("HPCRL_BENCH_CALLS"), help="recorded calls, as CSV"
    )
    parser.add_argument("--only", choices=SECTIONS, help="one section")


if __name__ == "__main__":
    sys.exit(main("rollout", measure, add_options=add_options))
