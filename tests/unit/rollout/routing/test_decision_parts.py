"""The parts of a routing decision, and the policies of priority, KV and roles."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.engines.base import GenerateRequest
from hpcrl.hardware.cost_model import ModelShape, estimate_speed
from hpcrl.hardware.gpus import GPU_CATALOGUE
from hpcrl.rollout.routing.decision import (
    WorkerCandidate,
    choose_cheapest,
    choose_kind,
    estimate_serve_s,
    load_price,
    remote_prefill_is_faster,
    sample_two,
    should_migrate,
)
from hpcrl.rollout.routing.role_switch import (
    MIN_OVERLOAD_S,
    Overload,
    choose_role_to_grow,
    choose_worker_to_switch,
    find_overload,
    split_workers,
)
from hpcrl.rollout.routing.trajectories import (
    MIN_SAMPLES,
    NUM_LEVELS,
    DomainCredits,
    PauseQuantiles,
    TrajectoryTable,
    kv_keep_s,
    queue_level,
)

SHAPE = ModelShape(num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, num_dense=8_000_000_000)
H100, H20 = (estimate_speed(GPU_CATALOGUE[name], shape=SHAPE) for name in ("h100", "h20"))


def test_without_candidates_none_is_chosen():
    assert choose_cheapest([]) is None


def test_the_turn_goes_where_it_costs_least():
    busy, slow = WorkerCandidate("busy", serve_s=1, wait_s=5), WorkerCandidate("slow", serve_s=4, wait_s=1)
    assert choose_cheapest([busy, slow]) is slow
    full, free = (
        WorkerCandidate("full", serve_s=1, price=load_price(1.2)),
        WorkerCandidate("free", serve_s=3, price=load_price(0.8)),
    )
    assert choose_cheapest([full, free]) is free


def test_a_home_is_left_for_much_less_work_and_not_for_a_high_price():
    home, there = WorkerCandidate("home", serve_s=4, price=load_price(1.2)), WorkerCandidate("there", serve_s=3)
    assert not should_migrate(home, there, migration_factor=2.0)
    assert should_migrate(home, WorkerCandidate("there", serve_s=2), migration_factor=2.0)


def test_a_home_that_is_extremely_expensive_is_left_for_more_work():
    home, there = WorkerCandidate("home", serve_s=1, price=load_price(2.2)), WorkerCandidate("there", serve_s=3)
    assert should_migrate(home, there, migration_factor=2.0)


@given(st.floats(0, 4), st.floats(0, 4))
def test_the_fuller_an_engine_the_more_expensive_its_time(one, other):
    assert (load_price(one) <= load_price(other)) == (one <= other) or load_price(one) == load_price(other)


def test_among_engines_with_free_places_hardware_decides_and_among_full_ones_the_load_does():
    assert load_price(0.5) < 1.01 * load_price(0.1)
    assert load_price(1.3) > 2 * load_price(1.1)


def test_hardware_that_does_not_suit_has_to_be_much_faster():
    suits, other = WorkerCandidate("suits", serve_s=4), WorkerCandidate("other", serve_s=3, is_suited=False)
    assert choose_cheapest([suits, other], mismatch_penalty=2.0) is suits
    assert choose_cheapest([suits, other], mismatch_penalty=1.2) is other


@pytest.mark.parametrize("num", [0, 1, 2])
def test_of_two_or_fewer_all_are_looked_at(num):
    assert list(sample_two(range(num), draw=random.Random(0))) == list(range(num))


@given(st.integers(3, 300), st.integers())
def test_two_different_workers_are_drawn(num, seed):
    first, second = sample_two(range(num), draw=random.Random(seed))
    assert first != second
    assert 0 <= min(first, second) <= max(first, second) < num


def test_every_worker_is_drawn_equally_often():
    draw = random.Random(0)
    drawn = Counter(worker for _ in range(5000) for worker in sample_two("abcde", draw=draw))
    assert max(drawn.values()) < 1.1 * min(drawn.values())


@pytest.mark.parametrize(("affinity", "kind"), [("compute", "h100"), ("bandwidth", "h20")])
def test_an_affinity_asks_for_the_kind_that_has_most_of_it(affinity, kind):
    assert choose_kind(affinity, {name: GPU_CATALOGUE[name] for name in ("h20", "h100")}) == kind


def test_without_known_hardware_an_affinity_asks_for_nothing():
    assert choose_kind("compute", {}) is None


def test_without_a_cost_model_all_turns_are_alike():
    assert estimate_serve_s(None, num_prompt=9, num_cached=0, num_new=5) == estimate_serve_s(
        None, num_prompt=1, num_cached=0, num_new=500
    )


def test_a_prompt_whose_kv_is_there_costs_less():
    assert estimate_serve_s(H20, num_prompt=8000, num_cached=7900, num_new=50) < estimate_serve_s(
        H20, num_prompt=8000, num_cached=0, num_new=50
    )


def test_remote_prefill_pays_for_a_long_prompt_and_not_for_one_that_is_known():
    def pays(num_known):
        return remote_prefill_is_faster(
            decode_speed=H20, prefill_speed=H100, wait_s=0.1, num_prompt=8000, num_cached=num_known
        )

    assert pays(0)
    assert not pays(7990)


def test_remote_prefill_does_not_pay_behind_a_long_queue():
    assert not remote_prefill_is_faster(decode_speed=H20, prefill_speed=H100, wait_s=60, num_prompt=8000, num_cached=0)


def test_a_trajectory_with_less_service_goes_first():
    levels = [queue_level(served_tokens=tokens, served_s=1, waited_s=0) for tokens in (0, 600, 5000, 10**7)]
    assert levels == sorted(levels)
    assert levels[0] == 0
    assert levels[0] < levels[2] < levels[3] < NUM_LEVELS


def test_a_trajectory_that_waited_too_long_goes_first_again():
    assert queue_level(served_tokens=10**6, served_s=10, waited_s=21) == 0


def test_a_domain_that_used_up_its_credit_has_none_until_the_others_have_used_theirs():
    credits = DomainCredits({"a": 1.0, "b": 1.0})
    credits.spend("a", 10_000)
    credits.replenish(["a", "b"])
    assert (credits.has_credit("a"), credits.has_credit("b")) == (False, True)


def test_turns_of_a_domain_that_used_up_its_credit_go_behind_all_levels():
    table = TrajectoryTable(weights={"a": 1.0, "b": 1.0})
    for domain in ("a", "b"):  # both have a turn under way
        table.start_turn(GenerateRequest(request_id=domain, token_ids=[1], max_new_tokens=1, domain=domain), now=0.0)
    table.credits.spend("a", 10_000)
    assert (table.credit_penalty("a"), table.credit_penalty("b")) == (NUM_LEVELS, 0)


def test_a_domain_that_alone_wants_something_is_not_held_back():
    credits = DomainCredits({"a": 1.0})
    credits.spend("a", 100_000)
    credits.replenish(["a"])
    assert credits.has_credit("a")


def test_domains_are_served_by_their_weights():
    credits, served = DomainCredits({"a": 3.0, "b": 1.0}), Counter()
    for _ in range(4000):
        credits.replenish("ab")
        domain = next(name for name in "ba" if credits.has_credit(name))
        credits.spend(domain, 100)
        served[domain] += 1
    assert served["a"] / served["b"] == pytest.approx(3, rel=0.1)


def test_kv_is_kept_until_the_tool_is_likely_back():
    assert kv_keep_s([1, 1, 1, 50], saving_s=10) == 1


def test_kv_that_is_cheap_to_compute_again_is_not_kept():
    assert kv_keep_s([5, 6, 7], saving_s=2) == 0


def test_of_few_pauses_nothing_is_concluded():
    pauses = PauseQuantiles()
    for _ in range(MIN_SAMPLES - 1):
        pauses.add(1.0)
    assert not pauses.quantiles
    assert kv_keep_s(pauses.quantiles, saving_s=100) == 0


def test_old_pauses_are_forgotten():
    pauses = PauseQuantiles()
    for seconds in [100.0] * 600 + [1.0] * 600:
        pauses.add(seconds)
    assert set(pauses.quantiles) == {1.0}


def test_a_role_is_overloaded_from_a_high_ratio_on_until_a_low_one():
    overload = find_overload({"prefill": 20, "decode": 4}, before=None, now=1)
    assert overload == Overload("prefill", 1)
    assert find_overload({"prefill": 12, "decode": 4}, before=None, now=2) is None
    assert find_overload({"prefill": 12, "decode": 4}, before=overload, now=2) == overload
    assert find_overload({"prefill": 5, "decode": 4}, before=overload, now=3) is None


def test_idle_workers_are_not_overloaded_whatever_the_ratio():
    assert find_overload({"prefill": 1, "decode": 0}, before=None, now=1) is None


def test_the_least_loaded_worker_of_the_other_role_switches_when_an_overload_has_lasted():
    workers = {"prefill": {"p": 20.0}, "decode": {"d0": 4.0, "d1": 2.0}}
    assert choose_worker_to_switch(Overload("prefill", 0), workers, now=MIN_OVERLOAD_S - 1) is None
    assert choose_worker_to_switch(Overload("prefill", 0), workers, now=MIN_OVERLOAD_S) == "d1"


def test_the_last_worker_of_a_role_stays():
    assert (
        choose_worker_to_switch(Overload("decode", 0), {"prefill": {"p": 0.0}, "decode": {"d": 9.0}}, now=1000) is None
    )


@given(st.integers(2, 100), st.floats(0.001, 1000), st.floats(0.001, 1000))
def test_a_split_has_a_worker_of_each_role_and_all_of_them(num, prefill_s, decode_s):
    prefill, decode = split_workers(num, prefill_s=prefill_s, decode_s=decode_s)
    assert prefill >= 1
    assert decode >= 1
    assert prefill + decode == num


def test_sizes_stay_within_the_band_and_change_beyond_it():
    assert choose_role_to_grow((3, 7), prefill_s=4, decode_s=6) is None
    assert choose_role_to_grow((3, 7), prefill_s=5, decode_s=5) == "prefill"
    assert choose_role_to_grow((7, 3), prefill_s=5, decode_s=5) == "decode"
