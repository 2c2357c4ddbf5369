"""The dtype of the weights that engines are sent: this is the one place that chooses it. Pure.

choose_published_dtype  the dtype, from a recipe and the config.json of its model
read_stored_dtype       the dtype that a config.json names
"""

from collections.abc import Mapping
from typing import Any, get_args

from hpcrl.config.recipe import Recipe, WeightsDtype

WEIGHTS_DTYPES: tuple[WeightsDtype, ...] = get_args(WeightsDtype)


def choose_published_dtype(recipe: Recipe, config: Mapping[str, Any]) -> WeightsDtype:
    """Choose the dtype of published weights; `config` has the fields of the model's config.json, if they are known.

    By default it is the one that the engines round to anyway. Where that is not known it is float32: vLLM decides by
    its GPU what it does with a model whose config.json names float32 or nothing.
    """
    asked, engine = recipe.train.publish_dtype, recipe.engine
    if asked != "auto":
        return asked
    if engine.backend == "embedded":
        return "float32"
    if engine.dtype != "auto":
        return engine.dtype
    return read_stored_dtype(config) or "float32"


def read_stored_dtype(config: Mapping[str, Any]) -> WeightsDtype | None:
    """Return the dtype that the fields of a config.json name; None if it is none that weights may have."""
    named = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return next((known for known in WEIGHTS_DTYPES if known == named), None)
