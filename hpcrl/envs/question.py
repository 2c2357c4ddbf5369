"""One question a row, with one right answer: the environment for a data file of questions.

Question  one of them
"""

import re

from hpcrl.envs.base import Step, TaskFields
from hpcrl.errors import ConfigError


class Question:
    """The question of a row, answered in one turn; the right answer earns 1.

    question, answer    the fields of a row
    pattern             a regular expression: the last thing that it matches in the model's text (its first group, if it
                        has one) is the model's answer; the default is the whole text
    """

    def __init__(self, *, question: str = "question", answer: str = "answer", pattern: str | None = None) -> None:
        self._question = question
        self._answer = answer
        try:
            self._pattern = re.compile(pattern) if pattern is not None else None
        except re.error as error:
            raise ConfigError(f"Question: pattern = {pattern!r} is not a regular expression: {error}") from error

    def check_task(self, task: TaskFields | None) -> None:
        """Raise ConfigError for a row without question or answer, and for a domain without rows."""
        if task is None:
            raise ConfigError("Question needs rows: set the domain's `tasks` to a data file")
        for name in (self._question, self._answer):
            if name not in task:
                raise ConfigError(
                    f"Question: the row has no field {name!r}; it has {', '.join(sorted(task)) or 'none'}"
                )

    async def reset(self, seed: int, task: TaskFields | None = None) -> str:
        self.check_task(task)
        self._row = task or {}
        return str(self._row[self._question])

    async def step(self, action: str) -> Step:
        reward = float(self._find_answer(action) == str(self._row[self._answer]).strip())
        return Step(observation=f"reward {reward:g}", reward=reward, done=True)

    async def close(self) -> None:
        """Do nothing: all state is in this object."""

    def _find_answer(self, text: str) -> str | None:
        if self._pattern is None:
            return text.strip()
        found = list(self._pattern.finditer(text))
        return (found[-1][1 if self._pattern.groups else 0] or "").strip() if found else None
