"""The safetensors files of a model directory, checked without torch.

check_weight_files    they are all there, and whole
check_served_files    the same of a model that only vLLM reads, also from files without an index
has_weight_files, has_served_files    there are any, without which there can be a plan
check_weight_names    their names and shapes are those of the model in config.json
"""

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcrl.errors import ConfigError
from hpcrl.hardware.architecture import KNOWN_FAMILIES, ModelArchitecture, read_architecture, select_fields
from hpcrl.system.json_records import decode_record

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SERVED_FILES = ("*.safetensors", "*.bin", "*.pt")
"""The files that vLLM reads; it runs no code of pickled ones."""
_LENGTH = struct.Struct("<Q")
"""The bytes of the header, at the start of a file."""
_MAX_HEADER_BYTES = 100 << 20
"""safetensors' own limit."""
_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_BYTES = 1 << 20
"""The start of the table of words and of the output layer: heads that were trained apart differ there already."""


def has_weight_files(setting: str, directory: Path) -> bool:
    """Return whether there are files that trainers and the embedded engine read; raise ConfigError if only others."""
    return bool(_list_files(setting, directory))


def has_served_files(directory: Path) -> bool:
    """Return whether there are files that vLLM reads."""
    return any(True for pattern in SERVED_FILES for _ in directory.glob(pattern))


def check_weight_files(setting: str, directory: Path) -> None:
    """Raise ConfigError for a file that is named and absent, of another size than its header has, or pickled.

    A directory without files of weights is enough for a plan.
    """
    _check_whole(setting, directory, _list_files(setting, directory))


def check_served_files(setting: str, directory: Path) -> None:
    """Raise ConfigError for a safetensors file that is named and absent, or of another size than its header has."""
    has_index = (directory / INDEX_FILE).exists()
    files = _list_files(setting, directory) if has_index else sorted(directory.glob("*.safetensors"))
    _check_whole(setting, directory, files)


def _check_whole(setting: str, directory: Path, files: list[Path]) -> None:
    for path in files:
        try:
            problem = _find_damage(path)
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        if problem is not None:
            raise ConfigError(f"{setting} = {str(directory)!r}: {path.name} {problem}: download it again")


def check_weight_names(setting: str, directory: Path, fields: Mapping[str, Any]) -> None:
    """Raise ConfigError for files with other layers, words, experts, sizes or output layer than config.json names.

    Only models of families whose tensors are known are checked, in files with transformers' names.
    """
    try:
        shape = read_architecture(fields)
    except KeyError:
        return
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(f"{setting} = {str(directory)!r}: its config.json cannot be used: {error}") from error
    headers = {path: _read_header(path) for path in _list_files(setting, directory)}
    tensors = {name: path for path, header in headers.items() for name in header}
    if shape.family not in KNOWN_FAMILIES or _TABLE not in tensors:
        return
    num_extra = fields.get("num_nextn_predict_layers") or 0  # layers that predict further tokens are not loaded
    num_layers, num_experts = _count(r"model\.layers\.(\d+)\.", tensors), _count(r".*\.experts\.(\d+)\.", tensors)
    num_words = headers[tensors[_TABLE]][_TABLE]["shape"][0]
    problem = None
    if not shape.num_layers <= num_layers <= shape.num_layers + num_extra:
        problem = f"num_hidden_layers = {shape.num_layers}, and its files have {num_layers} layers"
    elif num_words != shape.vocabulary_size:
        problem = f"vocab_size = {shape.vocabulary_size}, and its files have {num_words} words"
    elif num_experts not in (0, shape.num_experts):
        problem = f"{shape.num_experts} experts in a layer, and its files have {num_experts}"
    elif not shape.is_tied and _HEAD not in tensors:
        problem = f"tie_word_embeddings = false, and its files have no {_HEAD}"
    elif shape.is_tied and _HEAD in tensors and _differ(tensors):
        problem = f"tie_word_embeddings = true, and its files have a {_HEAD} that differs from {_TABLE}"
    else:
        sizes = {name: each["shape"] for header in headers.values() for name, each in header.items()}
        problem = _find_wrong_size(shape, sizes, select_fields(fields))
    if problem is not None:
        raise ConfigError(
            f"{setting} = {str(directory)!r} has a config.json with {problem}: correct config.json, or download both "
            "again"
        )


