"""Run the nodes of the pipeline, one after the other, in the order that the planner made of the graph.

    PipelineExecutor                  the nodes of a recipe with their functions; every worker has one
    NodeFunction                      a function of hpcrl for a node
    NodeWork                          what hpcrl's own nodes have beside their inputs
    compute_credits                   the advantages, or rewards where a critic turns them into advantages
    load_functions                    the user's functions by node; called early, it finds import errors before a job
    load_update                       the user's update of a weight, if any
    check_trajectories, check_credits   refuse results of the user's nodes that `deal` cannot use

The user's functions that take batches see one micro-batch at a time, and what other nodes found for its tokens.

A function of hpcrl is called with the work and the results of the node's inputs, one of the user with the results alone
(and its options). A node that raises, or returns a result that the next cannot use, is a TrainError with the node's
name: a step on half of its data would be worse than none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcrl.config import pipeline
from hpcrl.config.pipeline import DagNode, NodeStage
from hpcrl.config.recipe import TrainConfig
from hpcrl.config.user_code import load_code
from hpcrl.errors import NodeResultError, TrainError, show_error
from hpcrl.learn.advantage import FloatArray, NormalizationScope, compute_advantages, compute_turn_rewards
from hpcrl.learn.batch import MicroBatch, TrainingRow, count_row_tokens
from hpcrl.learn.loss import PolicyLoss
from hpcrl.learn.rewards import shape_rewards
from hpcrl.learn.user_loss import adapt_loss
from hpcrl.spool.record import Trajectory

NodeFunction = Callable[..., Any]
"""A function of hpcrl that takes the work and the results of a node's inputs."""


@dataclass(kw_only=True)
class NodeWork:
    """The settings and state that hpcrl's own nodes use beside their inputs."""

    train: TrainConfig
    executor: "PipelineExecutor"
    name: str = ""
    """The node that runs."""
    skipped: str | None = None
    """The reason why no further node runs in this step, if any."""

    @property
    def node(self) -> DagNode:
        return self.executor.nodes[self.name]


class PipelineExecutor:
    """The nodes of a recipe, in the order in which a worker runs them."""

    def __init__(self, train: TrainConfig, own_nodes: Mapping[str, NodeFunction]) -> None:
        """Use hpcrl's functions by node; a node of the user's with a model runs as `reference` does."""
        self.nodes = pipeline.make_pipeline(train)
        self._own_nodes = own_nodes
        self._order = pipeline.order_nodes(self.nodes)
        self._user_functions = load_functions(train)

    def run(self, stage: NodeStage, *, work: NodeWork, results: dict[str, Any]) -> None:
        """Run the nodes of a stage and add their results, until one of them gives a reason to skip the step.

        Those of the stage "learn" are called by `learn_rows`: no node of the user's comes between.
        """
        for name in self._order:
            node = self.nodes[name]
            if node.stage != stage or work.skipped is not None:
                continue
            arguments = self.list_inputs(name, results)
            if self.is_users(name) and name != "values":  # hpcrl's function calls the user's
                results[name] = self._run_user_node(name, arguments)
            else:
                work.name = name
                own_function = self._own_nodes["reference" if node.model is not None else name]
                results[name] = own_function(work, *arguments)

    def list_inputs(self, name: str, results: Mapping[str, Any]) -> list[Any]:
        """Return the results that a node takes."""
        return [results[source] for source in self.nodes[name].inputs]

    def is_users(self, name: str) -> bool:
        """Return whether the function of a node is the user's."""
        return name in self._user_functions

    def takes_column(self, name: str) -> bool:
        """Return whether a function of the user's takes what this node found for each token."""
        return any(self.is_users(other) and name in node.inputs for other, node in self.nodes.items())

    def compute_columns(
        self, name: str, minibatches: Sequence[Sequence[MicroBatch]], *columns: Sequence[Sequence[Tensor | None]]
    ) -> list[list[Tensor | None]]:
        """Call a user's function for each micro-batch; None where a rank has not what it takes."""
        found = []
        for minibatch, *minibatch_columns in zip(minibatches, *columns, strict=True):
            given = zip(minibatch, *minibatch_columns, strict=True)
            found.append([self._compute_column(name, micro, each) for micro, *each in given])
        return found

    def _compute_column(self, name: str, micro: MicroBatch, columns: Sequence[Tensor | None]) -> Tensor | None:
        if any(column_N is None for column_N in columns):
            return None
        if not micro.num_tokens:
            return micro.advantages_N
        with torch.no_grad():
            return _check_column(_call_node(name, self._user_functions[name], (micro, *columns)), micro, name)

    def make_loss(self) -> PolicyLoss:
        """Return the loss of a micro-batch: hpcrl's, or the user's."""
        if self.is_users("loss"):
            return adapt_loss(lambda *given: _call_node("loss", self._user_functions["loss"], given))
        loss: PolicyLoss = load_code(self.nodes["loss"].function, what="a loss of hpcrl")
        return loss

    def _run_user_node(self, name: str, arguments: Sequence[Any]) -> Any:
        """Run a user's function on the whole step, on the rows of each minibatch, or on each micro-batch."""
        function = self._user_functions[name]
        if self.nodes[name].output == "tokens":
            return self.compute_columns(name, *arguments)
        if self.nodes[name].output != "rows":
            return _call_node(name, function, arguments)
        return [
            _check_rows(_call_node(name, function, rows), rows[0], name) if rows[0] else rows[0]
            for rows in zip(*arguments, strict=True)
        ]


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


