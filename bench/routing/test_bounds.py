"""The bounds of bench.router: no run is faster than them, and the losses add up."""

import pytest

from bench.routing.bounds import assign_hardware, free_bound_s, lower_bound_s
from bench.routing.fleet import WorkerFleet, replay
from bench.routing.losses import losses
from bench.routing.workload import Call, Script, synthetic

SCRIPTS = synthetic(24)
FLEET = WorkerFleet(workers={"h100": 1, "h20": 2}, max_batch=4, in_flight=16)


@pytest.fixture(scope="module")
def runs():
    return {policy: replay(SCRIPTS, FLEET, policy=policy) for policy in ("router", "round-robin", "sticky")}


@pytest.fixture(scope="module")
def bound_s():
    return lower_bound_s(SCRIPTS, FLEET)


@pytest.mark.parametrize("policy", ["router", "round-robin", "sticky"])
def test_no_policy_is_faster_than_the_bound(runs, bound_s, policy):
    assert free_bound_s(SCRIPTS, FLEET) <= bound_s <= runs[policy].makespan_s


@pytest.mark.parametrize("policy", ["router", "round-robin"])
def test_losses_add_up_to_the_makespan_above_the_bound(runs, bound_s, policy):
    lost = losses(runs[policy], SCRIPTS, FLEET, bound_s=bound_s)
    assert 1 + sum(lost.values()) == pytest.approx(runs[policy].makespan_s / bound_s)


def test_a_policy_that_sends_turns_anywhere_computes_more_prompts_again_than_one_that_lets_them_stay(runs, bound_s):
    lost = {policy: losses(run, SCRIPTS, FLEET, bound_s=bound_s) for policy, run in runs.items()}
    assert lost["sticky"]["prompts computed again"] == pytest.approx(0, abs=0.02)
    assert lost["round-robin"]["prompts computed again"] > 0.05


def test_a_trajectory_of_one_turn_has_nothing_to_compute_again():
    once = [Script(domain="once", calls=(Call(num_prompt=900, num_new=90, pause_s=0.0),))] * 50
    assert lower_bound_s(once, FLEET) == pytest.approx(free_bound_s(once, FLEET), rel=1e-4)


def test_moving_costs_what_the_new_hardware_has_not_seen():
    small, large = (Call(num_prompt=num, num_new=50, pause_s=0.0) for num in (3000, 12_000))
    mixed = [Script(domain="mixed", calls=(small, large))] * 50
    assert lower_bound_s(mixed, FLEET) > 1.01 * free_bound_s(mixed, FLEET)


def test_trajectories_with_long_prompts_are_assigned_to_compute():
    reads = Script(domain="any", calls=(Call(num_prompt=20_000, num_new=10, pause_s=0.0),))
    speaks = Script(domain="any", calls=(Call(num_prompt=20, num_new=2000, pause_s=0.0),))
    assigned = assign_hardware([reads, speaks] * 20, FLEET)
    assert {script.domain for script in assigned if script.calls == reads.calls} == {"compute"}
