"""The replay of routers is refused where engines report no experts, or the trainer cannot replay them."""

from typing import Any

import msgspec
import pytest

from hpcrl.errors import PlanError
from hpcrl.plan.checks import check_recipe
from tests.support.plans import make_recipe, plan_recipe, refuse_plan

QWEN3_MOE = {
    **{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936},
    **{"max_position_embeddings": 40960, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}
DENSE = {name: value for name, value in QWEN3_MOE.items() if "expert" not in name} | {"model_type": "qwen3"}
ON_GPUS = ("engine.backend=vllm", "resources.prefill.num_workers=0", "resources.decode.gpus_per_worker=4")


def check(config: dict[str, Any], *settings: str) -> None:
    recipe = make_recipe("train.router_replay=true", *settings)
    model = msgspec.structs.replace(recipe.model, tiny=None, path="/models/qwen", config=config)
    check_recipe(msgspec.structs.replace(recipe, model=model))


@pytest.mark.parametrize(
    ("config", "settings", "problem"),
    [
        (DENSE, (), r"cannot act: the model has no experts; remove it"),
        (QWEN3_MOE | {"model_type": "gpt_oss"}, (), r'a model of type "gpt_oss": only for deepseek_v3, glm4_moe, mix'),
        (QWEN3_MOE, ("engine.backend=sim",), r'engine\.backend = "sim", which has no model: remove it'),
        (
            QWEN3_MOE,
            ("engine.backend=vllm", "resources.decode.gpus_per_worker=0"),
            "Model Runner V2 alone, which needs",
        ),
        (QWEN3_MOE, (*ON_GPUS, "engine.pipeline_parallel=2"), r"pipeline_parallel = 2: vLLM reports no experts then"),
        (QWEN3_MOE, (*ON_GPUS, "resources.prefill.num_workers=1"), r"set resources\.prefill\.num_workers = 0"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_a_fix(
    config: dict[str, Any], settings: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(PlanError, match=rf"^train\.router_replay = true .*{problem}"):
        check(config, *settings)


@pytest.mark.parametrize(
    "settings",
    [
        *((), ("resources.prefill.num_workers=0",), ON_GPUS, ("train.lora_rank=8",), ("train.trainer=megatron",)),
        ("engine.backend=vllm", "resources.decode.gpus_per_worker=4"),
    ],
)
def test_what_can_be_replayed_is_planned(settings: tuple[str, ...]) -> None:
    check(QWEN3_MOE, *settings)
    check({}, *settings)


@pytest.mark.parametrize("is_replayed", [False, True])
def test_engines_whose_experts_are_replayed_are_one_pool_where_that_is_left_open(is_replayed: bool) -> None:
    settings = ["model.path=/models/qwen", *(f"model.config.{name}={value}" for name, value in QWEN3_MOE.items())]
    settings += ["engine.backend=vllm", "resources.prefill.gpus_per_worker=4", "resources.decode.gpus_per_worker=4"]
    settings += ["resources.train.num_workers=32", "train.groups_per_step=16", "train.precision=bf16"]
    settings += ["engine.max_model_len=8192", f"train.router_replay={str(is_replayed).lower()}"]
    plan = plan_recipe(*settings, site="perlmutter")
    assert plan.has_role("prefill") == (not is_replayed)


def test_a_tiny_model_has_no_experts() -> None:
    assert "train.router_replay = true cannot act: the model has no experts" in refuse_plan("train.router_replay=true")
