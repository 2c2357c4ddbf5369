"""The pipeline of a training step as a DAG: which functions run, on which data, in which order. No heavy imports.

    DagNode                                        a function, the nodes whose results it takes, its output, its role
    Pipeline, NodeOutput, NodeStage                types
    make_pipeline                                  the built-in pipeline of a recipe's [train], with the user's nodes
    make_running_pipeline                          that which runs, which may only imitate, for people
    add_judges                                     the same with the models that rewards and environments call
    make_standard_nodes, make_nodes_for            the built-in nodes
    find_result_kinds, list_built_in_names         results that a user's node can take, and names of built-in nodes
    is_user_node, needs_critic                     whether a node is the user's own, and whether a critic trains
    list_fixed_nodes                               nodes with a model that never trains
    check_user_nodes, find_problems                problems of a recipe's nodes: cycles, missing inputs, wrong roles
    compute_depths, order_nodes                    the order in which every worker runs the nodes, one after the other
    render_text, render_dot, render_mermaid, RENDERERS    a pipeline for people
    TRAINER_ROLES, SCORE_FUNCTION, SPOOL_SOURCES, OTHER_ROLE_HINTS, REPLACEABLE_NODES, STAGES    what a node may be

Every data-parallel worker runs the whole DAG on its own rows (DistFlow, arXiv 2507.13833). Nodes of equal depth could
run together, but never do, so that only one model at a time needs memory for its work: `order_nodes` serialises them.
What is drawn is what runs: the function of each node is called with the results of its inputs, by
`hpcrl/learn/pipeline.py`, or by `learn_rows` in `hpcrl/trainers/step.py` where no node of the user's can come between.

A user's function can take three kinds of results: those of `score` cover the step, all its trajectories, which rank 0
has; those of `rows` cover one minibatch, of which every worker has its own rows; those of `batches` are the rows as
tensors, of which it sees one micro-batch at a time and gives a number for each token.

Nodes have the data parallelism of the trainer, unless a node with a model has its own `data_parallel`: the buffer
before it then re-shards the batches (`hpcrl/trainers/spread_model.py`), and only then.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from hpcrl.config.recipe import JUDGE_ROLE_PREFIX, NodeRole, PipelineNode, Recipe, TrainConfig, make_warmup_settings
from hpcrl.config.toml import suggest_name

NodeOutput = Literal["step", "shares", "rows", "batches", "tokens", "loss", "weights"]
"""The result of a node: of the whole step; which rank trains what; a rank's rows; the same as tensors; a number for
each of their tokens; the gradient of a loss; other weights."""
NodeStage = Literal["deal", "rows", "prepare", "learn"]
STAGES: dict[NodeOutput, NodeStage] = {
    "step": "deal",
    "shares": "deal",
    "rows": "rows",
    "batches": "prepare",
    "tokens": "prepare",
    "loss": "learn",
    "weights": "learn",
}
"""The ranks that run a node, and how often: rank 0 alone (deal); each rank, once in a step (rows, prepare); or each
rank, once for every minibatch, since the weights change in between (learn)."""
SCORE_FUNCTION = "hpcrl.roles.reward:score"
"""The node that reward workers run; the trainer reads its results from a spool."""
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
    output: NodeOutput
    model: str | None = None
    """A model directory, for a node that runs another model than the policy."""
    data_parallel: int | None = None
    """The number of ranks that run it; None: as the trainer's other nodes."""

    @property
    def stage(self) -> NodeStage:
        return STAGES[self.output]


Pipeline = Mapping[str, DagNode]


