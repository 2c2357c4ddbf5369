"""Which versions of the weights a directory holds: names and manifests only, nothing heavy is imported.

DIRECTORY/v00000007/    a version; it gets its name last, so one that has it is complete
  model.safetensors
  manifest.json
DIRECTORY/newest.json   the newest version that the trainer has made; it may lie in windows only
DIRECTORY/rung.json     how versions go to the engines: through windows, with couriers between nodes, or by files
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
    """What a version is; published last, so a version without it does not exist."""

    version: int
    step: int
    """The training step that made it; after a crash and a resume, versions go on while steps go back."""
    checksums: dict[str, str]
    """xxh3_128 of every tensor's bytes."""
    created: float
    """Seconds since the epoch."""


TransportName = Literal["window", "mpi", "tcp", "files"]


class Transport(msgspec.Struct, frozen=True, kw_only=True):
    """How versions go to the engines; the ladder goes down to files, which always work."""

    rung: TransportName
    """window: all workers are on one node - mpi, tcp: couriers carry them from node to node - files: all by files."""
    reason: str


class WeightVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version that the trainer has made, and the training step that made it."""

    version: int
    step: int


def announce_version(directory: Path, weight_version: WeightVersion) -> None:
    """Record that a version exists, before any process can see it: its number is never used for other weights."""
    publish_file(directory / "newest.json", msgspec.json.encode(weight_version))


def find_newest_version(directory: Path) -> int | None:
    """The newest version that the trainer has made, wherever it lies; None before the first."""
    versions = list_versions(directory)
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):  # a damaged note is not worth more than none
        versions.append(msgspec.json.decode((directory / "newest.json").read_bytes(), type=WeightVersion).version)
    return max(versions, default=None)


def write_transport(directory: Path, transport: Transport) -> None:
    """Tell every worker how versions go from now on."""
    publish_file(directory / "rung.json", msgspec.json.encode(transport))


def read_transport(directory: Path) -> Transport | None:
    """How versions go; None if nobody has said, and then they go by files."""
    try:
        return msgspec.json.decode((directory / "rung.json").read_bytes(), type=Transport)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def check_newer(version: int, *, newest: int | None) -> None:
    """WeightsError unless a version may follow the newest."""
    if version < 0 or (newest is not None and version <= newest):
        raise WeightsError(f"version {version} cannot be published: {newest} is the newest, and versions never go back")


def version_dir(directory: Path, version: int) -> Path:
    """Where a version lies."""
    return directory / f"v{version:08d}"


def tensors_file(directory: Path, version: int) -> Path:
    return version_dir(directory, version) / "model.safetensors"


def manifest_file(directory: Path, version: int) -> Path:
    return version_dir(directory, version) / "manifest.json"


def list_versions(directory: Path) -> list[int]:
    """The versions that are there, oldest first; one listing of a small directory."""
    try:
        names = [path.name for path in directory.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _VERSION_NAME.fullmatch(name)))


def read_manifest(directory: Path, version: int) -> VersionManifest:
    """The manifest of a version; WeightsError if the version is absent or its manifest is damaged."""
    path = manifest_file(directory, version)
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=VersionManifest)
    except FileNotFoundError:
        available = ", ".join(map(str, list_versions(directory))) or "none"
        raise WeightsError(f"version {version} is not in {directory} (there: {available}): take the newest") from None
    except msgspec.DecodeError as error:
        raise WeightsError(f"{path} is damaged ({error}): remove {path.parent}") from None
    if manifest.version != version:
        raise WeightsError(f"{path} says version {manifest.version}: remove {path.parent}")
    return manifest


def find_newest_manifest(directory: Path) -> VersionManifest | None:
    """The newest version in a directory that may be changing: one pruned between listing and reading is passed over."""
    for version in reversed(list_versions(directory)):
        if manifest_file(directory, version).exists():
            return read_manifest(directory, version)
    return None
