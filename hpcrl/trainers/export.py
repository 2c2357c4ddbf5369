"""A checkpoint as a model directory that transformers and vLLM load.

python -m hpcrl.trainers.export CAMPAIGN DIR [STEP]
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hpcrl.campaign_dir.paths import RunDir
from hpcrl.errors import HpcrlError, TrainError
from hpcrl.system.files import staged
from hpcrl.trainers import checkpoint
from hpcrl.trainers.state import whole_tensors, wholes

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json")

NOT_THE_MODEL = ("critic.", "lora.")
"""Prefixes of what a checkpoint holds besides the model: see critic.py and lora.py."""


def export(run: RunDir, target: Path, *, step: int | None = None) -> Path:
    """Write the newest whole checkpoint, or that of a step; returns the checkpoint. `target` must not exist."""
    if target.exists():
        raise TrainError(f"{target} exists already: choose another directory, or remove it")
    source = _chosen(run, step)
    names = [name for part, name in wholes(source) if part == "weight" and not name.startswith(NOT_THE_MODEL)]
    tensors = whole_tensors(source, names=names)
    dtypes = _dtypes(run.model)
    with staged(target) as temporary:
        shutil.copytree(run.model.resolve(), temporary, ignore=shutil.ignore_patterns(*WEIGHTS))
        cast = {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in tensors.items()}
        save_file(cast, temporary / "model.safetensors", metadata={"format": "pt"})
    return source


def _chosen(run: RunDir, step: int | None) -> Path:
    damaged: list[str] = []
    if step is None:
        found = checkpoint.newest(run.checkpoints, report=lambda path, why: damaged.append(f"{path.name}: {why}"))
    else:
        found = checkpoint.of_step(run.checkpoints, step)
    if found is None:
        there = ", ".join(str(number) for number in checkpoint.steps(run.checkpoints)) or "none"
        wanted = "" if step is None else f" of step {step}"
        raise TrainError(f"campaign {run.name} has no whole checkpoint{wanted} (steps: {there}): let it train further")
    return found


def _dtypes(model: Path) -> dict[str, torch.dtype]:
    """The type of each tensor in the directory that training began with: the export has the same."""
    return {name: tensor.dtype for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}


def main() -> int:
    run, target = RunDir(Path(sys.argv[1])), Path(sys.argv[2])
    step = int(sys.argv[3]) if len(sys.argv) > 3 else None
    try:
        source = export(run, target, step=step)
    except HpcrlError as error:
        print(f"hpcrl: {error}", file=sys.stderr)  # noqa: T201
        return 2
    print(f"{source.name} is in {target}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
