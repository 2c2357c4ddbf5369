"""The events of a campaign as its files have them.

read_events  all lines so far
"""

from pathlib import Path
from typing import Any

from hpcrl.campaign_dir.event_log import EventReader


def read_events(directory: Path) -> list[dict[str, Any]]:
    """Return all lines of a campaign so far, in order of time."""
    return sorted(EventReader(directory).poll_lines(), key=lambda event: float(event.get("time", 0.0)))
