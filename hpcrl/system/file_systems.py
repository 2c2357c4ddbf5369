"""The file systems of this machine: which of them the nodes of a cluster share.

is_shared_path        whether nodes see what is at a path
may_hold_files        whether directories can be made there
NETWORK_FILE_SYSTEMS, KERNEL_TREES    types of file systems
"""

import os
import re
from functools import cache
from pathlib import Path

NETWORK_FILE_SYSTEMS = (
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "panfs", "wekafs", "orangefs", "pvfs2", "afs", "cifs", "smb3"),
    *("glusterfs", "fuse.glusterfs", "fuse.ceph", "fuse.beegfs", "fuse.sshfs", "dvs", "quobyte", "fuse.quobyte"),
)
"""Types of file systems that the nodes of a cluster share."""
KERNEL_TREES = ("proc", "sysfs", "cgroup", "cgroup2", "securityfs", "debugfs", "devpts")
"""Types of file systems that show the kernel's state and hold no files."""


def is_shared_path(path: str, *, beside: str) -> bool:
    """Return whether nodes see what is at `path`, which need not exist, given that they see the path `beside`."""
    if not path.startswith("/"):
        return False
    place = _find_existing(path)
    if beside.startswith("/") and place.stat().st_dev == _find_existing(beside).stat().st_dev:
        return True
    return _list_mount_types().get(place.stat().st_dev) in NETWORK_FILE_SYSTEMS


def may_hold_files(path: str) -> bool:
    """Return whether directories can be made at a path that does not exist yet, as far as that shows without trying."""
    place = _find_existing(str(Path(path).absolute()))
    return os.access(place, os.W_OK | os.X_OK) and _list_mount_types().get(place.stat().st_dev) not in KERNEL_TREES


def _find_existing(path: str) -> Path:
    """Return the nearest directory above a path, or itself, that exists."""
    return next(place for place in (Path(path), *Path(path).parents) if os.path.exists(place))  # noqa: PTH110 - long names


@cache
def _list_mount_types() -> dict[int, str]:
    """Return the types of the mounted file systems by their device numbers."""
    found = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if match := re.match(r"\d+ \d+ (\d+):(\d+) .* - (\S+) ", line):
            found[os.makedev(int(match[1]), int(match[2]))] = match[3]
    return found
