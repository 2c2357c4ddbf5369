"""The reward of each outcome: by the settings of the domain, or by its function."""

import errno
import math
import time

import pytest

from hpcrl.config.recipe import DomainConfig
from hpcrl.errors import ConfigError, EnvFault, PolicyFailure
from hpcrl.rollout.judge_outages import JudgeOutages
from hpcrl.rollout.rewards import (
    RewardCaller,
    apply_score,
    describe_reward_error,
    list_fault_outcomes,
    mark_outage,
    needs_score,
)
from hpcrl.spool.outcome import (
    OUTCOME_SETTINGS,
    OUTCOMES,
    is_infrastructure,
    measure_outcomes,
    name_outcome,
)
from hpcrl.spool.status import STATUSES
from hpcrl.system.variables import JUDGE_OUTAGES_VARIABLE
from tests.support.plans import make_recipe
from tests.support.trajectories import make_trajectory


def domain_of(**settings):
    return DomainConfig(env="package.module:Env", reward="package.module:score", **settings)


def scored(reward, *, outcome="", status="done", **settings):
    def give(trajectory):
        if isinstance(reward, Exception):
            raise reward
        return reward

    trajectory, domain = make_trajectory(outcome=outcome, status=status), domain_of(**settings)
    caller = RewardCaller(function=give, takes_list=False, is_async=False)
    asked = needs_score(trajectory, domain)
    return apply_score(trajectory, domain, ask(caller, trajectory) if asked else None)


def ask(caller, trajectory):
    """Call the function as a process of rewards does."""
    try:
        (score,) = caller.read_scores(caller.call([trajectory]), [trajectory])
    except Exception as error:  # noqa: BLE001 - as the process does
        score = describe_reward_error(error)
    return score


@pytest.mark.parametrize(("setting", "reward"), [(-0.5, -0.5), ("score", 1.0)])
@pytest.mark.parametrize("outcome", ["timeout", "exit", "max-turns", "overflow"])
def test_a_setting_of_the_domain_scores_its_outcome(outcome, setting, reward):
    trajectory = scored(1.0, outcome=outcome, **{OUTCOME_SETTINGS[outcome]: setting})
    assert (trajectory.reward, trajectory.outcome, trajectory.status) == (reward, outcome, "done")


def test_by_default_failures_give_zero_and_limits_what_the_function_returns():
    rewards = {outcome: scored(1.0, outcome=outcome).reward for outcome in OUTCOME_SETTINGS}
    assert rewards == {"max-turns": 1.0, "overflow": 1.0, "timeout": 0.0, "exit": 0.0, "reward-error": 0.0}


@pytest.mark.parametrize(
    "reward",
    [
        math.nan,
        math.inf,
        10**400,
        "1.0",
        b"1",
        None,
        [1.0, 2.0],
        {},
        {"a": "1"},
        {"a": math.inf, "b": -math.inf},
        {"x" * 1000: 1.0},
        {str(number): 1.0 for number in range(1000)},
        ValueError("malformed"),
        PolicyFailure("exit", "tests did not run"),
    ],
)
def test_a_reward_that_is_not_one_is_a_reward_error(reward):
    trajectory = scored(reward, on_reward_error=-1.0)
    assert (trajectory.reward, trajectory.outcome, trajectory.status) == (-1.0, "reward-error", "done")
    assert len(trajectory.extra["reason"]) < 1000
    assert scored(reward, on_reward_error="fault").status == "env-fault"


def wrapped(error, *, suppressed=False):
    """Return the error of a client, as it is raised where a connection has another."""
    outer = RuntimeError("Connection error.")
    outer.__context__, outer.__suppress_context__ = error, suppressed
    return outer


@pytest.mark.parametrize(
    "error",
    [
        OSError("no route"),
        OSError(errno.ENOSPC, "disk full"),
        TimeoutError(errno.ETIMEDOUT, "connection timed out"),
        ConnectionResetError(),
        ImportError("sympy"),
        EnvFault("judge is down"),
        wrapped(wrapped(ConnectionRefusedError())),
    ],
)
def test_infrastructure_that_fails_a_reward_function_is_never_scored(error):
    trajectory = scored(error)
    assert (trajectory.reward, trajectory.status) == (None, "env-fault")


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        FileNotFoundError(errno.ENOENT, "answer.json"),
        PermissionError(errno.EACCES, "answer.json"),
        OSError(errno.ENAMETOOLONG, "File name too long"),
        MemoryError(),
        wrapped(FileNotFoundError()),
        wrapped(ConnectionRefusedError(), suppressed=True),
    ],
)
def test_what_the_policy_may_have_done_to_a_reward_function_is_scored(error):
    trajectory = scored(error, on_reward_error=-1.0)
    assert (trajectory.reward, trajectory.outcome) == (-1.0, "reward-error")


def test_the_recipe_names_the_outcomes_that_are_faults():
    assert list_fault_outcomes(domain_of()) == frozenset()
    assert list_fault_outcomes(domain_of(on_exit="fault", on_reward_error="fault")) == {"exit", "reward-error"}


@pytest.mark.parametrize("value", ["'zero'", "nan", "inf", "1e9", "true"])
def test_a_setting_that_is_not_a_reward_is_refused(value):
    with pytest.raises(ConfigError, match="on_exit"):
        make_recipe(f"domains.lake.on_exit={value}")


def test_every_status_and_every_setting_has_an_outcome():
    assert {name_outcome(status, "") for status in STATUSES} <= set(OUTCOMES)
    assert all(name in DomainConfig.__struct_fields__ for name in OUTCOME_SETTINGS.values())


def test_infrastructure_causes_faults_and_no_other_outcome():
    assert {name for name in (*OUTCOMES, "an-unknown-one") if is_infrastructure(name)} == {"env-fault", "policy-fault"}


def test_shares_leave_out_what_training_aborted():
    counts = {"finished": 6, "exit": 3, "env-fault": 1, "aborted-redundant": 90}
    assert measure_outcomes(counts) == {"finished": 0.6, "exit": 0.3, "env-fault": 0.1}


@pytest.mark.parametrize(
    ("outcome", "seconds_ago", "status"),
    [
        ("timeout", 1, "env-fault"),
        ("exit", 1, "env-fault"),
        ("timeout", -9, "done"),
        ("max-turns", 1, "done"),
        ("", 1, "done"),
    ],
)
def test_an_episode_that_failed_while_a_judge_was_gone_is_a_fault(tmp_path, monkeypatch, outcome, seconds_ago, status):
    monkeypatch.setenv(JUDGE_OUTAGES_VARIABLE, str(tmp_path))
    JudgeOutages(tmp_path).note_failure("grader")
    played, started = make_trajectory(outcome=outcome), time.time() - seconds_ago
    assert mark_outage(played, domain_of(judges=["grader"]), since=started).status == status
    assert mark_outage(played, domain_of(judges=["other"]), since=started) is played
    assert mark_outage(played, domain_of(), since=started) is played
