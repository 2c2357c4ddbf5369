"""The plan of a job. Pure: the same recipe and site give the same bytes.

    make_plan   map the roles of a recipe to the partitions of a site, and check them against each other
    Plan        the result
    RolePlan, JobCost    parts of it
    LOOKS_PER_S, MAX_LOOKS_PER_S    how often workers look at shared files, and what a file system bears
    MAX_NODE_STEPS    how many steps the driver's node bears
    NUM_AHEAD    the jobs that a driver queues ahead

The consistency of a recipe alone is checked in `hpcrl.plan.checks`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec.structs import replace

from hpcrl.config.program import reserves_place
from hpcrl.config.published_dtype import choose_published_dtype
from hpcrl.config.recipe import DEFAULT_MICRO_BATCH_TOKENS, JUDGE_ROLE_PREFIX, Recipe, RoleName
from hpcrl.config.site import OUR_CONNECTOR, Site, SitePartition
from hpcrl.errors import PlanError
from hpcrl.hardware import cost_model, memory_model
from hpcrl.hardware.architecture import KNOWN_FAMILIES, read_architecture
from hpcrl.hardware.degrees import ParallelDegrees
from hpcrl.plan.checks import check_engine_gpus, check_recipe
from hpcrl.plan.components import (
    JobComponent,
    RewardJobPlan,
    find_account,
    make_colocated_component,
    make_component,
    make_local_component,
    make_shared_components,
    plan_reward_jobs,
)
from hpcrl.plan.demand import PartitionChoice, compute_step_gib, compute_window_gib, warn_unknown_sizes
from hpcrl.plan.engine_gpus import choose_engine_gpus
from hpcrl.plan.engine_memory import EngineMemory, find_engine_memory
from hpcrl.plan.engine_nodes import ENGINE_ROLES, check_spanning_engines
from hpcrl.plan.job_time import check_job_time
from hpcrl.plan.layout import SPREAD_LAYOUTS, JobLayout, JobPlacement, place_roles
from hpcrl.plan.programs import check_programs, warn_foreign_images
from hpcrl.plan.storage import describe_storage, forecast_storage, warn_late_retirement
from hpcrl.plan.trainer_memory import (
    TrainerMemory,
    describe_micro_batch,
    find_micro_batch,
    find_trainer_memory,
    warn_long_trajectories,
)
from hpcrl.plan.trainer_ranks import explain_choice, list_trainer_settings

LOOKS_PER_S: dict[RoleName, float] = {"env": 4.0, "prefill": 2.0, "decode": 2.0}
"""The operations a second of an idle worker on shared files, with its part of a step, as bench.control counts them."""
MAX_LOOKS_PER_S = 2000.0
"""A metadata server does some 10,000 operations a second, and other users need most of them."""

MAX_NODE_STEPS = 256
"""Steps of one node each: the two processes of srun take 3.9 MiB together where the driver runs, which has 2 GiB."""

NUM_AHEAD = 2
"""The jobs that a driver queues ahead: one more than the next, which may end before its driver can queue another."""


class RolePlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The workers of one role: their component, number and resources."""

    role: RoleName
    component: int
    num_workers: int
    workers_per_node: int
    gpus_per_worker: int
    cpus_per_worker: int
    mem_gib_per_worker: float
    nodes_per_engine: int = 1
    """More than 1: that many workers, one on each node, are the parts of one engine, and all are counted."""
    first_gpu: int = 0
    """The first of its GPUs among those of a node that several roles share."""
    mem_gib_per_node: float = 0.0
    """The memory of its step on a node, if more than its workers': with the window and a checkpoint's snapshot."""

    @property
    def num_whole(self) -> int:
        """The workers as recipes count them: an engine over several nodes is one."""
        return self.num_workers // self.nodes_per_engine

    @property
    def gpus_per_engine(self) -> int:
        """The GPUs of an engine, on all its nodes."""
        return self.gpus_per_worker * self.nodes_per_engine

    def list_gpus(self, index: int) -> range:
        """Return the GPUs of a worker, by their numbers on its node."""
        first = self.first_gpu + index % self.workers_per_node * self.gpus_per_worker
        return range(first, first + self.gpus_per_worker)

    @property
    def all_gpus(self) -> set[int]:
        """The GPUs of all its workers on a node."""
        return {gpu for index in range(self.workers_per_node) for gpu in self.list_gpus(index)}

    @property
    def step_mem_gib(self) -> float:
        """The memory that its step on a node may use."""
        return max(self.mem_gib_per_node, self.mem_gib_per_worker * self.workers_per_node)


