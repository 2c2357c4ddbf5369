"""The Megatron trainer: the numbers of the torch trainer and exchangeable checkpoints, on any parallelism."""

import pytest

from hpcrl.testing.ranks import run_ranks
from hpcrl.trainers.world import SINGLE_RANK
from tests.support.learners import make_model, train_torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

RELATIVE = 1e-4
pytestmark = pytest.mark.timeout(900)  # ranks are processes that import torch and transformers
TP2 = {"trainer": "megatron", "tensor_parallel": 2}
PP2 = {"trainer": "megatron", "pipeline_parallel": 2}


def same(mine, expected, *, steps):
    for name in ("loss", "grad_norm", "entropy"):
        assert mine[name] == pytest.approx(expected[name][steps], rel=RELATIVE, abs=1e-6), name
    assert mine["num_tokens"] == expected["num_tokens"][steps]


@pytest.mark.parametrize(("family", "tied"), [("qwen2", False), ("qwen3", True), ("llama", False)])
def test_megatron_gives_the_numbers_of_torch_and_resumes_on_another_parallelism(family, tied, tmp_path):
    model_dir = str(make_model(tmp_path / "model", family=family, tied=tied))
    expected = train_torch(SINGLE_RANK, model_dir, {"num_minibatches": 2})
    two = {"num_minibatches": 2}
    saved = run_ranks(
        2, "tests.support.learners:train_megatron", model_dir, TP2 | two, None, str(tmp_path / "tp2"), 1, 2
    )
    same(saved[0], expected, steps=slice(0, 2))
    resumed = run_ranks(
        2,
        "tests.support.learners:train_megatron",
        model_dir,
        PP2 | two,
        str(tmp_path / "tp2"),
        str(tmp_path / "pp2"),
        3,
        4,
    )
    same(resumed[0], expected, steps=slice(2, 4))
    assert resumed[0]["weights"] == resumed[1]["weights"]
    last = train_torch(SINGLE_RANK, model_dir, two, load_from=tmp_path / "pp2", first=5, last=5)
    same(last, expected, steps=slice(4, 5))
    for name, numbers in expected["weights"].items():
        assert last["weights"][name] == pytest.approx(numbers, rel=RELATIVE, abs=1e-5), name


@pytest.mark.parametrize("parallel", [TP2, PP2], ids=["tp2", "pp2"])
def test_bf16_steps_stay_near_those_of_torch(parallel, tmp_path):
    model_dir = str(make_model(tmp_path / "model"))
    changed = {"precision": "bf16", "num_minibatches": 2}
    expected = train_torch(SINGLE_RANK, model_dir, changed, last=2)
    found = run_ranks(2, "tests.support.learners:train_megatron", model_dir, parallel | changed, None, None, 1, 2)[0]
    assert found["skipped"] == [None, None]
    for name in ("entropy", "grad_norm"):
        assert found[name] == pytest.approx(expected[name], rel=0.05), name