def _find_wrong_size(shape: ModelArchitecture, sizes: Mapping[str, list[int]], fields: Mapping[str, Any]) -> str | None:
    """Return the first size of a matrix that is not what fields of config.json give; None if there is none."""
    if "quantization_config" in fields:  # packed values have other shapes
        return None
    head = "(qk_nope_head_dim + qk_rope_head_dim)" if shape.kv_rank else "head_dim"
    inner = "moe_intermediate_size" if fields.get("moe_intermediate_size") else "intermediate_size"
    num_heads, num_kv_heads = "num_attention_heads", "num_key_value_heads"
    expected = (  # the end of a name, the dimension, what gives its size
        (r"embed_tokens", 1, "hidden_size", shape.hidden_size),
        (r"self_attn\.q(_b)?_proj", 0, f"{num_heads} x {head}", shape.num_heads * shape.head_dim),
        (r"self_attn\.k_proj", 0, f"{num_kv_heads} x {head}", shape.num_kv_heads * shape.head_dim),
        (r"mlp\.down_proj", 1, "intermediate_size", shape.dense_inner),
        (r"experts\.\d+\.(down_proj|w2)", 1, inner, shape.expert_inner),
    )
    for ending, dimension, given, size in expected:
        pattern = re.compile(rf"model\.(layers\.\d+\.(.*\.)?)?{ending}\.weight")
        for name, found in sizes.items():
            if len(found) == 2 and found[dimension] != size and pattern.fullmatch(name):
                return f"{given} = {size}, and {name} in its files has {found[dimension]}"
    return None


def _count(pattern: str, names: Mapping[str, Path]) -> int:
    """Return the number of different indices in names, which start from zero."""
    return len({found[1] for name in names if (found := re.match(pattern, name))})


def _differ(tensors: Mapping[str, Path]) -> bool:
    """Return whether table of words and output layer are known to differ, by how they start."""
    table, head = (_read_header(tensors[name])[name] for name in (_TABLE, _HEAD))
    if (table["dtype"], table["shape"]) != (head["dtype"], head["shape"]):
        return bool(table["shape"] != head["shape"])
    return _read_start(tensors[_TABLE], table) != _read_start(tensors[_HEAD], head)


def _read_start(path: Path, listed: Mapping[str, Any]) -> bytes:
    start, end = listed["data_offsets"]
    with path.open("rb") as file:
        length = _LENGTH.unpack(file.read(_LENGTH.size))[0]
        file.seek(_LENGTH.size + length + start)
        return file.read(min(end - start, _COMPARED_BYTES))


def _read_header(path: Path) -> dict[str, Any]:
    """Return the tensors in the header of a file that is whole."""
    with path.open("rb") as file:
        listed = decode_record(file.read(_LENGTH.unpack(file.read(_LENGTH.size))[0]), dict[str, Any])
    return {name: each for name, each in listed.items() if name != "__metadata__"}


def _list_files(setting: str, directory: Path) -> list[Path]:
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if not index.exists():
        pickled = sorted(directory.glob("pytorch_model*.bin"))
        if pickled and not single.exists():
            raise ConfigError(
                f"{setting} = {str(directory)!r} has its weights in {pickled[0].name} alone, which may run code as "
                "it is read: load the model in transformers, if you trust it: `save_pretrained` writes safetensors"
            )
        parts = sorted(directory.glob("model-*-of-*.safetensors"))
        if parts and not single.exists():
            raise ConfigError(
                f"{setting} = {str(directory)!r} has {parts[0].name}, and no {INDEX_FILE}, which names the tensors of "
                "each such file: download it too"
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
