"""A lab that imitates a site: its partitions, nodes, GPUs, QOS and licences, with few nodes of each kind.

    imitate_site      the cluster of such a lab
    write_lab_site    write the site's file for use with the lab; return its path
    MAX_NODES         the nodes of each kind

A lab has no file systems, networks or containers of a site, and its MPI is that of this machine.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrl.config.site import Site, SitePartition
from hpcrl.config.toml import format_toml
from hpcrl.errors import LabError
from hpcrl.lab.conf import LabCluster, NodeGroup, WidePartition
from hpcrl.system.files import publish_file

MAX_NODES = 4
"""Enough for a worker of each role on nodes of one kind."""
PARTITION_OF_CONSTRAINTS = "all"
"""The partition over all nodes, at sites whose jobs name none."""
_CONSTRAINT = "--constraint="


def imitate_site(site: Site) -> LabCluster:
    """Return a cluster that accepts the jobs of a site."""
    if site.scheduler != "slurm":
        raise LabError(f"site {site.name!r} has no Slurm: there is nothing to imitate; choose one of `hpcrl site ls`")
    groups: dict[tuple[str, ...], NodeGroup] = {}
    members: dict[str, list[str]] = {}
    for label, part in site.partitions.items():
        named = part.slurm_partition or PARTITION_OF_CONSTRAINTS
        features = _list_features(part)
        key = (part.slurm_partition or "", part.gpu or "", *features)
        group = groups.setdefault(key, _make_group(label, part, features))
        members.setdefault(named, []).append(group.name)
    return LabCluster(
        name="lab",
        groups=tuple(groups.values()),
        wide=tuple(_make_partition(name, tuple(dict.fromkeys(own)), site) for name, own in members.items()),
        default=next(iter(members)),
        qos=tuple(dict.fromkeys(part.qos for part in site.partitions.values() if part.qos)),
        licenses=tuple(name if ":" in name else f"{name}:100" for name in site.licenses),
    )


def write_lab_site(site: Site, *, source: Path, root: Path) -> Path:
    """Write the site for use with the lab in `root`: an extension of the site's file."""
    lab = {
        "extends": str(source),
        "slurm_conf": str(root / "slurm.conf"),
        "campaigns_dir": "",
        "account": site.account or "lab",
        "python": sys.executable,
        "image": "",
        "temporary_dir": "/tmp",
    }
    tables: dict[str, Mapping[str, Any]] = {"network": {"interface": "lo", "internet_on_compute": "unknown"}}
    tables["mpi"] = {"flavour": "mpich", "srun_type": "pmi2"}
    for label, part in site.partitions.items():
        own: dict[str, Any] = {"max_nodes": min(part.max_nodes, MAX_NODES)}
        own |= {"interface": "lo"} if part.interface else {}
        own |= {"python": sys.executable} if part.python else {}
        own |= {"image": ""} if part.image else {}
        own |= {"temporary_dir": "/tmp"} if part.temporary_dir else {}
        tables[f"partitions.{label}"] = own
    path = root / "site.toml"
    publish_file(path, format_toml(f"{site.name} for use with this lab, which imitates it.", lab, tables))
    return path


def _list_features(part: SitePartition) -> tuple[str, ...]:
    """Return the words of the constraints under which jobs get such nodes."""
    flags = [flag.removeprefix(_CONSTRAINT) for flag in part.extra_flags if flag.startswith(_CONSTRAINT)]
    return tuple(dict.fromkeys(re.findall(r"[\w.-]+", " ".join([part.constraint or "", *flags]))))


def _make_group(label: str, part: SitePartition, features: tuple[str, ...]) -> NodeGroup:
    return NodeGroup(
        name=f"{re.sub(r'[^a-z0-9]+', '-', label.lower()).strip('-')}-n",
        num_nodes=min(part.max_nodes, MAX_NODES),
        gpu=part.gres_type or part.gpu or "",
        num_gpus=part.gpus_per_node,
        has_partition=False,
        num_cpus=part.cores_per_node * part.threads_per_core,
        mem_mib=int(part.mem_gib_per_node * 1024),
        threads_per_core=part.threads_per_core,
        features=features,
    )


def _make_partition(name: str, groups: tuple[str, ...], site: Site) -> WidePartition:
    parts = [part for part in site.partitions.values() if (part.slurm_partition or PARTITION_OF_CONSTRAINTS) == name]
    return WidePartition(
        name=name,
        groups=groups,
        is_preemptible=all(part.preemptible for part in parts),
        walltime_min=max(part.max_walltime_min for part in parts),
    )
