"""Check that a recipe is consistent. Pure.

check_recipe             raise a PlanError for the first conflict, with a fix
check_engine_gpus        the same, of the GPUs that engines have; again after the planner has chosen them
check_kv                 the same of a model whose KV the embedded engine cannot keep
check_lengths            the same for lengths beyond a model's context
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from msgspec import Struct

from hpcrl.config.pipeline import check_user_nodes
from hpcrl.config.program import AGENT_PROGRAM, reserves_place
from hpcrl.config.published_adapters import find_adapter_conflict
from hpcrl.config.recipe import (
    AUTO_PARSER,
    REASONING_PARSER_NAMES,
    ROLES,
    TOOL_PARSER_NAMES,
    UNUSED_GROUP_SETTINGS,
    VLLM_PARSER_PREFIX,
    DomainConfig,
    EngineConfig,
    ModelConfig,
    Recipe,
    RewardConfig,
    RoleName,
    RolloutConfig,
    RouterConfig,
    SimulatedEngineConfig,
    SpoolConfig,
    TrainConfig,
    name_role_resources,
)
from hpcrl.config.toml import suggest_name
from hpcrl.errors import PlanError
from hpcrl.hardware import memory_model
from hpcrl.hardware.architecture import (
    MEGATRON_FAMILIES,
    QUANTISED_ADVICE,
    ModelArchitecture,
    find_context_conflict,
    find_parallel_conflict,
    read_architecture,
    read_max_context,
    select_fields,
)
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.plan.engine_gpus import divides_experts, divides_heads
from hpcrl.plan.engine_nodes import ENGINE_ROLES
from hpcrl.plan.router_replay import find_replay_conflict
from hpcrl.plan.trainer_checks import find_megatron_conflict, find_share_conflict

JUDGE_REWARD = "hpcrl.envs.judge:judge"
MAX_GEOMETRIC_RATIO = 1.5
"""The geometric mean of the ratios of a sequence has never been seen above this."""
VLLM_SETTINGS = ("data_parallel", "expert_parallel", "quantization", "seeds", "keep_old_kv", "any_vllm_version")
"""The settings of [engine] that only vLLM has, and that are refused elsewhere."""
DEFAULT_REWARD = DomainConfig(env="none:None").reward


def check_recipe(recipe: Recipe) -> None:
    """Run every check that needs no site."""
    _check_resources(recipe)
    _check_imitation(recipe)
    _check_rollout(recipe)
    _check_router(recipe)
    _check_model(recipe)
    _check_engine(recipe)
    _check_trainer(recipe)
    _check_published_dtype(recipe)
    _check_published_adapters(recipe)
    _check_algorithm(recipe)
    _check_isolation(recipe)
    _check_evaluation(recipe)
    _check_tasks(recipe)
    _check_pipeline(recipe)
    _check_warmup(recipe)
    _check_teacher(recipe)
    _check_judges(recipe)
    _check_limits(recipe)


def _check_resources(recipe: Recipe) -> None:
    for role in (*ROLES, *recipe.judge_roles):
        resources = recipe.role_resources(role)
        if resources.affinity == "cpu" and resources.gpus_per_worker:
            raise PlanError(
                f"{name_role_resources(role)} asks for {resources.gpus_per_worker} GPUs a worker with affinity = "
                '"cpu": choose affinity = "compute" or "bandwidth", or gpus_per_worker = 0'
            )


def _check_model(recipe: Recipe) -> None:
    """Check the sizes of the model that are known: its heads, and the lengths that it reads."""
    shape, context_length = recipe.model.architecture, read_max_context(recipe.model.config)
    if context_length is not None:
        check_lengths(recipe, context_length)
    if shape is None or not recipe.model.config:
        return
    _check_training(recipe, shape)
    if shape.kv_rank:
        return
    sizes = f"num_attention_heads = {shape.num_heads}"
    if shape.num_heads % shape.num_kv_heads:
        raise PlanError(
            f"the config.json of the model has {sizes}, no multiple of num_key_value_heads = {shape.num_kv_heads}: "
            "choose another model, or correct model.config"
        )
    if shape.hidden_size % shape.num_heads and "head_dim" not in recipe.model.config:
        raise PlanError(
            f"the config.json of the model has {sizes}, which do not divide hidden_size = {shape.hidden_size}, and no "
            "head_dim: choose another model, or correct model.config"
        )


def _check_training(recipe: Recipe, shape: ModelArchitecture) -> None:
    """Check that the stored weights of the model can be trained, by the trainer of the recipe."""
    if quantised := select_fields(recipe.model.config).get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, Mapping) else quantised
        raise PlanError(
            f"the model has quantised weights (quantization_config in its config.json: {method}): {QUANTISED_ADVICE}"
        )
    if recipe.train.trainer == "megatron" and shape.family and shape.family not in MEGATRON_FAMILIES:
        raise PlanError(
            f'train.trainer = "megatron" supports {", ".join(MEGATRON_FAMILIES)} models, and this one is '
            f'{shape.family!r} (model_type in its config.json): set train.trainer = "torch"'
        )


def check_lengths(recipe: Recipe, context_length: float) -> None:
    """Raise PlanError for lengths in tokens that are beyond the model's context."""
    limit = recipe.engine.max_model_len
    if limit is not None and limit > context_length:
        why = f"the model's context has {context_length:.0f} tokens: lower it, or leave it out"
        raise PlanError(f"engine.max_model_len = {limit}: {why}")
    for domain_name, domain in recipe.domains.items():
        name = "rollout.max_new_tokens" if domain.max_new_tokens is None else f"domains.{domain_name}.max_new_tokens"
        num_tokens = domain.max_new_tokens or recipe.rollout.max_new_tokens
        if num_tokens > (limit or context_length):
            raise PlanError(
                f"{name} = {num_tokens}: prompt and answer together have {limit or context_length:.0f} tokens at most, "
                "by the model and engine.max_model_len: lower it"
            )


