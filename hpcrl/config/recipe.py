"""The tables of a recipe: what to learn. Where it runs is described by the site, never here.

Each table is one struct, with the meaning under each field; a field without a default is required.
"""

import re
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hpcrl.campaign_dir.events import JobOutcome
from hpcrl.config.toml import (
    JUDGE_NAME_PATTERN,
    NAME_PATTERN,
    USER_CODE_PATTERN,
    LayeredTable,
    flatten_table,
    to_struct,
)
from hpcrl.errors import ConfigError
from hpcrl.hardware.architecture import ModelArchitecture, guess_architecture, read_architecture
from hpcrl.hardware.degrees import DEGREES, ParallelDegrees
from hpcrl.system.files import find_variables

Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
BetaShare = Annotated[float, Meta(ge=0, lt=1)]
UserCode = Annotated[str, Meta(pattern=USER_CODE_PATTERN)]
"""`package.module:name`, importable where the workers run."""
Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
JudgeName = Annotated[str, Meta(pattern=JUDGE_NAME_PATTERN)]
RoleName = str
"""One of ROLES, or the role of a judge's engines: "judge-NAME"."""
MAX_REWARD = 1e6
"""The largest size of a reward; one beyond the range of float32 would end a campaign."""
FailureReward = Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)] | Literal["score", "fault"]
"""A reward; "score": what the reward function gives the episode as it is; "fault": retried, and never scored."""
Affinity = Literal["compute", "bandwidth", "cpu"]
HardwareKind = Literal["compute", "bandwidth"]
Compression = Literal["none", "zstd", "lz4", "blosc"]
RewardUnit = Literal["episode", "turn", "token"]
NodeRole = Literal["rollout", "reward", "reference", "critic", "policy"]
RolloutMode = Literal["async", "one-step-off", "sync"]
ROLES: tuple[RoleName, ...] = ("env", "prefill", "decode", "reward", "train")
PLACED_ROLES: tuple[RoleName, ...] = ("env", "prefill", "decode", "train")
"""Roles with their own component, in the order of the components; rewards use spare cores of env's."""
JUDGE_ROLE_PREFIX = "judge-"
KEY_OPTIONS = re.compile(r"(^|[._])key_var(iable)?$")
"""The options that name the variable of a key: `key_variable`, or what ends so."""
JUDGE_FUNCTION, JUDGE_KEY = "hpcrl.envs.judge:judge", "OPENAI_API_KEY"
"""The reward function that asks a model elsewhere, and the variable of its key where `key_variable` names none."""
WANDB_VARIABLES = {
    "off": (),
    "offline": ("WANDB_*",),
    "online": ("WANDB_*", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"),
}
MLFLOW_VARIABLES = ("MLFLOW_*", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
"""The variables that trackers read; a pattern passes no name that looks like a secret."""
UNUSED_GROUP_SETTINGS = {"rollout": {"group_size": 2}, "train": {"num_steps": 0, "groups_per_step": 1}}
"""The settings that groups of episodes need, as a recipe without domains has them."""


class ConfigTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of all tables: frozen, keyword-only, no unknown keys."""


DEFAULT_MICRO_BATCH_TOKENS = 16384
"""The tokens of a micro-batch where no recipe and no plan has chosen them."""
MIN_PARAMS = 10**6
MIN_TINY_CONTEXT = 32
"""A conversation of one short message has about this many characters, which are a tiny model's tokens."""
TINY_VOCABULARY_SIZE = 100
"""The tokens of a tiny model (hpcrl/models/tiny_vocabulary.py)."""
NumParams = Annotated[int, Meta(ge=MIN_PARAMS, le=10**13)]


class TinyModel(ConfigTable, frozen=True, kw_only=True):
    """A seeded Qwen2 with a character tokenizer, created at start, for demos and tests."""

    hidden_size: Count = 64
    """The width of the hidden states."""
    num_layers: Count = 2
    """The number of layers."""
    num_heads: Count = 2
    """The attention heads of a layer."""
    num_kv_heads: Count = 1
    """The heads of keys and values of a layer."""
    context_length: Annotated[int, Meta(ge=MIN_TINY_CONTEXT)] = 512
    """The characters that a conversation may have; each is a token."""

    def __post_init__(self) -> None:
        head_dim, odd = divmod(self.hidden_size, self.num_heads)
        if odd or head_dim % 2 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"hidden_size = {self.hidden_size}, num_heads = {self.num_heads} and num_kv_heads = "
                f"{self.num_kv_heads} do not fit: hidden_size / num_heads must be even, num_heads / num_kv_heads whole"
            )

    @property
    def config(self) -> dict[str, Any]:
        """The fields of its config.json that have its sizes."""
        return {
            "model_type": "qwen2",
            "vocab_size": TINY_VOCABULARY_SIZE,
            "hidden_size": self.hidden_size,
            "intermediate_size": 2 * self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "max_position_embeddings": self.context_length,
            "tie_word_embeddings": False,
        }


class ModelConfig(ConfigTable, frozen=True, kw_only=True):
    """The model to train: a directory that transformers can load, or a tiny model created at start."""

    path: str | None = None
    """A model directory, beside the TOML file that sets it or in the current directory, or the name of a model on
    Hugging Face (docs/sites.md); either this or `tiny`."""
    tiny: TinyModel | None = None
    num_params: NumParams | None = None
    """Number of weights (not in billions), from which a plan estimates memory and workers where it has no `config`."""
    config: dict[str, Any] = {}
    """Fields of its config.json, for a plan on a machine that cannot read `path`; what `path` has takes precedence."""
    chat_template: str | None = None
    """A file with a Jinja template that is used in place of the model's own chat template."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as enable_thinking = false; requests of agent programs may change them."""
    system: str | None = None
    """The system message of conversations that have none."""

    @property
    def architecture(self) -> ModelArchitecture | None:
        """The architecture by `config`, else a guess by `num_params`; None if neither is known."""
        if self.config:
            return read_architecture(self.config)
        return None if self.num_params is None else guess_architecture(self.num_params)

    @property
    def has_no_experts(self) -> bool:
        """True if the model is known to have none."""
        if self.config:
            return not read_architecture(self.config).num_expert_layers
        return self.tiny is not None

    @property
    def num_weights(self) -> int | None:
        """The number of weights by `config`, else `num_params`; None if neither is known."""
        return read_architecture(self.config).num_params if self.config else self.num_params


class TaskSetConfig(ConfigTable, frozen=True, kw_only=True):
    """The data files whose rows are a domain's tasks (docs/environments.md)."""

    path: str | Annotated[list[str], Meta(min_length=1)]
    """JSON lines (.jsonl) or Parquet (.parquet), or several such files; beside the TOML file that sets it, else in
    the current directory. `hpcrl submit` copies the rows into the campaign."""
    rows: tuple[CountOrZero, CountOrZero] | None = None
    """The first row to use, and the one after the last; the default is all of them."""
    shuffle: bool = True
    """Another order in each epoch, by the recipe's seed; false: the order of the file."""
    epochs: CountOrZero = 0
    """The number of times that each row is used, after which the domain ends; 0: as often as training needs."""
    held_out_rows: CountOrZero = 0
    """The number of rows that only evaluations use, spread evenly over the file."""
    held_out_path: str | Annotated[list[str], Meta(min_length=1)] | None = None
    """Files whose rows only evaluations use, in place of `held_out_rows`."""


class DomainConfig(ConfigTable, frozen=True, kw_only=True):
    """A kind of task: its environment, its reward, its limits."""

    env: UserCode
    """The environment, as `package.module:name` (docs/environments.md)."""
    reward: UserCode = "hpcrl.envs.base:env_reward"
    """Function that scores a finished trajectory; the default is the sum of the environment's rewards."""
    reward_options: dict[str, Any] = {}
    """Keyword arguments of the reward function."""
    reward_unit: RewardUnit = "episode"
    """The unit that gets a number from the reward function: the episode (or named parts of its reward), each turn, or
    each entry of `token_ids`. Advantages "trloo" and "gae" use those of turns, "gae" those of tokens."""
    judges: list[Name] = []
    """The judges ([judge.NAME]) that its reward function or environment calls: rewards wait while one is not up."""
    options: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    isolation: Literal["none", "process", "sandbox"] = "none"
    """The place where the environment's code runs: the env worker, a separate process, or a sandboxed process."""
    python: str | None = None
    """With isolation: another interpreter, whose virtual environment has the environment's packages, and msgspec."""
    env_memory_gib: Annotated[float, Meta(gt=0)] = 0.5
    """With isolation: memory limit of each of the environment's processes; also reserved for each program."""
    env_cpu_s: Count = 3600
    """With isolation: CPU time that the environment may use in an episode."""
    weight: Annotated[float, Meta(gt=0)] = 1.0
    """Share of the tasks that come from this domain, relative to the others."""
    tasks: str | TaskSetConfig | None = None
    """The rows that are its tasks, given to the environment: a file, or a table; without them a task is a seed."""
    held_out: bool = False
    """True for a domain that is only evaluated ([evaluation]), never trained on."""
    max_turns: Count = 16
    """The turns of an episode, in each of which the model is called once."""
    usual_prompt_tokens: Count = 256
    """Typical length of an observation or a question; only the planner uses it."""
    usual_reply_tokens: Count | None = None
    """Typical length of what the model generates in a turn, for the planner; the default is the limit of a turn."""
    max_new_tokens: Count | None = None
    """Tokens the model may generate in one turn, if different from rollout.max_new_tokens."""
    create_timeout_s: Seconds = 60.0
    """Limit of the time in which the environment of an episode is created."""
    reset_timeout_s: Seconds = 60.0
    """Limit of its reset, until the first observation is there."""
    step_timeout_s: Seconds = 60.0
    """Limit of each of its steps."""
    episode_timeout_s: Seconds = 3600.0
    """Limit of the whole episode: all its attempts, including generation."""
    reward_timeout_s: Seconds = 120.0
    """Limit of one call of the reward function; a call that takes longer is killed."""
    env_retries: CountOrZero = 2
    """Restarts of an episode after infrastructure faults."""
    on_timeout: FailureReward = 0.0
    """Reward of an episode whose step, program or whole time was too long; "score": that of the reward function;
    "fault": it is restarted, and never scored."""
    on_exit: FailureReward = 0.0
    """Reward of an episode whose program, after a turn at least, exited with an error or reported no reward."""
    on_max_turns: FailureReward = "score"
    """Reward of an episode that used up `max_turns`."""
    on_overflow: FailureReward = "score"
    """Reward of an episode whose conversation filled the model's context."""
    on_reward_error: Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)] | Literal["fault"] = 0.0
    """Reward of an episode whose judge or reward function raised an error, or returned no number, or one above 1e6."""

    @property
    def task_set(self) -> TaskSetConfig | None:
        """The table of `tasks`, also if only a file is given."""
        return TaskSetConfig(path=self.tasks) if isinstance(self.tasks, str) else self.tasks