def make_standard_nodes(
    *,
    advantage: str,
    kl: str = "none",
    has_kl_reward: bool = False,
    proximal: str = "recomputed",
    policy_moves: bool = False,
) -> dict[str, DagNode]:
    """Return the built-in nodes for these settings of [train]."""
    critic = advantage == "gae"
    credit = "rewards" if critic else "advantage"
    worker = "hpcrl.trainers.nodes"
    nodes = {
        "sample": DagNode(function="hpcrl.roles.env:run", inputs=[], role="rollout", output="step"),
        "score": DagNode(function=SCORE_FUNCTION, inputs=["sample"], role="reward", output="step"),
        credit: DagNode(
            function="hpcrl.learn.distribute:assign_credits", inputs=["score"], role="policy", output="step"
        ),
        "deal": DagNode(
            function="hpcrl.learn.distribute:distribute_rows", inputs=["score", credit], role="policy", output="shares"
        ),
        "rows": DagNode(function=f"{worker}:read_rows", inputs=["deal"], role="policy", output="rows"),
        "batches": DagNode(function=f"{worker}:make_batches", inputs=["rows"], role="policy", output="batches"),
    }
    compute, batches, before = f"{worker}:compute_logprobs", "batches", []
    if kl != "none":
        nodes["reference"] = DagNode(function=compute, inputs=["batches"], role="reference", output="tokens")
        before.append("reference")
    if proximal == "recomputed" and (policy_moves or has_kl_reward):
        nodes["proximal"] = DagNode(function=compute, inputs=["batches"], role="policy", output="tokens")
        before.append("proximal")
    if has_kl_reward:
        nodes["costs"] = DagNode(
            function=f"{worker}:subtract_costs", inputs=["batches", *before], role="policy", output="batches"
        )
        batches = "costs"
    if critic:
        nodes["values"] = DagNode(
            function=f"{worker}:estimate_values", inputs=[batches], role="critic", output="batches"
        )
        batches = "values"
    losses = [batches, *before]
    loss = "compute_imitation_loss" if advantage == "sft" else "compute_policy_loss"
    nodes["loss"] = DagNode(function=f"hpcrl.learn.loss:{loss}", inputs=losses, role="policy", output="loss")
    nodes["update"] = DagNode(function=f"{worker}:update_policy", inputs=["loss"], role="policy", output="weights")
    if critic:
        nodes["update-critic"] = DagNode(
            function=f"{worker}:update_critic", inputs=["values", "update"], role="critic", output="weights"
        )
    return nodes


def make_nodes_for(train: TrainConfig) -> dict[str, DagNode]:
    """Return the built-in nodes for a recipe's [train]."""
    return make_standard_nodes(
        advantage=train.advantage,
        kl=train.kl,
        proximal=train.proximal,
        policy_moves=train.policy_moves,
        has_kl_reward=train.has_kl_reward,
    )


def make_pipeline(train: TrainConfig) -> dict[str, DagNode]:
    """Return the pipeline of a recipe, unchecked (see `check_user_nodes`)."""
    nodes = make_nodes_for(train)
    user_nodes = {name: declared for name, declared in train.pipeline.items() if name not in nodes}
    own_loss = is_user_node("loss", train)
    if is_user_node("values", train):
        nodes.pop("update-critic", None)  # the values are not those of a critic
    if own_loss:
        nodes["loss"] = msgspec.structs.replace(nodes["loss"], inputs=nodes["loss"].inputs[:1])
    for name, declared in train.pipeline.items():
        if name in nodes:
            nodes[name] = msgspec.structs.replace(
                nodes[name],
                inputs=declared.inputs or nodes[name].inputs,
                function=declared.function or nodes[name].function,
                model=declared.model,
                data_parallel=declared.data_parallel,
            )
    if own_loss and not any("proximal" in node.inputs for node in nodes.values()):
        nodes.pop("proximal", None)  # only hpcrl's loss needs it
    kinds = find_result_kinds({**nodes, **{name: _make_user_node(declared) for name, declared in user_nodes.items()}})
    return nodes | {name: _make_user_node(declared, kinds.get(name)) for name, declared in user_nodes.items()}


def make_running_pipeline(recipe: Recipe) -> dict[str, DagNode]:
    """Return the pipeline that a recipe runs: with its judges, or that of imitation where no episode is played."""
    if recipe.warmup is None or recipe.has_rollouts:
        return add_judges(make_pipeline(recipe.train), recipe)
    data = DagNode(function="hpcrl.roles.warmup:WarmupData", inputs=[], role="policy", output="step")
    nodes = {"conversations": data}
    for name, node in make_pipeline(make_warmup_settings(recipe.train, recipe.warmup)).items():
        if node.role in TRAINER_ROLES:
            inputs = ["conversations" if source == "score" else source for source in node.inputs]
            nodes[name] = msgspec.structs.replace(node, inputs=inputs)
    return nodes