def _check_trainer(recipe: Recipe) -> None:
    """Check that the trainer's ranks match its parallelism, and that each rank has work."""
    train, ranks, gpus = recipe.train, recipe.resources.train.num_workers, recipe.resources.train.gpus_per_worker
    if gpus > 1:
        raise PlanError(
            f"resources.train.gpus_per_worker = {gpus}: a worker of the trainer is a rank, and a rank uses one GPU: "
            f"set it to 1, and resources.train.num_workers = {ranks * gpus}"
        )
    degrees = train.degrees
    foreign = (*(f"{name}_parallel" for name in ("tensor", "pipeline", "expert")), "pipeline_chunks")
    given = [name for name in foreign if getattr(train, name) not in ("auto", 1)]
    if train.trainer == "torch" and given:
        shown = " and ".join(f"train.{name} = {getattr(train, name)}" for name in given)
        verb, them = ("are", "them") if len(given) > 1 else ("is", "it")
        raise PlanError(f'{shown} {verb} for trainer "megatron": remove {them}, or set train.trainer = "megatron"')
    if train.pipeline_chunks > 1 == degrees.pipeline and not _may_choose_degrees(recipe):
        raise PlanError(
            f"train.pipeline_chunks = {train.pipeline_chunks} needs stages: set train.pipeline_parallel = 2 or more"
        )
    if train.trainer == "megatron" and (conflict := find_megatron_conflict(train)) is not None:
        raise PlanError(conflict)
    _check_division(recipe)  # first, since a degree that divides no model fits no number of ranks
    _check_groups(recipe)
    if train.moe_aux_coef and recipe.model.config and not read_architecture(recipe.model.config).num_experts:
        raise PlanError(
            f"train.moe_aux_coef = {train.moe_aux_coef:g} cannot act: the config.json of the model has no experts; "
            "remove it"
        )
    if train.router_replay and (conflict := find_replay_conflict(recipe)) is not None:
        raise PlanError(conflict)
    if train.offload and (train.sharding == "none" or ranks == 1):
        raise PlanError(
            f'train.offload = true with train.sharding = "{train.sharding}" and resources.train.num_workers = {ranks}: '
            'only shards are kept in host memory: set sharding = "full", and num_workers = 2 or more'
        )
    if not _may_choose_degrees(recipe) and (conflict := find_share_conflict(recipe)) is not None:
        raise PlanError(conflict)


def _may_choose_degrees(recipe: Recipe) -> bool:
    """Return whether the plan knows enough of the model to choose the degrees that the recipe leaves open."""
    needed = recipe.model.architecture if recipe.train.trainer == "megatron" else recipe.model.config
    return recipe.train.has_open_degrees and bool(needed)


def _check_groups(recipe: Recipe) -> None:
    """Check that the ranks can be split into the groups of each kind of parallelism."""
    degrees, ranks = recipe.train.degrees, recipe.resources.train.num_workers
    for names in (("tensor", "context", "pipeline"), ("expert", "pipeline")):
        sizes = {f"train.{name}_parallel": getattr(degrees, name) for name in names}
        num = math.prod(sizes.values())
        if ranks % num:
            shown = " x ".join(name for name, size in sizes.items() if size > 1)
            raise PlanError(
                f"resources.train.num_workers = {ranks} is not a multiple of {shown} = {num}: "
                f"set it to {-(-ranks // degrees.num_divided) * degrees.num_divided}"
            )


def _check_division(recipe: Recipe) -> None:
    """Check that the ranks can divide the model and the positions of its rows, where its sizes are known."""
    train, model, degrees = recipe.train, recipe.model, recipe.train.degrees
    config = model.config or (model.tiny.config if model.tiny is not None else {})
    if not config:
        return
    conflict = None
    if train.trainer == "megatron":
        num_chunks = 1 if train.pipeline_parallel == "auto" else train.pipeline_chunks
        conflict = find_parallel_conflict(read_architecture(config), degrees, num_chunks=num_chunks)
    elif degrees.context > 1:
        conflict = find_context_conflict(config, size=degrees.context)
    if conflict is not None:
        raise PlanError(conflict)


def _check_published_dtype(recipe: Recipe) -> None:
    """Check that weights are not rounded to one dtype by the trainer and to another by the engines."""
    asked, engine = recipe.train.publish_dtype, recipe.engine
    exact = ("auto", "float32")
    if engine.backend == "vllm" and asked not in exact and engine.dtype not in (*exact, asked):
        raise PlanError(
            f'train.publish_dtype = "{asked}" and engine.dtype = "{engine.dtype}" would round each weight twice: leave '
            "out the first, or make them the same"
        )


def _check_published_adapters(recipe: Recipe) -> None:
    """Check that engines can take adapters, if the recipe sends them alone."""
    if recipe.train.publish_lora == "adapters" and (conflict := find_adapter_conflict(recipe)):
        raise PlanError(f'train.publish_lora = "adapters": {conflict}')


