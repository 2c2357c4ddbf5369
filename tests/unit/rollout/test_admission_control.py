"""The number of groups that an env worker may start, mode by mode: steps of four groups of two."""

import pytest

from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.rollout.admission import MIN_PATIENCE_S, AdmissionControl
from hpcrl.rollout.groups import EpisodeGroups
from tests.support.plans import make_recipe
from tests.support.trajectories import make_trajectory


def gate_of(mode, *, spare=0, max_running=100, host=0, num_hosts=1):
    settings = {
        "rollout.mode": mode,
        "rollout.spare_groups": spare,
        "rollout.group_size": 2,
        "rollout.max_lag": 1,
        "rollout.max_running": max_running,
        "train.groups_per_step": 4,
    }
    recipe = make_recipe(*(f"{name}={value}" for name, value in settings.items()))
    return AdmissionControl(recipe, EnvWorkerId(host, num_hosts))


def durable(num_waiting, *, now=0.0):
    """Return what is durable if one env worker has played all."""
    return {"sealed": {"env-0": num_waiting}, "settled": {}, "now": now}


def groups_of(num):
    groups = EpisodeGroups(group_size=2, episodes_per_group=2)
    for number in range(num):
        groups.start(f"lake/{number}")
    return groups


@pytest.mark.parametrize(("mode", "ahead"), [("sync", 4), ("one-step-off", 4), ("async", 8)])
def test_at_first_a_mode_that_waits_starts_one_batch_and_async_max_lag_more(mode, ahead):
    assert gate_of(mode).num_admitted(groups_of(0), num_unsealed=0, **durable(0)) == ahead


@pytest.mark.parametrize(("mode", "more"), [("sync", 0), ("one-step-off", 4), ("async", 4)])
def test_while_training_has_a_batch_only_sync_starts_nothing(mode, more):
    assert gate_of(mode).num_admitted(groups_of(0), num_unsealed=0, **durable(8)) == more


@pytest.mark.parametrize(("mode", "more"), [("sync", 1), ("one-step-off", 0), ("async", 5)])
def test_a_lost_group_is_replaced_at_once_unless_its_batch_leads_by_one(mode, more):
    assert gate_of(mode).num_admitted(groups_of(3), num_unsealed=0, **durable(0)) == more


@pytest.mark.parametrize(
    ("mode", "num_open", "num_waiting", "needed"),
    [
        ("async", 0, 0, 8),  # it is in the next batch
        ("async", 3, 0, 8),
        ("async", 4, 0, 9),  # one batch is ahead of it, open, durable or both
        ("async", 0, 8, 9),
        ("async", 2, 4, 9),
        ("async", 8, 0, 9),  # never a version that does not exist
        ("one-step-off", 0, 0, 8),
        ("sync", 0, 0, 9),
    ],
)
def test_an_episode_needs_the_version_that_is_not_too_old_once_what_is_ahead_is_trained_on(
    mode, num_open, num_waiting, needed
):
    gate = gate_of(mode)
    gate.num_admitted(groups_of(num_open), num_unsealed=0, **durable(num_waiting))
    assert gate.find_needed_version(9) == needed


def test_at_first_no_version_is_needed():
    assert gate_of("async").find_needed_version(0) == 0


def test_of_several_workers_each_counts_the_groups_of_the_others_as_its_own():
    gate = gate_of("async", num_hosts=2)
    gate.num_admitted(groups_of(2), num_unsealed=0, **durable(0))
    assert gate.find_needed_version(9) == 9


def test_a_worker_that_is_first_to_finish_takes_others_to_play_all_that_they_may():
    gate = gate_of("async", num_hosts=4)
    gate.num_admitted(groups_of(0), num_unsealed=0, sealed={"env-0": 2}, settled={}, now=0.0)
    assert gate.find_needed_version(9) == 9, "one of the others may play the batch before"


def test_where_few_episodes_may_run_others_may_still_have_all_groups_open():
    gate = gate_of("async", num_hosts=2, max_running=8)
    gate.num_admitted(groups_of(1), num_unsealed=0, **durable(0))
    assert gate.find_needed_version(9) == 9


def test_an_episode_starts_with_what_it_needs_or_what_all_engines_have():
    gate = gate_of("async")
    gate.num_admitted(groups_of(3), num_unsealed=0, **durable(0))
    assert [gate.find_oldest_start(versions, newest=9) for versions in ([7, 9], [9, 9], [])] == [8, 9, 8]


def test_trajectories_not_yet_durable_count():
    assert gate_of("sync").num_admitted(groups_of(0), num_unsealed=6, **durable(0)) == 1


def test_a_batch_is_complete_without_its_spare_groups():
    gate = gate_of("sync", spare=2)
    assert gate.num_to_start(4, groups_of(0)) == 6
    assert [gate.record_release() for _ in range(4)] == [False, False, False, True]


def play_batches(gate, *, num_batches, slow):
    """Play batches group by group, the groups of `slow` numbers last; return those released and those aborted."""
    groups, next_number, released, aborted = EpisodeGroups(group_size=2, episodes_per_group=2), 0, [], []
    while len(released) < num_batches * 4:
        num_waiting = 2 * (len(released) % 4)  # the trainer consumes whole batches
        for _ in range(gate.num_to_start(gate.num_admitted(groups, num_unsealed=0, **durable(num_waiting)), groups)):
            groups.start(f"lake/{next_number}")
            next_number += 1
        running = sorted({name.rpartition("/")[0] for name in groups.ledger.running}, key=lambda name: int(name[5:]))
        assert running, "nothing runs and nothing may start"
        ended = next((name for name in running if int(name[5:]) % 4 not in slow), running[0])
        for index in range(2):
            groups.end(make_trajectory(f"{ended}/{index}", 0, turns=[]))
        released.append(ended)
        if gate.record_release():
            episodes = groups.close_all().abort
            aborted += episodes
            for episode in episodes:
                groups.record_abort(episode.rpartition("/")[0], episode)
    return released, aborted


