"""The export of a checkpoint as a model directory."""

import json
import math
import os
import sys

import msgspec
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import TrainError
from hpcrl.learn.batch import make_micro_batches
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.system.free_space import FreeSpace
from hpcrl.testing.learning import make_rows, save_checkpoint
from hpcrl.trainers import export
from hpcrl.trainers.adapters import ADAPTER_PREFIX
from hpcrl.trainers.export import export_model, list_dtypes, main
from hpcrl.trainers.state import WEIGHT_PART, read_whole_shapes
from hpcrl.trainers.token_model import compute_token_logprobs
from hpcrl.trainers.torch import TorchTrainer
from tests.support.learners import CONTEXT, batch, make_model, settings
from tests.support.plans import make_recipe

MAX_FILE_BYTES = 4000
"""A size for files of which a tiny model fills several."""


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


class HeldBytes(TorchDispatchMode):
    """The most bytes of tensors that were in memory at one time."""

    def __init__(self):
        super().__init__()
        self.held, self.peak = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.device.type == "cpu":
            self.held.append((StorageWeakRef(found.untyped_storage()), found.untyped_storage().nbytes()))
        self.held = [each for each in self.held if not each[0].expired()]
        self.peak = max(self.peak, sum({storage.cdata: num_bytes for storage, num_bytes in self.held}.values()))
        return found


@pytest.fixture(params=[0, 2], ids=["full", "adapters"])
def trained(request, tmp_path):
    """Return a campaign in bf16 with a checkpoint of all weights, or of adapters, and its trainer."""
    torch.set_num_threads(1)
    campaign = CampaignDir(tmp_path / "campaign")
    make_model(campaign.model)
    AutoModelForCausalLM.from_pretrained(campaign.model, dtype=torch.bfloat16).save_pretrained(campaign.model)
    campaign.recipe.write_bytes(msgspec.json.encode(make_recipe(f"train.lora_rank={request.param}")))
    trainer = TorchTrainer(campaign.model, settings(lora_rank=request.param, learning_rate=1e-2), seed=1)
    trainer.train_step(batch(), step=1, version=0)
    save_checkpoint(campaign.checkpoints, step=1, version=1, trainer=trainer, consumed=ConsumedTrajectories())
    return campaign, trainer


def test_an_export_in_several_files_has_the_values_of_one_and_holds_a_file_at_a_time(trained, tmp_path):
    campaign, trainer = trained
    expected = {name: tensor.bfloat16() for name, tensor in trainer.tensors().items()}
    export_model(campaign, tmp_path / "one")
    assert [path.name for path in (tmp_path / "one").glob("*safetensors*")] == ["model.safetensors"]
    with HeldBytes() as held:
        export_model(campaign, tmp_path / "several", max_file_bytes=MAX_FILE_BYTES)
    files = sorted((tmp_path / "several").glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)
    ]
    sizes = [sum(tensor.nbytes for tensor in load_file(path).values()) for path in files]
    assert max(sizes) <= MAX_FILE_BYTES
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == sum(sizes) == sum(tensor.nbytes for tensor in expected.values())
    for directory in ("one", "several"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / directory, dtype="auto")
        assert dict(model.named_parameters()).keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.named_parameters())
    assert list_dtypes(tmp_path / "several") == ["bfloat16"]
    shapes = read_whole_shapes(next(campaign.checkpoints.iterdir()))
    saved = {name: 4 * math.prod(shape) for (part, name), shape in shapes.items() if part == WEIGHT_PART}
    adapters = sum(num_bytes for name, num_bytes in saved.items() if name.startswith(ADAPTER_PREFIX))
    in_float32 = 4 * max(tensor.numel() for tensor in expected.values())  # as it is read, and as it is merged
    assert MAX_FILE_BYTES / 2 < held.peak - adapters <= MAX_FILE_BYTES + in_float32 * (2 if adapters else 1)


def test_an_export_that_fails_in_a_later_file_leaves_nothing(trained, tmp_path, monkeypatch):
    campaign, _ = trained
    written = []

    def fill_disk(tensors, path, **options):
        if written:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        written.append(path)
        save_file(tensors, path, **options)

    monkeypatch.setattr(export, "save_file", fill_disk)
    (tmp_path / "models").mkdir()
    with pytest.raises(TrainError, match="No space left on device"):
        export_model(campaign, tmp_path / "models" / "hf", max_file_bytes=MAX_FILE_BYTES)
    assert len(written) == 1
    assert list((tmp_path / "models").iterdir()) == []


def test_an_export_that_does_not_fit_is_refused_before_anything_is_written(trained, tmp_path, monkeypatch):
    campaign, trainer = trained
    (campaign.model / "notes.bin").write_bytes(bytes(100_000))  # not copied
    (campaign.model / "notes.txt").write_bytes(bytes(1000))
    others = sum(path.stat().st_size for path in campaign.model.iterdir() if path.suffix in (".json", ".txt", ".jinja"))
    need = 2 * trainer.num_params + others
    monkeypatch.setattr(export, "find_free_space", lambda path: FreeSpace(need - 1, 1e6, source="`quota`"))
    with pytest.raises(TrainError, match=r"GB free \(by `quota`\): free space, or choose a directory on another"):
        export_model(campaign, tmp_path / "models" / "new" / "hf")
    assert not (tmp_path / "models").exists()
    monkeypatch.setattr(export, "find_free_space", lambda path: FreeSpace(need, 1e6))
    export_model(campaign, tmp_path / "models" / "new" / "hf")
    assert sum(path.stat().st_size for path in (tmp_path / "models" / "new" / "hf").iterdir()) >= need


def test_adapters_of_a_model_that_transformers_loads_whole_are_exported(tmp_path):
    torch.set_num_threads(1)
    campaign = CampaignDir(tmp_path / "campaign")
    weights = make_model(campaign.model, tied=True) / "model.safetensors"
    torch.save(load_file(weights), campaign.model / "pytorch_model.bin")
    weights.unlink()
    campaign.recipe.write_bytes(msgspec.json.encode(make_recipe("train.lora_rank=2")))
    trainer = TorchTrainer(campaign.model, settings(lora_rank=2, learning_rate=1e-2), seed=1)
    trainer.train_step(batch(), step=1, version=0)
    save_checkpoint(campaign.checkpoints, step=1, version=1, trainer=trainer, consumed=ConsumedTrajectories())
    export_model(campaign, tmp_path / "hf", max_file_bytes=MAX_FILE_BYTES)
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).named_parameters())
    assert exported.keys() == trainer.tensors().keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in trainer.tensors().items())
