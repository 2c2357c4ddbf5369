"""The number of groups that may start."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.rollout.admission import add_spare_groups, compute_share, count_groups_with_room, count_needed_groups

counts = st.integers(0, 10_000)


def groups(**changed):
    asked = {
        "worker": EnvWorkerId(0, 1),
        "max_running": 128,
        "episodes_per_group": 8,
        "running_episodes": 0,
        "running_groups": 0,
        "max_lag": 1,
        "version": 0,
        "groups_per_step": 8,
        "accepted_groups": 0,
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
    assert groups(accepted_groups=5, running_groups=4, running_episodes=32) == 7


def test_a_group_is_admitted_only_whole():
    assert groups(max_running=31) == 3
    assert groups(max_running=16, running_episodes=1) == 1
    assert groups(max_running=7) == 0


@given(st.integers(1, 16), counts, st.integers(1, 20), st.integers(0, 4), st.integers(0, 50), st.integers(0, 500))
def test_fresh_workers_together_admit_the_same_as_one(num_hosts, max_running, size, max_lag, version, accepted):
    common = {
        "max_running": max_running,
        "episodes_per_group": size,
        "max_lag": max_lag,
        "version": version,
        "accepted_groups": accepted,
    }
    assert sum(groups(worker=EnvWorkerId(host, num_hosts), **common) for host in range(num_hosts)) == groups(**common)


def test_other_workers_make_up_for_a_dead_one():
    version, accepted = 0, 0
    for _ in range(200):
        admitted = groups(worker=EnvWorkerId(1, 2), version=version, accepted_groups=accepted)
        accepted += admitted
        version = accepted // 8
    assert version > 50


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
