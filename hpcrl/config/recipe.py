"""What to learn. A recipe has no machine words; where it runs is the site's business.

Every table of a recipe is one struct here, with the meaning under each field; a field without a default is required.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hpcrl.config.toml import NAME_PATTERN, USER_CODE_PATTERN, load_table, to_struct
from hpcrl.errors import ConfigError

Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
UserCode = Annotated[str, Meta(pattern=USER_CODE_PATTERN)]
"""`package.module:name`, importable where the workers run."""
Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
RoleName = Literal["env", "prefill", "decode", "reward", "train"]
Affinity = Literal["compute", "bandwidth", "cpu"]
RolloutMode = Literal["async", "one-step-off", "sync"]
ROLES: tuple[RoleName, ...] = ("env", "prefill", "decode", "reward", "train")


class ConfigTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all tables share: frozen, by keyword, nothing unknown."""


class TinyModel(ConfigTable, frozen=True, kw_only=True):
    """A seeded Qwen2 made on the spot with a character tokenizer, for demos and tests."""

    hidden_size: Count = 64
    num_layers: Count = 2
    num_heads: Count = 2
    num_kv_heads: Count = 1
    context_length: Count = 512


class ModelConfig(ConfigTable, frozen=True, kw_only=True):
    """What is trained: a directory that transformers can load, or a tiny model made on the spot."""

    path: str | None = None
    tiny: TinyModel | None = None
    num_params: Annotated[int, Meta(ge=10**6, le=10**13)] | None = None
    """Number of weights (not of billions), by which a plan reckons memory and workers: it does not look into `path`."""


class DomainConfig(ConfigTable, frozen=True, kw_only=True):
    """A kind of task: its environment, its reward, its limits."""

    env: UserCode
    reward: UserCode = "hpcrl.envs.base:env_reward"
    """Scores a finished trajectory; the default is the sum of what the environment gave."""
    reward_options: dict[str, Any] = {}
    """Passed to the reward function as keyword arguments."""
    options: dict[str, Any] = {}
    """Passed to the environment as keyword arguments."""
    isolation: Literal["none", "process", "sandbox"] = "none"
    """Where the environment's code runs: in the env worker, in a process of its own, or in one that is also shut in."""
    env_memory_gib: Annotated[float, Meta(gt=0)] = 0.5
    """With isolation: how much memory each of the environment's processes may fill; also set aside for each program."""
    env_cpu_s: Count = 3600
    """With isolation: how much CPU time the environment may use in an episode."""
    weight: Annotated[float, Meta(gt=0)] = 1.0
    """Share of the tasks that come from this domain, relative to the others."""
    held_out: bool = False
    """Never trained on, only evaluated ([evaluation])."""
    max_turns: Count = 16
    usual_prompt_tokens: Count = 256
    """What an observation has, or a question: only the planner reckons with it."""
    usual_reply_tokens: Count | None = None
    """What the model says in a turn, for the planner; without it, as much as it may."""
    max_new_tokens: Count | None = None
    """Tokens the model may generate in one turn, where that is to be other than rollout.max_new_tokens."""
    create_timeout_s: Seconds = 60.0
    reset_timeout_s: Seconds = 60.0
    step_timeout_s: Seconds = 60.0
    episode_timeout_s: Seconds = 3600.0
    """For the whole episode: all its attempts, and what the model says."""
    env_retries: CountOrZero = 2
    """How often an episode is begun anew after an infrastructure fault."""


