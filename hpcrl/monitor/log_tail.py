"""Read the ends of a job's logs.

list_role_logs            the logs of a role of a job
read_last_lines           the last lines of one
read_from, split_lines    what was added to one, and text as lines without controls
ROLE_LOGS, TAIL_BYTES     names of logs, a limit
"""

from pathlib import Path

from hpcrl.campaign_dir.paths import JobDir
from hpcrl.errors import CampaignError
from hpcrl.system.files import measure_file
from hpcrl.system.terminal import escape_controls

ROLE_LOGS = {"driver": "batch"}
"""Logs that are named otherwise than their role."""
TAIL_BYTES = 1 << 20
"""The end of a log in which its last lines are looked for."""


def list_role_logs(job: JobDir, role: str | None) -> list[Path]:
    """Return the logs of a role, None: of all."""
    name = ROLE_LOGS.get(role or "", role)
    return sorted(job.logs.glob(f"{name}*.log" if name else "*.log"))


def read_last_lines(path: Path, num_lines: int) -> tuple[list[str], int]:
    """Return the last lines of a log, and its size."""
    text, size = read_from(path, max(measure_file(path) - TAIL_BYTES, 0))
    return split_lines(text)[-num_lines:] if num_lines > 0 else [], size


def read_from(path: Path, offset: int) -> tuple[str, int]:
    """Return what a log has from an offset on, and where it ends."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except OSError as error:
        raise CampaignError(f"{path} cannot be read: {error.strerror}") from error
    return data.decode(errors="replace"), offset + len(data)


def split_lines(text: str) -> list[str]:
    """Split into lines; of a line that was written over and over, as progress bars are, the last state is left."""
    lines = text.replace("\r\n", "\n").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return [escape_controls(line.rstrip("\r").rpartition("\r")[2]) for line in lines]
