"""Models with experts on two ranks: steps, checkpoints, published names and exports, as on one rank."""

import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch._dynamo.utils
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.learn.consumed import ConsumedTrajectories
from hpcrl.testing.learning import save_checkpoint
from hpcrl.testing.ranks import run_ranks
from hpcrl.trainers.export import export_model
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.trainers.torch_model import choose_frozen_dtype
from hpcrl.trainers.world import SINGLE_RANK, World
from tests.support.families import EXPERT_FAMILIES, make_family_model
from tests.support.learners import batch, settings, trained
from tests.support.plans import make_recipe

ADAPTERS = {"lora_rank": 2, "learning_rate": 1e-2}
MODELS = {family: (family, {}) for family in EXPERT_FAMILIES} | {"three experts": ("qwen3_moe", {"num_experts": 3})}
"""Three experts are not divided among two ranks: each rank has a part of every one."""
ADAPTED_FAMILIES = ("mixtral", "deepseek_v3")
"""One with other names for the router than transformers, one with corrections in its files."""


def train_sharded(world, root):
    """Train every family for two steps and save its state; return the results, and the shards that are published."""
    torch.set_num_threads(1)
    found = {}
    for family in MODELS:
        campaign = CampaignDir(Path(root) / family)
        trainer = TorchTrainer(campaign.model, settings(sharding="full"), seed=3, world=world)
        held = sum(shard.num_values for shard, _ in trainer.shards())
        found[family] = trained(trainer, last=2) | {"held": held}
        if not world.rank:
            campaign.checkpoints.mkdir()
        world.max(0)
        trainer.snapshot().write(campaign.checkpoints)
        balanced = TorchTrainer(campaign.model, settings(sharding="full", moe_aux_coef=1.0), seed=3, world=world)
        found[family]["balanced_norms"] = trained(balanced, last=1)["grad_norm"]
        if family in ADAPTED_FAMILIES:
            adapted = TorchTrainer(campaign.model, settings(sharding="full", **ADAPTERS), seed=3, world=world)
            found[family]["adapted"] = trained(adapted, last=2)["weights"]
            found[family]["adapted_shards"] = sum_shards(adapted)
    return found


def sum_shards(trainer):
    """Return two numbers of what this rank publishes of every weight."""
    found = {}
    for shard, values in trainer.shards():
        tensor = values.detach().double()
        assert tensor.shape == shard.shape
        first, second = found.get(shard.name, (0.0, 0.0))
        found[shard.name] = [first + float(tensor.sum()), second + float(tensor.square().sum())]
    return found


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    root = tmp_path_factory.mktemp("experts")
    for name, (family, changed) in MODELS.items():
        campaign = CampaignDir(root / name)
        campaign.root.mkdir()
        make_family_model(campaign.model, family, **changed)
    return root, run_ranks(2, "tests.unit.trainers.test_torch_model:train_sharded", str(root), timeout_s=800)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", MODELS)
def test_two_ranks_train_and_resume_a_model_with_experts_as_one_rank_does(sharded, family, tmp_path):
    root, results = sharded
    campaign = CampaignDir(root / family)
    mine, other = (result[family] for result in results)
    stored = load_file(campaign.model / "model.safetensors")
    alone = TorchTrainer(campaign.model, settings(), seed=3)
    assert alone.shapes() == {name: tuple(tensor.shape) for name, tensor in stored.items()}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in alone.tensors().items())
    expected = trained(alone, last=2)
    for metric in ("loss", "grad_norm", "entropy"):
        assert mine[metric] == pytest.approx(expected[metric], rel=1e-4, abs=1e-6)
    for name, sums in expected["weights"].items():
        assert mine["weights"][name] == pytest.approx(sums, rel=1e-4, abs=1e-4), name
    assert mine["balanced_norms"][0] > mine["grad_norm"][0]
    assert mine["held"] + other["held"] == sum(tensor.numel() for tensor in stored.values())
    assert max(mine["held"], other["held"]) < 0.52 * sum(tensor.numel() for tensor in stored.values())

    resumed = TorchTrainer(campaign.model, settings(), seed=3)
    resumed.load(campaign.checkpoints)
    for trainer in (alone, resumed):
        trainer.train_step(batch(3), step=3, version=3)
    for name, tensor in alone.tensors().items():
        torch.testing.assert_close(resumed.tensors()[name], tensor, rtol=1e-3, atol=1e-4, msg=name)

    exported = CampaignDir(tmp_path / "campaign")
    exported.root.mkdir()
    exported.model.symlink_to(campaign.model)
    save_checkpoint(exported.checkpoints, step=3, version=3, trainer=resumed, consumed=ConsumedTrajectories())
    export_model(exported, tmp_path / "hf")
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == stored.keys()
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True, dtype=torch.float32)
    assert not any(info.values()), json.dumps({key: sorted(map(str, value)) for key, value in info.items()})
    inputs = torch.arange(12).view(2, 6)
    with torch.no_grad():
        trained_logits = resumed._policy.module(inputs).logits
        # Compressed attention of the trainer is padded, which changes the order of sums.
        torch.testing.assert_close(model.eval()(inputs).logits, trained_logits, rtol=0, atol=1e-6)
        assert not torch.allclose(AutoModelForCausalLM.from_pretrained(campaign.model)(inputs).logits, trained_logits)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ADAPTED_FAMILIES)
