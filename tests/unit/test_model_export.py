"""A checkpoint as a model directory."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcrl.errors import TrainError
from hpcrl.learn.consumed import Consumed
from hpcrl.rundir import RunDir
from hpcrl.trainers.checkpoint import save
from hpcrl.trainers.export import export
from hpcrl.trainers.torch import TorchTrainer
from tests.learners import batch, make_model, settings


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_what_is_exported_is_what_was_trained(tmp_path, advantage):
    torch.set_num_threads(1)
    run = RunDir(tmp_path / "campaign")
    make_model(run.model)
    trainer = TorchTrainer(run.model, settings(advantage=advantage), seed=1)
    trainer.train_step(batch(), step=1, version=0)
    save(run.checkpoints, step=1, version=1, trainer=trainer, consumed=Consumed())
    export(run, tmp_path / "hf")
    model, fresh = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (tmp_path / "hf", run.model)
    )
    exported, began = dict(model.named_parameters()), dict(fresh.named_parameters())
    assert all(torch.equal(exported[name], tensor) for name, tensor in trainer.tensors().items())
    assert not torch.equal(exported["model.norm.weight"], began["model.norm.weight"])
    with pytest.raises(TrainError, match="exists already"):
        export(run, tmp_path / "hf")
    with pytest.raises(TrainError, match=r"no whole checkpoint of step 7 \(steps: 1\)"):
        export(run, tmp_path / "other", step=7)