class JobCost(msgspec.Struct, frozen=True, kw_only=True):
    """The most that one job may use: its whole walltime."""

    walltime_min: int
    node_hours: float
    gpu_hours: float


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The resources to request from a site for a recipe."""

    recipe: str
    site: str
    layout: JobLayout
    layout_reason: str
    components: list[JobComponent]
    roles: list[RolePlan]
    sizes: list[str]
    """Numbers that the recipe leaves open, as chosen, and why."""
    fallbacks: list[str]
    warnings: list[str]
    cost: JobCost
    drain_s: float
    survive_node_loss: bool
    num_jobs: int = 1
    """Jobs in a chain, each started by Slurm when the previous one has ended."""
    prologue: str | None = None
    reward_jobs: RewardJobPlan | None = None
    """None: rewards use spare cores only."""
    has_couriers: bool = True
    """True if new weights may be sent from node to node; otherwise they go by files, and nodes need no window."""
    train_sharding: Literal["none", "full"] = "none"
    """The sharding of trainer "torch", chosen where the recipe leaves it open."""
    train_degrees: ParallelDegrees = ParallelDegrees()
    """The ranks that divide the work on a copy of the model, chosen likewise."""
    tokens_per_micro_batch: int = DEFAULT_MICRO_BATCH_TOKENS
    """The tokens of the trainer's micro-batches, chosen where the recipe leaves them open."""
    train_memory: TrainerMemory | None = None
    """The memory of the trainer's GPUs and nodes; None where there are none, or no sizes are known."""
    engine_memory: list[EngineMemory] = []
    """The memory of the engines, by role."""

    def role(self, name: RoleName) -> RolePlan:
        """Return the plan of one role."""
        return next(role for role in self.roles if role.role == name)

    def has_role(self, name: RoleName) -> bool:
        """Return whether the job has workers of a role: only the trainer is in every job."""
        return any(role.role == name for role in self.roles)

    @property
    def judge_roles(self) -> list[RoleName]:
        """The roles of the judges' engines."""
        return [role.role for role in self.roles if role.role.startswith(JUDGE_ROLE_PREFIX)]

    @property
    def num_reward_shards(self) -> int:
        """Return the number of reward workers at a time, among which segments are divided."""
        jobs = self.reward_jobs
        if not self.has_role("reward"):
            return 0
        return jobs.max_jobs * jobs.workers_per_job if jobs is not None else self.role("reward").num_workers

    @property
    def has_gpu_shifts(self) -> bool:
        """Return whether engines have GPUs of the trainer, on which only one of the two works at a time."""
        engines = [role for role in self.roles if role.role in ENGINE_ROLES]
        return any(self.shares_gpus(role.role, index) for role in engines for index in range(role.num_workers))

    def shares_gpus(self, name: RoleName, index: int) -> bool:
        """Return whether a worker of a role has a GPU of the trainer."""
        return self.is_on_one_node and not self.role("train").all_gpus.isdisjoint(self.role(name).list_gpus(index))

    @property
    def num_nodes(self) -> int:
        return sum(part.nodes for part in self.components)

    @property
    def num_gpus(self) -> int:
        return sum(part.num_gpus for part in self.components)

    @property
    def is_on_one_node(self) -> bool:
        """Return whether all roles share a node, and the window of its memory for weights."""
        return self.layout in ("local", "colocated") and self.num_nodes == 1

    def to_json(self) -> bytes:
        """Encode the plan: sorted keys, two spaces, one final newline."""
        return msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=2) + b"\n"