class RolloutConfig(ConfigTable, frozen=True, kw_only=True):
    """The settings for sampling episodes."""

    group_size: Annotated[int, Meta(ge=2)]
    """Number of episodes of the same task that are compared with each other."""
    mode: RolloutMode = "async"
    """async: episodes run independently; one-step-off: whole batches, one ahead of training; sync: a batch starts
    after the training step on the last one."""
    redundancy: CountOrZero = 0
    """Extra episodes per group. `group_size` are kept by their index, whichever finish first: an extra one takes the
    place of one that failed, or that is late by `late_after_s`."""
    late_after_s: Annotated[float, Meta(ge=0)] | None = None
    """Seconds from the start of a group after which any `group_size` that have finished are kept and the rest aborted:
    0 keeps the first to finish. This prefers short episodes (docs/learning.md); unset, no episode is late."""
    spare_groups: CountOrZero = 0
    """In the batch modes: extra groups per batch; the first that training needs are kept, the rest are aborted and
    started again later."""
    replacements: CountOrZero = 8
    """Lost episodes of a group that are restarted before the whole group is cancelled."""
    groups_ahead: CountOrZero = 1
    """Groups whose environments each env worker creates and resets before they are needed."""
    max_env_faults: Share = 0.5
    """The share of a domain's episodes, on average over its groups, that may end in faults before it is paused; others
    continue."""
    curriculum: UserCode | None = None
    """A function (recent rewards by domain) -> weights by domain, called periodically."""
    max_lag: CountOrZero = 1
    """Versions that an episode may be behind the newest (alpha)."""
    max_running: Count = 128
    """Episodes in flight at once, over all env workers."""
    max_new_tokens: Count = 256
    """Tokens the model may generate in one turn."""
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    """The sampling temperature of training episodes; a request of an agent program may have its own."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Only the most likely tokens that together have this probability are sampled (docs/learning.md)."""
    model_aliases: list[Annotated[str, Meta(min_length=1)]] = []
    """Further names by which agent programs may ask for the model, beside the one they are given; "*" is any name."""

    @property
    def episodes_per_group(self) -> int:
        """The number of episodes that a group starts with; it keeps `group_size` of them."""
        return self.group_size + self.redundancy


