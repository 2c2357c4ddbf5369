"""Run the user's nodes of the pipeline: on the whole step before it is distributed, on rows afterwards.

    assign_credits   the step's trajectories and the credit of each turn: score -> ... -> advantage -> deal
    transform_rows   the rows of a minibatch: rows -> ... -> update
    compute_credits  the advantages without user nodes, or rewards where a critic turns them into advantages
    load_functions   the user's functions by node; called early, it finds import errors before anything is queued

A node that raises, or returns a result that the next cannot use, is a TrainError with the node's name: a step on half
of its data would be worse than none.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcrl.config import pipeline
from hpcrl.config.recipe import TrainConfig
from hpcrl.config.user_code import load_code
from hpcrl.errors import TrainError
from hpcrl.learn.advantage import FloatArray, NormalizationScope, compute_advantages, compute_turn_rewards
from hpcrl.learn.batch import TrainingRow, count_row_tokens
from hpcrl.learn.rewards import shape_rewards
from hpcrl.spool.record import Trajectory


def assign_credits(
    trajectories: Sequence[Trajectory], train: TrainConfig
) -> tuple[Sequence[Trajectory], list[FloatArray]]:
    """Return the trajectories to distribute, and the advantage (or reward) of each turn of each."""
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
    """Return the rows to train on, the same number as were distributed."""
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
    """Compute the credits of the trajectories: advantages, or rewards where a critic turns them into advantages."""
    trajectories = shape_rewards(trajectories, train)
    if train.advantage == "gae":
        return [compute_turn_rewards(trajectory) for trajectory in trajectories]
    counts = [sum(count_row_tokens(trajectory)) for trajectory in trajectories]
    scope: NormalizationScope = "nothing" if train.has_kl_reward else "step"  # after a KL, the ranks normalise
    if train.reward_scale == "domain":
        scope = "domain"
    return compute_advantages(
        trajectories, advantage=train.advantage, gamma=train.gamma, num_tokens_N=counts, normalized_over=scope
    )


def load_functions(train: TrainConfig) -> dict[str, Callable[..., Any]]:
    """Load the functions of the user's nodes, with their options."""
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
    """Check for the same trajectories in the same order; a node may change only their rewards."""
    ids = [getattr(one, "id", None) for one in result] if isinstance(result, Sequence) else None
    if ids != [trajectory.id for trajectory in trajectories]:
        raise TrainError(
            f"train.pipeline.{name} returned {_describe_value(result)}: its result is used as trajectories, so it must "
            f"return the {len(trajectories)} that it received, in their order, perhaps with other rewards"
        )
    checked: Sequence[Trajectory] = result
    return checked


def _check_credits(result: Any, trajectories: Sequence[Trajectory], name: str) -> list[FloatArray]:
    """Check for a number for each turn of each trajectory; one number counts for all turns of an episode."""
    hint = f"it must return one number, or one for each turn, for each of the {len(trajectories)} trajectories"
    if not hasattr(result, "__len__") or len(result) != len(trajectories):
        raise TrainError(f"train.pipeline.{name} returned {_describe_value(result)}: {hint}")
    found = []
    for value, trajectory in zip(result, trajectories, strict=True):
        num_turns = max(len(trajectory.turns), 1)
        try:
            each = np.asarray(value, dtype=np.float64)
            found.append(np.full(num_turns, each) if each.ndim == 0 else each.reshape(num_turns))
        except (TypeError, ValueError) as error:
            what = f"{_describe_value(value)} for {trajectory.id}, which has {num_turns} turns"
            raise TrainError(f"train.pipeline.{name} returned {what}: {hint}") from error
    return found


def _check_rows(result: Any, rows: list[TrainingRow], name: str) -> list[TrainingRow]:
    """Check for the same number of rows of the same lengths: other ranks rely on it."""
    same = isinstance(result, Sequence) and len(result) == len(rows)
    if not same or any(
        not isinstance(one, TrainingRow) or len(one) != len(row) or len(one.credit) != len(row.credit)
        for one, row in zip(result, rows, strict=True)
    ):
        raise TrainError(
            f"train.pipeline.{name} returned {_describe_value(result)}: it must return the {len(rows)} rows that it "
            "received, in their order, with the same number of tokens and of credits"
        )
    return list(result)


def _describe_value(value: Any) -> str:
    size = f" of {len(value)}" if hasattr(value, "__len__") else f" {value!r}"
    return f"{type(value).__name__}{size}"[:200]