def make_plan(recipe: Recipe, site: Site) -> Plan:
    """Map roles to partitions, and check everything that can be checked before queueing."""
    check_recipe(recipe)
    recipe, engine_gpus = choose_engine_gpus(recipe, site)
    check_engine_gpus(recipe)
    placement, site = _place_with_couriers(recipe, site)
    recipe, choices = placement.recipe, placement.choices
    components = _make_components(placement, site)
    component_indices = {role: component.index for component in components for role in component.roles}
    _check_walltime(recipe, site, components)
    reward_jobs, shortfall = plan_reward_jobs(recipe, site)
    train_memory = find_trainer_memory(recipe, choices.get("train"), site)
    train_gpu = site.find_gpu(components[component_indices["train"]].gpu)
    forecast = forecast_storage(recipe, train_gpu=train_gpu) if recipe.model.config else None
    has_own_windows = site.mpi.couriers and placement.layout not in ("local", "colocated")
    roles = [
        _make_role_plan(role, recipe, choices, component_indices, has_own_windows=has_own_windows)
        for role in recipe.planned_roles
    ]
    return Plan(
        recipe=recipe.name,
        site=site.name,
        layout=placement.layout,
        layout_reason=placement.reason,
        components=components,
        roles=roles,
        sizes=[
            *(why for role, why in engine_gpus.items() if role in choices),
            *placement.sizes,
            *describe_micro_batch(train_memory, recipe),
            *describe_storage(forecast),
        ],
        fallbacks=[*placement.fallbacks(), *shortfall],
        warnings=[
            *placement.warnings,
            *_check_job_limits(recipe, site, components, placement.layout),
            *_warn_unverified(site, components),
            *_warn_idle_gpus(components, roles),
            *_warn_few_places(recipe),
            *_check_env_programs(recipe, site, components[0], choices.get("env")),
            *_warn_many_looks(roles, placement.layout),
            *_warn_many_steps(roles, components, site),
            *_warn_idle_judges(recipe),
            *_warn_length_bias(recipe),
            *_warn_stale_data(recipe),
            *_check_spanning_engines(choices, recipe, site),
            *_warn_no_bf16(choices, recipe, site),
            *warn_long_trajectories(train_memory, recipe),
            *_warn_no_scheduler(recipe, placement.layout),
            *_warn_estimated_sizes(recipe),
            *warn_unknown_sizes(recipe),
            *_check_encryption(recipe, site, choices, placement.layout),
            *warn_late_retirement(forecast, recipe),
            *check_job_time(recipe, forecast, num_nodes=components[component_indices["train"]].nodes),
        ],
        cost=_compute_cost(recipe, site, components),
        drain_s=recipe.job.drain_s,
        survive_node_loss=recipe.job.survive_node_loss,
        num_jobs=1 if placement.layout == "local" else recipe.job.num_jobs,
        prologue=site.choose_prologue(components[0].partition),
        reward_jobs=reward_jobs,
        has_couriers=site.mpi.couriers,
        train_sharding="full" if recipe.train.sharding == "full" else "none",
        train_degrees=recipe.train.degrees,
        tokens_per_micro_batch=find_micro_batch(train_memory, recipe),
        train_memory=train_memory,
        engine_memory=find_engine_memory(recipe, choices, site, node_gib=_list_own_nodes(placement.layout, roles)),
    )


def _list_own_nodes(layout: JobLayout, roles: list[RolePlan]) -> dict[RoleName, float]:
    """Return the host memory on a node by role, where nodes have one role each."""
    return {} if layout in ("local", "colocated") else {role.role: role.step_mem_gib for role in roles}


def _check_spanning_engines(choices: Mapping[RoleName, PartitionChoice], recipe: Recipe, site: Site) -> list[str]:
    return check_spanning_engines(
        {role: choice.nodes_per_engine for role, choice in choices.items()},
        recipe,
        site,
        partitions={role: choice.partition for role, choice in choices.items()},
    )


def _warn_many_looks(roles: list[RolePlan], layout: JobLayout) -> list[str]:
    """Warn if idle workers alone would load the server of a shared file system's metadata."""
    num_looks = sum(role.num_workers * LOOKS_PER_S.get(role.role, 0.0) for role in roles)
    if layout == "local" or num_looks <= MAX_LOOKS_PER_S:
        return []
    num_env = next((role.num_workers for role in roles if role.role == "env"), 0)
    return [
        f"{num_env} env workers and the engines look at shared files about {num_looks:.0f} times a second, also when "
        f"idle, and a metadata server that others use too bears about {MAX_LOOKS_PER_S:.0f}: lower "
        "resources.env.num_workers (one env worker runs hundreds of episodes, rollout.max_running is that of all)"
    ]