def load_update(train: TrainConfig) -> Callable[..., Any] | None:
    """Load the user's function that changes a weight; None where the recipe has none."""
    if (function := load_functions(train).get("update")) is None:
        return None
    return lambda *given: _call_node("update", function, given)


def _bind_options(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    return lambda *given: function(*given, **options)


def _call_node(name: str, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        raise TrainError(f"train.pipeline.{name} failed: {show_error(error)}") from error


def check_trajectories(result: Any, trajectories: Sequence[Trajectory], name: str) -> Sequence[Trajectory]:
    """Check for the same trajectories in the same order; a node may change only their rewards."""
    ids = [getattr(one, "id", None) for one in result] if isinstance(result, Sequence) else None
    if ids != [trajectory.id for trajectory in trajectories]:
        raise NodeResultError(
            f"train.pipeline.{name} returned {_describe_value(result)}: its result is used as trajectories, so it must "
            f"return the {len(trajectories)} that it received, in their order, perhaps with other rewards"
        )
    checked: Sequence[Trajectory] = result
    return checked


def check_credits(result: Any, trajectories: Sequence[Trajectory], name: str) -> list[FloatArray]:
    """Check for a number for each turn of each trajectory; one number counts for all turns of an episode."""
    hint = f"it must return one number, or one for each turn, for each of the {len(trajectories)} trajectories"
    if not hasattr(result, "__len__") or len(result) != len(trajectories):
        raise NodeResultError(f"train.pipeline.{name} returned {_describe_value(result)}: {hint}")
    found = []
    for value, trajectory in zip(result, trajectories, strict=True):
        num_turns = max(len(trajectory.turns), 1)
        try:
            each = np.asarray(value, dtype=np.float64)
            found.append(np.full(num_turns, each) if each.ndim == 0 else each.reshape(num_turns))
        except (TypeError, ValueError) as error:
            what = f"{_describe_value(value)} for {trajectory.id}, which has {num_turns} turns"
            raise NodeResultError(f"train.pipeline.{name} returned {what}: {hint}") from error
    return found


def _check_column(result: Any, micro: MicroBatch, name: str) -> Tensor:
    """Check for a finite number for each token of a micro-batch."""
    hint = f"it must return a tensor with a number for each of the micro-batch's {micro.num_tokens} tokens (targets_N)"
    if not isinstance(result, Tensor) or result.shape != micro.targets_N.shape:
        raise NodeResultError(f"train.pipeline.{name} returned {_describe_value(result)}: {hint}")
    if not result.isfinite().all():
        raise TrainError(f"train.pipeline.{name} returned a number that is not finite: {hint}")
    return result.detach().to(micro.advantages_N)


def _check_rows(result: Any, rows: list[TrainingRow], name: str) -> list[TrainingRow]:
    """Check for the same number of rows of the same lengths: other ranks rely on it."""
    same = isinstance(result, Sequence) and len(result) == len(rows)
    if not same or any(
        not isinstance(one, TrainingRow) or len(one) != len(row) or len(one.credit) != len(row.credit)
        for one, row in zip(result, rows, strict=True)
    ):
        raise NodeResultError(
            f"train.pipeline.{name} returned {_describe_value(result)}: it must return the {len(rows)} rows that it "
            "received, in their order, with the same number of tokens and of credits"
        )
    return list(result)


def _describe_value(value: Any) -> str:
    size = f" of {len(value)}" if hasattr(value, "__len__") else f" {value!r}"
    return f"{type(value).__name__}{size}"[:200]
