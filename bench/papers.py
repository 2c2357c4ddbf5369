"""Set figures of RollArt and DistFlow beside what the simulator and the cost model give: `python -m bench.papers`.

    inputs       RollArt: a synchronous step of its SWE tasks, which checks the inputs of the sections below
    headline     RollArt: time of a step of Sync+ (its environments and rewards asynchronous), one step off, and AReaL's
                 admission, each on H800 only, over that of hpcrl's on H800 and H20 of the same cost
    alpha        RollArt: time of a step with alpha 1 over that with 2 and 6
    redundancy   RollArt: time of a synchronous step of 32 groups of 8 over that of more or larger groups
    scaling      DistFlow: efficiency of many controllers to 512 ranks, and of a single one to 1,024

Published are: the turns of the five kinds of tasks; 8B, 32k tokens of context and 32 GPUs; a step of 366 s, of which
15 % is the time of resets (55 s are an input) and 8 % neither that nor training nor generation (of which 0.5 s for each
step of the environment, 5 s for a reward and 1.4 s for new weights are inputs); a failing reset in ten steps, which
takes 147 s more (513 s); that 2 H800 cost what 6 H20 do; limits of a reply in ROLL's configurations (2,048 and 128).
Assumed are: Qwen3-8B's sizes, 16 H800 that train, 32 groups of 8 episodes a step, of five kinds equally often, 8 H800
and 24 H20 that generate, in place of which the others have 16 H800, tools' output and replies of 500 and 150 tokens a
turn for SWE, 800 and 60 for WebShop, 200 and 60 for FrozenLake, 100 and 1,750 for both GEM tasks (lognormal, sigma
0.8), 0.1 s for a step and 1 s for a reset of the other environments, H800 for the first three kinds and H20 for GEM, no
remote prefill, 4 env workers. Six pairs of lengths were tried for SWE, on `inputs` alone, until training and generation
were as published. All of this was fixed before any ratio by it was seen, and nothing was changed since; those of an
earlier model (1.67, 1.31, 0.99) were known.

The published ratios are times to a score, those here are times of a step. AReaL's admission is hpcrl's (the formula is
the same). DistFlow is not a simulation, but arithmetic with the inputs of `_scaling_figures`. Not here: affinity,
trajectories in lockstep, rewards elsewhere (bench.router and bench.rollout play those with the env worker itself) and
the exposed time of new weights.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import exp
from pathlib import Path
from statistics import fmean

from bench.figures import Figure, main
from hpcrl.campaign.request import CampaignRequest, load_request
from hpcrl.hardware.cost_model import LINK_BYTES_PER_S
from hpcrl.simulation.campaign import SimulationSettings, simulate_campaign
from hpcrl.simulation.result import SimulationResult
from hpcrl.simulation.sizes import find_sizes
from hpcrl.simulation.workload import EpisodeScript, TurnScript

BAR_HEADLINE = 0.15
BAR_EFFICIENCY = 0.90
HEADLINE = {"Sync+": 2.05, "one step off": 1.35, "AReaL's admission": 1.31}
MAX_CONTEXT = 32768
HEALTHY_STEP_S = 366.0
HEALTHY_TRAINING_S = 0.23 * HEALTHY_STEP_S
HEALTHY_GENERATION_S = 0.54 * HEALTHY_STEP_S
NUM_EPISODES = 256
LENGTH_SIGMA = 0.8
ENV_SIGMA = 1.0
RESET_SIGMA = 0.2
FAILING_SHARE = 1 / 2560
FAILING_RESET_S = 147.0
REWARD_S = 5.0
STALL_S = 1.4


@dataclass(frozen=True, kw_only=True)
class TaskKind:
    """A kind of task of RollArt."""

    turns: tuple[int, int]
    """Its published least and largest number."""
    num_prompt: int
    num_reply: int
    max_reply: int
    env_s: float
    reset_s: float
    is_decode_heavy: bool = False


TASKS = {
    "swe": TaskKind(turns=(30, 50), num_prompt=500, num_reply=150, max_reply=2048, env_s=0.5, reset_s=55.0),
    "webshop": TaskKind(turns=(5, 30), num_prompt=800, num_reply=60, max_reply=128, env_s=0.1, reset_s=1.0),
    "frozenlake": TaskKind(turns=(20, 100), num_prompt=200, num_reply=60, max_reply=128, env_s=0.1, reset_s=1.0),
    "gemmath": TaskKind(
        turns=(1, 4), num_prompt=100, num_reply=1750, max_reply=8192, env_s=0.1, reset_s=1.0, is_decode_heavy=True
    ),
    "gemgame": TaskKind(
        turns=(1, 1), num_prompt=100, num_reply=1750, max_reply=8192, env_s=0.1, reset_s=1.0, is_decode_heavy=True
    ),
}
SITE = """
name = "pools"
scheduler = "slurm"
het_jobs = "yes"
[partitions.h800]
slurm_partition = "h800"
gpu = "h800"
gpus_per_node = 8
cores_per_node = 96
mem_gib_per_node = 2000
max_walltime_min = 10000
max_nodes = 64
[partitions.h20]
slurm_partition = "h20"
gpu = "h20"
gpus_per_node = 8
cores_per_node = 96
mem_gib_per_node = 2000
max_walltime_min = 10000
max_nodes = 64
[partitions.cpu]
slurm_partition = "cpu"
cores_per_node = 128
mem_gib_per_node = 500
max_walltime_min = 10000
max_nodes = 64
"""
RECIPE = """
name = "papers"
[model]
path = "/models/qwen3-8b"
[model.config]
model_type = "qwen3"
hidden_size = 4096
num_hidden_layers = 36
num_attention_heads = 32
num_key_value_heads = 8
head_dim = 128
intermediate_size = 12288
vocab_size = 151936
max_position_embeddings = 32768
[rollout]
group_size = 8
max_running = 512
max_lag = 1
[train]
num_steps = 12
groups_per_step = 32
learning_rate = 1e-6
[engine]
backend = "vllm"
max_model_len = 32768
[resources.train]
num_workers = 16
[resources.decode]
num_workers = 24
[resources.prefill]
num_workers = 8
[resources.env]
num_workers = 4
[router]
remote_prefill = "never"
[job]
walltime_min = 9000
"""
DOMAIN = """
[domains.{name}]
env = "hpcrl.envs.gymnasium_text:FrozenLake"
max_turns = {task.turns[1]}
usual_prompt_tokens = {task.num_prompt}
usual_reply_tokens = {task.num_reply}
max_new_tokens = {task.max_reply}
"""
BY_HARDWARE = tuple(
    f"router.affinity.{name}={'bandwidth' if task.is_decode_heavy else 'compute'}" for name, task in TASKS.items()
)
ONLY_H800 = ("resources.decode.affinity=compute", "resources.decode.num_workers=16", "resources.prefill.num_workers=0")
SYNC = ("rollout.mode=sync", "rollout.max_running=256")


@dataclass(frozen=True, kw_only=True)
class PublishedEpisodes:
    """Episodes of these kinds of tasks; resets fail at times."""

    tasks: dict[str, TaskKind]
    failing_share: float = FAILING_SHARE

    def draw(self, domain: str, *, seed: str) -> EpisodeScript:
        """Draw one; it ends early where the conversation fills the context."""
        draw, task, room = random.Random(seed), self.tasks[domain], MAX_CONTEXT
        reset_s = _draw_lognormal(draw, task.reset_s, RESET_SIGMA)
        if draw.random() < self.failing_share:
            reset_s += FAILING_RESET_S
        turns: list[TurnScript] = []
        for _ in range(draw.randint(*task.turns)):
            num_fresh = 1 + round(_draw_lognormal(draw, task.num_prompt, LENGTH_SIGMA))
            num_reply = min(task.max_reply, 1 + round(_draw_lognormal(draw, task.num_reply, LENGTH_SIGMA)))
            env_s = _draw_lognormal(draw, task.env_s, ENV_SIGMA)
            room -= num_fresh + num_reply
            if room < 0 and turns:
                break
            turns.append(TurnScript(num_fresh, num_reply, env_s))
        return EpisodeScript(reset_s, tuple(turns))


def _draw_lognormal(draw: random.Random, mean: float, sigma: float) -> float:
    return mean * exp(draw.gauss(-sigma * sigma / 2, sigma))


def measure(full: bool, *, only: str | None) -> list[Figure]:
    num_steps = 12 if full else 6
    parts: dict[str, Callable[[], list[Figure]]] = {
        "inputs": partial(_input_figures, num_steps),
        "headline": partial(_headline_figures, num_steps),
        "alpha": partial(_alpha_figures, num_steps),
        "redundancy": partial(_redundancy_figures, num_steps),
        "scaling": _scaling_figures,
    }
    return [figure for name in ([only] if only else parts) for figure in parts[name]()]


def _load(names: tuple[str, ...], settings: tuple[str, ...]) -> CampaignRequest:
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as folder:
        recipe, site = Path(folder) / "papers.toml", Path(folder) / "pools.toml"
        recipe.write_text(RECIPE + "".join(DOMAIN.format(name=name, task=TASKS[name]) for name in names))
        site.write_text(SITE)
        return load_request(str(recipe), site=str(site), settings=settings)


def _simulate(
    *settings: str, num_steps: int, source: PublishedEpisodes, waits_for_old: bool = True
) -> SimulationResult:
    request = _load(tuple(source.tasks), settings)
    given = SimulationSettings(num_steps=num_steps, reward_s=REWARD_S, stall_s=STALL_S, waits_for_old=waits_for_old)
    return simulate_campaign(request, find_sizes(request), source, given)


def _step_s(*settings: str, num_steps: int, waits_for_old: bool = True) -> float:
    """Return the mean time of a simulated step."""
    source = PublishedEpisodes(tasks=TASKS)
    result = _simulate(*settings, num_steps=num_steps, source=source, waits_for_old=waits_for_old)
    assert result.step_s is not None
    return result.step_s


def _input_figures(num_steps: int) -> list[Figure]:
    """Compare a healthy step of SWE tasks, of which only resets and the rest are inputs."""
    source = PublishedEpisodes(tasks={"swe": TASKS["swe"]}, failing_share=0.0)
    result = _simulate(*SYNC, *ONLY_H800, num_steps=num_steps, source=source)
    assert result.step_s is not None
    given_s = HEALTHY_STEP_S - HEALTHY_TRAINING_S - HEALTHY_GENERATION_S
    generation_s = result.step_s - result.train_s - given_s
    replies = [turn.num_reply for turn in _draw_replies("gemmath", NUM_EPISODES)]
    return [
        Figure(name="RollArt: healthy step of SWE (published 366)", value=result.step_s, unit="s"),
        Figure(name="the same: training (published 0.23)", value=result.train_s / result.step_s, unit="share"),
        Figure(name="the same: generation (published 0.54)", value=generation_s / result.step_s, unit="share"),
        Figure(
            name="longest reply of a step of GEM-math / mean (published 5 to 9)", value=max(replies) / fmean(replies)
        ),
    ]


def _draw_replies(name: str, num: int) -> list[TurnScript]:
    source = PublishedEpisodes(tasks=TASKS)
    return [source.draw(name, seed=str(number)).turns[0] for number in range(num)]


def _headline_figures(num_steps: int) -> list[Figure]:
    own = _step_s(*BY_HARDWARE, num_steps=num_steps)
    others = {
        "Sync+": _step_s(*ONLY_H800, *SYNC, num_steps=num_steps),
        "one step off": _step_s(*ONLY_H800, "rollout.mode=one-step-off", num_steps=num_steps),
        "AReaL's admission": _step_s(*ONLY_H800, num_steps=num_steps),
    }
    figures = [Figure(name="RollArt: time of a step", value=own, unit="s")]
    for name, published in HEADLINE.items():
        ratio = others[name] / own
        figures += [
            Figure(name=f"RollArt: {name} / hpcrl (published {published})", value=ratio),
            Figure(
                name=f"RollArt: {name}: off the published ratio by",
                value=abs(ratio / published - 1),
                unit="share",
                bar=BAR_HEADLINE,
                better="lower",
            ),
        ]
    return figures


def _alpha_figures(num_steps: int) -> list[Figure]:
    """Compare limits of staleness; RollArt gains at most 1.22 from alpha 1 to 6."""
    one, two, six = (_step_s(*BY_HARDWARE, f"rollout.max_lag={alpha}", num_steps=num_steps) for alpha in (1, 2, 6))
    cut = _step_s(*BY_HARDWARE, num_steps=num_steps, waits_for_old=False)
    return [
        Figure(name="RollArt: alpha 1 / alpha 2 (published: at most 1.22)", value=one / two),
        Figure(name="RollArt: alpha 1 / alpha 6 (published: at most 1.22)", value=one / six),
        Figure(name="RollArt: alpha 1 / alpha 6, old episodes cut", value=cut / six),
    ]


def _redundancy_figures(num_steps: int) -> list[Figure]:
    """Compare redundancy of groups in synchronous steps; RollArt gains 1.00 to 1.62."""
    sync = (*BY_HARDWARE, "rollout.mode=sync", "rollout.max_running=512")
    base = _step_s(*sync, num_steps=num_steps)
    larger = _step_s(*sync, "rollout.redundancy=4", "rollout.late_after_s=0", num_steps=num_steps)
    more = _step_s(*sync, "rollout.spare_groups=4", num_steps=num_steps)
    return [
        Figure(name="RollArt: 32 x 8 / 32 x 12 (published 1.00 to 1.62)", value=base / larger),
        Figure(name="RollArt: 32 x 8 / 36 x 8 (published 1.00 to 1.62)", value=base / more),
    ]


def _scaling_figures() -> list[Figure]:
    """Compute DistFlow's scaling from what moves where.

    Assumed: every rank has 8 samples of 8,192 tokens a step, whose work takes 100 s; a token has 40 bytes in all stages
    (ids, masks, log-probs of three models, advantages, rewards), and multimodal samples 20 MB more; a single controller
    receives and sends all of it between five stages over one 200 Gbit/s port, with 1 GB/s of serialization, and has
    1 TiB of memory; with a controller on each rank, ranks read their own shares, and every doubling of ranks adds a
    collective of 50 ms and 0.5 % of stragglers.
    """
    work_s, samples, stages = 100.0, 8, 5
    sample_bytes = 8192 * 40 + 20e6
    figures, many_efficiencies, single = [], {}, {}
    for ranks in (32, 64, 128, 256, 512, 1024):
        doublings = ranks.bit_length() - 1
        many_s = work_s * (1 + 0.005 * doublings) + 0.05 * doublings + samples * sample_bytes / LINK_BYTES_PER_S
        moved = ranks * samples * sample_bytes * stages * 2
        single_s = work_s * (1 + 0.005 * doublings) + moved / LINK_BYTES_PER_S + moved / 1e9
        many_efficiencies[ranks], single[ranks] = work_s / many_s, work_s / single_s
        name = f"DistFlow, {ranks} ranks: one controller / many, time of a step"
        figures.append(Figure(name=name, value=single_s / many_s))
    relative = many_efficiencies[512] / many_efficiencies[32]
    return [
        *figures,
        Figure(
            name="DistFlow: efficiency at 512 ranks over 32 (published 0.90 to 0.94)", value=relative, unit="share",
            bar=BAR_EFFICIENCY,
        ),
        Figure(name="DistFlow: the same with one controller", value=single[512] / single[32], unit="share"),
    ]  # fmt: skip


OPTIONS = argparse.ArgumentParser(add_help=False)
OPTIONS.add_argument("--only", choices=("inputs", "headline", "alpha", "redundancy", "scaling"))

if __name__ == "__main__":
    options, sys.argv[1:] = OPTIONS.parse_known_args()
    sys.exit(main("papers", partial(measure, only=options.only)))
