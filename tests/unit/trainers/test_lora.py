"""LoRA adapters: only they are trained, and published or exported weights include them."""

import builtins

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.envs import check
from hpcrl.errors import ConfigError, PlanError, TrainError
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.plan.checks import check_recipe
from hpcrl.testing import ranks
from hpcrl.testing.learning import save_checkpoint
from hpcrl.trainers.export import export_model
from hpcrl.trainers.state import read_whole_shapes
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.trainers.torch_model import ADAPTER_PREFIX
from hpcrl.trainers.world import SINGLE_RANK
from tests.support.learners import batch, make_model, settings, train_torch
from tests.support.plans import make_recipe

pytest.importorskip("peft", reason="needs peft")

RANK = 2


@pytest.fixture
def run(tmp_path):
    torch.set_num_threads(1)
    directory = CampaignDir(tmp_path / "campaign")
    make_model(directory.model, tied=True)
    return directory


def made(run, **changed):
    plain = {"lora_rank": RANK, "learning_rate": 1e-2}
    return TorchTrainer(run.model, settings(**{**plain, **changed}), seed=1)


def initial_weights(run):
    return dict(AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32).named_parameters())


def test_fresh_adapters_add_nothing_and_tensors_have_the_names_of_the_model_directory(run):
    fresh = initial_weights(run)
    tensors = made(run).tensors()
    assert tensors.keys() == fresh.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in fresh.items())


def test_only_linear_layers_change_and_by_no_more_than_the_rank(run):
    trainer, fresh = made(run), initial_weights(run)
    assert trainer.train_step(batch(1), step=1, version=0).skipped is None
    for name, tensor in trainer.tensors().items():
        moved = tensor - fresh[name]
        if name.endswith("proj.weight"):
            assert 1 <= torch.linalg.matrix_rank(moved.double(), rtol=1e-4) <= RANK, name
        else:
            assert not moved.any(), name


def test_the_merged_model_gives_the_loss_of_the_model_with_adapters(run, tmp_path):
    trainer = made(run)
    trainer.train_step(batch(1), step=1, version=0)
    save_checkpoint(run.checkpoints, step=1, version=1, trainer=trainer, consumed=ConsumedTrajectories())
    export_model(run, tmp_path / "hf")
    merged = TorchTrainer(tmp_path / "hf", settings(), seed=1)
    first, second = (one.train_step(batch(2), step=2, version=1) for one in (trainer, merged))
    assert (first.loss, first.entropy) == pytest.approx((second.loss, second.entropy), rel=1e-5, abs=1e-6)


def test_a_loaded_trainer_continues_like_the_saved_one(run, tmp_path):
    saved, loaded = made(run), made(run)
    saved.train_step(batch(1), step=1, version=0)
    (tmp_path / "state").mkdir()
    saved.snapshot().write(tmp_path / "state")
    loaded.load(tmp_path / "state")
    for trainer in (saved, loaded):
        trainer.train_step(batch(2), step=2, version=1)
    mine, theirs = saved.tensors(), loaded.tensors()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_checkpoint_has_moments_of_adapters_only_and_is_exported_merged(run, tmp_path):
    trainer = made(run)
    trainer.train_step(batch(1), step=1, version=0)
    path = save_checkpoint(run.checkpoints, step=1, version=1, trainer=trainer, consumed=ConsumedTrajectories())
    assert {name.startswith(ADAPTER_PREFIX) for part, name in read_whole_shapes(path) if part == "exp_avg"} == {True}
    export_model(run, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    exported = dict(model.named_parameters())
    assert exported.keys() == trainer.tensors().keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in trainer.tensors().items())


def test_a_checkpoint_without_adapters_is_refused(run, tmp_path):
    made(run, lora_rank=0).snapshot().write(tmp_path)
    with pytest.raises(TrainError, match="is only in the model"):
        made(run).load(tmp_path)


@pytest.mark.timeout(900)  # ranks are processes that import torch and transformers
def test_two_ranks_give_the_numbers_of_one(run):
    changed = {"lora_rank": RANK}
    expected = train_torch(SINGLE_RANK, run.model, changed, last=2)
    for mine in ranks.run_ranks(2, "tests.support.learners:train_torch", str(run.model), changed, None, None, 1, 2):
        assert mine["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_a_recipe_with_adapters_is_refused_before_submission_without_peft(monkeypatch):
    recipe = make_recipe("train.lora_rank=8")
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"lora_rank = 8 needs the package peft, which .* does not have"):
        check.check_packages(recipe)
    check.check_packages(make_recipe())


@pytest.mark.parametrize("other", ["train.sharding=full", "train.trainer=megatron"])
def test_settings_that_adapters_do_not_support_are_refused(other):
    with pytest.raises(PlanError, match="lora_rank = 8"):
        check_recipe(make_recipe("train.lora_rank=8", other))


def test_without_peft_the_error_names_the_fix(run, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **named):
        if name.partition(".")[0] == "peft":
            raise ModuleNotFoundError("No module named 'peft'")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(TrainError, match=r'pip install "hpcrl\[lora\]", or set it to 0'):
        made(run)
