"""The whole of a campaign against what people would use instead: `python -m bench.whole [--full] [--only SECTION]`.

    one      one-token answers to "a+b=": steps/s of hpcrl, of its sync mode, of TRL's GRPOTrainer and of a bare
             loop, in turns on the same cores; how long each hand-over takes; CPU time for each step
    slow     three sums whose answers take lognormal times (mean 200 ms, sigma 1): the time to a given reward, of hpcrl
             and of TRL, in which the episodes of a step wait for each other
    essay    answers of 64 tokens: trained tokens/s over what the engine alone generates on the same cores
    start    the time from `hpcrl submit` to the end of the first episode, by itself and over that of
             `python -c "import torch, transformers"`; byte code of hpcrl is there, as after an installation

A campaign is measured while it runs; medians over the rounds. TRL has a separate virtual environment
(`make .venv-trl/.done`); without it its figures are left out. The embedded engine, unless `--backend vllm` is given;
`--site lab` measures on the lab.
"""

import argparse
import asyncio
import compileall
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.campaigns.campaign import ROOT, MeasuredCampaign, open_campaign
from bench.campaigns.handovers import HandoverTimes, measure_handovers, median_ms
from bench.campaigns.tasks import ESSAY_TOKENS, MAX_RUNNING, write_recipe
from bench.figures import Figure, main
from hpcrl.campaign_dir.endpoints import EngineEndpoint
from hpcrl.campaign_dir.events import EngineCounted
from hpcrl.config.recipe import TinyModel
from hpcrl.engines.base import GenerateRequest
from hpcrl.engines.node_socket import EngineConnections
from hpcrl.models.tiny import make_tiny_model
from hpcrl.spool.listing import list_segments
from hpcrl.spool.segment import read_segment

SECTIONS = ("one", "slow", "essay", "start")
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
WARM_STEPS = 5
GOAL_REWARD = 0.3
"""Three times what a policy gets that answers with any digit."""
REWARD_STEPS = 10
GOAL_TIMEOUT_S = 600.0
BAR_STEPS, BAR_GOAL, BAR_TOKENS, BAR_START = 0.5, 2.0, 0.85, 2.0
BAR_HANDOVER_MS = {"local": 50.0, "lab": 250.0}
BAR_START_S = {"local": 6.0, "lab": 10.0}


@dataclass(frozen=True)
class StepRate:
    """How fast steps were made, and what they cost."""

    steps_per_s: float
    cpu_s: float
    """User and system time of all processes, for each step."""


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    site: str
    backend: str
    seconds: float
    num_rounds: int

    def settings(self, *more: str) -> list[str]:
        return [f"engine.backend={self.backend}", *more]


def measure(full: bool, arguments: argparse.Namespace) -> list[Figure]:
    only: str | None = arguments.only
    setting = Setting(arguments.site, arguments.backend, seconds=20.0 if full else 8.0, num_rounds=3 if full else 1)
    sections = {"one": _measure_one, "slow": _measure_slow, "essay": _measure_essay, "start": _measure_start}
    figures = []
    for name in [only] if only else SECTIONS:
        figures += sections[name](setting)
    return figures


# ---- one token


def _measure_one(setting: Setting) -> list[Figure]:
    rates: dict[str, list[StepRate]] = {}
    handovers = HandoverTimes()
    with _open_model() as model:
        for _ in range(setting.num_rounds):
            rate, times = _run_campaign(setting)
            rates.setdefault("hpcrl", []).append(rate)
            handovers.add(times)
            rates.setdefault("sync", []).append(_run_campaign(setting, "rollout.mode=sync")[0])
            rates.setdefault("bare", []).append(_run_peer("bare_grpo", model, setting.seconds))
            if TRL_PYTHON.exists():
                rates.setdefault("TRL", []).append(_run_peer("trl_grpo", model, setting.seconds, "one"))
    speed = {name: statistics.median(rate.steps_per_s for rate in found) for name, found in rates.items()}
    cpu = {name: statistics.median(rate.cpu_s for rate in found) for name, found in rates.items()}
    figures = []
    for name, words in (("TRL", "TRL"), ("sync", "its own sync mode"), ("bare", "a bare loop")):
        if name in speed:
            bar = BAR_STEPS if name == "TRL" else None
            figures.append(
                Figure(name=f"one token: steps/s, hpcrl / {words}", value=speed["hpcrl"] / speed[name], bar=bar)
            )
            ratio = cpu["hpcrl"] / cpu[name]
            figures.append(Figure(name=f"one token: CPU time of a step, hpcrl / {words}", value=ratio, better="lower"))
    return [*figures, *_list_handovers(handovers, site=setting.site)]


