"""The number of groups that may start."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.rollout.admission import (
    LateWorkers,
    add_spare_groups,
    compute_share,
    count_groups_with_room,
    count_needed_groups,
)

counts = st.integers(0, 10_000)


def groups(**changed):
    asked = {
        "worker": EnvWorkerId(0, 1),
        "max_running": 128,
        "episodes_per_group": 8,
        "running_episodes": 0,
        "running_groups": 0,
        "max_groups": 16,
        "waiting": {},
    }
    asked |= changed
    room = {name: asked.pop(name) for name in ("max_running", "episodes_per_group", "running_episodes")}
    return min(count_needed_groups(**asked), count_groups_with_room(asked["worker"], **room))


@given(counts, st.integers(1, 64))
def test_shares_differ_by_one_at_most_and_sum_to_the_whole(whole, num_hosts):
    shares = [compute_share(whole, EnvWorkerId(host, num_hosts)) for host in range(num_hosts)]
    assert sum(shares) == whole
    assert max(shares) - min(shares) <= 1


def test_one_worker_admits_groups_that_may_run_and_stay_fresh():
    assert groups() == 16
    assert groups(max_running=80) == 10
    assert groups(waiting={0: 5}, running_groups=4, running_episodes=32) == 7


def test_a_group_is_admitted_only_whole():
    assert groups(max_running=31) == 3
    assert groups(max_running=16, running_episodes=1) == 1
    assert groups(max_running=7) == 0


@given(st.integers(1, 16), counts, st.integers(1, 20), st.integers(0, 50), st.integers(0, 500))
def test_fresh_workers_together_admit_the_same_as_one(num_hosts, max_running, size, max_groups, left_over):
    """Also if groups of workers that were removed wait for training."""
    common = {
        "max_running": max_running,
        "episodes_per_group": size,
        "max_groups": max_groups,
        "waiting": {num_hosts: left_over},
    }
    assert sum(groups(worker=EnvWorkerId(host, num_hosts), **common) for host in range(num_hosts)) == groups(**common)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8), st.integers(0, 100))
def test_no_more_start_than_stay_fresh_whatever_each_worker_has(held, max_groups):
    waiting, total = {index: num for index, (num, _) in enumerate(held)}, 0
    for index, (num_waiting, num_running) in enumerate(held):
        worker = EnvWorkerId(index, len(held))
        part = compute_share(max_groups, worker)
        started = count_needed_groups(worker, running_groups=num_running, max_groups=max_groups, waiting=waiting)
        assert started == max(0, part - num_waiting - num_running)
        total += min(started + num_waiting + num_running, part)
    assert total <= max_groups


def test_a_worker_that_has_played_its_part_starts_nothing_of_what_others_still_play():
    waiting = {0: 16}
    needs = [
        count_needed_groups(EnvWorkerId(index, 4), running_groups=running, max_groups=64, waiting=waiting)
        for index, running in enumerate([0, 16, 16, 16])
    ]
    assert needs == [0, 0, 0, 0], "12 of the first worker's would be one step older than training needs them"


def test_other_workers_share_what_a_late_one_lacks_and_no_more():
    late, waiting = {3}, {0: 16, 1: 16, 2: 16, 3: 2}
    asked = {"running_groups": 0, "max_groups": 64, "late": late}
    needs = [count_needed_groups(EnvWorkerId(index, 4), waiting=waiting, **asked) for index in range(3)]
    assert needs == [5, 5, 4]
    played = {index: 16 + num for index, num in enumerate(needs)} | {3: 2}
    assert [count_needed_groups(EnvWorkerId(index, 4), waiting=played, **asked) for index in range(3)] == [0, 0, 0]


def test_a_worker_is_late_once_nothing_has_come_for_long_and_until_it_adds_something():
    watch = LateWorkers(EnvWorkerId(0, 3))

    def look(sealed, waiting, *, now, is_idle=True):
        return set(watch.find(sealed, waiting, is_idle=is_idle, part=4, now=now, patience_s=30.0))

    assert look({}, {}, now=-60.0, is_idle=False) == set()
    assert look({}, {}, now=-1.0, is_idle=False) == set(), "its own part is missing too"
    assert look({0: 4}, {0: 4}, now=0.0) == set()
    assert look({0: 4, 1: 4}, {0: 4, 1: 4}, now=29.0) == set(), "another one still plays"
    assert look({0: 4, 1: 4}, {0: 4, 1: 4}, now=58.0) == set()
    assert look({0: 4, 1: 4}, {0: 4, 1: 4}, now=60.0) == {2}
    assert look({0: 6, 1: 6}, {}, now=61.0) == {2}, "the next batch does not wait for it again"
    assert look({0: 6, 1: 6}, {}, now=62.0, is_idle=False) == {2}, "nor while this worker plays it"
    assert look({0: 6, 1: 6, 2: 1}, {2: 1}, now=70.0) == set()


@pytest.mark.parametrize("host", [-1, 2])
def test_a_worker_outside_the_count_is_refused(host):
    with pytest.raises(AssertionError, match="of 2"):
        EnvWorkerId(host, 2)


def test_a_batch_starts_with_spare_groups_if_there_is_room() -> None:
    assert add_spare_groups(8, num_in_flight=0, spare=2, room=12) == 10
    assert add_spare_groups(8, num_in_flight=0, spare=2, room=9) == 9


def test_replacements_of_lost_groups_have_no_spare_groups() -> None:
    assert add_spare_groups(1, num_in_flight=3, spare=2, room=12) == 1
    assert add_spare_groups(0, num_in_flight=0, spare=2, room=12) == 0
