"""A running lab as the tests use it."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcrl.lab import lab as labs

WAIT_S = 90.0


@dataclass(frozen=True)
class Lab:
    """A running lab, and what tests ask of it."""

    state_dir: Path

    @property
    def environment(self) -> dict[str, str]:
        """The caller's environment, pointed at this lab and at nothing else of Slurm's."""
        foreign = ("SLURM", "SBATCH", "SRUN", "SALLOC", "SQUEUE", "SINFO", "SACCT")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return kept | labs.make_environment(self.state_dir)

    def run(self, *command: str) -> str:
        """What a command prints; a command that fails is an error that shows what it said."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert done.returncode == 0, f"{command}: {done.returncode}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, folder: Path, body: str, *options: str) -> str:
        """Submit a script that writes to `folder`/out; the job's id."""
        script = folder / "job.sh"
        script.write_text(f"#!/bin/bash\n{body}\n")
        return self.run("sbatch", "--parsable", f"--output={folder}/out", f"--chdir={folder}", *options, str(script))

    def accounted(self, job: str, *options: str) -> list[dict[str, str]]:
        """sacct's rows for a job, without steps."""
        fields = ("JobID", "State", "Partition", "NodeList", "AllocTRES")
        table = self.run("sacct", "-X", "-n", "-P", f"--format={','.join(fields)}", f"--jobs={job}", *options)
        return [dict(zip(fields, line.split("|"), strict=True)) for line in table.splitlines()]

    def wait_accounted(self, job: str, *states: str) -> list[dict[str, str]]:
        """The rows, as soon as there are as many as `states` and they are in these states."""
        until(lambda: sorted(row["State"].split()[0] for row in self.accounted(job)) == sorted(states))
        return self.accounted(job)

    def wait_state(self, job: str, state: str) -> None:
        until(lambda: self.run("squeue", "-h", "-o", "%T", f"--jobs={job}") == state)


def until(check: Callable[[], bool]) -> None:
    """Poll; the limit only keeps a broken lab from hanging the tests."""
    deadline = time.monotonic() + WAIT_S
    while not check():
        assert time.monotonic() < deadline, "waited in vain"
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
def running_lab() -> Iterator[Lab]:
    """A lab as shipped, gone afterwards."""
    with short_dir() as folder:
        labs.up(folder / "lab")
        try:
            yield Lab(folder / "lab")
        finally:
            labs.down(folder / "lab")
