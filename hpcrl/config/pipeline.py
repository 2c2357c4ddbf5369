"""The pipeline of a training step as a DAG: which functions run, on which data, in which order. No heavy imports.

    DagNode                                        a function, the nodes whose results it takes, the role that runs it
    Pipeline, NodeRole, ResultKind                 types
    make_pipeline                                  the built-in pipeline of a recipe's [train], with the user's nodes
    make_standard_nodes, make_nodes_for            the built-in nodes
    find_result_kinds, list_built_in_names         results that a user's node can take, and names of built-in nodes
    check_user_nodes, find_problems                problems of a recipe's nodes: cycles, missing inputs, wrong roles
    compute_depths, order_nodes                    the order in which every worker runs the nodes, one after the other
    render_text, render_dot, render_mermaid, RENDERERS    a pipeline for people
    TRAINER_ROLES, SPOOL_SOURCES, OTHER_ROLE_HINTS, REPLACEABLE_NODES    what a node may be

Every data-parallel worker runs the whole DAG on its own rows (DistFlow, arXiv 2507.13833). Nodes of equal depth could
run together, but never do, so that two large models are not in memory at once: `order_nodes` serialises them.

A user's node can take two kinds of results: those of `score` cover the step, all its trajectories, which rank 0 has;
those of `rows` cover one minibatch, of which every worker has its own rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from hpcrl.config.recipe import PipelineNode, TrainConfig

NodeRole = Literal["rollout", "reward", "reference", "critic", "policy"]
ResultKind = Literal["step", "rows"]
TRAINER_ROLES: tuple[NodeRole, ...] = ("reference", "critic", "policy")
"""Roles whose nodes the trainer's workers run; the others run elsewhere and write their results to a spool."""
SPOOL_SOURCES = ("rollouts", "scored")
"""Spools, which a node may take as inputs."""
OTHER_ROLE_HINTS = {
    "rollout": "an environment is domains.NAME.env",
    "reward": "a reward is domains.NAME.reward",
    "reference": "the reference model is enabled with train.kl",
    "critic": 'the critic is enabled with train.advantage = "gae"',
}
"""The recipe key for the user's code of another role."""


class DagNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step of the pipeline."""

    function: str
    """`package.module:name`."""
    inputs: list[str]
    """Names of other nodes, or of spools."""
    role: NodeRole
    gathers: bool = False
    """The node needs the rows of all workers; otherwise each worker uses its own and nothing is sent."""


Pipeline = Mapping[str, DagNode]


def make_standard_nodes(
    *, advantage: str, kl: str = "none", proximal: str = "recomputed", policy_moves: bool = False
) -> dict[str, DagNode]:
    """Return the built-in nodes for these settings of [train]."""
    critic = advantage == "gae"
    credit = "rewards" if critic else "advantage"
    nodes = {
        "sample": DagNode(function="hpcrl.roles.env:run", inputs=[], role="rollout"),
        "score": DagNode(function="hpcrl.roles.reward:score", inputs=["sample"], role="reward"),
        credit: DagNode(function="hpcrl.learn.pipeline:compute_credits", inputs=["score"], role="policy", gathers=True),
        "deal": DagNode(
            function="hpcrl.learn.distribute:distribute_step", inputs=["score", credit], role="policy", gathers=True
        ),
        "rows": DagNode(function="hpcrl.learn.distribute:load_share_rows", inputs=["deal"], role="policy"),
    }
    losses = ["rows"]
    if critic:
        nodes["values"] = DagNode(
            function="hpcrl.trainers.critic:Critic.add_advantages", inputs=["rows"], role="critic"
        )
        losses.append("values")
    if kl != "none":
        nodes["reference"] = DagNode(function="hpcrl.learn.loss:gather_logprobs", inputs=["rows"], role="reference")
        losses.append("reference")
    if proximal == "recomputed" and policy_moves:
        nodes["proximal"] = DagNode(function="hpcrl.learn.loss:gather_logprobs", inputs=["rows"], role="policy")
        losses.append("proximal")
    nodes["update"] = DagNode(function="hpcrl.learn.loss:compute_policy_loss", inputs=losses, role="policy")
    if critic:
        nodes["update-critic"] = DagNode(
            function="hpcrl.learn.loss:compute_value_loss", inputs=["values"], role="critic"
        )
    return nodes


def make_nodes_for(train: TrainConfig) -> dict[str, DagNode]:
    """Return the built-in nodes for a recipe's [train]."""
    return make_standard_nodes(
        advantage=train.advantage,
        kl=train.kl,
        proximal=train.proximal,
        policy_moves=train.policy_moves or train.has_kl_reward,
    )


