"""The tables of a site: a machine to run on, described once, without anything about learning.

A user's own account and paths go into `~/.config/hpcrl/sites/NAME.toml` with `extends = "NAME"`.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from hpcrl.config.recipe import ConfigTable, Count, CountOrZero, Name
from hpcrl.config.toml import VARIABLE_PATTERN, load_table, suggest_name, to_struct
from hpcrl.errors import ConfigError
from hpcrl.hardware.gpus import (
    DEFAULT_FIT,
    GPU_CATALOGUE,
    Architecture,
    GpuMaker,
    GpuModel,
    RooflineFit,
    guess_architecture,
    guess_maker,
)
from hpcrl.system.files import find_variables

KnownState = Literal["yes", "no", "unknown"]
CodecSetting = Literal["auto", "full", "delta"]
SchedulerName = Literal["slurm", "local"]
ContainerTool = Literal[
    "apptainer", "singularity", "podman-hpc", "enroot", "pyxis", "shifter", "container-engine", "bubblewrap"
]
"""Programs that run a command in an image; pyxis and the container engine of Alps are flags of srun."""
EnvironmentName = Annotated[str, Meta(pattern=VARIABLE_PATTERN)]
InterfaceNames = str | list[str] | None


Figure = Annotated[float, Meta(gt=0)]


class GpuFigures(ConfigTable, frozen=True, kw_only=True):
    """A GPU type that the catalogue lacks, or has with other figures."""

    memory_gib: Figure
    """The memory of one."""
    bf16_tflops: Figure | None = None
    """Dense, without sparsity; fp16 for a GPU without bf16. None: not known, and speeds are not estimated."""
    memory_tb_per_s: Figure | None = None
    """The bandwidth of its memory. None: not known, and speeds are not estimated."""
    link_gb_per_s: Figure | None = None
    """The bandwidth to the other GPUs of its node, both directions together. None: not known, and not counted."""
    maker: GpuMaker | None = None
    """The maker, for which images are chosen and run. None: amd where a partition's `gpu_variable` is ROCr's or HIP's,
    or the name has a word such as MI300 or AMD, else nvidia."""


AMD_VARIABLES = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""The variables that choose among AMD's GPUs alone; CUDA's does so too."""
DeviceVariable = Literal["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"]
DEVICE_VARIABLES: tuple[DeviceVariable, ...] = get_args(DeviceVariable)
STEP_DEVICE_VARIABLES = (*DEVICE_VARIABLES, "GPU_DEVICE_ORDINAL")
"""Slurm sets some of these for each step that has GPUs and leaves them unchanged for a step without."""


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


class WalltimeLimit(ConfigTable, frozen=True, kw_only=True):
    """The longest walltime of jobs up to a size."""

    max_nodes: Count
    """The nodes of the largest job with this limit."""
    max_walltime_min: Count
    """The longest walltime of such a job."""


class SitePartition(ConfigTable, frozen=True, kw_only=True):
    """A kind of node and how to request it from Slurm."""

    slurm_partition: str | None = None
    """None where nodes are chosen by constraint and QOS alone."""
    constraint: str | None = None
    """The value of `--constraint`."""
    qos: str | None = None
    """The value of `--qos`."""
    account: str | None = None
    """The account that this partition is charged to, if not the site's."""
    account_suffix: str = ""
    """Appended to the site's account, such as `_g` for GPU hours."""
    gpu: str | None = None
    """A name of the hardware catalogue, or of the site's own `[gpus.NAME]`."""
    gpus_per_node: CountOrZero = 0
    """The GPUs of a node; 0 without `gpu`."""
    gpu_variable: DeviceVariable | None = None
    """The variable that gives a process its GPUs; None: the one that Slurm sets, and CUDA's if it sets none."""
    gpu_request: Literal["gres", "gpus-per-node"] = "gres"
    """The flag that requests GPUs: `--gres=gpu:N` or `--gpus-per-node=N`."""
    gres_type: str | None = None
    """The type in `--gres=gpu:TYPE:N`, where the site requires one."""
    architecture: Architecture | None = None
    """The architecture of the CPUs; None: aarch64 beside GPUs such as gh200 and gb200, else x86_64."""
    cores_per_node: Count
    """Cores that jobs may use."""
    threads_per_core: Count = 1
    """The CPUs that Slurm counts for a core: 2 where it counts hardware threads."""
    cores_per_gpu: Count | None = None
    """The cores that a job has to request with each GPU; None: no such rule."""
    mem_gib_per_node: Annotated[float, Meta(gt=0)]
    """Memory that jobs may use."""
    mem_gib_per_gpu: Annotated[float, Meta(gt=0)] | None = None
    """The memory that a job has to request with each GPU, or gets with it; None: no such rule."""
    scratch_gib_per_node: Annotated[float, Meta(gt=0)] | None = None
    """Space for temporary files (TMPDIR) of a node; None: not known, and not planned."""
    mem_flag: bool = True
    """False where the site rejects `--mem`."""
    exclusive: bool = False
    """Whole nodes are allocated and charged, whatever is requested."""
    preemptible: bool = False
    """True where Slurm may end jobs in favour of others: only those of reward.placement "elastic" run there."""
    max_walltime_min: Count
    """The longest walltime of a job."""
    walltime_limits: list[WalltimeLimit] = []
    """Shorter walltimes of smaller jobs, such as 120 minutes up to 91 nodes."""
    max_nodes: Count
    """The most nodes that a job may have here."""
    max_jobs: Count | None = None
    """The jobs that the QOS lets a user have at once, in the queue or running; each component of a heterogeneous
    job is one of them."""
    reservation: str | None = None
    """The value of `--reservation`."""
    exclude: list[str] = []
    """Nodes that no job is to get, as in `--exclude`."""
    extra_flags: list[str] = []
    """Further sbatch flags that the site requires for every component there."""
    interface: InterfaceNames = None
    """In place of `network.interface`, on these nodes."""
    inference: InferenceConfig | None = None
    """In place of the site's, on these nodes."""
    python: str | None = None
    """In place of the site's, on these nodes; in an image it is the image's own."""
    prologue: str | None = None
    """In place of the site's, on these nodes."""
    environment: dict[EnvironmentName, str] = {}
    """Variables of every process on these nodes, besides the site's."""
    image: str | None = None
    """In place of the site's, on these nodes; "" for none."""
    temporary_dir: str | None = None
    """In place of the site's, on these nodes."""
    cache_dir: str | None = None
    """In place of the site's, on these nodes."""
    unverified: list[str] = []
    """Fields above that no source confirms."""


