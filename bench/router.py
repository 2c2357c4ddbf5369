"""The router against simpler policies and against what no policy can beat, in virtual time: `python -m bench.router`.

    policies    one replay under hpcrl's router, round-robin, least-loaded and power of two choices: makespans
    hardware    RollArt's equal-cost pools, 2 H800 against 6 H20, one kind of task each
    decisions   time of a decision with 256 endpoints, and with 1,000 times as many trajectories running
    cost model  fitted on H100 servers, its error on servers of another GPU

`--calls FILE` (or HPCRL_BENCH_CALLS) replays recorded calls instead of made-up ones of their shape; `--points FILE`
(or HPCRL_BENCH_POINTS) gives measured servers, without which there are no figures of the cost model.

Chosen after figures had been seen: 720 trajectories and not 240 (with 240 most of a run is its drain, and the best
rival was 1.3 times slower at most), how many are in flight, that both pools of the hardware rows run as many
trajectories as the KV of either holds, and that GEM-math is held against the whole range that RollArt tells and not
its middle. The policy's constants were tried on these same two workloads.
"""

import argparse
import os
import random
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from bench.figures import Figure, main
from bench.routing.fleet import Fleet, Run, crowded_s, longest_first, lower_bound_s, replay, settled_bound_s
from bench.routing.serving import errors, fit, read_points
from bench.routing.workload import Call, Script, read_calls, repeated, synthetic
from hpcrl.endpoints import Endpoint
from hpcrl.engines.base import Completion, GenerateRequest, LoadFigures
from hpcrl.recipe import Routing
from hpcrl.rollout.courses import Courses
from hpcrl.rollout.deciding import Ask, Known, decide
from hpcrl.rollout.workers import Worker, sorted_out

BAR_RIVALS = 1.3
BAR_BOUND = 1.15
BAR_DECISION_US = 50.0
BAR_RUNNING = 1.5
ROLLART = {"FrozenLake": (0.53, 0.53), "GEM-math": (1 / 0.79, 1 / 0.49)}
"""Time on 2 H800 / time on 6 H20; the shortest and the longest it tells."""
FILES = argparse.ArgumentParser(add_help=False)
FILES.add_argument("--calls", type=Path, default=os.environ.get("HPCRL_BENCH_CALLS"))
FILES.add_argument("--points", type=Path, default=os.environ.get("HPCRL_BENCH_POINTS"))


def measure(full: bool, *, files: argparse.Namespace) -> list[Figure]:
    return [
        *_policy_figures(read_calls(Path(files.calls)) if files.calls else synthetic(), full=full),
        *_hardware_figures(full=full),
        *_decision_figures(),
        *(_cost_figures(Path(files.points)) if files.points else []),
    ]


def _policy_figures(scripts: list[Script], *, full: bool) -> list[Figure]:
    fleet = Fleet(workers={"h100": 2, "h20": 4} if full else {"h100": 1, "h20": 2})
    scripts = repeated(scripts, 2400 if full else 720)
    runs = {name: replay(scripts, fleet, policy=name) for name in ("round-robin", "least-loaded", "power of two")}
    router = replay(scripts, fleet, policy="router")
    told = replay(longest_first(scripts, fleet), fleet, policy="router")
    best = min(runs["round-robin"].makespan_s, runs["least-loaded"].makespan_s)
    bound_s = lower_bound_s(scripts, fleet)
    return [
        Figure(
            name="makespan: best of round-robin, least-loaded / router", value=best / router.makespan_s, bar=BAR_RIVALS
        ),
        *(_over(name, run, router) for name, run in runs.items()),
        Figure(name="makespan: router / bound", value=router.makespan_s / bound_s, bar=BAR_BOUND, better="lower"),
        Figure(
            name="router / bound where a trajectory stays with one kind of GPU",
            value=router.makespan_s / settled_bound_s(scripts, fleet),
        ),
        Figure(name="router that is told the lengths, longest begun first / bound", value=told.makespan_s / bound_s),
        Figure(name="longest trajectory in full batches / bound", value=crowded_s(scripts, fleet) / bound_s),
        *(Figure(name=f"{name} / bound", value=run.makespan_s / bound_s) for name, run in runs.items()),
        Figure(name="router: prompt tokens computed", value=router.prefilled_share, unit="share"),
    ]


def _over(name: str, run: Run, router: Run) -> Figure:
    return Figure(name=f"makespan: {name} / router", value=run.makespan_s / router.makespan_s)


