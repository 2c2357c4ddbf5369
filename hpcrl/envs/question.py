"""One question a row, with one right answer: the environment for a data file of questions.

Question  one of them
"""

import re
from decimal import Decimal, InvalidOperation

from hpcrl.envs.base import Step, TaskFields
from hpcrl.errors import ConfigError


class Question:
    """The question of a row, answered in one turn; the right answer earns 1.

    question, answer    the fields of a row
    pattern             a regular expression: the last thing that it matches in the model's text (its first group, if it
                        has one) is the model's answer; the default is the whole text
    answer_pattern      the same for the answer of a row

    Answers are equal as texts, or as numbers, which may have commas.
    """

    def __init__(
        self,
        *,
        question: str = "question",
        answer: str = "answer",
        pattern: str | None = None,
        answer_pattern: str | None = None,
    ) -> None:
        self._question = question
        self._answer = answer
        self._pattern = _compile_pattern("pattern", pattern)
        self._answer_pattern = _compile_pattern("answer_pattern", answer_pattern)

    def check_task(self, task: TaskFields | None) -> None:
        """Raise ConfigError for a row without question or answer, and for a domain without rows."""
        if task is None:
            raise ConfigError("Question needs rows: set the domain's `tasks` to a data file")
        for name in (self._question, self._answer):
            if name not in task:
                raise ConfigError(
                    f"Question: the row has no field {name!r}; it has {', '.join(sorted(task)) or 'none'}"
                )
        if _find_answer(str(task[self._answer]), self._answer_pattern) is None:
            raise ConfigError(
                f"Question: answer_pattern matches nothing in the row's {self._answer} = {task[self._answer]!r:.100}"
            )

    async def reset(self, seed: int, task: TaskFields | None = None) -> str:
        self.check_task(task)
        self._row = task or {}
        return str(self._row[self._question])

    async def step(self, action: str) -> Step:
        given = _find_answer(action, self._pattern)
        right = _find_answer(str(self._row[self._answer]), self._answer_pattern)
        reward = float(given is not None and right is not None and _are_equal(given, right))
        return Step(observation=f"reward {reward:g}", reward=reward, done=True)

    async def close(self) -> None:
        """Do nothing: all state is in this object."""


def _compile_pattern(option: str, pattern: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(pattern) if pattern is not None else None
    except re.error as error:
        raise ConfigError(f"Question: {option} = {pattern!r} is not a regular expression: {error}") from error


def _find_answer(text: str, pattern: re.Pattern[str] | None) -> str | None:
    if pattern is None:
        return text.strip()
    found = list(pattern.finditer(text))
    return (found[-1][1 if pattern.groups else 0] or "").strip() if found else None


def _are_equal(given: str, right: str) -> bool:
    if given == right:
        return True
    try:
        return Decimal(given.replace(",", "")) == Decimal(right.replace(",", ""))
    except InvalidOperation:
        return False
