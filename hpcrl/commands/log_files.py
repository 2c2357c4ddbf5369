"""Print the logs of a campaign's last job, and follow them: `hpcrl logs`.

show_logs       print the last lines of each log of a role
follow_logs     continue to print what is added, until the job ends
"""

import time
from pathlib import Path

from hpcrl.campaign import directory
from hpcrl.campaign_dir.paths import CampaignDir, JobDir
from hpcrl.commands.event_list import FOLLOW_INTERVAL_S
from hpcrl.config.toml import suggest_name
from hpcrl.errors import CampaignError
from hpcrl.system.terminal import escape_controls, print_line

ROLE_LOGS = {"driver": "batch"}
"""Logs that are named otherwise than their role."""
TAIL_BYTES = 1 << 20
"""The end of a log in which its last lines are looked for."""


def show_logs(campaign: CampaignDir, *, role: str | None, num_lines: int, follow: bool = False) -> None:
    """Print the last lines of each log of a role (None: of all) of the last job that has logs."""
    jobs = directory.list_jobs(campaign)
    job = next((job for job in reversed(jobs) if any(job.logs.glob("*.log"))), jobs[-1])  # the last may be queued
    logs = _find_logs(job, role)
    offsets: dict[Path, int] = {}
    for path in logs:
        lines, offsets[path] = _read_last_lines(path, num_lines)
        print_line(f"== {path}" + ("" if lines else " (empty)"))
        for line in lines:
            print_line(line)
    if follow:
        follow_logs(job, role=role, offsets=offsets)


def follow_logs(job: JobDir, *, role: str | None, offsets: dict[Path, int]) -> None:
    """Print what is added to the logs, also to new ones, until the job has ended."""
    last: Path | None = None
    while True:
        has_ended = job.outcome.exists()
        for path in _list_logs(job, role):
            text, offsets[path] = _read_from(path, offsets.get(path, 0))
            if text and path != last:
                print_line(f"== {path}")
                last = path
            for line in _split_lines(text):
                print_line(line)
        if has_ended:
            return
        time.sleep(FOLLOW_INTERVAL_S)


def _find_logs(job: JobDir, role: str | None) -> list[Path]:
    logs = _list_logs(job, role)
    if logs:
        return logs
    named = {name: other for other, name in ROLE_LOGS.items()}
    stems = {path.stem.rpartition("-")[0] or path.stem for path in job.logs.glob("*.log")}
    present = sorted(named.get(stem, stem) for stem in stems)
    if not present:
        raise CampaignError(f"job {job.number} of {job.campaign.name} has no logs yet in {job.logs}")
    hint = suggest_name(role or "", present)
    raise CampaignError(
        f"job {job.number} of {job.campaign.name} has no log of {role!r}: {hint}it has {', '.join(present)}"
    )


def _list_logs(job: JobDir, role: str | None) -> list[Path]:
    name = ROLE_LOGS.get(role or "", role)
    return sorted(job.logs.glob(f"{name}*.log" if name else "*.log"))


def _read_last_lines(path: Path, num_lines: int) -> tuple[list[str], int]:
    """Return the last lines of a log, and its size."""
    text, size = _read_from(path, max(_size(path) - TAIL_BYTES, 0))
    return _split_lines(text)[-num_lines:] if num_lines > 0 else [], size


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read_from(path: Path, offset: int) -> tuple[str, int]:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except OSError as error:
        raise CampaignError(f"{path} cannot be read: {error.strerror}") from error
    return data.decode(errors="replace"), offset + len(data)


def _split_lines(text: str) -> list[str]:
    """Split into lines; of a line that was written over and over, as progress bars are, the last state is left."""
    lines = text.replace("\r\n", "\n").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return [escape_controls(line.rstrip("\r").rpartition("\r")[2]) for line in lines]