class SpoolConfig(ConfigTable, frozen=True, kw_only=True):
    """The storage of trajectories, and how long they are kept."""

    seal_after_s: Seconds = 2.0
    """Trajectories become durable at least this often; longer makes fewer and larger files."""
    max_segment_mib: Count = 64
    """A file of this size is sealed early; archive files are about this large."""
    compression: Compression = "none"
    """Compressed files are smaller, but cost CPU time and are copied, not mapped; needs the package hdf5plugin."""
    keep: Literal["all", "versions", "none"] = "all"
    """After training, trajectories are archived (all), archived for a while (versions), or removed (none)."""
    archive_versions: Count = 100
    """With keep = "versions": how many versions of the weights back the archive reaches."""
    retire_after_s: Annotated[float, Meta(ge=0)] = 300.0
    """Files are kept this long after their last use: readers on other machines may have them mapped."""


class SimulatedEngineConfig(ConfigTable, frozen=True, kw_only=True):
    """The hardware and model that the simulated engine imitates: random tokens at the cost model's speed."""

    gpu: Name | Annotated[list[Name], Meta(min_length=1)] | None = None
    """A GPU type of the catalogue, or several that the workers of a role use in turn; the default is the worker's own
    type, or an H100."""
    config: str | None = None
    """The config.json of the model whose speed is imitated; the default is the campaign's own."""
    speed: Annotated[float, Meta(gt=0)] = 1.0
    """Simulated seconds in a second."""

    @property
    def gpus(self) -> list[str]:
        """The GPU types as a list."""
        named = self.gpu or []
        return [named] if isinstance(named, str) else named


WeightsDtype = Literal["float32", "bfloat16", "float16"]
"""torch's names of the types of weights, without "torch."."""
AUTO_PARSER, VLLM_PARSER_PREFIX = "auto", "vllm:"
TOOL_PARSER_NAMES = (
    "hermes",
    "qwen3-coder",
    "glm",
    "deepseek",
    "mistral",
    "gpt-oss",
    "llama",
    "pythonic",
    "gemma",
    "phi",
    "none",
)
REASONING_PARSER_NAMES = ("think", "magistral", "gemma", "gpt-oss", "none")


class EngineConfig(ConfigTable, frozen=True, kw_only=True):
    """The inference engine that serves prefill and decode."""

    backend: Literal["embedded", "vllm", "sim"] = "embedded"
    """embedded: transformers in the worker's process; vllm: a vLLM server per worker (docs/vllm.md); sim: random
    tokens, to try out a campaign of any size (docs/routing.md)."""
    max_batch: Count = 64
    """Sequences decoded together by one decode worker."""
    max_model_len: Count | None = None
    """Limit of prompt and answer together, if below what the model allows."""
    dtype: WeightsDtype | Literal["auto"] = "auto"
    """Data type of vLLM; the embedded engine always uses float32."""
    pipeline_parallel: Count = 1
    """With vLLM: stages that a worker's GPUs are divided into; within a stage they share each layer."""
    data_parallel: Count = 1
    """With vLLM: copies of the model in a worker, among which its GPUs are divided and its requests are shared."""
    expert_parallel: bool = False
    """With vLLM and a mixture of experts: each rank of a stage, in all copies, has whole experts; else a slice of every
    expert."""
    cpu_kv_gib: Count = 1
    """With vLLM on CPUs: memory for KV; on GPUs, KV gets the memory that the model leaves free."""
    start_timeout_s: Seconds = 900.0
    """With vLLM: the time a server may take until it can generate. A turn waits as long for an engine, at least 300."""
    vllm_args: list[str] = []
    """With vLLM: further arguments of its server."""
    quantization: Literal["none", "fp8"] = "none"
    """With vLLM on GPUs. fp8: the weights of linear layers are rounded to 8 bits, with a scale for each tensor, when
    they are loaded; they are published as before."""
    seeds: bool = False
    """With vLLM: sample every request by its seed, which is slower; else only those of agents that ask for a seed."""
    keep_old_kv: bool = False
    """With vLLM: keep KV of older weights over an update, for running requests and as prefix cache (docs/vllm.md)."""
    any_vllm_version: bool = False
    """Start also a vLLM that hpcrl is not tested with, whose private parts it uses (docs/vllm.md)."""
    tool_parser: str = AUTO_PARSER
    """The parser of tool calls in generated text: a family of models (docs/agents.md), "none", or
    "vllm:NAME" for one of vLLM's parsers; auto: by the model's chat template."""
    reasoning_parser: str = AUTO_PARSER
    """The parser of thoughts, likewise."""
    sim: SimulatedEngineConfig = SimulatedEngineConfig()


class RouterConfig(ConfigTable, frozen=True, kw_only=True):
    """The policies that choose an engine for each turn; every one can be turned off."""

    affinity: Literal["auto"] | dict[Name, HardwareKind] = "auto"
    """Hardware by domain ("default" for the rest): a compute domain is served entirely by prefill workers if these
    have more compute than decode workers; auto: by decode workers, chosen by the cost model where they differ."""
    mismatch_penalty: Annotated[float, Meta(ge=1)] = 2.0
    """Factor by which a turn may take longer on the hardware of its domain before it goes to another."""
    prefix_affinity: bool = True
    """Return to the engine that holds the trajectory's KV, unless the turn is much less work for another."""
    migration_factor: Annotated[float, Meta(ge=1)] = 2.0
    """Factor by which a turn must be less work elsewhere, its whole prompt included, for a trajectory to migrate."""
    remote_prefill: Literal["always", "auto", "never"] = "auto"
    """auto: if the cost model estimates that the prompt is ready earlier there; without one, if it is not short."""
    priority: Literal["least-attained", "arrival"] = "least-attained"
    """The turn that goes first at a full engine: of the trajectory served least so far, or the first to arrive."""
    fair_domains: bool = True
    """Domains that used more than their weight go after the others."""
    keep_kv: bool = True
    """Send engines the time for which the KV of a trajectory is worth keeping between its turns."""
    kv_admission: bool = True
    """Hold new trajectories while the KV of running ones fills all engines: evicted KV is computed twice."""
    switch_roles: bool = False
    """Let a worker switch between prefill and decode when one of them is overloaded for long."""
    sizing: Literal["recipe", "auto"] = "recipe"
    """auto: workers switch towards the split that the cost model recommends for the turns seen."""
    log_share: Share = 0.0
    """Share of the decisions that are logged as events."""


