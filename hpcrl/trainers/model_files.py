"""Load a model directory tensor by tensor: a rank makes its part of the model, then reads its slices of the files.

    ModelSource                 a model without values, and what fills it
    open_causal, open_critic    the language model of a directory; the same body with a head for values
    make_empty                  a model whose parameters have no memory
    open_weight_files           the safetensors files of a directory

The order is: open (parameters have shapes and no memory), add adapters, shard, `fill`. No rank has the whole model at
any time, on its device or in host memory, unless it is to keep the whole model.

Files name tensors as their authors did; transformers' own table of conversions gives their names and places in the
model, as the experts of a layer, which files hold one by one and the model as one tensor. A model with conversions
other than renaming, stacking and joining is loaded by transformers, whole, in host memory.
"""

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification
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
from hpcrl.models.model_config import QUANTISED_ADVICE
from hpcrl.models.weight_headers import INDEX_FILE, SINGLE_FILE
from hpcrl.trainers.state import list_local_shards
from hpcrl.weights.layout import ROUNDED_DTYPES, TensorShard
from hpcrl.weights.tensor_file import DTYPE_CODES

IGNORED_NAMES = (r"rotary_emb\.inv_freq",)
"""Tensors in files of older versions, which models compute themselves."""
ROUNDED_CODES = tuple(DTYPE_CODES[dtype] for dtype in ROUNDED_DTYPES)
"""safetensors' names of the types of fewer bits."""
_LOAD_ERRORS = (OSError, ValueError, SafetensorError, StrictDataclassError)


class StoredTensor(NamedTuple):
    """A tensor of a file, and the part of the model's tensor that it is."""

    file: Path
    name: str
    place: TensorShard
    """Its part of the model's tensor; one dimension more than in the file where experts are stacked."""
    dtype: str
    """The name of its type in safetensors."""


class _WeightFiles(NamedTuple):
    """The names, shapes and types in the files of a directory."""

    file_of: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    """safetensors' names of the types."""


@dataclass
class ModelSource:
    """A model whose parameters have no values yet, and the stored tensors of each of its tensors.

    Without `stored` transformers has loaded it whole, and `fill` only moves it.
    """

    module: Any
    stored: dict[str, list[StoredTensor]] | None
    zeros: frozenset[str] = frozenset()
    """The names of parameters that are in no file and start at zero."""
    copies: dict[str, list[StoredTensor]] = field(default_factory=dict)
    """Stored tensors that must equal the tensor of this name, since the model has one for both."""
    _owners: dict[str, tuple[torch.nn.Module, str]] = field(init=False)
    """The module and attribute of each tensor: they stay when adapters and shards change names."""

    def __post_init__(self) -> None:
        self._owners = {
            (f"{path}.{name}" if path else name): (module, name)
            for path, module in self.module.named_modules()
            for name in [*module._parameters, *module._buffers]
        }

    def find_precise_names(self) -> frozenset[str]:
        """Find the tensors that stay float32 in a model of fewer bits: in its files, or by transformers' lists."""
        names = [name for name, _ in self.module.named_parameters()]
        kept = {name for name in names if _is_kept_precise(self.module, name)}
        found = self.stored or {}
        if any(each.dtype in ROUNDED_CODES for stored in found.values() for each in stored):
            kept |= {name for name in names if any(each.dtype == "F32" for each in found.get(name, ()))}
        return frozenset(kept)

    def fill(self, called: torch.nn.Module, device: torch.device) -> None:
        """Give the parameters of `called`, which contains the model, memory on the device, and the stored values."""
        if self.stored is None:
            called.to(device)
            return
        _allocate_parameters(called, device)
        wanted: dict[Path, list[tuple[StoredTensor, TensorShard, Tensor]]] = defaultdict(list)
        with torch.no_grad():
            for name, stored_tensors in self.stored.items():
                module, attribute = self._owners[name]
                tensor = getattr(module, attribute)
                for shard in list_local_shards(name, tensor, part=""):
                    for stored in stored_tensors:
                        wanted[stored.file].append((stored, shard.shard, shard.tensor.detach()))
            for name in self.zeros:
                module, attribute = self._owners[name]
                getattr(module, attribute).zero_()
            for path, reads in sorted(wanted.items()):
                _read_file(path, reads)
            for name, stored_tensors in self.copies.items():
                module, attribute = self._owners[name]
                _check_copies(name, getattr(module, attribute), stored_tensors)


