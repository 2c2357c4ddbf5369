"""The fields read from a model's config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrl.errors import EngineError
from hpcrl.models.model_config import read_context_length, read_model_config, read_model_limits

PLAIN = {"max_position_embeddings": 512, "vocab_size": 100, "hidden_size": 64}


def write(model: Path, config: dict[str, Any]) -> Path:
    (model / "config.json").write_text(json.dumps(config))
    return model


def test_limits_come_from_the_model(tmp_path: Path) -> None:
    assert read_model_limits(write(tmp_path, PLAIN), max_model_len=None) == (512, 100)


def test_the_recipe_chooses_the_context_of_an_engine(tmp_path: Path) -> None:
    model = write(tmp_path, {"vocab_size": 100})
    assert read_model_limits(model, max_model_len=256) == (256, 100)


@pytest.mark.parametrize(("max_model_len", "length"), [(None, 512), (256, 256), (1024, 512)])
def test_the_smaller_context_bounds_a_conversation(tmp_path: Path, max_model_len: int | None, length: int) -> None:
    assert read_context_length(write(tmp_path, PLAIN), max_model_len=max_model_len) == length


def test_a_language_model_inside_another_model_is_read(tmp_path: Path) -> None:
    model = write(tmp_path, {"text_config": PLAIN, "hidden_size": 1, "tie_word_embeddings": True})
    config = read_model_config(model / "config.json")
    assert (config.context_length, config.vocabulary_size) == (512, 100)
    assert (config.fields["hidden_size"], config.fields["tie_word_embeddings"]) == (64, True)


def test_a_nested_configuration_that_is_null_is_left_out(tmp_path: Path) -> None:
    assert read_context_length(write(tmp_path, PLAIN | {"text_config": None}), max_model_len=None) == 512


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"vocab_size": 100}, r"config\.json has no max_position_embeddings: set engine\.max_model_len"),
        ({"max_position_embeddings": 512}, r"config\.json has no vocab_size"),
    ],
)
def test_a_missing_field_is_named(tmp_path: Path, config: dict[str, Any], problem: str) -> None:
    with pytest.raises(EngineError, match=problem):
        read_model_limits(write(tmp_path, config), max_model_len=None)
