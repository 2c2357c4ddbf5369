"""Settings of [train] that cannot act are refused."""

from typing import Any

import msgspec
import pytest

from hpcrl.config.recipe import Recipe, TrainConfig
from hpcrl.errors import ConfigError, PlanError
from hpcrl.plan.checks import check_recipe
from tests.support.plans import make_recipe, plan_recipe, refuse_plan

ACT_ALONE = {
    *("num_steps", "groups_per_step", "trainer", "learning_rate", "schedule", "advantage", "precision", "aggregation"),
    *("max_grad_norm", "weight_decay", "adam_betas", "adam_eps", "entropy_coef", "tokens_per_micro_batch", "rows"),
    "max_row_tokens",
    *("num_minibatches", "epochs", "max_skipped_steps", "checkpoint_every_steps", "keep_checkpoints", "keep_best"),
    *(
        "moments_dtype",
        "keep_versions",
        "pipeline",
        "lora_rank",
        "proximal",
        "correction",
        "recompute",
        "publish_dtype",
    ),
}
CHECKED_ELSEWHERE = {
    *("ratio", "surrogate", "clip_low", "clip_high", "dual_clip"),  # where the clipped ratio is exactly 1
    *("kl", "kl_in", "flat_groups", "overlong", "response_budget"),
    *("sharding", "offload"),  # by the ranks
    *("tensor_parallel", "pipeline_parallel", "pipeline_chunks", "expert_parallel"),  # by the ranks and the trainer
    *("moe_aux_coef", "router_replay", "context_parallel"),  # by the model
    "compile",  # by the trainer
}
IDLE = {
    "gamma": ((0.9,), 'advantage = "gae" or "trloo"', ("train.advantage=trloo",)),
    "gae_lambda": ((0.9,), 'advantage = "gae"', ("train.advantage=gae",)),
    "critic_learning_rate": ((1e-4,), 'advantage = "gae"', ("train.advantage=gae",)),
    "value_clip": ((0.2,), "num_minibatches", ("train.advantage=gae", "train.epochs=2")),
    "reward_scale": (("domain",), "another train.advantage than grpo", ("train.advantage=rloo",)),
    "overlong_margin": (
        (0.5,),
        'overlong = "punish"',
        ("train.overlong=punish", "train.response_budget.lake=100"),
    ),
    "max_is_ratio": ((5.0,), 'proximal = "recomputed"', ()),
    "min_is_ratio": ((0.9,), "masks", ("train.correction=mask-token",)),
    "kl_coef": ((0.5,), 'kl = "k1"', ("train.kl=k2",)),
    "kl_gamma": ((0.5,), 'kl_in = "reward"', ("train.kl=k1", "train.kl_in=reward")),
    "final_learning_rate": ((1e-7,), 'schedule = "linear"', ("train.schedule=cosine",)),
    "warmup_steps": ((1000,), "num_steps", ("train.num_steps=1001",)),
    "lora_alpha": ((16.0,), "lora_rank", ("train.lora_rank=8",)),
    "publish_lora": (("merged",), "lora_rank", ("train.lora_rank=8",)),
}
"""A value of each setting that is not the default, what the refusal names, and settings with which it acts."""
UNLIKE = {"max_is_ratio": ("train.correction=none",)}
"""Settings with which one does not act, where it does by default."""

VLLM_ONLY = ("engine.seeds=true", "engine.keep_old_kv=true", "engine.any_vllm_version=true")


@pytest.mark.parametrize("name", IDLE)
def test_a_setting_that_cannot_act_is_refused_with_what_it_needs(name: str) -> None:
    (value,), needs, acting = IDLE[name]
    setting = f"train.{name}={value}"
    message = refuse_plan(setting, *UNLIKE.get(name, ()))
    assert f"train.{name} = {value!r} cannot act" in message
    assert needs in message
    assert plan_recipe(setting, *acting)


