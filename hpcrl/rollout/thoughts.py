"""Leave the model's thoughts out of the prompts of later turns, where an environment asks for that.

    ShortHistory     a conversation whose earlier answers have no thoughts
    AnswerReader     the protocol of a function that finds the thought in an answer
    make_answer_reader  make one for the model of a campaign

Only an answer that has a thought is written anew, by the chat template from the text that follows the thought. All
other token ids stay as generated.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from hpcrl.engines.base import Completion
from hpcrl.envs.base import TaskPrompt
from hpcrl.models.chat_template import ChatTemplate
from hpcrl.rollout.agents.reasoning_parsers import ReasoningParser
from hpcrl.rollout.agents.tool_parsers import ContentText

NUM_OPENING_IDS = 64
"""The ids at the end of a prompt that may have opened a thought."""


class AnswerText(NamedTuple):
    """The text of an answer without its thought."""

    text: str
    has_thought: bool


class AnswerReader(Protocol):
    """A protocol for finding the thought in an answer."""

    def __call__(self, completion: Completion, *, prompt_ids: Sequence[int]) -> AnswerText:
        """Read an answer to this prompt, or to the end of it."""


def make_answer_reader(template: ChatTemplate, find_parser: Callable[[], ReasoningParser]) -> AnswerReader:
    """Make a reader for a model; its parser is only loaded when it is needed."""

    def read_answer(completion: Completion, *, prompt_ids: Sequence[int]) -> AnswerText:
        parser = find_parser()
        text = _decode_with_marks(template, completion.token_ids, parser.marks)
        reader = parser.make_reader(template.decode_all(prompt_ids[-NUM_OPENING_IDS:]))
        pieces = [*reader.feed(text), *reader.finish()]
        content = "".join(piece.text for piece in pieces if isinstance(piece, ContentText))
        return AnswerText(content, content != text)

    return read_answer


def _decode_with_marks(template: ChatTemplate, token_ids: Sequence[int], marks: Collection[str]) -> str:
    """Decode an answer; of the special tokens only these marks are part of the text."""
    shown = {template.mark_ids[mark]: mark for mark in marks if mark in template.mark_ids}
    parts = itertools.groupby(token_ids, key=shown.get)
    return "".join(template.decode(list(part)) if mark is None else mark * len(list(part)) for mark, part in parts)


class ShortHistory:
    """The messages of a conversation; `render` gives the ids of a prompt with all of them."""

    def __init__(self, start: TaskPrompt, *, render: Callable[..., list[int]], read_answer: AnswerReader) -> None:
        self._messages: list[Mapping[str, Any]] = list(start.messages)
        self._tools = start.tools
        self._render = render
        self._read_answer = read_answer

    def add_turn(self, completion: Completion, observation: str, *, prompt_ids: Sequence[int]) -> list[int] | None:
        """Add an answer and the observation after it; return the next prompt, or None if nothing is left out."""
        answer = self._read_answer(completion, prompt_ids=prompt_ids[-NUM_OPENING_IDS:])
        self._messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": observation}]
        return self._render(self._messages, tools=self._tools) if answer.has_thought else None
