"""Export a checkpoint as a model directory that transformers and vLLM load.

python -m hpcrl.trainers.export CAMPAIGN DIR [STEP]

A model may be larger than the memory of the machine: the tensors of one file that is written are there, and no others
(but for the model beside adapters that transformers loads whole, model_files.py).
"""

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from huggingface_hub import split_state_dict_into_shards_factory  # noqa: TID251
from safetensors import SafetensorError
from safetensors.torch import save_file

from hpcrl.campaign_dir.checkpoints import list_saved_steps
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.published_dtype import read_stored_dtype
from hpcrl.errors import TrainError
from hpcrl.models.model_config import read_model_config
from hpcrl.models.weight_files import open_weight_files
from hpcrl.models.weight_headers import INDEX_FILE
from hpcrl.plan.records import read_recipe
from hpcrl.system.exit_codes import EXIT_DONE, run_for_code
from hpcrl.system.file_watch import advise_on_outage, is_outage
from hpcrl.system.files import staged_path, sync_directory, sync_file
from hpcrl.system.free_space import find_free_space
from hpcrl.trainers import checkpoint
from hpcrl.trainers.adapters import ADAPTER_PREFIX, MergedWeight, add_adapters, find_adapters, list_base_weights
from hpcrl.trainers.critic import CRITIC_PREFIX
from hpcrl.trainers.model_files import open_causal
from hpcrl.trainers.state import WEIGHT_PART, fill_shards, make_whole_shard, read_whole_shapes
from hpcrl.weights.tensor_file import DTYPE_CODES

FILE_PATTERN = "model{suffix}.safetensors"
"""The names of files of weights, as transformers has them."""
MAX_FILE_BYTES = 5_000_000_000
"""The size of a file of weights, unless one tensor is larger: these bytes are in memory."""
WEIGHT_FILE_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")

TORCH_NAMES = {code: name for name, code in DTYPE_CODES.items()}
"""torch's names of safetensors' types."""


class ExportedWeights(Protocol):
    """The weights of a checkpoint, under the names of the model's files."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
        """Read the tensors of these names, in these dtypes."""


def export_model(
    campaign: CampaignDir, target: Path, *, step: int | None = None, max_file_bytes: int = MAX_FILE_BYTES
) -> Path:
    """Export the newest intact checkpoint, or that of a step, and return it; `target` must not exist."""
    if target.exists():
        raise TrainError(f"{target} exists already: choose another directory, or remove it")
    try:
        str(target).encode()
    except UnicodeEncodeError:
        raise TrainError(f"{str(target)!r} has a name that is not UTF-8 text: choose another directory") from None
    source = _find_checkpoint(campaign, step)
    weights = _open_weights(campaign, source)
    stored_dtypes, usual = _read_dtypes(campaign.model), _read_usual_dtype(campaign.model)
    dtypes = {name: stored_dtypes.get(name, usual) for name in weights.shapes}
    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in weights.shapes.items()}
    _check_free_space(campaign.model, target, num_bytes=sum(sizes.values()))
    try:
        with staged_path(target) as temporary:
            shutil.copytree(campaign.model.resolve(), temporary, ignore=shutil.ignore_patterns(*WEIGHT_FILE_PATTERNS))
            _write_weights(weights, temporary, dtypes=dtypes, sizes=sizes, max_file_bytes=max_file_bytes)
            for path in temporary.rglob("*"):
                (sync_directory if path.is_dir() else sync_file)(path)
            sync_directory(temporary)
    except (OSError, SafetensorError) as error:
        raise TrainError(f"{target} cannot be written: {_explain_write(error)}") from error
    return source


def _check_free_space(model: Path, target: Path, *, num_bytes: int) -> None:
    """Raise TrainError, before anything is written, if the file system or a quota has no room for all of it."""
    copied = [path for path in model.resolve().rglob("*") if path.is_file()]
    num_bytes += sum(
        path.stat().st_size for path in copied if not any(path.match(pattern) for pattern in WEIGHT_FILE_PATTERNS)
    )
    existing = next(path for path in target.absolute().parents if path.exists())
    free = find_free_space(existing)
    if num_bytes > free.num_bytes:
        raise TrainError(
            f"{target} takes {num_bytes / 1e9:.3g} GB, and {existing} has {free.num_bytes / 1e9:.3g} GB free (by "
            f"{free.source}): free space, or choose a directory on another file system"
        )


def _write_weights(
    weights: ExportedWeights,
    directory: Path,
    *,
    dtypes: Mapping[str, torch.dtype],
    sizes: dict[str, int],
    max_file_bytes: int,
) -> None:
    """Write one file after another, and the index if there are several."""
    split = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern=FILE_PATTERN, max_shard_size=max_file_bytes
    )
    for file_name, names in split.filename_to_tensors.items():
        tensors = weights.read({name: dtypes[name] for name in names})
        save_file(tensors, directory / file_name, metadata={"format": "pt"})
        del tensors  # before those of the next file are read
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _explain_write(error: OSError | SafetensorError) -> str:
    """Explain why a model could not be written; safetensors gives the number of the system's error in its text."""
    if not isinstance(error, OSError):
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            return str(error)
        error = OSError(int(number[1]), os.strerror(int(number[1])))
    why = error.strerror or str(error)
    return f"{why}: {advise_on_outage(error)}" if is_outage(error) else why


