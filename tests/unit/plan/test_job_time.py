"""The walltime of a job against what it needs until its first checkpoint."""

import pytest

from hpcrl.errors import PlanError
from hpcrl.plan.plan import Plan
from tests.support.plans import plan_recipe

SHORT = ("job.walltime_min=1", "job.drain_s=8")


def plan_qwen(name: str, *settings: str) -> Plan:
    return plan_recipe(*settings, recipe=name, site="perlmutter")


def test_a_walltime_that_cannot_hold_a_step_and_its_checkpoint_is_refused() -> None:
    with pytest.raises(PlanError, match=r"walltime_min = 1 cannot hold a step .* 366 GiB .* raise it to 8"):
        plan_qwen("qwen3-32b", *SHORT)


def test_a_walltime_of_which_start_and_end_take_most_is_warned_of() -> None:
    (share,) = [text for text in plan_qwen("qwen3-32b", "job.walltime_min=8").warnings if "walltime_min" in text]
    assert share.startswith("most of job.walltime_min = 8 is start and end: a job needs ")


def test_a_drain_that_is_shorter_than_a_checkpoint_takes_is_warned_of() -> None:
    (drain,) = [text for text in plan_qwen("qwen3-32b", "job.drain_s=8").warnings if "drain_s" in text]
    assert "job.drain_s = 8 is less than a checkpoint takes" in drain


@pytest.mark.parametrize("name", ["qwen3-32b", "qwen3-8b-math", "qwen3-30b-a3b"])
def test_the_walltimes_of_recipes_are_long_enough(name: str) -> None:
    assert not [text for text in plan_qwen(name).warnings if "walltime_min" in text or "drain_s" in text]


def test_a_model_of_unknown_size_has_no_needs_that_are_known() -> None:
    assert not [text for text in plan_recipe(*SHORT, site="lab").warnings if "walltime_min" in text]