def _list_handovers(times: HandoverTimes, *, site: str) -> list[Figure]:
    bar = BAR_HANDOVER_MS[site]
    rows: list[tuple[str, Sequence[float], float | None]] = [
        ("last token of an idle trainer's batch -> its step", times.end_to_step, bar),
        ("end of an episode -> durable, with its group", times.end_to_seal, None),
        ("end of the last of a segment -> durable", times.youngest_to_seal, None),
        ("durable -> scored", times.seal_to_score, None),
        ("scored -> step of an idle trainer", times.score_to_step, None),
        ("step and publishing", times.step, None),
        ("published -> in an engine", times.publish_to_load, None),
    ]
    return [
        Figure(name=name, value=median_ms(found), unit="ms", bar=limit, better="lower")
        for name, found, limit in rows
        if found
    ]


@contextlib.contextmanager
def _campaign(setting: Setting, task: str, *settings: str) -> Iterator[MeasuredCampaign]:
    home = Path(tempfile.mkdtemp(prefix="hpcrl-bench-"))
    recipe = write_recipe(home / "whole.toml", task)
    with open_campaign(home, recipe, *setting.settings(*settings), site=setting.site) as campaign:
        yield campaign


def _run_campaign(setting: Setting, *settings: str) -> tuple[StepRate, HandoverTimes]:
    with _campaign(setting, "one", *settings) as campaign:
        campaign.await_steps(WARM_STEPS)
        rate, first_step = _measure_steps(campaign, setting.seconds)
        return rate, measure_handovers(campaign, first_step=first_step)


def _measure_steps(campaign: MeasuredCampaign, seconds: float) -> tuple[StepRate, int]:
    """Return the rate from now on, and the first step."""
    first, cpu_s = campaign.list_steps()[-1], campaign.read_cpu_s()
    time.sleep(seconds)
    last, cpu_s = campaign.list_steps()[-1], campaign.read_cpu_s() - cpu_s
    num = last.step - first.step
    if not num:
        raise RuntimeError(f"no step was made in {seconds:g} s")
    return StepRate(num / (last.time - first.time), cpu_s / num), first.step


@contextlib.contextmanager
def _open_model() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as directory:
        make_tiny_model(Path(directory) / "model", TinyModel(), seed=1)
        yield Path(directory) / "model"


