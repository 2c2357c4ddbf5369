"""Count the conversations that are longer than the model's context: `python -m hpcrl.roles.warmup_check < recipe.json`.

main                      print a note on those that a warm-up leaves out, or the refusal if it leaves all out
count_long_conversations  the numbers, by tokenizing the data as the trainer does
LongConversations         its result
MAX_CHECKED_BYTES         limit

It is a separate process, without torch, since a chat template is a program that may run without end.
"""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcrl.config.recipe import ModelConfig, Recipe, WarmupConfig
from hpcrl.envs.task_set import iterate_conversations
from hpcrl.errors import ConfigError, HpcrlError
from hpcrl.models.chat_layout import load_chat_template
from hpcrl.models.conversation_data import parse_conversation
from hpcrl.models.model_config import read_model_config
from hpcrl.models.tiny_vocabulary import write_tiny_tokenizer
from hpcrl.roles.warmup import WARMUP_DOMAIN, tokenize_conversation
from hpcrl.rollout.agents.answer_parser import add_call_form
from hpcrl.spool.ids import make_episode_id
from hpcrl.spool.record import Trajectory
from hpcrl.spool.rows import list_row_turns, list_spans
from hpcrl.system.exit_codes import EXIT_DONE, EXIT_USAGE

MAX_CHECKED_BYTES = 8 << 20
"""Conversations after these are not read, as tokenizing takes seconds."""


class LongConversations(NamedTuple):
    """The numbers of conversations that were read, and of those with a row beyond the context."""

    num: int
    num_long: int
    num_lost: int
    """The number of conversations of which no row is trained on."""
    is_whole: bool
    """True if all were read."""


def main() -> int:
    recipe = msgspec.json.decode(sys.stdin.buffer.read(), type=Recipe)
    try:
        sys.stdout.write(_describe_lengths(recipe))
    except HpcrlError as error:
        sys.stdout.write(str(error))
        return EXIT_USAGE
    return EXIT_DONE


def _describe_lengths(recipe: Recipe) -> str:
    """Return a note on conversations that are too long, empty if there are none; ConfigError if all are."""
    context = _read_context(recipe.model)
    if recipe.warmup is None or context is None:
        return ""
    found = count_long_conversations(recipe, recipe.warmup, context=context)
    among = f"{found.num_long} of {'' if found.is_whole else 'the first '}{found.num} conversations"
    longer = f"warmup.path: {among} are longer than the model's context of {context} tokens"
    if found.is_whole and found.num_lost == found.num:
        raise ConfigError(f"{longer}, and nothing is left to train on: shorten them, or choose another model")
    return f"{longer}: what is longer is not trained on" if found.num_long else ""


def count_long_conversations(recipe: Recipe, warmup: WarmupConfig, *, context: int) -> LongConversations:
    """Count the conversations of files; raise ConfigError for one that the chat template cannot render."""
    num = num_long = num_lost = num_bytes = 0
    with _open_model(recipe.model) as model:
        template = add_call_form(load_chat_template(model, recipe.model), recipe.engine)
        for row in iterate_conversations(warmup):
            if num_bytes > MAX_CHECKED_BYTES:
                return LongConversations(num, num_long, num_lost, is_whole=False)
            conversation = parse_conversation(msgspec.json.decode(row))
            try:
                name = make_episode_id(WARMUP_DOMAIN, num)
                made = tokenize_conversation(conversation, template=template, name=name, domain=WARMUP_DOMAIN)
            except ConfigError as error:
                raise ConfigError(f"warmup.path: row {num} cannot be trained on: {error}") from error
            lengths = _list_lengths(made)
            num, num_bytes = num + 1, num_bytes + len(row)
            num_long += max(lengths) > context
            num_lost += min(lengths) > context
    return LongConversations(num, num_long, num_lost, is_whole=True)


def _list_lengths(trajectory: Trajectory) -> list[int]:
    """Return the number of tokens that the model reads in each row with an answer to train on."""
    ends = [
        [trajectory.turns[number].end for number in own if not trajectory.turns[number].masked]
        for own in list_row_turns(trajectory)
    ]
    return [max(own) - 1 - span.start for span, own in zip(list_spans(trajectory), ends, strict=True) if own]


@contextlib.contextmanager
def _open_model(model: ModelConfig) -> Iterator[Path]:
    """Return the directory with the tokenizer; that of a tiny model is made, since the model is only made in a job."""
    if model.path is not None:
        yield Path(model.path)
        return
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_tokenizer(Path(directory))
        yield Path(directory)


def _read_context(model: ModelConfig) -> int | None:
    """Return the positions that the trainer's model can read."""
    if model.tiny is not None:
        return model.tiny.context_length
    return read_model_config(Path(model.path or "") / "config.json").context_length


if __name__ == "__main__":
    sys.exit(main())
