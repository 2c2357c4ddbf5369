"""The nodes of the lab and its files: the simulated cluster, the state directory, the configuration of its daemons.

LabCluster, NodeGroup, WidePartition, DEFAULT_CLUSTER, STRICT_CLUSTER   nodes and partitions
LabDir          every path in a state directory
check_path      refuse a state directory that Slurm could not use
reserve_ports   free ports that no other lab takes meanwhile
write_conf      fill in the templates of jobs/lab
TEMPLATES, SCRIPTS, MAX_SOCKET_PATH, PORT_RANGE   constants
"""

import contextlib
import errno
import itertools
import os
import random
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template

from hpcrl.config.toml import shipped_folder
from hpcrl.errors import LabError
from hpcrl.lab.node_isolation import choose_tracking
from hpcrl.system import files

TEMPLATES = ("slurm.conf", "gres.conf", "slurmdbd.conf", "my.cnf", "cgroup.conf")
SCRIPTS = ("epilog.sh", "node.sh")
MAX_SOCKET_PATH = 107
PORT_RANGE = range(20_000, 32_000)
"""Ports below Linux's ephemeral ports (32768 and up), so that no outgoing connection uses one of ours."""
JOB_IDS_PER_PORT = 1_000
"""Labs count their jobs from different numbers: MPICH names shared memory after jobs, and labs share the machine's."""


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """The nodes name1..nameN, and the partition `name` over them, if they have one."""

    name: str
    num_nodes: int
    gpu: str = ""
    num_gpus: int = 0
    has_partition: bool = True
    num_cpus: int = 0
    """0: those of the cluster; so is the memory."""
    mem_mib: int = 0
    threads_per_core: int = 1
    features: tuple[str, ...] = ()
    """The features that jobs may name as a constraint, besides the type of the GPUs."""
    preemptible: str = ""
    """Name of a second partition over the same nodes; its jobs are requeued when the first one needs the nodes."""

    def node_names(self) -> list[str]:
        return [f"{self.name}{number}" for number in range(1, self.num_nodes + 1)]


@dataclass(frozen=True, kw_only=True)
class WidePartition:
    """A partition over the nodes of groups, in addition to their own partitions."""

    name: str
    groups: tuple[str, ...]
    is_preemptible: bool = False
    """True if its jobs are requeued when another partition needs the nodes."""
    walltime_min: int = 0
    """0: that of the cluster."""


@dataclass(frozen=True, kw_only=True)
class LabCluster:
    """The cluster that the lab simulates."""

    groups: tuple[NodeGroup, ...]
    default: str
    """The partition that gets jobs that name none."""
    wide: tuple[WidePartition, ...] = ()
    name: str = "lab"
    num_cpus: int = 16
    mem_mib: int = 16_384
    walltime_min: int = 1_440
    is_strict: bool = False
    """True if each node has a /dev/shm, /tmp and hostname apart from the others', and limits the memory of steps."""
    shared: tuple[str, ...] = ()
    """Directories below /tmp that the nodes of a strict lab share, besides those that every job needs."""
    preempt_grace_s: int = 0
    """Time between TERM and the end of a job that is preempted, in the wide partitions."""
    warns_preempted: bool = False
    """True if a preempted job gets its own warning (`--signal`) instead of SIGTERM (preempt_send_user_signal)."""
    kill_wait_s: int = 10
    """Time between TERM and KILL of a job that is cancelled or at its walltime (KillWait)."""
    over_time_limit_min: int = 0
    """Minutes that a job may run beyond its walltime (OverTimeLimit)."""
    requeues: bool = True
    """True if jobs that name neither are requeued after a node failed (JobRequeue)."""
    binds_cpus: bool = False
    """True if steps are bound to CPUs; nodes have no more of them than the machine then."""

    qos: tuple[str, ...] = ()
    """Names that jobs may give as their QOS."""
    licenses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.binds_cpus and self.num_cpus > (os.cpu_count() or 1):
            raise LabError(
                f"nodes with {self.num_cpus} CPUs cannot bind steps to them: this machine has {os.cpu_count()}; lower "
                "num_cpus, or leave binds_cpus False"
            )

    def node_names(self) -> list[str]:
        return [name for group in self.groups for name in group.node_names()]