def make_pipeline(train: TrainConfig) -> dict[str, DagNode]:
    """Return the pipeline of a recipe, unchecked (see `check_user_nodes`)."""
    nodes = make_nodes_for(train)
    for name, declared in train.pipeline.items():
        if name == "update" and declared.inputs:  # every node that takes `rows` takes the update's new input instead
            nodes = {known: _replace_rows_input(node, declared.inputs[0]) for known, node in nodes.items()}
        elif name in nodes:
            changed = {
                "inputs": declared.inputs or nodes[name].inputs,
                "function": declared.function or nodes[name].function,
            }
            nodes[name] = msgspec.structs.replace(nodes[name], **changed)
    user_nodes = {
        name: DagNode(function=declared.function or "", inputs=declared.inputs, role=declared.role or "policy")
        for name, declared in train.pipeline.items()
        if name not in nodes
    }
    complete = {**nodes, **user_nodes}
    kinds = find_result_kinds(complete)
    gathering = {
        name: msgspec.structs.replace(node, gathers=True)
        for name, node in user_nodes.items()
        if kinds.get(name) == "step"
    }
    return {**complete, **gathering}


def find_result_kinds(pipeline: Pipeline) -> dict[str, ResultKind]:
    """Return the nodes whose results a user's node can take, each with the kind of its results."""
    found: dict[str, ResultKind] = {"score": "step", "rows": "rows"}
    found |= {name: "step" for name in ("advantage", "rewards") if name in pipeline}
    built_in = {*found, *_BUILT_IN_NODES}
    for _ in pipeline:  # enough rounds for the longest possible chain
        for name, node in pipeline.items():
            kinds = {found[source] for source in node.inputs if source in found}
            if name not in built_in and len(kinds) == 1:
                found[name] = kinds.pop()
    return found


def check_user_nodes(train: TrainConfig) -> list[str]:
    """Return the problems of a recipe's nodes, each with a fix."""
    pipeline = make_pipeline(train)
    kinds = find_result_kinds(pipeline)
    found: list[str] = []
    for name, declared in train.pipeline.items():
        check = _check_built_in_node if name in make_nodes_for(train) else _check_user_node
        found += [f"train.pipeline.{name}: {wrong}" for wrong in check(name, declared, pipeline, kinds)]
    return found or find_problems(pipeline)


def _check_built_in_node(
    name: str, declared: PipelineNode, pipeline: Pipeline, kinds: Mapping[str, ResultKind]
) -> Iterator[str]:
    """Yield the problems of a declared node that is built in."""
    if declared.function is not None and name not in REPLACEABLE_NODES:
        yield f"its function is built in; only {' and '.join(REPLACEABLE_NODES)} can have another function"
    if declared.role is not None and declared.role != pipeline[name].role:
        yield f"its role is {pipeline[name].role!r}, not {declared.role!r}: remove `role`"
    if declared.options and declared.function is None:
        yield "it has options, but no function that takes them"
    if not declared.inputs:
        return
    if name not in _CHANGEABLE_INPUTS:
        yield f"its inputs cannot be changed, only those of {', '.join(_CHANGEABLE_INPUTS)}"
        return
    kind, number = _CHANGEABLE_INPUTS[name]
    if number and len(declared.inputs) != number:
        meant = "trajectories and advantages" if name == "deal" else "the replacement of `rows`"
        yield f"it takes {number} input{'s' * (number > 1)} ({meant}), not {len(declared.inputs)}"
    yield from _check_inputs(declared.inputs, pipeline, kinds, kind=kind)


