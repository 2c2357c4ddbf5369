"""The versions of the weights in a directory: names and manifests only, nothing heavy is imported.

DIRECTORY/v00000007/      a version; it is renamed to this last, so it is complete
  model.safetensors
  manifest.json
DIRECTORY/newest.json     the newest version that the trainer has made; it may be in windows only
DIRECTORY/transport.json  the transport to the engines: windows, windows with couriers between nodes, or files
"""

import contextlib
import re
from pathlib import Path
from typing import Literal

import msgspec

from hpcrl.errors import WeightsError
from hpcrl.system.files import publish_file

_VERSION_NAME = re.compile(r"v(\d{8,})")


class VersionManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a version; it is published last, so a version without it does not exist."""

    version: int
    step: int
    """The training step that made it; after a crash and a resume, steps go back but versions do not."""
    checksums: dict[str, str]
    """The xxh3_128 of every tensor's bytes."""
    created: float
    """Seconds since the epoch."""


TransportName = Literal["window", "mpi", "tcp", "files"]


class Transport(msgspec.Struct, frozen=True, kw_only=True):
    """The way versions reach the engines; files, the last in the fallback order, always work."""

    name: TransportName
    """window: all workers are on one node - mpi, tcp: couriers transfer between nodes - files: all is in files."""
    reason: str


class WeightVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version that the trainer has made, and the training step that made it."""

    version: int
    step: int


def announce_version(directory: Path, weight_version: WeightVersion) -> None:
    """Record that a version exists, before any process can read it: its number is never reused for other weights."""
    publish_file(directory / "newest.json", msgspec.json.encode(weight_version))


def find_newest_version(directory: Path) -> int | None:
    """Return the newest version that the trainer has made, wherever it is stored; None before the first."""
    versions = list_versions(directory)
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):  # a damaged record counts as none
        versions.append(msgspec.json.decode((directory / "newest.json").read_bytes(), type=WeightVersion).version)
    return max(versions, default=None)


def write_transport(directory: Path, transport: Transport) -> None:
    """Record the transport that every worker uses from now on."""
    publish_file(directory / "transport.json", msgspec.json.encode(transport))


def read_transport(directory: Path) -> Transport | None:
    """Read the transport in use; None if none is recorded, and then versions are read from files."""
    try:
        return msgspec.json.decode((directory / "transport.json").read_bytes(), type=Transport)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def check_newer(version: int, *, newest: int | None) -> None:
    """Raise WeightsError unless a version may follow the newest."""
    if version < 0 or (newest is not None and version <= newest):
        raise WeightsError(f"version {version} cannot be published: {newest} is the newest, and versions never go back")


def version_dir(directory: Path, version: int) -> Path:
    """Return the directory of a version."""
    return directory / f"v{version:08d}"


def tensors_file(directory: Path, version: int) -> Path:
    return version_dir(directory, version) / "model.safetensors"


def manifest_file(directory: Path, version: int) -> Path:
    return version_dir(directory, version) / "manifest.json"


def list_versions(directory: Path) -> list[int]:
    """List the complete versions, oldest first; this lists one small directory."""
    try:
        names = [path.name for path in directory.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _VERSION_NAME.fullmatch(name)))


def read_manifest(directory: Path, version: int) -> VersionManifest:
    """Read the manifest of a version; WeightsError if the version is absent or its manifest is damaged."""
    path = manifest_file(directory, version)
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=VersionManifest)
    except FileNotFoundError:
        available = ", ".join(map(str, list_versions(directory))) or "none"
        raise WeightsError(
            f"version {version} is not in {directory} (available: {available}): load the newest"
        ) from None
    except msgspec.DecodeError as error:
        raise WeightsError(f"{path} is damaged ({error}): remove {path.parent}") from None
    if manifest.version != version:
        raise WeightsError(f"{path} is the manifest of version {manifest.version}: remove {path.parent}")
    return manifest


def find_newest_manifest(directory: Path) -> VersionManifest | None:
    """Find the newest version in a directory that may be changing: one pruned after the listing is skipped."""
    for version in reversed(list_versions(directory)):
        if manifest_file(directory, version).exists():
            return read_manifest(directory, version)
    return None
