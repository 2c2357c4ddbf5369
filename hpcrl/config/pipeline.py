"""The pipeline of a training step as a DAG: what runs, on whose data, in which order. Imports nothing heavy.

    Node          a named function, the nodes whose results it takes, the role that runs it
    pipeline_of   the pipeline of a recipe's [train]: a ready one, with the user's nodes in it
    problems      what is wrong with it: cycles, missing inputs, wrong roles
    linearised    the order in which every worker runs the nodes, one after the other
    picture, dot, mermaid    a pipeline for people

Every data-parallel worker runs the whole DAG on its own rows (DistFlow, arXiv 2507.13833). Nodes of one depth could run
together; they never do, so that two large models do not meet in one memory: linearised serialises them.

Two kinds of results can be taken by a user's node. What `score` gives is the step: all its trajectories, which rank 0
has. What `rows` gives is the rows of one minibatch, of which every worker has its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from hpcrl.config.recipe import PipelineNode, Train

NodeRole = Literal["rollout", "reward", "reference", "critic", "policy"]
Kind = Literal["step", "rows"]
ON_TRAINER: tuple[NodeRole, ...] = ("reference", "critic", "policy")
"""Roles whose nodes the trainer's workers run; the others run elsewhere and leave their results in a spool."""
SOURCES = ("rollouts", "scored")
"""Spools, which a node may take as inputs."""
INSTEAD = {
    "rollout": "an environment is domains.NAME.env",
    "reward": "a reward is domains.NAME.reward",
    "reference": "the reference model is asked for with train.kl",
    "critic": 'the critic is asked for with train.advantage = "gae"',
}
"""Where a user's code of another role is named."""


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


def ready(
    *, advantage: str, kl: str = "none", proximal: str = "recomputed", num_minibatches: int = 1
) -> dict[str, Node]:
    """The pipeline that a recipe's [train] asks for, without the user's nodes."""
    critic = advantage == "gae"
    credit = "rewards" if critic else "advantage"
    nodes = {
        "sample": Node(function="hpcrl.roles.env:run", inputs=[], role="rollout"),
        "score": Node(function="hpcrl.roles.reward:score", inputs=["sample"], role="reward"),
        credit: Node(function="hpcrl.learn.pipeline:credits_of", inputs=["score"], role="policy", gathers=True),
        "deal": Node(function="hpcrl.learn.distribute:deal", inputs=["score", credit], role="policy", gathers=True),
        "rows": Node(function="hpcrl.learn.distribute:rows_of", inputs=["deal"], role="policy"),
    }
    losses = ["rows"]
    if critic:
        nodes["values"] = Node(function="hpcrl.trainers.critic:Critic.judged", inputs=["rows"], role="critic")
        losses.append("values")
    if kl != "none":
        nodes["reference"] = Node(function="hpcrl.learn.loss:chosen_logprobs", inputs=["rows"], role="reference")
        losses.append("reference")
    if proximal == "recomputed" and num_minibatches > 1:
        nodes["proximal"] = Node(function="hpcrl.learn.loss:chosen_logprobs", inputs=["rows"], role="policy")
        losses.append("proximal")
    nodes["update"] = Node(function="hpcrl.learn.loss:policy_loss", inputs=losses, role="policy")
    if critic:
        nodes["update-critic"] = Node(function="hpcrl.learn.loss:value_loss", inputs=["values"], role="critic")
    return nodes


def ready_of(train: Train) -> dict[str, Node]:
    """The same, of a recipe's [train]."""
    return ready(advantage=train.advantage, kl=train.kl, proximal=train.proximal, num_minibatches=train.num_minibatches)


def pipeline_of(train: Train) -> dict[str, Node]:
    """The pipeline of a recipe. `problems_of` says whether it can run."""
    nodes = ready_of(train)
    for name, asked in train.pipeline.items():
        if name == "update" and asked.inputs:  # all that takes rows takes what the update takes in their place
            nodes = {known: _with_rows(node, asked.inputs[0]) for known, node in nodes.items()}
        elif name in nodes:
            changed = {"inputs": asked.inputs or nodes[name].inputs, "function": asked.function or nodes[name].function}
            nodes[name] = msgspec.structs.replace(nodes[name], **changed)
    own = {
        name: Node(function=asked.function or "", inputs=asked.inputs, role=asked.role or "policy")
        for name, asked in train.pipeline.items()
        if name not in nodes
    }
    whole = {**nodes, **own}
    kinds = kinds_of(whole)
    gathering = {
        name: msgspec.structs.replace(node, gathers=True) for name, node in own.items() if kinds.get(name) == "step"
    }
    return {**whole, **gathering}


def kinds_of(pipeline: Pipeline) -> dict[str, Kind]:
    """What a user's node can take: the results of which nodes, and what they are."""
    found: dict[str, Kind] = {"score": "step", "rows": "rows"}
    found |= {name: "step" for name in ("advantage", "rewards") if name in pipeline}
    ours = {*found, *_OURS}
    for _ in pipeline:  # as often as the longest chain is long
        for name, node in pipeline.items():
            kinds = {found[taken] for taken in node.inputs if taken in found}
            if name not in ours and len(kinds) == 1:
                found[name] = kinds.pop()
    return found


def problems_of(train: Train) -> list[str]:
    """What is wrong with a recipe's nodes, each with its cure."""
    pipeline = pipeline_of(train)
    kinds = kinds_of(pipeline)
    found: list[str] = []
    for name, asked in train.pipeline.items():
        check = _wrong_with_ours if name in ready_of(train) else _wrong_with_theirs
        found += [f"train.pipeline.{name}: {wrong}" for wrong in check(name, asked, pipeline, kinds)]
    return found or problems(pipeline)


