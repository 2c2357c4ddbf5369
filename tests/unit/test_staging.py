"""Several ranks publish their parts into one window: nothing is gathered as long as the window holds."""

import pytest

from hpcrl.rundir import RunDir
from hpcrl.weights.window import unlink_recorded
from tests.learners import make_model
from tests.ranks import run as on_ranks

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
    run = RunDir(tmp_path / "campaign")
    run.events.mkdir(parents=True)
    yield run
    unlink_recorded(run.job(0))


def publish(run, model_dir, case, *, window_dir):
    trainer, changed = TRAINERS[case]
    if trainer == "megatron":
        pytest.importorskip("megatron.core")
    arguments = (str(model_dir), str(run.root), trainer, changed, str(window_dir))
    return on_ranks(2, "tests.learners:publish_parts", *arguments)


@pytest.mark.parametrize("case", TRAINERS)
def test_no_rank_gathers_what_goes_through_the_window(run, model_dir, case):
    first, second = publish(run, model_dir, case, window_dir=run.root.parent)
    assert first == {"same": True, "num_gathered": 0, "rung": "window"}
    assert second == 1  # asked for by the test, to compare


@pytest.mark.parametrize("case", ["fsdp2", "tp2"])
def test_without_a_window_all_ranks_gather_and_versions_go_by_files(run, model_dir, case):
    first, second = publish(run, model_dir, case, window_dir=run.root / "not-there")
    assert first == {"same": True, "num_gathered": 2, "rung": "files"}
    assert second == 3
