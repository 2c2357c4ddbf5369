"""This node's name and addresses, and free ports on it."""

import fcntl
import os
import socket
import struct

from hpcrl.errors import ConfigError

SIOCGIFADDR = 0x8915


def current_node() -> str:
    """Slurm's name of this node where there is one: simulated nodes share one host."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def find_free_address(host: str) -> tuple[str, int]:
    """A port of `host` that nobody uses now, for a program that cannot be given an open socket."""
    with socket.create_server((host, 0)) as probe:
        return host, int(probe.getsockname()[1])


def find_bind_address(interface: str | None) -> str:
    """The IPv4 address to bind to: of the site's interface, else the one this host's name stands for."""
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
                f"({error.strerror}); it has {names}: mend it in the site file"
            ) from error
    return socket.inet_ntoa(answer[20:24])
