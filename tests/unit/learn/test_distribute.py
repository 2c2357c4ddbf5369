"""The partition of rows: equal counts and nearly equal work."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.config.recipe import TrainConfig
from hpcrl.learn.distribute import balance_parts, compute_imbalance, distribute_step
from tests.support.trajectories import make_trajectory


@given(st.lists(st.integers(0, 10_000), max_size=80), st.integers(1, 9))
def test_every_row_is_in_one_part_and_counts_differ_by_at_most_one(weights, num_parts):
    parts = balance_parts(weights, num_parts=num_parts)
    assert sorted(index for part in parts for index in part) == list(range(len(weights)))
    counts = [len(part) for part in parts]
    assert len(parts) == num_parts
    assert max(counts) - min(counts) <= 1


def best_of_two(weights):
    """Find the least possible heavier half by trying every split."""
    half = len(weights) // 2
    return min(max(sum(some), sum(weights) - sum(some)) for some in combinations(weights, half))


@pytest.mark.parametrize("seed", range(20))
def test_two_parts_are_nearly_as_even_as_the_best_of_all_splits(seed):
    weights = np.random.default_rng(seed).lognormal(5, 1, 12).round().tolist()
    parts = balance_parts(weights, num_parts=2)
    heavier = max(sum(weights[index] for index in part) for part in parts)
    assert heavier <= 1.1 * best_of_two(weights)


@pytest.mark.parametrize("num_parts", [2, 4, 8])
def test_long_tailed_lengths_are_split_far_more_evenly_than_in_turn(num_parts):
    weights = np.random.default_rng(num_parts).lognormal(6, 1, 256).tolist()
    in_turn = [list(range(start, len(weights), num_parts)) for start in range(num_parts)]
    even = compute_imbalance(weights, balance_parts(weights, num_parts=num_parts))
    assert even - 1 < (compute_imbalance(weights, in_turn) - 1) / 10


def test_one_part_is_everything():
    assert balance_parts([3, 1, 2], num_parts=1) == [[0, 1, 2]]


def test_more_parts_than_rows_leave_some_empty():
    assert sorted(map(len, balance_parts([5.0, 5.0], num_parts=4))) == [0, 0, 1, 1]


def test_weights_of_zero_are_balanced():
    assert compute_imbalance([0, 0], [[0], [1]]) == 1.0


def test_a_partition_into_no_parts_is_refused():
    with pytest.raises(ValueError, match="num_parts is 0"):
        balance_parts([1.0], num_parts=0)


def test_a_step_of_which_the_filter_leaves_nothing_is_skipped_with_a_fix():
    episodes = [make_trajectory(f"math/0/{index}", reward=float(index), status="truncated") for index in range(4)]
    train = TrainConfig(num_steps=1, groups_per_step=1, learning_rate=1.0, overlong="filter")
    shares = distribute_step(episodes, train=train, num_ranks=2, seed=0, step=1, max_length=512)
    assert shares.shares == [[], []]
    assert "raise train.response_budget" in shares.skipped
