"""The workers that a simulation has: those of the plan.

CampaignSizes    the workers, their GPUs and speeds
find_sizes       those of a recipe on a site
"""

from collections import Counter
from dataclasses import dataclass, replace

import msgspec

from hpcrl.campaign.request import CampaignRequest
from hpcrl.config.engine_speed import estimate_engine_speed
from hpcrl.config.recipe import Recipe, RoleName
from hpcrl.errors import ConfigError
from hpcrl.hardware.architecture import ModelArchitecture, read_architecture
from hpcrl.hardware.cost_model import LINK_BYTES_PER_S, ModelShape, WorkerSpeed, make_model_shape
from hpcrl.hardware.gpus import DEFAULT_SIMULATED_GPU, GPU_CATALOGUE, GpuModel
from hpcrl.hardware.memory_model import GIB
from hpcrl.hardware.rank_traffic import RankLinks
from hpcrl.models.model_config import read_model_config
from hpcrl.plan.components import JobComponent
from hpcrl.plan.demand import compute_version_bytes
from hpcrl.plan.training_work import find_rank_links
from hpcrl.system.files import expand_path
from hpcrl.weights.couriers.protocol import BUCKET_NBYTES

MIN_NOTED_S = 0.01


@dataclass(frozen=True, kw_only=True)
class RoleSize:
    """The workers of one role."""

    num_workers: int
    gpus_each: int
    gpu: GpuModel
    """The type whose figures are used."""
    component: int

    @property
    def num_gpus(self) -> int:
        return self.num_workers * self.gpus_each