def _warn_many_steps(roles: list[RolePlan], components: list[JobComponent], site: Site) -> list[str]:
    """Warn if the sruns of the worker pools would fill the node of the driver."""
    num_steps = sum(components[role.component].nodes for role in roles if role.role != "train")
    if site.steps_per == "role" or num_steps <= MAX_NODE_STEPS:
        return []
    return [
        f"worker pools are started by {num_steps} sruns, one for each role and node, and the driver's node bears about "
        f'{MAX_NODE_STEPS}: set site.steps_per = "role"'
    ]


def _place_with_couriers(recipe: Recipe, site: Site) -> tuple[JobPlacement, Site]:
    """Place the roles; where two versions of the weights are too large for a node with engines, without couriers."""
    try:
        return _place_with_trainer(recipe, site), site
    except PlanError:
        if site.scheduler == "local":
            raise
        found = replace(site, mpi=replace(site.mpi, couriers=False))
        placement = _place_with_trainer(recipe, found)  # what is refused then is what no way of sending changes
        if placement.layout in ("local", "colocated") or found == site:  # engines read the window of the trainer
            raise
    chosen = (
        f"weights are sent by files: two versions of them ({compute_window_gib(recipe):.0f} GiB) do not fit on a node "
        "with engines"
    )
    return dataclasses.replace(placement, sizes=[*placement.sizes, chosen]), found


def _place_with_trainer(recipe: Recipe, site: Site) -> JobPlacement:
    """Place the roles; what the recipe leaves open of the trainer is the first that fits.

    With open degrees of trainer "megatron" that is the first on the partition that suits it best, unless it has more
    stages than it needs elsewhere, and whose layers are not spread over nodes.
    """
    refusal, second, spread = None, None, None
    for train in list_trainer_settings(recipe, site):
        if second is not None and train.degrees.pipeline > second.recipe.train.degrees.pipeline:
            continue
        try:
            placement = place_roles(replace(recipe, train=train), site)
        except PlanError as error:
            is_plain = train.degrees == recipe.train.degrees  # whose refusal advises other changes too
            refusal = error if is_plain or refusal is None else refusal
            continue
        found = dataclasses.replace(placement, sizes=[*placement.sizes, *explain_choice(recipe, train)])
        if not _spreads_layers(placement, site, num_ranks=train.degrees.tensor):
            if train.trainer == "torch" or not placement.choices["train"].skips_small:
                return found
            second = second or found
            continue
        spread = spread or found
        if second is None and train.degrees.tensor == recipe.train.degrees.tensor:  # as the recipe asks for
            return found
    if (best := second or spread) is not None:
        return best
    assert refusal is not None
    raise refusal


def _spreads_layers(placement: JobPlacement, site: Site, *, num_ranks: int) -> bool:
    """Return whether the ranks that share a layer are on several nodes, where they would wait for the network."""
    choice = placement.choices.get("train")
    if choice is None or not choice.gpus_per_worker:
        return False
    return num_ranks > site.partitions[choice.partition].gpus_per_node


def _make_components(placement: JobPlacement, site: Site) -> list[JobComponent]:
    recipe, choices = placement.recipe, placement.choices
    account = _find_accounts(site, choices)
    match placement.layout:
        case "local":
            return [make_local_component(recipe, site, choices)]
        case "colocated":
            return [make_colocated_component(choices, recipe, site, account=next(iter(account.values())))]
        case "hetstep":
            return make_shared_components(choices, recipe, site, account=next(iter(account.values())))
        case "hetjob" | "multi-job":
            return [
                make_component(
                    index,
                    role,
                    choices[role],
                    recipe,
                    site,
                    account=account[role],
                    is_job=placement.layout == "multi-job",
                )
                for index, role in enumerate(recipe.placed_roles)
            ]