class RolloutConfig(ConfigTable, frozen=True, kw_only=True):
    """How episodes are sampled."""

    group_size: Annotated[int, Meta(ge=2)]
    """Episodes of the same task that are compared with each other."""
    mode: RolloutMode = "async"
    """Episodes on their own timelines; or whole batches, one ahead of training; or none before training is done."""
    redundancy: CountOrZero = 0
    """Extra episodes per group; the first `group_size` to finish are kept, the rest are aborted."""
    spare_groups: CountOrZero = 0
    """In modes that wait: extra groups per batch; the first that training needs are kept, the rest are aborted."""
    replacements: CountOrZero = 8
    """How many lost episodes of a group are begun anew before the whole group is given up."""
    groups_ahead: CountOrZero = 1
    """Groups whose environments each env worker makes and resets before they are needed."""
    max_env_faults: Share = 0.5
    """The share of an environment's episodes that may end in faults before it is paused; others go on."""
    curriculum: UserCode | None = None
    """A function (recent rewards by domain) -> weights by domain, asked now and then."""
    max_lag: CountOrZero = 1
    """How many versions behind the newest an episode may be (alpha)."""
    max_running: Count = 128
    """Episodes in flight at once, over all env workers."""
    max_new_tokens: Count = 256
    """Tokens the model may generate in one turn."""
    temperature: Annotated[float, Meta(gt=0)] = 1.0

    @property
    def episodes_per_group(self) -> int:
        """The number of episodes that a group starts with; it keeps `group_size` of them."""
        return self.group_size + self.redundancy


class SpoolConfig(ConfigTable, frozen=True, kw_only=True):
    """How trajectories are stored, and for how long."""

    seal_after_s: Seconds = 2.0
    """Trajectories become durable at least this often; longer makes fewer and larger files."""
    max_segment_mib: Count = 64
    """A file that has grown to this is closed before its time; those of the archive are about this large."""
    compression: Literal["none", "zstd", "lz4", "blosc"] = "none"
    """Smaller files that cost CPU time and are not mapped but copied; needs Python package hdf5plugin."""
    keep: Literal["all", "versions", "none"] = "all"
    """What becomes of trajectories that training is done with: archived, archived for a while, or removed."""
    archive_versions: Count = 100
    """With keep = "versions": how many versions of the weights back the archive reaches."""
    retire_after_s: Annotated[float, Meta(ge=0)] = 300.0
    """Files are left alone for so long after their last use: readers on other machines may have them mapped."""


class SimulatedEngineConfig(ConfigTable, frozen=True, kw_only=True):
    """What the simulated engine pretends to be; it says tokens at random, as fast as the cost model says."""

    gpu: Name | Annotated[list[Name], Meta(min_length=1)] | None = None
    """A GPU type of the catalogue, or several that the workers of a role take in turns; without it, the one that the
    worker has, or an H100."""
    config: str | None = None
    """A config.json of the model that it is as slow as; without it, the campaign's own."""
    speed: Annotated[float, Meta(gt=0)] = 1.0
    """Simulated seconds in a second."""

    @property
    def gpus(self) -> list[str]:
        """The types that are named."""
        named = self.gpu or []
        return [named] if isinstance(named, str) else named


class EngineConfig(ConfigTable, frozen=True, kw_only=True):
    """Which inference engine serves prefill and decode."""

    backend: Literal["embedded", "vllm", "sim"] = "embedded"
    """embedded: transformers in the worker's own process - vllm: a vLLM server per worker (docs/vllm.md) - sim: none
    that thinks, for trying out how a campaign of any size runs (docs/routing.md)."""
    max_batch: Count = 64
    """Sequences decoded together by one decode worker."""
    max_model_len: Count | None = None
    """Longest prompt and answer together, where that is to be less than the model allows."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What vLLM computes in; the embedded engine computes in float32."""
    pipeline_parallel: Count = 1
    """With vLLM: stages that a worker's GPUs are divided into; within a stage they share each layer."""
    cpu_kv_gib: Count = 1
    """With vLLM on CPUs: memory for KV; on GPUs it takes what the model leaves."""
    start_timeout_s: Seconds = 900.0
    """With vLLM: how long a server may take until it generates."""
    vllm_args: list[str] = []
    """With vLLM: further arguments of its server."""
    sim: SimulatedEngineConfig = SimulatedEngineConfig()


