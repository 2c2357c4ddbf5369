"""A running lab as the tests use it."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hpcrl.lab import lab as labs
from hpcrl.lab.conf import DEFAULT_CLUSTER, STRICT_CLUSTER, LabCluster
from hpcrl.system.files import read_json

WAIT_S = 90.0


@dataclass(frozen=True)
class Lab:
    """A running lab, with the commands that tests use."""

    state_dir: Path
    cluster: LabCluster = DEFAULT_CLUSTER

    @property
    def environment(self) -> dict[str, str]:
        """Return the caller's environment, set to use this lab and no other Slurm."""
        foreign = ("SLURM", "SBATCH", "SRUN", "SALLOC", "SQUEUE", "SINFO", "SACCT")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return kept | labs.make_environment(self.state_dir)

    def run(self, *command: str) -> str:
        """Run a command and return its output; fail with its output if it fails."""
        done = self.try_run(*command)
        assert done.returncode == 0, f"{command}: {done.returncode}: {done.stderr}"
        return done.stdout.strip()

    def try_run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command that may fail."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=WAIT_S, check=False
        )

    def submit(self, folder: Path, body: str, *options: str) -> str:
        """Submit a script that writes to `folder`/out; return the job's id."""
        script = folder / "job.sh"
        script.write_text(f"#!/bin/bash\n{body}\n")
        return self.run("sbatch", "--parsable", f"--output={folder}/out", f"--chdir={folder}", *options, str(script))

    def accounted(self, job: str, *options: str) -> list[dict[str, str]]:
        """Return the rows of sacct for a job, without steps."""
        fields = ("JobID", "State", "Partition", "NodeList", "AllocTRES")
        table = self.run("sacct", "-X", "-n", "-P", f"--format={','.join(fields)}", f"--jobs={job}", *options)
        return [dict(zip(fields, line.split("|"), strict=True)) for line in table.splitlines()]

    def wait_accounted(self, job: str, *states: str) -> list[dict[str, str]]:
        """Wait until the rows have exactly these states, and return them."""
        until(lambda: sorted(row["State"].split()[0] for row in self.accounted(job)) == sorted(states))
        return self.accounted(job)

    def list_shared_memory(self) -> dict[str, list[str]]:
        """Return what each node of a strict lab has in its /dev/shm; nodes that are off, or have none, are left out."""
        found = {}
        for node in self.cluster.node_names() if self.cluster.is_strict else ():
            with contextlib.suppress(OSError, IndexError):
                if names := sorted(path.name for path in self.find_shared_memory(node).iterdir()):
                    found[node] = names
        return found

    def find_shared_memory(self, node: str) -> Path:
        """Return a node's /dev/shm as this process sees it."""
        if not self.cluster.is_strict:
            return Path("/dev/shm")
        daemons = {daemon["name"]: daemon["pid"] for daemon in read_json(self.state_dir / "lab.json")["daemons"]}
        keeper = daemons[f"slurmd-{node}"]
        child = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0]  # it has the node's namespaces
        return Path(f"/proc/{child}/root/dev/shm")

    def wait_state(self, job: str, state: str) -> None:
        until(lambda: self.run("squeue", "-h", "-o", "%T", f"--jobs={job}") == state)


def until(check: Callable[[], bool]) -> None:
    """Poll; the limit only keeps a broken lab from hanging the tests."""
    deadline = time.monotonic() + WAIT_S
    while not check():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


@contextlib.contextmanager
def short_dir() -> Iterator[Path]:
    """A directory whose path leaves room for the names of unix sockets (tmp_path does not)."""
    folder = Path(tempfile.mkdtemp(prefix="hpcrl-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def running_lab(shared: Path | None = None, **changes: int) -> Iterator[Lab]:
    """Start a lab as shipped, or as root a strict one whose nodes see `shared`; remove it afterwards."""
    cluster = replace(DEFAULT_CLUSTER, **changes)  # type: ignore[arg-type]
    if shared is not None and os.geteuid() == 0:
        cluster = replace(STRICT_CLUSTER, shared=(str(shared),), **changes)  # type: ignore[arg-type]
    with running_cluster(cluster) as lab:
        yield lab


@contextlib.contextmanager
def running_cluster(cluster: LabCluster) -> Iterator[Lab]:
    """Start a lab with these nodes and settings; remove it afterwards."""
    with short_dir() as folder:
        labs.up(folder / "lab", cluster=cluster)
        try:
            yield Lab(folder / "lab", cluster)
        finally:
            labs.down(folder / "lab")
