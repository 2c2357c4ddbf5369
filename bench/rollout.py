"""Episodes on their own timelines against batches, on real env hosts and simulated engines: `python -m bench.rollout`.

    latency      environments of N(10 s, sigma): time of a step when every turn waits for the batch : hpcrl's
    redundancy   more groups and larger groups than a step consumes: time of a step of 32 x 8 : that of each cell
    reset        one environment in ten steps hangs when it is reset: the slowest step : the slowest without
    alpha        how far behind an episode may be: time of a step, and share of the tokens thrown away
    reward       worked out elsewhere, or in the episode's place: share of the time that rollouts wait for it
    crowd        10,000 light episodes at once, in real time; CPU per episode against 1,000

All but the crowd is in virtual time: figures depend on the code, not on how busy the machine is. `--calls FILE` (or
HPCRL_BENCH_CALLS) replays recorded calls in the alpha sweep instead of made-up ones of their shape; `--only NAME` runs
one of the above.
"""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.figures import Figure, main
from bench.rolling import crowd
from bench.rolling.campaign import Outcome, Setting, run
from bench.rolling.world import Plays, plain, recorded
from bench.routing.workload import read_calls, synthetic
from hpcrl.recipe import RolloutMode

BAR_LATENCY = {1: 1.23, 3: 1.51, 5: 1.69, 7: 2.18, 10: 2.27}
"""RollArt's, by sigma."""
BAR_REDUNDANCY = 1.5
BAR_RESET = 1.10
BAR_THROWN = 0.10
BAR_WAIT = 0.02
BAR_LAG_S = 0.25
BAR_BYTES = 150e3
BAR_CONTROL = 1.3
MEAN_S = 10.0
CROWD = 10_000
WHOLE, QUARTER = 32, 8
"""Groups that a step consumes: RollArt's, and a quarter of them for a quick run, with a quarter of the engines."""


def measure(full: bool, *, calls: Path | None, only: str | None) -> list[Figure]:
    parts: dict[str, Callable[[], list[Figure]]] = {
        "latency": partial(_latency, WHOLE if full else QUARTER, num_steps=11 if full else 5),
        "redundancy": partial(_redundancy, WHOLE if full else QUARTER, num_steps=11 if full else 5),
        "reset": partial(_reset, WHOLE if full else QUARTER),
        "alpha": partial(_alpha, calls=calls, full=full),
        "reward": partial(_reward, WHOLE if full else QUARTER, num_steps=11),
        "crowd": _crowd,
    }
    chosen = [only] if only else list(parts)
    return [figure for name in chosen for figure in parts[name]()]


def _settings(groups: int, *, plays: Plays, num_steps: int, mode: RolloutMode = "async") -> Setting:
    """Groups of 8; as many run at once as a step consumes, on one GPU for 8 groups."""
    num_gpus, max_running = groups // QUARTER, groups * 8
    return Setting(
        plays=plays, num_steps=num_steps, mode=mode, groups_per_step=groups, num_gpus=num_gpus, max_running=max_running
    )


def _latency(groups: int, *, num_steps: int) -> list[Figure]:
    figures = []
    for sigma, bar in BAR_LATENCY.items():
        plays = plain(mean_s=MEAN_S, sigma_s=sigma)
        settings = _settings(groups, plays=plays, num_steps=num_steps)
        batch = run(replace(settings, mode="sync", lockstep=True)).step_s
        own = run(settings).step_s
        figures.append(Figure(name=f"N(10 s, {sigma} s): batch-synchronous / async", value=batch / own, bar=bar))
    modes: tuple[RolloutMode, ...] = ("sync", "one-step-off")
    for mode in modes:  # of the widest: own timelines, but whole batches
        whole = run(replace(settings, mode=mode)).step_s
        figures.append(Figure(name=f"N(10 s, {sigma} s): mode {mode} / async", value=whole / own))
    return figures


