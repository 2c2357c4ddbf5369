"""The pipeline of a training step as a DAG: what runs, on whose data, in which order. Imports nothing heavy.

    Node          a named function, the nodes whose results it takes, the role that runs it
    ready         the pipelines that come with hpcrl, one for each algorithm
    problems      what is wrong with a pipeline: cycles, missing inputs, wrong roles
    linearised    the order in which every worker runs the nodes, one after the other
    picture       a pipeline for people

Every data-parallel worker runs the whole DAG on its own rows (DistFlow, arXiv 2507.13833). Nodes of one depth could run
together; they never do, so that two large models do not meet in one memory: linearised serialises them.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

NodeRole = Literal["rollout", "reward", "reference", "critic", "policy"]
ON_TRAINER: tuple[NodeRole, ...] = ("reference", "critic", "policy")
"""Roles whose nodes the trainer's workers run; the others run elsewhere and leave their results in a spool."""
SOURCES = ("rollouts", "scored")
"""Spools, which a node may take as inputs."""


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step of the pipeline."""

    function: str
    """`package.module:name`."""
    inputs: list[str]
    """Names of other nodes, or of spools."""
    role: NodeRole
    gathers: bool = False
    """It must see the rows of all workers; otherwise each has its own and nothing moves."""


Pipeline = Mapping[str, Node]

_DEAL = Node(function="hpcrl.learn.deal:deal", inputs=["scored"], role="policy", gathers=True)
_ROWS = Node(function="hpcrl.learn.deal:rows_of", inputs=["deal"], role="policy")
_SAMPLE = Node(function="hpcrl.roles.env:run", inputs=[], role="rollout")
_SCORE = Node(function="hpcrl.roles.reward:score", inputs=["sample"], role="reward")


def ready(
    *, advantage: str, kl: str = "none", proximal: str = "recomputed", num_minibatches: int = 1
) -> dict[str, Node]:
    """The pipeline that a recipe's [train] asks for."""
    nodes = {"sample": _SAMPLE, "score": _SCORE, "deal": msgspec.structs.replace(_DEAL, inputs=["score"])}
    nodes["rows"] = _ROWS
    loss_inputs = ["rows"]
    if advantage == "gae":
        nodes["values"] = Node(function="hpcrl.trainers.critic:Critic.judged", inputs=["rows"], role="critic")
        loss_inputs.append("values")
    if kl != "none":
        nodes["reference"] = Node(function="hpcrl.learn.loss:chosen_logprobs", inputs=["rows"], role="reference")
        loss_inputs.append("reference")
    if proximal == "recomputed" and num_minibatches > 1:
        nodes["proximal"] = Node(function="hpcrl.learn.loss:chosen_logprobs", inputs=["rows"], role="policy")
        loss_inputs.append("proximal")
    nodes["update"] = Node(function="hpcrl.learn.loss:policy_loss", inputs=loss_inputs, role="policy")
    if advantage == "gae":
        nodes["update-critic"] = Node(function="hpcrl.learn.loss:value_loss", inputs=["values"], role="critic")
    return nodes


def problems(pipeline: Pipeline) -> list[str]:
    """What is wrong, each with its cure; nothing if the pipeline can run."""
    found = [problem for name, node in pipeline.items() for problem in _problems_of(name, node, pipeline)]
    if not found and (cycle := _cycle(pipeline)):
        found.append(f"nodes go round in a circle: {' -> '.join(cycle)}: take one of these inputs away")
    if pipeline and not any(node.role == "policy" for node in pipeline.values()):
        found.append('no node has role "policy": nothing would be learned')
    return found


def _problems_of(name: str, node: Node, pipeline: Pipeline) -> list[str]:
    known = {*pipeline, *SOURCES}
    found = [
        f"node {name!r} takes {missing!r}, which is neither a node nor a spool ({', '.join(sorted(known))})"
        for missing in node.inputs
        if missing not in known
    ]
    if node.role in ON_TRAINER and not node.inputs:
        found.append(f"node {name!r} of role {node.role!r} takes nothing: give it the spool `scored` or another node")
    for taken in node.inputs:
        giver = pipeline.get(taken)
        if giver is not None and giver.role in ON_TRAINER and node.role not in ON_TRAINER:
            found.append(
                f"node {name!r} of role {node.role!r} takes {taken!r} of role {giver.role!r}: what the trainer makes "
                "stays on its workers"
            )
    return found


def depths(pipeline: Pipeline) -> dict[str, int]:
    """How many nodes, at most, lie before each one."""
    found: dict[str, int] = {}

    def depth(name: str) -> int:
        if name not in found:
            before = [depth(taken) for taken in pipeline[name].inputs if taken in pipeline]
            found[name] = max(before, default=-1) + 1
        return found[name]

    for name in pipeline:
        depth(name)
    return found


def linearised(pipeline: Pipeline, *, roles: Sequence[str] = ON_TRAINER) -> list[str]:
    """The nodes of these roles in the order in which a worker runs them: by depth, then as they were declared."""
    depth = depths(pipeline)
    return sorted((name for name, node in pipeline.items() if node.role in roles), key=lambda name: depth[name])


def picture(pipeline: Pipeline) -> str:
    """One line a node, indented by its depth, and the order of the trainer's workers."""
    depth = depths(pipeline)
    width = max(2 * depth[name] + len(name) for name in pipeline)
    lines = []
    for name in sorted(pipeline, key=lambda name: depth[name]):
        node = pipeline[name]
        taken = ", ".join(node.inputs) or "-"
        moved = "  (rank 0 alone, ids only)" if node.gathers else ""
        shown = "  " * depth[name] + name
        lines.append(f"{shown:<{width}}  {node.role:<9}  <- {taken:<24}  {node.function}{moved}")
    return "\n".join([*lines, f"each trainer worker: {' -> '.join(linearised(pipeline))}"])


def dot(pipeline: Pipeline) -> str:
    """The same for Graphviz."""
    edges = [f'  "{taken}" -> "{name}";' for name, node in pipeline.items() for taken in node.inputs]
    nodes = [f'  "{name}" [label="{name}\\n{node.role}"];' for name, node in pipeline.items()]
    return "\n".join(["digraph pipeline {", *nodes, *edges, "}"])


def _cycle(pipeline: Pipeline) -> list[str]:
    """The nodes of one circle, or nothing."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for taken in pipeline[name].inputs:
            if taken in pipeline and (found := walk(taken, [*path, name])):
                return found
        done.add(name)
        return []

    return next((found for name in pipeline if (found := walk(name, []))), [])
