"""The export of a checkpoint as a model directory."""

import os
import sys

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import TrainError
from hpcrl.learn.batch import make_micro_batches
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.testing.learning import make_rows, save_checkpoint
from hpcrl.trainers import export
from hpcrl.trainers.export import export_model, list_dtypes, main
from hpcrl.trainers.token_model import compute_token_logprobs
from hpcrl.trainers.torch import TorchTrainer
from tests.support.learners import CONTEXT, batch, make_model, settings


def logprobs_of(model, rows):
    """Compute log-probs with transformers, one row at a time, in the model's own precision."""
    found = []
    with torch.no_grad():
        for row in rows:
            logits = model(torch.from_numpy(row.inputs.astype("int64"))[None]).logits[0].float()
            logprobs = logits.log_softmax(-1)[torch.from_numpy(row.mask.copy())]
            found += logprobs.gather(-1, torch.from_numpy(row.targets.astype("int64"))[:, None]).squeeze(-1).tolist()
    return found


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_an_exported_model_gives_the_trainers_logprobs_within_the_error_of_its_precision(tmp_path, dtype, close):
    torch.set_num_threads(1)
    campaign = CampaignDir(tmp_path / "campaign")
    make_model(campaign.model)
    AutoModelForCausalLM.from_pretrained(campaign.model, dtype=torch.float32).to(dtype).save_pretrained(campaign.model)
    trainer = TorchTrainer(campaign.model, settings(learning_rate=1e-2), seed=1)
    fresh = AutoModelForCausalLM.from_pretrained(campaign.model, dtype=torch.float32)
    for step in (1, 2, 3):
        trainer.train_step(batch(step), step=step, version=step)
    save_checkpoint(campaign.checkpoints, step=3, version=3, trainer=trainer, consumed=ConsumedTrajectories())
    export_model(campaign, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert model.dtype == dtype
    assert list_dtypes(tmp_path / "hf") == [str(dtype).removeprefix("torch.")]
    episodes = batch(4)
    rows, _ = make_rows(episodes, credits=[[0.0, 0.0]] * len(episodes), max_length=CONTEXT)
    with torch.no_grad():
        # in the order of the rows: each is a separate micro-batch
        batches = [make_micro_batches([row], tokens_per_micro_batch=1)[0] for row in rows]
        mine = [compute_token_logprobs(trainer._policy, each, temperature=1.0)[0] for each in batches]
    trained = torch.cat(mine).tolist()
    assert logprobs_of(model, rows) == pytest.approx(trained, abs=close)
    assert (
        max(abs(a - b) for a, b in zip(logprobs_of(fresh, rows), trained, strict=True)) > 0.1
    )  # training has changed the model


@pytest.mark.parametrize("advantage", ["grpo", "gae"])
def test_an_export_has_the_trained_weights(tmp_path, advantage, capsys, monkeypatch):
    torch.set_num_threads(1)
    campaign = CampaignDir(tmp_path / "campaign")
    make_model(campaign.model)
    trainer = TorchTrainer(campaign.model, settings(advantage=advantage), seed=1)
    trainer.train_step(batch(), step=1, version=0)
    save_checkpoint(campaign.checkpoints, step=1, version=1, trainer=trainer, consumed=ConsumedTrajectories())
    export_model(campaign, tmp_path / "hf")
    model, fresh = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (tmp_path / "hf", campaign.model)
    )
    exported, initial = dict(model.named_parameters()), dict(fresh.named_parameters())
    assert all(torch.equal(exported[name], tensor) for name, tensor in trainer.tensors().items())
    assert not torch.equal(exported["model.norm.weight"], initial["model.norm.weight"])
    with pytest.raises(TrainError, match="exists already"):
        export_model(campaign, tmp_path / "hf")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["export", str(campaign.root), "/proc/hf"])
        assert main() == 2
    assert "\nhpcrl: /proc/hf cannot be written: " in capsys.readouterr().err
    with pytest.raises(TrainError, match=r"of step 7 \(steps: 1\): .* only train\.keep_checkpoints are kept"):
        export_model(campaign, tmp_path / "other", step=7)


def test_an_export_without_any_checkpoint_has_nothing_to_choose_from(tmp_path):
    with pytest.raises(TrainError, match="has no checkpoint: nothing trained can be exported"):
        export_model(CampaignDir(tmp_path / "campaign"), tmp_path / "hf")


def test_an_export_to_a_name_that_safetensors_cannot_open_is_refused(tmp_path):
    with pytest.raises(TrainError, match="not UTF-8 text: choose another directory"):
        export_model(CampaignDir(tmp_path / "campaign"), tmp_path / os.fsdecode(b"h\xff"))


def test_an_export_names_a_damaged_checkpoint_in_whose_place_it_takes_an_older_one(tmp_path, capsys):
    campaign = CampaignDir(tmp_path / "campaign")
    make_model(campaign.model)
    trainer = TorchTrainer(campaign.model, settings(), seed=1)
    for step in (1, 2):
        save_checkpoint(campaign.checkpoints, step=step, version=step, trainer=trainer, consumed=ConsumedTrajectories())
    cut = campaign.checkpoints / "000002-step-000002" / "state-00000.safetensors"
    os.truncate(cut, 100)
    assert export_model(campaign, tmp_path / "hf").name == "000001-step-000001"
    assert "hpcrl: note: 000002-step-000002 is damaged (" in capsys.readouterr().err


def test_an_export_to_a_full_disk_is_refused_in_one_line(tmp_path, capsys, monkeypatch):
    """The text is that of safetensors."""
    campaign = CampaignDir(tmp_path / "campaign")
    make_model(campaign.model)
    trainer = TorchTrainer(campaign.model, settings(), seed=1)
    save_checkpoint(campaign.checkpoints, step=3, version=3, trainer=trainer, consumed=ConsumedTrajectories())
    monkeypatch.setattr(sys, "argv", ["export", str(campaign.root), str(tmp_path / "hf")])

    def fill_disk(*_, **__):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(export, "save_file", fill_disk)
    assert main() == 2
    line = capsys.readouterr().err.splitlines()[-1]  # libraries may have printed theirs
    assert line.startswith(f"hpcrl: {tmp_path / 'hf'} cannot be written: No space left on device: free space, or raise")