def open_causal(model_dir: Path, *, dtype: torch.dtype = torch.float32) -> ModelSource:
    """Open the language model in a directory; its parameters are to have this dtype."""
    return _open_model(model_dir, AutoModelForCausalLM, dtype=dtype)


def open_critic(model_dir: Path) -> ModelSource:
    """Open the same body with a head that gives one number per token, at first zero."""
    source = _open_model(model_dir, AutoModelForTokenClassification, dtype=torch.float32, num_labels=1)
    if source.stored is None:
        with torch.no_grad():
            for parameter in source.module.score.parameters():
                parameter.zero_()
    return source


def open_weight_files(model_dir: Path) -> _WeightFiles:
    """Open the safetensors files of a directory and read their names and shapes; none if it has no such files."""
    index = model_dir / INDEX_FILE
    if index.exists():
        try:
            listed: dict[str, str] = msgspec.json.decode(index.read_bytes())["weight_map"]
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            raise TrainError(f"{index} cannot be read ({error!r}): download the model again") from error
    elif (model_dir / SINGLE_FILE).exists():
        listed = {}
    else:
        return _WeightFiles({}, {}, {})
    file_of: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for file_name in sorted(set(listed.values())) or [SINGLE_FILE]:
        with _open_file(model_dir / file_name) as file:
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
                f"{model_dir / file_name} has no tensor {name!r}, which {INDEX_FILE} says it has: download it again"
            )
    return _WeightFiles(file_of, shapes, dtypes)


def _open_model(model_dir: Path, model_class: Any, *, dtype: torch.dtype, **options: Any) -> ModelSource:
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, **options)
    except _LOAD_ERRORS as error:
        raise TrainError(f"model directory {str(model_dir)!r} cannot be loaded: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise TrainError(
            f"model directory {str(model_dir)!r} holds quantised weights (quantization_config in its config.json): "
            f"{QUANTISED_ADVICE}"
        )
    files = open_weight_files(model_dir)
    if files.file_of:
        module = make_empty(config, model_class, dtype=dtype)
        stored = _match_tensors(module, files)
        if stored is not None:
            copies = _take_copies(module, stored)
            zeros = _check_complete(module, stored, files, model_dir)
            return ModelSource(module, stored, zeros, copies)
    return ModelSource(_load_whole(model_dir, model_class, dtype=dtype, **options), None)


def _load_whole(model_dir: Path, model_class: Any, **options: Any) -> Any:
    try:
        with torch.random.fork_rng(devices=[]):  # a new head draws random numbers
            return model_class.from_pretrained(model_dir, local_files_only=True, **options)
    except _LOAD_ERRORS as error:
        raise TrainError(f"model directory {str(model_dir)!r} cannot be loaded: {error}") from error


def make_empty(config: Any, model_class: Any, *, dtype: torch.dtype) -> Any:
    """Make a model whose parameters have no memory; its buffers are computed as usual."""
    with torch.random.fork_rng(devices=[]), _meta_parameters():
        module = model_class.from_config(config, dtype=torch.float32)
    for name, parameter in module.named_parameters():
        if not _is_kept_precise(module, name):
            parameter.data = parameter.data.to(dtype)
    return module


def _is_kept_precise(module: Any, name: str) -> bool:
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

    with patch.object(torch.nn.Module, "register_parameter", register_meta):
        yield


def _allocate_parameters(called: torch.nn.Module, device: torch.device) -> None:
    """Replace each parameter without memory by one that has some; one that is tied stays tied. Buffers are moved."""
    made: dict[int, torch.nn.Parameter] = {}
    for module in called.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                empty = torch.empty_like(parameter, device=device)
                made[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]


def _match_tensors(module: Any, files: _WeightFiles) -> dict[str, list[StoredTensor]] | None:
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
            found.setdefault(target, []).append(StoredTensor(files.file_of[name], name, place, files.dtypes[name]))
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


def _stack_experts(target: str, name_lists: list[list[str]], files: _WeightFiles) -> list[StoredTensor]:
    """Place the tensors of experts in the model's one tensor; `name_lists` are those that are joined, by expert."""
    found, offset = [], 0
    for names in name_lists:
        num_rows = files.shapes[names[0]][0] if names else 0
        for expert, name in enumerate(names):
            place = TensorShard(name=target, start=(expert, offset, 0), shape=(1, *files.shapes[name]))
            found.append(StoredTensor(files.file_of[name], name, place, files.dtypes[name]))
        offset += num_rows
    return found


