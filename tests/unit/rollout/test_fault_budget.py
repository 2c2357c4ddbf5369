"""The fault budget of a domain."""

import pytest

from hpcrl.rollout.fault_budget import (
    FIRST_PAUSE_S,
    MAX_DOMAIN_PAUSE_S,
    MAX_KEPT_GROUPS,
    MIN_ENDINGS,
    MIN_GROUPS,
    FaultBudget,
)


def paused(budget, domain="web", *, now=0.0):
    """Record faults, each in another group, until the domain is paused; return for how long."""
    for number in range(MIN_ENDINGS):
        pause_s = budget.record_end(domain, group=f"{domain}/{number}", fault=True, now=now)
        if pause_s is not None:
            return pause_s
    raise AssertionError("it was never paused")


def test_a_domain_over_its_budget_is_paused_and_the_others_continue():
    budget = FaultBudget(max_fault_share=0.5)
    assert paused(budget) == FIRST_PAUSE_S
    assert not budget.may_start("web", now=FIRST_PAUSE_S - 1)
    assert budget.may_start("lake", now=0.0)


def test_a_few_faults_at_the_start_pause_nothing():
    budget = FaultBudget(max_fault_share=0.5)
    pauses = [budget.record_end("web", group=f"web/{number}", fault=True, now=0.0) for number in range(MIN_ENDINGS - 1)]
    assert pauses == [None] * (MIN_ENDINGS - 1)


def test_a_domain_within_its_budget_is_never_paused():
    budget = FaultBudget(max_fault_share=0.5)
    faults = [number % 3 == 0 for number in range(500)]
    pauses = {
        budget.record_end("web", group=f"web/{number // 8}", fault=fault, now=float(number))
        for number, fault in enumerate(faults)
    }
    assert pauses == {None}


@pytest.mark.parametrize("num_bad", range(1, MIN_GROUPS))
def test_a_few_tasks_that_cannot_be_played_pause_nothing_however_often_they_are_tried(num_bad):
    budget = FaultBudget(max_fault_share=0.5)
    for number in range(500):
        assert budget.record_end("web", group=f"web/{number % num_bad}", fault=True, now=0.0) is None


def test_tasks_that_cannot_be_played_count_once_among_many_that_can():
    budget = FaultBudget(max_fault_share=0.5)
    for group in range(200):
        is_bad = group % 3 == 0
        for _ in range(36 if is_bad else 4):
            assert budget.record_end("web", group=f"web/{group}", fault=is_bad, now=0.0) is None


def test_old_groups_are_forgotten():
    budget = FaultBudget(max_fault_share=0.5)
    for number in range(500):
        assert budget.record_end("web", group=f"web/{number}", fault=False, now=0.0) is None
    bad = [
        budget.record_end("web", group=f"web/bad-{number}", fault=True, now=0.0) for number in range(MAX_KEPT_GROUPS)
    ]
    assert bad.index(FIRST_PAUSE_S) == MAX_KEPT_GROUPS // 2


def test_after_a_pause_one_group_is_tried():
    budget = FaultBudget(max_fault_share=0.5)
    pause_s = paused(budget)
    assert budget.may_start("web", now=pause_s)
    budget.record_start("web", group="web/1")
    assert not budget.may_start("web", now=pause_s)


def test_a_trial_that_gets_through_opens_the_domain():
    budget = FaultBudget(max_fault_share=0.5)
    pause_s = paused(budget)
    budget.record_start("web", group="web/1")
    budget.record_end("web", group="web/1", fault=False, now=pause_s)
    assert budget.may_start("web", now=pause_s)
    budget.record_start("web", group="web/1")
    assert budget.may_start("web", now=pause_s)


def test_each_failed_trial_doubles_the_pause_up_to_the_longest():
    budget = FaultBudget(max_fault_share=0.5)
    now, pauses = 0.0, [paused(budget)]
    for _ in range(8):
        now += pauses[-1]
        budget.record_start("web", group="web/1")
        pauses.append(budget.record_end("web", group="web/1", fault=True, now=now))
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == MAX_DOMAIN_PAUSE_S


def test_episodes_started_before_a_pause_do_not_affect_it():
    budget = FaultBudget(max_fault_share=0.5)
    pause_s = paused(budget)
    assert budget.record_end("web", group="web/1", fault=True, now=1.0) is None
    assert budget.record_end("web", group="web/1", fault=False, now=1.0) is None
    assert not budget.may_start("web", now=pause_s - 1)


def test_a_trial_whose_group_is_cancelled_lets_another_start():
    budget = FaultBudget(max_fault_share=0.5)
    pause_s = paused(budget)
    budget.record_start("web", group="web/1")
    budget.record_cancel("web", group="web/0")
    assert not budget.may_start("web", now=pause_s), "the cancelled group was started before the pause"
    budget.record_cancel("web", group="web/1")
    assert budget.may_start("web", now=pause_s)