class NetworkConfig(ConfigTable, frozen=True, kw_only=True):
    """The network between nodes."""

    interface: InterfaceNames = None
    """The interface that roles bind to, such as `hsn0`; a name may end with `*`, and of several a node takes the first
    that it has. None: the one with the address of the host's name."""
    fabric: str | None = None
    """The fast network, such as "slingshot-11". None: kv_connector "auto" is always "files"."""
    gbit_per_gpu: Figure | None = None
    """The bandwidth of the fast network in Gbit/s, for each GPU of a node, in each direction. None: not known, and 200
    are assumed where the time of a training step is estimated."""
    srun_network: str | None = None
    """The value of `--network`, where steps need it."""
    tls: bool = False
    """Encrypt what engines, environments and judges send from node to node, with a certificate of each campaign. MPI,
    NCCL and vLLM's own KV connectors encrypt nothing: needs mpi.couriers = false and kv_connector = "files"."""
    internet_on_compute: Literal["yes", "no", "proxy", "unknown"] = "unknown"
    """The way from compute nodes to the internet; no: jobs get HF_HUB_OFFLINE = 1; proxy: through the one that
    `environment` names."""


class MpiConfig(ConfigTable, frozen=True, kw_only=True):
    """The way MPI programs are started."""

    flavour: Literal["mpich", "openmpi", "cray-mpich", "parastation", "none"] = "none"
    """The MPI library there; none: couriers use TCP."""
    srun_type: str = "none"
    """The value of `srun --mpi`."""
    world_over_components: KnownState = "unknown"
    """One MPI program can span the components of a heterogeneous job; inside one allocation it always can."""
    couriers: bool = True
    """Send new weights from node to node, by MPI or else by TCP; false: they go by files."""
    codec: CodecSetting = "auto"
    """Couriers send whole versions (full), only the changes (delta), or whichever is faster (auto)."""