def _take_copies(module: Any, stored: dict[str, list[StoredTensor]]) -> dict[str, list[StoredTensor]]:
    """Take out of `stored` the tensors that the model shares with another, by the names of those others."""
    tied = getattr(module, "all_tied_weights_keys", {})
    return {tied[name]: stored.pop(name) for name in stored.keys() & tied.keys() if tied[name] in stored}


def _check_copies(name: str, tensor: Tensor, stored_tensors: list[StoredTensor]) -> None:
    """Refuse a stored tensor that differs from the one in its place, as far as this rank holds that."""
    for shard in list_local_shards(name, tensor, part=""):
        for stored in stored_tensors:
            own, found = shard.tensor.detach(), shard.tensor.detach().clone()
            _read_file(stored.file, [(stored, shard.shard, found)])
            if not torch.equal(own, found):
                raise TrainError(
                    f"{stored.file} has a {stored.name!r} that differs from {name!r}, and tie_word_embeddings in "
                    "config.json makes them one: set it to false there, or use files and config.json of one model"
                )


def _check_complete(
    module: Any, stored: dict[str, list[StoredTensor]], files: _WeightFiles, model_dir: Path
) -> frozenset[str]:
    """Refuse files that do not give every value of the model once; return the parameters that start at zero.

    Names that the model does not have are taken out of `stored` if they are known to be of no use.
    """
    tied = set(getattr(module, "all_tied_weights_keys", {}))
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items() if name not in tied}
    is_critic = hasattr(module, "score")
    ignored = [*IGNORED_NAMES, *(module._keys_to_ignore_on_load_unexpected or ()), *([r"^lm_head\."] * is_critic)]
    for name in sorted(stored.keys() - expected.keys()):
        first = stored.pop(name)[0]
        if name not in tied and not any(re.search(pattern, name) for pattern in ignored):
            raise TrainError(
                f"{first.file} has the tensor {first.name!r}, which a {type(module).__name__} as in config.json does "
                f"not have: {_explain_mix_up(name)}"
            )
    zeros = {name for name in expected if is_critic and name.startswith("score.")}
    for name, shape in expected.items():
        if name in zeros:
            stored.pop(name, None)
            continue
        places = stored.get(name, [])
        wrong = next((each for each in places if len(each.place.shape) != len(shape)), None)
        covered = sum(math.prod(each.place.shape) for each in places)
        too_far = any(
            start + size > whole
            for each in places
            for start, size, whole in zip(each.place.start, each.place.shape, shape, strict=False)
        )
        if not places:
            raise TrainError(
                f"no file in {model_dir} has the tensor {name!r} of shape {shape}: {_explain_mix_up(name)}"
            )
        if wrong is not None or too_far or covered != math.prod(shape):
            named = wrong or places[0]
            raise TrainError(
                f"{named.file}: {named.name!r} has the shape {files.shapes[named.name]}, and with {len(places) - 1} "
                f"others does not make {name!r} of shape {shape} as in config.json: use files and config.json of one "
                "model"
            )
    return frozenset(zeros)


def _explain_mix_up(name: str) -> str:
    if name == "lm_head.weight":
        return "is tie_word_embeddings in config.json as in the model's own?"
    return "download the model again, files and config.json together"


def _read_file(path: Path, reads: list[tuple[StoredTensor, TensorShard, Tensor]]) -> None:
    """Copy the overlap of every wanted shard with what the file has of it."""
    with _open_file(path) as file:
        for stored, own, tensor in reads:
            try:
                _copy_overlap(file, stored, own, tensor)
            except SafetensorError as error:
                raise TrainError(f"{path}: {stored.name!r} cannot be read ({error}): download it again") from error


def _copy_overlap(file: Any, stored: StoredTensor, own: TensorShard, tensor: Tensor) -> None:
    place = stored.place
    if not own.shape:
        tensor.copy_(file.get_tensor(stored.name))
        return
    low = [max(a, b) for a, b in zip(own.start, place.start, strict=True)]
    high = [min(a + n, b + m) for a, n, b, m in zip(own.start, own.shape, place.start, place.shape, strict=True)]
    if any(first >= last for first, last in zip(low, high, strict=True)):
        return
    view = file.get_slice(stored.name)
    in_file = [slice(a - start, b - start) for a, b, start in zip(low, high, place.start, strict=True)]
    in_file = in_file[len(in_file) - len(view.get_shape()) :]  # an expert's own dimension is not in the file
    in_own = tuple(slice(a - start, b - start) for a, b, start in zip(low, high, own.start, strict=True))
    target = tensor[in_own]
    target.copy_(view[tuple(in_file)].view(target.shape))


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise TrainError(f"{path} is missing or damaged ({error}): download it again") from error
