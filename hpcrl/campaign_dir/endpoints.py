"""The endpoints of the engine workers: one 0600 file each, published when the worker is ready to serve.

EngineEndpoint                          the record
announce_endpoint, withdraw_endpoint    publish and remove it
list_endpoints                          read all
make_token                              its bearer token
"""

import secrets
from pathlib import Path

import msgspec

from hpcrl.system.files import publish_file


class EngineEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An engine worker that serves requests."""

    role: str
    worker: str
    """Unique in the campaign, such as `000-decode-1` (job, role, index)."""
    node: str
    url: str
    token: str
    """Every request must carry it as `Authorization: Bearer`."""
    job: int = 0
    gpu: str | None = None
    """GPU type in the hardware catalogue; None on CPUs."""
    num_gpus: int = 0


def make_token() -> str:
    """Return a bearer token that cannot be guessed."""
    return secrets.token_urlsafe(32)


def announce_endpoint(directory: Path, endpoint: EngineEndpoint) -> Path:
    """Publish an endpoint in a file named after its worker."""
    path = directory / f"{endpoint.worker}.json"
    publish_file(path, msgspec.json.encode(endpoint), mode=0o600)
    return path


def withdraw_endpoint(directory: Path, worker: str) -> None:
    """Remove an endpoint before its worker ends."""
    (directory / f"{worker}.json").unlink(missing_ok=True)


def list_endpoints(directory: Path) -> list[EngineEndpoint]:
    """Return the endpoints announced now, sorted by worker name."""
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=EngineEndpoint))
        except FileNotFoundError:  # withdrawn between listing and reading
            continue
    return found
