"""Lockstep: every turn waits for the slowest answer and the slowest environment."""

import pytest

from bench.papers.lockstep import play_in_lockstep
from hpcrl.hardware.cost_model import estimate_speed, read_model_shape
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.hardware.model_catalogue import MODEL_CONFIGS
from hpcrl.simulation.workload import EpisodeScript, TurnScript

SPEED = estimate_speed(GPU_CATALOGUE["h800"], shape=read_model_shape(MODEL_CONFIGS["Qwen/Qwen3-8B"]))


def play(*episodes: EpisodeScript) -> float:
    return play_in_lockstep(episodes, speed=SPEED, num_engines=2, max_batch=8)


def test_each_turn_takes_the_time_of_the_slowest_environment() -> None:
    slow_first = EpisodeScript(3.0, (TurnScript(10, 1, 20.0), TurnScript(10, 1, 1.0)))
    slow_last = EpisodeScript(1.0, (TurnScript(10, 1, 1.0), TurnScript(10, 1, 30.0)))
    assert play(slow_first) == pytest.approx(24.0, abs=0.5)
    assert play(slow_first, slow_last) == pytest.approx(53.0, abs=0.5)


def test_an_episode_that_has_ended_is_not_waited_for() -> None:
    short, long = (EpisodeScript(0.0, (TurnScript(10, 1, 5.0),) * num) for num in (1, 3))
    assert play(short, long) == pytest.approx(15.0, abs=0.5)
