"""Replayed experts: two ranks of Megatron give the numbers of ranks of torch that replay them, and not of others."""

import pytest

from hpcrl.errors import TrainError
from hpcrl.testing.ranks import run_ranks
from hpcrl.trainers.world import SINGLE_RANK
from tests.support.architectures import (
    make_families,
    make_small,
    train_torch_families,
    train_torch_ranks,
    train_two_ranks,
)
from tests.support.learners import settings
from tests.support.megatron import skip_without_megatron
from tests.unit.trainers.megatron.test_megatron_model import check_same
from tests.unit.trainers.megatron.test_stage_balance import NUM_COPIES, PARALLEL, PLAIN

skip_without_megatron()

pytestmark = pytest.mark.timeout(900)  # ranks are processes that import torch and transformers
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe")
REPLAYED = PLAIN | {"router_replay": True}
CASES = [(family, name) for family in FAMILIES for name in PARALLEL]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return make_families(tmp_path_factory.mktemp("families"), FAMILIES)


@pytest.fixture(scope="module")
def expected(directories):
    """Return the numbers of torch by family and number of ranks."""
    return train_torch_ranks(directories, REPLAYED)


@pytest.fixture(scope="module")
def found(directories):
    return train_two_ranks(directories, REPLAYED, PARALLEL)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_step_that_replays_gives_the_numbers_of_torch(expected, found, family, name):
    check_same(found[family, name], expected[family, NUM_COPIES.get(name, 1)], what=f"{family} {name}")


def test_some_tokens_of_the_step_are_predicted_with_the_engines_experts_and_others_are_not(expected):
    for numbers in expected.values():
        assert 0.5 < numbers["replayed_fraction"][0] < 0.95


@pytest.mark.parametrize("family", FAMILIES)
def test_the_replay_changes_the_loss_and_the_gradient(directories, expected, family):
    (plain,) = train_torch_families(SINGLE_RANK, [(str(directories[family]), PLAIN)])
    replayed = expected[family, 1]
    assert replayed["loss"] != pytest.approx(plain["loss"], rel=1e-3)
    assert replayed["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-3)


def test_four_ranks_in_stages_that_take_turns_give_the_numbers_of_torch(directories, expected):
    """Layers are recomputed while other micro-batches are under way, and a rank has layers that are not neighbours."""
    chunks = {"tensor_parallel": 2, "pipeline_parallel": 2, "pipeline_chunks": 2, "recompute": True}
    given = [(str(directories[family]), REPLAYED | chunks, None) for family in ("qwen3_moe", "glm4_moe")]
    ranks = run_ranks(4, "tests.support.architectures:train_families", given, timeout_s=800)
    for family, mine in zip(("qwen3_moe", "glm4_moe"), ranks[0], strict=True):
        check_same(mine, expected[family, 1], what=f"{family} {chunks}")


def test_a_model_without_experts_is_refused(tmp_path):
    from hpcrl.trainers.megatron.trainer import MegatronTrainer

    with pytest.raises(TrainError, match=r'not known to be right for a model of type "llama": only for deepseek_v3'):
        MegatronTrainer(
            make_small(tmp_path, "llama3"), settings(trainer="megatron", router_replay=True), world=SINGLE_RANK
        )
