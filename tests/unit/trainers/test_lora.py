"""LoRA adapters: only they are trained, and published or exported weights include them."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from weakref import finalize

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.errors import PlanError, TrainError
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.plan.checks import check_recipe
from hpcrl.testing import ranks
from hpcrl.testing.learning import save_checkpoint
from hpcrl.trainers.adapters import ADAPTER_PREFIX, MergedWeight
from hpcrl.trainers.export import export_model
from hpcrl.trainers.published_adapters import PublishedAdapters
from hpcrl.trainers.publishing import make_published_layout
from hpcrl.trainers.state import read_whole_shapes
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.weights.stores.store import iterate_bytes
from tests.support.learners import batch, make_model, settings, trained
from tests.support.plans import make_recipe

RANK = 2
PLAIN = {"lora_rank": RANK, "learning_rate": 1e-2, "kl": "k3", "kl_coef": 0.1}
"""A KL, so that the model without its adapters is used too."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("lora") / "model", tied=True)


def make_trainer(model_dir, **changed):
    torch.set_num_threads(1)
    return TorchTrainer(Path(model_dir), settings(**{**PLAIN, **changed}), seed=3)


@dataclass(frozen=True)
class TrainedAdapters:
    """A trainer after a step, its checkpoint and its export."""

    trainer: TorchTrainer
    checkpoint: Path
    exported: Path


@pytest.fixture(scope="module")
def saved(model_dir):
    campaign = CampaignDir(model_dir.parent)
    campaign.recipe.write_bytes(msgspec.json.encode(make_recipe(f"train.lora_rank={RANK}")))
    trainer = make_trainer(model_dir)
    assert trainer.train_step(batch(1), step=1, version=0).skipped is None
    path = save_checkpoint(campaign.checkpoints, step=1, version=1, trainer=trainer, consumed=ConsumedTrajectories())
    export_model(campaign, campaign.root / "hf")
    return TrainedAdapters(trainer, path, campaign.root / "hf")


def read_weights(directory):
    return dict(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).named_parameters())


def test_fresh_adapters_add_nothing_and_tensors_have_the_names_of_the_model_directory(model_dir):
    fresh, tensors = read_weights(model_dir), make_trainer(model_dir).tensors()
    assert tensors.keys() == fresh.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in fresh.items())


def test_only_linear_layers_change_and_by_no_more_than_the_rank(saved, model_dir):
    fresh = read_weights(model_dir)
    for name, tensor in saved.trainer.tensors().items():
        moved = tensor - fresh[name]
        if name.endswith("proj.weight"):
            assert 1 <= torch.linalg.matrix_rank(moved.double(), rtol=1e-4) <= RANK, name
        else:
            assert not moved.any(), name


def test_the_policy_without_its_adapters_is_the_reference(model_dir):
    trainer = make_trainer(model_dir)
    first, second = (trainer.train_step(batch(step), step=step, version=step).kl_reference for step in (1, 2))
    assert first == 0
    assert second > 1e-5
    assert not any(isinstance(each, torch.nn.Module) for each in trainer._fixed_models.values()), "no second model"


def test_the_merged_model_gives_the_loss_of_the_model_with_adapters(saved):
    merged = TorchTrainer(saved.exported, settings(), seed=3)
    first, second = (one.train_step(batch(2), step=2, version=1, train=settings()) for one in (saved.trainer, merged))
    assert (first.loss, first.entropy) == pytest.approx((second.loss, second.entropy), rel=1e-5, abs=1e-6)


def merge(fresh, adapters):
    """Add published adapters to the weights that they change."""
    merged = dict(fresh)
    for name, up in adapters.items():
        if name.endswith(".lora_B.weight"):
            layer = name.removesuffix(".lora_B.weight")
            merged[f"{layer}.weight"] = fresh[f"{layer}.weight"] + up @ adapters[f"{layer}.lora_A.weight"]
    return merged


def test_adapters_that_are_published_alone_make_the_merged_model_of_the_fresh_one(saved, model_dir):
    alone = make_trainer(model_dir, publish_lora="adapters")
    alone.load(saved.checkpoint)
    published, expected = alone.tensors(), read_weights(saved.exported)
    assert published.keys() == alone.shapes().keys() == {shard.name for shard, _ in alone.shards()}
    assert {name.rsplit(".", 2)[1] for name in published} == {"lora_A", "lora_B"}
    assert all(torch.equal(values.detach(), published[shard.name]) for shard, values in alone.shards())
    merged = merge(read_weights(model_dir), published)
    assert merged.keys() == expected.keys()
    assert all(torch.allclose(merged[name], tensor, atol=1e-6) for name, tensor in expected.items())
    assert alone.num_params == saved.trainer.num_params == sum(tensor.numel() for tensor in expected.values())