def _check_algorithm(recipe: Recipe) -> None:
    """Check that every setting of the loss acts, and that the gradient of each is not zero on average."""
    train = recipe.train
    if train.advantage == "sft":
        raise PlanError(
            'train.advantage = "sft" imitates what the policy sampled itself, and its gradient is zero on average: '
            "choose an estimator that compares rewards, or imitate data with [warmup]"
        )
    problems = (_find_idle_clip(train), _find_idle_kl(train), _find_wrong_drop(train), _find_top_p_conflict(recipe))
    for problem in problems:
        if problem is not None:
            raise PlanError(problem)
    _check_reward_units(recipe)
    _check_used_settings(train)
    _check_budgets(recipe)


class _SettingUse(NamedTuple):
    """The condition under which a setting of [train] acts."""

    acts: Callable[[TrainConfig], bool]
    needs: str
    """The condition, in the recipe's words."""


_GAE = _SettingUse(lambda train: train.advantage == "gae", 'train.advantage = "gae"')
_SETTING_USES: Mapping[str, _SettingUse] = {
    "gamma": _SettingUse(lambda train: train.advantage in ("gae", "trloo"), 'train.advantage = "gae" or "trloo"'),
    "gae_lambda": _GAE,
    "critic_learning_rate": _GAE,
    "value_clip": _SettingUse(
        lambda train: train.advantage == "gae" and train.policy_moves,
        'train.advantage = "gae", and train.num_minibatches or train.epochs of 2 or more',
    ),
    "reward_scale": _SettingUse(
        lambda train: train.advantage != "grpo",
        "another train.advantage than grpo, which divides by the standard deviation of each group",
    ),
    "overlong_margin": _SettingUse(lambda train: train.overlong == "punish", 'train.overlong = "punish"'),
    "max_is_ratio": _SettingUse(
        lambda train: train.correction != "none" and (train.proximal == "recomputed" or train.has_kl_loss),
        'a train.correction, and train.proximal = "recomputed"',
    ),
    "min_is_ratio": _SettingUse(
        lambda train: train.correction.startswith("mask-"), "a train.correction that masks, such as mask-token"
    ),
    "kl_coef": _SettingUse(lambda train: train.kl != "none", 'train.kl = "k1", "k2" or "k3"'),
    "kl_gamma": _SettingUse(
        lambda train: train.has_kl_reward and train.advantage != "gae",
        'train.kl_in = "reward", and another train.advantage than gae, whose discount is gamma',
    ),
    "final_learning_rate": _SettingUse(
        lambda train: train.schedule != "constant", 'train.schedule = "linear" or "cosine"'
    ),
    "warmup_steps": _SettingUse(
        lambda train: not 0 < train.num_steps <= train.warmup_steps, "more train.num_steps than these"
    ),
    "lora_alpha": _SettingUse(lambda train: train.lora_rank > 0, "train.lora_rank above 0"),
    "publish_lora": _SettingUse(lambda train: train.lora_rank > 0, "train.lora_rank above 0"),
}
"""The settings that act only with others; what clips a ratio has a separate check."""


def _check_used_settings(train: TrainConfig) -> None:
    """Check that each setting which differs from its default acts."""
    plain = TrainConfig(num_steps=1, groups_per_step=1, learning_rate=1.0)
    for name, use in _SETTING_USES.items():
        value = getattr(train, name)
        if value != getattr(plain, name) and not use.acts(train):
            raise PlanError(f"train.{name} = {value!r} cannot act: it needs {use.needs}; remove it, or set that")


def _check_budgets(recipe: Recipe) -> None:
    """Check that response budgets are used, and can be reached where one lowers a reward or leaves an episode out."""
    train, longest = recipe.train, recipe.max_context or read_max_context(recipe.model.config)
    for name, budget in train.response_budget.items():
        if name not in recipe.domains:
            known = _suggest_known(name, sorted(recipe.domains))
            raise PlanError(f"train.response_budget.{name}: unknown domain: {known}")
        if train.overlong == "keep" and train.aggregation != "fixed" and budget != recipe.default_budgets[name]:
            raise PlanError(
                f'train.response_budget.{name} = {budget} cannot act: it needs train.overlong = "filter" or "punish", '
                'or train.aggregation = "fixed"; remove it, or set one of them'
            )
    if longest is None or train.overlong == "keep":
        return
    for name, budget in train.response_budget.items():
        if budget > longest:
            raise PlanError(
                f"train.overlong = {train.overlong!r} cannot act on domains.{name}: its response budget is {budget} "
                f"tokens, and a conversation has at most {longest}: set train.response_budget.{name} to less"
            )


def _check_reward_units(recipe: Recipe) -> None:
    """Check that the advantage uses the rewards of turns or tokens that a domain's function gives."""
    train = recipe.train
    users = {"turn": ("trloo", "gae"), "token": ("gae",)}
    for name, domain in recipe.domains.items():
        unit = domain.reward_unit
        if unit != "episode" and domain.reward == DEFAULT_REWARD:
            raise PlanError(
                f'domains.{name}.reward_unit = "{unit}" with the default reward, which is one number: remove '
                "it (rewards of steps count for their turns), or set the reward function"
            )
        if unit != "episode" and train.advantage not in users[unit]:
            known = " or ".join(f'"{one}"' for one in users[unit])
            raise PlanError(
                f'domains.{name}.reward_unit = "{unit}" with train.advantage = "{train.advantage}", which sees only '
                f"their sum: set train.advantage = {known}, or let the function return one number"
            )
        if unit == "token" and train.reward_scale == "domain":
            raise PlanError(
                f'domains.{name}.reward_unit = "token" with train.reward_scale = "domain", which scales the rewards of '
                'turns: set train.reward_scale = "none", and scale them in the function'
            )


