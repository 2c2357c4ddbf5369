"""The learning rate over the steps of a campaign."""

import math

import pytest

from hpcrl.config.recipe import TrainConfig
from hpcrl.trainers.nodes import compute_learning_rate


def rates(**changed):
    train = TrainConfig(groups_per_step=1, learning_rate=1.0, **{"num_steps": 10, **changed})
    return [compute_learning_rate(step, train=train, peak=1.0) for step in range(1, train.num_steps + 1)]


def test_a_constant_rate_is_constant():
    assert rates() == [1.0] * 10


def test_the_rate_warms_up_in_even_steps():
    assert rates(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_rate_falls_to_its_final_value_at_the_last_step(schedule):
    seen = rates(schedule=schedule, warmup_steps=2, final_learning_rate=0.1)
    assert seen[1] == 1.0
    assert seen[1:] == sorted(seen[1:], reverse=True)
    assert seen[-1] == pytest.approx(0.1)


def test_a_cosine_is_half_way_at_half_time():
    assert rates(schedule="cosine")[4] == pytest.approx((1 + math.cos(math.pi / 2)) / 2)
