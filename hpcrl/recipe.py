"""What to learn. A recipe has no machine words; where it runs is the site's business.

Every table of a recipe is one struct here, with the meaning under each field; a field without a default is required.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hpcrl.config import NAME, USER_CODE, load_table, to_struct
from hpcrl.errors import ConfigError

Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
UserCode = Annotated[str, Meta(pattern=USER_CODE)]
"""`package.module:name`, importable where the workers run."""
Name = Annotated[str, Meta(pattern=NAME)]
RoleName = Literal["env", "prefill", "decode", "reward", "train"]
Affinity = Literal["compute", "bandwidth", "cpu"]
ROLES: tuple[RoleName, ...] = ("env", "prefill", "decode", "reward", "train")


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all tables share: frozen, by keyword, nothing unknown."""


class TinyModel(Table, frozen=True, kw_only=True):
    """A seeded Qwen2 made on the spot with a character tokenizer, for demos and tests."""

    hidden_size: Count = 64
    num_layers: Count = 2
    num_heads: Count = 2
    num_kv_heads: Count = 1
    context_length: Count = 512


class Model(Table, frozen=True, kw_only=True):
    """What is trained: a directory that transformers can load, or a tiny model made on the spot."""

    path: str | None = None
    tiny: TinyModel | None = None
    num_params: Count | None = None
    """Number of weights, for the plan's memory check where `path` is not readable from here."""


class Domain(Table, frozen=True, kw_only=True):
    """A kind of task: its environment, its reward, its limits."""

    env: UserCode
    reward: UserCode = "hpcrl.envs.base:env_reward"
    """Scores a finished trajectory; the default is the sum of what the environment gave."""
    options: dict[str, Any] = {}
    """Passed to the environment as keyword arguments."""
    weight: Annotated[float, Meta(gt=0)] = 1.0
    """Share of the tasks that come from this domain, relative to the others."""
    max_turns: Count = 16
    reset_timeout_s: Seconds = 60.0
    step_timeout_s: Seconds = 60.0
    env_retries: CountOrZero = 2
    """How often an episode is begun anew after an infrastructure fault."""


class Rollout(Table, frozen=True, kw_only=True):
    """How episodes are sampled."""

    group_size: Annotated[int, Meta(ge=2)]
    """Episodes of the same task that are compared with each other."""
    redundancy: CountOrZero = 0
    """Extra episodes per group; the first `group_size` to finish are kept, the rest are aborted."""
    max_lag: CountOrZero = 1
    """How many versions behind the newest an episode may be (alpha)."""
    max_running: Count = 128
    """Episodes in flight at once, over all env workers."""
    max_new_tokens: Count = 256
    """Tokens the model may generate in one turn."""
    temperature: Annotated[float, Meta(gt=0)] = 1.0


class Spool(Table, frozen=True, kw_only=True):
    """How trajectories are stored, and for how long."""

    seal_after_s: Seconds = 2.0
    """Trajectories become durable at least this often; longer makes fewer and larger files."""
    max_segment_mib: Count = 64
    """A file that has grown to this is closed before its time; those of the archive are about this large."""
    compression: Literal["none", "zstd", "lz4", "blosc"] = "none"
    """Smaller files that cost CPU time and are not mapped but copied; needs Python package hdf5plugin."""
    keep: Literal["all", "versions", "none"] = "all"
    """What becomes of trajectories that training is done with: archived, archived for a while, or removed."""
    keep_versions: Count = 100
    """With keep = "versions": how many versions of the weights back the archive reaches."""
    retire_after_s: Annotated[float, Meta(ge=0)] = 300.0
    """Files are left alone for so long after their last use: readers on other machines may have them mapped."""


class Engine(Table, frozen=True, kw_only=True):
    """Which inference engine serves prefill and decode."""

    backend: Literal["embedded"] = "embedded"
    max_batch: Count = 64
    """Sequences decoded together by one decode worker."""


class Train(Table, frozen=True, kw_only=True):
    """How the model learns."""

    num_steps: Count
    groups_per_step: Count
    trainer: Literal["torch"] = "torch"
    learning_rate: Annotated[float, Meta(gt=0)]
    advantage: Literal["grpo", "rloo"] = "grpo"
    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Meta(gt=0)] = 0.2
    max_is_ratio: Annotated[float, Meta(ge=1)] = 2.0
    """Truncation of the importance ratio between the policy at the start of the step and the one that acted."""
    entropy_coef: Annotated[float, Meta(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    tokens_per_micro_batch: Count = 16384
    """Padded tokens in one forward pass; gradients accumulate over as many as a step needs."""
    num_minibatches: Count = 1
    """Optimizer steps per training step, each on a part of its trajectories; above 1 the policy moves in between."""
    checkpoint_every_steps: Count = 10
    keep_checkpoints: Count = 2
    keep_versions: Count = 4


class Resources(Table, frozen=True, kw_only=True):
    """What one role asks for; the site and the planner decide where that is."""

    num_workers: Count = 1
    gpus_per_worker: CountOrZero = 0
    cpus_per_worker: Count = 1
    mem_gib_per_worker: Annotated[float, Meta(gt=0)] = 4.0
    affinity: Affinity = "cpu"
    """compute: FLOP/s first (prefill, training) - bandwidth: memory bandwidth first (decode) - cpu: no GPU."""


class ComputeResources(Resources, frozen=True, kw_only=True):
    """The same, with the defaults of prefill and train."""

    gpus_per_worker: CountOrZero = 1
    affinity: Affinity = "compute"


class BandwidthResources(Resources, frozen=True, kw_only=True):
    """The same, with the defaults of decode."""

    gpus_per_worker: CountOrZero = 1
    affinity: Affinity = "bandwidth"


class RewardResources(Resources, frozen=True, kw_only=True):
    """The same, with the defaults of reward."""

    mem_gib_per_worker: Annotated[float, Meta(gt=0)] = 1.0


class RoleResources(Table, frozen=True, kw_only=True):
    """Resources of the five roles; each has its own defaults, also when its table is given in part."""

    env: Resources = Resources()
    prefill: ComputeResources = ComputeResources()
    decode: BandwidthResources = BandwidthResources()
    reward: RewardResources = RewardResources()
    train: ComputeResources = ComputeResources()


class Job(Table, frozen=True, kw_only=True):
    """Limits of one job of the campaign."""

    walltime_min: Count = 60
    drain_s: Seconds = 60.0
    """How long before the end of the allocation new episodes stop and the last checkpoint is made."""
    survive_node_loss: bool = False
    """At least two nodes a component, and `--no-kill`."""
    stall_timeout_min: Annotated[float, Meta(gt=0)] = 15.0
    """A job in which nothing has moved for so long is ended, so that nodes are never held idle."""


class Recipe(Table, frozen=True, kw_only=True):
    """A whole recipe."""

    name: Name
    seed: CountOrZero = 0
    description: str = ""
    model: Model
    domains: Annotated[dict[Name, Domain], Meta(min_length=1)]
    rollout: Rollout
    train: Train
    spool: Spool = Spool()
    engine: Engine = Engine()
    resources: RoleResources = RoleResources()
    job: Job = Job()


def load_recipe(name: str, *, settings: tuple[str, ...] = ()) -> Recipe:
    """The recipe in a file or of a name, with `-s key=value` settings applied."""
    table, source = load_table("recipes", name, settings=settings)
    recipe = to_struct(table, Recipe, source=source)
    if (recipe.model.path is None) == (recipe.model.tiny is None):
        raise ConfigError(f"{source}: [model] needs either `path` (a model directory) or [model.tiny]")
    return recipe
