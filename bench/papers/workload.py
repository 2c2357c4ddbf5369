"""RollArt's campaigns, as far as they are published, for the simulator: tasks, GPUs, recipe.

TaskKind, TASKS      its kinds of tasks
PublishedEpisodes    their episodes
load_recipe          a recipe with some of these tasks
simulate_steps       steps of a campaign
measure_step_s       the mean time of one, with all tasks
measure_rollout_s    the mean time of a rollout, in synchronous steps
"""

import random
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp
from pathlib import Path

from hpcrl.campaign.request import CampaignRequest, load_request
from hpcrl.config.recipe import HardwareKind
from hpcrl.simulation.campaign import SimulationSettings, simulate_campaign
from hpcrl.simulation.result import SimulationResult
from hpcrl.simulation.sizes import find_sizes
from hpcrl.simulation.workload import EpisodeScript, TurnScript

MAX_CONTEXT = 32768
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
LIKE_ROLLART = tuple(f"router.affinity.{name}={'compute' if name == 'frozenlake' else 'bandwidth'}" for name in TASKS)
"""RollArt's example: FrozenLake on H800, and the rest on H20."""


def use_one_pool(affinity: HardwareKind, *, num_gpus: int) -> tuple[str, ...]:
    """Return the settings with which one kind of GPU generates: "compute" is H800, "bandwidth" H20."""
    decode = (f"resources.decode.affinity={affinity}", f"resources.decode.num_workers={num_gpus}")
    return (*decode, "resources.prefill.num_workers=0")


ONLY_H800 = use_one_pool("compute", num_gpus=16)
ONLY_H20 = use_one_pool("bandwidth", num_gpus=48)
SYNC = ("rollout.mode=sync", "rollout.max_running=256")


@dataclass(frozen=True, kw_only=True)
class PublishedEpisodes:
    """Episodes of these kinds of tasks; resets fail at times."""

    tasks: Mapping[str, TaskKind]
    failing_share: float = FAILING_SHARE
    latency: tuple[float, float] | None = None
    """The mean and sigma of the normal distribution that replaces a kind's times of the environment."""

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
            env_s = self._draw_env_s(draw, task)
            room -= num_fresh + num_reply
            if room < 0 and turns:
                break
            turns.append(TurnScript(num_fresh, num_reply, env_s))
        return EpisodeScript(reset_s, tuple(turns))

    def _draw_env_s(self, draw: random.Random, task: TaskKind) -> float:
        if self.latency is None:
            return _draw_lognormal(draw, task.env_s, ENV_SIGMA)
        return max(0.0, draw.gauss(*self.latency))


def _draw_lognormal(draw: random.Random, mean: float, sigma: float) -> float:
    return mean * exp(draw.gauss(-sigma * sigma / 2, sigma))


def load_recipe(names: Iterable[str], settings: tuple[str, ...]) -> CampaignRequest:
    """Load the recipe with these kinds of tasks, on the two pools of GPUs."""
    with tempfile.TemporaryDirectory(prefix="hpcrl-bench-") as folder:
        recipe, site = Path(folder) / "papers.toml", Path(folder) / "pools.toml"
        recipe.write_text(RECIPE + "".join(DOMAIN.format(name=name, task=TASKS[name]) for name in names))
        site.write_text(SITE)
        return load_request(str(recipe), site=str(site), settings=settings)


def simulate_steps(
    *settings: str,
    num_steps: int,
    source: PublishedEpisodes,
    stall_s: float | None = STALL_S,
    waits_for_old: bool = True,
) -> SimulationResult:
    """Simulate steps; engines pause for `stall_s` for new weights, None: as long as the cost model estimates."""
    request = load_recipe(source.tasks, settings)
    given = SimulationSettings(
        num_steps=num_steps, reward_s=REWARD_S, stall_s=stall_s, travel_s=0.0, waits_for_old=waits_for_old
    )
    return simulate_campaign(request, find_sizes(request), source, given)


def measure_step_s(
    *settings: str, num_steps: int, stall_s: float | None = STALL_S, waits_for_old: bool = True
) -> float:
    """Return the mean time of a step with all kinds of tasks."""
    source = PublishedEpisodes(tasks=TASKS)
    result = simulate_steps(*settings, num_steps=num_steps, source=source, stall_s=stall_s, waits_for_old=waits_for_old)
    assert result.step_s is not None
    return result.step_s


def measure_rollout_s(*settings: str, num_steps: int, source: PublishedEpisodes) -> float:
    """Return the mean time of a synchronous step without training, rewards and new weights."""
    result = simulate_steps(*SYNC, *settings, num_steps=num_steps, source=source)
    assert result.step_s is not None
    return result.step_s - result.train_s - REWARD_S - STALL_S
