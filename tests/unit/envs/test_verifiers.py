"""The options of a verifiers environment are checked like those of a program; tests/contract plays real ones."""

from functools import partial

import pytest

from hpcrl.envs.agent import AgentProgram
from hpcrl.envs.verifiers import Verifiers
from hpcrl.errors import ConfigError

MAKERS = [partial(Verifiers, taskset="words"), partial(AgentProgram, command=["agent"])]


@pytest.mark.parametrize("make", MAKERS)
def test_all_conversations_are_trained_on_by_default_and_any_choice_is_known(make):
    assert (make().trains, make().sampling) == ("all", "recipe")
    for trains in ("all", "longest", "last"):
        assert make(trains=trains).trains == trains
    assert make(sampling="program").sampling == "program"


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"trains": "shortest"}, "trains = 'shortest': it must be one of all, longest, last"),
        ({"sampling": "greedy"}, "sampling = 'greedy': it must be one of recipe, program"),
        ({"trains": ["all"]}, "trains = .* must be one of"),
    ],
)
def test_an_unknown_choice_is_refused(make, options, problem):
    with pytest.raises(ConfigError, match=problem):
        make(**options)