def _redundancy(whole: int, *, num_steps: int) -> list[Figure]:
    """The widest of the latencies. A step consumes `whole` groups of 8; more of them run at once, or larger ones."""
    plays = plain(mean_s=MEAN_S, sigma_s=max(BAR_LATENCY))

    def step_s(groups: int, size: int, mode: RolloutMode) -> float:
        settings = _settings(whole, plays=plays, num_steps=num_steps, mode=mode)
        return run(replace(settings, redundancy=size - 8, max_running=groups * size, max_batch=108)).step_s

    figures = []
    more: dict[RolloutMode, tuple[int, ...]] = {"async": (whole, whole * 17 // 16, whole * 18 // 16), "sync": (whole,)}
    for mode, counts in more.items():
        cells = {(groups, size): step_s(groups, size, mode) for groups in sorted(set(counts)) for size in (8, 10, 12)}
        base = cells.pop((whole, 8))
        figures += [Figure(name=f"{mode}: {whole} x 8 / {g} x {s}", value=base / own) for (g, s), own in cells.items()]
        bar = BAR_REDUNDANCY if mode == "async" else None
        figures.append(Figure(name=f"{mode}: {whole} x 8 / best cell", value=base / min(cells.values()), bar=bar))
    return figures


def _reset(groups: int) -> list[Figure]:
    plays = plain(mean_s=MEAN_S, sigma_s=5, reset_s=MEAN_S)

    def steps(mode: RolloutMode, *, broken: int = -1) -> Outcome:
        settings = _settings(groups, plays=plays, num_steps=11, mode=mode)
        return run(replace(settings, broken=lambda number: number == broken))

    figures = []
    modes: tuple[RolloutMode, ...] = ("async", "sync")
    for mode in modes:
        healthy, failing = steps(mode), steps(mode, broken=groups * 8 * 5 + 3)  # in the sixth step
        slowest = max(failing.steps_s) / max(healthy.steps_s)
        bar = BAR_RESET if mode == "async" else None
        figures.append(
            Figure(name=f"{mode}: slowest step, one failing reset / none", value=slowest, bar=bar, better="lower")
        )
        figures.append(
            Figure(name=f"{mode}: mean step, the same", value=failing.step_s / healthy.step_s, better="lower")
        )
    return figures


def _alpha(*, calls: Path | None, full: bool) -> list[Figure]:
    """As many episodes at once as a step consumes. Training takes no time: versions come as fast as they can."""
    plays = recorded(read_calls(calls) if calls else synthetic())
    figures = []
    for alpha in range(1, 7):
        setting = Setting(
            plays=plays,
            num_steps=20 if full else 8,
            max_lag=alpha,
            groups_per_step=16,
            group_size=4,
            max_running=64,
            num_gpus=1,
        )
        outcome = run(setting)
        bar = BAR_THROWN if alpha == 1 else None
        figures += [
            Figure(name=f"alpha {alpha}: step", value=outcome.step_s, unit="s", better="lower"),
            Figure(
                name=f"alpha {alpha}: tokens thrown away",
                value=outcome.thrown_share,
                unit="share",
                bar=bar,
                better="lower",
            ),
        ]
    return figures


def _reward(groups: int, *, num_steps: int) -> list[Figure]:
    """A reward that takes as long as a step of the environment."""
    plays = plain(mean_s=MEAN_S, sigma_s=5)
    settings = _settings(groups, plays=plays, num_steps=num_steps)
    none = run(settings).step_s
    elsewhere = run(replace(settings, reward_s=MEAN_S)).step_s
    in_place = run(replace(settings, reward_in_place_s=MEAN_S)).step_s
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


def _crowd() -> list[Figure]:
    few, many = crowd.measure(CROWD // 10), crowd.measure(CROWD)
    control = many.cpu_per_episode_s / few.cpu_per_episode_s
    return [
        Figure(name="episodes running at once", value=many.num_running, unit=""),
        Figure(name="loop lag, p99", value=many.lag_p99_s, unit="s", bar=BAR_LAG_S, better="lower"),
        Figure(name="memory per episode", value=many.bytes_per_episode, unit="bytes", bar=BAR_BYTES, better="lower"),
        Figure(name="CPU per episode", value=many.cpu_per_episode_s * 1e3, unit="ms"),
        Figure(name="CPU per episode, 10,000 / 1,000 running", value=control, bar=BAR_CONTROL, better="lower"),
    ]


OPTIONS = argparse.ArgumentParser(add_help=False)
OPTIONS.add_argument("--calls", type=Path, default=os.environ.get("HPCRL_BENCH_CALLS"))
OPTIONS.add_argument("--only", choices=("latency", "redundancy", "reset", "alpha", "reward", "crowd"))

if __name__ == "__main__":
    options, sys.argv[1:] = OPTIONS.parse_known_args()
    calls = Path(options.calls) if options.calls else None
    sys.exit(main("rollout", partial(measure, calls=calls, only=options.only)))
