"""The token layout of a conversation's turns, derived once from the model's chat template.

    ChatLayout             the layout of one tokenizer
    ChatLayout.first_turn  ids up to where the model starts to generate
    ChatLayout.next_turn   ids to append after the generated ones
    load_chat_layout       the layout of a model
    load_chat_template     its whole template (hpcrl.models.chat_template)
    load_text_decoder      only ids to text, which needs no template

Generated ids are never decoded and tokenised again: a prompt is the previous prompt, the generated ids, and
`next_turn`. An observation cannot forge a mark: "<eos>" in it is five ordinary characters.

The layout is what the template writes around placeholders: before and after an observation, and between an answer and
the next observation. Whatever it would make of the answers themselves, such as leaving out old thoughts, does not
count: they stay as generated. A `<think>` that opens every answer is part of the prompt.

tokenizer.json and the template are read without transformers, which would import torch in every env worker.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import Tokenizer

from hpcrl.config.recipe import ModelConfig
from hpcrl.errors import ConfigError
from hpcrl.models.chat_template import ChatTemplate
from hpcrl.models.jinja_template import (
    DEFAULT_TEMPLATE,
    SETTINGS_FILE,
    TOOLS_TEMPLATE,
    compile_template,
    read_template_texts,
)
from hpcrl.models.message_form import Message, MessageForm, find_message_form, renders_bare_tools, renders_tools
from hpcrl.system.files import read_json

_TOOL = {
    "type": "function",
    "function": {"name": "a_tool", "description": "A tool.", "parameters": {"type": "object", "properties": {}}},
}
_USER_1, _AGENT_1, _USER_2 = "Observation one.", "Answer one.", "Observation two."


@dataclass(frozen=True, kw_only=True)
class ChatLayout:
    """The layout of one template."""

    template: ChatTemplate
    before_first: tuple[int, ...]
    closing: tuple[int, ...]
    """The ids that end the model's turn in the history; normally the model generates the last of them."""
    before_next: tuple[int, ...]
    """The ids between the end of the model's turn and a later observation."""
    after_observation: tuple[int, ...]
    """The ids between an observation and the model's turn."""

    @property
    def close_id(self) -> int | None:
        return self.template.close_id

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.template.stop_token_ids

    def first_turn(self, observation: str) -> list[int]:
        return [*self.before_first, *self.template.encode_text(observation), *self.after_observation]

    def first_messages(self, messages: Sequence[Message], *, tools: Sequence[Any]) -> list[int]:
        """Return the ids of a first turn that is more than one observation."""
        return self.template.encode(self.template.render(messages, tools=tools))

    def next_turn(self, observation: str, *, generated: Sequence[int]) -> list[int]:
        """Close the model's turn, unless its last `generated` token did, add the observation and open the next turn."""
        closing = () if generated and generated[-1] in self.template.close_ids else self.closing
        return [*closing, *self.before_next, *self.template.encode_text(observation), *self.after_observation]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated ids, without marks."""
        return self.template.decode(token_ids)


def load_chat_layout(model_dir: Path, config: ModelConfig | None = None) -> ChatLayout:
    """Load the layout from the tokenizer and the chat template in `model_dir`, as the recipe's [model] changes it."""
    template, pieces = _load_template(model_dir, config or ModelConfig())
    if pieces.tail != pieces.later_tail:
        raise ConfigError(
            f"{template.source}: its chat template opens the first answer by {pieces.tail!r} and a later one by "
            f"{pieces.later_tail!r}: an environment needs one that opens all alike; set model.chat_template to another"
        )
    head = template.render([{"role": "user", "content": _USER_1}]).partition(_USER_1)[0]
    return ChatLayout(
        template=template,
        before_first=tuple(template.encode(head)),
        closing=tuple(template.encode(pieces.closing)),
        before_next=tuple(template.encode(pieces.between)),
        after_observation=tuple(template.encode(pieces.tail)),
    )


def load_chat_template(model_dir: Path, config: ModelConfig | None = None) -> ChatTemplate:
    """Load the template in `model_dir`, as the recipe's [model] changes it, for conversations of any form."""
    return _load_template(model_dir, config or ModelConfig())[0]


def load_text_decoder(model_dir: Path) -> Callable[[Sequence[int]], str]:
    """Load a function from ids to text without marks."""
    tokenizer = _load_tokenizer(model_dir / "tokenizer.json")
    return lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


class _LayoutPieces(NamedTuple):
    """The texts that a template writes around observations and answers."""

    tail: str
    later_tail: str
    """The text after a later observation; a layout needs it to be the same."""
    closing: str
    """The end of an answer in the history, up to its mark if it has one."""
    between: str
    """The text from there to the next observation."""
    close_mark: str
    """The special token that ends an answer in the history, or ""."""
    stop_mark: str
    """The one at which the model stops: `close_mark`, or one that only ends the last answer of a conversation."""