def test_every_setting_is_known_to_act_alone_or_is_checked() -> None:
    known = ACT_ALONE | CHECKED_ELSEWHERE | IDLE.keys()
    assert {field.name for field in msgspec.structs.fields(TrainConfig)} <= known


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (("train.correction=geometric",), "stays close to 1"),
        (("train.correction=mask-geometric",), "stays close to 1"),
        (("train.response_budget.lake=3",), 'train.aggregation = "fixed"'),
        (("teacher.path=/t", "train.kl=k1", "train.kl_in=reward", "train.kl_coef=0"), "gives it no weight"),
        (("rollout.spare_groups=4",), 'rollout.mode = "async" has no batches'),
        (("train.overlong=punish", "train.response_budget.lake=100000"), "a conversation has at most 512"),
        (
            ("train.kl=k1", "train.kl_in=reward", "train.reward_scale=domain", "train.advantage=reinforce++"),
            "normalised twice",
        ),
    ],
)
def test_combinations_that_cannot_act_are_refused(settings: tuple[str, ...], why: str) -> None:
    assert why in refuse_plan(*settings)


QWEN3_8B = {
    **{"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "max_position_embeddings": 40960,
}
STRETCHED = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}


def make_long_recipe(config: dict[str, Any], *settings: str) -> Recipe:
    """Make a recipe for a model that only its config.json describes, whose budget is 131,072 tokens by default."""
    turns = ("domains.lake.max_turns=16", "rollout.max_new_tokens=8192")
    recipe = make_recipe("train.overlong=punish", *turns, *settings)
    model = msgspec.structs.replace(recipe.model, tiny=None, path="/models/qwen", config=config)
    return msgspec.structs.replace(recipe, model=model)


def test_a_budget_beyond_the_context_of_a_models_own_files_is_refused() -> None:
    with pytest.raises(PlanError, match=r"budget is 131072 tokens, and a conversation has at most 40960"):
        check_recipe(make_long_recipe(QWEN3_8B))


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (QWEN3_8B, ("train.response_budget.lake=40960",)),
        (QWEN3_8B, ("train.overlong=keep",)),
        (QWEN3_8B | STRETCHED, ()),
        ({}, ()),
    ],
)
def test_a_budget_within_the_context_or_of_an_unknown_one_is_accepted(
    config: dict[str, Any], settings: tuple[str, ...]
) -> None:
    check_recipe(make_long_recipe(config, *settings))


@pytest.mark.parametrize("trainer", ["torch", "megatron"])
def test_a_loss_that_balances_experts_is_refused_for_a_model_without_any(trainer: str) -> None:
    settings = ("train.overlong=keep", "train.moe_aux_coef=0.1", f"train.trainer={trainer}")
    with pytest.raises(PlanError, match=r"train\.moe_aux_coef = 0\.1 cannot act: the config\.json of the model has no"):
        check_recipe(make_long_recipe(QWEN3_8B, *settings))
    check_recipe(make_long_recipe(QWEN3_8B | {"num_experts": 128, "moe_intermediate_size": 768}, *settings))


