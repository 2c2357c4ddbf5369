"""A chain of jobs that are killed trains on the tasks of one that is not, each once; the test of two samples."""

import random

import pytest

from bench.bias import compare_samples, play_lognormal
from bench.rolling.campaign import RollingSetting
from bench.rolling.chain import run_chain

NUM_TASKS = 16


def test_a_chain_of_killed_jobs_trains_on_each_task_once():
    setting = RollingSetting(
        plays=play_lognormal, num_steps=99, groups_per_step=4, group_size=2, max_running=16, max_lag=16, num_gpus=1
    )
    chain = run_chain(setting, num_tasks=NUM_TASKS, kill_after_s=[20.0, 30.0])
    assert chain.num_killed == 2
    assert chain.count_groups(2) == dict.fromkeys(range(NUM_TASKS), 1)
    assert len(set(chain.trained_ids)) == len(chain.trained_ids) == 2 * NUM_TASKS
    assert len(chain.started) > len(chain.trained)


@pytest.mark.parametrize(("shift", "low", "high"), [(0.0, 0.05, 1.0), (0.5, 0.0, 1e-3)])
def test_two_samples_are_distinguished_only_if_they_differ(shift, low, high):
    chance = random.Random(2)
    first, second = ([chance.gauss(mean, 1) for _ in range(500)] for mean in (0, shift))
    assert low <= compare_samples(first, second) <= high


def test_the_p_value_is_that_of_the_tables():
    """The critical distance of two samples of 500 at 5 % is 1.358 / sqrt(250) = 0.0859."""
    first = list(range(500))
    assert compare_samples(first, [value + 43 for value in first]) == pytest.approx(0.05, abs=0.01)
