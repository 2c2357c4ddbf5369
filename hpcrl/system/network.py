"""The name and addresses of this node, and free ports on it."""

import fcntl
import os
import socket
import struct

from hpcrl.errors import ConfigError

SIOCGIFADDR = 0x8915


def current_node() -> str:
    """Return Slurm's name of this node where it has one (simulated nodes share one host), else the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def find_free_address(host: str) -> tuple[str, int]:
    """Return a port of `host` that is free now, for a program that cannot be given an open socket."""
    with socket.create_server((host, 0)) as probe:
        return host, int(probe.getsockname()[1])


def find_bind_address(interface: str | None) -> str:
    """Return the IPv4 address to bind to: that of the site's interface, else the one the host name resolves to."""
    if interface is None:
        return socket.gethostbyname(socket.gethostname())
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"network.interface = {interface!r} has no address on {socket.gethostname()} "
                f"({error.strerror}); it has {names}: correct it in the site file"
            ) from error
    return socket.inet_ntoa(answer[20:24])
