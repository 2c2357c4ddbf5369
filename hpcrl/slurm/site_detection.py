"""Describe a cluster as a site, from what its Slurm and this login node report.

write_site        describe this cluster in a site file of the user's own
detect_site       the text of a site file, and notes on what a person has to check
DetectedSite      both
parse_config, parse_partitions    what scontrol prints of Slurm's settings and partitions
enforces_names                    return whether it refuses accounts or QOS that are not the user's
parse_gres        the type and number of GPUs in a gres of Slurm
choose_gpu_name   the catalogue's name of a GPU type of Slurm: pure

Nothing is queued. What Slurm does not report keeps its default, and what was guessed is listed under `unverified`.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal, get_args

from hpcrl.config.site import ContainerTool, load_site
from hpcrl.config.toml import NAME_PATTERN, PATTERN_MEANINGS, find_toml, format_toml, list_known_names, user_folder
from hpcrl.errors import ConfigError, SlurmError
from hpcrl.hardware.gpus import GPU_CATALOGUE, guess_maker
from hpcrl.slurm.commands import ask_slurm, expand_nodes, run_slurm
from hpcrl.system.files import make_private_dir, publish_file
from hpcrl.system.network import LOOPBACK

NODE_FORMAT = "%R|%D|%c|%m|%G|%f|%N"
LONGEST_WALLTIME_MIN = 7 * 24 * 60
"""The walltime of a partition without a limit."""
MPI_TIMEOUT_S = 30.0
MPI_PROBE = "from mpi4py import MPI; print(MPI.Get_library_version())"
MPI_FLAVOURS = (("MPICH", "mpich", "pmi2"), ("Open MPI", "openmpi", "pmix"), ("CRAY", "cray-mpich", "cray_shasta"))
"""The name that a library prints, its flavour in a site, and the plugin of srun that starts it."""
SCRATCH_VARIABLES = ("SCRATCH", "PSCRATCH", "WORK")
AMD_PROGRAMS = ("rocm-smi", "amd-smi")
UNKNOWN_GPU_GIB = 16
"""The memory that a GPU of an unknown type is assumed to have, so that a plan is possible."""


@dataclass
class DetectedSite:
    """A site file, and what a person has to look at."""

    text: str
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _NodeKind:
    """The alike nodes of one partition."""

    partition: str
    num_nodes: int
    cpus: int
    mem_mib: int
    gpu: str
    num_gpus: int
    nodes: frozenset[str]


def detect_site(name: str) -> DetectedSite:
    """Describe this cluster; raise SlurmError if its Slurm does not answer."""
    config = parse_config(ask_slurm(["scontrol", "show", "config"]))
    every = parse_partitions(ask_slurm(["scontrol", "show", "partition", "-o"]))
    partitions = {label: fields for label, fields in every.items() if fields.get("State") == "UP"}
    kinds = [kind for kind in _read_kinds() if kind.partition in partitions]
    if not kinds:
        raise SlurmError("sinfo reports no partition that is up: there is nothing to describe")
    notes: list[str] = []
    cluster = config.get("ClusterName", name)
    found = DetectedSite("", notes)
    top: dict[str, Any] = {
        "name": name,
        "description": f"the cluster {cluster}, as its Slurm described it",
        "scheduler": "slurm",
        **_find_account(config, notes),
        **_find_scratch(),
        "nodes_may_submit": all(fields.get("AllocNodes", "ALL") == "ALL" for fields in partitions.values()),
        **_find_container(),
        "slurm_min": ".".join(config.get("SLURM_VERSION", "").split(".")[:2]),
        "checked_on": date.today().isoformat(),
        "sources": [f"sinfo and scontrol on {socket.gethostname()}"],
    }
    tables: dict[str, dict[str, Any]] = {"network": _find_network(), "mpi": _find_mpi()}
    tables |= _describe_partitions(kinds, partitions, config, notes)
    found.text = format_toml(f"Made by `hpcrl site new {name} --detect`. Correct what is wrong.", top, tables)
    return found


def write_site(name: str) -> tuple[Path, list[str]]:
    """Write a new site file of the user's own; return its path and the notes."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(f"site {name!r}: choose {PATTERN_MEANINGS[NAME_PATTERN]}")
    path = user_folder("sites") / f"{name}.toml"
    if name in list_known_names("sites"):
        raise ConfigError(f"there is a site {name!r} already ({find_toml('sites', name)}): choose another name")
    found = detect_site(name)
    with tempfile.TemporaryDirectory() as folder:  # a file that cannot be used does not take the name
        (Path(folder) / path.name).write_text(found.text)
        load_site(str(Path(folder) / path.name))
    make_private_dir(path.parent)
    publish_file(path, found.text)
    return path, found.notes