def _play_peer(name: str, model: Path, seconds: float, *words: str) -> list[tuple[float, float, float]]:
    """Return the time, the CPU time and the reward at the end of each step."""
    python = TRL_PYTHON if name == "trl_grpo" else Path(sys.executable)
    command = [str(python), "-m", f"bench.peers.{name}", str(model), f"{seconds:g}", *words]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False)
    steps: list[tuple[float, float, float]] = [
        tuple(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")
    ]
    if len(steps) < 2 * WARM_STEPS:
        raise RuntimeError(f"{' '.join(command)} made {len(steps)} steps:\n{done.stderr[-2000:]}")
    return steps


def _run_peer(name: str, model: Path, seconds: float, *words: str) -> StepRate:
    steps = _play_peer(name, model, seconds, *words)[WARM_STEPS:]
    (start, cpu_start, _), (end, cpu_end, _) = steps[0], steps[-1]
    num = len(steps) - 1
    return StepRate(num / (end - start), (cpu_end - cpu_start) / num)


# ---- slow environments


def _measure_slow(setting: Setting) -> list[Figure]:
    ours, theirs = [], []
    with _open_model() as model:
        for _ in range(setting.num_rounds):
            ours.append(_await_reward(setting))
            if TRL_PYTHON.exists():
                steps = _play_peer("trl_grpo", model, GOAL_TIMEOUT_S, "slow", f"{GOAL_REWARD}", f"{REWARD_STEPS}")
                if statistics.mean(reward for *_, reward in steps[-REWARD_STEPS:]) < GOAL_REWARD:
                    raise RuntimeError(f"TRL has not reached the reward within {GOAL_TIMEOUT_S:g} s")
                theirs.append(steps[-1][0] - steps[0][0])
    figures = [Figure(name="slow environments: time to the reward", value=statistics.median(ours), unit="s")]
    if theirs:
        ratio = statistics.median(theirs) / statistics.median(ours)
        figures.append(Figure(name="slow environments: time to the reward, TRL / hpcrl", value=ratio, bar=BAR_GOAL))
    return figures


def _await_reward(setting: Setting) -> float:
    """Return the time from the first step until the mean reward of the last steps is the goal."""
    with _campaign(setting, "slow") as campaign:
        campaign.await_steps(1)

        def is_reached() -> bool:
            recent = [step.reward_mean or 0.0 for step in campaign.list_steps()[-REWARD_STEPS:]]
            return len(recent) == REWARD_STEPS and statistics.mean(recent) >= GOAL_REWARD

        campaign.await_condition(is_reached, timeout_s=GOAL_TIMEOUT_S)
        steps = campaign.list_steps()
        return steps[-1].time - steps[0].time


# ---- the share of the engine's speed


def _measure_essay(setting: Setting) -> list[Figure]:
    shares, crowded, waiting = [], [], []
    for _ in range(setting.num_rounds):
        with _campaign(setting, "essay") as campaign:
            campaign.await_steps(WARM_STEPS)
            _, first_step = _measure_steps(campaign, setting.seconds)
            trained = _count_trained(campaign, first_step)
            endpoint, counted = campaign.read_endpoint(), campaign.list_events(EngineCounted)[-1]
            campaign.suspend_all_but_engines()
            alone = _measure_engine(endpoint, setting.seconds)
            with _keep_cores_busy():
                beside = _measure_engine(endpoint, setting.seconds)
        shares.append(trained / alone)
        waiting.append(counted.waiting / max(counted.running + counted.waiting, 1.0))
        crowded.append(beside / alone)
    name = f"64-token answers: trained tokens/s / engine alone ({setting.backend})"
    return [
        Figure(name=name, value=statistics.median(shares), bar=BAR_TOKENS),
        Figure(
            name="the same: turns at the engine that wait, for a version or a place", value=statistics.median(waiting)
        ),
        Figure(name="the same: an engine beside a loop on each core but one", value=statistics.median(crowded)),
    ]


@contextlib.contextmanager
def _keep_cores_busy() -> Iterator[None]:
    """Run a loop on each core but one: a training process would take as much from an engine if it cost nothing else."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range((os.cpu_count() or 2) - 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _count_trained(campaign: MeasuredCampaign, first_step: int) -> float:
    """Return the model's tokens in training steps after `first_step`, for each second; answers may end early."""
    first, *steps = [step for step in campaign.list_steps() if step.step >= first_step]
    return sum(step.num_tokens or 0 for step in steps) / (steps[-1].time - first.time)


def _measure_engine(endpoint: EngineEndpoint, seconds: float) -> float:
    """Return the tokens/s of an engine that always has the most requests that a campaign may have."""
    return asyncio.run(_count_tokens(endpoint, seconds)) / seconds


async def _count_tokens(endpoint: EngineEndpoint, seconds: float) -> int:
    num_tokens, ends_at = 0, time.monotonic() + seconds
    async with EngineConnections() as connections:
        engine = connections.connect(endpoint)

        async def ask(index: int) -> None:
            nonlocal num_tokens
            prompt = [2, 20 + index % 10, 15, 20, 33, 3]
            for number in itertools.count():
                request = GenerateRequest(
                    request_id=f"bench/{index}/{number}", token_ids=prompt, max_new_tokens=ESSAY_TOKENS
                )
                completion = await engine.generate(request)
                if time.monotonic() > ends_at:
                    return
                num_tokens += len(completion.token_ids)

        await asyncio.gather(*map(ask, range(MAX_RUNNING)))
    return num_tokens


# ---- start


def _measure_start(setting: Setting) -> list[Figure]:
    for package in ("hpcrl", "bench"):
        compileall.compile_dir(ROOT / package, quiet=1)
    starts, ratios = [], []
    for _ in range(setting.num_rounds + 1):
        started = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch, transformers"], check=True)
        import_s = time.monotonic() - started
        with _campaign(setting, "one") as campaign:
            starts.append(_await_episode(campaign) - campaign.submitted_at)
            ratios.append(starts[-1] / import_s)
    name, imports = "first episode after submit", 'python -c "import torch, transformers"'
    bar = BAR_START_S[setting.site]
    ratio_bar = BAR_START if setting.site == "local" else None
    return [
        Figure(name=name, value=statistics.median(starts), unit="s", bar=bar, better="lower"),
        Figure(name=f"{name} / {imports}", value=statistics.median(ratios), bar=ratio_bar, better="lower"),
    ]


def _await_episode(campaign: MeasuredCampaign) -> float:
    """Wait for the first segment, and return the time at which its first episode ended."""
    spool = campaign.directory.spool("rollouts")
    campaign.await_condition(lambda: bool(list_segments(spool)), timeout_s=GOAL_TIMEOUT_S)
    return min(facts.created for name in list_segments(spool) for facts in read_segment(spool / name).facts)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    parser.add_argument("--site", default="local", choices=("local", "lab"), help="the place of the campaigns")
    parser.add_argument("--backend", default="embedded", choices=("embedded", "vllm"), help="the engine")


if __name__ == "__main__":
    sys.exit(main("whole", measure, add_options=add_options))
