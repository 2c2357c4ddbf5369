"""Groups of episodes and their ledger."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hpcrl.rollout.groups import EpisodeGroups
from hpcrl.spool.record import TRAINABLE
from hpcrl.spool.status import STATUSES
from tests.support.episodes import is_balanced
from tests.support.trajectories import make_trajectory


def trajectory(episode, status="done", start_version=0):
    return make_trajectory(episode, 0, status=status, start_version=start_version, turns=[])


def test_a_group_starts_with_its_redundant_episodes():
    assert EpisodeGroups(group_size=2, episodes_per_group=3).start("lake/4") == ["lake/4/0", "lake/4/1", "lake/4/2"]


def booked(ending):
    return {one.id: status for one, status in ending.booked}


def test_members_are_kept_by_index_whichever_finish_first():
    """The fastest are not a fair sample: short episodes would be trained on more than they are played."""
    groups = EpisodeGroups(group_size=2, episodes_per_group=4)
    groups.start("lake/0")
    for index in (3, 2, 1):
        assert groups.end(trajectory(f"lake/0/{index}")).released == ()
    assert not groups.endings
    ending = groups.end(trajectory("lake/0/0"))
    assert [kept.id for kept in ending.released] == ["lake/0/0", "lake/0/1"]
    assert ending.dropped == ["lake/0/2", "lake/0/3"]
    assert booked(ending)["lake/0/2"] == "aborted-redundant"
    assert groups.endings == {"done": 2, "aborted-redundant": 2}


def test_an_extra_episode_takes_the_place_of_one_that_failed():
    groups = EpisodeGroups(group_size=2, episodes_per_group=4)
    groups.start("lake/0")
    groups.end(trajectory("lake/0/2"))
    groups.end(trajectory("lake/0/1"))
    ending = groups.end(trajectory("lake/0/0", "env-fault"))
    assert [kept.id for kept in ending.released] == ["lake/0/1", "lake/0/2"]
    assert ending.abort == ["lake/0/3"]
    assert booked(ending) == {"lake/0/0": "env-fault", "lake/0/1": "done", "lake/0/2": "done"}


def test_members_that_are_late_are_replaced_by_those_that_have_finished():
    groups = EpisodeGroups(group_size=2, episodes_per_group=4, late_after_s=10)
    groups.start("lake/0", now=5.0)
    groups.end(trajectory("lake/0/3"), now=6.0)
    groups.end(trajectory("lake/0/1", "truncated"), now=6.0)
    assert groups.end_late(newest=0, now=14.9) == []
    ((name, ending),) = groups.end_late(newest=0, now=15.0)
    assert (name, [kept.id for kept in ending.released]) == ("lake/0", ["lake/0/1", "lake/0/3"])
    assert ending.abort == ["lake/0/0", "lake/0/2"]
    assert groups.end_late(newest=0, now=16.0) == []
    assert (groups.num_open, groups.num_running) == (0, 2)


def test_with_no_time_to_be_late_the_first_to_finish_are_kept():
    groups = EpisodeGroups(group_size=2, episodes_per_group=4, late_after_s=0)
    groups.start("lake/0")
    assert groups.end(trajectory("lake/0/3")).released == ()
    ending = groups.end(trajectory("lake/0/1", "truncated"))
    assert [kept.id for kept in ending.released] == ["lake/0/1", "lake/0/3"]
    assert ending.abort == ["lake/0/0", "lake/0/2"]


def test_a_group_that_starts_again_has_other_episodes():
    groups = EpisodeGroups(group_size=2, episodes_per_group=2, replacements=3)
    assert groups.start("lake/0", first_index=groups.max_episodes) == ["lake/0/5", "lake/0/6"]
    assert groups.end(trajectory("lake/0/5", "env-fault")).start == [7]


def test_groups_that_a_batch_does_not_need_are_closed():
    groups = EpisodeGroups(group_size=2, episodes_per_group=2)
    groups.start("lake/0")
    groups.start("lake/1")
    groups.end(trajectory("lake/0/0"))
    groups.end(trajectory("lake/0/1"))
    groups.end(trajectory("lake/1/1"))
    closed = groups.close_all()
    assert (closed.abort, closed.dropped) == (["lake/1/0"], ["lake/1/1"])
    groups.record_abort("lake/1", "lake/1/0")
    assert (groups.num_open, groups.num_running) == (0, 0)
    assert groups.endings == {"done": 2, "aborted-redundant": 2}


def test_dropped_trajectories_are_named():
    groups = EpisodeGroups(group_size=2, episodes_per_group=2, max_lag=1)
    groups.start("lake/0")
    groups.end(trajectory("lake/0/0"))
    ending = groups.end(trajectory("lake/0/1", "env-fault"))
    assert (ending.is_lost, ending.dropped) == (True, ["lake/0/0"])
    again = EpisodeGroups(group_size=2, episodes_per_group=3, max_lag=1)
    again.start("lake/1")
    again.end(trajectory("lake/1/0"))
    assert again.end(trajectory("lake/1/1", start_version=2), newest=2).dropped == ["lake/1/0"]


def test_an_episode_that_finishes_too_late_is_booked_as_redundant():
    groups = EpisodeGroups(group_size=1, episodes_per_group=2)
    groups.start("lake/0")
    groups.end(trajectory("lake/0/0"))
    late = groups.end(trajectory("lake/0/1"))
    assert booked(late) == {"lake/0/1": "aborted-redundant"}
    assert late.released == ()
    assert groups.endings == {"done": 1, "aborted-redundant": 1}


def test_a_fault_that_redundancy_covers_costs_nothing_more():
    groups = EpisodeGroups(group_size=2, episodes_per_group=3)
    groups.start("lake/0")
    assert not groups.end(trajectory("lake/0/0", "env-fault")).is_lost
    groups.end(trajectory("lake/0/1"))
    assert len(groups.end(trajectory("lake/0/2")).released) == 2


def test_a_group_that_can_no_longer_fill_is_lost_and_released_never():
    groups = EpisodeGroups(group_size=2, episodes_per_group=3)
    groups.start("lake/0")
    groups.end(trajectory("lake/0/0"))
    groups.end(trajectory("lake/0/1", "aborted-stale"))
    ending = groups.end(trajectory("lake/0/2", "policy-fault"))
    assert ending.is_lost
    assert (ending.released, groups.num_open) == ((), 0)


def test_running_episodes_of_a_lost_group_are_aborted():
    groups = EpisodeGroups(group_size=2, episodes_per_group=2)
    groups.start("lake/0")
    assert groups.end(trajectory("lake/0/0", "env-fault")).abort == ["lake/0/1"]


def test_episodes_are_ordered_by_number_and_not_by_text():
    groups = EpisodeGroups(group_size=1, episodes_per_group=12)
    groups.start("lake/0")
    assert groups.end(trajectory("lake/0/0")).abort[-2:] == ["lake/0/10", "lake/0/11"]


def test_a_late_duplicate_changes_nothing():
    groups = EpisodeGroups(group_size=2, episodes_per_group=2)
    groups.start("lake/0")
    groups.end(trajectory("lake/0/0"))
    assert groups.end(trajectory("lake/0/0")) is None
    assert groups.end(trajectory("lake/9/0")) is None
    assert groups.num_running == 1


def test_a_lost_episode_is_replaced_in_its_group():
    groups = EpisodeGroups(group_size=2, episodes_per_group=2, replacements=1)
    groups.start("lake/0")
    groups.end(trajectory("lake/0/0"))
    ending = groups.end(trajectory("lake/0/1", "env-fault"))
    assert (ending.start, ending.is_lost, ending.abort) == ([2], False, ())
    released = groups.end(trajectory("lake/0/2"))
    assert ([kept.id for kept in released.released], released.is_lost) == (["lake/0/0", "lake/0/2"], False)
    assert groups.num_open == 0


def test_a_group_is_lost_after_its_replacements():
    groups = EpisodeGroups(group_size=2, episodes_per_group=2, replacements=1)
    groups.start("lake/0")
    groups.end(trajectory("lake/0/1", "env-fault"))
    ending = groups.end(trajectory("lake/0/2", "env-fault"))
    assert ending.is_lost
    assert ending.abort == ["lake/0/0"]


def test_a_kept_trajectory_that_grew_old_is_replaced_and_never_released():
    groups = EpisodeGroups(group_size=2, episodes_per_group=2, replacements=2, max_lag=1)
    groups.start("lake/0")
    groups.end(trajectory("lake/0/0", start_version=3), newest=3)
    assert groups.end(trajectory("lake/0/1", start_version=5), newest=5).start == [2]
    released = groups.end(trajectory("lake/0/2", start_version=5), newest=5).released
    assert [kept.id for kept in released] == ["lake/0/1", "lake/0/2"]


def test_an_episode_that_ends_too_old_is_booked_as_stale():
    groups = EpisodeGroups(group_size=2, episodes_per_group=2, max_lag=1)
    groups.start("lake/0")
    assert booked(groups.end(trajectory("lake/0/0", start_version=1), newest=3)) == {"lake/0/0": "aborted-stale"}


class GroupMachine(RuleBasedStateMachine):
    """Any order of starts, ends, aborts, retries, new versions and late members, with late duplicates."""

    def __init__(self):
        super().__init__()
        self.size, self.first, self.replacements, self.max_lag = 3, 4, 3, 1
        self.groups = self.new_run()
        self.now = 0.0
        self.started = {}
        self.ended, self.aborting = [], []
        self.num_groups = self.newest = self.num_booked = 0
        self.seen_outside = set()

    def new_run(self):
        return EpisodeGroups(
            group_size=self.size,
            episodes_per_group=self.first,
            replacements=self.replacements,
            max_lag=self.max_lag,
            late_after_s=3.0,
        )

    @property
    def running(self):
        return sorted(self.groups.ledger.running)

    def record_starts(self, episodes):
        self.started |= dict.fromkeys(episodes, self.newest)

    @rule()
    def start(self):
        self.record_starts(self.groups.start(f"lake/{self.num_groups}", now=self.now))
        self.num_groups += 1

    @rule()
    def a_new_version_appears(self):
        self.newest += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def retry(self, data):
        """Restart an episode after a fault from the newest version, which the ledger does not record."""
        self.started[data.draw(st.sampled_from(self.running))] = self.newest

    @precondition(lambda self: self.running)
    @rule(data=st.data(), status=st.sampled_from(STATUSES))
    def end(self, data, status):
        episode = data.draw(st.sampled_from(self.running))
        ending = self.groups.end(trajectory(episode, status, self.started[episode]), newest=self.newest, now=self.now)
        self.ended.append(episode)
        self.aborting = [one for one in self.aborting if one != episode]
        self.follow(ending, episode.rpartition("/")[0])

    @rule(seconds=st.floats(0.1, 2.0))
    def time_passes(self, seconds):
        self.now += seconds
        for group, ending in self.groups.end_late(newest=self.newest, now=self.now):
            self.follow(ending, group)

    def follow(self, ending, group):
        self.aborting += ending.abort
        assert set(ending.abort) <= set(self.running)
        self.num_booked += len(ending.booked)
        self.record_starts([f"{group}/{index}" for index in ending.start])
        self.check_released(ending, group)

    def check_released(self, ending, group):
        if ending.released:
            ids = {kept.id for kept in ending.released}
            assert len(ids) == self.size
            assert not ids & self.seen_outside
            assert {kept.group for kept in ending.released} == {group}
            assert all(kept.status in TRAINABLE for kept in ending.released)
            assert all(self.newest - kept.start_version <= self.max_lag for kept in ending.released)
            self.seen_outside |= ids

    @precondition(lambda self: self.aborting)
    @rule(data=st.data())
    def abort(self, data):
        episode = data.draw(st.sampled_from(self.aborting))
        self.aborting.remove(episode)
        self.ended.append(episode)
        self.num_booked += 1 + len(self.groups.record_abort(episode.rpartition("/")[0], episode).booked)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), status=st.sampled_from(STATUSES))
    def end_again(self, data, status):
        assert self.groups.end(trajectory(data.draw(st.sampled_from(self.ended)), status)) is None

    @invariant()
    def every_episode_is_running_or_ended_exactly_once(self):
        ledger = self.groups.ledger
        assert is_balanced(ledger)
        assert len(set(self.ended)) == len(self.ended) == ledger.endings.total() + len(ledger.kept)
        assert self.num_booked == ledger.endings.total()
        assert ledger.num_started == len(self.started)

    @invariant()
    def nothing_is_held_for_groups_that_are_over(self):
        if not self.running:
            assert self.groups.num_open == len(self.groups.ledger.kept) == 0


TestGroups = GroupMachine.TestCase
TestGroups.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