class Site(ConfigTable, frozen=True, kw_only=True):
    """A whole site."""

    name: Name
    """The name of the site."""
    description: str = ""
    """A line for `hpcrl site ls`."""
    scheduler: SchedulerName
    """slurm: jobs are submitted to Slurm; local: they run as processes of this machine."""
    partitions: Annotated[dict[Name, SitePartition], Meta(min_length=1)]
    gpus: dict[Name, GpuFigures] = {}
    speed: RooflineFit = DEFAULT_FIT
    """The coefficients between the peak figures of its GPUs and real times, as `hpcrl calibrate` prints them."""
    account: str | None = None
    """The account that jobs are charged to."""
    account_required: bool = False
    """True where Slurm refuses a job without an account."""
    het_jobs: KnownState = "unknown"
    """Support of heterogeneous jobs; no: all roles get nodes of one allocation, on one partition."""
    nodes_may_submit: bool = True
    """True if the nodes of a job may submit others; otherwise the login node queues all jobs of a chain at once."""
    steps_per: Literal["node", "role"] = "node"
    """The steps of worker pools: one on each node of a role, or one on all its nodes, for jobs of hundreds of nodes
    (docs/jobs.md)."""
    slurm_conf: str | None = None
    """Path of the slurm.conf to use, if not the machine's own; `~` and $NAME are expanded."""
    campaigns_dir: str | None = None
    """The directory of all campaigns, on a file system that all nodes share; `~` and $NAME are expanded, and
    `{account}` is the account of the site."""
    staging_dir: str | None = None
    """The directory of models, data and images that `hpcrl stage` fetches, on a file system that all nodes share; `~`
    and $NAME are expanded. None: a hidden one in that of the campaigns."""
    python: str | None = None
    """Interpreter in the jobs; None: the one that runs hpcrl."""
    prologue: str | None = None
    """A file that every batch script includes before Python starts (modules, exports): a path, or a name in
    ~/.config/hpcrl/jobs/ or in the shipped jobs/. Errors in it do not end the job."""
    job_flags: list[str] = []
    """Further sbatch flags of a whole job, such as `--licenses=scratch`, which Slurm takes on the first component."""
    licenses: list[str] = []
    """Licences that every job needs, such as `scratch:1`."""
    environment: dict[EnvironmentName, str] = {}
    """Variables of every process of the jobs; $NAME in a value is expanded on the node."""
    exports: list[str] | None = None
    """The variables of the shell that jobs get besides the usual ones of the system, modules and libraries, and those
    that the recipe and the site name; a name may have `*`. ["*"]: all of them, also keys and tokens."""
    temporary_dir: str | None = None
    """The directory of temporary files of each step (TMPDIR), made if it is missing; $NAME is expanded on the node."""
    cache_dir: str | None = None
    """The directory in which compilers keep what they have compiled; $NAME is expanded on the node. None: below the
    one of temporary files where that is set, else the compilers' own in $HOME."""
    container: ContainerTool | None = None
    """The program that runs images here."""
    image: str | None = None
    """Steps run in this image: a file, a directory, or a name that the program accepts. None: steps run on the node."""
    image_python: str = "python3"
    """The interpreter in images."""
    image_binds: list[str] = []
    """Directories of the nodes that images need besides that of the campaign."""
    image_flags: list[str] = []
    """Further options of the program; for apptainer `--nv` or `--rocm` is there already on nodes with GPUs."""
    network: NetworkConfig = NetworkConfig()
    mpi: MpiConfig = MpiConfig()
    inference: InferenceConfig = InferenceConfig()
    slurm_min: str | None = None
    """The oldest Slurm version that these facts were checked with."""
    verified: bool = False
    """True once the facts were checked on the machine itself."""
    checked_on: str | None = None
    """The date on which these facts were checked, such as 2026-11-20."""
    sources: list[str] = []
    """The origins of these facts, such as pages of the site's documentation."""

    @property
    def variables(self) -> list[str]:
        """The variables that its settings have as $NAME."""
        return find_variables(msgspec.json.encode(self).decode())

    def list_interfaces(self, partition: str) -> list[str]:
        """Return the names or patterns of the interfaces that roles bind to there, the preferred one first."""
        asked = self.partitions[partition].interface or self.network.interface
        if asked is None:
            return ["lo"] if self.scheduler == "local" else []
        return [asked] if isinstance(asked, str) else asked

    def choose_python(self, partition: str | None = None) -> str:
        """Return the interpreter of the jobs outside images; by default the one that runs this."""
        own = None if partition is None else self.partitions[partition].python
        return own or self.python or sys.executable

    def choose_prologue(self, partition: str) -> str | None:
        """Return the prologue of jobs and steps that run there."""
        return self.partitions[partition].prologue or self.prologue

    def choose_image(self, partition: str) -> str | None:
        """Return the image of steps that run there; None if they run on the node itself."""
        own = self.partitions[partition].image
        return (self.image if own is None else own) or None

    def choose_inference(self, partition: str) -> InferenceConfig:
        """Return the way KV is transferred between engines there."""
        return self.partitions[partition].inference or self.inference

    def find_gpu_maker(self, partition: str) -> GpuMaker | None:
        """Return the maker of the GPUs there, as described, else by their variable or name; None without GPUs."""
        part = self.partitions[partition]
        if part.gpu is None:
            return None
        own = self.gpus.get(part.gpu)
        if own is not None and own.maker is not None:
            return own.maker
        return "amd" if part.gpu_variable in AMD_VARIABLES else guess_maker(part.gpu)

    def find_architecture(self, partition: str) -> Architecture:
        """Return the architecture of the CPUs there, as described, else by the GPUs beside them."""
        part = self.partitions[partition]
        return part.architecture or guess_architecture(part.gpu or "")

    def find_gpu(self, name: str | None) -> GpuModel | None:
        """Return the figures of a GPU type, the site's own first; None if they are not known."""
        own = self.gpus.get(name or "")
        found = GpuModel(name=name or "", **msgspec.structs.asdict(own)) if own else GPU_CATALOGUE.get(name or "")
        return None if found is None else msgspec.structs.replace(found, fit=self.speed)


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
        if site.choose_image(label) is not None and site.container is None:
            raise ConfigError(
                f"{layered.file}: partitions.{label} runs steps in the image {site.choose_image(label)!r}, and no "
                f"program that does: set container to one of {', '.join(get_args(ContainerTool))}"
            )
    return site


def default_lab_dir() -> Path:
    """Return the lab's directory: $HPCRL_LAB, else one per user on the local disk (short, for unix sockets)."""
    chosen = os.environ.get("HPCRL_LAB")
    return Path(chosen) if chosen else Path(f"/tmp/hpcrl-lab-{os.getuid()}")
