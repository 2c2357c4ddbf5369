"""Export a checkpoint as a model directory that transformers and vLLM load.

python -m hpcrl.trainers.export CAMPAIGN DIR [STEP]
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import HpcrlError, TrainError
from hpcrl.system.files import staged_path
from hpcrl.trainers import checkpoint
from hpcrl.trainers.state import read_whole_shapes, read_whole_tensors

WEIGHT_FILE_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")

NON_MODEL_PREFIXES = ("critic.", "lora.")
"""The prefixes of the tensors in a checkpoint that are not the model's: see critic.py and torch_model.py."""


def export_model(campaign: CampaignDir, target: Path, *, step: int | None = None) -> Path:
    """Export the newest intact checkpoint, or that of a step, and return it; `target` must not exist."""
    if target.exists():
        raise TrainError(f"{target} exists already: choose another directory, or remove it")
    source = _find_checkpoint(campaign, step)
    names = [
        name for part, name in read_whole_shapes(source) if part == "weight" and not name.startswith(NON_MODEL_PREFIXES)
    ]
    tensors = read_whole_tensors(source, names=names)
    dtypes = _read_dtypes(campaign.model)
    with staged_path(target) as temporary:
        shutil.copytree(campaign.model.resolve(), temporary, ignore=shutil.ignore_patterns(*WEIGHT_FILE_PATTERNS))
        cast = {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in tensors.items()}
        save_file(cast, temporary / "model.safetensors", metadata={"format": "pt"})
    return source


def _find_checkpoint(campaign: CampaignDir, step: int | None) -> Path:
    damaged: list[str] = []
    if step is None:
        found = checkpoint.find_newest(
            campaign.checkpoints, report=lambda path, why: damaged.append(f"{path.name}: {why}")
        )
    else:
        found = checkpoint.find_by_step(campaign.checkpoints, step)
    if found is None:
        saved_steps = ", ".join(str(number) for number in checkpoint.list_saved_steps(campaign.checkpoints)) or "none"
        wanted = "" if step is None else f" of step {step}"
        raise TrainError(
            f"campaign {campaign.name} has no intact checkpoint{wanted} (steps: {saved_steps}): let it train further"
        )
    return found


def _read_dtypes(model: Path) -> dict[str, torch.dtype]:
    """Read the dtype of each tensor in the directory that training started from: the export has the same."""
    return {name: tensor.dtype for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}


def main() -> int:
    campaign, target = CampaignDir(Path(sys.argv[1])), Path(sys.argv[2])
    step = int(sys.argv[3]) if len(sys.argv) > 3 else None
    try:
        source = export_model(campaign, target, step=step)
    except HpcrlError as error:
        print(f"hpcrl: {error}", file=sys.stderr)  # noqa: T201
        return 2
    print(f"{source.name} is in {target}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