def add_judges(pipeline: Pipeline, recipe: Recipe) -> dict[str, DagNode]:
    """Add the judges that domains, or a teacher's part in the score, call while episodes are played and scored."""
    nodes = dict(pipeline)
    called = {name for domain in recipe.domains.values() for name in domain.judges} | {recipe.teacher_name}
    for name in [name for name in recipe.judge if name in called]:
        judge = JUDGE_ROLE_PREFIX + name
        nodes[judge] = DagNode(
            function="hpcrl.roles.judge:run",
            inputs=["sample"],
            role="reward",
            output="step",
            model=recipe.judge[name].path,
        )
        nodes["score"] = msgspec.structs.replace(nodes["score"], inputs=[*nodes["score"].inputs, judge])
    return nodes


def _make_user_node(declared: PipelineNode, output: NodeOutput | None = None) -> DagNode:
    """Make a node that the user added; a function gives what it takes, or a number for each token."""
    if declared.model is not None:
        return DagNode(
            function="hpcrl.trainers.nodes:compute_logprobs",
            inputs=declared.inputs,
            role=declared.role or "reference",
            output="tokens",
            model=declared.model,
            data_parallel=declared.data_parallel,
        )
    return DagNode(
        function=declared.function or "",
        inputs=declared.inputs,
        role=declared.role or "policy",
        output=output or "step",
    )


def is_user_node(name: str, train: TrainConfig) -> bool:
    """Return whether the function of a node is the user's own, to be called with its inputs alone."""
    return name in train.pipeline and train.pipeline[name].function is not None


def list_fixed_nodes(train: TrainConfig) -> dict[str, DagNode]:
    """Return the nodes with a model that never trains: its own, or the reference of the KL."""
    nodes = make_pipeline(train)
    return {name: node for name, node in nodes.items() if node.role == "reference" and not is_user_node(name, train)}


def needs_critic(train: TrainConfig) -> bool:
    """Return whether a critic estimates the values; a function of the user's may."""
    return train.advantage == "gae" and not is_user_node("values", train)


def find_result_kinds(pipeline: Pipeline) -> dict[str, NodeOutput]:
    """Return the nodes whose results a user's node can take, each with the kind of its results."""
    found: dict[str, NodeOutput] = {
        name: node.output for name, node in pipeline.items() if name in _TAKEABLE_NODES or node.model is not None
    }
    for _ in pipeline:  # enough rounds for the longest possible chain
        for name, node in pipeline.items():
            kinds = {found[source] for source in node.inputs if source in found}
            if name in found or name in _BUILT_IN_NODES:
                continue
            if "batches" in kinds:
                found[name] = "tokens"
            elif len(kinds) == 1:
                found[name] = kinds.pop()
    return found


def check_user_nodes(train: TrainConfig) -> list[str]:
    """Return the problems of a recipe's nodes, each with a fix."""
    pipeline = make_pipeline(train)
    kinds = find_result_kinds(pipeline)
    found: list[str] = []
    for name, declared in train.pipeline.items():
        check = _check_built_in_node if name in make_nodes_for(train) else _check_user_node
        unknown = list(_find_unknown_inputs(name, declared, train, kinds, names=pipeline))
        problems = unknown or list(check(name, declared, pipeline, kinds))
        if problems and name not in make_nodes_for(train) and (absent := _explain_absent_node(name, train)):
            problems = [absent]
        found += [f"train.pipeline.{name}: {wrong}" for wrong in problems]
    found += _find_idle_settings(train, pipeline)
    return found or find_problems(pipeline)