def _find_idle_clip(train: TrainConfig) -> str | None:
    """Return a setting of the clip or the correction that cannot act, with a fix."""
    plain = TrainConfig(num_steps=1, groups_per_step=1, learning_rate=1.0)
    names = ("ratio", "surrogate", "clip_low", "clip_high", "dual_clip")
    changed = [name for name in names if getattr(train, name) != getattr(plain, name)]
    if train.surrogate == "cispo" and (train.ratio != plain.ratio or train.dual_clip is not None):
        return (
            'train.surrogate = "cispo" makes the clipped ratio of each token a weight: set ratio = "token", and '
            "remove dual_clip"
        )
    if train.proximal == "recomputed" and not train.policy_moves and changed:
        return (
            f"train.{changed[0]} = {getattr(train, changed[0])!r} cannot act: with one optimizer step in each and "
            'proximal = "recomputed" the clipped ratio is exactly 1; set train.num_minibatches or train.epochs to 2 or '
            'more, or train.proximal = "behaviour"'
        )
    if train.proximal == "behaviour" and train.correction not in (plain.correction, "none"):
        return (
            f'train.correction = {train.correction!r} cannot act: with proximal = "behaviour" its ratio is exactly 1; '
            'set proximal = "recomputed", or correction = "none"'
        )
    if train.correction.endswith("geometric") and train.max_is_ratio > MAX_GEOMETRIC_RATIO:
        return (
            f"train.max_is_ratio = {train.max_is_ratio:g} with train.correction = {train.correction!r} cannot act: the "
            "geometric mean over a sequence stays close to 1; set max_is_ratio = 1.05 and, to mask, min_is_ratio = 0.95"
        )
    return None


def _find_idle_kl(train: TrainConfig) -> str | None:
    """Return an estimator of the KL whose gradient is not the KL's, with a fix."""
    if train.kl == "k1" and train.kl_in == "loss":
        return 'train.kl = "k1" in the loss has no gradient on average: set kl_in = "reward", or kl = "k2" or "k3"'
    if train.kl in ("k2", "k3") and train.kl_in == "reward":
        return f'train.kl = {train.kl!r} with kl_in = "reward": the cost in a reward is the log-ratio; set kl = "k1"'
    if train.kl == "none" and train.kl_in == "reward":
        return 'train.kl_in = "reward" with kl = "none" cannot act: set kl = "k1"'
    if train.has_kl_reward and train.reward_scale == "domain" and train.advantage.startswith("reinforce++"):
        return (
            f'train.kl_in = "reward" with reward_scale = "domain" and advantage = {train.advantage!r}: rewards would '
            'be normalised twice, before the KL and after; set reward_scale = "none"'
        )
    return None


def _find_wrong_drop(train: TrainConfig) -> str | None:
    if train.flat_groups == "drop" and train.has_kl_reward:
        return (
            'train.flat_groups = "drop" with kl_in = "reward": the KL is a part of the reward that differs where the '
            'others are equal, and with a teacher perhaps the only part; set flat_groups = "keep"'
        )
    if train.flat_groups == "drop" and train.advantage in ("gae", "reinforce++", "reinforce++-baseline"):
        return (
            f'train.flat_groups = "drop" with advantage = {train.advantage!r}, which compares more than the episodes '
            'of a group: equal rewards still have a gradient; set flat_groups = "keep"'
        )
    return None


def _find_top_p_conflict(recipe: Recipe) -> str | None:
    """Return a setting under which a truncated distribution of the engines would bias or stop training."""
    train, top_p = recipe.train, recipe.rollout.top_p
    if top_p == 1:
        return None
    if train.proximal == "behaviour":
        return (
            f'rollout.top_p = {top_p:g} with train.proximal = "behaviour": log-probs of engines are of the truncated '
            'distribution, so the clipped ratio would not start at 1; set proximal = "recomputed", or top_p = 1'
        )
    if train.correction in ("none", "sequence", "mask-sequence"):
        return (
            f"rollout.top_p = {top_p:g} with train.correction = {train.correction!r}: each token's weight is its "
            'nucleus, whose product over a sequence vanishes; set correction = "token" or "geometric", or top_p = 1'
        )
    return None


def _describe_group(rollout: RolloutConfig) -> str:
    extra = f" and {rollout.redundancy} extra" if rollout.redundancy else ""
    return f"{rollout.group_size}{extra} episodes"


def _check_rollout(recipe: Recipe) -> None:
    if recipe.rollout.spare_groups and recipe.rollout.mode == "async":
        raise PlanError(
            f'rollout.spare_groups = {recipe.rollout.spare_groups} cannot act: rollout.mode = "async" has no batches; '
            'remove it, or set rollout.mode = "one-step-off" or "sync"'
        )
    rollout, num_env_workers = recipe.rollout, recipe.resources.env.num_workers
    least = rollout.episodes_per_group * num_env_workers
    if recipe.has_rollouts and rollout.max_running < least:
        raise PlanError(
            f"rollout.max_running = {rollout.max_running} cannot hold one group of {_describe_group(rollout)} on "
            f"{f'each of {num_env_workers} env workers' if num_env_workers > 1 else 'the env worker'}: set it to "
            f"{least} or more, or lower rollout.group_size"
        )
    if rollout.late_after_s is not None and not rollout.redundancy:
        raise PlanError(
            f"rollout.late_after_s = {rollout.late_after_s:g} with rollout.redundancy = 0 cannot act: only "
            "extra episodes replace late ones; set rollout.redundancy, or remove late_after_s"
        )


