"""Whether engines are sent adapters alone, by the recipe and the model's config.json."""

import pytest

from hpcrl.config.published_adapters import publishes_adapters
from hpcrl.errors import PlanError
from hpcrl.plan.checks import check_recipe
from tests.support.plans import make_recipe

VLLM, LORA = 'engine.backend="vllm"', "train.lora_rank=8"
ALONE, MERGED = 'train.publish_lora="adapters"', 'train.publish_lora="merged"'


@pytest.mark.parametrize(
    ("settings", "family", "expected"),
    [
        ((VLLM, LORA), "qwen3", True),
        ((VLLM, LORA), "qwen3_moe", False),
        ((VLLM, LORA), None, False),
        ((VLLM, LORA, ALONE), "qwen3_moe", True),
        ((VLLM, LORA, MERGED), "qwen3", False),
        ((VLLM,), "qwen3", False),
        ((LORA,), "qwen3", False),  # the embedded engine has no adapters
        ((VLLM, LORA, 'engine.quantization="fp8"'), "qwen3", False),  # never run
        ((VLLM, "train.lora_rank=513"), "qwen3", False),  # more than vLLM takes
    ],
)
def test_adapters_are_sent_alone_where_engines_are_known_to_take_them(
    settings: tuple[str, ...], family: str | None, expected: bool
) -> None:
    recipe = make_recipe('model.path="/models/m"', *settings)
    assert publishes_adapters(recipe, {"model_type": family} if family else {}) == expected


def test_a_tiny_model_is_of_a_known_family() -> None:
    assert publishes_adapters(make_recipe(VLLM, LORA), {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((LORA, ALONE), 'engine.backend = "embedded" takes whole weights: set train.publish_lora = "merged"'),
        ((VLLM, "train.lora_rank=513", ALONE), "train.lora_rank = 513 is above vLLM's limit of 512: lower it"),
        ((VLLM, ALONE), "train.publish_lora = 'adapters' cannot act: it needs train.lora_rank above 0"),
    ],
)
def test_adapters_that_engines_cannot_take_are_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_recipe(make_recipe(*settings))
