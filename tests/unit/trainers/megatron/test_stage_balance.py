"""The loss that balances experts: two ranks of Megatron give the numbers of ranks of torch that divide a step alike."""

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

skip_without_megatron()

pytestmark = pytest.mark.timeout(900)  # ranks are processes that import torch and transformers
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3")
PLAIN = {
    # The update is about the gradient itself, so that weights show its size; three micro-batches or more are under way.
    **{"learning_rate": 1.0, "adam_eps": 1.0, "weight_decay": 0.0, "max_grad_norm": 1e9, "tokens_per_micro_batch": 96},
    # Passes for the log-probs of the policy before the step, and for those of a fixed model.
    **{"num_minibatches": 2, "kl": "k3", "kl_coef": 0.1},
}
BALANCED = PLAIN | {"moe_aux_coef": 1.0}
PARALLEL = {
    "tp2": {"tensor_parallel": 2},
    "pp2": {"pipeline_parallel": 2, "recompute": True},
    "pp2-chunks": {"pipeline_parallel": 2, "pipeline_chunks": 2, "recompute": True},
    "cp2": {"context_parallel": 2, "recompute": True},
    "ep2": {"expert_parallel": 2},
    "tp2-ep2": {"tensor_parallel": 2, "expert_parallel": 2, "recompute": True},
}
NUM_COPIES = {"ep2": 2}
"""Copies of the model have different micro-batches, as ranks of torch have."""
CASES = [(family, name) for family in FAMILIES for name in PARALLEL]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return make_families(tmp_path_factory.mktemp("families"), FAMILIES)


@pytest.fixture(scope="module")
def expected(directories):
    """Return the numbers of torch by family and number of ranks."""
    return train_torch_ranks(directories, BALANCED)


@pytest.fixture(scope="module")
def found(directories):
    return train_two_ranks(directories, BALANCED, PARALLEL)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_step_with_the_loss_gives_the_numbers_of_torch(expected, found, family, name):
    check_same(found[family, name], expected[family, NUM_COPIES.get(name, 1)], what=f"{family} {name}")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_changes_the_gradient_of_every_router(directories, expected, family):
    (plain,) = train_torch_families(SINGLE_RANK, [(str(directories[family]), PLAIN)])
    balanced = expected[family, 1]
    assert abs(balanced["grad_norm"][0] / plain["grad_norm"][0] - 1) > 0.01
    routers = [name for name in plain["weights"] if name.endswith("gate.weight")]
    assert routers
    for name in routers:
        squares, others = plain["weights"][name][1], balanced["weights"][name][1]
        assert squares != pytest.approx(others, rel=1e-3), name


def test_four_ranks_that_combine_two_ways_give_the_numbers_of_torch(directories, expected):
    """Stages of layers that ranks share, and stages of experts with two copies of the rest."""
    shared = {"tensor_parallel": 2, "pipeline_parallel": 2, "recompute": True}
    experts = {"expert_parallel": 2, "pipeline_parallel": 2, "recompute": True}
    context = {"tensor_parallel": 2, "context_parallel": 2, "expert_parallel": 2}
    cases = [("qwen3_moe", shared, 1), ("qwen3_moe", experts, 2), ("qwen3_moe", context, 1)]
    given = [(str(directories[family]), BALANCED | parallel, None) for family, parallel, _ in cases]
    ranks = run_ranks(4, "tests.support.architectures:train_families", given, timeout_s=800)
    for (family, parallel, num_copies), mine in zip(cases, ranks[0], strict=True):
        check_same(mine, expected[family, num_copies], what=f"{family} {parallel}")


def test_a_model_without_experts_is_refused(tmp_path):
    from hpcrl.trainers.megatron.trainer import MegatronTrainer

    with pytest.raises(TrainError, match=r"train\.moe_aux_coef = 0\.1 needs a model with experts"):
        MegatronTrainer(
            make_small(tmp_path, "llama3"), settings(trainer="megatron", moe_aux_coef=0.1), world=SINGLE_RANK
        )