def _check_user_node(
    name: str, declared: PipelineNode, pipeline: Pipeline, kinds: Mapping[str, ResultKind]
) -> Iterator[str]:
    """Yield the problems of a declared node that is the user's own."""
    if declared.function is None:
        yield f"it has no function, and is not a built-in node here ({', '.join(list_built_in_names(pipeline))})"
    if declared.role is None:
        yield 'it has no role: set role = "policy", which the trainer runs'
    elif declared.role != "policy":
        yield f"nodes of role {declared.role!r} are not declared here: {OTHER_ROLE_HINTS[declared.role]}"
    if not declared.inputs:
        yield "it has no inputs: add some, such as score or rows"
    yield from _check_inputs(declared.inputs, pipeline, kinds)
    if not any(name in node.inputs for other, node in pipeline.items() if other != name):
        yield "no node takes it, so it would have no effect: add it to the inputs of advantage, deal or update"


def _check_inputs(
    inputs: Sequence[str], pipeline: Pipeline, kinds: Mapping[str, ResultKind], *, kind: ResultKind | None = None
) -> Iterator[str]:
    present = [source for source in inputs if source in pipeline]
    if spools := [source for source in inputs if source in SPOOL_SOURCES]:
        yield f"it takes {spools[0]!r}, a spool: use `score`, the trajectories that the trainer has read from it"
    for source in present:
        if source in _BUILT_IN_NODES and source not in kinds:
            yield f"it takes {source!r}, whose result no other node can take: choose from {', '.join(sorted(kinds))}"
    seen = {source: kinds[source] for source in present if source in kinds}
    if kind is not None:
        wrong = sorted(source for source, given in seen.items() if given != kind)
        if wrong:
            yield f"it takes {wrong[0]!r}, which is {_KIND_MEANINGS[seen[wrong[0]]]}; it needs {_KIND_MEANINGS[kind]}"
    elif len(set(seen.values())) > 1:
        each = " and ".join(f"{source!r} is {_KIND_MEANINGS[given]}" for source, given in seen.items())
        yield f"{each}: it can take only one of the two kinds"


REPLACEABLE_NODES = ("advantage", "rewards")
"""Built-in nodes whose function can be replaced; `rewards` exists with a critic, `advantage` without."""
_CHANGEABLE_INPUTS: dict[str, tuple[ResultKind, int]] = {
    "advantage": ("step", 0),
    "rewards": ("step", 0),
    "deal": ("step", 2),
    "update": ("rows", 1),
}
"""Built-in nodes whose inputs can be changed: the kind of results, and how many inputs (0: any number)."""
_KIND_MEANINGS: dict[ResultKind, str] = {
    "step": "of the whole step, which rank 0 has",
    "rows": "of each worker's own rows",
}
_BUILT_IN_NODES = frozenset({"sample", "deal", "values", "reference", "proximal", "update", "update-critic"})
"""Built-in nodes whose results no other node can take."""


def list_built_in_names(pipeline: Pipeline) -> list[str]:
    """Return the names of the built-in nodes of a pipeline."""
    return [name for name in pipeline if name in _BUILT_IN_NODES | {"score", "advantage", "rewards", "rows"}]


def find_problems(pipeline: Pipeline) -> list[str]:
    """Return the problems of a pipeline, each with a fix; none if it can run."""
    found = [problem for name, node in pipeline.items() for problem in _find_node_problems(name, node, pipeline)]
    if not found and (cycle := _find_cycle(pipeline)):
        found.append(f"nodes form a cycle: {' -> '.join(cycle)}: remove one of these inputs")
    if pipeline and not any(node.role == "policy" for node in pipeline.values()):
        found.append('no node has role "policy": nothing would be learned')
    return found


