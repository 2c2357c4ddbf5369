"""Read the config.json of a model, as transformers writes it (the one place that does), and its vocabulary.

ModelDescription, read_model_config  context length, vocabulary, and the fields that give its shape
ModelLimits, read_model_limits       the largest input of an engine of the model
read_vocabulary                      the tokens of its tokenizer
read_context_length                  the longest conversation in tokens
"""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hpcrl.errors import ConfigError, EngineError
from hpcrl.system.files import read_json


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a config.json about a language model; None for an absent field."""

    context_length: int | None
    vocabulary_size: int | None
    fields: dict[str, Any]
    """All fields; a multimodal model keeps those of its language model in `text_config`, which take precedence."""


class ModelLimits(NamedTuple):
    """The limits of a model's input."""

    context_length: int
    vocabulary_size: int


def read_model_config(path: Path) -> ModelDescription:
    """Read one config.json; ValueError if it has no JSON object."""
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"it has a JSON {type(config).__name__}, no object")
    fields = config | (config.get("text_config") or {})
    context_length, vocabulary_size = fields.get("max_position_embeddings"), fields.get("vocab_size")
    return ModelDescription(
        context_length=None if context_length is None else int(context_length),
        vocabulary_size=None if vocabulary_size is None else int(vocabulary_size),
        fields=fields,
    )


def read_model_limits(model: Path, *, max_model_len: int | None) -> ModelLimits:
    """Read the limits of the model in `model`; its context is `max_model_len` if that is given."""
    path = model / "config.json"
    config = read_model_config(path)
    context_length = max_model_len or _require_context(config, path)
    if config.vocabulary_size is None:
        raise EngineError(f"{path} has no vocab_size: save the model with its transformers configuration")
    return ModelLimits(context_length, config.vocabulary_size)


def read_context_length(model: Path, *, max_model_len: int | None) -> int:
    """Read the context length of the model in `model`; `max_model_len` if that is less, or all that is known."""
    path = model / "config.json"
    config = read_model_config(path)
    if config.context_length is None and max_model_len is not None:
        return max_model_len
    context_length = _require_context(config, path)
    return min(context_length, max_model_len or context_length)


def _require_context(config: ModelDescription, path: Path) -> int:
    if config.context_length is None:
        raise EngineError(f"{path} has no max_position_embeddings: set engine.max_model_len")
    return config.context_length


def read_vocabulary(model_dir: Path) -> dict[str, int]:
    """Return the ids of the tokenizer's tokens by their text; raises ConfigError if it cannot be read."""
    from tokenizers import Tokenizer

    try:
        return dict(Tokenizer.from_file(str(model_dir / "tokenizer.json")).get_vocab(with_added_tokens=True))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigError(
            f"{model_dir / 'tokenizer.json'} cannot be read ({error}): save the tokenizer again"
        ) from error
