"""Check the simulator of `hpcrl simulate` against real campaigns, and its own cost: `python -m bench.simulation`.

    scale      3,072 GPUs, 60 steps, prompts of 12,000 tokens, lognormal lengths: CPU time and memory
    campaigns  real campaigns with simulated engines (site local, or the lab with `--site lab`: real processes, files,
               HTTP), and the same recipes in the simulator, which plays the episodes that they recorded: time of a
               step, busy share of the engines

`--only NAME` runs one of them, `--recipe NAME` one of the campaigns. Campaigns run until their last step; the first
step, in which a campaign starts up, does not count. The times of a training step and of the hand-overs are those of the
campaign: what is compared is what the simulator makes of them. CPU time is that of one process, on whatever
machine this is; the bar is for an idle one.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, median

from bench.campaigns.campaign import MeasuredCampaign
from bench.campaigns.handovers import measure_handovers
from bench.figures import Figure, main
from hpcrl.campaign import directory
from hpcrl.campaign.request import load_request
from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.events import EngineCounted, StepFinished
from hpcrl.simulation.campaign import SimulationSettings, simulate_campaign
from hpcrl.simulation.recorded import read_campaign_traces
from hpcrl.simulation.result import SimulationResult
from hpcrl.simulation.sizes import find_sizes
from hpcrl.simulation.workload import DrawnEpisodes, LatencySettings, RecordedEpisodes

BAR_CPU_S = 60.0
BAR_MIB = 2048.0
BAR_ERROR = 0.10
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
tensor_parallel = 8
pipeline_parallel = 4
expert_parallel = 8
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
    "sync": ("rollout.mode=sync",),
    "async, lag 1": ("rollout.max_lag=1",),
    "async, lag 4": ("rollout.max_lag=4", "rollout.max_running=256"),
    "one step off": ("rollout.mode=one-step-off",),
    "redundant": ("rollout.redundancy=4", "rollout.late_after_s=0"),
}
"""Settings of recipe quickstart."""


def measure(full: bool, *, only: str | None, site: str, recipe: str | None) -> list[Figure]:
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
        request = load_request(str(recipe), site=str(site))
        started_at = time.process_time()
        source = DrawnEpisodes(request.recipe, LatencySettings())
        settings = SimulationSettings(num_steps=num_steps)
        result = simulate_campaign(request, find_sizes(request, num_gpus=NUM_GPUS), source, settings)
        cpu_s = time.process_time() - started_at
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    bar = BAR_CPU_S if num_steps == 60 else None
    return [
        Figure(name=f"{NUM_GPUS} GPUs, {num_steps} steps: CPU time", value=cpu_s, unit="s", bar=bar, better="lower"),
        Figure(name="the same: memory", value=peak_mib, unit="MiB", bar=BAR_MIB, better="lower"),
        Figure(name="the same: CPU time of a turn", value=cpu_s / result.num_turns * 1e6, unit="us"),
        Figure(name="the same: turns", value=result.num_turns, unit=""),
    ]


def _measure_campaigns(names: list[str], site: str) -> list[Figure]:
    return [figure for name in names for figure in _compare_campaign(name, site)]


def _compare_campaign(name: str, site: str) -> list[Figure]:
    """Run a campaign and simulate it."""
    settings = (*SMALL, *CAMPAIGNS[name])
    campaign = f"bench-simulation-{time.time_ns()}"
    words = [word for setting in settings for word in ("-s", setting)]
    subprocess.run(
        [*HPCRL, "submit", "quickstart", "--site", site, "--name", campaign, "--watch", *words],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    real, handover_s = _read_real(campaign), _measure_handover_s(campaign, site)
    request = load_request("quickstart", site=site, settings=settings)
    simulated = simulate_campaign(
        request,
        find_sizes(request),
        RecordedEpisodes(read_campaign_traces(campaign)),
        SimulationSettings(train_s=real["train_s"], handover_s=handover_s, num_steps=int(real["num_steps"])),
    )
    subprocess.run([*HPCRL, "rm", campaign, "--yes"], check=True, stdout=subprocess.DEVNULL)
    return _list_errors(name, real, simulated)


def _read_real(name: str) -> dict[str, float]:
    """Return the step time, the trainer's time and the busy share of engines of a campaign."""
    every = EventReader(directory.find_campaign(name).events).poll_merged()
    events = [event for event in every if isinstance(event, EngineCounted | StepFinished)]
    steps = [event for event in events if isinstance(event, StepFinished)]
    first, last = steps[0].time, steps[-1].time
    loads = [one for one in events if isinstance(one, EngineCounted) and first <= one.time <= last]
    window_s = sum(one.window_s for one in loads)
    return {
        "num_steps": len(steps),
        "step_s": (last - first) / (len(steps) - 1),
        "train_s": fmean(step.step_s or 0.0 for step in steps),
        "busy": sum(one.busy_share * one.window_s for one in loads) / window_s if window_s else 0.0,
    }


def _measure_handover_s(name: str, site: str) -> float:
    """Return the time from the last token that an idle trainer waits for to its step, and from there to the engines."""
    root = directory.find_campaign(name).root
    times = measure_handovers(MeasuredCampaign(home=root.parents[1], site=site, name=name), first_step=2)
    return median(times.end_to_step or times.youngest_to_seal) + median(times.publish_to_load)


def _list_errors(name: str, real: dict[str, float], simulated: SimulationResult) -> list[Figure]:
    step = abs((simulated.step_s or 0.0) / real["step_s"] - 1)
    busy = abs(simulated.utilisation["decode"] - real["busy"])
    return [
        Figure(name=f"{name}: step time, real", value=real["step_s"], unit="s"),
        Figure(name=f"{name}: step time, simulated", value=simulated.step_s or 0.0, unit="s"),
        Figure(name=f"{name}: error of the step time", value=step, unit="share", bar=BAR_ERROR, better="lower"),
        Figure(name=f"{name}: error of the engines' busy share", value=busy, unit="", bar=BAR_ERROR, better="lower"),
    ]


OPTIONS = argparse.ArgumentParser(add_help=False)
OPTIONS.add_argument("--only", choices=("scale", "campaigns"))
OPTIONS.add_argument("--site", default="local", choices=("local", "lab"))
OPTIONS.add_argument("--recipe", choices=list(CAMPAIGNS))

if __name__ == "__main__":
    options, sys.argv[1:] = OPTIONS.parse_known_args()
    sys.exit(main("simulation", partial(measure, only=options.only, site=options.site, recipe=options.recipe)))
