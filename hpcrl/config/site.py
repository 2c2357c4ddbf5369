"""The tables of a site: a machine to run on, described once, without anything about learning.

A user's own account and paths go into `~/.config/hpcrl/sites/NAME.toml` with `extends = "NAME"`.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from hpcrl.config.recipe import ConfigTable, Count, CountOrZero, Name
from hpcrl.config.toml import load_table, suggest_name, to_struct
from hpcrl.errors import ConfigError
from hpcrl.hardware.gpus import GPU_CATALOGUE, GpuModel

KnownState = Literal["yes", "no", "unknown"]
CodecSetting = Literal["auto", "full", "delta"]
SchedulerName = Literal["slurm", "local"]
ContainerTool = Literal["apptainer", "singularity", "shifter", "podman-hpc", "enroot", "bubblewrap"]


Figure = Annotated[float, Meta(gt=0)]


class GpuFigures(ConfigTable, frozen=True, kw_only=True):
    """A GPU type that the catalogue lacks, or has with other figures."""

    memory_gib: Figure
    bf16_tflops: Figure | None = None
    """Dense, without sparsity; fp16 for a GPU without bf16. None: not known, and speeds are not estimated."""
    memory_tb_per_s: Figure | None = None


DeviceVariable = Literal["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"]
DEVICE_VARIABLES: tuple[DeviceVariable, ...] = get_args(DeviceVariable)
STEP_DEVICE_VARIABLES = (*DEVICE_VARIABLES, "GPU_DEVICE_ORDINAL")
"""Slurm sets some of these for each step that has GPUs and leaves them unchanged for a step without."""


class SitePartition(ConfigTable, frozen=True, kw_only=True):
    """A kind of node and how to request it from Slurm."""

    slurm_partition: str | None = None
    """None where nodes are chosen by constraint and QOS alone."""
    constraint: str | None = None
    qos: str | None = None
    account: str | None = None
    """The account that this partition is charged to, if not the site's."""
    account_suffix: str = ""
    """Appended to the site's account, such as `_g` for GPU hours."""
    gpu: str | None = None
    """A name of the hardware catalogue, or of the site's own `[gpus.NAME]`."""
    gpus_per_node: CountOrZero = 0
    gpu_variable: DeviceVariable | None = None
    """The variable that gives a process its GPUs; None: the one that Slurm sets, and CUDA's if it sets none."""
    gpu_request: Literal["gres", "gpus-per-node"] = "gres"
    gres_type: str | None = None
    """The type in `--gres=gpu:TYPE:N`, where the site requires one."""
    cores_per_node: Count
    """Cores that jobs may use."""
    mem_gib_per_node: Annotated[float, Meta(gt=0)]
    scratch_gib_per_node: Annotated[float, Meta(gt=0)] | None = None
    """Space for temporary files (TMPDIR) of a node; None: not known, and not planned."""
    mem_flag: bool = True
    """False where the site rejects `--mem`."""
    exclusive: bool = False
    """Whole nodes are allocated and charged, whatever is requested."""
    preemptible: bool = False
    max_walltime_min: Count
    max_nodes: Count
    extra_flags: list[str] = []
    """Further sbatch flags that the site requires for every component there."""
    unverified: list[str] = []
    """Fields above that no source confirms."""
    notes: str = ""


class NetworkConfig(ConfigTable, frozen=True, kw_only=True):
    """The network between nodes."""

    interface: str | list[str] | None = None
    """The interface that roles bind to, such as `hsn0`; a name may end with `*`, and of several a node takes the first
    that it has. None: the one with the address of the host's name."""
    fabric: str | None = None
    srun_network: str | None = None
    """The value of `--network`, where steps need it."""
    internet_on_compute: Literal["yes", "no", "proxy", "unknown"] = "unknown"


class MpiConfig(ConfigTable, frozen=True, kw_only=True):
    """The way MPI programs are started."""

    flavour: Literal["mpich", "openmpi", "cray-mpich", "parastation", "none"] = "none"
    srun_type: str = "none"
    """The value of `srun --mpi`."""
    world_over_components: KnownState = "unknown"
    """One MPI program can span the components of a heterogeneous job; inside one allocation it always can."""
    couriers: bool = True
    """Send new weights from node to node, by MPI or else by TCP; false: they go by files."""
    codec: CodecSetting = "auto"
    """Couriers send whole versions (full), only the changes (delta), or whichever is faster (auto)."""


AUTO_CONNECTOR, OUR_CONNECTOR = "auto", "files"