class PipelineNode(ConfigTable, frozen=True, kw_only=True):
    """A node of the learning pipeline: the user's, or a changed built-in one (docs/learning.md)."""

    function: UserCode | None = None
    """Code that is called with the results of its inputs, in order."""
    inputs: list[Name] = []
    """Names of other nodes."""
    model: str | None = None
    """A model directory, of a node with role "reference": it gives the log-probs of the tokens under this model."""
    num_params: NumParams | None = None
    """Number of weights of `model`, from which a plan estimates memory; by default that of its config.json."""
    role: NodeRole | None = None
    """The role that runs it; user nodes are the policy's, which the trainer runs."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function."""
    data_parallel: Count | None = None
    """Ranks that have the node's model, each whole, where the trainer has another number of shares: batches are sent to
    them and log-probs back."""


class TrainConfig(ConfigTable, frozen=True, kw_only=True):
    """The training algorithm; docs/learning.md names the paper of every choice."""

    num_steps: CountOrZero
    """The steps of the campaign; a recipe without domains has those of its warm-up if this is left out."""
    groups_per_step: Count
    """The groups of episodes that a training step learns from."""
    trainer: Literal["torch", "megatron"] = "torch"
    """torch: PyTorch with the models of transformers; megatron: Megatron Core (docs/learning.md)."""
    sharding: Literal["auto", "none", "full"] = "auto"
    """With several ranks of trainer "torch": each holds the whole model (none: DDP), or a share of it (full: FSDP2);
    auto: a share where the plan finds that the whole does not fit."""
    tensor_parallel: Literal["auto"] | Count = "auto"
    """With trainer "megatron": ranks that share each layer. Auto, here and below: as few ranks for a copy of the model
    as the plan finds that it fits on."""
    pipeline_parallel: Literal["auto"] | Count = "auto"
    """With trainer "megatron": ranks that share the layers in order."""
    pipeline_chunks: Count = 1
    """With pipeline_parallel: the parts of the model that each rank has, in turn with the others (Megatron's virtual
    stages). With more of them ranks wait less for one another, and keep more activations."""
    expert_parallel: Literal["auto"] | Count = "auto"
    """With trainer "megatron": ranks that share the experts of each layer; tensor_parallel does not divide experts."""
    context_parallel: Literal["auto"] | Count = "auto"
    """Ranks that divide the positions of each trajectory, for long ones; it divides the model's attention heads. Auto:
    the fewest with which the plan finds that the longest trajectory fits."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the forward and backward pass; weights and optimizer are float32. Auto: bf16 on GPUs that
    compute in it."""
    recompute: Literal["auto"] | bool = "auto"
    """Layers keep only their inputs for the gradient, and compute the rest again; auto: where the plan finds that the
    micro-batches do not fit otherwise, and with sharding = "full" without known sizes."""
    compile: bool = False
    """With trainer "torch": layers are compiled (torch.compile) when the first micro-batches need them."""
    offload: bool = False
    """With sharding = "full": weights, gradients and moments are in host memory, from which each layer is copied to the
    GPU when it computes, and the optimizer runs on the CPU."""
    learning_rate: Annotated[float, Meta(gt=0)]
    """The learning rate of AdamW, before `schedule` lowers it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The decay of the learning rate from the end of the warm-up to the last step."""
    warmup_steps: CountOrZero = 0
    """The first steps, in which the learning rate rises in proportion to their number."""
    final_learning_rate: Annotated[float, Meta(ge=0)] = 0.0
    """The learning rate at which a decaying schedule ends."""
    advantage: Literal["grpo", "dr-grpo", "rloo", "reinforce++", "reinforce++-baseline", "trloo", "gae", "sft"] = "grpo"
    """The estimator: what an episode, turn or token is compared with."""
    gamma: Share = 1.0
    """Discount of a reward per turn (trloo) or per token (gae)."""
    gae_lambda: Share = 1.0
    """The lambda of advantage "gae". 1: all later rewards count; 0: only the next one and the value after it."""
    critic_learning_rate: Annotated[float, Meta(gt=0)] = 1e-5
    """Learning rate of the critic, which advantage "gae" needs."""
    value_clip: Annotated[float, Meta(gt=0)] | None = None
    """Limit of a value's change in one training step; beyond it, its loss has no gradient."""
    flat_groups: Literal["keep", "drop"] = "keep"
    """Groups without a gradient, because all episodes had the same reward. keep: they count in the mean of the loss;
    drop: others take their place, and the step waits for them (dynamic sampling of DAPO)."""
    reward_scale: Literal["none", "domain"] = "none"
    """domain: rewards are divided by the standard deviation of their domain's in the step."""
    response_budget: dict[Name, Count] = {}
    """Tokens that the model may generate in an episode, by domain, for `overlong` and aggregation "fixed"; the default
    of each domain is max_turns x max_new_tokens."""
    overlong: Literal["keep", "filter", "punish"] = "keep"
    """Episodes that reach the response budget. filter: the loss leaves them out, and truncated ones; punish: the reward
    falls by up to 1 over the last `overlong_margin` of the budget (both: DAPO)."""
    overlong_margin: Share = 0.2
    """The share of the response budget over which `overlong = "punish"` lowers the reward."""
    ratio: Literal["token", "sequence"] = "token"
    """The ratio that is clipped: each token's, or the geometric mean over its sequence (GSPO)."""
    surrogate: Literal["clip", "cispo"] = "clip"
    """clip: a clipped ratio stops the gradient (PPO); cispo: the clipped ratio is a weight without a gradient."""
    clip_low: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """The ratio is clipped at 1 - clip_low; with 1 it has no lower bound."""
    clip_high: Annotated[float, Meta(gt=0)] = 0.2
    """The ratio is clipped at 1 + clip_high."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """The ratio from which an episode with a negative advantage pushes no further."""
    aggregation: Literal["token", "sequence", "fixed"] = "token"
    """The unit of equal weight in the mean: every token, every sequence, or every token over a constant length."""
    proximal: Literal["recomputed", "behaviour"] = "recomputed"
    """The reference of the clip: the policy at the start of the step (decoupled PPO), or the one that acted (PPO)."""
    correction: Literal["none", "token", "sequence", "geometric", "mask-token", "mask-sequence", "mask-geometric"] = (
        "token"
    )
    """Importance weight of proximal / behaviour, by token, sequence, or the geometric mean of a sequence: truncated, or
    zero outside the limits."""
    max_is_ratio: Annotated[float, Meta(ge=1)] = 2.0
    """Limit of the importance ratio between the policy at the start of the step and the one that acted."""
    min_is_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """The lower limit, for corrections that mask."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """Estimator of the KL to the initial model (docs/learning.md); it needs a second model in memory."""
    kl_in: Literal["loss", "reward"] = "loss"
    """A term of the loss (k2, k3), or a cost in each token's reward (k1)."""
    kl_coef: Annotated[float, Meta(ge=0)] = 0.001
    """The weight of the KL, where `kl` is set."""
    kl_gamma: Share = 0.0
    """With kl_in "reward": the discount of what later tokens of the row cost. 0: each token has its own cost alone; 1:
    the costs of the rest of the row, whose noise grows with its length."""
    entropy_coef: Annotated[float, Meta(ge=0)] = 0.0
    """The weight of the entropy bonus in the loss."""
    moe_aux_coef: Annotated[float, Meta(ge=0)] = 0.0
    """The weight of the loss that balances the experts of each layer (docs/learning.md)."""
    router_replay: bool = False
    """Routers send each token to the experts that the engine's model chose for it (docs/learning.md); only the weights
    of these experts are the trainer's own."""
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0
    """The largest norm of a gradient; a longer one is scaled down to it."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    """AdamW's, of matrices; norms and biases are not decayed."""
    adam_betas: tuple[BetaShare, BetaShare] = (0.9, 0.999)
    """AdamW's decay of the mean of gradients, and of that of their squares."""
    adam_eps: Annotated[float, Meta(gt=0)] = 1e-8
    """AdamW's term against a division by zero."""
    tokens_per_micro_batch: Literal["auto"] | Count = "auto"
    """Padded tokens in one forward pass; a step accumulates gradients over all its passes. Auto: what fits on a GPU by
    the plan, up to 65,536 or the longest trajectory; 16,384 where sizes are unknown (docs/learning.md)."""
    max_row_tokens: Literal["auto"] | Count = "auto"
    """Longer training rows are left out of a step, and reported; auto: those for which a GPU has too little memory by
    the plan, and none where sizes are unknown."""
    rows: Literal["padded", "packed"] = "padded"
    """In a forward pass: a row for each trajectory, or all of them in one row, each attending only to itself."""
    lora_rank: CountOrZero = 0
    """Above 0 only adapters of this rank are trained, on all linear layers (LoRA)."""
    lora_alpha: Annotated[float, Meta(gt=0)] = 32.0
    """The output of an adapter is scaled by lora_alpha / lora_rank."""
    publish_lora: Literal["auto", "adapters", "merged"] = "auto"
    """With lora_rank, engines are sent the adapters alone, or weights to which they are added; auto: adapters, if the
    engines are known to take those of the model (docs/weights.md)."""
    num_minibatches: Count = 1
    """Parts of a step's trajectories, with an optimizer step on each; above 1 the policy moves in between."""
    epochs: Count = 1
    """The number of times that a training step goes through its minibatches."""
    max_skipped_steps: Count = 5
    """Consecutive steps skipped for a non-finite loss or gradient, after which the campaign fails."""
    checkpoint_every_steps: Count = 10
    """The steps from one checkpoint to the next."""
    keep_checkpoints: Count = 2
    """The number of the newest checkpoints that are kept."""
    keep_best: CountOrZero = 0
    """Checkpoints of which the weights are kept besides the newest, to be exported: those with the highest mean reward,
    of evaluations if there are any."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the optimizer's moments in checkpoints. In bfloat16 a checkpoint has two thirds of the bytes, and a
    campaign continues from rounded moments; weights are always float32."""
    keep_versions: Count = 4
    """The number of the newest versions of the weights that are kept as files."""
    publish_dtype: WeightsDtype | Literal["auto"] = "auto"
    """Data type of the weights that engines are sent, rounded from the trainer's own, which stay float32; auto: the one
    that the engines compute in (docs/weights.md)."""
    pipeline: dict[Name, PipelineNode] = {}
    """Nodes added to those of `advantage` and the loss, by name."""

    def has_bf16(self, *, on_bf16_gpus: bool) -> bool:
        """Return whether the trainer's passes are in bf16, on GPUs that compute in it or on other hardware."""
        return self.precision == "bf16" or (self.precision == "auto" and on_bf16_gpus)

    @property
    def degrees(self) -> ParallelDegrees:
        """The ranks that divide the work on a copy of the model; 1 where no plan has chosen them."""
        asked = {name: getattr(self, f"{name}_parallel") for name in DEGREES}
        return ParallelDegrees(**{name: 1 if num == "auto" else num for name, num in asked.items()})

    @property
    def has_open_degrees(self) -> bool:
        """Return whether a plan may choose how ranks divide the work."""
        names = DEGREES if self.trainer == "megatron" else ("context",)
        return any(getattr(self, f"{name}_parallel") == "auto" for name in names)

    def with_degrees(self, degrees: ParallelDegrees) -> "TrainConfig":
        """Return these settings with the degrees that a plan has chosen."""
        return msgspec.structs.replace(self, **{f"{name}_parallel": getattr(degrees, name) for name in DEGREES})

    @property
    def micro_batch_tokens(self) -> int:
        """The tokens of a micro-batch, where no plan has chosen them."""
        tokens = self.tokens_per_micro_batch
        return DEFAULT_MICRO_BATCH_TOKENS if tokens == "auto" else tokens

    @property
    def policy_moves(self) -> bool:
        """Return whether the policy changes within a training step, before its last loss is computed."""
        return self.num_minibatches * self.epochs > 1

    @property
    def has_kl_reward(self) -> bool:
        return self.kl != "none" and self.kl_in == "reward"

    @property
    def has_kl_loss(self) -> bool:
        return self.kl != "none" and self.kl_in == "loss"


