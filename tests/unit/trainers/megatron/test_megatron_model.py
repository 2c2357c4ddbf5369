"""Real architectures with small dimensions: two ranks of Megatron give the numbers of one rank of torch in float32."""

import json

import pytest
import torch
from safetensors import safe_open

from hpcrl.testing.ranks import run_ranks
from hpcrl.trainers.world import SINGLE_RANK
from tests.support.architectures import FAMILIES, make_families, make_small
from tests.support.learners import CONTEXT, settings, train_torch
from tests.support.megatron import skip_without_megatron

skip_without_megatron()

RELATIVE = 1e-4
pytestmark = pytest.mark.timeout(900)  # ranks are processes that import torch and transformers
PARALLEL = {
    "tp2": {"tensor_parallel": 2},
    "pp2": {"pipeline_parallel": 2, "recompute": True},
    "pp2-chunks": {"pipeline_parallel": 2, "pipeline_chunks": 2},
    "cp2": {"context_parallel": 2},
    "ep2": {"expert_parallel": 2},
    "tp2-ep2": {"tensor_parallel": 2, "expert_parallel": 2, "recompute": True},
}
CASES = [
    (family, name)
    for family, architecture in FAMILIES.items()
    for name, parallel in PARALLEL.items()
    if architecture.has_experts or "expert_parallel" not in parallel
]


def find_saved(family):
    """Return the case whose checkpoint is kept; experts come with two copies of the rest, each with some moments."""
    return "ep2" if FAMILIES[family].has_experts else "tp2"


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return make_families(tmp_path_factory.mktemp("families"), FAMILIES)


@pytest.fixture(scope="module")
def expected(directories):
    return {family: train_torch(SINGLE_RANK, path, {}, last=1) for family, path in directories.items()}


@pytest.fixture(scope="module")
def found(directories, tmp_path_factory):
    saved = tmp_path_factory.mktemp("saved")
    cases = [
        (str(directories[family]), PARALLEL[name], str(saved / family) if name == find_saved(family) else None)
        for family, name in CASES
    ]
    ranks = run_ranks(2, "tests.support.architectures:train_families", cases, timeout_s=600)
    return dict(zip(CASES, ranks[0], strict=True)), saved


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_step_gives_the_loss_the_gradient_and_the_weights_of_one_rank(expected, found, family, name):
    check_same(found[0][family, name], expected[family], what=family)


def check_same(mine, alone, *, what):
    for metric in ("loss", "grad_norm", "entropy"):
        assert mine[metric] == pytest.approx(alone[metric], rel=RELATIVE, abs=1e-6), (what, metric)
    assert mine["replayed_fraction"] == alone["replayed_fraction"], what
    assert mine["weights"].keys() == alone["weights"].keys()
    for tensor, numbers in alone["weights"].items():
        assert mine["weights"][tensor] == pytest.approx(numbers, rel=RELATIVE, abs=1e-5), (what, tensor)


def test_four_ranks_that_combine_two_ways_give_the_numbers_of_one_rank(directories, expected):
    """Stages of layers that ranks share, and stages of experts with two copies of the rest."""
    shared = {"tensor_parallel": 2, "pipeline_parallel": 2, "recompute": True}
    experts = {"expert_parallel": 2, "pipeline_parallel": 2}
    context = {"tensor_parallel": 2, "context_parallel": 2}
    stages = {"context_parallel": 2, "pipeline_parallel": 2, "pipeline_chunks": 2, "recompute": True}
    cases = [("llama3", shared), ("qwen3_moe", shared), ("qwen3_moe", experts), ("deepseek_v3", experts)]
    cases += [("qwen3", context), ("qwen3_moe", context | {"expert_parallel": 2}), ("deepseek_v3", stages)]
    given = [(str(directories[family]), parallel, None) for family, parallel in cases]
    ranks = run_ranks(4, "tests.support.architectures:train_families", given, timeout_s=800)
    for (family, parallel), mine in zip(cases, ranks[0], strict=True):
        check_same(mine, expected[family], what=f"{family} {parallel}")


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_continues_from_the_checkpoint_of_any_family(expected, found, directories, family):
    _, saved = found
    again = train_torch(SINGLE_RANK, directories[family], {}, load_from=saved / family, first=2, last=2)
    alone = train_torch(SINGLE_RANK, directories[family], {}, last=2)
    for metric in ("loss", "grad_norm"):
        assert again[metric] == pytest.approx(alone[metric][1:], rel=RELATIVE, abs=1e-6), metric


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_published_names_and_values_are_those_of_the_model_directory(directories, family):
    from hpcrl.trainers.megatron.trainer import MegatronTrainer

    trainer = MegatronTrainer(directories[family], settings(trainer="megatron"), world=SINGLE_RANK)
    found = trainer.tensors()
    with safe_open(directories[family] / "model.safetensors", "pt") as file:
        assert found.keys() == set(file.keys()) == {shard.name for shard, _ in trainer.shards()}
        assert all(torch.equal(tensor, file.get_tensor(name)) for name, tensor in found.items())


def test_rows_are_trained_up_to_the_context_that_engines_stretch(tmp_path):
    from hpcrl.trainers.megatron.trainer import MegatronTrainer

    config = make_small(tmp_path, "qwen2") / "config.json"
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    config.write_text(json.dumps(json.loads(config.read_bytes()) | {"rope_parameters": rope}))
    assert MegatronTrainer(tmp_path, settings(trainer="megatron"), world=SINGLE_RANK).max_length == 2 * CONTEXT
