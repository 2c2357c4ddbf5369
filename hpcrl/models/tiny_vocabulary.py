"""The tokens of the tiny model, without torch.

MARKS, CHARACTERS     what its tokens are, in order
CHAT_TEMPLATE         its chat template
make_tiny_vocabulary  their ids, as its tokenizer writes them
make_tiny_tokenizer   the tokenizer
write_tiny_tokenizer  the files that tokenize conversations as a job's tiny model does
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MARKS = ("<pad>", "<eos>", "<user>", "<agent>")
CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<agent>{{ message['content'] }}<eos>"
    "{% else %}<user>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<agent>{% endif %}"
)


def make_tiny_vocabulary() -> dict[str, int]:
    """Return the ids of the marks and of the characters, which byte-level BPE writes as symbols."""
    from tokenizers import pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = [byte_level.pre_tokenize_str(character)[0][0] for character in CHARACTERS]
    return {token: number for number, token in enumerate([*MARKS, *symbols])}


def make_tiny_tokenizer() -> "Tokenizer":
    """Make byte-level BPE without merges: transformers reads the tokenizer of any Qwen2 as byte-level BPE."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(make_tiny_vocabulary(), []))
    tokenizer.normalizer = normalizers.Replace(Regex(r"[^\n -~]"), "?")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_tiny_tokenizer(directory: Path) -> None:
    """Write tokenizer and chat template, which is all that tokenizing conversations needs."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": "<eos>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
