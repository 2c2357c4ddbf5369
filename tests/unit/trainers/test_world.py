"""The torch trainer on several ranks: the same numbers as on one."""

import pytest

from hpcrl.testing.ranks import run_ranks
from hpcrl.trainers.world import SINGLE_RANK
from tests.support.learners import make_model, train_torch

RELATIVE = 1e-4
pytestmark = pytest.mark.timeout(900)  # ranks are processes that import torch and transformers
VARIANTS = {
    "grpo": {},
    "gspo": {"num_minibatches": 2, "aggregation": "sequence", "ratio": "sequence", "kl": "k3", "entropy_coef": 0.01},
    "ppo": {"advantage": "gae", "gae_lambda": 0.9, "critic_learning_rate": 1e-3, "value_clip": 0.2},
}


OFFLOADED = {"sharding": "full", "offload": True}


def flat(result):
    """List all numbers of a training run."""
    lists = [result[name] for name in ("loss", "grad_norm", "entropy", "num_tokens")]
    lists += [result["value_loss"]] if result["value_loss"][0] is not None else []
    return [value for part in lists for value in part] + [v for pair in result["weights"].values() for v in pair]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def alone(model_dir):
    return [train_torch(SINGLE_RANK, model_dir, changed) for changed in VARIANTS.values()]


@pytest.mark.parametrize("run", ["train_variants", "train_with_sleeps"])
@pytest.mark.parametrize("sharding", ["none", "full"], ids=["ddp", "fsdp2"])
def test_two_ranks_give_the_numbers_of_one(model_dir, alone, sharding, run):
    together = run_ranks(2, f"tests.support.learners:{run}", model_dir, list(VARIANTS.values()), sharding)
    for rank in together:
        for mine, expected in zip(rank, alone, strict=True):
            assert expected["skipped"] == [None] * 5
            assert len(set(expected["loss"])) == 5
            assert flat(mine) == pytest.approx(flat(expected), rel=RELATIVE, abs=1e-6)


def test_a_sharded_checkpoint_of_weights_in_host_memory_is_resumed_by_one_rank(model_dir, alone, tmp_path):
    run_ranks(2, "tests.support.learners:train_torch", model_dir, OFFLOADED, None, str(tmp_path / "two"), 1, 2)
    resumed = train_torch(SINGLE_RANK, model_dir, {}, load_from=tmp_path / "two", first=3, last=5)
    expected = alone[0]
    assert resumed["loss"] == pytest.approx(expected["loss"][2:], rel=RELATIVE)
    assert resumed["grad_norm"] == pytest.approx(expected["grad_norm"][2:], rel=RELATIVE)
