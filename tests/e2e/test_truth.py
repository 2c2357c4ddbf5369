"""Training works: from a seed, the tiny model earns more than chance and more than the untrained model.

The lag is exact: every batch but the first few was sampled `alpha` versions before it is trained on.
"""

import dataclasses
import statistics

import pytest

from tests.support.truth import LAKE, LAKE_4X4, SUMS, at_random, learned

LESSONS = {"lake": LAKE, "lake of 4x4": LAKE_4X4, "sums": SUMS}
LAST = 10
"""The number of final steps to average: one batch is noisy."""
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("name", "alpha"), [("lake", 0), ("lake", 4), ("lake of 4x4", 4), ("sums", 0)])
def test_a_tiny_model_passes_a_bar_that_chance_and_the_untrained_model_do_not(tmp_path, name, alpha):
    lesson = LESSONS[name]
    rewards = learned(lesson, tmp_path / "model", alpha=alpha)
    assert at_random(lesson) < lesson.bar
    assert rewards[0] < lesson.bar
    assert statistics.mean(rewards[-LAST:]) > lesson.bar


def test_the_same_seed_gives_the_same_curve(tmp_path):
    short = dataclasses.replace(LAKE, num_steps=4)
    first, again = (learned(short, tmp_path / "model", alpha=1) for _ in range(2))
    assert first == again
    assert len(set(first)) > 1
