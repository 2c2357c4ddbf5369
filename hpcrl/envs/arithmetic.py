"""Sums with a calculator: a small multi-turn tool-use environment.

    Arithmetic           asks `7+5*3=?`; `calc 5*3` is answered by `15`, and `=22` is the model's answer
    evaluate_expression  the calculator: integers, + - * and brackets, with its own parser
    correct              a reward function: 1 if the answer is right, else 0
    RIGHT_REWARD, MAX_EXPRESSION_CHARS  constants

A turn that is neither a call nor an answer is answered by a hint and wasted. The answer ends the episode.
"""

import random
import re
from typing import TYPE_CHECKING

from hpcrl.envs.base import Step, quick_reward
from hpcrl.errors import ConfigError

if TYPE_CHECKING:  # it needs numpy
    from hpcrl.spool.record import Trajectory

RIGHT_REWARD = 1.0
MAX_EXPRESSION_CHARS = 64
"""A bound on the calculator's depth and the size of its numbers."""

_CALL = re.compile(r"\s*calc\b(?P<expression>[^\n=]*)", re.IGNORECASE)
_ANSWER = re.compile(r"\s*=?\s*(?P<value>-?\d{1,64})(?![\d.]|\s*[-+*/(])")
_TOKEN = re.compile(r"\s*(?:(?P<number>\d+)|(?P<symbol>[-+*()]))")


@quick_reward
def correct(trajectory: "Trajectory") -> float:
    """Return 1 if the answer is right, else 0: only a right answer earns RIGHT_REWARD."""
    return float(any(turn.reward >= RIGHT_REWARD for turn in trajectory.turns))


class Arithmetic:
    """A sum drawn by the seed, to be worked out with a calculator.

    num_terms      numbers in the sum
    max_operand    the largest of them (the smallest is 0)
    operators      which of + - * are used
    calculator     whether `calc` is answered
    format_credit  the reward of a well-formed but wrong answer (a right one earns 1)
    invalid_cost   the cost of a turn that is neither a call nor an answer
    """

    def __init__(
        self,
        *,
        num_terms: int = 3,
        max_operand: int = 9,
        operators: str = "+-*",
        calculator: bool = True,
        format_credit: float = 0.1,
        invalid_cost: float = 0.05,
    ) -> None:
        if not 2 <= num_terms <= 10:
            raise ConfigError(f"Arithmetic: num_terms = {num_terms}: it must be 2 to 10")
        if not 1 <= max_operand <= 9999:
            raise ConfigError(f"Arithmetic: max_operand = {max_operand}: it must be 1 to 9999")
        if not operators or set(operators) - set("+-*"):
            raise ConfigError(f"Arithmetic: operators = {operators!r}: give one or more of + - *, such as '+-'")
        if not 0 <= format_credit < RIGHT_REWARD or invalid_cost < 0:
            raise ConfigError(
                f"Arithmetic: format_credit = {format_credit}, invalid_cost = {invalid_cost}: "
                "format_credit must be at least 0 and below 1, invalid_cost at least 0"
            )
        self._num_terms = num_terms
        self._max_operand = max_operand
        self._operators = operators
        self._calculator = calculator
        self._format_credit = format_credit
        self._invalid_cost = invalid_cost

    async def reset(self, seed: int) -> str:
        draw = random.Random(seed)
        terms = [str(draw.randint(0, self._max_operand)) for _ in range(self._num_terms)]
        expression = terms[0] + "".join(draw.choice(self._operators) + term for term in terms[1:])
        self._result = evaluate_expression(expression)
        return f"{expression}=?"

    async def step(self, action: str) -> Step:
        call = _CALL.match(action)
        if call is not None and self._calculator:
            return self._run_calculator(call["expression"])
        answer = _ANSWER.match(action)
        if answer is None:
            usage = "calc 1+2 or =3" if self._calculator else "=3"
            return Step(observation=f"say {usage}", reward=-self._invalid_cost)
        right = int(answer["value"]) == self._result
        return Step(
            observation="right" if right else "wrong", reward=RIGHT_REWARD if right else self._format_credit, done=True
        )

    async def close(self) -> None:
        """Do nothing: all state is in this object."""

    def _run_calculator(self, expression: str) -> Step:
        try:
            return Step(observation=str(evaluate_expression(expression)))
        except ValueError as error:
            return Step(observation=str(error), reward=-self._invalid_cost)


def evaluate_expression(expression: str) -> int:
    """Evaluate a sum of integers with + - * and brackets; raises a short ValueError for anything else."""
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError("too long")
    tokens = []
    position = 0
    text = expression.rstrip()
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise ValueError("only digits + - * ( )")
        tokens.append(token["number"] or token["symbol"])
        position = token.end()
    value = _parse_sum(tokens)
    if tokens:
        raise ValueError("not a sum")
    return value


def _parse_sum(tokens: list[str]) -> int:
    value = _parse_product(tokens)
    while tokens and tokens[0] in "+-":
        sign = 1 if tokens.pop(0) == "+" else -1
        value += sign * _parse_product(tokens)
    return value


def _parse_product(tokens: list[str]) -> int:
    value = _parse_factor(tokens)
    while tokens and tokens[0] == "*":
        tokens.pop(0)
        value *= _parse_factor(tokens)
    return value


def _parse_factor(tokens: list[str]) -> int:
    """Parse a number, a bracket, or the negative of one, and remove its tokens."""
    if not tokens:
        raise ValueError("not a sum")
    token = tokens.pop(0)
    if token == "-":
        return -_parse_factor(tokens)
    if token == "(":
        value = _parse_sum(tokens)
        if not tokens or tokens.pop(0) != ")":
            raise ValueError("not a sum")
        return value
    if not token.isdecimal():
        raise ValueError("not a sum")
    return int(token)
