"""Ranks that divide the positions of their rows: the loss and the gradient of one rank with whole rows."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hpcrl.errors import TrainError
from hpcrl.testing import ranks
from hpcrl.testing.ranks import run_ranks
from hpcrl.trainers.context_group import ContextGroup, make_context_group
from hpcrl.trainers.token_model import TokenModel
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.trainers.world import SINGLE_RANK, World
from tests.support.families import DENSE_FAMILIES, EXPERT_FAMILIES, make_family_model
from tests.support.learners import batch, partly_replayed_batch, settings, trained

ranks.preload_module(__name__)

FAMILIES = (*DENSE_FAMILIES, *EXPERT_FAMILIES)
CLOSE = 1e-4
VARIANTS = {
    "plain": {},
    "packed": {"rows": "packed"},
    "all kept": {"recompute": False, "rows": "packed"},
    "whole": {"sharding": "none"},
    "sequences": {"ratio": "sequence", "aggregation": "sequence", "entropy_coef": 0.01, "num_minibatches": 2},
    "costs": {"kl": "k1", "kl_in": "reward", "kl_coef": 0.1, "advantage": "reinforce++", "num_minibatches": 2},
    "compared": {"kl": "k1", "kl_in": "reward", "kl_coef": 0.1, "num_minibatches": 2},
    "critic": {"advantage": "gae", "gae_lambda": 0.9, "critic_learning_rate": 1e-3, "value_clip": 0.2},
    "adapters": {"lora_rank": 2, "kl": "k3", "learning_rate": 1e-2},
    "reference": {"kl": "k3", "kl_coef": 1.0, "pipeline": {"reference": {"data_parallel": 1}}},
}
BALANCED = {"moe_aux_coef": 1.0, "rows": "packed"}


def train_parts(world, model_dir, changed, gradient=None):
    """Train two steps, and save the gradient of the last minibatch."""
    torch.set_num_threads(1)
    chosen = settings(**({"sharding": "full"} | changed))
    trainer = TorchTrainer(Path(model_dir), chosen, seed=3, world=world)
    clip, kept = trainer.clip_gradient, {}

    def keep_gradient():
        for name, parameter in trainer._policy.trained_parameters().items():
            found = parameter.grad
            kept[name] = (found.full_tensor() if hasattr(found, "full_tensor") else found).clone()
        return clip()

    trainer.clip_gradient = keep_gradient
    make = partial(partly_replayed_batch, Path(model_dir)) if chosen.router_replay else batch
    found = trained(trainer, last=2, make=make)
    if not world.rank and gradient:
        save_file(kept, gradient)
    return found


def train_all(world, cases):
    """Train models one after the other, in processes that are started once."""
    return [train_parts(world, *case) for case in cases]


def check_same(found, expected, *, gradient, wanted):
    for metric in ("skipped", "num_tokens", "replayed_fraction"):
        assert found[metric] == expected[metric]
    for metric in ("loss", "grad_norm", "entropy"):
        assert found[metric] == pytest.approx(expected[metric], rel=CLOSE, abs=1e-6), metric
    if expected["value_loss"] != [None, None]:
        assert found["value_loss"] == pytest.approx(expected["value_loss"], rel=CLOSE)
    mine, theirs = load_file(gradient), load_file(wanted)
    assert mine.keys() == theirs.keys()
    norm = torch.stack([each.norm() for each in theirs.values()]).norm()
    for name, each in theirs.items():
        assert (mine[name] - each).norm() <= CLOSE * norm, name


def compare_with_one_rank(root, cases, *, num_ranks, size=2, timeout_s=600):
    """Train the cases, by name (model, settings), on groups of `size` ranks and on one alone."""
    given = [
        [str(model), {"context_parallel": size} | changed, str(root / f"{name}.safetensors")]
        for name, (model, changed) in cases.items()
    ]
    found = run_ranks(num_ranks, "tests.unit.trainers.test_context_group:train_all", given, timeout_s=timeout_s)
    for number, (name, (model, changed)) in enumerate(cases.items()):
        wanted = root / f"{name}-alone.safetensors"
        dropped = {"pipeline", "context_parallel"}
        if "moe_aux_coef" not in changed:  # whose loss is that of a micro-batch
            dropped.add("rows")  # one rank has transformers' attention to padded rows
        alone = {key: value for key, value in changed.items() if key not in dropped}
        expected = train_parts(SINGLE_RANK, model, alone, wanted)
        for rank in found:
            check_same(rank[number], expected, gradient=root / f"{name}.safetensors", wanted=wanted)


@pytest.mark.timeout(900)
def test_two_ranks_with_parts_of_rows_have_the_loss_and_gradient_of_one_in_every_family(tmp_path):
    """Sharded models; the next test has a whole one on each rank too."""
    changed = {"rows": "packed"}
    cases = {family: (make_family_model(tmp_path / family, family), changed) for family in FAMILIES}
    cases["window"] = (make_family_model(tmp_path / "window", "mixtral", sliding_window=16), changed)
    compare_with_one_rank(tmp_path, cases, num_ranks=2)


@pytest.mark.timeout(900)
def test_every_algorithm_has_the_numbers_of_one_rank(tmp_path):
    model = make_family_model(tmp_path / "model", "qwen3")
    cases = {name: (model, changed) for name, changed in VARIANTS.items()}
    experts = make_family_model(tmp_path / "experts", "qwen3_moe")
    cases["balanced"] = (experts, BALANCED)
    cases |= {f"replayed {rows}": (experts, {"router_replay": True, "rows": rows}) for rows in ("padded", "packed")}
    compare_with_one_rank(tmp_path, cases, num_ranks=2)


@pytest.mark.timeout(900)
def test_four_ranks_in_one_group_or_in_two_have_the_numbers_of_one_rank(tmp_path):
    dense, experts = (make_family_model(tmp_path / family, family) for family in ("llama", "qwen3_moe"))
    kept = {"recompute": False, "rows": "packed"}
    cases = {
        "dense": (dense, VARIANTS["packed"]),
        "critic": (dense, VARIANTS["critic"]),
        "costs": (experts, VARIANTS["costs"] | kept),
        "few rows": (experts, VARIANTS["compared"] | kept | {"num_minibatches": 8}),
        "replicas": (experts, {"sharding": "none"}),
        "one group": (experts, {"context_parallel": 4}),
    }
    compare_with_one_rank(tmp_path, cases, num_ranks=4)


@pytest.mark.parametrize(
    ("family", "changed", "problem"),
    [
        ("qwen3", {}, "does not divide the 4 attention heads of the model: set it to 2"),
        ("qwen3", {"num_attention_heads": 6, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ],
)
def test_models_whose_rows_cannot_be_divided_are_refused(tmp_path, family, changed, problem):
    model = AutoModelForCausalLM.from_pretrained(make_family_model(tmp_path / "model", family, **changed))
    with pytest.raises(TrainError, match=problem):
        TokenModel(model, context=ContextGroup(size=3))
    TokenModel(model, context=ContextGroup())


def test_a_number_of_ranks_that_groups_do_not_divide_is_refused():
    with pytest.raises(TrainError, match="multiple"):
        make_context_group(World(size=6), size=4)


@pytest.mark.parametrize("length", [1, 5, 8])
def test_each_position_is_in_one_part_and_rows_are_padded(length):
    inputs_BT = torch.arange(1, 2 * length + 1).view(2, length)
    groups = [ContextGroup(rank=rank, size=4) for rank in range(4)]
    parts = [group.divide(inputs_BT, inputs_BT % 3 > 0, positions_BT=None) for group in groups]
    joined = torch.cat([part.inputs_BS for part in parts], 1)
    assert torch.equal(joined[:, :length], inputs_BT)
    assert not joined[:, length:].any()
    assert len({part.inputs_BS.shape for part in parts}) == 1
    assert sorted(torch.cat([part.own_N for part in parts]).tolist()) == list(range(parts[0].num_tokens))
    assert sum(int(part.mask_BS.sum()) for part in parts) == int((inputs_BT % 3 > 0).sum())
    assert parts[0].positions_BS[0, 0] == 0
