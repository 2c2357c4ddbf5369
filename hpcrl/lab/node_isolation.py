"""The nodes of a strict lab, which share less than a plain lab's: namespaces for each slurmd, control groups for steps.

    check_isolation      refuse a strict lab where this user or machine cannot have one
    isolate_command      the command that runs another one as a node
    find_shared_dirs     directories below /tmp that all nodes see, though each has its own /tmp
    choose_tracking      how Slurm follows and limits the processes of steps
    name_cgroup          the first part of the names of a lab's control groups
    remove_cgroups       remove the control groups that killed daemons left
    CGROUP_CONTROLLERS   constant

The namespaces are those of mounts and of the hostname. Nodes share the network of the machine.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from hpcrl.config.toml import shipped_folder
from hpcrl.errors import LabError

_CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_CONTROLLERS = ("memory", "freezer")
"""The controllers of version 1 that Slurm's plugins use here; jobs/lab/node.sh names the same."""
_NODE_TMP = Path("/tmp")
_BY_CGROUP = ("ProctrackType=proctrack/cgroup", "TaskPlugin=task/cgroup")
_BY_PROCESS_TREE = ("ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none")
_MEMORY_WATCHER = "JobAcctGatherParams=OverMemoryKill"


def check_isolation() -> None:
    """Raise LabError unless nodes can have namespaces here."""
    if os.geteuid() != 0:
        raise LabError("a strict lab mounts a /dev/shm for each node: run it as root, or leave out --strict")
    if shutil.which("unshare") is None:
        raise LabError("unshare: not found: apt-get install util-linux, or leave out --strict")


def isolate_command(command: list[str], *, root: Path, node: str, cgroup: str, shared: Iterable[Path]) -> list[str]:
    """Return the command that runs `command` with a hostname, a /dev/shm and a /tmp that no other node has."""
    unshare = [shutil.which("unshare") or "unshare", "--mount", "--uts", "--propagation", "private"]
    return [*unshare, str(root / "node.sh"), node, str(root), cgroup, *map(str, shared), "--", *command]


def find_shared_dirs(root: Path, *, shared: Iterable[str]) -> list[Path]:
    """Return what nodes see of the machine's /tmp: what every job needs of it, and `shared`."""
    home = Path(os.environ.get("HPCRL_HOME") or Path.home())
    wanted = [root, Path(sys.prefix), shipped_folder("jobs").parent, home, Path.cwd(), *map(Path, shared)]
    found = {path.resolve() for path in wanted if path.exists()}
    below = [path for path in found if _NODE_TMP in path.parents]
    return sorted(path for path in below if not any(other in path.parents for other in below))


def choose_tracking(*, is_strict: bool, binds_cpus: bool = False) -> list[str]:
    """Return the lines of slurm.conf: control groups that limit memory where there are some, else a watcher."""
    lines = list(_BY_PROCESS_TREE)
    if is_strict:
        lines = list(_BY_CGROUP) if _has_cgroups() else [*_BY_PROCESS_TREE, _MEMORY_WATCHER]
    return [_bind_cpus(line) if binds_cpus else line for line in lines]


def _bind_cpus(line: str) -> str:
    """Add the plugin that binds steps to CPUs to the line of task plugins."""
    if not line.startswith("TaskPlugin="):
        return line
    others = [name for name in line.removeprefix("TaskPlugin=").split(",") if name != "task/none"]
    return f"TaskPlugin={','.join(['task/affinity', *others])}"


def name_cgroup(token: str) -> str:
    """Return a name that no other lab of this machine has."""
    return f"hpcrl-lab-{token[:12]}"


def remove_cgroups(token: str) -> None:
    """Remove the control groups of a lab whose processes have ended; the kernel keeps those that are in use."""
    for controller in CGROUP_CONTROLLERS:
        for folder, _, _ in os.walk(_CGROUP_ROOT / controller / name_cgroup(token), topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)  # noqa: PTH106 - a path from os.walk


def _has_cgroups() -> bool:
    """Return whether Slurm can use control groups of version 1 here."""
    return all(os.access(_CGROUP_ROOT / name / "tasks", os.W_OK) for name in CGROUP_CONTROLLERS)