def _find_unknown_inputs(
    name: str, declared: PipelineNode, train: TrainConfig, kinds: Mapping[str, NodeOutput], *, names: Collection[str]
) -> Iterator[str]:
    """Yield the inputs that are not among the names of nodes, with those that this node can take."""
    wanted: Collection[NodeOutput] = STAGES
    if name in _CHANGEABLE_INPUTS:
        wanted = (_CHANGEABLE_INPUTS[name][0],)
    elif name == "loss" or name in _TOKEN_NODES:
        wanted = ("batches", "tokens")
    elif name in _BUILT_IN_NODES:
        return  # its inputs are fixed
    for source in declared.inputs:
        if source in names or source in SPOOL_SOURCES:
            continue
        known = sorted(one for one, kind in kinds.items() if kind in wanted and one not in (name, *declared.inputs))
        why = _explain_absent_node(source, train)
        hint = f"{suggest_name(source, known)}it can take {', '.join(known) or 'nothing else'}"
        yield f"it takes {source!r}, which is not a node here: {why or hint}"


def _explain_absent_node(name: str, train: TrainConfig) -> str | None:
    """Return why a built-in node is not in this pipeline, with a fix; None for other names."""
    match name:
        case "advantage" | "rewards":
            other = "rewards" if name == "advantage" else "advantage"
            return f'with train.advantage = "{train.advantage}" the node is called `{other}`'
        case "reference":
            return 'there is a reference only with a KL: set train.kl = "k1", "k2" or "k3"'
        case "values" | "update-critic":
            return 'there are values only with a critic: set train.advantage = "gae"'
    return None


_SETTINGS_OF_NODES = {
    "loss": (
        *("ratio", "surrogate", "clip_low", "clip_high", "dual_clip", "correction", "max_is_ratio", "min_is_ratio"),
        *("kl", "kl_coef", "entropy_coef"),
    ),
    "advantage": ("gamma", "reward_scale", "overlong_margin"),
    "values": ("critic_learning_rate", "value_clip"),
    "update": ("weight_decay", "adam_betas", "adam_eps"),
}
"""The settings of [train] that hpcrl's own function of a node uses, and no other."""


def _find_idle_settings(train: TrainConfig, pipeline: Pipeline) -> Iterator[str]:
    """Yield the settings of hpcrl's functions that cannot act where the user's replace them."""
    plain = TrainConfig(num_steps=1, groups_per_step=1, learning_rate=1.0)
    for node, names in _SETTINGS_OF_NODES.items():
        for name in names if is_user_node(node, train) else ():
            is_taken = name in ("kl", "kl_coef") and (train.has_kl_reward or "reference" in pipeline["loss"].inputs)
            is_critics = node == "update" and needs_critic(train)
            if getattr(train, name) != getattr(plain, name) and not is_taken and not is_critics:
                fix = "remove it" + (', or add "reference" to the inputs' if name in ("kl", "kl_coef") else "")
                yield (
                    f"train.pipeline.{node}: train.{name} = {getattr(train, name)!r} is of hpcrl's {node}, which this "
                    f"function replaces: {fix}"
                )


def _check_built_in_node(
    name: str, declared: PipelineNode, pipeline: Pipeline, kinds: Mapping[str, NodeOutput]
) -> Iterator[str]:
    """Yield the problems of a declared node that is built in."""
    yield from _check_replacement(name, declared, pipeline)
    if declared.role is not None and declared.role != pipeline[name].role:
        yield f"its role is {pipeline[name].role!r}, not {declared.role!r}: remove `role`"
    if declared.options and declared.function is None:
        yield "it has options, but no function that takes them"
    if declared.inputs:
        yield from _check_built_in_inputs(name, declared, pipeline, kinds)


def _check_replacement(name: str, declared: PipelineNode, pipeline: Pipeline) -> Iterator[str]:
    """Yield why the function or the model of a built-in node cannot be replaced by these."""
    if declared.function is not None and name not in REPLACEABLE_NODES:
        hint = OTHER_ROLE_HINTS.get(pipeline[name].role) if pipeline[name].role not in TRAINER_ROLES else None
        yield f"its function is built in; {hint or f'only {_REPLACEABLE} can have another function'}"
    if declared.model is not None and name != "reference":
        yield 'it has a model, which only `reference` and nodes of your own with role = "reference" can have'
    if declared.model is not None and declared.function is not None:
        yield "it has a function and a model: a model gives the log-probs of the tokens, so remove one"
    if declared.data_parallel is not None and (name != "reference" or declared.function is not None):
        yield "it has data_parallel, which only nodes with a model can have"


