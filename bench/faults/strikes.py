"""The faults of the chaos bench, drawn at random: to processes, to the file system, to nodes.

ChaosFault    one fault, and what followed
make_fault    choose one, and make it
PAUSES_S      how long a process stands still, or a file system fails
CampaignGoneError   the campaign has no process that could be struck
"""

import contextlib
import errno
import random
import signal
import time
from dataclasses import dataclass, field

import psutil

from bench.faults.places import CampaignPlace

PAUSES_S = (0.5, 8.0)
"""The shortest and the longest pause: below most of the times after which something is taken for dead."""
_PROCESSES_TIMEOUT_S = 5.0
_SIGNALS, _SIGNAL_WEIGHTS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM), (5, 3, 2)
_DISK_SHARE, _OUTAGE_SHARE = 0.2, 0.3
_DISK_ERRORS = {
    "ESTALE": (errno.ESTALE, "r"),
    "EIO": (errno.EIO, "rw"),
    "ENOSPC": (errno.ENOSPC, "w"),
    "EDQUOT": (errno.EDQUOT, "w"),
    "EROFS": (errno.EROFS, "w"),
    "lag": (0, "rw"),
    "hang": (0, "rw"),
}
_LAG_MS = {"lag": 200, "hang": -1}


class CampaignGoneError(Exception):
    """The campaign has no process that could be struck."""


@dataclass
class ChaosFault:
    """One fault, and what followed."""

    kind: str
    """A signal, "disk ERROR", or what only a lab has."""
    victim: str
    pause_s: float = 0.0
    job: int = 0
    at: float = 0.0
    ended_job: bool = False
    recovered_s: float | None = None
    """The time until another step was made."""
    freed_s: float | None = None
    """The time from the fault until nothing of a job that ended was left: no process, no job in Slurm's queue."""
    outcome: str = ""
    """That of the job, if it ended."""
    violations: list[str] = field(default_factory=list)


def make_fault(
    place: CampaignPlace, rng: random.Random, *, job: int, pauses_s: tuple[float, float] = PAUSES_S
) -> ChaosFault:
    """Choose a fault and make it; return after its pause."""
    time.sleep(rng.uniform(0.0, 3.0))
    draw = rng.random()
    if place.outages and draw < _OUTAGE_SHARE:
        return _strike_place(place, rng, job=job)
    if place.disk is not None and draw > 1.0 - _DISK_SHARE:
        return _fail_disk(place, rng, job=job, pauses_s=pauses_s)
    return _send_signal(place, rng, job=job, pauses_s=pauses_s)


def _strike_place(place: CampaignPlace, rng: random.Random, *, job: int) -> ChaosFault:
    kind = rng.choice(place.outages)
    targets = place.list_targets(kind)
    if not targets:
        return _send_signal(place, rng, job=job)
    fault = ChaosFault(kind=kind, victim=rng.choice(targets), job=job, at=time.time())
    place.strike(kind, victim=fault.victim)
    return fault


def _fail_disk(place: CampaignPlace, rng: random.Random, *, job: int, pauses_s: tuple[float, float]) -> ChaosFault:
    """Let calls fail for all processes, or for one."""
    assert place.disk is not None
    name = rng.choice(sorted(_DISK_ERRORS))
    error, kinds = _DISK_ERRORS[name]
    processes = _await_processes(place)
    program = rng.choice(sorted(processes))
    pid = rng.choice(processes[program]).pid if rng.random() < 0.5 else None
    fault = ChaosFault(kind=f"disk {name}", victim=program if pid else "all", job=job, at=time.time())
    fault.pause_s = round(rng.uniform(*pauses_s), 2)
    where = str(pid) if pid else ""
    with place.disk.fail_calls(error, kinds=kinds, lag_ms=_LAG_MS.get(name, 0), where=where):
        time.sleep(fault.pause_s)
    return fault


def _send_signal(
    place: CampaignPlace, rng: random.Random, *, job: int, pauses_s: tuple[float, float] = PAUSES_S
) -> ChaosFault:
    """Choose a program, one of its processes, and a signal."""
    processes = _await_processes(place)
    program = rng.choice(sorted(processes))
    kind = rng.choices(_SIGNALS, _SIGNAL_WEIGHTS)[0]
    fault = ChaosFault(kind=kind.name, victim=program, job=job, at=time.time())
    victim = rng.choice(processes[program])
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.send_signal(kind)
        if kind == signal.SIGSTOP:
            fault.pause_s = round(rng.uniform(*pauses_s), 2)
            time.sleep(fault.pause_s)
            victim.send_signal(signal.SIGCONT)
    return fault


def _await_processes(place: CampaignPlace) -> dict[str, list[psutil.Process]]:
    """Return the processes of the campaign once there are some: a job may have ended by itself just now."""
    deadline = time.monotonic() + _PROCESSES_TIMEOUT_S
    while not (processes := place.find_processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    if not processes:
        raise CampaignGoneError("the campaign has no process: it ended by itself")
    return processes