def test_a_model_with_experts_and_adapters_is_published_and_exported_under_its_files_names(sharded, family, tmp_path):
    root, results = sharded
    campaign = CampaignDir(tmp_path / "campaign")
    campaign.root.mkdir()
    campaign.model.symlink_to(root / family / "model")
    stored = load_file(campaign.model / "model.safetensors")
    trainer = TorchTrainer(campaign.model, settings(**ADAPTERS), seed=3)
    assert all(torch.equal(trainer.tensors()[name], tensor) for name, tensor in stored.items()), "they add nothing yet"
    alone = trained(trainer, last=2)["weights"]
    assert alone.keys() == stored.keys()
    for name, sums in alone.items():
        parts = [result[family]["adapted_shards"].get(name, (0.0, 0.0)) for result in results]
        assert [sum(part) for part in zip(*parts, strict=True)] == pytest.approx(sums, rel=1e-4, abs=1e-4), name
        assert results[0][family]["adapted"][name] == pytest.approx(sums, rel=1e-4, abs=1e-4), name

    campaign.recipe.write_bytes(msgspec.json.encode(make_recipe("train.lora_rank=2")))
    save_checkpoint(campaign.checkpoints, step=2, version=2, trainer=trainer, consumed=ConsumedTrajectories())
    export_model(campaign, tmp_path / "hf")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in trainer.tensors().items())
    changed = {name for name, tensor in stored.items() if not torch.equal(exported[name], tensor)}
    assert any(name.endswith("q_proj.weight") or name.endswith("q_b_proj.weight") for name in changed)


class GroupedDtypes(TorchDispatchMode):
    """The dtypes of the products of experts."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "grouped_mm" in str(function):
            self.found |= {args[0].dtype, args[1].dtype}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
@pytest.mark.parametrize("recompute", [False, True])
def test_experts_of_a_whole_model_multiply_in_bf16(tmp_path, family, recompute):
    model, losses = make_family_model(tmp_path / "model", family), {}
    for precision in ("fp32", "bf16"):
        trainer = TorchTrainer(model, settings(recompute=recompute, precision=precision), seed=3)
        with GroupedDtypes() as dtypes:
            losses[precision] = trained(trainer, last=1)
        assert dtypes.found == {torch.bfloat16 if precision == "bf16" else torch.float32}
    for metric in ("loss", "grad_norm", "entropy"):
        assert losses["bf16"][metric] == pytest.approx(losses["fp32"][metric], rel=0.05, abs=0.01), metric


@pytest.mark.timeout(900)
@pytest.mark.long
def test_compiled_layers_have_the_numbers_of_plain_ones(tmp_path):
    model = make_family_model(tmp_path / "model", "qwen3")
    torch._dynamo.utils.counters.clear()
    plain, compiled = (
        trained(TorchTrainer(model, settings(recompute=True, compile=is_compiled), seed=3), last=1)
        for is_compiled in (False, True)
    )
    for metric in ("loss", "grad_norm", "entropy"):
        assert compiled[metric] == pytest.approx(plain[metric], rel=1e-4, abs=1e-6), metric
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize(("major", "dtype"), [(7, torch.float32), (8, torch.bfloat16)])
def test_auto_precision_is_that_in_which_the_gpu_computes(
    major: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A V100 has major version 7, and emulates bfloat16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=major))
    world = World(device=torch.device("cuda"))
    assert choose_frozen_dtype(settings(), world) == dtype
    assert choose_frozen_dtype(settings(precision="bf16"), world) == torch.bfloat16
    assert choose_frozen_dtype(settings(), SINGLE_RANK) == torch.float32