IMITATION_ACTS = {
    *("num_steps", "trainer", "sharding", "tensor_parallel", "pipeline_parallel", "pipeline_chunks", "expert_parallel"),
    *(
        "learning_rate",
        "schedule",
        "final_learning_rate",
        "warmup_steps",
        "precision",
        "recompute",
        "offload",
        "rows",
        "tokens_per_micro_batch",
        "max_row_tokens",
    ),
    *("max_grad_norm", "weight_decay", "adam_betas", "adam_eps", "lora_rank", "lora_alpha", "max_skipped_steps"),
    *("checkpoint_every_steps", "keep_checkpoints", "moments_dtype", "moe_aux_coef", "context_parallel", "compile"),
}
"""The settings of [train] that a recipe without domains has."""
REINFORCEMENT_VALUES = {
    **{"advantage": "gae", "gamma": 0.9, "gae_lambda": 0.9, "critic_learning_rate": 1e-4, "value_clip": 0.2},
    **{"flat_groups": "drop", "reward_scale": "domain", "response_budget.lake": 9, "overlong": "punish"},
    **{"overlong_margin": 0.5, "ratio": "sequence", "surrogate": "cispo", "clip_low": 0.1, "clip_high": 0.3},
    **{"dual_clip": 3.0, "aggregation": "fixed", "proximal": "behaviour", "correction": "none", "max_is_ratio": 5.0},
    **{"min_is_ratio": 0.9, "kl": "k3", "kl_in": "reward", "kl_coef": 0.5, "kl_gamma": 0.5, "entropy_coef": 0.1},
    **{"num_minibatches": 2, "epochs": 2, "keep_best": 1, "keep_versions": 9, "pipeline.loss.function": "m:f"},
    **{"router_replay": "true", "publish_dtype": "bfloat16", "publish_lora": "merged", "groups_per_step": 8},
}


def test_every_setting_acts_in_imitation_or_is_refused_there() -> None:
    refused = {name.partition(".")[0] for name in REINFORCEMENT_VALUES}
    assert {field.name for field in msgspec.structs.fields(TrainConfig)} == IMITATION_ACTS | refused


@pytest.mark.parametrize("name", REINFORCEMENT_VALUES)
def test_a_setting_of_reinforcement_is_refused_in_a_recipe_that_only_imitates(name: str) -> None:
    with pytest.raises(
        PlanError, match=rf"^train\.{name.partition('.')[0]}.* cannot act: without \[domains\] every step"
    ) as caught:
        plan_recipe(f"train.{name}={REINFORCEMENT_VALUES[name]}", recipe="sft")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "setting",
    [
        "rollout.temperature=0.5",
        "rollout.group_size=16",
        "router.fair_domains=false",
        "reward.concurrency=3",
        "judge.grader.tiny={}",
    ],
)
def test_tables_of_episodes_are_refused_in_a_recipe_that_only_imitates(setting: str) -> None:
    table = setting.partition(".")[0]
    with pytest.raises(PlanError, match=rf"^{table}\..* cannot act: without \[domains\]"):
        plan_recipe(setting, recipe="sft")


def test_recipes_that_only_imitate_may_have_what_the_trainer_uses() -> None:
    settings = ("train.rows=packed", "train.lora_rank=8", "train.schedule=linear", "rollout.group_size=2")
    assert plan_recipe(*settings, recipe="sft")


@pytest.mark.parametrize("setting", VLLM_ONLY)
def test_settings_of_vllm_are_refused_where_another_engine_runs(setting: str) -> None:
    name = setting.partition("=")[0]
    why = r' cannot act with engine\.backend = "embedded": remove it, or choose backend = "vllm"'
    with pytest.raises(PlanError, match=rf"^{name} = .*{why}"):
        check_recipe(make_recipe(setting))
    check_recipe(make_recipe(setting, "engine.backend=vllm"))