def _check_router(recipe: Recipe) -> None:
    """Check that a table of affinities names only the recipe's domains and "default"."""
    if recipe.router.affinity == "auto":
        return
    known = sorted({*recipe.domains, "default"})
    for name in recipe.router.affinity:
        if name not in known:
            raise PlanError(f"router.affinity.{name}: unknown domain {name!r}: {_suggest_known(name, known)}")


def _check_isolation(recipe: Recipe) -> None:
    """Check that an env worker's memory holds at least one environment of each isolated domain, or one program."""
    env = recipe.resources.env
    for name, domain in recipe.domains.items():
        if domain.python is not None and domain.isolation == "none":
            raise PlanError(
                f'domains.{name}.python = {domain.python!r} needs isolation = "process" or "sandbox": another '
                "interpreter is another process"
            )
        if reserves_place(domain) and not memory_model.num_env_places(
            env.mem_gib_per_worker, each_gib=domain.env_memory_gib
        ):
            least = memory_model.ENV_WORKER_GIB + domain.env_memory_gib
            raise PlanError(
                f"resources.env.mem_gib_per_worker = {env.mem_gib_per_worker:g} cannot hold one environment of "
                f"domains.{name}.env_memory_gib = {domain.env_memory_gib:g} beside the worker itself: raise it to "
                f"{least:g} or more"
            )


def _check_limits(recipe: Recipe) -> None:
    """Check the date, and that no wait of an episode looks like a stall: engines generate nothing meanwhile."""
    if (until := recipe.limits.until) is not None:
        try:
            datetime.fromisoformat(until)
        except ValueError:
            raise PlanError(
                f"limits.until = {until!r} is not a date: give one such as 2026-12-24, or 2026-12-24T18:00"
            ) from None
    stall_min, silence_s = recipe.job.stall_timeout_min, recipe.job.silence_timeout_s
    if silence_s is not None and silence_s >= stall_min * 60:
        raise PlanError(
            f"job.silence_timeout_s = {silence_s:g} is not less than job.stall_timeout_min = {stall_min:g}: the job "
            "would end before a worker that stands still is started again; lower the first or raise the second"
        )
    if recipe.teacher is not None and recipe.teacher.judge and recipe.teacher.timeout_s >= stall_min * 60:
        raise PlanError(
            f"teacher.timeout_s = {recipe.teacher.timeout_s:g} is not less than job.stall_timeout_min = {stall_min:g}: "
            "the job would be ended as stalled; lower the first or raise the second"
        )
    for name, domain in recipe.domains.items():
        for key in ("create_timeout_s", "reset_timeout_s", "step_timeout_s", "reward_timeout_s"):
            if (wait_s := getattr(domain, key)) >= stall_min * 60:
                raise PlanError(
                    f"domains.{name}.{key} = {wait_s:g} is not less than job.stall_timeout_min = {stall_min:g}: the "
                    "job would be ended as stalled; lower the first or raise the second"
                )


def _check_evaluation(recipe: Recipe) -> None:
    """Check that a domain is trained on, held-out ones are evaluated, and the final wait is shorter than a stall."""
    evaluation, held_out = recipe.evaluation, [name for name, domain in recipe.domains.items() if domain.held_out]
    if not recipe.domains and evaluation.every_versions:
        raise PlanError(
            f"evaluation.every_versions = {evaluation.every_versions}, and the recipe has no [domains] to evaluate: "
            "add them, or remove the setting"
        )
    if recipe.domains and len(held_out) == len(recipe.domains):
        raise PlanError(f"every domain is held out ({', '.join(held_out)}): there is nothing left to train on")
    for where, names in (("domains", evaluation.domains), ("options", evaluation.options)):
        for name in names:
            if name not in recipe.domains:
                known = list(recipe.domains)
                raise PlanError(
                    f"evaluation.{where} names {name!r}: {suggest_name(name, known)}the domains are {', '.join(known)}"
                )
    chosen = evaluation.domains or list(recipe.domains)
    idle = [name for name in held_out if name not in chosen or not evaluation.every_versions]
    if idle:
        raise PlanError(
            f"domains.{idle[0]} is held out and never evaluated: set evaluation.every_versions, and add it to "
            "evaluation.domains if that is set"
        )
    if evaluation.every_versions and evaluation.patience_s >= recipe.job.stall_timeout_min * 60:
        raise PlanError(
            f"evaluation.patience_s = {evaluation.patience_s:g} is not less than job.stall_timeout_min = "
            f"{recipe.job.stall_timeout_min:g}: the job would be ended as stalled; lower the first or raise the second"
        )


