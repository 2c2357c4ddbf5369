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


@pytest.mark.parametrize(
    "options",
    [
        {"harness": "bash"},
        {"harness": "some_agent"},
        {"agent": {"harness": {"id": "bash"}}},
        {"agent": {"harness": {}}},
        {"agent": {"harness": "bash"}},
    ],
)
def test_a_harness_that_may_run_commands_of_the_model_needs_consent(options):
    with pytest.raises(ConfigError, match=r'without a sandbox.* set sandbox = "none"'):
        Verifiers(taskset="words", **options)
    Verifiers(taskset="words", sandbox="none", **options)


def test_a_chat_needs_no_consent_and_has_one_sandbox():
    Verifiers(taskset="words", agent={"max_turns": 3})
    Verifiers(taskset="words", agent={"harness": {"id": "null", "tools": []}})
    with pytest.raises(ConfigError, match="sandbox = 'bubblewrap': it must be one of auto, none"):
        Verifiers(taskset="words", sandbox="bubblewrap")