@pytest.mark.parametrize("mode", ["sync", "one-step-off"])
@pytest.mark.parametrize("max_running", [2, 4, 6, 8])
def test_a_batch_that_cannot_run_at_once_is_trained_without_aborting_its_slowest_groups(mode, max_running):
    released, aborted = play_batches(gate_of(mode, max_running=max_running), num_batches=5, slow={0, 2})
    assert aborted == []
    assert sorted(int(name[5:]) for name in released) == list(range(20))


def test_spare_groups_take_only_the_room_that_there_is():
    assert gate_of("sync", spare=2, max_running=10).num_to_start(4, groups_of(0)) == 5


def test_async_has_no_batches_and_nothing_to_spare():
    gate = gate_of("async", spare=2)
    assert gate.num_to_start(4, groups_of(0)) == 4
    assert not any(gate.record_release() for _ in range(9))


def test_workers_share_a_batch_and_its_spare_groups():
    opened = 0
    for host in range(3):
        gate = gate_of("sync", spare=2, host=host, num_hosts=3)
        opened += gate.num_to_start(gate.num_admitted(groups_of(0), num_unsealed=0, **durable(0)), groups_of(0))
    assert opened == 6


@pytest.mark.parametrize(
    ("mode", "versions", "may_start"),
    [
        ("sync", [5, 5], True),
        ("sync", [4, 5], False),
        ("one-step-off", [4, 5], False),
        ("async", [4, 2], True),
        ("async", [3, 2], False),
        ("async", [], False),
    ],
)
def test_a_group_starts_once_engines_have_weights_fresh_enough_for_its_first_turn(mode, versions, may_start):
    assert gate_of(mode).has_fresh_weights(versions, newest=5) is may_start


@pytest.mark.parametrize("mode", ["sync", "one-step-off", "async"])
def test_no_group_of_the_first_version_starts_before_there_is_an_engine(mode):
    assert not gate_of(mode).has_fresh_weights([], newest=0)
    assert not gate_of(mode).has_fresh_weights([-1], newest=0)
    assert gate_of(mode).has_fresh_weights([0], newest=0)


@pytest.mark.parametrize(
    ("num_open", "num_waiting", "is_sealed"),
    [(0, 6, False), (2, 4, False), (2, 6, True), (2, 8, False), (6, 2, True), (8, 0, True)],
)
def test_what_completes_a_batch_becomes_durable_at_once(num_open, num_waiting, is_sealed):
    gate = gate_of("async")
    assert (
        gate.should_seal(groups_of(3), num_open=num_open, num_unsealed=num_open, num_waiting=num_waiting) == is_sealed
    )


def test_trajectories_that_are_being_written_count_towards_a_batch():
    assert gate_of("async").should_seal(groups_of(3), num_open=2, num_unsealed=8, num_waiting=0)


def test_the_last_group_that_runs_is_waited_for_by_none():
    gate = gate_of("sync")
    sealed = [gate.should_seal(groups_of(num), num_open=2, num_unsealed=2, num_waiting=0) for num in (1, 0)]
    assert sealed == [False, True]


def test_one_of_several_env_workers_seals_its_part_of_a_batch():
    gate = gate_of("async", host=1, num_hosts=2)
    sealed = [gate.should_seal(groups_of(3), num_open=num, num_unsealed=num, num_waiting=0) for num in (2, 4)]
    assert sealed == [False, True]


def test_the_part_of_a_worker_that_is_gone_is_played_by_the_others_after_a_while():
    gate, groups = gate_of("sync", num_hosts=2), groups_of(0)
    groups.longest_s = 10.0
    settings = {"num_unsealed": 0, "sealed": {"env-0": 4}, "settled": {}}
    started = [gate.num_admitted(groups, now=now, **settings) for now in (0.0, MIN_PATIENCE_S, MIN_PATIENCE_S + 1)]
    assert started == [0, 0, 2]
    groups.longest_s = 600.0
    gate = gate_of("sync", num_hosts=2)
    started = [gate.num_admitted(groups, now=now, **settings) for now in (0.0, MIN_PATIENCE_S + 1, 1201.0)]
    assert started == [0, 0, 2], "episodes of ten minutes are not late after one"


def test_a_worker_does_not_take_others_for_late_while_its_own_part_is_missing():
    gate, none_durable = gate_of("async", num_hosts=2), {"num_unsealed": 0, "sealed": {}, "settled": {}}
    assert gate.num_admitted(groups_of(0), now=0.0, **none_durable) == 4
    assert gate.num_admitted(groups_of(0), now=600.0, **none_durable) == 4, "engines may start for long"
    assert gate.num_admitted(groups_of(4), now=1200.0, **none_durable) == 0, "the others may play as long as this one"


def test_a_worker_that_has_played_nothing_since_it_was_started_waits_for_others_for_half_of_a_stall():
    gate = gate_of("sync", num_hosts=2)
    settings = {"num_unsealed": 0, "sealed": {"env-0": 4}, "settled": {}}
    started = [gate.num_admitted(groups_of(0), now=now, **settings) for now in (0.0, 449.0, 451.0)]
    assert started == [0, 0, 2]
