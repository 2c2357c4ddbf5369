"""The choice to send engines adapters (LoRA) alone: this is the one place that makes it. Pure.

publishes_adapters      the choice, from a recipe and the config.json of its model
find_adapter_conflict   why the engines of a recipe cannot take adapters
"""

from collections.abc import Mapping
from typing import Any

from hpcrl.config.recipe import Recipe

MAX_ADAPTER_RANK = 512
"""vLLM's limit."""
ADAPTER_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""The families, by `model_type`, whose linear layers have the same names in vLLM: tests/vllm runs Qwen2."""
TINY_FAMILY = "qwen2"
"""The family of a tiny model."""


def publishes_adapters(recipe: Recipe, config: Mapping[str, Any]) -> bool:
    """Return whether engines are sent adapters alone; `config` has the fields of the model's config.json, if known."""
    train = recipe.train
    if not train.lora_rank or train.publish_lora == "merged":
        return False
    if train.publish_lora == "adapters":
        return True
    family = TINY_FAMILY if recipe.model.path is None else config.get("model_type")
    is_plain = recipe.engine.quantization == "none"
    return is_plain and family in ADAPTER_FAMILIES and find_adapter_conflict(recipe) is None


def find_adapter_conflict(recipe: Recipe) -> str | None:
    """Return why the engines cannot take adapters, with the remedy; None if they can."""
    if recipe.engine.backend == "embedded":
        return 'engine.backend = "embedded" takes whole weights: set train.publish_lora = "merged"'
    if recipe.train.lora_rank > MAX_ADAPTER_RANK:
        return (
            f"train.lora_rank = {recipe.train.lora_rank} is above vLLM's limit of {MAX_ADAPTER_RANK}: lower it, or set "
            'train.publish_lora = "merged"'
        )
    return None
