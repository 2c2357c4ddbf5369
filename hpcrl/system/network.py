"""The name and addresses of this node, and free ports on it."""

import contextlib
import fcntl
import math
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from hpcrl.errors import ConfigError

SIOCGIFADDR = 0x8915
LOOPBACK = "127."
LOOPBACK_INTERFACE = "lo"
INFINIBAND_TYPE = "32"
"""The kernel's number of that kind of interface."""


def current_node() -> str:
    """Return Slurm's name of this node where it has one (simulated nodes share one host), else the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def find_free_address(host: str) -> tuple[str, int]:
    """Return a port of `host` that is free now, for a program that cannot be given an open socket."""
    with socket.create_server((host, 0)) as probe:
        return host, int(probe.getsockname()[1])


def find_bind_address(wanted: Sequence[str]) -> str:
    """Return the IPv4 address to bind to: that of the site's interface, else the one the host name resolves to."""
    return find_interface(wanted)[1]


def find_interface(wanted: Sequence[str]) -> tuple[str | None, str]:
    """Return the first of these interfaces that this node has, and its IPv4 address; a name may end with `*`.

    Without names it is the one with the address of the host's name. Many images resolve that to the loopback, where
    other nodes reach nothing: then it is the only other one, if there is only one.
    """
    present = _list_addresses()
    if not wanted:
        address = socket.gethostbyname(socket.gethostname())
        others = {name: own for name, own in present.items() if not own.startswith(LOOPBACK)}
        if not address.startswith(LOOPBACK):
            return next((name for name, own in present.items() if own == address), None), address
        if len(others) == 1:
            return next(iter(others.items()))
        raise ConfigError(
            f"the name {socket.gethostname()} resolves to {address}, where other nodes reach nothing: set "
            f"network.interface in the site file ({_describe_addresses(present)})"
        )
    for pattern in wanted:
        for name, address in present.items():
            if fnmatchcase(name, pattern):
                return name, address
    shown = wanted[0] if len(wanted) == 1 else list(wanted)
    raise ConfigError(
        f"network.interface = {shown!r} has no address on {socket.gethostname()} "
        f"({_describe_addresses(present)}): correct it in the site file"
    )


def find_faster_interface(name: str | None, *, devices: Path = Path("/sys/class/net")) -> str | None:
    """Return the fastest interface of this node with an address, if it is faster than the one with this name."""
    speeds = {one: _read_speed(devices / one) for one, own in _list_addresses().items() if not own.startswith(LOOPBACK)}
    fastest = max(speeds, key=lambda one: speeds[one], default=None)
    return None if fastest is None or name not in speeds or speeds[fastest] <= speeds[name] else fastest


def _read_speed(device: Path) -> float:
    """Return the Mb/s of an interface; 0 if it does not name them, and more than any for InfiniBand."""
    with contextlib.suppress(OSError):
        if (device / "type").read_text().strip() == INFINIBAND_TYPE:
            return math.inf
    with contextlib.suppress(OSError, ValueError):  # a virtual one names none, or -1
        return max(float((device / "speed").read_text()), 0.0)
    return 0.0


def is_reachable(host: str, port: int, *, timeout_s: float = 3.0) -> bool:
    """Return whether a server accepts a connection."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def _list_addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has none
                found[name] = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
    return found


def _describe_addresses(present: Mapping[str, str]) -> str:
    return "it has " + (", ".join(f"{name} {address}" for name, address in present.items()) or "no address")