def _find_node_problems(name: str, node: DagNode, pipeline: Pipeline) -> list[str]:
    known = {*pipeline, *SPOOL_SOURCES}
    found = [
        f"node {name!r} takes {missing!r}, which is neither a node nor a spool ({', '.join(sorted(known))})"
        for missing in node.inputs
        if missing not in known
    ]
    if node.role in TRAINER_ROLES and not node.inputs:
        found.append(f"node {name!r} of role {node.role!r} has no inputs: add the spool `scored` or another node")
    for source in node.inputs:
        giver = pipeline.get(source)
        if giver is not None and giver.role in TRAINER_ROLES and node.role not in TRAINER_ROLES:
            found.append(
                f"node {name!r} of role {node.role!r} takes {source!r} of role {giver.role!r}: results of the trainer "
                "stay on its workers"
            )
    return found


def _replace_rows_input(node: DagNode, replacement: str) -> DagNode:
    """Return the node with `rows` replaced in its inputs."""
    return msgspec.structs.replace(node, inputs=[replacement if source == "rows" else source for source in node.inputs])


def compute_depths(pipeline: Pipeline) -> dict[str, int]:
    """Return the length of the longest path to each node."""
    found: dict[str, int] = {}

    def depth(name: str) -> int:
        if name not in found:
            before = [depth(source) for source in pipeline[name].inputs if source in pipeline]
            found[name] = max(before, default=-1) + 1
        return found[name]

    for name in pipeline:
        depth(name)
    return found


def order_nodes(pipeline: Pipeline, *, roles: Sequence[str] = TRAINER_ROLES) -> list[str]:
    """Return the nodes of these roles in the order in which a worker runs them: by depth, then as declared."""
    depth = compute_depths(pipeline)
    return sorted((name for name, node in pipeline.items() if node.role in roles), key=lambda name: depth[name])


def render_text(pipeline: Pipeline) -> str:
    """Render one line a node, indented by its depth, and the order of the trainer's workers."""
    depth = compute_depths(pipeline)
    width = max(2 * depth[name] + len(name) for name in pipeline)
    lines = []
    for name in sorted(pipeline, key=lambda name: depth[name]):
        node = pipeline[name]
        inputs = ", ".join(node.inputs) or "-"
        moved = "  (rank 0 alone, ids only)" if node.gathers else ""
        shown = "  " * depth[name] + name
        lines.append(f"{shown:<{width}}  {node.role:<9}  <- {inputs:<24}  {node.function}{moved}")
    return "\n".join([*lines, f"each trainer worker: {' -> '.join(order_nodes(pipeline))}"])


def render_dot(pipeline: Pipeline) -> str:
    """Render a pipeline for Graphviz: `hpcrl plan ... --dag dot | dot -Tsvg > pipeline.svg`."""
    nodes = [f'  "{name}" [label="{name}\\n{node.role}"];' for name, node in pipeline.items()]
    return "\n".join(["digraph pipeline {", *nodes, *_render_edges(pipeline, '  "{}" -> "{}";'.format), "}"])


def render_mermaid(pipeline: Pipeline) -> str:
    """Render a pipeline as Mermaid, for Markdown pages."""
    nodes = [f'  {name}["{name}<br/>{node.role}"]' for name, node in pipeline.items()]
    return "\n".join(["flowchart TD", *nodes, *_render_edges(pipeline, "  {} --> {}".format)])


RENDERERS: dict[str, Callable[[Pipeline], str]] = {"text": render_text, "dot": render_dot, "mermaid": render_mermaid}


def _render_edges(pipeline: Pipeline, line: Callable[[str, str], str]) -> list[str]:
    return [line(source, name) for name, node in pipeline.items() for source in node.inputs]


def _find_cycle(pipeline: Pipeline) -> list[str]:
    """Return the nodes of one cycle, or an empty list."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for source in pipeline[name].inputs:
            if source in pipeline and (found := walk(source, [*path, name])):
                return found
        done.add(name)
        return []

    return next((found for name in pipeline if (found := walk(name, []))), [])
