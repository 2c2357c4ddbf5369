"""Ranks that publish their shards: on one node into one window, on several nodes into one window each."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.testing.ranks import run_ranks
from hpcrl.trainers.publishing import make_published_layout
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.weights.stores.file_store import FileStore
from hpcrl.weights.stores.store import iterate_bytes
from hpcrl.weights.stores.window_store import WindowStore
from hpcrl.weights.versions import WeightVersion
from hpcrl.weights.window.file import WindowKey, unlink_recorded_windows
from tests.support.learners import batch, make_model, settings
from tests.support.megatron import skip_without_megatron

pytestmark = pytest.mark.timeout(900)  # ranks are processes that import torch and transformers
LORA = {"sharding": "full", "lora_rank": 3}
TRAINERS = {
    "fsdp2": ("torch", {"sharding": "full"}),
    "ddp": ("torch", {"sharding": "none"}),
    "tp2": ("megatron", {"trainer": "megatron", "tensor_parallel": 2}),
    "pp2": ("megatron", {"trainer": "megatron", "pipeline_parallel": 2}),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture
def campaign(tmp_path):
    campaign = CampaignDir(tmp_path / "campaign")
    campaign.events.mkdir(parents=True)
    yield campaign
    unlink_recorded_windows(campaign.job(0))


def publish(campaign, model_dir, case, *, window_dir, nodes=("n", "n"), transport="window", dtype="float32"):
    trainer, changed = TRAINERS.get(case, ("torch", LORA))
    if trainer == "megatron":
        skip_without_megatron()
    arguments = (str(model_dir), str(campaign.root), trainer, changed, str(window_dir), nodes, transport, dtype)
    return run_ranks(2, "tests.support.learners:publish_parts", *arguments)


def assert_rounded(found):
    """Check that half the bytes were published, while the trainer's own weights stayed float32, with all their bits."""
    assert (found["nbytes"] * 2, found["trained"]) == (found["trained_nbytes"], ["torch.float32"])
    assert found["rounded"]


@pytest.mark.parametrize("case", TRAINERS)
def test_no_rank_gathers_what_is_published_in_the_window(campaign, model_dir, case):
    first, second = publish(campaign, model_dir, case, window_dir=campaign.root.parent)
    assert (first["same"], first["num_gathered"], first["transport"]) == (True, 0, "window")
    assert not first["rounded"]
    assert list(first["windows"]) == ["n"]
    assert second == 1  # asked for by the test, to compare


@pytest.mark.parametrize("case", ["fsdp2", "tp2"])
def test_without_a_window_all_ranks_gather_and_versions_are_in_files(campaign, model_dir, case):
    first, second = publish(campaign, model_dir, case, window_dir=campaign.root / "not-there", dtype="bfloat16")
    assert (first["same"], first["num_gathered"], first["transport"]) == (True, 2, "files")
    assert_rounded(first)
    assert second == 3


@pytest.mark.parametrize("case", [*TRAINERS, "lora"])
def test_ranks_on_two_nodes_write_their_parts_and_none_gathers(campaign, model_dir, case):
    first, second = publish(
        campaign, model_dir, case, window_dir=campaign.root.parent, nodes=("a", "b"), dtype="bfloat16"
    )
    assert (first["same"], first["num_gathered"], first["transport"]) == (True, 0, "window")
    assert_rounded(first)
    assert sorted(first["windows"]) == ["a+part", "b+part"]
    if case != "ddp":  # where the first one has all of it
        assert max(first["windows"].values()) < 1.25 * first["trained_nbytes"]  # two versions of a part, and headers
    assert first["files"] == ["newest.json", "transport.json", "v00000002"]
    assert not list(campaign.root.parent.glob("hpcrl-*")), "every node has removed its window"
    assert second == 1


def test_with_files_every_version_is_assembled_from_the_parts(campaign, model_dir):
    first, _ = publish(
        campaign, model_dir, "fsdp2", window_dir=campaign.root.parent, nodes=("a", "b"), transport="files"
    )
    assert (first["same"], first["num_gathered"], first["transport"]) == (True, 0, "files")
    assert first["files"] == ["newest.json", "transport.json", "v00000001", "v00000002"]


def test_training_continues_from_weights_that_are_not_rounded(campaign, model_dir):
    torch.set_num_threads(1)
    alone, publishing = (TorchTrainer(model_dir, settings(), seed=1) for _ in range(2))
    key = WindowKey(campaign=campaign.root, node="n", directory=campaign.root.parent)
    window = WindowStore(key, job=campaign.job(0), layout=make_published_layout(publishing, "bfloat16"))
    for step in (1, 2):
        for trainer in (alone, publishing):
            trainer.train_step(batch(step), step=step, version=step)
        window.publish(publishing.tensors(), WeightVersion(version=step, step=step))
    published, trained = window.load(2), publishing.tensors()
    window.close()
    assert published.keys() == trained.keys()
    for name, tensor in alone.tensors().items():
        assert torch.equal(trained[name], tensor), name
        assert torch.equal(published[name], tensor.bfloat16()), name
    assert any(not torch.equal(tensor.bfloat16().float(), tensor) for tensor in trained.values())
    assert 2 * sum(t.nbytes for t in published.values()) == sum(t.nbytes for t in trained.values())


def test_merged_adapters_are_rounded_too(campaign, model_dir):
    torch.set_num_threads(1)
    trainer = TorchTrainer(model_dir, settings(lora_rank=2), seed=1)
    trainer.train_step(batch(1), step=1, version=0)
    layout = make_published_layout(trainer, "bfloat16")
    FileStore(campaign.weights).publish_each(
        layout, iterate_bytes(trainer.tensors(), layout), WeightVersion(version=1, step=1)
    )
    published = FileStore(campaign.weights).load(1)
    assert all(torch.equal(published[name], tensor.bfloat16()) for name, tensor in trainer.tensors().items())


def test_a_first_version_has_the_bits_of_the_models_files(tmp_path):
    """A tensor that the files keep in float32 in a model of fewer bits is published so."""
    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path), dtype=torch.bfloat16)
    model.model.norm.weight.data = model.model.norm.weight.data.float() + 1e-4
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    trainer = TorchTrainer(tmp_path, settings())
    layout = make_published_layout(trainer, "bfloat16")
    assert {slot.name for slot in layout.tensors if slot.dtype == "float32"} == {"model.norm.weight"}
    for slot, data in zip(layout.tensors, iterate_bytes(trainer.tensors(), layout), strict=True):
        assert bytes(data) == bytes(stored[slot.name].reshape(-1).view(torch.uint8).numpy().data)