class WarmupConfig(ConfigTable, frozen=True, kw_only=True):
    """Conversations that the first training steps imitate (SFT), before reinforcement learning or in its place.

    A recipe with this table and without domains only imitates: its job has the trainer and nothing else.
    """

    path: str | Annotated[list[str], Meta(min_length=1)]
    """JSON lines (.jsonl) or Parquet (.parquet), or several such files, found like those of `domains.NAME.tasks`; a
    row has `messages`, and `tools` where the model is given any. Or a campaign, by name or directory: its scored
    trajectories, with the tokens that they recorded."""
    min_reward: float | None = None
    """The least reward of a campaign's trajectories that are imitated; without it all of them are."""
    steps: CountOrZero = 0
    """The steps of `train.num_steps` that are the warm-up; if all are, nothing is played."""
    epochs: CountOrZero = 0
    """The number of times that each conversation is used, in place of `steps`."""
    conversations_per_step: Count = 32
    """The conversations that one of these steps learns from."""
    learning_rate: Annotated[float, Meta(gt=0)] | None = None
    """The learning rate of these steps in place of `train.learning_rate`."""
    shuffle: bool = True
    """Another order in each epoch, by the recipe's seed; false: the order of the file."""

    @property
    def paths(self) -> list[str]:
        """The files or campaigns of `path`."""
        return [self.path] if isinstance(self.path, str) else self.path


