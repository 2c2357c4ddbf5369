"""A job ends when no domain trains anything, and not before that is certain."""

from collections.abc import Iterable

import pytest

from hpcrl.campaign_dir.events import CampaignEvent, EpisodesCounted, FaultReported, SegmentScored
from hpcrl.job.domain_watch import DOMAIN_INTERVAL_S, FAULT_PATIENCE_S, DomainWatch

EPISODES_PER_STEP = 64


class WatchedJob:
    """A job with two domains whose events are given."""

    def __init__(self, *domains: str) -> None:
        self.now = 0.0
        self._events: list[CampaignEvent] = []
        self.num_polls = 0
        self._watch = DomainWatch(
            domains, episodes_per_step=EPISODES_PER_STEP, poll_events=self._poll, clock=lambda: self.now
        )

    def look(self, *events: CampaignEvent, after_s: float = DOMAIN_INTERVAL_S) -> str | None:
        self._events += events
        self.now += after_s
        return self._watch.find_end()

    def _poll(self) -> Iterable[CampaignEvent]:
        self.num_polls += 1
        new, self._events = self._events, []
        return new


def played(**outcomes: dict[str, int]) -> EpisodesCounted:
    return EpisodesCounted(time=1.0, role="env", worker="000-env-0", outcomes=outcomes)


def failed_rewards(domain: str, num: int) -> SegmentScored:
    return SegmentScored(
        time=1.0,
        role="reward",
        worker="000-reward-0",
        rewards={domain: [0.0] * num},
        reward_errors={domain: num},
        replaced_outcomes={domain: {"finished": num}},
    )


def test_rewards_that_all_fail_end_the_job_after_some_steps_of_them() -> None:
    job = WatchedJob("lake")
    fault = FaultReported(what="reward", detail="lake/0/0: my:nan_reward: it returned nan", domain="lake")
    assert job.look(played(lake={"finished": 100}), failed_rewards("lake", 100), fault) is None
    reason = job.look(played(lake={"finished": 300}), failed_rewards("lake", 200))
    assert reason is not None
    assert reason.startswith("no domain trains anything: domains.lake: all 300 rewards failed, the last: lake/0/0: my:")


def test_faults_of_the_infrastructure_end_the_job_only_if_they_last() -> None:
    job = WatchedJob("lake")
    assert job.look(played(lake={"env-fault": 1000})) is None
    assert job.look(after_s=FAULT_PATIENCE_S - DOMAIN_INTERVAL_S) is None
    assert "domains.lake: all 1,000 episodes failed" in (job.look() or "")


@pytest.mark.parametrize("outcome", ["exit", "timeout"])
def test_failures_of_the_policy_end_the_job_after_some_steps_of_them(outcome: str) -> None:
    job = WatchedJob("lake")
    assert job.look(played(lake={outcome: 4 * EPISODES_PER_STEP - 1})) is None
    assert job.look(played(lake={outcome: 4 * EPISODES_PER_STEP})) is not None


def test_a_domain_that_has_not_started_may_still_train() -> None:
    job = WatchedJob("lake", "sums")
    assert job.look(played(lake={"exit": 1000})) is None


def test_one_good_result_of_one_domain_ends_the_watch() -> None:
    job = WatchedJob("lake", "sums")
    scored = SegmentScored(time=1.0, role="reward", worker="000-reward-0", rewards={"sums": [1.0]})
    assert job.look(played(lake={"exit": 1000}, sums={"finished": 1}), scored) is None
    num_polls = job.num_polls
    assert job.look(played(lake={"exit": 9000}, sums={"exit": 9000})) is None
    assert job.num_polls == num_polls


def test_episodes_that_end_at_a_limit_are_good() -> None:
    job = WatchedJob("lake")
    scored = SegmentScored(time=1.0, role="reward", worker="000-reward-0", rewards={"lake": [0.0] * 1000})
    assert job.look(played(lake={"max-turns": 1000}), scored) is None
