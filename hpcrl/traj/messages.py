"""Cut the tokens that a model was shown into messages with their roles, as the chat template wrote them.

MessageSplitter         the texts that a template writes between two messages, and what they introduce
make_message_splitter   finds them: it renders short conversations and takes what is between their contents

A mark counts only where its token is; the same characters in a message are text.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcrl.errors import ConfigError
from hpcrl.models.chat_template import GUARD_CHARACTER, ChatTemplate

ROLE_SEQUENCES = (
    ("user", "assistant", "user"),
    ("user", "user"),
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "tool", "assistant"),
    ("user", "assistant", "tool", "tool", "user"),
)
"""The conversations that are rendered; a template may refuse some."""
_CONTENT = re.compile(r"Content number \d\.")


@dataclass(frozen=True, kw_only=True)
class MessageSplitter:
    """The texts between the messages of one chat template."""

    template: ChatTemplate
    mark_texts: Mapping[int, str]
    """The special tokens, by their id."""
    roles: Mapping[str, str]
    """The role of the message that follows each text."""
    pattern: re.Pattern[str]
    """Any of those texts, the longest first."""

    def split_messages(self, token_ids: Sequence[int]) -> tuple[list[dict[str, str]], str]:
        """Return the messages in tokens that end where the model generates, and the opening of its answer if any.

        What precedes the first text of the template is a system prompt, or what follows one that was cut.
        """
        messages, role, position = [], "system", 0
        text = self._decode(token_ids)
        for found in self.pattern.finditer(text):
            messages.append((role, text[position : found.start()]))
            role, position = self.roles[found[0]], found.end()
        opening = text[position:] if role == "assistant" else ""
        if role != "assistant":
            messages.append((role, text[position:]))
        shown = [{"role": role, "content": self._clean(content)} for role, content in messages]
        return [message for message in shown if message["content"].strip()], self._clean(opening)

    def _decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens; characters that only look like a mark are guarded."""
        pieces: list[str] = []
        run: list[int] = []
        for token in token_ids:
            if token in self.mark_texts:
                pieces += [self._decode_run(run), self.mark_texts[token]]
                run = []
            else:
                run.append(token)
        return "".join([*pieces, self._decode_run(run)])

    def _decode_run(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        return self.template.guard(str(self.template.tokenizer.decode(token_ids, skip_special_tokens=False)))

    def _clean(self, text: str) -> str:
        """Return a content without guards, and without marks that close it."""
        return self.template.mark_pattern.sub("", text).replace(GUARD_CHARACTER, "")


def make_message_splitter(template: ChatTemplate) -> MessageSplitter | None:
    """Find what a template writes between messages; None if it writes nothing that tells them apart."""
    roles: dict[str, str] = {}
    for sequence in ROLE_SEQUENCES:
        for gap, role in _list_gaps(template, sequence):
            if gap.strip() and roles.get(gap) != "user":  # templates that write several roles alike write users
                roles[gap] = role
    texts = [gap for gap in roles if not _has_message_inside(gap, roles)]
    if not texts:
        return None
    return MessageSplitter(
        template=template,
        mark_texts={number: text for text, number in template.mark_ids.items()},
        roles=roles,
        pattern=re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)))),
    )


def _list_gaps(template: ChatTemplate, sequence: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what a template writes before each message of a conversation, with its role."""
    messages: list[Mapping[str, Any]] = [
        {"role": role, "content": f"Content number {number}."} for number, role in enumerate(sequence)
    ]
    try:
        rendered = template.render(messages)
    except ConfigError:
        return
    gaps = _CONTENT.split(rendered)
    if len(gaps) == len(sequence) + 1:
        yield from zip(gaps, [*sequence, "assistant"], strict=True)


def _has_message_inside(gap: str, roles: Mapping[str, str]) -> bool:
    """Check whether a text has a default system prompt in it: it starts and ends with two other texts."""
    starts = [len(other) for other in roles if other != gap and gap.startswith(other)]
    ends = [len(other) for other in roles if other != gap and gap.endswith(other)]
    return bool(starts and ends) and max(starts) + max(ends) < len(gap)
