"""Several trajectories in one row: each attends only to itself, with the numbers of padded rows."""

import numpy as np
import pytest
import torch

from hpcrl.learn.batch import make_micro_batches, make_packed_batches
from hpcrl.testing.learning import make_rows
from hpcrl.trainers.token_model import compute_token_logprobs
from hpcrl.trainers.torch import TorchTrainer
from hpcrl.trainers.world import SINGLE_RANK
from tests.support.learners import CONTEXT, FAMILIES, batch, make_model, settings, train_torch

CLOSE = 1e-5
ALGORITHMS = {
    "grpo": {},
    "gspo": {"num_minibatches": 2, "aggregation": "sequence", "ratio": "sequence", "kl": "k3", "entropy_coef": 0.01},
    "ppo": {"advantage": "gae", "gae_lambda": 0.9, "critic_learning_rate": 1e-3, "value_clip": 0.2},
}


@pytest.fixture(scope="module")
def rows():
    episodes = batch(num_groups=4)
    made, _ = make_rows(episodes, credits=[[0.5, -1.0]] * len(episodes), max_length=CONTEXT)
    return made


@pytest.mark.parametrize("bound", [1, 64, 150, 10_000])
def test_every_row_is_in_one_micro_batch_and_none_is_longer_than_the_bound(rows, bound):
    packed = make_packed_batches(rows, tokens_per_micro_batch=bound)
    padded = make_micro_batches(rows, tokens_per_micro_batch=10_000)
    for name in ("num_tokens", "num_sequences"):
        assert sum(getattr(micro, name) for micro in packed) == sum(getattr(micro, name) for micro in padded)
    seen = sorted(tuple(micro.targets_N[micro.rows_N == row].tolist()) for micro in packed for row in range(99))
    assert [row for row in seen if row] == sorted(tuple(row.targets.tolist()) for row in rows)
    for micro in packed:
        assert micro.inputs_BT.shape == micro.positions_BT.shape == (1, micro.num_padded_tokens)
        num_starts = (micro.positions_BT[0] == 0).sum()
        assert num_starts == 1 or micro.num_padded_tokens <= bound


def test_packing_pads_nothing_and_needs_fewer_passes(rows):
    packed = make_packed_batches(rows, tokens_per_micro_batch=128)
    padded = make_micro_batches(rows, tokens_per_micro_batch=128)
    assert sum(micro.num_padded_tokens for micro in packed) == sum(map(len, rows))
    assert sum(micro.num_padded_tokens for micro in padded) > sum(map(len, rows))
    assert len(packed) < len(padded)


@pytest.mark.parametrize(
    ("family", "algorithm"), [*((family, "grpo") for family in FAMILIES), ("qwen2", "gspo"), ("qwen2", "ppo")]
)
def test_packed_rows_give_the_numbers_of_padded_rows(tmp_path, family, algorithm):
    model_dir = make_model(tmp_path, family=family)
    changed = ALGORITHMS[algorithm]
    padded = train_torch(SINGLE_RANK, model_dir, changed, last=3)
    packed = train_torch(SINGLE_RANK, model_dir, {**changed, "rows": "packed"}, last=3)
    for name in ("loss", "grad_norm", "entropy", "num_tokens", *(["value_loss"] if algorithm == "ppo" else [])):
        assert packed[name] == pytest.approx(padded[name], rel=CLOSE, abs=CLOSE), name


def test_a_trajectory_does_not_attend_to_the_one_before_it(tmp_path, rows):
    trainer = TorchTrainer(make_model(tmp_path), settings(rows="packed"), seed=0)
    together = make_packed_batches(rows[:3], tokens_per_micro_batch=10_000)[0]
    with torch.no_grad():
        logprobs_N = compute_token_logprobs(trainer._policy, together, temperature=1.0)[0]
        order = np.argsort([-len(row) for row in rows[:3]], kind="stable")
        for place, number in enumerate(order):
            alone = make_packed_batches([rows[number]], tokens_per_micro_batch=10_000)[0]
            expected_N = compute_token_logprobs(trainer._policy, alone, temperature=1.0)[0]
            assert torch.allclose(logprobs_N[together.rows_N == place], expected_N, atol=CLOSE)
