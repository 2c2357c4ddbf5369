"""Compare the router with simple policies on workloads that it was not tuned on: `python -m bench.held_out`.

    held-out halves  the recorded runs are split in two (five times with `--full`): the router's constants are chosen on
                     one half, among some, and measured on the other; the rivals have nothing to choose
    other tails      synthetic workloads whose replies, prompts and tools have tails of other kinds; the constants are
                     the recipe's defaults

The rivals are round-robin, least-loaded, power of two choices, and each trajectory kept on one engine, given to them in
turn or to the least loaded. The best of them is chosen for each workload after the fact, which no user could. The
drain, when no trajectory is left to start, is the same for all policies that keep engines busy: it is counted in the
ratios with a bar, and left out of those named "without the drain".

`--calls FILE` (or HPCRL_BENCH_CALLS) gives the recorded runs; without it only the tails are measured.
"""

import argparse
import os
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import geometric_mean

from bench.figures import Figure, main
from bench.routing.bounds import lower_bound_s
from bench.routing.fleet import PolicyName, Run, WorkerFleet, replay
from bench.routing.workload import TAILS, Script, read_calls, repeated, synthetic
from hpcrl.config.recipe import RouterConfig

BAR_RIVALS = 1.2
BAR_BOUND = 1.2
RIVALS: tuple[PolicyName, ...] = ("round-robin", "least-loaded", "power of two", "sticky", "sticky by load")
FLEET = WorkerFleet(workers={"h100": 1, "h20": 2})
CANDIDATES = [
    RouterConfig(migration_factor=migration, mismatch_penalty=mismatch)
    for migration, mismatch in product((1.5, 2.0, 3.0), (1.0, 2.0))
]
"""The constants that a half may choose among; the recipe's defaults are one of them."""


@dataclass(frozen=True, kw_only=True)
class HeldOutRun:
    """One workload under the router and under its best rival."""

    router: Run
    rival: Run
    bound_s: float

    @property
    def gain(self) -> float:
        return self.rival.makespan_s / self.router.makespan_s

    @property
    def gain_before_drain(self) -> float:
        return self.rival.last_started_s / self.router.last_started_s

    @property
    def over_bound(self) -> float:
        return self.router.makespan_s / self.bound_s


def measure(full: bool, arguments: argparse.Namespace) -> list[Figure]:
    num_trajectories, num_splits = (1440, 5) if full else (480, 1)
    figures = []
    if arguments.calls:
        scripts = read_calls(arguments.calls)
        figures += _summarize("held-out halves", _run_halves(scripts, num_trajectories, num_splits))
    for name in TAILS:
        scripts = repeated(synthetic(tail=name), num_trajectories)
        figures += _summarize(f"tail {name}", [_run_workload(scripts, RouterConfig())])
    return figures


def _run_halves(scripts: list[Script], num_trajectories: int, num_splits: int) -> Iterable[HeldOutRun]:
    """Yield the runs of each half with constants that were chosen on the other."""
    for seed in range(num_splits):
        shuffled = random.Random(seed).sample(scripts, len(scripts))
        middle = len(shuffled) // 2
        halves = [repeated(half, num_trajectories) for half in (shuffled[:middle], shuffled[middle:])]
        for chosen_on, held_out in (halves, halves[::-1]):
            tuning = chosen_on[: num_trajectories // 2]
            rules = min(CANDIDATES, key=lambda rules: replay(tuning, FLEET, policy="router", rules=rules).makespan_s)
            yield _run_workload(held_out, rules)


def _run_workload(scripts: list[Script], rules: RouterConfig) -> HeldOutRun:
    rivals = [replay(scripts, FLEET, policy=policy) for policy in RIVALS]
    return HeldOutRun(
        router=replay(scripts, FLEET, policy="router", rules=rules),
        rival=min(rivals, key=lambda run: run.makespan_s),
        bound_s=lower_bound_s(scripts, FLEET),
    )


def _summarize(name: str, runs: Iterable[HeldOutRun]) -> list[Figure]:
    """Return the means over the runs, and the worst run where there are several."""
    runs = list(runs)
    gains, over_bounds = [run.gain for run in runs], [run.over_bound for run in runs]
    figures = [
        Figure(name=f"{name}: best simple policy / router", value=geometric_mean(gains), bar=BAR_RIVALS),
        Figure(
            name=f"{name}: best simple policy / router, without the drain",
            value=geometric_mean([run.gain_before_drain for run in runs]),
        ),
        Figure(name=f"{name}: router / bound", value=geometric_mean(over_bounds), bar=BAR_BOUND, better="lower"),
    ]
    if len(runs) > 1:
        figures += [
            Figure(name=f"{name}: best simple policy / router, the worst of {len(runs)}", value=min(gains)),
            Figure(name=f"{name}: router / bound, the worst of {len(runs)}", value=max(over_bounds)),
        ]
    return figures


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calls", type=Path, default=os.environ.get("HPCRL_BENCH_CALLS"), help="recorded calls, as CSV"
    )


if __name__ == "__main__":
    sys.exit(main("held_out", measure, add_options=add_options))