class TeacherConfig(ConfigTable, frozen=True, kw_only=True):
    """A model with the same vocabulary that takes the place of the initial model in the KL: distillation."""

    path: str | None = None
    """A directory that transformers can load; every rank of the trainer holds the model."""
    num_params: NumParams | None = None
    """Number of its weights, from which a plan estimates memory; by default that of its config.json."""
    judge: JudgeName | None = None
    """In place of `path` the name of a judge, whose engines score each trajectory when it is rewarded."""
    timeout_s: Seconds = 600.0
    """The time that the judge may take for one trajectory."""


class EvaluationConfig(ConfigTable, frozen=True, kw_only=True):
    """The periodic evaluation of the newest weights on tasks that are never trained on (docs/learning.md)."""

    every_versions: CountOrZero = 0
    """0: never. The first evaluation is of the initial weights."""
    num_episodes: Count = 64
    """Episodes of each domain: the same tasks every time, with seeds that no training task has."""
    domains: list[Name] = []
    """Domains to evaluate; empty: all."""
    options: dict[Name, dict[str, Any]] = {}
    """Environment options that are added or replaced, by domain, such as a test split."""
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    """0: always the most likely token."""
    patience_s: Seconds = 600.0
    """Time that the end of training waits for the last evaluation."""


class MetricsConfig(ConfigTable, frozen=True, kw_only=True):
    """The optional outputs of each step's figures, under CAMPAIGN/metrics (docs/learning.md)."""

    tensorboard: bool = False
    """Event files for TensorBoard; needs the package tensorboard."""
    wandb: Literal["off", "offline", "online"] = "off"
    """A run of Weights & Biases, offline for `wandb sync` later; needs the package wandb."""
    wandb_project: str = "hpcrl"
    """The project of that run."""
    mlflow: bool = False
    """A run on the server that MLFLOW_TRACKING_URI names (default: CAMPAIGN/metrics/mlflow); needs mlflow-skinny."""
    mlflow_experiment: str = "hpcrl"
    """The experiment of that run."""


NoticeState = Literal["started"] | JobOutcome
"""The states of a job that a notice may report."""


class NoticesConfig(ConfigTable, frozen=True, kw_only=True):
    """The notices that the campaign's jobs send when they start and when they have ended (docs/jobs.md)."""

    command: list[str] = []
    """A command that gets the notice as JSON on its standard input; it runs on the first node of the job."""
    webhook: Annotated[str, Meta(pattern=r"^(|https?://\S+|\$\w+)$")] = ""
    """An address that gets the notice by POST, or $NAME: the variable of the job that holds the address."""
    states: list[NoticeState] = []
    """The states that are reported; empty: all."""


class WorkerShare(ConfigTable, frozen=True, kw_only=True):
    """The resources of one worker; the planner and the site decide where they are."""

    cpus_per_worker: Count = 1
    """The CPU cores of each worker."""
    mem_gib_per_worker: Annotated[float, Meta(gt=0)] = 4.0
    """The host memory of each worker."""
    affinity: Affinity = "cpu"
    """compute: FLOP/s first (prefill, training) - bandwidth: memory bandwidth first (decode) - cpu: no GPU."""


class WorkerResources(WorkerShare, frozen=True, kw_only=True):
    """The resources of one role."""

    num_workers: Count = 1
    """The number of workers."""
    gpus_per_worker: CountOrZero = 0
    """The GPUs of each worker; 0: it runs on CPU cores alone."""


class ComputeResources(WorkerResources, frozen=True, kw_only=True):
    """The resources of train."""

    gpus_per_worker: CountOrZero = 1
    affinity: Affinity = "compute"


class PrefillResources(WorkerShare, frozen=True, kw_only=True):
    """The resources of prefill."""

    num_workers: Literal["auto"] | CountOrZero = "auto"
    """0: none, and the decode workers also compute the prompts, as one pool of engines. auto: the planner chooses: none
    where decode gets the same kind of GPU, or the site has fewer than four GPU nodes; else by the model's size, the
    GPUs, and the domains' usual lengths, and 1 where there are none."""
    gpus_per_worker: Literal["auto"] | CountOrZero = "auto"
    """The same as for decode."""
    affinity: Affinity = "compute"


class DecodeResources(WorkerShare, frozen=True, kw_only=True):
    """The resources of decode."""

    num_workers: Literal["auto"] | Count = "auto"
    """auto: the planner chooses, by the model's size, the GPUs, and the domains' usual lengths; 1 where it cannot."""
    gpus_per_worker: Literal["auto"] | CountOrZero = "auto"
    """The GPUs of each engine. auto: the fewest that hold the weights and the KV of one longest conversation, and among
    which vLLM can divide the model; 1 where its size is not known."""
    affinity: Affinity = "bandwidth"


class RewardConfig(ConfigTable, frozen=True, kw_only=True):
    """The place where rewards are computed; the needs of each worker are in resources.reward."""

    placement: Literal["spare", "elastic"] = "spare"
    """spare: on spare cores of the job; elastic: in separate preemptible jobs, which run only while there is work."""
    concurrency: Count = 64
    """The reward calls that each worker may have under way; a plain function has a process for each."""
    max_jobs: Count = 2
    """Reward jobs at a time; each is one node."""
    idle_s: Seconds = 20.0
    """A reward job is ended after this time without work."""
    patience_s: Seconds = 120.0
    """A segment that no reward job has taken for this long is scored on spare cores."""


class RewardResources(WorkerResources, frozen=True, kw_only=True):
    """The resources of reward."""

    mem_gib_per_worker: Annotated[float, Meta(gt=0)] = 1.0


class JudgeResources(WorkerResources, frozen=True, kw_only=True):
    """The resources of a judge's engines."""

    gpus_per_worker: CountOrZero = 1
    affinity: Affinity = "bandwidth"


class JudgeConfig(ModelConfig, frozen=True, kw_only=True):
    """A second model that is never trained, which reward functions and environments call (docs/environments.md)."""

    engine: EngineConfig = EngineConfig()
    resources: JudgeResources = JudgeResources()


class RoleResources(ConfigTable, frozen=True, kw_only=True):
    """The resources of the five roles; each has its own defaults, also when its table is given in part."""

    env: WorkerResources = WorkerResources()
    prefill: PrefillResources = PrefillResources()
    decode: DecodeResources = DecodeResources()
    reward: RewardResources = RewardResources()
    train: ComputeResources = ComputeResources()


