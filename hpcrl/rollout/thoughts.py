"""Leave the model's thoughts out of the prompts of later turns, where an environment asks for that.

    ShortHistory     a conversation whose earlier answers have no thoughts
    AnswerText       the text of an answer without its thought
    AnswerReader     the protocol of a function that finds the thought in an answer

Only an answer that has a thought is rendered again, by the chat template from the text that follows the thought. All
other token ids stay as generated.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from hpcrl.engines.base import Completion
from hpcrl.envs.base import TaskPrompt

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
