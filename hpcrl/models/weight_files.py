"""The safetensors files of a model directory, and the model's tensors that their tensors make up.

    WeightFiles, open_weight_files   names, shapes and types in the files
    open_weight_file                 one of them
    make_empty                       a model whose parameters have no memory
    match_tensors                    the stored tensors of each of a model's tensors
    read_stored_tensors              the same, for a model that has been loaded from a directory

Files name tensors as their authors did; transformers' own table of conversions gives their names and places in the
model, as the experts of a layer, which files hold one by one and the model as one tensor.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch.overrides import TorchFunctionMode
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from hpcrl.errors import TrainError
from hpcrl.models.weight_headers import INDEX_FILE, SINGLE_FILE
from hpcrl.system.json_records import decode_record
from hpcrl.weights.layout import TensorShard
from hpcrl.weights.stored_tensors import StoredTensor, StoredTensors, list_model_tensors

MAX_BUFFER_VALUES = 1 << 28
"""A tensor of a new model that has more values than this is a parameter."""


class WeightFiles(NamedTuple):
    """The names, shapes and types in the files of a directory."""

    file_of: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    """safetensors' names of the types."""

    def describe(self, name: str, place: TensorShard) -> StoredTensor:
        """Describe a tensor that is this part of one of the model's."""
        return StoredTensor(self.file_of[name], name, self.shapes[name], place, self.dtypes[name])


def open_weight_files(model_dir: Path) -> WeightFiles:
    """Open the safetensors files of a directory and read their names and shapes; none if it has no such files."""
    index = model_dir / INDEX_FILE
    if index.exists():
        try:
            listed: dict[str, str] = decode_record(index.read_bytes())["weight_map"]
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            raise TrainError(f"{index} cannot be read ({error!r}): download the model again") from error
    elif (model_dir / SINGLE_FILE).exists():
        listed = {}
    else:
        return WeightFiles({}, {}, {})
    file_of: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for file_name in sorted(set(listed.values())) or [SINGLE_FILE]:
        with open_weight_file(model_dir / file_name) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name in file_of:
                    raise TrainError(
                        f"{model_dir / file_name} and {file_of[name].name} both have the tensor {name!r}: remove the "
                        "file that does not belong to the model"
                    )
                file_of[name] = model_dir / file_name
                stored = file.get_slice(name)
                shapes[name], dtypes[name] = tuple(stored.get_shape()), stored.get_dtype()
    for name, file_name in listed.items():
        if name not in file_of:
            raise TrainError(
                f"{model_dir / file_name} has no tensor {name!r}, which {INDEX_FILE} lists: download it again"
            )
    return WeightFiles(file_of, shapes, dtypes)


def read_stored_tensors(module: Any, model_dir: Path) -> StoredTensors:
    """Read which stored tensors make up the tensors of a model; none if its files do not show that."""
    files = open_weight_files(model_dir)
    stored = match_tensors(module, files) if files.file_of else None
    names = list_model_tensors(module)
    return {name: stored[name] for name in names if name in stored} if stored is not None else {}


def make_empty(config: Any, model_class: Any, *, dtype: torch.dtype) -> Any:
    """Make a model whose parameters have no memory; its buffers are computed as usual."""
    with torch.random.fork_rng(devices=[]), _meta_parameters():
        module = model_class.from_config(config, dtype=torch.float32)
    for name, parameter in module.named_parameters():
        if not is_kept_precise(module, name):
            parameter.data = parameter.data.to(dtype)
    return module


def is_kept_precise(module: Any, name: str) -> bool:
    """Return whether transformers keeps a parameter in float32 in a model of fewer bits."""
    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")  # of transformers' models
    kept = [part for name in names for part in getattr(module, name, None) or ()]
    return any(each in name for each in kept)


@contextlib.contextmanager
def _meta_parameters() -> Iterator[None]:
    """Let every parameter that a module gets have a shape and no memory."""
    register = torch.nn.Module.register_parameter

    def register_meta(module: torch.nn.Module, name: str, parameter: Any) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    with patch.object(torch.nn.Module, "register_parameter", register_meta), _MetaStacks():
        yield


class _MetaStacks(TorchFunctionMode):
    """A mode in which a tensor larger than any buffer has no memory: all experts of a layer may not fit into a node."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty and args:
            sizes = args if isinstance(args[0], int) else args[0]
            if math.prod(sizes) > MAX_BUFFER_VALUES:
                options["device"] = "meta"
        return func(*args, **options)


def match_tensors(module: Any, files: WeightFiles) -> dict[str, list[StoredTensor]] | None:
    """Find the stored tensors of each of the model's tensors; None where they need more than stacking and joining.

    A stored tensor that the model lacks is listed under its own name.
    """
    conversions = get_model_conversion_mapping(module)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    by_pattern: dict[tuple[str, str], list[str]] = defaultdict(list)
    found: dict[str, list[StoredTensor]] = {}
    for name in sorted(files.file_of, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, module.base_model_prefix, shapes)
        if pattern is not None:
            by_pattern[target, pattern].append(name)
        else:
            shape = files.shapes[name]
            place = TensorShard(name=target, start=(0,) * len(shape), shape=shape)
            found.setdefault(target, []).append(files.describe(name, place))
    for target in sorted({target for target, _ in by_pattern}):
        matching = (each for each in converters if any((target, one) in by_pattern for one in each.source_patterns))
        converter = next(matching)
        if not _is_stacking(converter):
            return None
        found[target] = _stack_experts(
            target, [by_pattern[target, pattern] for pattern in converter.source_patterns], files
        )
    return found


def _is_stacking(converter: WeightConverter) -> bool:
    """Return whether a conversion stacks experts along dimension 0, and perhaps joins two such stacks along 1."""
    match converter.operations:
        case [MergeModulelist(dim=0)]:
            return len(converter.source_patterns) == 1
        case [MergeModulelist(dim=0), Concatenate(dim=1)]:
            return True
    return False


def _stack_experts(target: str, name_lists: list[list[str]], files: WeightFiles) -> list[StoredTensor]:
    """Place the tensors of experts in the model's one tensor; `name_lists` are those that are joined, by expert."""
    found, offset = [], 0
    for names in name_lists:
        num_rows = files.shapes[names[0]][0] if names else 0
        for expert, name in enumerate(names):
            place = TensorShard(name=target, start=(expert, offset, 0), shape=(1, *files.shapes[name]))
            found.append(files.describe(name, place))
        offset += num_rows
    return found


def open_weight_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise TrainError(f"{path} is missing or damaged ({error}): download it again") from error