def _open_weights(campaign: CampaignDir, source: Path) -> ExportedWeights:
    """Open the model of a checkpoint; one of adapters is the model that the campaign started from, with these."""
    shapes = {name: shape for (part, name), shape in read_whole_shapes(source).items() if part == WEIGHT_PART}
    if any(name.startswith(ADAPTER_PREFIX) for name in shapes):
        return MergedWeights(campaign, source)
    return SavedWeights(source, {name: shape for name, shape in shapes.items() if not name.startswith(CRITIC_PREFIX)})


@dataclass(frozen=True)
class SavedWeights:
    """The weights that a checkpoint has."""

    source: Path
    shapes: Mapping[str, tuple[int, ...]]

    def read(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
        tensors = {name: torch.empty(self.shapes[name], dtype=dtype) for name, dtype in dtypes.items()}
        fill_shards([make_whole_shard(name, tensor) for name, tensor in tensors.items()], self.source)
        return tensors


class MergedWeights:
    """The weights that a campaign with adapters started from, each merged with its own when it is read."""

    def __init__(self, campaign: CampaignDir, source: Path) -> None:
        """Read the adapters of a checkpoint; no weight is read."""
        train = read_recipe(campaign, skips_unknown=True).train
        self._model = open_causal(campaign.model)
        module, stored = self._model.module, self._model.stored or {}
        add_adapters(module, rank=train.lora_rank, alpha=train.lora_alpha)
        self._adapters = find_adapters(module)
        for adapter in self._adapters.values():
            adapter.to_empty(device="cpu")
        trained = module.named_parameters(prefix=ADAPTER_PREFIX.removesuffix("."))
        with torch.no_grad():
            fill_shards([make_whole_shard(name, each) for name, each in trained if each.requires_grad], source)
        weights = list_base_weights(module)
        self._wholes = {name: make_whole_shard(name, tensor).shard for name, tensor in weights.items()}
        self._places = {name: (whole.shape, whole) for name, whole in self._wholes.items() if name not in stored}
        self._places |= {each.name: (each.shape, each.place) for name in weights for each in stored.get(name, ())}
        self.shapes: Mapping[str, tuple[int, ...]] = {name: shape for name, (shape, _) in self._places.items()}

    def read(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
        return {name: self._read_tensor(name).to(dtype) for name, dtype in dtypes.items()}

    def _read_tensor(self, name: str) -> torch.Tensor:
        stored_shape, place = self._places[name]
        adapter = self._adapters.get(place.name)
        read = place if adapter is None else self._wholes[place.name]
        weight = torch.empty(read.shape)
        self._model.read_shards([(read, weight)])
        merged = weight if adapter is None else MergedWeight(weight, adapter)[place.index].detach()
        return merged.view(stored_shape)


def _find_checkpoint(campaign: CampaignDir, step: int | None) -> Path:
    def report_damage(path: Path, why: str) -> None:
        print(f"hpcrl: note: {path.name} is damaged ({why}): an older one is tried", file=sys.stderr)  # noqa: T201

    if step is None:
        found = checkpoint.find_newest(campaign.checkpoints, report=report_damage)
    else:
        found = checkpoint.find_by_step(campaign.checkpoints, step)
    if found is None:
        saved_steps = ", ".join(str(number) for number in list_saved_steps(campaign.checkpoints))
        if not saved_steps:
            raise TrainError(f"campaign {campaign.name} has no checkpoint: nothing trained can be exported")
        wanted = "" if step is None else f" of step {step}"
        raise TrainError(
            f"campaign {campaign.name} has no intact checkpoint{wanted} (steps: {saved_steps}): give one of these, as "
            "only train.keep_checkpoints are kept, or let it train further"
        )
    return found


def _read_dtypes(model: Path) -> dict[str, torch.dtype]:
    """Read the dtype of each tensor in the directory that training started from: the export has the same."""
    return {name: getattr(torch, TORCH_NAMES[code]) for name, code in open_weight_files(model).dtypes.items()}


def _read_usual_dtype(model: Path) -> torch.dtype:
    """Read the dtype that config.json names, for a model without safetensors files."""
    named = read_stored_dtype(read_model_config(model / "config.json").fields) or "float32"
    dtype: torch.dtype = getattr(torch, named)
    return dtype


def list_dtypes(model: Path) -> list[str]:
    """List the dtypes of the weights of an exported model."""
    return sorted({TORCH_NAMES[code] for code in open_weight_files(model).dtypes.values()})


def main() -> int:
    campaign, target = CampaignDir(Path(sys.argv[1])), Path(sys.argv[2])
    step = int(sys.argv[3]) if len(sys.argv) > 3 else None
    return run_for_code(lambda: _run_export(campaign, target, step))


def _run_export(campaign: CampaignDir, target: Path, step: int | None) -> int:
    source = export_model(campaign, target, step=step)
    print(f"{source.name} is in {target}, in {' and '.join(list_dtypes(target))}")  # noqa: T201
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
