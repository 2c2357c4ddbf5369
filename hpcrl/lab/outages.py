"""Outages of a running lab, made on command: a controller that falls silent, a node that loses power.

    break_part   stop slurmctld, which then answers no command; or kill everything on a node
    restore_part    let slurmctld continue; or start the node again, as after a reboot
    CONTROLLER   the name of slurmctld

A node that starts again has an empty /dev/shm in a strict lab. Slurm takes a node for down after a minute of silence
(SlurmdTimeout); of one that starts again before that, it misses the steps that ran there only after a while.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

import msgspec

from hpcrl.errors import LabError
from hpcrl.lab import daemons
from hpcrl.lab.conf import LabCluster, LabDir
from hpcrl.lab.daemons import LabDaemon
from hpcrl.lab.lab import hold_lock, read_record, resolve_lab_dir
from hpcrl.lab.start import LabRecord, LabStartup
from hpcrl.system.processes import list_descendants

CONTROLLER = "slurmctld"
_END_TIMEOUT_S = 10.0


def break_part(state_dir: Path, part: str) -> None:
    """Stop the controller, or kill all processes of a node."""
    lab = resolve_lab_dir(state_dir)
    with hold_lock(lab):
        record = _require_record(lab)
        if part == CONTROLLER:
            os.kill(_find_daemon(record, CONTROLLER).pid, signal.SIGSTOP)
        else:
            _kill_node(lab, record, node=part)


def restore_part(state_dir: Path, part: str) -> None:
    """Let the controller continue, or start a node whose slurmd has ended; what works is left alone."""
    lab = resolve_lab_dir(state_dir)
    with hold_lock(lab):
        record = _require_record(lab)
        if part == CONTROLLER:
            os.kill(_find_daemon(record, CONTROLLER).pid, signal.SIGCONT)
        elif not _find_daemon(record, f"slurmd-{part}").is_alive():
            _kill_node(lab, record, node=part)  # steps outlive their slurmd, but no reboot
            cluster = msgspec.convert(record.cluster, LabCluster)
            LabStartup(lab, cluster=cluster, record=record).restart_node(part)


def _require_record(lab: LabDir) -> LabRecord:
    record = read_record(lab)
    if record is None or not record.complete:
        raise LabError(f"the lab in {lab.root} is not up: `hpcrl lab up` first")
    return record


def _find_daemon(record: LabRecord, name: str) -> LabDaemon:
    found = [daemon for daemon in record.daemons if daemon.name == name]
    if not found:
        names = sorted(one.name.removeprefix("slurmd-") for one in record.daemons if one.name.startswith("slurmd-"))
        raise LabError(f"the lab has no node {name.removeprefix('slurmd-')!r}: it has {CONTROLLER}, {', '.join(names)}")
    return found[0]


def _kill_node(lab: LabDir, record: LabRecord, *, node: str) -> None:
    """Kill the slurmd of a node and all that runs there, until nothing is left."""
    keeper = _find_daemon(record, f"slurmd-{node}")
    namespace = _read_namespace(keeper)
    deadline = time.monotonic() + _END_TIMEOUT_S
    while True:
        found = daemons.find_processes(record.make_marks(lab))
        below = set(list_descendants(keeper.pid)) if keeper.is_alive() else set()  # slurmstepd has no other mark
        left = {
            pid: ticks
            for pid, ticks in found.items()
            if pid in below or _is_on_node(pid, node=node, namespace=namespace)
        }
        if keeper.is_alive():
            left[keeper.pid] = keeper.ticks
        if not left:
            return
        if time.monotonic() > deadline:
            raise LabError(f"processes {sorted(left)} of {node} do not end; see ps -o pid,stat,wchan")
        for pid in sorted(left, key=lambda pid: _choose_turn(pid, keeper=keeper)):
            daemons.kill_process(pid, ticks=left[pid])
        time.sleep(0.02)


def _choose_turn(pid: int, *, keeper: LabDaemon) -> int:
    """Kill Slurm's processes first, or they report how tasks ended, and the keeper last, the parent of orphans."""
    if pid == keeper.pid:
        return 2
    with contextlib.suppress(OSError):
        return int(not Path(f"/proc/{pid}/comm").read_text().startswith("slurm"))
    return 1


def _read_namespace(keeper: LabDaemon) -> str:
    """Return the mount namespace of a node of a strict lab; empty if it shares that of this process or is gone."""
    with contextlib.suppress(OSError, IndexError):
        child = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()[0]
        found = os.readlink(f"/proc/{child}/ns/mnt")  # noqa: PTH115 - a link without a target
        return "" if found == os.readlink("/proc/self/ns/mnt") else found  # noqa: PTH115
    return ""


def _is_on_node(pid: int, *, node: str, namespace: str) -> bool:
    """Return whether a process of the lab runs on a node, by its namespace or its environment."""
    with contextlib.suppress(OSError):
        if namespace and os.readlink(f"/proc/{pid}/ns/mnt") == namespace:  # noqa: PTH115
            return True
        return f"SLURMD_NODENAME={node}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False