def _find_accounts(site: Site, choices: dict[RoleName, PartitionChoice]) -> dict[RoleName, str | None]:
    accounts = {role: find_account(site, site.partitions[choice.partition]) for role, choice in choices.items()}
    missing = sorted({choices[role].partition for role, account in accounts.items() if account is None})
    if site.account_required and missing:
        raise PlanError(
            f"site {site.name!r} charges an account, and none is known for its partitions {', '.join(missing)}: "
            f'write ~/.config/hpcrl/sites/{site.name}.toml with extends = "{site.name}" and account = "...", '
            "or give -s site.account=..."
        )
    return accounts


def _make_role_plan(
    role: RoleName,
    recipe: Recipe,
    choices: dict[RoleName, PartitionChoice],
    component_indices: dict[RoleName, int],
    *,
    has_own_windows: bool,
) -> RolePlan:
    resources = recipe.role_resources(role)
    choice = choices.get(role)
    workers_per_node = choice.workers_per_node if choice else resources.num_workers
    step_gib = compute_step_gib(role, recipe, workers_per_node=workers_per_node, has_couriers=has_own_windows)
    step_gib += choice.asleep_gib if choice else 0.0
    workers_gib = workers_per_node * resources.mem_gib_per_worker
    return RolePlan(
        role=role,
        component=component_indices[role],
        num_workers=resources.num_workers * (choice.nodes_per_engine if choice else 1),
        workers_per_node=workers_per_node,
        gpus_per_worker=choice.gpus_per_worker if choice else 0,
        cpus_per_worker=resources.cpus_per_worker,
        mem_gib_per_worker=resources.mem_gib_per_worker,
        nodes_per_engine=choice.nodes_per_engine if choice else 1,
        first_gpu=choice.first_gpu if choice else 0,
        mem_gib_per_node=round(step_gib, 3) if step_gib > workers_gib else 0.0,
    )


def _check_walltime(recipe: Recipe, site: Site, components: list[JobComponent]) -> None:
    walltime = recipe.job.walltime_min
    for component in components:
        partition = site.partitions[component.partition]
        nodes = sum(other.nodes for other in components if other.partition == component.partition)
        limit, size = _find_walltime_limit(partition, nodes)
        if walltime > limit:
            raise PlanError(
                f"job.walltime_min = {walltime}, and partition {component.partition!r} of site {site.name!r} allows "
                f"{limit}{size}: lower it (`hpcrl resume` continues the campaign)"
            )
    if recipe.job.drain_s >= walltime * 60:
        raise PlanError(
            f"job.drain_s = {recipe.job.drain_s:g} uses up all of job.walltime_min = {walltime}: "
            "lower the first or raise the second"
        )


def _find_walltime_limit(partition: SitePartition, nodes: int) -> tuple[int, str]:
    """Return the longest walltime for this many nodes, and for what size that is, if sizes differ."""
    limits = sorted(partition.walltime_limits, key=lambda limit: limit.max_nodes)
    found = next((limit for limit in limits if nodes <= limit.max_nodes), None)
    if found is None or found.max_walltime_min >= partition.max_walltime_min:
        return partition.max_walltime_min, ""
    return found.max_walltime_min, f" to jobs of up to {found.max_nodes} nodes (this one has {nodes} there)"


def _check_job_limits(recipe: Recipe, site: Site, components: list[JobComponent], layout: JobLayout) -> list[str]:
    """Refuse more components than a QOS lets a user have as jobs; warn if too few are left for the jobs that follow.

    Each has the same components: a driver queues NUM_AHEAD of them, the login node all.
    """
    if layout == "local":
        return []
    num_ahead = min(recipe.job.num_jobs - 1, NUM_AHEAD if site.nodes_may_submit else recipe.job.num_jobs)
    found = []
    for label in dict.fromkeys(component.partition for component in components):
        num = sum(component.partition == label for component in components) if layout in SPREAD_LAYOUTS else 1
        most, with_next = site.partitions[label].max_jobs, num * (1 + num_ahead)
        if most is None or with_next <= most:
            continue
        if num > most:
            raise PlanError(
                f"the job has {num} components in partition {label!r} of site {site.name!r}, each of which Slurm "
                f'counts as a job, and {most} are allowed: set job.layout = "hetstep", or choose another partition'
            )
        found.append(
            f"partition {label} allows {most} jobs of a user, and this one with the next {num_ahead}, which wait in "
            f"the queue while it runs, counts as {with_next}: some of those may be refused"
        )
    return found


