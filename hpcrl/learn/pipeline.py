"""The user's nodes of the pipeline, run where they stand: on the whole step before it is dealt, on rows afterwards.

    assign_credits   the step's trajectories and what each of their turns is worth: score -> ... -> advantage -> deal
    transform_rows   the rows of a minibatch: rows -> ... -> update
    compute_credits  the advantages of a ready pipeline, or rewards where a critic makes advantages of them
    load_functions   the user's functions by node, so that one that cannot be imported is known before anything is queued

A node that raises, or gives what the next cannot use, is a TrainError with its name: a step on half of what was meant
would be worse than none.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcrl.config import pipeline
from hpcrl.config.recipe import TrainConfig
from hpcrl.config.user_code import load_code
from hpcrl.errors import TrainError
from hpcrl.learn.advantage import FloatArray, compute_advantages, compute_turn_rewards
from hpcrl.learn.batch import TrainingRow, count_model_tokens
from hpcrl.spool.record import Trajectory


def assign_credits(
    trajectories: Sequence[Trajectory], train: TrainConfig
) -> tuple[Sequence[Trajectory], list[FloatArray]]:
    """What is dealt out: trajectories, and the advantage (or reward) of each turn of each."""
    if not train.pipeline:
        return trajectories, compute_credits(trajectories, train)
    nodes = pipeline.make_pipeline(train)
    kinds, user_functions = pipeline.find_result_kinds(nodes), load_functions(train)
    results: dict[str, Any] = {"score": trajectories}
    for name in pipeline.order_nodes(nodes):
        if kinds.get(name) != "step":
            continue
        arguments = [results[input_name] for input_name in nodes[name].inputs]
        if name in user_functions:
            results[name] = _call_node(name, user_functions[name], arguments)
        else:
            results[name] = compute_credits(_check_step(arguments[0], trajectories, nodes[name].inputs[0]), train)
    step_node, credits_node = nodes["deal"].inputs
    checked = _check_step(results[step_node], trajectories, step_node)
    return checked, _check_credits(results[credits_node], checked, credits_node)


def transform_rows(rows: list[TrainingRow], train: TrainConfig) -> list[TrainingRow]:
    """The rows that are learned from, as many as were dealt."""
    if not train.pipeline or not rows:
        return rows
    nodes = pipeline.make_pipeline(train)
    kinds, user_functions = pipeline.find_result_kinds(nodes), load_functions(train)
    results: dict[str, list[TrainingRow]] = {"rows": rows}
    for name in pipeline.order_nodes(nodes):
        if kinds.get(name) == "rows" and name in user_functions:
            arguments = [results[input_name] for input_name in nodes[name].inputs]
            results[name] = _check_rows(_call_node(name, user_functions[name], arguments), rows, name)
    return results[nodes["update"].inputs[0]]


def compute_credits(trajectories: Sequence[Trajectory], train: TrainConfig) -> list[FloatArray]:
    """What the trajectories are dealt out with: advantages, or rewards where a critic makes advantages of them."""
    if train.advantage == "gae":
        return [compute_turn_rewards(trajectory) for trajectory in trajectories]
    counts = [count_model_tokens(trajectory) for trajectory in trajectories]
    return compute_advantages(trajectories, advantage=train.advantage, gamma=train.gamma, num_tokens_N=counts)


def load_functions(train: TrainConfig) -> dict[str, Callable[..., Any]]:
    """The functions of the user's nodes, with their options."""
    found: dict[str, Callable[..., Any]] = {}
    for name, node in train.pipeline.items():
        if node.function is not None:
            function = load_code(node.function, what=f"train.pipeline.{name}.function")
            found[name] = _bind_options(function, node.options)
    return found


def _bind_options(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    return lambda *given: function(*given, **options)


def _call_node(name: str, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        raise TrainError(f"train.pipeline.{name} failed: {type(error).__name__}: {error}") from error


def _check_step(result: Any, trajectories: Sequence[Trajectory], name: str) -> Sequence[Trajectory]:
    """The same trajectories in the same order; a node may change what they were worth and nothing else counts."""
    ids = [getattr(one, "id", None) for one in result] if isinstance(result, Sequence) else None
    if ids != [trajectory.id for trajectory in trajectories]:
        raise TrainError(
            f"train.pipeline.{name} gave {_describe_value(result)}: its result is taken for trajectories, so it gives the "
            f"{len(trajectories)} that it was given, in their order, perhaps with other rewards"
        )
    checked: Sequence[Trajectory] = result
    return checked


def _check_credits(result: Any, trajectories: Sequence[Trajectory], name: str) -> list[FloatArray]:
    """A number for each turn of each trajectory; one number stands for all turns of an episode."""
    hint = f"it gives one number, or one for each turn, for each of the {len(trajectories)} trajectories"
    if not hasattr(result, "__len__") or len(result) != len(trajectories):
        raise TrainError(f"train.pipeline.{name} gave {_describe_value(result)}: {hint}")
    found = []
    for value, trajectory in zip(result, trajectories, strict=True):
        num_turns = max(len(trajectory.turns), 1)
        try:
            each = np.asarray(value, dtype=np.float64)
            found.append(np.full(num_turns, each) if each.ndim == 0 else each.reshape(num_turns))
        except (TypeError, ValueError) as error:
            what = f"{_describe_value(value)} for {trajectory.id}, which has {num_turns} turns"
            raise TrainError(f"train.pipeline.{name} gave {what}: {hint}") from error
    return found


def _check_rows(result: Any, rows: list[TrainingRow], name: str) -> list[TrainingRow]:
    """As many rows of the same lengths: other ranks count on it."""
    same = isinstance(result, Sequence) and len(result) == len(rows)
    if not same or any(
        not isinstance(one, TrainingRow) or len(one) != len(row) or len(one.credit) != len(row.credit)
        for one, row in zip(result, rows, strict=True)
    ):
        raise TrainError(
            f"train.pipeline.{name} gave {_describe_value(result)}: it gives the {len(rows)} rows that it was given, in their "
            "order, with as many tokens and as many credits"
        )
    return list(result)


def _describe_value(value: Any) -> str:
    size = f" of {len(value)}" if hasattr(value, "__len__") else f" {value!r}"
    return f"{type(value).__name__}{size}"[:200]