def parse_config(text: str) -> dict[str, str]:
    """Return the settings that `scontrol show config` prints."""
    rows = (re.split(r"\s*=\s*", line.strip(), maxsplit=1) for line in text.splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def enforces_names(config: Mapping[str, str], what: Literal["associations", "qos"]) -> bool:
    """Return whether Slurm refuses jobs with accounts, or QOS, that are not the user's."""
    enforced = set(re.findall(r"\w+", config.get("AccountingStorageEnforce", "").lower()))
    return bool(enforced & {"all", "qos", *(("associations", "limits", "safe", "wckeys") if what != "qos" else ())})


def parse_partitions(text: str) -> dict[str, dict[str, str]]:
    """Return the fields of each partition that `scontrol show partition -o` prints."""
    rows = (dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines())
    return {fields["PartitionName"]: fields for fields in rows if "PartitionName" in fields}


def _read_kinds() -> list[_NodeKind]:
    kinds = []
    for line in ask_slurm(["sinfo", "-h", "-o", NODE_FORMAT]).splitlines():
        fields = line.split("|")
        if len(fields) != 7:
            continue
        partition, num, cpus, memory, gres, _, nodes = fields
        gpu, num_gpus = parse_gres(gres)
        kinds.append(
            _NodeKind(
                partition=partition,
                num_nodes=int(num),
                cpus=int(cpus.rstrip("+")),
                mem_mib=int(memory.rstrip("+")),
                gpu=gpu,
                num_gpus=num_gpus,
                nodes=frozenset(expand_nodes(nodes)),
            )
        )
    return kinds


def parse_gres(text: str) -> tuple[str, int]:
    """Return the type of the GPUs and their number: `gpu:h100:4(S:0-1),nvme:1` has 4 of type h100."""
    for part in re.sub(r"\([^)]*\)", "", text).split(","):
        words = part.split(":")
        if words[0] == "gpu" and words[-1].isdecimal():
            return (words[1] if len(words) == 3 else ""), int(words[-1])
    return "", 0


def choose_gpu_name(gres_type: str) -> str | None:
    """Return the name in the catalogue of a GPU that sites name freely; None if none or several could be meant.

    Of types that differ in memory alone, the text must name the memory, or the smallest is taken.
    """
    words = re.findall(r"[a-z]+\d+[a-z]*|\d+(?=g)", gres_type.lower().replace("_", "-"))
    names = [name for name in GPU_CATALOGUE if name.split("-")[0] in words]
    sized = [name for name in names if name.split("-")[-1] in words and "-" in name]
    found = sized or names
    models = {name.split("-")[0] for name in found}
    return min(found, key=lambda name: GPU_CATALOGUE[name].memory_gib) if len(models) == 1 else None


def _describe_partitions(
    kinds: Iterable[_NodeKind], partitions: Mapping[str, Mapping[str, str]], config: Mapping[str, str], notes: list[str]
) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    gpus: dict[str, dict[str, Any]] = {}
    for kind in _select_kinds(kinds, partitions, config, notes):
        fields, guessed = partitions[kind.partition], False
        label = re.sub(r"[^A-Za-z0-9_-]", "-", kind.partition) or "partition"
        if f"partitions.{label}" in tables:  # another kind of node of the same partition
            label = f"{label}-{kind.gpu or kind.cpus}"
        if f"partitions.{label}" in tables:
            label = f"{label}-{len(tables)}"
        table: dict[str, Any] = {"slurm_partition": kind.partition}
        if kind.num_gpus:
            name, guessed = choose_gpu_name(kind.gpu), True
            if name is None:
                name = re.sub(r"[^A-Za-z0-9_-]", "-", kind.gpu) or "gpu"
                gpus[f"gpus.{name}"] = {"memory_gib": UNKNOWN_GPU_GIB, **_find_maker(name, notes)}
                notes.append(
                    f"gpus.{name}: its memory is not known and was set to {UNKNOWN_GPU_GIB} GiB: correct memory_gib, "
                    "and give bf16_tflops and memory_tb_per_s for estimates of its speed"
                )
            elif any(other != name and other.split("-")[0] == name.split("-")[0] for other in GPU_CATALOGUE):
                notes.append(
                    f"partitions.{label}: GPU type {kind.gpu!r} was taken for {name}: correct it if it has more"
                )
            else:
                guessed = False
            table |= {"gpu": name, "gpus_per_node": kind.num_gpus}
            table |= {"gres_type": kind.gpu} if kind.gpu else {}
        table |= {
            "cores_per_node": kind.cpus,
            "mem_gib_per_node": kind.mem_mib // 1024,
            "exclusive": fields.get("OverSubscribe", "").startswith("EXCLUSIVE"),
            "preemptible": _is_preemptible(kind, fields, partitions, kinds, config),
            "max_walltime_min": _find_walltime(fields),
            "max_nodes": _find_most_nodes(kind, fields),
            "unverified": ["gpu"] if guessed else [],
        }
        tables[f"partitions.{label}"] = table
    return tables | gpus


def _find_maker(name: str, notes: list[str]) -> dict[str, str]:
    """Return the maker of GPUs whose name shows none, if this node has programs of AMD alone."""
    found = next(filter(shutil.which, AMD_PROGRAMS), None)
    if found is None or shutil.which("nvidia-smi") is not None or guess_maker(name) == "amd":
        return {}
    notes.append(f'gpus.{name}: this node has {found}, so maker was set to "amd": correct it if that is wrong')
    return {"maker": "amd"}


def _select_kinds(
    kinds: Iterable[_NodeKind], partitions: Mapping[str, Mapping[str, str]], config: Mapping[str, str], notes: list[str]
) -> list[_NodeKind]:
    """Leave out partitions over nodes that another partition has for at least as long: a job would ask for both."""
    every = list(kinds)
    kept: list[_NodeKind] = []

    def rank(kind: _NodeKind) -> tuple[bool, int, int]:
        fields = partitions[kind.partition]
        return _is_preemptible(kind, fields, partitions, every, config), -len(kind.nodes), -_find_walltime(fields)

    for kind in sorted(every, key=rank):
        fields = partitions[kind.partition]
        preemptible, walltime = rank(kind)[0], _find_walltime(fields)
        rivals = (other for other in kept if kind.nodes <= other.nodes and rank(other)[0] == preemptible)
        rival = next((other for other in rivals if _find_walltime(partitions[other.partition]) >= walltime), None)
        if rival is None:
            kept.append(kind)
        else:
            notes.append(f"partition {kind.partition} is left out: {rival.partition} has its nodes, for as long")
    return sorted(kept, key=every.index)


def _is_preemptible(
    kind: _NodeKind,
    fields: Mapping[str, str],
    partitions: Mapping[str, Mapping[str, str]],
    kinds: Iterable[_NodeKind],
    config: Mapping[str, str],
) -> bool:
    """Return whether jobs of another partition may end those of this one."""
    if fields.get("PreemptMode", "OFF") == "OFF":
        return False
    if config.get("PreemptType") != "preempt/partition_prio":
        return "preempt" in kind.partition.lower()
    rivals = {other.partition for other in kinds if other.nodes & kind.nodes}
    tier = int(fields.get("PriorityTier", 1))
    return any(int(partitions[name].get("PriorityTier", 1)) > tier for name in rivals if name in partitions)


def _find_walltime(fields: Mapping[str, str]) -> int:
    """Return the longest walltime in minutes, from `1-00:00:00`, `12:30:00` or UNLIMITED."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):\d+", fields.get("MaxTime", ""))
    if found is None:
        return LONGEST_WALLTIME_MIN
    days, hours, minutes = (int(part or 0) for part in found.groups())
    return max((days * 24 + hours) * 60 + minutes, 1)


def _find_most_nodes(kind: _NodeKind, fields: Mapping[str, str]) -> int:
    most = fields.get("MaxNodes", "UNLIMITED")
    return min(kind.num_nodes, int(most)) if most.isdecimal() and int(most) else kind.num_nodes


def _find_account(config: Mapping[str, str], notes: list[str]) -> dict[str, Any]:
    user = os.environ.get("USER") or str(os.getuid())
    done = run_slurm(["sacctmgr", "-nP", "show", "user", user, "format=defaultaccount"])
    account = done.stdout.split("\n")[0].strip() if done.returncode == 0 else ""
    required = enforces_names(config, "associations")
    if required and not account:
        notes.append("account: the cluster requires one, and none is known: set it")
    return {**({"account": account} if account else {}), "account_required": required}


def _find_scratch() -> dict[str, Any]:
    found = next((name for name in SCRATCH_VARIABLES if os.path.isdir(os.environ.get(name, ""))), None)  # noqa: PTH112
    return {"campaigns_dir": f"${found}/hpcrl"} if found else {}


def _find_container() -> dict[str, Any]:
    found = next((tool for tool in get_args(ContainerTool) if shutil.which(tool)), None)
    return {"container": found} if found else {}


def _find_network() -> dict[str, Any]:
    """Return the loopback for simulated nodes, whose address it is; real ones alone know their interfaces."""
    addresses = re.findall(r"NodeAddr=(\S+)", run_slurm(["scontrol", "show", "node", "-o"]).stdout)
    is_simulated = bool(addresses) and all(one == "localhost" or one.startswith(LOOPBACK) for one in addresses)
    return {"interface": "lo"} if is_simulated else {}


def _find_mpi() -> dict[str, Any]:
    """Return how srun starts the MPI of this interpreter; without one, weights go by TCP."""
    try:
        probe = subprocess.run(
            [sys.executable, "-c", MPI_PROBE], capture_output=True, text=True, timeout=MPI_TIMEOUT_S, check=False
        ).stdout
    except subprocess.TimeoutExpired:
        probe = ""
    listed = run_slurm(["srun", "--mpi=list"])
    plugins = re.findall(r"[\w-]+", listed.stdout + listed.stderr)
    for called, flavour, plugin in MPI_FLAVOURS:
        if called in probe and plugin in plugins:
            return {"flavour": flavour, "srun_type": plugin}
    return {"flavour": "none"}
