"""The accounts of groups."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hpcrl.rollout.group import Groups
from hpcrl.spool.record import TRAINABLE, Trajectory

STATUSES = ("done", "truncated", "aborted-stale", "aborted-redundant", "env-fault", "policy-fault")


def trajectory(episode, status="done"):
    return Trajectory(
        id=episode,
        group=episode.rpartition("/")[0],
        domain="lake",
        seed=0,
        status=status,
        producer="000-env-0",
        created=0.0,
        start_version=0,
        end_version=0,
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        versions=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, np.bool_),
        turns=[],
    )


def test_a_group_begins_with_its_redundant_episodes():
    assert Groups(group_size=2, redundancy=1).begin("lake/4") == ["lake/4/0", "lake/4/1", "lake/4/2"]


def test_the_first_to_finish_are_released_by_index_and_the_rest_aborted():
    groups = Groups(group_size=2, redundancy=2)
    groups.begin("lake/0")
    assert groups.end(trajectory("lake/0/3")).released == ()
    ending = groups.end(trajectory("lake/0/1", "truncated"))
    assert [kept.id for kept in ending.released] == ["lake/0/1", "lake/0/3"]
    assert ending.abort == ["lake/0/0", "lake/0/2"]
    assert groups.num_open == 0
    assert groups.num_running == 2


def test_an_episode_that_finishes_too_late_is_booked_as_redundant():
    groups = Groups(group_size=1, redundancy=1)
    groups.begin("lake/0")
    groups.end(trajectory("lake/0/0"))
    late = groups.end(trajectory("lake/0/1"))
    assert late.status == "aborted-redundant"
    assert late.released == ()
    assert groups.endings == {"done": 1, "aborted-redundant": 1}


def test_a_fault_that_redundancy_covers_costs_nothing_more():
    groups = Groups(group_size=2, redundancy=1)
    groups.begin("lake/0")
    assert not groups.end(trajectory("lake/0/0", "env-fault")).lost
    groups.end(trajectory("lake/0/1"))
    assert len(groups.end(trajectory("lake/0/2")).released) == 2


def test_a_group_that_can_no_longer_fill_is_lost_and_released_never():
    groups = Groups(group_size=2, redundancy=1)
    groups.begin("lake/0")
    groups.end(trajectory("lake/0/0"))
    groups.end(trajectory("lake/0/1", "aborted-stale"))
    ending = groups.end(trajectory("lake/0/2", "policy-fault"))
    assert ending.lost
    assert (groups.num_lost, groups.num_released, groups.num_open) == (1, 0, 0)


def test_what_still_runs_in_a_lost_group_is_aborted():
    groups = Groups(group_size=2, redundancy=0)
    groups.begin("lake/0")
    assert groups.end(trajectory("lake/0/0", "env-fault")).abort == ["lake/0/1"]


def test_episodes_are_ordered_by_number_and_not_by_text():
    groups = Groups(group_size=1, redundancy=11)
    groups.begin("lake/0")
    assert groups.end(trajectory("lake/0/0")).abort[-2:] == ["lake/0/10", "lake/0/11"]


def test_a_late_duplicate_changes_nothing():
    groups = Groups(group_size=2, redundancy=0)
    groups.begin("lake/0")
    groups.end(trajectory("lake/0/0"))
    assert groups.end(trajectory("lake/0/0")) is None
    assert groups.end(trajectory("lake/9/0")) is None
    assert groups.num_running == 1


class Accounts(RuleBasedStateMachine):
    """Any order of beginnings and endings; late duplicates among them."""

    def __init__(self):
        super().__init__()
        self.size, self.redundancy = 3, 2
        self.groups = Groups(group_size=self.size, redundancy=self.redundancy)
        self.running, self.ended = [], []
        self.begun = self.released = 0
        self.seen_outside = set()

    @rule()
    def begin(self):
        self.running += self.groups.begin(f"lake/{self.begun}")
        self.begun += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data(), status=st.sampled_from(STATUSES))
    def end(self, data, status):
        episode = data.draw(st.sampled_from(self.running))
        self.running.remove(episode)
        self.ended.append(episode)
        ending = self.groups.end(trajectory(episode, status))
        assert set(ending.abort) <= set(self.running)
        if ending.released:
            ids = {kept.id for kept in ending.released}
            assert len(ids) == self.size
            assert not ids & self.seen_outside
            assert {kept.group for kept in ending.released} == {episode.rpartition("/")[0]}
            assert all(kept.status in TRAINABLE for kept in ending.released)
            self.seen_outside |= ids
            self.released += 1

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), status=st.sampled_from(STATUSES))
    def end_again(self, data, status):
        assert self.groups.end(trajectory(data.draw(st.sampled_from(self.ended)), status)) is None

    @invariant()
    def every_episode_is_running_or_ended_exactly_once(self):
        assert self.groups.num_running == len(self.running)
        assert self.groups.endings.total() == len(self.ended)
        assert self.begun * (self.size + self.redundancy) == len(self.running) + len(self.ended)

    @invariant()
    def every_group_is_open_released_or_lost(self):
        assert self.groups.num_open + self.groups.num_released + self.groups.num_lost == self.begun
        assert self.groups.num_released == self.released

    @invariant()
    def nothing_is_held_for_groups_that_are_over(self):
        if not self.running:
            assert self.groups.num_open == 0


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