def _check_tasks(recipe: Recipe) -> None:
    """Check that some domain never ends, and that evaluations of a domain with tasks have separate rows."""
    trained = {name: domain for name, domain in recipe.domains.items() if not domain.held_out}
    if trained and all(domain.task_set is not None and domain.task_set.epochs for domain in trained.values()):
        raise PlanError(
            f"domains.{next(iter(trained))}.tasks.epochs is set, and so every domain ends before the campaign does: "
            "remove it from one domain, and end the campaign by train.num_steps "
            "(one epoch is rows / train.groups_per_step)"
        )
    for name in (recipe.evaluation.domains or list(recipe.domains)) if recipe.evaluation.every_versions else ():
        domain = recipe.domains[name]
        tasks = domain.task_set
        if tasks is None or domain.held_out or tasks.held_out_rows or tasks.held_out_path is not None:
            continue
        raise PlanError(
            f"domains.{name}.tasks has no rows that only evaluations use: set held_out_rows or held_out_path, "
            "or leave the domain out of evaluation.domains"
        )


_IMITATION_SETTINGS = frozenset(
    {
        *("num_steps", "trainer", "sharding", "tensor_parallel", "pipeline_parallel", "expert_parallel"),
        *("context_parallel", "pipeline_chunks", "compile"),
        *(
            "learning_rate",
            "schedule",
            "final_learning_rate",
            "warmup_steps",
            "precision",
            "recompute",
            "rows",
            "adam_betas",
        ),
        *("adam_eps", "max_grad_norm", "weight_decay", "tokens_per_micro_batch", "max_row_tokens"),
        *("lora_rank", "lora_alpha", "moe_aux_coef"),
        *("max_skipped_steps", "checkpoint_every_steps", "keep_checkpoints", "moments_dtype"),
    }
)
"""The settings of [train] that act where every step is one of the warm-up."""


def _check_imitation(recipe: Recipe) -> None:
    """Check that a recipe without domains, which only imitates, sets nothing that is for episodes."""
    if recipe.domains:
        return
    for setting, value in _list_idle_settings(recipe):
        raise PlanError(
            f"{setting}{value} cannot act: without [domains] every step is one of the warm-up, which only imitates: "
            "remove it"
        )