COMPRESSED = {
    **{"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61},
    **{"num_attention_heads": 128, "vocab_size": 129280, "kv_lora_rank": 512, "qk_nope_head_dim": 128},
    **{"qk_rope_head_dim": 64, "v_head_dim": 128},
}


@pytest.mark.parametrize("table", ["", "judge.grader."])
def test_a_model_with_compressed_kv_needs_vllm(table: str) -> None:
    model = f"{table}path" if table else "model.path"
    config = f"{table}config" if table else "model.config"
    settings = (f"{model}=/models/deepseek", *(f"{config}.{name}={value}" for name, value in COMPRESSED.items()))
    wanted = rf'^{table}engine\.backend = "embedded" .* have 192 and 128 numbers a head: set .*backend = "vllm"$'
    with pytest.raises(PlanError, match=wanted):
        check_recipe(make_recipe(*settings))
    check_recipe(make_recipe(*settings, f"{table}engine.backend=vllm"))
    check_recipe(make_recipe(*settings, f"{config}.v_head_dim=192"))
    if not table:
        check_recipe(make_recipe(*settings, name="sft"))  # which has no engines


def test_copies_and_rounded_weights_need_the_gpus_for_them() -> None:
    vllm = ("engine.backend=vllm", "resources.prefill.gpus_per_worker=4", "resources.decode.gpus_per_worker=4")
    assert "gpus_per_worker = 4 cannot be divided among engine.data_parallel = 3 copies" in refuse_plan(
        *vllm, "engine.data_parallel=3"
    )
    assert 'engine.quantization = "fp8" needs GPUs, and resources.prefill.gpus_per_worker = 0' in refuse_plan(
        vllm[0], "resources.prefill.gpus_per_worker=0", "engine.quantization=fp8"
    )
    check_recipe(make_recipe(*vllm, "engine.data_parallel=2", "engine.quantization=fp8"))


EXPERTS = (
    *("model.config.model_type=qwen3_moe", "model.config.hidden_size=256", "model.config.intermediate_size=512"),
    *("model.config.num_hidden_layers=2", "model.config.num_attention_heads=8", "model.config.num_key_value_heads=4"),
    *("model.config.vocab_size=1000", "model.config.num_experts=12", "model.config.num_experts_per_tok=2"),
    *("model.config.moe_intermediate_size=64", "engine.backend=vllm", "resources.prefill.num_workers=0"),
    *("model.tiny.num_heads=24", "model.tiny.hidden_size=96"),
)
WHOLE = "engine.expert_parallel=true"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            (*EXPERTS, "resources.decode.gpus_per_worker=1"),
            "one rank, which has all experts: raise resources.decode.gpus",
        ),
        ((*EXPERTS, "resources.decode.gpus_per_worker=0"), "one rank, which has all experts"),
        (
            (*EXPERTS, "resources.decode.gpus_per_worker=2", "engine.pipeline_parallel=2"),
            "one rank, which has all experts",
        ),
        (
            (*EXPERTS, "resources.decode.gpus_per_worker=8"),
            "12 experts cannot be divided evenly among the 8 ranks of a decode worker's stage",
        ),
        (
            (*EXPERTS, "resources.decode.gpus_per_worker=16", "engine.data_parallel=2", "engine.pipeline_parallel=2"),
            "12 experts cannot be divided evenly among the 8 ranks",
        ),
        (("engine.backend=vllm", "engine.data_parallel=2"), "true, and the model has no experts: remove it"),
        ((*EXPERTS, "model.config.num_experts=0", "engine.data_parallel=2"), "the model has no experts: remove it"),
        ((*EXPERTS, 'engine.backend="embedded"'), "engine.expert_parallel = True cannot act with engine.backend"),
    ],
)
def test_experts_that_ranks_cannot_divide_are_refused(settings: tuple[str, ...], problem: str) -> None:
    assert problem in refuse_plan(*settings, WHOLE)


def test_gpus_that_the_planner_chooses_are_checked_too() -> None:
    """No number of GPUs that fill nodes of four divides seven experts."""
    open_gpus = (*EXPERTS, WHOLE, "resources.decode.gpus_per_worker=auto")
    assert plan_recipe(*open_gpus, site="perlmutter").role("decode").gpus_per_worker == 2
    with pytest.raises(PlanError, match="a stage of a decode worker has one rank"):
        plan_recipe(*open_gpus, "model.config.num_experts=7", site="perlmutter")