def test_a_checkpoint_has_adapters_only_and_is_exported_merged(saved, model_dir):
    assert {name.startswith(ADAPTER_PREFIX) for _, name in read_whole_shapes(saved.checkpoint)} == {True}
    restored = make_trainer(model_dir)
    restored.load(saved.checkpoint)
    exported = read_weights(saved.exported)
    assert exported.keys() == restored.tensors().keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in restored.tensors().items())


def test_adapters_of_a_campaign_of_another_version_are_exported(saved, model_dir, tmp_path):
    campaign = CampaignDir(tmp_path / "campaign")
    shutil.copytree(model_dir.parent, campaign.root, ignore=shutil.ignore_patterns("hf"))
    recipe = json.loads(campaign.recipe.read_bytes())
    recipe["resources"]["decode"]["num_workers"] = 0  # "auto" today
    recipe["train"]["magic"] = 1
    campaign.recipe.write_text(json.dumps(recipe))
    export_model(campaign, tmp_path / "hf")
    exported, expected = read_weights(tmp_path / "hf"), read_weights(saved.exported)
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())


def test_a_checkpoint_without_adapters_is_refused(model_dir, tmp_path):
    make_trainer(model_dir, lora_rank=0).snapshot().write(tmp_path)
    with pytest.raises(TrainError, match="is only in the model"):
        make_trainer(model_dir).load(tmp_path)


def test_a_model_in_bf16_keeps_adapters_in_float32_and_merges_a_weight_at_a_time(model_dir, monkeypatch):
    trainer = make_trainer(model_dir, precision="bf16")
    assert trainer.train_step(batch(1), step=1, version=0).skipped is None
    dtypes = {
        kind: {parameter.dtype for parameter in trainer._policy.module.parameters() if parameter.requires_grad == kind}
        for kind in (True, False)
    }
    assert dtypes == {True: {torch.float32}, False: {torch.bfloat16}}
    merge, alive, most = MergedWeight.detach, [], []

    def count(self):
        tensor = merge(self)
        alive.append(1)
        most.append(len(alive))
        finalize(tensor, alive.pop)
        return tensor

    monkeypatch.setattr(MergedWeight, "detach", count)
    layout = make_published_layout(trainer, "bfloat16")
    assert len([len(data) for data in iterate_bytes(trainer.tensors(), layout)]) == len(layout.tensors)
    assert 1 <= max(most) <= 2, "the next one is made before the one before it goes"


def train_shards(world, model_dir, state_dir):
    """Train two steps on this rank's shards; save the state, and count the weights that it holds."""
    torch.set_num_threads(1)
    trainer = TorchTrainer(Path(model_dir), settings(**PLAIN, sharding="full"), seed=3, world=world)
    parameters = list(trainer._policy.module.parameters())
    held = sum(parameter.to_local().numel() for parameter in parameters)
    found = trained(trainer, last=2)
    published = sum(values.detach().numel() for _, values in trainer.shards())
    alone = PublishedAdapters(trainer._policy._adapters, stored={}, world=world)
    adapters = {name: tensor.tolist() for name, tensor in alone.tensors().items()}
    pieces = [(shard.name, shard.start, values.detach().tolist()) for shard, values in alone.weight_shards()]
    trainer.snapshot().write(Path(state_dir))
    held /= sum(parameter.numel() for parameter in parameters)
    return found | {"held": held, "published": published, "adapters": adapters, "pieces": pieces}


@pytest.mark.timeout(900)  # ranks are processes that import torch and transformers
def test_two_ranks_that_share_the_model_give_the_numbers_of_one_and_hold_half(model_dir, tmp_path):
    alone = make_trainer(model_dir)
    expected = trained(alone, last=2)
    found = ranks.run_ranks(2, "tests.unit.trainers.test_lora:train_shards", str(model_dir), str(tmp_path))
    for mine in found:
        for figure in ("loss", "grad_norm", "entropy"):
            assert mine[figure] == pytest.approx(expected[figure], rel=1e-4, abs=1e-6)
        for name, sums in expected["weights"].items():
            assert mine["weights"][name] == pytest.approx(sums, rel=1e-4, abs=1e-4), name
        assert mine["held"] == pytest.approx(0.5, abs=0.02)
    whole = sum(tensor.numel() for tensor in alone.tensors().values())
    assert sum(mine["published"] for mine in found) == whole
    assert max(mine["published"] for mine in found) < 0.55 * whole
    for name, whole_adapter in found[0]["adapters"].items():
        parts = sorted((start, rows) for mine in found for part, start, rows in mine["pieces"] if part == name)
        assert [row for _, rows in parts for row in rows] == whole_adapter, name
    resumed = make_trainer(model_dir)
    resumed.load(tmp_path)
    for name, tensor in alone.tensors().items():
        assert torch.allclose(resumed.tensors()[name], tensor, atol=1e-5), name
    assert all(name.startswith(ADAPTER_PREFIX) for _, name in read_whole_shapes(tmp_path))


def test_trainer_megatron_has_no_adapters():
    with pytest.raises(PlanError, match="lora_rank = 8"):
        check_recipe(make_recipe("train.lora_rank=8", "train.trainer=megatron"))