def _warn_unverified(site: Site, components: list[JobComponent]) -> list[str]:
    """Warn of facts about the site that are not confirmed."""
    found = []
    if not site.verified:
        when = f" ({site.checked_on})" if site.checked_on else ""
        origin = f"are from {_show_sources(site.sources)}{when}" if site.sources else "have no source"
        found.append(f"the facts about {site.name} {origin}, and were not checked on the machine (see hpcrl doctor)")
    for component in components:
        partition = site.partitions[component.partition]
        if partition.unverified:
            found.append(f"not confirmed for {component.partition}: {', '.join(partition.unverified)}")
    return list(dict.fromkeys(found))


def _show_sources(sources: list[str]) -> str:
    """Show the first two sources of a site's facts, and the number of the others."""
    return " and ".join([*sources[:2], *([f"{len(sources) - 2} more"] if len(sources) > 2 else [])])


def _warn_few_places(recipe: Recipe) -> list[str]:
    """Warn if memory limits isolated environments below `max_running`; admitted episodes then wait for a place."""
    isolated = [domain.env_memory_gib for domain in recipe.domains.values() if reserves_place(domain)]
    if not isolated or not recipe.has_rollouts:
        return []
    env, most = recipe.resources.env, recipe.rollout.max_running
    places = env.num_workers * memory_model.num_env_places(env.mem_gib_per_worker, each_gib=max(isolated))
    if places >= most:
        return []
    memory = f"resources.env.mem_gib_per_worker = {env.mem_gib_per_worker:g}, env_memory_gib = {max(isolated):g}"
    return [f"{places} isolated environments or programs run at once, not rollout.max_running = {most}: {memory}"]


def _check_env_programs(
    recipe: Recipe, site: Site, component: JobComponent, choice: PartitionChoice | None
) -> list[str]:
    if choice is None:  # nothing is played
        return []
    return [
        *check_programs(recipe, site, component, workers_per_node=choice.workers_per_node),
        *warn_foreign_images(recipe, site, [choice.partition]),
    ]


def _warn_idle_judges(recipe: Recipe) -> list[str]:
    used = {name for domain in recipe.domains.values() for name in domain.judges} | {recipe.teacher_name}
    return [
        f"judge.{name} is in no domain's `judges`: its engines would idle" for name in recipe.judge if name not in used
    ]


def _warn_length_bias(recipe: Recipe) -> list[str]:
    """Warn of settings under which short episodes are trained on more than they are played."""
    rollout, found = recipe.rollout, []
    if rollout.late_after_s is not None:
        found.append(
            f"rollout.late_after_s = {rollout.late_after_s:g}: training prefers short episodes; remove it to keep "
            "episodes by index (the size of the effect: docs/learning.md)"
        )
    if rollout.spare_groups and rollout.mode != "async":
        found.append(
            f"rollout.spare_groups = {rollout.spare_groups}: each batch prefers groups that finish early, and the "
            "others are started again (docs/learning.md)"
        )
    return found


def _warn_stale_data(recipe: Recipe) -> list[str]:
    """Warn of data from older weights whose loss has no importance weight for that."""
    train, rollout = recipe.train, recipe.rollout
    is_stale = recipe.has_rollouts and rollout.max_lag and rollout.mode != "sync"
    if not is_stale or train.correction != "none" or train.proximal == "behaviour":
        return []
    return [
        f'train.correction = "none" with rollout.max_lag = {rollout.max_lag}: the gradient is wrong for episodes that '
        'older weights generated; set correction = "token", or max_lag = 0'
    ]