class JobConfig(ConfigTable, frozen=True, kw_only=True):
    """The limits of one job of the campaign."""

    walltime_min: Count = 60
    """The walltime that each job requests."""
    num_jobs: Count = 1
    """Jobs in a chain, each started by Slurm when the previous one has ended; `hpcrl resume` starts a new chain."""
    drain_s: Seconds = 60.0
    """Time before the end of the allocation at which new episodes stop and the last checkpoint is made."""
    survive_node_loss: bool = False
    """Request at least two nodes a component, and `--no-kill`; a node without the driver or the trainer may be lost."""
    quorum: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """The share of a role's workers, and of its nodes, with which the job continues while the others fail again and
    again. With fewer only the job ends, and the next one continues the campaign from its last checkpoint."""
    layout: Literal["auto", "hetjob", "hetstep", "colocated", "multi-job"] = "auto"
    """hetjob: a heterogeneous job; hetstep: one allocation, its nodes split among the roles; colocated: one node, its
    GPUs and cores split among the roles; multi-job: a separate job for each component, which wait for each other;
    auto: by the site, and colocated where one node is enough."""
    stall_timeout_min: Annotated[float, Meta(gt=0)] = 15.0
    """A job without progress for this long is ended, so that nodes are never held idle. Progress are tokens, segments,
    groups and versions; a training step may take four times as long. One worker that does nothing of its work for this
    long is started again."""
    silence_timeout_s: Annotated[float, Meta(ge=5)] | None = None
    """A worker that stands still for this long is ended, after it has written its stacks, and started again. None: half
    of `stall_timeout_min`, at least 30 s and at most 120 s."""

    @property
    def silence_s(self) -> float:
        """The longest time that a worker may stand still."""
        return self.silence_timeout_s or min(max(self.stall_timeout_min * 30, 30.0), 120.0)


class LimitsConfig(ConfigTable, frozen=True, kw_only=True):
    """The ends of a campaign other than its last step: what is reached first drains the job, and none follows."""

    node_hours: Annotated[float, Meta(gt=0)] | None = None
    """The node-hours of all jobs together; a job drains in time to stay below."""
    gpu_hours: Annotated[float, Meta(gt=0)] | None = None
    """The same in GPU-hours of the nodes that are charged."""
    until: str | None = None
    """A date, or a date and a time, such as 2026-12-24T18:00; local time of the nodes."""
    tokens: Count | None = None
    """The tokens that steps have trained on."""
    reward: float | None = None
    """The mean reward of the last `reward_steps` steps."""
    reward_steps: Count = 10
    """The steps whose mean reward is compared with `reward`."""


class Recipe(ConfigTable, frozen=True, kw_only=True):
    """A whole recipe."""

    name: Name
    """The name of the recipe, which campaigns have unless they are given another; of a file with `extends` it may be
    left out, and is then that of the file."""
    seed: CountOrZero = 0
    """The seed of tasks, of the order of rows, and of what is drawn at random."""
    description: str = ""
    """A line for `hpcrl recipe ls`."""
    model: ModelConfig
    domains: dict[Name, DomainConfig] = {}
    rollout: RolloutConfig
    train: TrainConfig
    warmup: WarmupConfig | None = None
    teacher: TeacherConfig | None = None
    judge: dict[JudgeName, JudgeConfig] = {}
    evaluation: EvaluationConfig = EvaluationConfig()
    metrics: MetricsConfig = MetricsConfig()
    notices: NoticesConfig = NoticesConfig()
    spool: SpoolConfig = SpoolConfig()
    reward: RewardConfig = RewardConfig()
    engine: EngineConfig = EngineConfig()
    router: RouterConfig = RouterConfig()
    resources: RoleResources = RoleResources()
    job: JobConfig = JobConfig()
    limits: LimitsConfig = LimitsConfig()

    @property
    def max_context(self) -> int | None:
        """The tokens that a conversation may have, with its answers; None if only the model's files have it."""
        tiny = self.model.tiny
        return self.engine.max_model_len or (tiny.context_length if tiny else None)

    @property
    def default_budgets(self) -> dict[str, int]:
        """The most tokens that the model may generate in an episode of each domain."""
        longest = self.rollout.max_new_tokens
        return {name: domain.max_turns * (domain.max_new_tokens or longest) for name, domain in self.domains.items()}

    @property
    def served_models(self) -> dict[str, str]:
        """The directories of the model and of the judges, by their settings."""
        tables: dict[str, ModelConfig] = {"model": self.model}
        tables |= {f"judge.{name}": judge for name, judge in self.judge.items()}
        return {f"{table}.path": model.path for table, model in tables.items() if model.path is not None}

    @property
    def further_models(self) -> dict[str, str]:
        """The model directories that must have the tokens of the policy, by their settings."""
        found = {f"train.pipeline.{name}.model": node.model for name, node in self.train.pipeline.items() if node.model}
        if self.teacher is not None and self.teacher.path is not None:
            found = {"teacher.path": self.teacher.path, **found}
        judge = self.teaching_judge
        return (
            found if judge is None or judge.path is None else {f"judge.{self.teacher_name}.path": judge.path, **found}
        )

    @property
    def key_variables(self) -> dict[str, str]:
        """The variables that hold a key, or the address of the notices, by the settings that name them."""
        found = {
            setting: value
            for setting, value in flatten_table(msgspec.to_builtins(self))
            if KEY_OPTIONS.search(setting) and isinstance(value, str) and value.isidentifier()
        }
        webhook = self.notices.webhook
        return found | ({"notices.webhook": webhook[1:]} if webhook.startswith("$") else {})

    @property
    def variables(self) -> list[str]:
        """The variables of the shell that its roles and trackers read: what it names, and some patterns."""
        named = [*find_variables(msgspec.json.encode(self).decode()), *self.key_variables.values()]
        if any(
            domain.reward == JUDGE_FUNCTION and "judge" not in domain.reward_options for domain in self.domains.values()
        ):
            named.append(JUDGE_KEY)
        named += WANDB_VARIABLES[self.metrics.wandb]
        return [*named, *MLFLOW_VARIABLES] if self.metrics.mlflow else named

    @property
    def teacher_name(self) -> str:
        """Return the name of the judge that is the teacher; empty if none is."""
        return "" if self.teacher is None else self.teacher.judge or ""

    @property
    def teaching_judge(self) -> JudgeConfig | None:
        """Return the judge that is the teacher, if one is."""
        return self.judge.get(self.teacher_name)

    @property
    def has_rollouts(self) -> bool:
        """Return whether episodes are played: not if every step is one of the warm-up and nothing is evaluated."""
        if not self.domains or self.warmup is None:
            return bool(self.domains)
        is_all = 0 < self.train.num_steps <= self.warmup.steps
        return not is_all or self.evaluation.every_versions > 0

    @property
    def num_train_shares(self) -> int:
        """The shares that a training step is divided into: the data-parallel degree of the trainer."""
        return self.resources.train.num_workers // self.train.degrees.num_together

    @property
    def judge_roles(self) -> list[RoleName]:
        """The roles of the judges' engines."""
        return [JUDGE_ROLE_PREFIX + name for name in self.judge]

    @property
    def placed_roles(self) -> list[RoleName]:
        """The roles with their own component, those of the judges last: the trainer alone if nothing is played."""
        if not self.has_rollouts:
            return ["train"]
        return [*(role for role in PLACED_ROLES if role != "prefill" or self.has_prefill), *self.judge_roles]

    @property
    def has_prefill(self) -> bool:
        """Return whether prompts may be computed by separate workers: not in one pool of engines."""
        return self.resources.prefill.num_workers != 0

    @property
    def planned_roles(self) -> list[RoleName]:
        """All roles that have workers."""
        if not self.has_rollouts:
            return ["train"]
        num_judges = len(self.judge)
        placed = self.placed_roles
        return [*placed[: len(placed) - num_judges], "reward", *self.judge_roles]

    def role_resources(self, role: RoleName) -> WorkerResources:
        """Return the resources of a role, which may be a judge's; a number that is left open counts as 1."""
        if role.startswith(JUDGE_ROLE_PREFIX):
            return self.judge[role.removeprefix(JUDGE_ROLE_PREFIX)].resources
        resources: WorkerResources | PrefillResources | DecodeResources = getattr(self.resources, role)
        if isinstance(resources, WorkerResources):
            return resources
        values = msgspec.structs.asdict(resources)
        if resources.num_workers == "auto":
            values["num_workers"] = 1
        if self.has_open_gpus(role):
            values["gpus_per_worker"] = 0 if resources.affinity == "cpu" else 1
        return WorkerResources(**values)

    def has_open_gpus(self, role: RoleName) -> bool:
        """Return whether the planner chooses the GPUs of each worker of a role."""
        gpus = {"prefill": self.resources.prefill.gpus_per_worker, "decode": self.resources.decode.gpus_per_worker}
        return gpus.get(role) == "auto"


