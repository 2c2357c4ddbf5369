"""Where the engine workers of a campaign listen: one 0600 file each, published when it is ready to serve."""

import secrets
from pathlib import Path

import msgspec

from hpcrl.system.files import publish_file


class EngineEndpoint(msgspec.Struct, frozen=True, kw_only=True):
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


def make_token() -> str:
    """A bearer token that cannot be guessed."""
    return secrets.token_urlsafe(32)


def announce_endpoint(directory: Path, endpoint: EngineEndpoint) -> Path:
    """Publish an endpoint; the file's name is its worker's."""
    path = directory / f"{endpoint.worker}.json"
    publish_file(path, msgspec.json.encode(endpoint), mode=0o600)
    return path


def withdraw_endpoint(directory: Path, worker: str) -> None:
    """Take an endpoint away before its worker ends."""
    (directory / f"{worker}.json").unlink(missing_ok=True)


def list_endpoints(directory: Path) -> list[EngineEndpoint]:
    """The endpoints announced now, by worker name."""
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=EngineEndpoint))
        except FileNotFoundError:  # withdrawn between listing and reading
            continue
    return found