def _hardware_figures(*, full: bool) -> list[Figure]:
    """The same episodes on each pool, as many at once as the KV of both can hold; any of them may run in any batch.

    Lengths are guesses within what RollArt tells of turns and tokens, and FrozenLake's ratio follows them: with 20 to
    100 turns of half as many tokens it is 0.92.
    """
    figures = []
    for task, (low, high) in ROLLART.items():
        scripts = repeated([_episode(task, random.Random(seed)) for seed in range(16)], 512 if full else 128)
        pools = [Fleet(workers=workers, max_batch=256) for workers in ({"h800": 2}, {"h20": 6})]
        in_flight = min(len(scripts), *(pool.num_kept(scripts) for pool in pools))
        pools = [replace(pool, in_flight=in_flight, max_batch=in_flight) for pool in pools]
        h800, h20 = (replay(scripts, pool, policy="router").makespan_s for pool in pools)
        figures += [
            Figure(name=f"{task}: 2 H800 / 6 H20", value=h800 / h20),
            Figure(
                name=f"{task}: outside what RollArt tells ({low:.2f} to {high:.2f}) by",
                value=max(low / (h800 / h20), (h800 / h20) / high, 1.0) - 1,
                unit="share",
                bar=0.2,
                better="lower",
            ),
            _bounds(task, scripts, pools),
            _bounds(f"{task}, were no KV kept between turns", [_without_kv(script) for script in scripts], pools),
        ]
    return figures


def _bounds(name: str, scripts: list[Script], pools: list[Fleet]) -> Figure:
    h800, h20 = (lower_bound_s(scripts, pool) for pool in pools)
    return Figure(name=f"{name}: the same of the lower bounds", value=h800 / h20)


def _without_kv(script: Script) -> Script:
    """Every turn as a trajectory of its own would be: nothing of its prompt is known."""
    return replace(script, forgets=True)


def _episode(task: str, draw: random.Random) -> Script:
    """FrozenLake: many turns, a board of some hundred tokens each, short moves. GEM-math: few turns, long replies."""
    calls: list[Call] = []
    num_prompt = 300
    for _ in range(draw.randint(20, 40) if task == "FrozenLake" else draw.randint(1, 4)):
        num_new = draw.randint(10, 40) if task == "FrozenLake" else draw.randint(500, 3000)
        calls.append(Call(num_prompt=num_prompt, num_new=num_new, pause_s=0.1))
        num_prompt += num_new + (draw.randint(300, 700) if task == "FrozenLake" else 100)
    return Script(domain=task, calls=tuple(calls))


class _Silent:
    """Stands for an engine that is never called."""

    async def load_figures(self) -> LoadFigures:
        raise NotImplementedError


def _decision_figures() -> list[Figure]:
    few, many = _decision_us(10), _decision_us(10_000)
    return [
        Figure(name="decision, 256 endpoints", value=many, unit="us", bar=BAR_DECISION_US, better="lower"),
        Figure(name="decision with 10,000 trajectories / with 10", value=many / few, bar=BAR_RUNNING, better="lower"),
    ]


def _decision_us(num_running: int) -> float:
    """With a home and without, by the cost model; the median of many."""
    fleet, draw, rules = Fleet(workers={}), random.Random(3), Routing()
    workers = {}
    for number in range(256):
        gpu, role = ("h100", "h20")[number % 2], "prefill" if number % 4 == 0 else "decode"
        endpoint = Endpoint(role=role, worker=f"000-{role}-{number}", node="n", url="u", token="t", gpu=gpu)
        worker = Worker(endpoint, _Silent(), fleet.pace(gpu), role)  # type: ignore[arg-type]
        worker.heard(LoadFigures(version=0, num_running=draw.randrange(32), num_waiting=0, num_generated_tokens=0))
        workers[worker.name] = worker
    courses, known, names = Courses(weights={}), Known(sorted_out(workers.values()), workers, rules), list(workers)
    requests = [
        GenerateRequest(
            request_id=f"lake/{n}/0/0/0", token_ids=[1] * 64, max_new_tokens=64, trajectory=f"{n}", domain="lake"
        )
        for n in range(num_running)
    ]
    completion = Completion(token_ids=[1] * 8, logprobs=[0.0] * 8, versions=[0] * 8, finish_reason="stop")
    for request in requests:
        course = courses.begin_turn(request, now=0)
        course.home, course.num_kept, course.version = draw.choice(names), 48, 0
        course.held_at, course.held = course.home, 48
        courses.end_turn(course, request, completion, seconds=1.0)
    seconds = []
    for request in draw.choices(requests, k=4000):
        began = time.perf_counter()
        course = courses.begin_turn(request, now=1)
        num_prompt = len(request.token_ids)
        ask = Ask(request.domain, num_prompt, courses.reply_tokens(request), course, num_held=num_prompt)
        decide(ask, known, draw=draw)
        seconds.append(time.perf_counter() - began)
        courses.end_turn(course, request, None, seconds=1.0)
    return median(seconds) * 1e6


def _cost_figures(path: Path) -> list[Figure]:
    points = read_points(path)
    seen = [point for point in points if point.gpu == "h100"]
    unseen = [point for point in points if point.gpu != "h100"]
    found = fit(seen)
    return [
        Figure(name="cost model: median error on H100, fitted there", value=median(errors(seen, found)), unit="share"),
        Figure(name="cost model: median error on B200, not seen", value=median(errors(unseen, found)), unit="share"),
    ]


if __name__ == "__main__":
    files, sys.argv[1:] = FILES.parse_known_args()
    sys.exit(main("router", partial(measure, files=files)))
