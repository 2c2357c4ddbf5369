"""Both trainers on one GPU: the numbers of the CPU, a checkpoint that resumes elsewhere, an export that loads."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.testing.learning import save_checkpoint
from hpcrl.trainers.export import export_model
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.trainers.world import SINGLE_RANK, World
from tests.support.learners import batch, make_model, settings, train_torch

CLOSE = 1e-3
"""The relative tolerance: a GPU sums in another order."""
NUM_STEPS = 3


@pytest.fixture(params=["torch", "megatron"])
def make(request, campaign, device):
    """Return a function that makes a trainer on the GPU with some settings changed."""
    world = World(device=device)
    if request.param == "torch":
        return lambda **changed: TorchTrainer(campaign.model, settings(**changed), seed=3, world=world)
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    from hpcrl.trainers.megatron.trainer import MegatronTrainer

    return lambda **changed: MegatronTrainer(
        campaign.model, settings(trainer="megatron", **changed), seed=3, world=world
    )


@pytest.fixture
def campaign(tmp_path: Path) -> CampaignDir:
    directory = CampaignDir(tmp_path / "campaign")
    make_model(directory.model)
    return directory


def test_steps_agree_with_those_of_the_cpu(make, campaign):
    expected = train_torch(SINGLE_RANK, campaign.model, {"num_minibatches": 2}, last=NUM_STEPS)
    trainer = make(num_minibatches=2)
    for step in range(NUM_STEPS):
        metrics = trainer.train_step(batch(step + 1), step=step + 1, version=step + 1)
        assert metrics.skipped is None
        assert metrics.loss == pytest.approx(expected["loss"][step], rel=CLOSE, abs=1e-5)
        assert metrics.grad_norm == pytest.approx(expected["grad_norm"][step], rel=CLOSE)


def test_bf16_steps_stay_near_those_of_the_cpu(make, campaign):
    expected = train_torch(SINGLE_RANK, campaign.model, {}, last=1)
    metrics = make(precision="bf16").train_step(batch(1), step=1, version=1)
    assert metrics.skipped is None
    assert metrics.entropy == pytest.approx(expected["entropy"][0], rel=0.02)
    assert metrics.grad_norm == pytest.approx(expected["grad_norm"][0], rel=0.2)


def test_a_checkpoint_resumes_on_the_cpu_and_its_export_has_the_trained_weights(make, campaign, tmp_path):
    trainer = make()
    trainer.train_step(batch(1), step=1, version=0)
    path = save_checkpoint(campaign.checkpoints, step=1, version=1, trainer=trainer, consumed=ConsumedTrajectories())
    export_model(campaign, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    exported = dict(model.named_parameters())
    assert all(torch.equal(exported[name], tensor.cpu()) for name, tensor in trainer.tensors().items())
    on_cpu = TorchTrainer(campaign.model, settings(), seed=3)
    on_cpu.load(path)
    trainer.load(path)
    here, there = (one.train_step(batch(2), step=2, version=1) for one in (on_cpu, trainer))
    assert here.loss == pytest.approx(there.loss, rel=CLOSE, abs=1e-5)
    assert here.grad_norm == pytest.approx(there.grad_norm, rel=CLOSE)