def name_role_resources(role: RoleName) -> str:
    """Return the recipe's table of the resources of a role."""
    judge = role.removeprefix(JUDGE_ROLE_PREFIX)
    return f"resources.{role}" if judge == role else f"judge.{judge}.resources"


def make_recipe(layered: LayeredTable) -> Recipe:
    """Make the recipe of a table; raises ConfigError for what its types do not show."""
    if "warmup" in layered.table and not layered.table.get("domains"):
        layered = replace(layered, table=_fill_group_settings(layered.table))
    recipe = to_struct(layered, Recipe)
    for table, model in (("model", recipe.model), *((f"judge.{name}", one) for name, one in recipe.judge.items())):
        if (model.path is None) == (model.tiny is None):
            source = layered.find_setting((*table.split("."), "path"), (*table.split("."), "tiny"))
            raise ConfigError(
                f"{source}: [{table}] needs either `path` (a model directory) or [{table}.tiny], and not both"
            )
        source = layered.find_setting((*table.split("."), "config"))
        _check_config(model, where=f"{source}: {table}")
    if recipe.teacher is not None and (recipe.teacher.path is None) == (recipe.teacher.judge is None):
        source = layered.find_setting(("teacher", "path"), ("teacher", "judge"))
        raise ConfigError(
            f"{source}: [teacher] needs either `path` (a model directory, which the trainer holds) or `judge` "
            "(the name of a [judge.NAME], whose engines score the tokens), and not both"
        )
    if not recipe.domains and recipe.warmup is None:
        source = layered.find_setting(("domains",))
        raise ConfigError(f"{source}: [domains] is missing: name what to learn, or what to imitate ([warmup])")
    if recipe.domains and not recipe.train.num_steps:
        source = layered.find_setting(("train", "num_steps"))
        raise ConfigError(f"{source}: train.num_steps = 0: give the number of steps, 1 or more")
    return _fill_response_budgets(recipe)


def _check_config(model: ModelConfig, *, where: str) -> None:
    """Refuse a `config` from which no number of weights follows."""
    advice = "copy the fields of the model's config.json, or give num_params in its place"
    try:
        _ = model.num_weights
    except KeyError as error:
        raise ConfigError(f"{where}.config lacks {error.args[0]}: {advice}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{where}.config cannot be used ({error}): {advice}") from error


def _fill_group_settings(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table of a recipe without domains with what only groups of episodes need; what is given stays."""
    given = {name: table.get(name, {}) for name in UNUSED_GROUP_SETTINGS}
    return table | {name: UNUSED_GROUP_SETTINGS[name] | own for name, own in given.items() if isinstance(own, dict)}


def fill_warmup_steps(recipe: Recipe, warmup: WarmupConfig, *, num_conversations: int) -> Recipe:
    """Return the recipe with the steps of its warm-up, and those of training in a recipe without domains."""
    if warmup.steps and warmup.epochs:
        raise ConfigError(
            f"warmup.steps = {warmup.steps} and warmup.epochs = {warmup.epochs} are two lengths of it: remove one"
        )
    per_step, num_steps = warmup.conversations_per_step, 0 if recipe.domains else recipe.train.num_steps
    steps = warmup.steps or -(-warmup.epochs * num_conversations // per_step) or num_steps
    if not steps:
        raise ConfigError("warmup has neither `steps` nor `epochs`: give one of them")
    if recipe.domains and warmup.epochs and steps > recipe.train.num_steps:
        raise ConfigError(
            f"warmup.epochs = {warmup.epochs} are {steps} steps, more than train.num_steps = {recipe.train.num_steps}, "
            "which includes them: lower the first or raise the second"
        )
    return msgspec.structs.replace(
        recipe,
        warmup=msgspec.structs.replace(warmup, steps=steps, epochs=0),
        train=msgspec.structs.replace(recipe.train, num_steps=recipe.train.num_steps or steps),
    )


def make_warmup_settings(train: TrainConfig, warmup: WarmupConfig) -> TrainConfig:
    """Return the settings of warm-up steps: one optimizer step on the cross-entropy of every answer's tokens."""
    return msgspec.structs.replace(
        train,
        advantage="sft",
        aggregation="token",
        proximal="recomputed",
        correction="none",
        flat_groups="keep",
        kl="none",
        entropy_coef=0.0,
        router_replay=False,  # conversations have no choices
        num_minibatches=1,
        epochs=1,
        reward_scale="none",
        response_budget={},
        overlong="keep",
        pipeline={},
        learning_rate=warmup.learning_rate or train.learning_rate,
    )


def _fill_response_budgets(recipe: Recipe) -> Recipe:
    """Return the recipe with a response budget for every domain."""
    budgets = recipe.default_budgets
    train = msgspec.structs.replace(recipe.train, response_budget=budgets | recipe.train.response_budget)
    return msgspec.structs.replace(recipe, train=train)
