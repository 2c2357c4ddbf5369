"""Ranks that publish their shards: on one node into one window, on several nodes into one window each."""

import pytest

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.testing.ranks import run_ranks
from hpcrl.weights.window.file import unlink_recorded_windows
from tests.support.learners import make_model

pytestmark = pytest.mark.timeout(900)  # ranks are processes that import torch and transformers
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
def run(tmp_path):
    run = CampaignDir(tmp_path / "campaign")
    run.events.mkdir(parents=True)
    yield run
    unlink_recorded_windows(run.job(0))


def publish(run, model_dir, case, *, window_dir, nodes=("n", "n"), transport="window"):
    trainer, changed = TRAINERS[case]
    if trainer == "megatron":
        pytest.importorskip("megatron.core")
    arguments = (str(model_dir), str(run.root), trainer, changed, str(window_dir), nodes, transport)
    return run_ranks(2, "tests.support.learners:publish_parts", *arguments)


@pytest.mark.parametrize("case", TRAINERS)
def test_no_rank_gathers_what_is_published_in_the_window(run, model_dir, case):
    first, second = publish(run, model_dir, case, window_dir=run.root.parent)
    assert (first["same"], first["num_gathered"], first["transport"]) == (True, 0, "window")
    assert list(first["windows"]) == ["n"]
    assert second == 1  # asked for by the test, to compare


@pytest.mark.parametrize("case", ["fsdp2", "tp2"])
def test_without_a_window_all_ranks_gather_and_versions_are_in_files(run, model_dir, case):
    first, second = publish(run, model_dir, case, window_dir=run.root / "not-there")
    assert (first["same"], first["num_gathered"], first["transport"]) == (True, 2, "files")
    assert second == 3


@pytest.mark.parametrize("case", TRAINERS)
def test_ranks_on_two_nodes_write_their_parts_and_none_gathers(run, model_dir, case):
    first, second = publish(run, model_dir, case, window_dir=run.root.parent, nodes=("a", "b"))
    assert (first["same"], first["num_gathered"], first["transport"]) == (True, 0, "window")
    assert sorted(first["windows"]) == ["a+part", "b+part"]
    if case != "ddp":  # where the first one has all of it
        assert max(first["windows"].values()) < 2 * first["nbytes"]  # two versions of a part
    assert first["files"] == ["newest.json", "transport.json", "v00000002"]
    assert not list(run.root.parent.glob("hpcrl-*")), "every node has removed its window"
    assert second == 1


def test_with_files_every_version_is_assembled_from_the_parts(run, model_dir):
    first, _ = publish(run, model_dir, "fsdp2", window_dir=run.root.parent, nodes=("a", "b"), transport="files")
    assert (first["same"], first["num_gathered"], first["transport"]) == (True, 0, "files")
    assert first["files"] == ["newest.json", "transport.json", "v00000001", "v00000002"]