class RouterConfig(ConfigTable, frozen=True, kw_only=True):
    """How turns find their engines. Every policy can be turned off."""

    affinity: Literal["auto"] | dict[Name, Literal["compute", "bandwidth"]] = "auto"
    """Hardware by domain ("default" for the rest): a domain of compute is served whole by prefill workers where these
    have more of it than decode workers; auto: decode workers, where they differ, by the cost model."""
    mismatch_penalty: Annotated[float, Meta(ge=1)] = 2.0
    """How many times longer a turn may take on the hardware of its domain before it goes to another."""
    prefix_affinity: bool = True
    """Go back to the engine that holds the trajectory's KV, unless its turn is much less work for another."""
    migration_factor: Annotated[float, Meta(ge=1)] = 2.0
    """How many times less work a turn must be elsewhere, prompt and all, for a trajectory to leave its home."""
    remote_prefill: Literal["always", "auto", "never"] = "always"
    """auto: where the cost model says that the prompt is sooner there."""
    priority: Literal["least-attained", "arrival"] = "least-attained"
    """Whose turn goes first at a full engine: of the trajectory that had least so far, or the one that came first."""
    fair_domains: bool = True
    """Domains that used more than their weight let the others go first."""
    keep_kv: bool = True
    """Tell engines for how long the KV of a trajectory is worth keeping between its turns."""
    kv_admission: bool = True
    """A new trajectory waits while the KV of those that run fills all engines: what they drop is computed twice."""
    switch_roles: bool = False
    """A worker changes over between prefill and decode when one of them is overloaded for long."""
    sizing: Literal["recipe", "auto"] = "recipe"
    """auto: workers change over towards the split that the cost model wants for the turns seen."""
    log_share: Share = 0.0
    """Share of the decisions that are told as events."""


class PipelineNode(ConfigTable, frozen=True, kw_only=True):
    """A node of the learning pipeline: one of the user's, or what one of ours is to take. docs/learning.md."""

    function: UserCode | None = None
    """Called with the results of its inputs, in their order."""
    inputs: list[Name] = []
    """Names of other nodes."""
    role: Literal["policy", "reference", "critic", "reward", "rollout"] | None = None
    """Whose work it is; the user's nodes are the policy's: the trainer runs them."""
    options: dict[str, Any] = {}
    """Passed to the function as keyword arguments."""


