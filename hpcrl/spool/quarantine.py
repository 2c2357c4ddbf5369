"""Damaged segments, put aside: out of every reader's sight, and with the reason beside them.

SPOOL/quarantine/NAME          the segment as it was found
SPOOL/quarantine/NAME.reason   why, in words

Nothing is deleted. A scored segment that is put aside is scored again from its twin in "rollouts".
"""

import os
from pathlib import Path

from hpcrl.files import private_dir, publish
from hpcrl.spool.names import announce

DIRECTORY = "quarantine"


def quarantine(path: Path, reason: str) -> str:
    """Move a segment aside; returns the reason with what became of it. What cannot be moved stays where it is."""
    place = place_of(path)
    try:
        private_dir(place.parent)
        publish(place.with_name(f"{place.name}.reason"), reason + "\n")
        os.rename(path, place)  # noqa: PTH104 - a second copy takes the place of the first
    except FileNotFoundError:
        return f"{reason}: somebody else put it aside"
    except OSError as error:
        return f"{reason}: it could not be put aside ({error.strerror}) and is passed over"
    announce(path.parent, went=[path.name])
    return f"{reason}: it was moved to {str(place)!r}"


def place_of(path: Path) -> Path:
    """Where a segment lies once it is put aside."""
    return path.parent / DIRECTORY / path.name