def test_experts_are_divided_over_all_copies_of_the_model_whole_or_by_rows() -> None:
    for settings in (
        ("resources.decode.gpus_per_worker=4",),
        ("resources.decode.gpus_per_worker=4", "engine.data_parallel=4"),
        ("resources.decode.gpus_per_worker=8", "engine.data_parallel=2", "engine.pipeline_parallel=2"),
        ("resources.decode.gpus_per_worker=0", "engine.data_parallel=3"),
    ):
        check_recipe(make_recipe(*EXPERTS, WHOLE, *settings))
    rows = ("resources.decode.gpus_per_worker=12", "engine.data_parallel=3")
    assert "the inner size 64 of experts cannot be divided among the 12 ranks" in refuse_plan(*EXPERTS, *rows)
    check_recipe(make_recipe(*EXPERTS, *rows, WHOLE))
    check_recipe(make_recipe(*EXPERTS, *rows, "model.config.model_type=gpt_oss"))  # vLLM adds rows


def test_weights_that_would_be_rounded_twice_are_refused() -> None:
    twice = ('engine.backend="vllm"', 'engine.dtype="float16"', 'train.publish_dtype="bfloat16"')
    assert 'train.publish_dtype = "bfloat16" and engine.dtype = "float16" would round each weight twice' in refuse_plan(
        *twice
    )
    assert plan_recipe(*twice[:2], 'train.publish_dtype="float16"')


MODEL = (
    *("model.config.model_type=qwen3", "model.config.hidden_size=256", "model.config.intermediate_size=512"),
    *("model.config.num_hidden_layers=2", "model.config.num_attention_heads=8", "model.config.num_key_value_heads=4"),
    *("model.config.vocab_size=1000", "model.config.max_position_embeddings=4096"),
)
VLLM = ("engine.backend=vllm", "model.tiny.num_heads=24", "model.tiny.hidden_size=96")
SIX_RANKS = ("resources.train.num_workers=6",)
MEGATRON = (*SIX_RANKS, "train.trainer=megatron")
DYNAMIC = ("model.config.rope_scaling.rope_type=dynamic", "model.config.rope_scaling.factor=2.0")
YARN = ("model.config.rope_scaling.rope_type=yarn", "model.config.rope_scaling.factor=2.0")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (("model.config.num_key_value_heads=3",), "no multiple of num_key_value_heads = 3"),
        (("model.config.num_attention_heads=12",), "do not divide hidden_size = 256"),
        (("engine.max_model_len=5000",), "engine.max_model_len = 5000: the model's context has 4096 tokens"),
        (("engine.max_model_len=8193", *YARN), "engine.max_model_len = 8193: the model's context has 8192 tokens"),
        (("rollout.max_new_tokens=5000",), "rollout.max_new_tokens = 5000: prompt and answer together have 4096"),
        (("train.context_parallel=2",), "is not a multiple of train.context_parallel = 2: set it to 2"),
        ((*SIX_RANKS, "train.context_parallel=3"), "does not divide the 8 attention heads of the model: set it to 2"),
        ((*SIX_RANKS, "train.context_parallel=2", "model.config.model_type=gemma2"), "not known to be right"),
        ((*SIX_RANKS, "train.context_parallel=2", *DYNAMIC), 'of type "dynamic"'),
        ((*VLLM, "resources.decode.gpus_per_worker=3"), "8 attention heads and 4 KV heads, which cannot be divided"),
        (("train.trainer=megatron", "train.tensor_parallel=3"), "3 does not divide the model's 4 query groups"),
        (("model.config.quantization_config.quant_method=fp8",), "quantised weights (quantization_config in its c"),
        ((*MEGATRON, "model.config.model_type=gemma2"), "and this one is 'gemma2'"),
        ((*MEGATRON, "train.tensor_parallel=3"), "tensor_parallel = 3 does not divide the model's 4 query groups"),
        ((*MEGATRON, "train.pipeline_parallel=3"), "pipeline_parallel = 3 are more stages than the model's 2 layers"),
        (
            (*SIX_RANKS, "train.expert_parallel=2"),
            'train.expert_parallel = 2 is for trainer "megatron": remove it, or set train.trainer = "megatron"',
        ),
        (
            (*SIX_RANKS, "train.tensor_parallel=2", "train.pipeline_parallel=1", "train.pipeline_chunks=2"),
            'train.tensor_parallel = 2 and train.pipeline_chunks = 2 are for trainer "megatron": remove them',
        ),
        (
            (*MEGATRON, "train.rows=packed"),
            'train.rows = "packed" is not supported by trainer "megatron": set it to "pad',
        ),
    ],
)
def test_a_model_whose_config_does_not_fit_the_recipe_is_refused(settings: tuple[str, ...], problem: str) -> None:
    check_recipe(make_recipe(*MODEL))
    with pytest.raises(PlanError) as refused:
        check_recipe(make_recipe(*MODEL, *settings))
    assert problem in str(refused.value)


