"""Export a checkpoint as a model directory that transformers and vLLM load.

python -m hpcrl.trainers.export CAMPAIGN DIR [STEP]
"""

import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hpcrl.campaign_dir.checkpoints import list_saved_steps
from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.config.published_dtype import read_stored_dtype
from hpcrl.errors import TrainError
from hpcrl.models.model_config import read_model_config
from hpcrl.models.weight_files import open_weight_files
from hpcrl.plan.records import read_recipe
from hpcrl.system.exit_codes import EXIT_DONE, run_for_code
from hpcrl.system.file_watch import advise_on_outage, is_outage
from hpcrl.system.files import staged_path
from hpcrl.trainers import checkpoint
from hpcrl.trainers.adapters import (
    ADAPTER_PREFIX,
    MergedTensors,
    MergedWeight,
    add_adapters,
    find_adapters,
    list_base_weights,
)
from hpcrl.trainers.critic import CRITIC_PREFIX
from hpcrl.trainers.model_files import open_causal
from hpcrl.trainers.state import WEIGHT_PART, fill_shards, make_whole_shard, read_whole_shapes, read_whole_tensors
from hpcrl.weights.stored_tensors import split_tensors
from hpcrl.weights.tensor_file import DTYPE_CODES

WEIGHTS_FILE = "model.safetensors"
WEIGHT_FILE_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")

TORCH_NAMES = {code: name for name, code in DTYPE_CODES.items()}
"""torch's names of safetensors' types."""


def export_model(campaign: CampaignDir, target: Path, *, step: int | None = None) -> Path:
    """Export the newest intact checkpoint, or that of a step, and return it; `target` must not exist."""
    if target.exists():
        raise TrainError(f"{target} exists already: choose another directory, or remove it")
    try:
        str(target).encode()
    except UnicodeEncodeError:
        raise TrainError(f"{str(target)!r} has a name that is not UTF-8 text: choose another directory") from None
    source = _find_checkpoint(campaign, step)
    tensors = _read_weights(campaign, source)
    dtypes, usual = _read_dtypes(campaign.model), _read_usual_dtype(campaign.model)
    cast = {name: tensor.to(dtypes.get(name, usual)) for name, tensor in tensors.items()}
    try:
        with staged_path(target) as temporary:
            shutil.copytree(campaign.model.resolve(), temporary, ignore=shutil.ignore_patterns(*WEIGHT_FILE_PATTERNS))
            save_file(cast, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise TrainError(f"{target} cannot be written: {_explain_write(error)}") from error
    return source


def _explain_write(error: OSError | SafetensorError) -> str:
    """Explain why a model could not be written; safetensors gives the number of the system's error in its text."""
    if not isinstance(error, OSError):
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            return str(error)
        error = OSError(int(number[1]), os.strerror(int(number[1])))
    why = error.strerror or str(error)
    return f"{why}: {advise_on_outage(error)}" if is_outage(error) else why


def _read_weights(campaign: CampaignDir, source: Path) -> Mapping[str, torch.Tensor]:
    """Read the model of a checkpoint; one of adapters is the model that the campaign started from, with these."""
    names = [name for part, name in read_whole_shapes(source) if part == WEIGHT_PART]
    if not any(name.startswith(ADAPTER_PREFIX) for name in names):
        return read_whole_tensors(source, names=[name for name in names if not name.startswith(CRITIC_PREFIX)])
    train, source_model = read_recipe(campaign, skips_unknown=True).train, open_causal(campaign.model)
    module = source_model.module
    source_model.fill(module, torch.device("cpu"))
    add_adapters(module, rank=train.lora_rank, alpha=train.lora_alpha)
    trained = module.named_parameters(prefix=ADAPTER_PREFIX.removesuffix("."))
    with torch.no_grad():
        fill_shards([make_whole_shard(name, each) for name, each in trained if each.requires_grad], source)
        adapters = find_adapters(module)
        merged = {name: MergedWeight(each, adapters.get(name)) for name, each in list_base_weights(module).items()}
        return MergedTensors(split_tensors(merged, source_model.stored or {}))


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
    with safe_open(model / WEIGHTS_FILE, framework="pt") as file:
        return sorted({str(file.get_tensor(name).dtype).removeprefix("torch.") for name in file.keys()})  # noqa: SIM118


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