def _load_template(model_dir: Path, config: ModelConfig) -> tuple[ChatTemplate, _LayoutPieces]:
    tokenizer = _load_tokenizer(model_dir / "tokenizer.json")
    settings = _load_json(model_dir / SETTINGS_FILE)
    source = Path(config.chat_template).expanduser() if config.chat_template else model_dir
    if config.chat_template:
        texts = {DEFAULT_TEMPLATE: _read_template_file(source)}
    else:
        texts = read_template_texts(model_dir, settings)
    text, tools_text = texts[DEFAULT_TEMPLATE], texts.get(TOOLS_TEMPLATE, "")
    marks = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    names = {name: _mark_text(value) for name, value in settings.items() if name.endswith("_token")}
    eos_id = tokenizer.token_to_id(names.get("eos_token", ""))
    declared = [*(() if eos_id is None else (eos_id,)), *_read_stop_ids(model_dir / "generation_config.json")]
    tokenizer.encode_special_tokens = True  # from here on a mark in a text is text
    template = ChatTemplate(
        tokenizer=tokenizer,
        compiled=compile_template(text, source=source),
        mark_ids=marks,
        mark_pattern=re.compile(f"({'|'.join(map(re.escape, sorted(marks, key=len, reverse=True))) or '(?!)'})"),
        mark_names=names,
        source=source,
        text="\n".join(filter(None, [text, tools_text])),
        kwargs=config.chat_template_kwargs,
    )
    pieces = _split_layout(template, declared)
    stops = dict.fromkeys([*([marks[pieces.stop_mark]] if pieces.stop_mark else []), *declared])
    if not stops:
        raise ConfigError(
            f"{source}: no token ends an answer of this model: name one in eos_token_id of generation_config.json"
        )
    template = replace(
        template,
        close_id=marks.get(pieces.close_mark),
        close_ids=frozenset(marks[mark] for mark in (pieces.close_mark, pieces.stop_mark) if mark),
        stop_token_ids=tuple(stops),
        system=config.system,
    )
    with_tools = _load_tools_template(template, tools_text) if tools_text else None
    return replace(template, form=_find_form(template), with_tools=with_tools), pieces


def _load_tools_template(template: ChatTemplate, text: str) -> ChatTemplate:
    """Return the template with this text, which a model has for conversations with tools."""
    source = template.source / f"the template {TOOLS_TEMPLATE!r}"
    other = replace(template, compiled=compile_template(text, source=source), source=source, known_excerpts={})
    _split_layout(other, template.stop_token_ids, tools=[_TOOL])
    return replace(other, form=_find_form(other, tools=[_TOOL]))


def _find_form(template: ChatTemplate, *, tools: Sequence[Any] = ()) -> MessageForm:
    """Find out the form of messages in conversations with these tools."""

    def render(messages: Sequence[Message], tools: Sequence[Any] = tools) -> str:
        return template.render_adapted(messages, tools=tools or None)

    has_tools = renders_tools(render)
    return msgspec.structs.replace(
        find_message_form(render),
        has_tools=has_tools,
        needs_tool_descriptions=has_tools and not renders_bare_tools(render),
    )


def _split_layout(
    template: ChatTemplate, declared: Collection[int], *, tools: Sequence[Any] | None = None
) -> _LayoutPieces:
    """Render conversations of placeholders, and cut them at their contents."""
    first = _render_contents(template, _USER_1, tools=tools)
    longer = _render_contents(template, _USER_1, _AGENT_1, _USER_2, tools=tools)
    _, found_first, tail = first.partition(_USER_1)
    opening, found_answer, rest = longer.partition(_USER_1)[2].partition(_AGENT_1)
    gap, found_next, later_tail = rest.partition(_USER_2)
    if not (found_first and found_answer and found_next):
        raise ConfigError(
            f"{template.source}: its chat template leaves a message out ({longer!r} has to contain {_USER_1!r}, "
            f"{_AGENT_1!r} and {_USER_2!r}, in this order): set model.chat_template to another"
        )
    is_unopened = opening != tail and first == _render_contents(template, _USER_1, tools=tools, opens_answer=False)
    if is_unopened or not tail:
        raise ConfigError(
            f"{template.source}: its chat template does not open an answer (an answer follows {opening!r}, and a "
            f"prompt ends in {tail!r}): it needs add_generation_prompt; set model.chat_template to another"
        )
    try:
        final = _render_contents(template, _USER_1, _AGENT_1, tools=tools, opens_answer=False).partition(_AGENT_1)[2]
    except ConfigError:  # some accept only conversations that end in a user's message
        final = ""
    known = [mark for mark, number in template.mark_ids.items() if number in declared]
    stop = _first_mark(gap, known)
    final_stop = "" if stop else _first_mark(final, known)
    close_mark = stop or _first_mark(gap, template.mark_ids)
    closing, mark, between = gap.partition(close_mark) if close_mark else ("", "", gap)
    return _LayoutPieces(
        tail=tail,
        later_tail=later_tail,
        closing=closing + mark,
        between=between,
        close_mark=close_mark,
        stop_mark=final_stop or close_mark,
    )


def _render_contents(
    template: ChatTemplate, *contents: str, tools: Sequence[Any] | None, opens_answer: bool = True
) -> str:
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return template.render_adapted(messages, tools=tools, opens_answer=opens_answer)


def _first_mark(text: str, marks: Iterable[str]) -> str:
    """Return the mark that is found first in the text, the longest of those; "" if there is none."""
    found = [(place, -len(mark), mark) for mark in marks if (place := text.find(mark)) >= 0]
    return min(found)[2] if found else ""


def _load_tokenizer(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: save the model's tokenizer in the fast format")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time: no threads, which forbid forking
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigError(f"{path} is not a valid tokenizer: {error}") from error


def _load_json(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): save the model again") from error


def _read_template_file(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template = {str(path)!r} cannot be read: {error}") from error


def _read_stop_ids(path: Path) -> list[int]:
    """Return the ids at which the model's generation_config.json stops; there may be none or many."""
    ids = _load_json(path).get("eos_token_id") if path.is_file() else None
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(number, int) and number >= 0 for number in listed):
        raise ConfigError(f"{path}: eos_token_id = {ids!r}: it must be a token id, or a list of them")
    return listed


def _mark_text(mark: Any) -> str:
    return str(mark["content"] if isinstance(mark, dict) else mark or "")
