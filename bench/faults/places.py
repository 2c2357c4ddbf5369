"""Where a campaign of the chaos bench runs.

LocalPlace   this machine
LabPlace     a strict lab, with a real Slurm
FaultyDisk   the library that makes calls of all its processes fail on command
"""

import contextlib
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import psutil

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.lab import lab as labs
from hpcrl.lab import outages
from hpcrl.lab.conf import STRICT_CLUSTER
from hpcrl.system.files import read_json
from hpcrl.testing.faulty_disk import FaultyDisk
from hpcrl.weights.window.file import make_window_key

_COMMAND_TIMEOUT_S = 300.0


class CampaignPlace(Protocol):
    """Where a campaign runs."""

    name: str
    site_words: list[str]
    """The words that name the site for `hpcrl submit`."""
    disk: FaultyDisk | None
    outages: list[str]
    """Kinds of faults that only this place has."""

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run one hpcrl command."""

    def find_processes(self) -> dict[str, list[psutil.Process]]:
        """Return all processes of the campaign, by what they run."""

    def is_over(self) -> bool:
        """Return whether no process and no job is left."""

    def list_shared_memory(self, campaign: CampaignDir) -> list[str]:
        """Return what a campaign has in shared memory."""

    def strike(self, kind: str, *, victim: str) -> None:
        """Make a fault that only this place has, and undo it after its time."""

    def list_targets(self, kind: str) -> list[str]:
        """Return what such a fault may strike."""


@dataclass
class LocalPlace:
    """This machine without a scheduler."""

    home: Path
    name: str = "local"
    site_words: list[str] = field(default_factory=lambda: ["--site", "local"])
    outages: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.disk = FaultyDisk.build(self.home / "campaigns", directory=self.home)

    @property
    def environ(self) -> dict[str, str]:
        return {"HPCRL_HOME": str(self.home)}

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hpcrl.cli", *words]
        preload = self.disk.environ if self.disk is not None else {}
        environ = os.environ | self.environ | preload
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, check=False, timeout=_COMMAND_TIMEOUT_S
        )

    def find_processes(self) -> dict[str, list[psutil.Process]]:
        found: dict[str, list[psutil.Process]] = defaultdict(list)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_own = process.environ().get("HPCRL_HOME") == str(self.home)
                if is_own and process.status() != psutil.STATUS_ZOMBIE and not _is_command(process.cmdline()):
                    found[_name_program(process.cmdline())].append(process)
        return found

    def is_over(self) -> bool:
        return not self.find_processes()

    def list_shared_memory(self, campaign: CampaignDir) -> list[str]:
        path = make_window_key(campaign, node=os.uname().nodename).path
        return [found.name for found in path.parent.glob(f"{path.name}*")]

    def strike(self, kind: str, *, victim: str) -> None:
        raise NotImplementedError(kind)

    def list_targets(self, kind: str) -> list[str]:
        raise NotImplementedError(kind)


@dataclass
class LabPlace(LocalPlace):
    """A strict lab: nodes that lose power, a controller that falls silent, jobs that are cancelled and preempted."""

    name: str = "lab"
    is_preemptible: bool = False
    """True if the campaign runs as one allocation in a partition whose jobs are preempted."""
    pause_s: float = 6.0
    """How long a node or the controller is away."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lab_dir = self.home / "lab"
        self.outages = ["node crash", "silent controller", "scancel"]
        self.site_words = ["--site", "lab"]
        if self.is_preemptible:
            self.outages.append("preemption")
            self.site_words = ["--site", "lab-hetstep", "-s", "site.partitions.h100.slurm_partition=spare"]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start the lab for a block."""
        before = os.environ.get("HPCRL_HOME")
        os.environ["HPCRL_HOME"] = str(self.home)
        try:
            labs.up(self.lab_dir, cluster=replace(STRICT_CLUSTER, shared=(str(self.home),)))
            yield
        finally:
            labs.down(self.lab_dir)
            os.environ.pop("HPCRL_HOME") if before is None else os.environ.update(HPCRL_HOME=before)

    @property
    def environ(self) -> dict[str, str]:
        return {"HPCRL_HOME": str(self.home), **labs.make_environment(self.lab_dir)}

    def is_over(self) -> bool:
        return not self._list_jobs("running,completing,configuring,pending") and not self.find_processes()

    def list_shared_memory(self, campaign: CampaignDir) -> list[str]:
        daemons = {one["name"]: one["pid"] for one in read_json(self.lab_dir / "lab.json")["daemons"]}
        found = []
        for node in STRICT_CLUSTER.node_names():
            keeper = daemons[f"slurmd-{node}"]
            with contextlib.suppress(OSError, IndexError):  # a node that has lost power has no memory
                child = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0]
                found += [f"{node}: {path.name}" for path in Path(f"/proc/{child}/root/dev/shm").iterdir()]
        return found

    def list_targets(self, kind: str) -> list[str]:
        if kind == "node crash":
            nodes = self._run("squeue", "-h", "-t", "running", "-o", "%N").split()
            return sorted(self._run("scontrol", "show", "hostnames", ",".join(nodes)).split()) if nodes else []
        return ["slurmctld"] if kind == "silent controller" else self._list_jobs("running")

    def list_allocations(self) -> dict[str, tuple[float, float]]:
        """Return the start and the end of every job that has ended, by its id, as Slurm accounts them."""
        table = self._run("env", "SLURM_TIME_FORMAT=%s", "sacct", "-X", "-n", "-P", "--format=JobIDRaw,Start,End")
        rows = [line.split("|") for line in table.splitlines()]
        return {id: (float(start), float(end)) for id, start, end in rows if start.isdigit() and end.isdigit()}

    def strike(self, kind: str, *, victim: str) -> None:
        match kind:
            case "node crash" | "silent controller":
                outages.break_part(self.lab_dir, victim)
                time.sleep(self.pause_s)
                outages.restore_part(self.lab_dir, victim)
            case "scancel":
                self._run("scancel", victim)
            case _:
                self._run("sbatch", "-p", "h100", "-N4", "--exclusive", "--mem=0", "-o/dev/null", "--wrap=true")
                time.sleep(self.pause_s)  # the job that must give way learns of it only now

    def _list_jobs(self, states: str) -> list[str]:
        return sorted(set(self._run("squeue", "-h", "-t", states, "-o", "%A").split()))

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            words, env=os.environ | self.environ, capture_output=True, text=True, check=False, timeout=60.0
        )
        return done.stdout if done.returncode == 0 else "unknown"


def _is_command(words: list[str]) -> bool:
    """Return whether a process is a command of a user, or Slurm's part of one."""
    return "hpcrl.cli" in words or (bool(words) and Path(words[0]).name in ("squeue", "sbatch", "scontrol", "scancel"))


def _name_program(words: list[str]) -> str:
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return Path(words[0]).name if words else "unknown"
