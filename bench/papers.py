"""Set figures of RollArt and DistFlow beside what the simulator and the cost model give: `python -m bench.papers`.

    headline     RollArt: time of a step of Sync+ (its environments and rewards asynchronous), one step off, and AReaL's
                 admission without affinity, each over that of hpcrl's defaults
    alpha        RollArt: time of a step with alpha 1 over that with 2 and 6
    redundancy   RollArt: time of a synchronous step of 32 groups of 8 over that of more or larger groups
    scaling      DistFlow: efficiency of many controllers to 512 ranks, and of a single one to 1,024

Nothing is fitted to the published figures.
Assumed are, since the papers do not give them: an 8B model (Qwen3-8B's sizes), 16 H800 that train and 24 H20 that
generate, 32 groups of 8 episodes a step, 30 turns at most with 700 tokens of observation and 250 of reply (lognormal,
sigma 0.8), environments of 5 s a step (sigma 1) and 30 s to reset, a reward of 10 s; the published ratios are times to
a score, those here are times of a step. AReaL's admission is hpcrl's (the formula is the same), with one kind of GPU:
8 H800 generate, which cost as much as 24 H20. DistFlow is not a simulation, but arithmetic with the inputs of
`_scaling_figures`. Not here: affinity, trajectories in lockstep, rewards elsewhere (bench.router and bench.rollout play
those with the env worker itself) and the exposed time of new weights.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.figures import Figure, main
from hpcrl.campaign.request import CampaignRequest, load_request
from hpcrl.hardware.cost_model import LINK_BYTES_PER_S
from hpcrl.simulation.campaign import SimulationSettings, simulate_campaign
from hpcrl.simulation.sizes import find_sizes
from hpcrl.simulation.workload import DrawnEpisodes, LatencySettings

BAR_HEADLINE = 0.15
BAR_EFFICIENCY = 0.90
HEADLINE = {"Sync+": 2.05, "one step off": 1.35, "AReaL's admission": 1.31}
LATENCIES = LatencySettings(env_s=5.0, env_sigma=1.0, reset_s=30.0, length_sigma=0.8)
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
[domains.swe]
env = "hpcrl.envs.gymnasium_text:FrozenLake"
max_turns = 30
usual_prompt_tokens = 700
usual_reply_tokens = 250
max_new_tokens = 4096
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
num_workers = 0
[resources.env]
num_workers = 4
[job]
walltime_min = 9000
"""


def measure(full: bool, *, only: str | None) -> list[Figure]:
    num_steps = 12 if full else 6
    parts: dict[str, Callable[[], list[Figure]]] = {
        "headline": partial(_headline_figures, num_steps),
        "alpha": partial(_alpha_figures, num_steps),
        "redundancy": partial(_redundancy_figures, num_steps),
        "scaling": _scaling_figures,
    }
    return [figure for name in ([only] if only else parts) for figure in parts[name]()]


def _load(*settings: str) -> CampaignRequest:
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as folder:
        recipe, site = Path(folder) / "papers.toml", Path(folder) / "pools.toml"
        recipe.write_text(RECIPE)
        site.write_text(SITE)
        return load_request(str(recipe), site=str(site), settings=settings)


def _step_s(*settings: str, num_steps: int) -> float:
    """Return the mean time of a simulated step."""
    request = _load(*settings)
    source = DrawnEpisodes(request.recipe, LATENCIES)
    result = simulate_campaign(
        request, find_sizes(request), source, SimulationSettings(num_steps=num_steps, reward_s=10.0)
    )
    assert result.step_s is not None
    return result.step_s


def _headline_figures(num_steps: int) -> list[Figure]:
    own = _step_s(num_steps=num_steps)
    others = {
        "Sync+": _step_s("rollout.mode=sync", "rollout.max_running=256", num_steps=num_steps),
        "one step off": _step_s("rollout.mode=one-step-off", num_steps=num_steps),
        "AReaL's admission": _step_s(
            "resources.decode.affinity=compute", "resources.decode.num_workers=8", num_steps=num_steps
        ),
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
    one, two, six = (_step_s(f"rollout.max_lag={alpha}", num_steps=num_steps) for alpha in (1, 2, 6))
    return [
        Figure(name="RollArt: alpha 1 / alpha 2 (published: at most 1.22)", value=one / two),
        Figure(name="RollArt: alpha 1 / alpha 6 (published: at most 1.22)", value=one / six),
    ]


def _redundancy_figures(num_steps: int) -> list[Figure]:
    """Compare redundancy of groups in synchronous steps; RollArt gains 1.00 to 1.62."""
    sync = ("rollout.mode=sync", "rollout.max_running=512")
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
OPTIONS.add_argument("--only", choices=("headline", "alpha", "redundancy", "scaling"))

if __name__ == "__main__":
    options, sys.argv[1:] = OPTIONS.parse_known_args()
    sys.exit(main("papers", partial(measure, only=options.only)))
