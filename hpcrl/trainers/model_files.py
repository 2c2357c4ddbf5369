"""Load a model directory tensor by tensor: a rank makes its part of the model, then reads its slices of the files.

    ModelSource                 a model without values, and what fills it
    open_causal, open_critic    the language model of a directory; the same body with a head for values

The order is: open (parameters have shapes and no memory), add adapters, shard, `fill`. No rank has the whole model at
any time, on its device or in host memory, unless it is to keep the whole model.

A model with conversions other than renaming, stacking and joining (hpcrl/models/weight_files.py) is loaded by
transformers, whole, in host memory.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError  # noqa: TID251
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from hpcrl.errors import TrainError
from hpcrl.hardware.architecture import QUANTISED_ADVICE
from hpcrl.models.weight_files import (
    is_kept_precise,
    make_empty,
    match_tensors,
    open_weight_file,
    open_weight_files,
)
from hpcrl.trainers.state import list_local_shards
from hpcrl.weights.layout import ROUNDED_DTYPES, TensorShard
from hpcrl.weights.stored_tensors import StoredSlice, StoredTensor, list_model_tensors, split_shard
from hpcrl.weights.tensor_file import DTYPE_CODES

IGNORED_NAMES = (r"rotary_emb\.inv_freq",)
"""Tensors in files of older versions, which models compute themselves."""
ROUNDED_CODES = tuple(DTYPE_CODES[dtype] for dtype in ROUNDED_DTYPES)
"""safetensors' names of the types of fewer bits."""
_LOAD_ERRORS = (OSError, ValueError, SafetensorError, StrictDataclassError)


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
        """Find the published tensors that stay float32 in a model of fewer bits: by its files, or by transformers."""
        found = self.stored or {}
        has_rounded = any(each.dtype in ROUNDED_CODES for stored in found.values() for each in stored)
        kept = set()
        for name in list_model_tensors(self.module):
            is_kept = is_kept_precise(self.module, name)
            if is_kept and name not in found:
                kept.add(name)
            kept |= {each.name for each in found.get(name, ()) if is_kept or (has_rounded and each.dtype == "F32")}
        return frozenset(kept)

    def fill(self, called: torch.nn.Module, device: torch.device) -> None:
        """Give the parameters of `called`, which contains the model, memory on the device, and the stored values."""
        if self.stored is None:
            called.to(device)
            return
        _allocate_parameters(called, device)
        owners = ((name, *self._owners[name]) for name in self.stored)
        self.read_shards(
            (shard.shard, shard.tensor)
            for name, module, attribute in owners
            for shard in list_local_shards(name, getattr(module, attribute), part="")
        )
        with torch.no_grad():
            for name in self.zeros:
                module, attribute = self._owners[name]
                getattr(module, attribute).zero_()

    def read_shards(self, wanted: Iterable[tuple[TensorShard, Tensor]]) -> None:
        """Copy the stored values of these parts of the model's tensors, and no others, into the tensors given."""
        wanted = list(wanted)
        reads: dict[Path, list[StoredSlice]] = defaultdict(list)
        whole = self.module.state_dict() if self.stored is None else {}
        with torch.no_grad():
            for shard, tensor in wanted:
                if self.stored is None:
                    tensor.copy_(whole[shard.name][shard.index])
                    continue
                for read in split_shard(shard, tensor.detach(), self.stored[shard.name]):
                    reads[read.stored.file].append(read)
            for path, reads_of_file in sorted(reads.items()):
                _read_file(path, reads_of_file)
            for shard, tensor in wanted:
                if shard.name in self.copies:
                    _check_copies(shard, tensor.detach(), self.copies[shard.name])


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
        stored = match_tensors(module, files)
        if stored is not None:
            copies = _take_copies(module, stored)
            zeros = _check_complete(module, stored, model_dir)
            return ModelSource(module, stored, zeros, copies)
    return ModelSource(_load_whole(model_dir, model_class, dtype=dtype, **options), None)


def _load_whole(model_dir: Path, model_class: Any, **options: Any) -> Any:
    try:
        with torch.random.fork_rng(devices=[]):  # a new head draws random numbers
            return model_class.from_pretrained(model_dir, local_files_only=True, **options)
    except _LOAD_ERRORS as error:
        raise TrainError(f"model directory {str(model_dir)!r} cannot be loaded: {error}") from error


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


def _take_copies(module: Any, stored: dict[str, list[StoredTensor]]) -> dict[str, list[StoredTensor]]:
    """Take out of `stored` the tensors that the model shares with another, by the names of those others."""
    tied = getattr(module, "all_tied_weights_keys", {})
    return {tied[name]: stored.pop(name) for name in stored.keys() & tied.keys() if tied[name] in stored}


def _check_copies(shard: TensorShard, own: Tensor, stored_tensors: list[StoredTensor]) -> None:
    """Refuse a stored tensor that differs from the one in its place, as far as this shard goes."""
    found = own.clone()
    for read in split_shard(shard, found, stored_tensors):
        _read_file(read.stored.file, [read])
        if not torch.equal(own, found):
            raise TrainError(
                f"{read.stored.file} has a {read.stored.name!r} that differs from {shard.name!r}, and "
                "tie_word_embeddings in config.json makes them one: set it to false there, or use files and "
                "config.json of one model"
            )


def _check_complete(module: Any, stored: dict[str, list[StoredTensor]], model_dir: Path) -> frozenset[str]:
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
                f"{named.file}: {named.name!r} has the shape {named.shape}, and with {len(places) - 1} "
                f"others does not make {name!r} of shape {shape} as in config.json: use files and config.json of one "
                "model"
            )
    return frozenset(zeros)


def _explain_mix_up(name: str) -> str:
    if name == "lm_head.weight":
        return "is tie_word_embeddings in config.json as in the model's own?"
    return "download the model again, files and config.json together"


def _read_file(path: Path, reads: list[StoredSlice]) -> None:
    """Copy every wanted shard from a file."""
    with open_weight_file(path) as file:
        for stored, shard, tensor in reads:
            try:
                found = file.get_slice(stored.name)[shard.index] if shard.shape else file.get_tensor(stored.name)
            except SafetensorError as error:
                raise TrainError(f"{path}: {stored.name!r} cannot be read ({error}): download it again") from error
            tensor.copy_(found)