def _list_idle_settings(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield what a recipe without domains sets for episodes alone, with its value."""
    yield from ((f"train.pipeline.{name}", "") for name in recipe.train.pipeline)
    yield from ((f"judge.{name}", "") for name in recipe.judge)
    groups = UNUSED_GROUP_SETTINGS["train"]["groups_per_step"]
    plain_train = TrainConfig(num_steps=0, groups_per_step=groups, learning_rate=1.0)
    tables: tuple[tuple[str, Struct, Struct], ...] = (
        ("train", recipe.train, plain_train),
        ("rollout", recipe.rollout, RolloutConfig(group_size=UNUSED_GROUP_SETTINGS["rollout"]["group_size"])),
        ("router", recipe.router, RouterConfig()),
        ("reward", recipe.reward, RewardConfig()),
        ("spool", recipe.spool, SpoolConfig()),
    )
    for table, given, plain in tables:
        for name in given.__struct_fields__:
            value = getattr(given, name)
            if value != getattr(plain, name) and not (table == "train" and name in _IMITATION_SETTINGS):
                yield f"{table}.{name}", f" = {value!r}"


def _check_warmup(recipe: Recipe) -> None:
    """Check that the warm-up is a part of the steps, and that each rank has a conversation in each of them."""
    warmup, train = recipe.warmup, recipe.train
    if warmup is None:
        return
    if recipe.domains and warmup.steps > train.num_steps:
        raise PlanError(
            f"warmup.steps = {warmup.steps} are more than train.num_steps = {train.num_steps}, which includes them: "
            "lower the first or raise the second"
        )
    if not recipe.domains and train.num_steps and warmup.steps not in (0, train.num_steps):
        raise PlanError(
            f"train.num_steps = {train.num_steps} and warmup.steps = {warmup.steps}: without [domains] every step is "
            "one of the warm-up, so leave train.num_steps out"
        )


def _check_teacher(recipe: Recipe) -> None:
    if recipe.teacher is None:
        return
    reference, own = recipe.train.pipeline.get("reference"), "judge" if recipe.teacher.path is None else "path"
    if reference is not None and (reference.model or reference.function):
        what = "model" if reference.model else "function"
        raise PlanError(f"teacher.{own} and train.pipeline.reference.{what} both set the model of the KL: remove one")
    if not recipe.has_rollouts:
        raise PlanError(
            "teacher is set, and every step is one of the warm-up: a teacher scores what the model itself generates in "
            "[domains], so add them and more steps, or remove [teacher]"
        )
    if recipe.train.kl == "none":
        raise PlanError(
            'teacher is set and train.kl is "none", so nothing would use it: set train.kl = "k1" and kl_in = "reward", '
            "and train.kl_coef, its weight beside the reward"
        )
    if recipe.train.has_kl_reward and not recipe.train.kl_coef:
        raise PlanError(
            'teacher is set, and train.kl_coef = 0 with kl_in = "reward" gives it no weight: raise kl_coef, or remove '
            "[teacher]"
        )
    if recipe.teacher.judge is not None:
        _check_teaching_judge(recipe)


def _check_pipeline(recipe: Recipe) -> None:
    """Check that the user's nodes fit into the pipeline."""
    if recipe.train.pipeline and (wrong := check_user_nodes(recipe.train)):
        raise PlanError("; ".join(wrong))
    num_ranks = recipe.resources.train.num_workers
    for name, node in recipe.train.pipeline.items():
        if node.data_parallel is not None and num_ranks % node.data_parallel:
            raise PlanError(
                f"train.pipeline.{name}.data_parallel = {node.data_parallel} does not divide "
                f"resources.train.num_workers = {num_ranks}: the ranks that have the model are evenly spaced"
            )


def _check_engine(recipe: Recipe) -> None:
    """Check that the GPUs of an engine worker divide into stages, and the model's heads among a stage's GPUs."""
    _check_engine_of(recipe.engine, prefix="")
    if recipe.has_rollouts:
        check_kv(recipe.engine, recipe.model.config, prefix="")
    check_engine_gpus(recipe)
    for name, is_set in (("switch_roles", recipe.router.switch_roles), ("sizing", recipe.router.sizing == "auto")):
        if is_set and not recipe.has_prefill:
            raise PlanError(
                f"router.{name} lets engines switch between prefill and decode, and resources.prefill.num_workers = 0 "
                f"leaves one pool that does both: remove router.{name}, or give prefill workers"
            )


def _check_teaching_judge(recipe: Recipe) -> None:
    """Check that the judge of a teacher exists, and computes what the trainer would with its model."""
    name, judge = recipe.teacher_name, recipe.teaching_judge
    if judge is None:
        known = _suggest_known(name, sorted(recipe.judge)) if recipe.judge else "the recipe has no [judge.NAME]"
        raise PlanError(f"teacher.judge = {name!r}: {known}")
    if judge.engine.backend == "sim":
        raise PlanError(
            f'teacher.judge = {name!r}, whose engine.backend = "sim" has no probabilities: choose "vllm" or "embedded"'
        )
    if recipe.rollout.temperature != 1.0:
        raise PlanError(
            f"rollout.temperature = {recipe.rollout.temperature:g} with teacher.judge: engines give log-probs at "
            "temperature 1: set it to 1, or teacher.path in place of teacher.judge"
        )
    reference = recipe.train.pipeline.get("reference")
    if reference is not None and reference.data_parallel is not None:
        raise PlanError(
            f"train.pipeline.reference.data_parallel = {reference.data_parallel}: the engines of teacher.judge run its "
            "model, and no rank does: remove it"
        )


def _check_judges(recipe: Recipe) -> None:
    """Check the engines of the judges, and that domains name only judges that there are."""
    for name, domain in recipe.domains.items():
        for named in domain.judges:
            if named not in recipe.judge:
                known = (
                    _suggest_known(named, sorted(recipe.judge)) if recipe.judge else "the recipe has no [judge.NAME]"
                )
                raise PlanError(f"domains.{name}.judges names {named!r}: {known}")
        if domain.reward == JUDGE_REWARD and not (
            domain.reward_options.get("judge") or domain.reward_options.get("url")
        ):
            raise PlanError(
                f"domains.{name}.reward = {JUDGE_REWARD!r} asks a model, and no option names one: set "
                f"domains.{name}.reward_options.judge to one of domains.{name}.judges, or reward_options.url"
            )
        for option, chosen in _list_chosen_judges(domain):
            if chosen not in domain.judges:
                raise PlanError(f"domains.{name}.{option} = {chosen!r}: add it to domains.{name}.judges")
    for role, (name, judge) in zip(recipe.judge_roles, recipe.judge.items(), strict=True):
        _check_engine_of(judge.engine, prefix=f"judge.{name}.")
        check_kv(judge.engine, judge.config, prefix=f"judge.{name}.")
        _check_engine_gpus(role, judge.engine, judge, recipe=recipe, prefix=f"judge.{name}.")


def _list_chosen_judges(domain: DomainConfig) -> Iterator[tuple[str, Any]]:
    """Yield the judges that options of a domain name, with the option."""
    if domain.reward == JUDGE_REWARD and (judge := domain.reward_options.get("judge")) is not None:
        yield "reward_options.judge", judge
    called = domain.options.get("calls_judges") if domain.env == AGENT_PROGRAM else None
    if isinstance(called, list):  # another type is refused where the environment is made
        yield from (("options.calls_judges", name) for name in called)


def _check_engine_of(engine: EngineConfig, *, prefix: str) -> None:
    """Check one [engine] table; `prefix` is that of its settings in the recipe."""
    if engine.backend != "vllm" and engine.pipeline_parallel != 1:
        raise PlanError(
            f'{prefix}engine.pipeline_parallel = {engine.pipeline_parallel} with engine.backend = "{engine.backend}", '
            'which has one process: set it to 1, or choose backend = "vllm"'
        )
    for name in VLLM_SETTINGS:
        value = getattr(engine, name)
        if engine.backend != "vllm" and value != getattr(EngineConfig(), name):
            raise PlanError(
                f'{prefix}engine.{name} = {value!r} cannot act with engine.backend = "{engine.backend}": remove it, or '
                'choose backend = "vllm"'
            )
    _check_simulated(engine, prefix)
    _check_parser(f"{prefix}engine.tool_parser", engine.tool_parser, TOOL_PARSER_NAMES)
    _check_parser(f"{prefix}engine.reasoning_parser", engine.reasoning_parser, REASONING_PARSER_NAMES)


def check_kv(engine: EngineConfig, config: Mapping[str, Any], *, prefix: str) -> None:
    """Raise PlanError for compressed attention in the embedded engine, whose keys and values have one size."""
    fields = select_fields(config)
    if engine.backend != "embedded" or not fields.get("kv_lora_rank"):
        return
    key = fields.get("qk_nope_head_dim", 0) + fields.get("qk_rope_head_dim", 0)
    value = fields.get("v_head_dim", 0)
    if key != value:
        raise PlanError(
            f'{prefix}engine.backend = "embedded" keeps keys and values of one size, and those of the model, whose '
            f'attention is compressed, have {key} and {value} numbers a head: set {prefix}engine.backend = "vllm"'
        )


def check_engine_gpus(recipe: Recipe) -> None:
    """Check that the GPUs of the policy's engines can be divided as [engine] wants."""
    for role in ENGINE_ROLES if recipe.has_prefill else ENGINE_ROLES[1:]:
        _check_engine_gpus(role, recipe.engine, recipe.model, recipe=recipe, prefix="")


def _check_engine_gpus(
    role: RoleName, engine: EngineConfig, model: ModelConfig, *, recipe: Recipe, prefix: str
) -> None:
    """Check that the GPUs of a worker can be divided as its [engine] table wants."""
    tiny, model_table = model.tiny, prefix or "model."
    if engine.expert_parallel and model.has_no_experts:
        raise PlanError(f"{prefix}engine.expert_parallel = true, and the model has no experts: remove it")
    gpus, table = recipe.role_resources(role).gpus_per_worker, name_role_resources(role)
    if engine.quantization != "none" and not gpus:
        raise PlanError(
            f'{prefix}engine.quantization = "{engine.quantization}" needs GPUs, and {table}.gpus_per_worker = 0: '
            "remove it"
        )
    if recipe.has_open_gpus(role):
        return
    if gpus % engine.pipeline_parallel:
        raise PlanError(
            f"{table}.gpus_per_worker = {gpus} cannot be divided into {prefix}engine.pipeline_parallel = "
            f"{engine.pipeline_parallel} stages: make one a multiple of the other"
        )
    if gpus % (engine.pipeline_parallel * engine.data_parallel):
        raise PlanError(
            f"{table}.gpus_per_worker = {gpus} cannot be divided among {prefix}engine.data_parallel = "
            f"{engine.data_parallel} copies of the model with {prefix}engine.pipeline_parallel = "
            f"{engine.pipeline_parallel} stages each: make it a multiple of their product"
        )
    per_stage = max(gpus // (engine.pipeline_parallel * engine.data_parallel), 1)
    if engine.backend == "vllm" and tiny is not None and tiny.num_heads % per_stage:
        raise PlanError(
            f"{model_table}tiny.num_heads = {tiny.num_heads} cannot be divided among the {per_stage} GPUs of a "
            f"{role} worker's stage: lower {table}.gpus_per_worker"
        )
    shape = model.architecture if model.config else None
    if engine.backend == "vllm" and shape is not None and not divides_heads(shape, per_stage):
        raise PlanError(
            f"{model_table}config has {shape.num_heads} attention heads and {shape.num_kv_heads} KV heads, which "
            f"cannot be divided among the {per_stage} GPUs of a {role} worker's stage: set {table}.gpus_per_worker "
            f"to a number that divides both, times {prefix}engine.pipeline_parallel"
        )
    if engine.backend == "vllm":
        _check_experts(role, engine, shape, num_ranks=per_stage * engine.data_parallel, prefix=prefix)


def _check_experts(
    role: RoleName, engine: EngineConfig, shape: ModelArchitecture | None, *, num_ranks: int, prefix: str
) -> None:
    """Check that the ranks of a stage, in all copies of the model, can divide its experts, if the model is known."""
    setting, table = f"{prefix}engine.expert_parallel", name_role_resources(role)
    if engine.expert_parallel and num_ranks == 1:
        raise PlanError(
            f"{setting} = true, and a stage of a {role} worker has one rank, which has all experts: raise "
            f"{table}.gpus_per_worker or {prefix}engine.data_parallel, or remove it"
        )
    if shape is None or divides_experts(shape, num_ranks, engine=engine):
        return
    if engine.expert_parallel:
        raise PlanError(
            f"{setting} = true, and {shape.num_experts} experts cannot be divided evenly among the {num_ranks} ranks "
            f"of a {role} worker's stage: choose {table}.gpus_per_worker, over {prefix}engine.pipeline_parallel, or "
            f"{prefix}engine.data_parallel so that the ranks are a divisor, or remove it"
        )
    raise PlanError(
        f"the inner size {shape.expert_inner} of experts cannot be divided among the {num_ranks} ranks of a {role} "
        f"worker's stage: set {setting} = true, or {table}.gpus_per_worker to a divisor"
    )


def _check_parser(setting: str, name: str, names: Collection[str]) -> None:
    if name not in (AUTO_PARSER, *names) and not (
        name.startswith(VLLM_PARSER_PREFIX) and name.removeprefix(VLLM_PARSER_PREFIX)
    ):
        known = ", ".join([AUTO_PARSER, *names])
        raise PlanError(f"{setting} = {name!r} is not known: choose one of {known}, or {VLLM_PARSER_PREFIX}NAME")


def _check_simulated(engine: EngineConfig, prefix: str) -> None:
    if engine.sim != SimulatedEngineConfig() and engine.backend != "sim":
        raise PlanError(
            f'{prefix}engine.sim is set, and engine.backend is "{engine.backend}": choose backend = "sim", or remove '
            "engine.sim"
        )
    for gpu in engine.sim.gpus:
        if gpu not in GPU_CATALOGUE:
            raise PlanError(
                f"{prefix}engine.sim.gpu = {gpu!r} is not in the catalogue: "
                f"{_suggest_known(gpu, sorted(GPU_CATALOGUE))}"
            )


def _suggest_known(name: str, known: list[str]) -> str:
    return f"{suggest_name(name, known)}known are {', '.join(known)}"