def _check_built_in_inputs(
    name: str, declared: PipelineNode, pipeline: Pipeline, kinds: Mapping[str, NodeOutput]
) -> Iterator[str]:
    """Yield the problems of other inputs of a built-in node."""
    if name == "loss":
        yield from _check_loss_inputs(declared, pipeline, kinds)
        return
    if name == "update":
        if len(declared.inputs) == 1:
            yield "the loss is the node `loss`: give your function to [train.pipeline.loss]"
            return
        yield f"it takes one loss, not {' and '.join(declared.inputs)}: add up terms in the function of the node `loss`"
        return
    if name in _TOKEN_NODES and declared.function is not None:
        first = "costs" if name == "values" and "costs" in pipeline else "batches"
        yield from _check_token_inputs(first, declared.inputs, pipeline, kinds)
        return
    if name not in _CHANGEABLE_INPUTS:
        yield f"its inputs cannot be changed, only those of {', '.join([*_CHANGEABLE_INPUTS, 'loss'])}"
        return
    kind, number = _CHANGEABLE_INPUTS[name]
    if number and len(declared.inputs) != number:
        meant = "trajectories and advantages" if name == "deal" else "the replacement of `rows`"
        yield f"it takes {number} input{'s' * (number > 1)} ({meant}), not {len(declared.inputs)}"
    credit = "rewards" if "rewards" in pipeline else "advantage"
    if name == credit and declared.function is None and len(declared.inputs) > 1:
        yield (
            f"hpcrl's own takes one input, and would ignore {' and '.join(map(repr, declared.inputs[1:]))}: remove it, "
            "or add a function of your own that takes it"
        )
    if name == "deal" and len(declared.inputs) == number and (wrong := _find_wrong_deal(declared.inputs, credit)):
        yield wrong
    yield from _check_inputs(declared.inputs, pipeline, kinds, kind=kind)


def _find_wrong_deal(inputs: Sequence[str], credit: str) -> str | None:
    """Return why `deal` cannot take these two inputs: the trajectories come first, then their advantages."""
    if inputs[0] == credit or inputs[1] == "score":
        return f'it takes trajectories and then advantages: set inputs = ["score", "{credit}"], not {list(inputs)}'
    return None


def _check_loss_inputs(declared: PipelineNode, pipeline: Pipeline, kinds: Mapping[str, NodeOutput]) -> Iterator[str]:
    """Yield the problems of the inputs of the loss: batches, then what has a number for each token."""
    if declared.function is None:
        yield (
            "hpcrl's loss takes what it needs: add a function of your own that takes other inputs; the model of "
            "`reference` is set with [train.pipeline.reference] model"
        )
    batches = next(name for name in ("values", "costs", "batches") if name in pipeline)
    yield from _check_token_inputs(batches, declared.inputs, pipeline, kinds)


def _check_token_inputs(
    batches: str, inputs: Sequence[str], pipeline: Pipeline, kinds: Mapping[str, NodeOutput]
) -> Iterator[str]:
    """Yield the problems of the inputs of a function that sees micro-batches, which come first, then tokens."""
    if inputs and inputs[0] != batches:
        yield f"its first input is {batches!r}, not {inputs[0]!r}"
    yield from _check_inputs(inputs[1:], pipeline, kinds, kind="tokens")


def _check_user_node(
    name: str, declared: PipelineNode, pipeline: Pipeline, kinds: Mapping[str, NodeOutput]
) -> Iterator[str]:
    """Yield the problems of a declared node that is the user's own."""
    if declared.model is not None:
        yield from _check_model_node(declared, pipeline, kinds)
    else:
        yield from _check_function_node(declared, pipeline, kinds, output=pipeline[name].output)
    if not any(name in node.inputs for other, node in pipeline.items() if other != name):
        if pipeline[name].output == "tokens":
            taker = "loss (a recipe has one loss: its function adds up all terms)"
        else:
            taker = "advantage, deal or batches"
        yield f"no node takes it, so it would have no effect: add it to the inputs of {taker}"


