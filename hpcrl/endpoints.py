"""Where the engine workers of a campaign listen: one 0600 file each, published when it is ready to serve."""

import fcntl
import os
import secrets
import socket
import struct
from pathlib import Path

import msgspec

from hpcrl.errors import ConfigError
from hpcrl.files import publish

SIOCGIFADDR = 0x8915


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One engine worker that answers requests."""

    role: str
    worker: str
    """Unique in the campaign, such as `000-decode-1` (job, role, index)."""
    node: str
    url: str
    token: str
    """Every request must carry it as `Authorization: Bearer`."""
    job: int = 0
    gpu: str | None = None
    """Its kind in the hardware catalogue; None on CPUs."""
    num_gpus: int = 0


def this_node() -> str:
    """Slurm's name of this node where there is one: simulated nodes share one host."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def new_token() -> str:
    """A bearer token that cannot be guessed."""
    return secrets.token_urlsafe(32)


def announce(directory: Path, endpoint: Endpoint) -> Path:
    """Publish an endpoint; the file's name is its worker's."""
    path = directory / f"{endpoint.worker}.json"
    publish(path, msgspec.json.encode(endpoint), mode=0o600)
    return path


def withdraw(directory: Path, worker: str) -> None:
    """Take an endpoint away before its worker ends."""
    (directory / f"{worker}.json").unlink(missing_ok=True)


def listed(directory: Path) -> list[Endpoint]:
    """The endpoints announced now, by worker name."""
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=Endpoint))
        except FileNotFoundError:  # withdrawn between listing and reading
            continue
    return found


def free_address(host: str) -> tuple[str, int]:
    """A port of `host` that nobody uses now, for a program that cannot be given an open socket."""
    with socket.create_server((host, 0)) as probe:
        return host, int(probe.getsockname()[1])


def address_of(interface: str | None) -> str:
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
