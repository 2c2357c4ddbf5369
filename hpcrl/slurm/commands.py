"""Small jobs beside the campaign's own: one node each, preemptible, there only while there is work for them.

queue, begin            through sbatch; `begin` records the id
alive, cancel           through squeue and scancel; only recorded ids are ever asked about or ended
cancel_recorded         what a driver began that could not end it any more
"""

import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpcrl.errors import SlurmError

TIMEOUT_S = 30.0


def queue(script: Path, *options: str) -> str:
    """Hand a script to Slurm; returns the id of its job."""
    return _ask(["sbatch", "--parsable", *options, str(script)]).strip().partition(";")[0]


def begin(script: Path, *, record: Path) -> str:
    """The same; the id is in `record` by then."""
    id = queue(script)
    with os.fdopen(os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w") as file:
        file.write(f"{id}\n")
    return id


def alive(ids: Sequence[str]) -> dict[str, bool] | None:
    """Of jobs that wait or run, whether they run; what has ended is absent. None: Slurm did not answer."""
    if not ids:
        return {}
    try:
        rows = _ask(["squeue", "-h", "--me", "-o", "%A %T"]).split("\n")
    except SlurmError:
        return None
    states = dict(row.split(maxsplit=1) for row in rows if row)
    return {id: states[id].strip() == "RUNNING" for id in ids if id in states and states[id].strip() != "COMPLETING"}


def cancel(ids: Iterable[str]) -> None:
    """End jobs; those that have ended already are no matter."""
    wanted = list(ids)
    if wanted:
        _ask(["scancel", *wanted])


def cancel_recorded(record: Path) -> None:
    """End the jobs in `record` that still wait or run; SlurmError if Slurm does not answer."""
    try:
        ids = record.read_text().split()
    except FileNotFoundError:
        return
    left = alive(ids)
    if left is None:
        raise SlurmError(f"squeue did not say which jobs of {record} are left: scancel {' '.join(ids)}")
    cancel(left)


def _ask(command: list[str]) -> str:
    # What Slurm said of our own job must not become options of another one.
    environ = {name: value for name, value in os.environ.items() if not _is_ours(name)}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
            env=environ,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SlurmError(f"{command[0]} did not answer inside the job: {error}") from error
    if done.returncode:
        raise SlurmError(f"{command[0]} refused inside the job: {done.stderr.strip()}")
    return done.stdout


def _is_ours(name: str) -> bool:
    return name.startswith(("SLURM_", "SBATCH_", "SRUN_")) and name != "SLURM_CONF"
