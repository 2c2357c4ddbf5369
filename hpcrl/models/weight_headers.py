"""The safetensors files of a model directory, checked without torch: they are all there, and whole."""

import struct
from pathlib import Path
from typing import Any

from hpcrl.errors import ConfigError
from hpcrl.system.json_records import decode_record

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_LENGTH = struct.Struct("<Q")
"""The bytes of the header, at the start of a file."""
_MAX_HEADER_BYTES = 100 << 20
"""safetensors' own limit."""


def check_weight_files(setting: str, directory: Path) -> None:
    """Raise ConfigError for a file that is named and absent, of another size than its header has, or pickled.

    A directory without files of weights is enough for a plan.
    """
    for path in _list_files(setting, directory):
        try:
            problem = _find_damage(path)
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        if problem is not None:
            raise ConfigError(f"{setting} = {str(directory)!r}: {path.name} {problem}: download it again")


def _list_files(setting: str, directory: Path) -> list[Path]:
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if not index.exists():
        pickled = sorted(directory.glob("pytorch_model*.bin"))
        if pickled and not single.exists():
            raise ConfigError(
                f"{setting} = {str(directory)!r} has its weights in {pickled[0].name} alone, which may run code as "
                "it is read: load the model in transformers, if you trust it: `save_pretrained` writes safetensors"
            )
        return [single] if single.exists() else []
    try:
        names = set(decode_record(index.read_bytes(), dict[str, Any])["weight_map"].values())
        return [directory / name for name in sorted(names)]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{setting} = {str(directory)!r}: {INDEX_FILE} cannot be read ({error!r}): download the model again"
        ) from error


def _find_damage(path: Path) -> str | None:
    """Return what is wrong with a file; None if it has all the bytes that its header lists."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH.size)
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else _MAX_HEADER_BYTES + 1
        header = file.read(length) if length <= _MAX_HEADER_BYTES else b""
    try:
        listed = decode_record(header, dict[str, Any])
        ends = [each["data_offsets"][1] for name, each in listed.items() if name != "__metadata__"]
        expected = _LENGTH.size + length + max(ends, default=0)
    except (ValueError, KeyError, IndexError, TypeError):
        return f"has {size} bytes and no header of a safetensors file"
    return None if size == expected else f"has {size} bytes, and {expected} by its header"