DEFAULT_CLUSTER = LabCluster(
    groups=(
        NodeGroup(name="prefill", num_nodes=2, gpu="h100", num_gpus=4),
        NodeGroup(name="decode", num_nodes=2, gpu="h20", num_gpus=4),
        NodeGroup(name="train", num_nodes=2, gpu="h100", num_gpus=4),
        NodeGroup(name="env", num_nodes=3, preemptible="preempt"),
    ),
    wide=(
        WidePartition(name="h100", groups=("prefill", "train")),
        WidePartition(name="spare", groups=("prefill", "train"), is_preemptible=True),
    ),
    default="env",
)
STRICT_CLUSTER = replace(DEFAULT_CLUSTER, is_strict=True, preempt_grace_s=20)


@dataclass(frozen=True)
class LabDir:
    """The paths of one lab, all below `root`, which is private to its owner."""

    root: Path

    @property
    def record(self) -> Path:
        return self.root / "lab.json"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def conf(self) -> Path:
        return self.root / "slurm.conf"

    @property
    def munge_key(self) -> Path:
        return self.root / "munge" / "key"

    @property
    def munge_socket(self) -> Path:
        return self.root / "munge" / "socket"

    @property
    def db_socket(self) -> Path:
        return self.root / "run" / "db.sock"

    def log(self, daemon: str) -> Path:
        """Return the file for the output of a daemon (its own log file repeats it with times)."""
        return self.root / "log" / f"{daemon}.out"


def check_path(root: Path, *, cluster: LabCluster) -> None:
    """Refuse a state directory that Slurm or its unix sockets could not use."""
    if not re.fullmatch(r"[A-Za-z0-9/._+-]+", str(root)):
        raise LabError(
            f"state directory {str(root)!r}: slurm.conf allows only letters, digits and /._+-: set HPCRL_LAB"
        )
    node = max(cluster.node_names(), key=len)
    step_socket = root / "spool" / node / f"{node}_67108863.4294967290"
    spare = MAX_SOCKET_PATH - len(str(step_socket))
    if spare < 0:
        raise LabError(
            f"state directory {root} is {len(str(root))} characters long, at most {len(str(root)) + spare} leave "
            "room for the names of unix sockets: set HPCRL_LAB to a shorter path"
        )


@contextlib.contextmanager
def reserve_ports(count: int) -> Iterator[list[int]]:
    """Reserve `count` consecutive free ports until the block ends (by then our daemons listen).

    The reservation is an abstract unix socket: every user of the machine sees it, it ends with its process, and it
    leaves no file.
    """
    size = 1 << (count - 1).bit_length()
    starts = list(range(PORT_RANGE.start, PORT_RANGE.stop - size, size))
    random.shuffle(starts)
    for start in starts:
        ports = list(range(start, start + count))
        with socket.socket(socket.AF_UNIX) as claim:
            if _try_claim(claim, start) and all(_is_free(port) for port in ports):
                yield ports
                return
    raise LabError(
        f"no {count} consecutive free ports between {PORT_RANGE.start} and {PORT_RANGE.stop}: stop other labs"
    )