@pytest.mark.parametrize("value", ["0", "-3", "3.5", '"many"', "true"])
@pytest.mark.parametrize("field", ["num_hidden_layers", "num_key_value_heads", "hidden_size", "head_dim"])
def test_a_size_that_is_no_count_is_refused(field: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.config cannot be used \({field} = .* is not a whole number"):
        make_recipe(*MODEL, f"model.config.{field}={value}")


@pytest.mark.parametrize(
    "settings", [("engine.max_model_len=8192", *YARN), (*VLLM, "resources.decode.gpus_per_worker=8")]
)
def test_a_stretched_context_and_copied_kv_heads_are_accepted(settings: tuple[str, ...]) -> None:
    check_recipe(make_recipe(*MODEL, *settings))


@pytest.mark.parametrize("key", ["create_timeout_s", "reset_timeout_s", "step_timeout_s", "reward_timeout_s"])
def test_a_wait_that_looks_like_a_stall_is_refused(key: str) -> None:
    refusal = refuse_plan(f"domains.lake.{key}=120", "job.stall_timeout_min=2")
    assert refusal.startswith(f"domains.lake.{key} = 120 is not less than job.stall_timeout_min = 2: the job would be")
    check_recipe(make_recipe(f"domains.lake.{key}=119", "job.stall_timeout_min=2", "domains.lake.reward_timeout_s=60"))


def test_a_silence_that_is_not_shorter_than_a_stall_is_refused():
    refusal = refuse_plan("job.silence_timeout_s=900")
    assert refusal.startswith("job.silence_timeout_s = 900 is not less than job.stall_timeout_min = 15: the job would")


def test_a_limit_that_is_not_a_date_is_refused() -> None:
    assert "limits.until = 'soon' is not a date: give one such as 2026-12-24" in refuse_plan('limits.until="soon"')
    for spelled in ('"2026-12-24T18:00"', "2026-12-24", "2026-12-24T18:00:00", "2026-12-24T18:00:00Z"):
        check_recipe(make_recipe(f"limits.until={spelled}"))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (("train.tensor_parallel=2",), "train.tensor_parallel = 2 does not divide the model's 1 query groups"),
        (("train.pipeline_parallel=4",), "train.pipeline_parallel = 4 are more stages than the model's 2 layers"),
        (
            ("train.pipeline_parallel=2", "train.pipeline_chunks=2"),
            "train.pipeline_chunks = 2 on each of 2 stages are more parts than the model's 2",
        ),
        (("train.trainer=torch", "train.context_parallel=4"), "train.context_parallel = 4 does not divide the 2 att"),
    ],
)
def test_degrees_that_do_not_divide_a_tiny_model_are_refused(settings: tuple[str, ...], problem: str) -> None:
    assert problem in refuse_plan("train.trainer=megatron", "resources.train.num_workers=4", *settings)


def test_sizes_of_a_model_of_another_family_are_called_estimates() -> None:
    def warn(family: str) -> list[str]:
        plan = plan_recipe(f"model.config.model_type={family}", recipe="qwen3-8b-math", site="perlmutter")
        return [line for line in plan.warnings if "whose sizes are estimates" in line]

    assert warn("t5")[0].startswith("the model is of type 't5' (model_type in its config.json)")
    assert not warn("qwen3")
