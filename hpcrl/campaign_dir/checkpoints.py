"""The directory of checkpoints: the names in it, and the manifest of a checkpoint.

    CHECKPOINTS/000007-step-000070/    the seventh checkpoint, saved after step 70
        checkpoint.json                step, version, extra; size and checksum of every other file
        ...                            the files

The number in front counts commits, because steps go back after a resume and the newest commit is the one to resume
from. Trainers write them (`hpcrl/trainers/checkpoint.py`).
"""

import re
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.system.json_records import decode_record

FORMAT_VERSION = 1
MANIFEST_FILE = "checkpoint.json"

_NAME_PATTERN = re.compile(r"(\d{6,})-step-\d+")


class CheckpointFile(msgspec.Struct, frozen=True, kw_only=True):
    """The size and the checksum that a file of a checkpoint must have."""

    num_bytes: int
    xxh3: str


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a checkpoint, by which it is found intact and resumed; written last."""

    format: int = FORMAT_VERSION
    step: int
    """The number of training steps done."""
    version: int
    """The version of these weights."""
    created: float
    files: dict[str, CheckpointFile]
    extra: dict[str, Any]
    """The rest of what the role needs in order to resume; plain JSON."""
    xxh3: str = ""
    """The checksum of this manifest with this field empty."""


class _ManifestFormat(msgspec.Struct):
    format: int


def find_missing_file(path: Path) -> str | None:
    """Return why the files of a checkpoint are not all there with their sizes; their bytes are not read."""
    try:
        manifest = decode_manifest((path / MANIFEST_FILE).read_bytes())
        sizes = {name: (path / name).stat().st_size for name in manifest.files}
    except (OSError, ValueError) as error:
        return f"{MANIFEST_FILE}: {error}" if isinstance(error, ValueError) else str(error)
    for name, content in manifest.files.items():
        if sizes[name] != content.num_bytes:
            return f"{name}: has {sizes[name]:,} bytes, had {content.num_bytes:,} when saved"
    return None


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """Encode a manifest with its checksum."""
    return _seal_fields(msgspec.to_builtins(manifest))


def _seal_fields(fields: dict[str, Any]) -> bytes:
    """Encode the fields of a manifest, also those of another version, with their checksum."""
    import xxhash  # which login nodes need not have

    checksum = xxhash.xxh3_128_hexdigest(msgspec.json.encode(fields | {"xxh3": ""}))
    return msgspec.json.format(msgspec.json.encode(fields | {"xxh3": checksum}), indent=2) + b"\n"


def decode_manifest(data: bytes) -> CheckpointManifest:
    """Decode and verify a manifest, or raise ValueError (msgspec's errors are a kind of it).

    Fields that a newer version has added are covered by the checksum, and skipped.
    """
    manifest = decode_record(data, CheckpointManifest)
    if manifest.format > FORMAT_VERSION:
        raise ValueError(_describe_newer(manifest.format))
    if data != _seal_fields(decode_record(data)):
        raise ValueError("its bytes are not as they were saved")
    return manifest


def explain_newer_format(path: Path) -> str | None:
    """Return why this version of hpcrl cannot read a checkpoint of a newer one; None for others, also damaged ones."""
    try:
        format = decode_record((path / MANIFEST_FILE).read_bytes(), _ManifestFormat).format
    except (OSError, ValueError):
        return None
    return _describe_newer(format) if format > FORMAT_VERSION else None


def _describe_newer(format: int) -> str:
    return f"format {format} is newer than this hpcrl reads ({FORMAT_VERSION}): update hpcrl"


def list_committed(directory: Path) -> list[Path]:
    """List the checkpoints in the order of their commits."""
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _NAME_PATTERN.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def list_saved_steps(directory: Path) -> list[int]:
    """Return the steps that have a checkpoint."""
    return sorted({parse_step(path) for path in list_committed(directory)})


def parse_step(path: Path) -> int:
    """Return the step of a checkpoint."""
    return int(path.name.rpartition("-")[2])


def parse_commit_number(path: Path) -> int:
    """Return the commit number of a checkpoint; later ones have higher numbers."""
    return int(path.name.partition("-")[0])