def _check_encryption(
    recipe: Recipe, site: Site, choices: Mapping[RoleName, PartitionChoice], layout: JobLayout
) -> list[str]:
    """Refuse what sends trajectories, KV or weights unencrypted where the site asks for TLS; name what is left."""
    if not site.network.tls or layout == "local" or (layout == "colocated" and choices["train"].nodes == 1):
        return []
    if site.mpi.couriers:
        raise PlanError(
            f"site {site.name!r} has network.tls, and MPI encrypts no weights: set site.mpi.couriers = false, and they "
            "go by files"
        )
    labels = {choice.partition for role, choice in choices.items() if role in ENGINE_ROLES}
    connectors = {site.choose_inference(label).kv_connector for label in labels}
    if recipe.engine.backend == "vllm" and recipe.has_prefill and not connectors <= {OUR_CONNECTOR, None}:
        raise PlanError(
            f"site {site.name!r} has network.tls, and only one connector sends KV by it: set inference.kv_connector = "
            f'"{OUR_CONNECTOR}", or resources.prefill.num_workers = 0'
        )
    spanning = [
        role
        for role, choice in choices.items()
        if choice.nodes_per_engine > 1 or (role == "train" and choice.nodes > 1)
    ]
    names = " and ".join(spanning)
    return [f"network.tls does not encrypt what the processes of {names} send from node to node"] * bool(spanning)


def _warn_no_bf16(choices: Mapping[RoleName, PartitionChoice], recipe: Recipe, site: Site) -> list[str]:
    """Warn of a trainer and of engines that would compute in bfloat16 on GPUs that cannot."""
    return [*_warn_slow_precision(choices["train"], recipe, site), *_warn_float16_engines(choices, recipe, site)]


def _warn_slow_precision(choice: PartitionChoice, recipe: Recipe, site: Site) -> list[str]:
    gpu = site.find_gpu(site.partitions[choice.partition].gpu) if choice.gpus_per_worker else None
    if recipe.train.precision != "bf16" or gpu is None or gpu.has_bf16:
        return []
    return [
        f'train.precision = "bf16", and {gpu.name} has no bfloat16, which its GPUs emulate slowly: set '
        'train.precision = "auto", which is fp32 there'
    ]


def _warn_float16_engines(choices: Mapping[RoleName, PartitionChoice], recipe: Recipe, site: Site) -> list[str]:
    if recipe.engine.backend != "vllm" or choose_published_dtype(recipe, recipe.model.config) != "bfloat16":
        return []
    gpus = {site.partitions[choices[role].partition].gpu for role in ENGINE_ROLES if role in choices}
    models = [gpu for name in gpus if name is not None and (gpu := site.find_gpu(name)) is not None]
    names = " and ".join(sorted(gpu.name for gpu in models if not gpu.has_bf16))
    return [
        f"{names} has no bfloat16, and weights are published in it: vLLM computes in float16, in which large "
        'activations overflow; set engine.dtype = "float32" if rewards or log-probs are not finite'
    ] * bool(names)


def _warn_no_scheduler(recipe: Recipe, layout: JobLayout) -> list[str]:
    wanted = recipe.job.num_jobs
    if layout != "local" or wanted == 1:
        return []
    return [f"job.num_jobs = {wanted}: without a scheduler, only `hpcrl resume` starts the next one"]


def _warn_estimated_sizes(recipe: Recipe) -> list[str]:
    """Warn of a model of a family whose weights are not known to be counted exactly."""
    family = read_architecture(recipe.model.config).family if recipe.model.config else ""
    if not family or family in KNOWN_FAMILIES:
        return []
    return [
        f"the model is of type {family!r} (model_type in its config.json), whose sizes are estimates: compare its "
        "number of weights, and try a short job first"
    ]


def _warn_idle_gpus(components: list[JobComponent], roles: list[RolePlan]) -> list[str]:
    """Warn of unused GPUs, which are charged with their nodes."""
    found = []
    for component in components:
        has = component.gpus_per_node
        uses = sum(role.workers_per_node * role.gpus_per_worker for role in roles if role.component == component.index)
        if uses < has:
            found.append(f"{component.roles[0]} uses {uses} of the {has} GPUs of each node, and all are charged")
    return found


def _compute_cost(recipe: Recipe, site: Site, components: list[JobComponent]) -> JobCost:
    walltime = recipe.job.walltime_min
    nodes = sum(component.nodes for component in components)
    gpus = sum(component.num_gpus for component in components)
    return JobCost(
        walltime_min=walltime,
        node_hours=cost_model.compute_hours(nodes, walltime_min=walltime),
        gpu_hours=cost_model.compute_hours(gpus, walltime_min=walltime),
    )
