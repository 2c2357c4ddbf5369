"""A tiny model made on the spot: a seeded Qwen2 with one token per character, for demos, tests and benches.

Its 100 tokens are printable ASCII, newline and four marks, so that a random policy soon generates something valid and
learns in seconds. Any other character in a text becomes "?".
"""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from hpcrl.config.recipe import TinyModel
from hpcrl.errors import ConfigError
from hpcrl.models.tiny_vocabulary import CHAT_TEMPLATE, MARKS, make_tiny_tokenizer
from hpcrl.system.files import staged_path, sync_file


def make_tiny_model(directory: Path, spec: TinyModel, *, seed: int) -> None:
    """Make `directory` appear with a model that transformers loads; the same seed gives the same bytes."""
    if directory.exists():
        raise ConfigError(f"{directory} exists already: a tiny model is made once; remove it to make another")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(_make_config(spec))
    directory.parent.mkdir(parents=True, exist_ok=True)
    with staged_path(directory) as temporary:
        temporary.mkdir(mode=0o700)
        model.save_pretrained(temporary)
        _make_tokenizer(spec).save_pretrained(temporary)
        for path in temporary.iterdir():
            sync_file(path)


def _make_config(spec: TinyModel) -> Qwen2Config:
    return Qwen2Config(
        **{name: value for name, value in spec.config.items() if name != "model_type"},
        pad_token_id=MARKS.index("<pad>"),
        bos_token_id=None,
        eos_token_id=MARKS.index("<eos>"),
        dtype="float32",
    )


def _make_tokenizer(spec: TinyModel) -> PreTrainedTokenizerFast:
    """Make the tokenizer that transformers saves."""
    return PreTrainedTokenizerFast(
        tokenizer_object=make_tiny_tokenizer(),
        pad_token="<pad>",
        unk_token="<pad>",  # not needed, but without it transformers adds its own
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<agent>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=spec.context_length,
        clean_up_tokenization_spaces=False,
    )
