"""The token layout of a conversation's turns, derived once from the model's chat template.

    ChatLayout             the layout of one tokenizer
    ChatLayout.first_turn  ids up to where the model starts to generate
    ChatLayout.next_turn   ids to append after the generated ones
    load_chat_layout       the layout of a model
    load_chat_template     its whole template (hpcrl.models.chat_template)

Generated ids are never decoded and tokenised again: a prompt is the previous prompt, the generated ids, and
`next_turn`. An observation cannot forge a mark: "<eos>" in it is five ordinary characters.

tokenizer.json and the template are read without transformers, which would import torch in every env worker.
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from hpcrl.errors import ConfigError
from hpcrl.models.chat_template import ChatTemplate, tokenize_text
from hpcrl.system.files import read_json

_USER_1, _AGENT_1, _USER_2 = "Observation one.", "Answer one.", "Observation two."


@dataclass(frozen=True, kw_only=True)
class ChatLayout:
    """The layout of one tokenizer; a special token closes each turn of the model."""

    tokenizer: Any
    before_first: tuple[int, ...]
    close_id: int
    """The token that ends the model's turn; normally the model generates it."""
    before_next: tuple[int, ...]
    """The ids between `close_id` and a later observation."""
    after_observation: tuple[int, ...]
    """The ids between an observation and the model's turn."""
    stop_token_ids: tuple[int, ...]

    def first_turn(self, observation: str) -> list[int]:
        return [*self.before_first, *self._encode(observation), *self.after_observation]

    def next_turn(self, observation: str, *, generated: Sequence[int]) -> list[int]:
        """Close the model's turn, unless its last `generated` token did, add the observation and open the next turn."""
        closing = () if generated and generated[-1] == self.close_id else (self.close_id,)
        return [*closing, *self.before_next, *self._encode(observation), *self.after_observation]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated ids, without marks."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _encode(self, text: str) -> list[int]:
        return tokenize_text(self.tokenizer, text)


def load_chat_layout(model_dir: Path) -> ChatLayout:
    """Load the layout from the tokenizer and the chat template in `model_dir`."""
    tokenizer = _load_tokenizer(model_dir / "tokenizer.json")
    settings = _load_settings(model_dir / "tokenizer_config.json")
    marks = {name: _mark_text(value) for name, value in settings.items() if name.endswith("_token")}
    head, tail, between = _split_layout(_read_template_text(model_dir, settings), marks, source=model_dir)

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    closing = encode(between)
    if not closing or closing[0] not in tokenizer.get_added_tokens_decoder():
        raise ConfigError(
            f"{model_dir}: its chat template ends a turn by {between!r}: this must start with a special token"
        )
    eos = tokenizer.token_to_id(marks.get("eos_token", ""))
    layout = ChatLayout(
        tokenizer=tokenizer,
        before_first=encode(head),
        close_id=closing[0],
        before_next=closing[1:],
        after_observation=encode(tail),
        stop_token_ids=tuple(dict.fromkeys([closing[0], closing[0] if eos is None else eos])),
    )
    tokenizer.encode_special_tokens = True  # from here on a mark in a text is text
    return layout


def load_chat_template(model_dir: Path) -> ChatTemplate:
    """Load the template in `model_dir`, for conversations of any form."""
    layout = load_chat_layout(model_dir)
    settings = _load_settings(model_dir / "tokenizer_config.json")
    added = layout.tokenizer.get_added_tokens_decoder().items()
    marks = {token.content: number for number, token in added if token.special}
    return ChatTemplate(
        tokenizer=layout.tokenizer,
        compiled=_compile_template(_read_template_text(model_dir, settings), source=model_dir),
        mark_ids=marks,
        mark_pattern=re.compile("(" + "|".join(map(re.escape, sorted(marks, key=len, reverse=True))) + ")"),
        mark_names={name: _mark_text(value) for name, value in settings.items() if name.endswith("_token")},
        close_id=layout.close_id,
        stop_token_ids=layout.stop_token_ids,
        source=model_dir,
    )


def _load_tokenizer(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: save the model's tokenizer in the fast format")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time: no threads, which forbid forking
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigError(f"{path} is not a valid tokenizer: {error}") from error


def _load_settings(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): save the model's tokenizer again") from error


def _read_template_text(model_dir: Path, settings: dict[str, Any]) -> str:
    path = model_dir / "chat_template.jinja"
    template = path.read_text() if path.is_file() else settings.get("chat_template")
    if isinstance(template, list):  # several templates, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise ConfigError(f"{model_dir} has no chat template: write one to {path}")
    return template


def _mark_text(mark: Any) -> str:
    return str(mark["content"] if isinstance(mark, dict) else mark or "")


def _split_layout(template: str, marks: dict[str, str], *, source: Path) -> tuple[str, str, str]:
    """Render two conversations, of which one must start with the other, and cut them at their contents.

    Return the text before the first observation, after an observation, and between an answer and an observation.
    """
    first = _render_conversation(template, marks, _USER_1, source=source)
    longer = _render_conversation(template, marks, _USER_1, _AGENT_1, _USER_2, source=source)
    head, found_1, tail = first.partition(_USER_1)
    rest = longer.removeprefix(first + _AGENT_1)
    between, found_2, last_tail = rest.partition(_USER_2)
    if not found_1 or not found_2 or rest == longer or last_tail != tail:
        raise ConfigError(
            f"{source}: its chat template does not keep a conversation as it was when a turn is added "
            f"({first!r}, then {longer!r}): use one that only appends"
        )
    return head, tail, between


def _render_conversation(template: str, marks: dict[str, str], *contents: str, source: Path) -> str:
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    compiled = _compile_template(template, source=source)
    try:
        return compiled.render(messages=messages, add_generation_prompt=True, **marks)
    except jinja2.TemplateError as error:
        raise ConfigError(f"{source}: its chat template cannot be rendered: {error}") from error


def _compile_template(template: str, *, source: Path) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_template_error
    environment.filters["tojson"] = _to_json
    try:
        compiled = environment.from_string(template)
        compiled.globals = dict(
            compiled.globals
        )  # a plain dict: it is copied for every rendering, and jinja's ChainMap is slow
        return compiled
    except jinja2.TemplateError as error:
        raise ConfigError(f"{source}: its chat template cannot be rendered: {error}") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    """Encode JSON as transformers does: jinja's own filter escapes < and > for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)