class TrainConfig(ConfigTable, frozen=True, kw_only=True):
    """How the model learns. docs/learning.md names the paper of every choice."""

    num_steps: Count
    groups_per_step: Count
    trainer: Literal["torch", "megatron"] = "torch"
    sharding: Literal["none", "full"] = "none"
    """With several ranks of trainer "torch": every rank holds the whole model (DDP), or a share of it (FSDP2)."""
    tensor_parallel: Count = 1
    """With trainer "megatron": ranks that share each layer."""
    pipeline_parallel: Count = 1
    """With trainer "megatron": ranks that share the layers in order."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the forward and backward pass; weights and optimizer are float32."""
    learning_rate: Annotated[float, Meta(gt=0)]
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from the end of the warm-up to the last step."""
    warmup_steps: CountOrZero = 0
    final_learning_rate: Annotated[float, Meta(ge=0)] = 0.0
    """Where a schedule that falls ends."""
    advantage: Literal["grpo", "dr-grpo", "rloo", "reinforce++", "reinforce++-baseline", "trloo", "gae", "sft"] = "grpo"
    """What an episode, turn or token is compared with."""
    gamma: Share = 1.0
    """What a reward counts one turn (trloo) or one token (gae) earlier."""
    gae_lambda: Share = 1.0
    critic_learning_rate: Annotated[float, Meta(gt=0)] = 1e-5
    """Of the critic that advantage "gae" needs."""
    value_clip: Annotated[float, Meta(gt=0)] | None = None
    """How far a value may move in one training step before its loss stops."""
    flat_groups: Literal["keep", "drop"] = "keep"
    """Groups whose episodes all had the same reward: they teach nothing, but count in the mean that the loss is."""
    ratio: Literal["token", "sequence"] = "token"
    """What the clip looks at: each token, or the geometric mean over its sequence (GSPO)."""
    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Meta(gt=0)] = 0.2
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """The ratio from which an episode with a negative advantage pushes no further."""
    aggregation: Literal["token", "sequence", "fixed"] = "token"
    """What counts the same in the mean: every token, every sequence, or every token over a constant length."""
    proximal: Literal["recomputed", "behaviour"] = "recomputed"
    """What the clip measures from: the policy when the step began (decoupled PPO), or the one that acted (PPO)."""
    correction: Literal["none", "token", "sequence", "mask-token", "mask-sequence"] = "token"
    """Importance weight of proximal / behaviour, per token or sequence: truncated, or zero outside the limits."""
    max_is_ratio: Annotated[float, Meta(ge=1)] = 2.0
    """Limit of the importance ratio between the policy at the start of the step and the one that acted."""
    min_is_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """The lower limit, for corrections that mask."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """Estimator of KL(current || the model that training began with); it costs a second model in memory."""
    kl_coef: Annotated[float, Meta(ge=0)] = 0.001
    entropy_coef: Annotated[float, Meta(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    tokens_per_micro_batch: Count = 16384
    """Padded tokens in one forward pass; gradients accumulate over as many as a step needs."""
    rows: Literal["padded", "packed"] = "padded"
    """In a forward pass: a row for each trajectory, or all of them in one row, each seeing only itself."""
    lora_rank: CountOrZero = 0
    """Above 0 only adapters of this rank are trained, on all linear layers (LoRA, needs the package peft)."""
    lora_alpha: Annotated[float, Meta(gt=0)] = 32.0
    """What an adapter adds counts lora_alpha / lora_rank."""
    num_minibatches: Count = 1
    """Optimizer steps per training step, each on a part of its trajectories; above 1 the policy moves in between."""
    max_skipped_steps: Count = 5
    """Steps in a row that were not finite and changed nothing, after which the campaign fails instead of idling on."""
    checkpoint_every_steps: Count = 10
    keep_checkpoints: Count = 2
    keep_best: CountOrZero = 0
    """Checkpoints kept besides the newest: those with the highest mean reward, of evaluations if there are any."""
    keep_versions: Count = 4
    pipeline: dict[Name, PipelineNode] = {}
    """Nodes besides those of `advantage` and the loss, by name."""


class EvaluationConfig(ConfigTable, frozen=True, kw_only=True):
    """What is measured now and then on tasks that are never trained on, with the newest weights. docs/learning.md."""

    every_versions: CountOrZero = 0
    """0: never. The first evaluation is of the weights that training begins with."""
    num_episodes: Count = 64
    """Of each domain: the same tasks every time, with seeds that no training task has."""
    domains: list[Name] = []
    """Which; none named: all."""
    options: dict[Name, dict[str, Any]] = {}
    """By domain, what its environment is given besides its options or in place of them, such as a test split."""
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    """0: the likeliest token every time."""
    patience_s: Seconds = 600.0
    """How long the end of training waits for the last evaluation."""


class MetricsConfig(ConfigTable, frozen=True, kw_only=True):
    """Where the figures of every step go besides the events, under CAMPAIGN/metrics. docs/learning.md."""

    tensorboard: bool = False
    """Event files for TensorBoard; needs Python package tensorboard."""
    wandb: Literal["off", "offline", "online"] = "off"
    """A run of Weights & Biases, offline for `wandb sync` later; needs Python package wandb."""
    wandb_project: str = "hpcrl"


class WorkerResources(ConfigTable, frozen=True, kw_only=True):
    """What one role asks for; the site and the planner decide where that is."""

    num_workers: Count = 1
    gpus_per_worker: CountOrZero = 0
    cpus_per_worker: Count = 1
    mem_gib_per_worker: Annotated[float, Meta(gt=0)] = 4.0
    affinity: Affinity = "cpu"
    """compute: FLOP/s first (prefill, training) - bandwidth: memory bandwidth first (decode) - cpu: no GPU."""


class EngineResources(WorkerResources, frozen=True, kw_only=True):
    """The same of prefill and decode."""

    num_workers: CountOrZero = 0
    """0: the planner chooses, by the model's size, the GPUs, and the domains' usual lengths; 1 where it cannot."""


class ComputeResources(WorkerResources, frozen=True, kw_only=True):
    """The same, with the defaults of train."""

    gpus_per_worker: CountOrZero = 1
    affinity: Affinity = "compute"


class PrefillResources(EngineResources, frozen=True, kw_only=True):
    """The same, with the defaults of prefill."""

    gpus_per_worker: CountOrZero = 1
    affinity: Affinity = "compute"


class DecodeResources(EngineResources, frozen=True, kw_only=True):
    """The same, with the defaults of decode."""

    gpus_per_worker: CountOrZero = 1
    affinity: Affinity = "bandwidth"


class RewardConfig(ConfigTable, frozen=True, kw_only=True):
    """Where rewards are computed; how much each of their workers needs is in resources.reward."""

    placement: Literal["spare", "elastic"] = "spare"
    """On spare cores of the job, or in preemptible jobs of their own that are there only while there is work."""
    max_jobs: Count = 2
    """Of such jobs at a time; each is one node."""
    idle_s: Seconds = 20.0
    """A reward job that has had no work for so long is ended."""
    patience_s: Seconds = 120.0
    """What no reward job has taken for so long is scored on spare cores."""


class RewardResources(WorkerResources, frozen=True, kw_only=True):
    """The same, with the defaults of reward."""

    mem_gib_per_worker: Annotated[float, Meta(gt=0)] = 1.0


class RoleResources(ConfigTable, frozen=True, kw_only=True):
    """Resources of the five roles; each has its own defaults, also when its table is given in part."""

    env: WorkerResources = WorkerResources()
    prefill: PrefillResources = PrefillResources()
    decode: DecodeResources = DecodeResources()
    reward: RewardResources = RewardResources()
    train: ComputeResources = ComputeResources()


class JobConfig(ConfigTable, frozen=True, kw_only=True):
    """Limits of one job of the campaign."""

    walltime_min: Count = 60
    num_jobs: Count = 1
    """In a row, each begun by Slurm when the one before has ended; one that a person resumes begins anew to count."""
    drain_s: Seconds = 60.0
    """How long before the end of the allocation new episodes stop and the last checkpoint is made."""
    survive_node_loss: bool = False
    """At least two nodes a component, and `--no-kill`; a node without the driver or the trainer may then be lost."""
    layout: Literal["auto", "hetjob", "hetstep"] = "auto"
    """hetjob: a heterogeneous job; hetstep: one allocation, its nodes dealt to the roles; auto: what the site runs."""
    stall_timeout_min: Annotated[float, Meta(gt=0)] = 15.0
    """A job in which nothing has moved for so long is ended, so that nodes are never held idle."""


class Recipe(ConfigTable, frozen=True, kw_only=True):
    """A whole recipe."""

    name: Name
    seed: CountOrZero = 0
    description: str = ""
    model: ModelConfig
    domains: Annotated[dict[Name, DomainConfig], Meta(min_length=1)]
    rollout: RolloutConfig
    train: TrainConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    metrics: MetricsConfig = MetricsConfig()
    spool: SpoolConfig = SpoolConfig()
    reward: RewardConfig = RewardConfig()
    engine: EngineConfig = EngineConfig()
    router: RouterConfig = RouterConfig()
    resources: RoleResources = RoleResources()
    job: JobConfig = JobConfig()


def load_recipe(name: str, *, settings: tuple[str, ...] = ()) -> Recipe:
    """The recipe in a file or of a name, with `-s key=value` settings applied."""
    table, source = load_table("recipes", name, settings=settings)
    recipe = to_struct(table, Recipe, source=source)
    if (recipe.model.path is None) == (recipe.model.tiny is None):
        raise ConfigError(f"{source}: [model] needs either `path` (a model directory) or [model.tiny], and not both")
    return recipe