def _try_claim(claim: socket.socket, start: int) -> bool:
    try:
        claim.bind(f"\0hpcrl-lab-port-{start}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError:
            return False
    return True


def write_conf(lab: LabDir, *, cluster: LabCluster, ports: list[int], user: str) -> None:
    """Make the folders, the munge key, the GPUs' device files and the filled-in templates."""
    for folder in ("munge", "db", "ctld", "run", "log", "dev"):
        files.make_private_dir(lab.root / folder)
    for kind, node in itertools.product(("spool", "tmp"), cluster.node_names()):
        files.make_private_dir(lab.root / kind / node)
    for number in range(max(group.num_gpus for group in cluster.groups)):
        (lab.root / "dev" / f"gpu{number}").symlink_to("/dev/null")
    _write_file(lab.munge_key, os.urandom(128), mode=0o600)
    values = _make_template_values(lab, cluster=cluster, ports=ports, user=user)
    for name in TEMPLATES:
        text = (shipped_folder("jobs") / "lab" / name).read_text(encoding="utf-8")
        _write_file(lab.root / name, Template(text).substitute(values).encode(), mode=0o600)
    for name in SCRIPTS:
        _write_file(lab.root / name, (shipped_folder("jobs") / "lab" / name).read_bytes(), mode=0o700)
    machine = Path("/etc/hosts").read_text()
    nodes = "".join(f"127.0.0.1 {node}\n" for node in cluster.node_names())
    _write_file(lab.root / "hosts", f"{machine}\n{nodes}".encode(), mode=0o644)


def _write_file(path: Path, data: bytes, *, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(fd, "wb") as out:
        out.write(data)


def _make_template_values(lab: LabDir, *, cluster: LabCluster, ports: list[int], user: str) -> dict[str, object]:
    hostname = socket.gethostname().partition(".")[0]
    node_ports = dict(zip(cluster.node_names(), ports[2:], strict=True))
    return {
        "root": lab.root,
        "cluster": cluster.name,
        "host": hostname,
        "user": user,
        "ctld_port": ports[0],
        "first_job_id": (ports[0] - PORT_RANGE.start) * JOB_IDS_PER_PORT + 1,
        "dbd_port": ports[1],
        "num_cpus": cluster.num_cpus,
        "mem_mib": cluster.mem_mib,
        "walltime_min": cluster.walltime_min,
        "licenses": f"Licenses={','.join(cluster.licenses)}" if cluster.licenses else "",
        "kill_wait_s": cluster.kill_wait_s,
        "preemption": "SlurmctldParameters=preempt_send_user_signal" if cluster.warns_preempted else "",
        "over_time_limit_min": cluster.over_time_limit_min,
        "job_requeue": int(cluster.requeues),
        "tracking": "\n".join(choose_tracking(is_strict=cluster.is_strict, binds_cpus=cluster.binds_cpus)),
        "nodes": "\n".join(_format_node_lines(cluster, hostname=hostname, node_ports=node_ports)),
        "partitions": "\n".join(_format_partition_lines(cluster)),
        "gres": "\n".join(_format_gres_lines(lab, cluster)),
    }


def _format_node_lines(cluster: LabCluster, *, hostname: str, node_ports: dict[str, int]) -> Iterator[str]:
    for group in cluster.groups:
        features = ",".join(dict.fromkeys([group.gpu if group.num_gpus else "cpu", *group.features]))
        what = f"Gres=gpu:{group.gpu}:{group.num_gpus} Feature={features}" if group.num_gpus else f"Feature={features}"
        if group.num_cpus:
            cores, threads = group.num_cpus // group.threads_per_core, group.threads_per_core
            what += f" CPUs={group.num_cpus} CoresPerSocket={cores} ThreadsPerCore={threads} RealMemory={group.mem_mib}"
        for name in group.node_names():
            yield f"NodeName={name} NodeHostname={hostname} NodeAddr=127.0.0.1 Port={node_ports[name]} {what}"


def _format_partition_lines(cluster: LabCluster) -> Iterator[str]:
    low = "PriorityTier=1 PreemptMode=REQUEUE"
    for group in cluster.groups:
        nodes = ",".join(group.node_names())
        if group.has_partition:
            yield f"PartitionName={group.name} Nodes={nodes} {_format_default(group.name, cluster)}"
        if group.preemptible:
            yield f"PartitionName={group.preemptible} Nodes={nodes} {low}"
    for partition in cluster.wide:
        names = [name for group in cluster.groups if group.name in partition.groups for name in group.node_names()]
        grace = [f"{low} GraceTime={cluster.preempt_grace_s}"] if partition.is_preemptible else []
        limit = [f"MaxTime={partition.walltime_min}"] if partition.walltime_min else []
        default = [_format_default(partition.name, cluster)] if partition.name == cluster.default else []
        yield " ".join([f"PartitionName={partition.name} Nodes={','.join(names)}", *default, *limit, *grace])


def _format_default(partition: str, cluster: LabCluster) -> str:
    return f"Default={'YES' if partition == cluster.default else 'NO'}"


def _format_gres_lines(lab: LabDir, cluster: LabCluster) -> Iterator[str]:
    for group in cluster.groups:
        if group.num_gpus:
            devices = lab.root / "dev" / f"gpu[0-{group.num_gpus - 1}]"
            yield f"NodeName={','.join(group.node_names())} Name=gpu Type={group.gpu} File={devices}"