def _wrong_with_ours(name: str, asked: PipelineNode, pipeline: Pipeline, kinds: Mapping[str, Kind]) -> Iterator[str]:
    """What cannot be asked of a node that is there anyway."""
    if asked.function is not None and name not in REPLACEABLE:
        yield f"its function is hpcrl's own; only {' and '.join(REPLACEABLE)} can have another"
    if asked.role is not None and asked.role != pipeline[name].role:
        yield f"its role is {pipeline[name].role!r}, not {asked.role!r}: take `role` away"
    if asked.options and asked.function is None:
        yield "it has options and no function that takes them"
    if not asked.inputs:
        return
    if name not in _TAKES:
        yield f"what it takes cannot be changed, only what {', '.join(_TAKES)} take"
        return
    kind, number = _TAKES[name]
    if number and len(asked.inputs) != number:
        meant = "trajectories and advantages" if name == "deal" else "what takes the place of `rows`"
        yield f"it takes {number} input{'s' * (number > 1)} ({meant}), not {len(asked.inputs)}"
    yield from _wrong_inputs(asked.inputs, pipeline, kinds, kind=kind)


def _wrong_with_theirs(name: str, asked: PipelineNode, pipeline: Pipeline, kinds: Mapping[str, Kind]) -> Iterator[str]:
    """What cannot be asked of a node of the user's."""
    if asked.function is None:
        yield f"it has no function, and is none of hpcrl's nodes here ({', '.join(ready_names(pipeline))})"
    if asked.role is None:
        yield 'it has no role: role = "policy" is what the trainer runs'
    elif asked.role != "policy":
        yield f"nodes of role {asked.role!r} are not given here: {INSTEAD[asked.role]}"
    if not asked.inputs:
        yield "it takes nothing: give it inputs, such as score or rows"
    yield from _wrong_inputs(asked.inputs, pipeline, kinds)
    if not any(name in node.inputs for other, node in pipeline.items() if other != name):
        yield "nothing takes it, so it would change nothing: name it in the inputs of advantage, deal or update"


def _wrong_inputs(
    inputs: Sequence[str], pipeline: Pipeline, kinds: Mapping[str, Kind], *, kind: Kind | None = None
) -> Iterator[str]:
    there = [taken for taken in inputs if taken in pipeline]
    if spools := [taken for taken in inputs if taken in SOURCES]:
        yield f"it takes {spools[0]!r}, a spool: what the trainer read of it is `score`"
    for taken in there:
        if taken in _OURS and taken not in kinds:
            yield f"it takes {taken!r}, which gives nothing that another node can take: {', '.join(sorted(kinds))} do"
    seen = {taken: kinds[taken] for taken in there if taken in kinds}
    if kind is not None:
        wrong = sorted(taken for taken, given in seen.items() if given != kind)
        if wrong:
            yield f"it takes {wrong[0]!r}, which is {_MEANT[seen[wrong[0]]]}; it needs {_MEANT[kind]}"
    elif len(set(seen.values())) > 1:
        each = " and ".join(f"{taken!r} is {_MEANT[given]}" for taken, given in seen.items())
        yield f"{each}: it can take one or the other"


REPLACEABLE = ("advantage", "rewards")
"""Nodes of hpcrl whose function can be another; `rewards` is there with a critic, `advantage` without."""
_TAKES: dict[str, tuple[Kind, int]] = {
    "advantage": ("step", 0),
    "rewards": ("step", 0),
    "deal": ("step", 2),
    "update": ("rows", 1),
}
"""Nodes of hpcrl whose inputs can be changed: to what kind of results, and how many (0: any number)."""
_MEANT: dict[Kind, str] = {"step": "of the whole step, which rank 0 has", "rows": "of each worker's own rows"}
_OURS = frozenset({"sample", "deal", "values", "reference", "proximal", "update", "update-critic"})
"""Ready nodes whose results no other node can take."""


def ready_names(pipeline: Pipeline) -> list[str]:
    """The names of hpcrl's own nodes in a pipeline."""
    return [name for name in pipeline if name in _OURS | {"score", "advantage", "rewards", "rows"}]


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


def _with_rows(node: Node, instead: str) -> Node:
    """A node that takes something else in place of `rows`."""
    return msgspec.structs.replace(node, inputs=[instead if taken == "rows" else taken for taken in node.inputs])


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
    """The same for Graphviz: `hpcrl plan ... --dag dot | dot -Tsvg > pipeline.svg`."""
    nodes = [f'  "{name}" [label="{name}\\n{node.role}"];' for name, node in pipeline.items()]
    return "\n".join(["digraph pipeline {", *nodes, *_edges(pipeline, '  "{}" -> "{}";'.format), "}"])


def mermaid(pipeline: Pipeline) -> str:
    """The same for Markdown pages that draw Mermaid."""
    nodes = [f'  {name}["{name}<br/>{node.role}"]' for name, node in pipeline.items()]
    return "\n".join(["flowchart TD", *nodes, *_edges(pipeline, "  {} --> {}".format)])


PICTURES: dict[str, Callable[[Pipeline], str]] = {"text": picture, "dot": dot, "mermaid": mermaid}


def _edges(pipeline: Pipeline, line: Callable[[str, str], str]) -> list[str]:
    return [line(taken, name) for name, node in pipeline.items() for taken in node.inputs]


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
