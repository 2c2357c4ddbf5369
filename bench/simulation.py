"""Check the simulator of `hpcrl simulate` against real campaigns, and its own cost: `python -m bench.simulation`.

    scale      3,072 GPUs, 60 steps, prompts of 12,000 tokens, lognormal lengths: CPU time, memory, waste
    campaigns  real campaigns with simulated engines (site local, or the lab with `--site lab`: real processes, files,
               HTTP), and the same recipes in the simulator, which plays the episodes that they recorded: time of a
               step, busy share of the engines, share of the places for episodes that are taken

`--only NAME` runs one of them, `--recipe NAME` one of the campaigns. Campaigns run until their last step; the first
step, in which a campaign starts up, does not count. Episodes, the times of a training step, of the hand-overs and of
the starts of episodes are those of the campaign: what is compared is what the simulator makes of them. CPU time is that
of one process, on whatever machine this is; the bar is for an idle one.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import NamedTuple

from bench.campaigns.campaign import MeasuredCampaign
from bench.campaigns.handovers import find_start, measure_handovers
from bench.figures import Figure, main
from hpcrl.campaign import directory
from hpcrl.campaign.request import load_files, load_request
from hpcrl.campaign_dir.events import EpisodesCounted
from hpcrl.simulation.campaign import SimulationSettings, simulate_campaign
from hpcrl.simulation.recorded import read_campaign_traces
from hpcrl.simulation.result import SimulationResult
from hpcrl.simulation.scaling import plan_for_gpus
from hpcrl.simulation.sizes import find_sizes
from hpcrl.simulation.workload import DrawnEpisodes, LatencySettings
from hpcrl.spool.reader import DiskSpoolReader
from hpcrl.spool.record import Trajectory, TrajectoryFacts

BAR_CPU_S = 60.0
BAR_MIB = 2048.0
BAR_ERROR = 0.10
BAR_WASTE = 0.01
"""Admission starts only what will be fresh, so next to nothing becomes too old."""
MAX_START_GAP_S = 0.05
"""Episodes that start together follow each other by less."""
NUM_GPUS = 3072
LARGE_SITE = """
name = "large"
scheduler = "slurm"
het_jobs = "yes"
[partitions.gpu]
slurm_partition = "gpu"
gpu = "h200"
gpus_per_node = 8
cores_per_node = 96
mem_gib_per_node = 2000
max_walltime_min = 1440
max_nodes = 512
[partitions.cpu]
slurm_partition = "cpu"
cores_per_node = 128
mem_gib_per_node = 500
max_walltime_min = 1440
max_nodes = 256
"""
LARGE_RECIPE = """
name = "large"
[model]
path = "/models/qwen3-235b-a22b"
[model.config]
model_type = "qwen3_moe"
torch_dtype = "bfloat16"
hidden_size = 4096
num_hidden_layers = 94
num_attention_heads = 64
num_key_value_heads = 4
head_dim = 128
intermediate_size = 12288
moe_intermediate_size = 1536
num_experts = 128
num_experts_per_tok = 8
vocab_size = 151936
max_position_embeddings = 131072
[domains.swe]
env = "hpcrl.envs.gymnasium_text:FrozenLake"
max_turns = 8
usual_prompt_tokens = 12000
usual_reply_tokens = 600
max_new_tokens = 8192
[rollout]
group_size = 8
max_running = 4096
max_lag = 2
[train]
num_steps = 60
groups_per_step = 128
learning_rate = 1e-6
trainer = "megatron"
tensor_parallel = 4
pipeline_parallel = 2
expert_parallel = 16
[engine]
backend = "vllm"
max_model_len = 131072
[resources.train]
num_workers = 256
[resources.decode]
num_workers = 32
gpus_per_worker = 8
[resources.prefill]
num_workers = 0
[resources.env]
num_workers = 64
[job]
walltime_min = 720
num_jobs = 20
"""
HPCRL = (sys.executable, "-m", "hpcrl.cli")
SMALL = ("engine.backend=sim", "engine.sim.speed=0.004", "rollout.max_new_tokens=16", "train.num_steps=12")
CAMPAIGNS: dict[str, tuple[str, ...]] = {
    "sync": ("quickstart", "rollout.mode=sync"),
    "async, lag 1": ("quickstart", "rollout.max_lag=1"),
    "async, lag 4": ("quickstart", "rollout.max_lag=4", "rollout.max_running=256"),
    "one step off": ("quickstart", "rollout.mode=one-step-off"),
    "redundant": ("quickstart", "rollout.redundancy=4", "rollout.late_after_s=0"),
    "arithmetic": ("arithmetic",),
    "questions": ("questions", "evaluation.every_versions=0"),
    "taxi": ("taxi",),
}
"""Recipes and settings."""


class RealFigures(NamedTuple):
    """The figures of a campaign that are compared."""

    step_s: float
    busy_share: float
    """The share of the time in which the engine that decodes had a turn."""
    places: float
    """The share of the places for episodes that were taken."""


def measure(full: bool, arguments: argparse.Namespace) -> list[Figure]:
    only: str | None = arguments.only
    site: str = arguments.site
    recipe: str | None = arguments.recipe
    names = [recipe] if recipe else list(CAMPAIGNS) if full else list(CAMPAIGNS)[:2]
    parts: dict[str, Callable[[], list[Figure]]] = {
        "scale": partial(_measure_scale, num_steps=60 if full else 10),
        "campaigns": partial(_measure_campaigns, names, site),
    }
    return [figure for name in ([only] if only else parts) for figure in parts[name]()]


def _measure_scale(*, num_steps: int) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as folder:
        recipe, site = Path(folder) / "large.toml", Path(folder) / "cluster.toml"
        recipe.write_text(LARGE_RECIPE)
        site.write_text(LARGE_SITE)
        request = plan_for_gpus(*load_files(str(recipe), site=str(site)), NUM_GPUS).request
        started_at = time.process_time()
        source = DrawnEpisodes(request.recipe, LatencySettings())
        settings = SimulationSettings(num_steps=num_steps)
        result = simulate_campaign(request, find_sizes(request), source, settings)
        cpu_s = time.process_time() - started_at
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    bar = BAR_CPU_S if num_steps == 60 else None
    wasted = sum(result.waste.values())
    return [
        Figure(name=f"{NUM_GPUS} GPUs, {num_steps} steps: CPU time", value=cpu_s, unit="s", bar=bar, better="lower"),
        Figure(name="the same: memory", value=peak_mib, unit="MiB", bar=BAR_MIB, better="lower"),
        Figure(name="the same: CPU time of a turn", value=cpu_s / result.num_turns * 1e6, unit="us"),
        Figure(name="the same: turns", value=result.num_turns, unit=""),
        Figure(name="the same: tokens not trained on", value=wasted, unit="share", bar=BAR_WASTE, better="lower"),
    ]


def _measure_campaigns(names: list[str], site: str) -> list[Figure]:
    return [figure for name in names for figure in _compare_campaign(name, site)]


def _compare_campaign(name: str, site: str) -> list[Figure]:
    """Run a campaign and simulate it."""
    recipe, *own = CAMPAIGNS[name]
    settings = (*SMALL, *own)
    campaign = f"bench-simulation-{time.time_ns()}"
    words = [word for setting in settings for word in ("-s", setting)]
    subprocess.run(
        [*HPCRL, "submit", recipe, "--site", site, "--name", campaign, "--watch", *words],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    root = directory.find_campaign(campaign).root
    measured = MeasuredCampaign(home=root.parents[1], site=site, name=campaign)
    request = load_request(recipe, site=site, settings=settings)
    simulated = simulate_campaign(
        request, find_sizes(request), read_campaign_traces(campaign), _measure_settings(measured)
    )
    real = _read_real(measured, num_places=request.recipe.rollout.max_running)
    subprocess.run([*HPCRL, "rm", campaign, "--yes"], check=True, stdout=subprocess.DEVNULL)
    return _list_errors(name, real, simulated)


def _read_real(campaign: MeasuredCampaign, *, num_places: int) -> RealFigures:
    """Return what a campaign took from the end of its first step to that of its last."""
    steps = campaign.list_steps()
    first, last = steps[0].time, steps[-1].time
    return RealFigures(
        step_s=(last - first) / (len(steps) - 1),
        busy_share=_measure_busy_share(_list_turns(campaign), first, last),
        places=_count_running(campaign, first, last) / num_places,
    )


def _count_running(campaign: MeasuredCampaign, first: float, last: float) -> float:
    """Return how many episodes ran on average, by what env workers report once a second."""
    counts: dict[str, list[int]] = {}
    for event in campaign.list_events(EpisodesCounted):
        if first <= event.time <= last:
            counts.setdefault(event.worker, []).append(event.running)
    return sum(map(fmean, counts.values()))


def _measure_busy_share(turns: list[tuple[float, float]], first: float, last: float) -> float:
    """Return the share of a time in which the engine had a turn.

    Engines count this themselves, but only once a second: steps of the campaign may take as long, or a multiple of it.
    """
    busy_s, until = 0.0, first
    for start, end in turns:
        busy_s += max(0.0, min(end, last) - max(start, until))
        until = max(until, end)
    return busy_s / (last - first)


def _measure_settings(campaign: MeasuredCampaign) -> SimulationSettings:
    """Return the settings of a simulation with the times of a campaign that no policy decides.

    The trainer may have waited for a hold, or the last episode to be sealed, both of which are simulated: the time of a
    hand-over is that of the fastest quarter.
    """
    steps, times = campaign.list_steps(), measure_handovers(campaign, first_step=2)
    return SimulationSettings(
        num_steps=len(steps),
        train_s=fmean(step.time - find_start(step) for step in steps),
        handover_s=quantiles(times.end_to_step, n=4)[0],
        load_s=median(times.publish_to_notice),
        episode_start_s=_measure_episode_start_s(campaign),
    )


def _measure_episode_start_s(campaign: MeasuredCampaign) -> float:
    """Return the time between the starts of two episodes that start together."""
    starts = sorted(_find_start(facts) for facts in _read_episodes(campaign))
    gaps = [later - start for start, later in pairwise(starts)]
    return fmean(gap for gap in gaps if gap < MAX_START_GAP_S)


def _list_turns(campaign: MeasuredCampaign) -> list[tuple[float, float]]:
    """Return the start and end of each turn, by start."""
    found = []
    for facts in _read_episodes(campaign):
        now = _find_start(facts) + facts.reset_s
        for turn in facts.turns:
            found.append((now, now + turn.generate_s))
            now += turn.generate_s + turn.step_s
    return sorted(found)


def _find_start(facts: TrajectoryFacts) -> float:
    return facts.created - facts.reset_s - sum(turn.generate_s + turn.step_s for turn in facts.turns)


def _read_episodes(campaign: MeasuredCampaign) -> list[Trajectory]:
    readers = [
        DiskSpoolReader(campaign.directory.spool(spool), on_damage=lambda *_: None) for spool in ("scored", "archive")
    ]
    return [trajectory for reader in readers for trajectory in reader.poll()]


def _list_errors(name: str, real: RealFigures, simulated: SimulationResult) -> list[Figure]:
    step = abs((simulated.step_s or 0.0) / real.step_s - 1)
    busy = abs(simulated.utilisation["decode"] - real.busy_share)
    places = abs(simulated.utilisation["places"] - real.places)
    return [
        Figure(name=f"{name}: step time, real", value=real.step_s, unit="s"),
        Figure(name=f"{name}: step time, simulated", value=simulated.step_s or 0.0, unit="s"),
        Figure(name=f"{name}: error of the step time", value=step, unit="share", bar=BAR_ERROR, better="lower"),
        Figure(name=f"{name}: engines' busy share, real", value=real.busy_share, unit=""),
        Figure(name=f"{name}: engines' busy share, simulated", value=simulated.utilisation["decode"], unit=""),
        Figure(name=f"{name}: error of the engines' busy share", value=busy, unit="", bar=BAR_ERROR, better="lower"),
        Figure(name=f"{name}: places taken, real", value=real.places, unit=""),
        Figure(name=f"{name}: places taken, simulated", value=simulated.utilisation["places"], unit=""),
        Figure(name=f"{name}: error of the places taken", value=places, unit="", bar=BAR_ERROR, better="lower"),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=("scale", "campaigns"), help="one section")
    parser.add_argument("--site", default="local", choices=("local", "lab"), help="the place of the campaigns")
    parser.add_argument("--recipe", choices=list(CAMPAIGNS), help="one campaign")


if __name__ == "__main__":
    sys.exit(main("simulation", measure, add_options=add_options))
