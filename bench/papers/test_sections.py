"""The sections of bench.papers, and the episodes that they play."""

import re
from statistics import fmean, stdev

import pytest

from bench.papers import __main__ as command
from bench.papers.rollart import measure_weights
from bench.papers.workload import ONLY_H20, ONLY_H800, TASKS, PublishedEpisodes, load_recipe
from hpcrl.simulation.sizes import find_sizes


def test_every_section_is_in_the_text() -> None:
    assert re.findall(r"^    (\w+)  +\w", command.__doc__ or "", re.MULTILINE) == [*command.BY_STEPS, "scaling"]


def test_environments_take_times_of_the_given_distribution() -> None:
    source = PublishedEpisodes(tasks=TASKS, latency=(10.0, 3.0))
    times = [turn.env_s for number in range(50) for turn in source.draw("swe", seed=str(number)).turns]
    assert fmean(times) == pytest.approx(10.0, abs=0.5)
    assert stdev(times) == pytest.approx(3.0, abs=0.3)


def test_pools_of_one_kind_cost_the_same() -> None:
    decodes = [find_sizes(load_recipe(TASKS, settings)).decode for settings in (ONLY_H800, ONLY_H20)]
    assert [(one.gpu.name, one.num_gpus) for one in decodes] == [("h800", 16), ("h20", 48)]


def test_larger_models_stop_their_engines_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.papers.rollart.measure_step_s", lambda *_, **__: 1.0)
    pauses = [figure.value for figure in measure_weights(1) if "pause for weights" in figure.name]
    assert pauses == sorted(pauses)
    assert len(pauses) == 3
