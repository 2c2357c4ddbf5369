"""The user's nodes of the pipeline, run where they stand: on the whole step before it is dealt, on rows afterwards.

    credited     the step's trajectories and what each of their turns is worth: score -> ... -> advantage -> deal
    reworked     the rows of a minibatch: rows -> ... -> update
    credits_of   the advantages of a ready pipeline, or rewards where a critic makes advantages of them
    functions    the user's functions by node, so that one that cannot be imported is known before anything is queued

A node that raises, or gives what the next cannot use, is a TrainError with its name: a step on half of what was meant
would be worse than none.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcrl.config import pipeline
from hpcrl.config.recipe import Train
from hpcrl.config.user_code import load_code
from hpcrl.errors import TrainError
from hpcrl.learn.advantage import Rewards, credits, turn_rewards
from hpcrl.learn.batch import Row, num_model_tokens
from hpcrl.spool.record import Trajectory


def credited(trajectories: Sequence[Trajectory], train: Train) -> tuple[Sequence[Trajectory], list[Rewards]]:
    """What is dealt out: trajectories, and the advantage (or reward) of each turn of each."""
    if not train.pipeline:
        return trajectories, credits_of(trajectories, train)
    nodes = pipeline.pipeline_of(train)
    kinds, own = pipeline.kinds_of(nodes), functions(train)
    results: dict[str, Any] = {"score": trajectories}
    for name in pipeline.linearised(nodes):
        if kinds.get(name) != "step":
            continue
        given = [results[taken] for taken in nodes[name].inputs]
        if name in own:
            results[name] = _called(name, own[name], given)
        else:
            results[name] = credits_of(_checked_step(given[0], trajectories, nodes[name].inputs[0]), train)
    who, what = nodes["deal"].inputs
    dealt = _checked_step(results[who], trajectories, who)
    return dealt, _checked_credits(results[what], dealt, what)


def reworked(rows: list[Row], train: Train) -> list[Row]:
    """The rows that are learned from, as many as were dealt."""
    if not train.pipeline or not rows:
        return rows
    nodes = pipeline.pipeline_of(train)
    kinds, own = pipeline.kinds_of(nodes), functions(train)
    results: dict[str, list[Row]] = {"rows": rows}
    for name in pipeline.linearised(nodes):
        if kinds.get(name) == "rows" and name in own:
            given = [results[taken] for taken in nodes[name].inputs]
            results[name] = _checked_rows(_called(name, own[name], given), rows, name)
    return results[nodes["update"].inputs[0]]


def credits_of(trajectories: Sequence[Trajectory], train: Train) -> list[Rewards]:
    """What the trajectories are dealt out with: advantages, or rewards where a critic makes advantages of them."""
    if train.advantage == "gae":
        return [turn_rewards(trajectory) for trajectory in trajectories]
    counts = [num_model_tokens(trajectory) for trajectory in trajectories]
    return credits(trajectories, advantage=train.advantage, gamma=train.gamma, num_tokens_N=counts)


def functions(train: Train) -> dict[str, Callable[..., Any]]:
    """The functions of the user's nodes, with their options."""
    found: dict[str, Callable[..., Any]] = {}
    for name, node in train.pipeline.items():
        if node.function is not None:
            function = load_code(node.function, what=f"train.pipeline.{name}.function")
            found[name] = _with_options(function, node.options)
    return found


def _with_options(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    return lambda *given: function(*given, **options)


def _called(name: str, function: Callable[..., Any], given: Sequence[Any]) -> Any:
    try:
        return function(*given)
    except Exception as error:
        raise TrainError(f"train.pipeline.{name} failed: {type(error).__name__}: {error}") from error


def _checked_step(result: Any, trajectories: Sequence[Trajectory], name: str) -> Sequence[Trajectory]:
    """The same trajectories in the same order; a node may change what they were worth and nothing else counts."""
    ids = [getattr(one, "id", None) for one in result] if isinstance(result, Sequence) else None
    if ids != [trajectory.id for trajectory in trajectories]:
        raise TrainError(
            f"train.pipeline.{name} gave {_shown(result)}: its result is taken for trajectories, so it gives the "
            f"{len(trajectories)} that it was given, in their order, perhaps with other rewards"
        )
    checked: Sequence[Trajectory] = result
    return checked


def _checked_credits(result: Any, trajectories: Sequence[Trajectory], name: str) -> list[Rewards]:
    """A number for each turn of each trajectory; one number stands for all turns of an episode."""
    cure = f"it gives one number, or one for each turn, for each of the {len(trajectories)} trajectories"
    if not hasattr(result, "__len__") or len(result) != len(trajectories):
        raise TrainError(f"train.pipeline.{name} gave {_shown(result)}: {cure}")
    found = []
    for value, trajectory in zip(result, trajectories, strict=True):
        num_turns = max(len(trajectory.turns), 1)
        try:
            each = np.asarray(value, dtype=np.float64)
            found.append(np.full(num_turns, each) if each.ndim == 0 else each.reshape(num_turns))
        except (TypeError, ValueError) as error:
            what = f"{_shown(value)} for {trajectory.id}, which has {num_turns} turns"
            raise TrainError(f"train.pipeline.{name} gave {what}: {cure}") from error
    return found


def _checked_rows(result: Any, rows: list[Row], name: str) -> list[Row]:
    """As many rows of the same lengths: other ranks count on it."""
    same = isinstance(result, Sequence) and len(result) == len(rows)
    if not same or any(
        not isinstance(one, Row) or len(one) != len(row) or len(one.credit) != len(row.credit)
        for one, row in zip(result, rows, strict=True)
    ):
        raise TrainError(
            f"train.pipeline.{name} gave {_shown(result)}: it gives the {len(rows)} rows that it was given, in their "
            "order, with as many tokens and as many credits"
        )
    return list(result)


def _shown(value: Any) -> str:
    size = f" of {len(value)}" if hasattr(value, "__len__") else f" {value!r}"
    return f"{type(value).__name__}{size}"[:200]