def _check_model_node(declared: PipelineNode, pipeline: Pipeline, kinds: Mapping[str, NodeOutput]) -> Iterator[str]:
    """Yield the problems of a node with a model."""
    if declared.function is not None:
        yield "it has a function and a model: a model gives the log-probs of the tokens, so remove `function`"
    if declared.role != "reference":
        yield f"it has a model, so its role is 'reference', not {declared.role!r}"
    if declared.inputs != ["batches"]:
        yield f'it has a model, which reads the batches: set inputs = ["batches"], not {declared.inputs}'
    yield from _check_inputs(declared.inputs, pipeline, kinds)


def _check_function_node(
    declared: PipelineNode, pipeline: Pipeline, kinds: Mapping[str, NodeOutput], *, output: NodeOutput
) -> Iterator[str]:
    """Yield the problems of a node with a function of the user's own."""
    if declared.function is None:
        yield (
            "it has no function, no model, and is not a built-in node here "
            f"({', '.join(list_built_in_names(pipeline))})"
        )
    if declared.role is None:
        yield 'it has no role: set role = "policy", which the trainer runs'
    elif declared.role != "policy":
        yield f"nodes of role {declared.role!r} are not declared here: {OTHER_ROLE_HINTS[declared.role]}"
    if not declared.inputs:
        yield "it has no inputs: add some, such as score or rows"
    if declared.data_parallel is not None:
        yield "it has data_parallel, which only nodes with a model can have"
    if output != "tokens":
        yield from _check_inputs(declared.inputs, pipeline, kinds)
        return
    first = declared.inputs[0]
    yield from _check_token_inputs(
        first if kinds.get(first) == "batches" else "batches", declared.inputs, pipeline, kinds
    )


def _check_inputs(
    inputs: Sequence[str], pipeline: Pipeline, kinds: Mapping[str, NodeOutput], *, kind: NodeOutput | None = None
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


REPLACEABLE_NODES = ("advantage", "rewards", "reference", "values", "loss", "update")
"""Built-in nodes whose function can be replaced; `rewards` exists with a critic, `advantage` without."""
_REPLACEABLE = f"{', '.join(REPLACEABLE_NODES[:-1])} and {REPLACEABLE_NODES[-1]}"
_TOKEN_NODES = ("reference", "values")
"""The nodes whose function sees micro-batches and gives a number for each token."""
_CHANGEABLE_INPUTS: dict[str, tuple[NodeOutput, int]] = {
    "advantage": ("step", 0),
    "rewards": ("step", 0),
    "deal": ("step", 2),
    "batches": ("rows", 1),
}
"""Built-in nodes whose inputs can be changed: the kind of results, and how many inputs (0: any number)."""
_KIND_MEANINGS: dict[NodeOutput, str] = {
    "step": "of the whole step, which rank 0 has",
    "rows": "of each worker's own rows",
    "batches": "each worker's rows as tensors",
    "tokens": "a number for each token",
}
_TAKEABLE_NODES = ("score", "advantage", "rewards", "rows", "batches", "costs", "values", "reference", "proximal")
"""Built-in nodes whose results other nodes can take."""
_BUILT_IN_NODES = frozenset({*_TAKEABLE_NODES, "sample", "deal", "loss", "update", "update-critic"})


def list_built_in_names(pipeline: Pipeline) -> list[str]:
    """Return the names of the built-in nodes of a pipeline."""
    return [name for name in pipeline if name in _BUILT_IN_NODES]


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
    input_width = max(len(", ".join(node.inputs)) for node in pipeline.values())
    lines = []
    for name in sorted(pipeline, key=lambda name: depth[name]):
        node = pipeline[name]
        inputs = ", ".join(node.inputs) or "-"
        note = _STAGE_NOTES.get(node.stage, "") if node.role in TRAINER_ROLES else ""
        if node.data_parallel is not None:
            note += f"  (data_parallel = {node.data_parallel})"
        shown = "  " * depth[name] + name
        ends = f"<- {inputs:<{input_width}}  -> {node.output:<7}"
        lines.append(f"{shown:<{width}}  {node.role:<9}  {ends}  {node.model or node.function}{note}")
    return "\n".join([*lines, f"each trainer worker: {' -> '.join(order_nodes(pipeline))}"])


_STAGE_NOTES: dict[NodeStage, str] = {"deal": "  (rank 0 alone, ids only)", "learn": "  (each minibatch)"}


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