class InferenceConfig(ConfigTable, frozen=True, kw_only=True):
    """The transfer of KV from prefill to decode between vLLM engines."""

    kv_connector: Name | None = AUTO_CONNECTOR
    """files: hpcrl's, on the nodes' own disks; any other is vLLM's, such as NixlConnector; auto: NixlConnector or
    MooncakeConnector between GPUs where its package is installed and `network.fabric` is set, else files; None: no
    transfer."""
    kv_options: dict[str, Any] = {}
    """`kv_connector_extra_config` of vLLM's own connector."""
    kv_dir: str | None = None
    """With files: a directory on the nodes' own disks; `~` and $NAME are expanded. None: that of temporary files, or
    /dev/shm if the nodes share that one."""
    kv_disk_gib: Annotated[float, Meta(gt=0)] = 4.0
    """With files: the space that each engine may use; the oldest files go first."""


class Site(ConfigTable, frozen=True, kw_only=True):
    """A whole site."""

    name: Name
    description: str = ""
    scheduler: SchedulerName
    partitions: Annotated[dict[Name, SitePartition], Meta(min_length=1)]
    gpus: dict[Name, GpuFigures] = {}
    account: str | None = None
    account_required: bool = False
    het_jobs: KnownState = "unknown"
    """Support of heterogeneous jobs; no: all roles get nodes of one allocation, on one partition."""
    nodes_may_submit: bool = True
    """True if the nodes of a job may submit others; otherwise the login node queues all jobs of a chain at once."""
    slurm_conf: str | None = None
    """Path of the slurm.conf to use, if not the machine's own; `~` and $NAME are expanded."""
    campaigns_dir: str | None = None
    """The directory of all campaigns, on a file system that all nodes share; `~` and $NAME are expanded."""
    python: str | None = None
    """Interpreter in the jobs; None: the one that runs hpcrl."""
    prologue: str | None = None
    """A file that every batch script includes before Python starts (modules, exports): a path, or a name in
    ~/.config/hpcrl/jobs/ or in the shipped jobs/. Errors in it do not end the job."""
    job_flags: list[str] = []
    """Further sbatch flags of a whole job, such as `--licenses=scratch`, which Slurm takes on the first component."""
    containers: list[ContainerTool] = []
    network: NetworkConfig = NetworkConfig()
    mpi: MpiConfig = MpiConfig()
    inference: InferenceConfig = InferenceConfig()
    slurm_min: str | None = None
    """The oldest Slurm version that these facts were checked with."""
    verified: bool = False
    """True once the facts were checked on the machine itself."""
    checked_on: str | None = None
    sources: list[str] = []

    @property
    def interfaces(self) -> list[str]:
        """The names or patterns of the interfaces that roles bind to, the preferred one first."""
        asked = self.network.interface
        if asked is None:
            return ["lo"] if self.scheduler == "local" else []
        return [asked] if isinstance(asked, str) else asked

    def find_gpu(self, name: str | None) -> GpuModel | None:
        """Return the figures of a GPU type, the site's own first; None if they are not known."""
        own = self.gpus.get(name or "")
        return GpuModel(name=name or "", **msgspec.structs.asdict(own)) if own else GPU_CATALOGUE.get(name or "")


def load_site(name: str, *, settings: tuple[str, ...] = ()) -> Site:
    """Load the site with this name or path, with settings applied."""
    layered = load_table("sites", name, settings=settings)
    site = to_struct(layered, Site)
    for label, partition in site.partitions.items():
        if partition.gpu is not None and site.find_gpu(partition.gpu) is None:
            source = layered.find_source(("partitions", label, "gpu"))
            known = [*GPU_CATALOGUE, *site.gpus]
            raise ConfigError(
                f"{source}: partitions.{label}.gpu = {partition.gpu!r}: {suggest_name(partition.gpu, known)}the "
                f"catalogue has {', '.join(known)}; describe another one in [gpus.{partition.gpu}] with memory_gib, "
                "and, where they are known, bf16_tflops and memory_tb_per_s"
            )
        if (partition.gpu is None) != (partition.gpus_per_node == 0):
            raise ConfigError(
                f"{layered.file}: partitions.{label} has gpu = {partition.gpu!r} but gpus_per_node = "
                f"{partition.gpus_per_node}: give both, or neither"
            )
    return site


def default_lab_dir() -> Path:
    """Return the lab's directory: $HPCRL_LAB, else one per user on the local disk (short, for unix sockets)."""
    chosen = os.environ.get("HPCRL_LAB")
    return Path(chosen) if chosen else Path(f"/tmp/hpcrl-lab-{os.getuid()}")