@dataclass(frozen=True, kw_only=True)
class CampaignSizes:
    """The workers of a simulated campaign."""

    architecture: ModelArchitecture
    shape: ModelShape
    decode: RoleSize
    prefill: RoleSize | None
    train: RoleSize
    train_links: RankLinks | None
    """The links between ranks of the trainer; None: they send nothing that is counted."""
    num_env: int
    components: tuple[JobComponent, ...]
    """All nodes of a job, also those of env workers and judges."""
    version_bytes: float
    """The bytes of the weights that engines are sent."""
    notes: tuple[str, ...] = ()
    """The assumptions where the site or the recipe gives no figure."""

    @property
    def roles(self) -> dict[RoleName, RoleSize]:
        """The roles with GPUs."""
        found = {"train": self.train, "decode": self.decode}
        return found | ({"prefill": self.prefill} if self.prefill is not None else {})

    @property
    def num_gpus(self) -> int:
        """The GPUs of the workers."""
        return sum(self.count_gpus().values())

    @property
    def num_nodes(self) -> int:
        return sum(component.nodes for component in self.components)

    @property
    def num_charged_gpus(self) -> int:
        """The GPUs of all nodes; on nodes without any, those that workers are simulated with."""
        num_gpus = self.count_gpus()
        return sum(component.num_gpus or num_gpus[component.index] for component in self.components)

    def count_gpus(self) -> Counter[int]:
        """Count the GPUs of the workers by component."""
        num_gpus: Counter[int] = Counter()
        for role in self.roles.values():
            num_gpus[role.component] += role.num_gpus
        return num_gpus

    def estimate_travel_s(self) -> float:
        """Return the time that a version takes to the last node of engines; 0 where all roles are on one node."""
        components = {component.index: component for component in self.components}
        if len({role.component for role in self.roles.values()}) == 1 and components[self.train.component].nodes == 1:
            return 0.0
        engines = [role for name, role in self.roles.items() if name != "train"]
        num_nodes = sum(-(-role.num_gpus // max(1, components[role.component].gpus_per_node)) for role in engines)
        return (self.version_bytes + (num_nodes - 1) * min(BUCKET_NBYTES, self.version_bytes)) / LINK_BYTES_PER_S

    def find_speed(self, role: RoleSize, recipe: Recipe) -> WorkerSpeed:
        """Return the speed of an engine; ConfigError if the model does not fit into it."""
        found = estimate_engine_speed(recipe.engine, gpu=role.gpu, shape=self.shape, num_gpus=role.gpus_each)
        if not found.kv_tokens:
            raise ConfigError(
                f"the model ({self.shape.num_params / 1e9:.1f} billion weights) does not fit into {role.gpus_each} "
                f"{role.gpu.name} of an engine: raise resources.decode.gpus_per_worker"
            )
        return found


def find_sizes(request: CampaignRequest) -> CampaignSizes:
    """Return the workers of the plan."""
    notes: list[str] = []
    roles = {role: _find_role(request, role, notes) for role in ("train", "decode", "prefill")}
    decode, train = roles["decode"], roles["train"]
    if decode is None or train is None:
        raise ConfigError(f"recipe {request.shown_recipe!r} plays no episodes: there is nothing to simulate")
    architecture = _find_architecture(request.recipe)
    found = CampaignSizes(
        architecture=architecture,
        shape=make_model_shape(architecture),
        decode=decode,
        prefill=roles["prefill"],
        train=train,
        train_links=find_rank_links(request.plan, request.site, gpu=train.gpu),
        num_env=request.plan.role("env").num_workers,
        components=tuple(request.plan.components),
        version_bytes=compute_version_bytes(request.recipe),
    )
    notes += [*_note_large_partitions(found, request), *_note_travel(found)]
    return replace(found, notes=tuple(dict.fromkeys(notes)))


def _note_travel(sizes: CampaignSizes) -> list[str]:
    """Return a line for the time that a version is on its way, if it is worth one."""
    travel_s = sizes.estimate_travel_s()
    if travel_s < MIN_NOTED_S:
        return []
    rate = f"{LINK_BYTES_PER_S / 1e9:g} GB/s"
    return [f"a version of {sizes.version_bytes / GIB:.3g} GiB takes {travel_s:.2g} s to the engines, at {rate}"]


def _note_large_partitions(sizes: CampaignSizes, request: CampaignRequest) -> list[str]:
    """Return a line for each partition that has fewer nodes than are simulated, which no plan could use."""
    num_nodes: Counter[str] = Counter()
    for component in sizes.components:
        num_nodes[component.partition] += component.nodes
    return [
        f"partition {label} has {num} nodes; site {request.site.name} allows {request.site.partitions[label].max_nodes}"
        for label, num in num_nodes.items()
        if num > request.site.partitions[label].max_nodes
    ]


def _find_role(request: CampaignRequest, role: RoleName, notes: list[str]) -> RoleSize | None:
    plan, recipe, site = request.plan, request.recipe, request.site
    if not plan.has_role(role):
        return None
    planned = plan.role(role)
    component = plan.components[planned.component]
    name = component.gpu if planned.gpus_per_worker else None
    if recipe.engine.backend == "sim" and role != "train":
        name = (recipe.engine.sim.gpus or [name or DEFAULT_SIMULATED_GPU])[0]
    gpu = site.find_gpu(name)
    if name is not None and gpu is None:
        raise ConfigError(f"GPU {name!r} of role {role} is in no catalogue: describe it in [gpus.{name}] of the site")
    if gpu is None or not gpu.has_speed:
        notes.append(f"role {role} has no GPU of known speed: each worker counts as one {DEFAULT_SIMULATED_GPU}")
        gpu = msgspec.structs.replace(GPU_CATALOGUE[DEFAULT_SIMULATED_GPU], fit=site.speed)
    return RoleSize(
        num_workers=max(1, planned.num_whole),
        gpus_each=max(1, planned.gpus_per_engine),
        gpu=gpu,
        component=planned.component,
    )


def _find_architecture(recipe: Recipe) -> ModelArchitecture:
    if recipe.engine.backend == "sim" and recipe.engine.sim.config:
        return read_architecture(read_model_config(expand_path(recipe.engine.sim.config)).fields)
    if (architecture := recipe.model.architecture) is not None:
        return architecture
    tiny = recipe.model.tiny
    if tiny is None:
        raise ConfigError("the sizes of the model are not known: set model.num_params, or model.config")
    return read_architecture(tiny.config)
