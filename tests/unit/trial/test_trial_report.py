"""What `hpcrl try` prints about the episodes of a domain."""

import msgspec

from hpcrl.campaign_dir.paths import CampaignDir
from hpcrl.spool.outcome import OUTCOME_EXIT, OUTCOME_REWARD_ERROR
from hpcrl.system.files import make_private_dir
from hpcrl.trial.player import DomainTrial
from hpcrl.trial.report import NUM_BYTES, describe_trial, is_good, list_results, show_trials
from tests.support.printed_json import load_checked
from tests.support.trajectories import make_trajectory

GOOD = make_trajectory("math/0/0", reward=0.25, seed=7)
BETTER = make_trajectory("math/1/0", reward=0.75)
FAULT = make_trajectory("math/2/0", status="env-fault", extra={"fault": "no server\nanswered"})


def test_a_domain_is_described_by_its_mean_reward_and_the_ends_of_its_episodes():
    trial = DomainTrial("math", [GOOD, FAULT, BETTER])
    assert describe_trial(trial) == (
        "domain math: 3 episodes (2 finished, 1 env-fault), mean reward 0.5; no server\\nanswered"
    )
    assert is_good(trial)


def test_a_domain_of_faults_alone_has_no_reward_and_shows_the_last_reason_in_part():
    trial = DomainTrial("math", [FAULT, make_trajectory(status="env-fault", extra={"fault": "x" * 1000})])
    assert describe_trial(trial) == f"domain math: 2 episodes (2 env-fault), no reward; {'x' * NUM_BYTES}"
    assert not is_good(trial)


def test_an_agent_program_that_fails_makes_no_good_episode_though_it_has_a_reward():
    failed = make_trajectory(reward=0.0, outcome=OUTCOME_EXIT, extra={"reason": "it ended with code 1"})
    assert not is_good(DomainTrial("math", [failed]))
    assert is_good(DomainTrial("math", [failed, GOOD]))


def test_an_episode_that_failed_is_shown_as_failed_and_not_by_its_reward(capsys, tmp_path):
    campaign = CampaignDir(tmp_path)
    make_private_dir(campaign.spool("scored"))
    failed = make_trajectory(reward=0.0, outcome=OUTCOME_REWARD_ERROR)
    show_trials([DomainTrial("math", [failed])], campaign=campaign)
    head, *_, last = capsys.readouterr().out.splitlines()
    assert "failed (reward-error)" in head
    assert "reward 0.00" not in head
    assert last.endswith("1 episode (1 reward-error), no reward")


def test_the_facts_of_each_episode_are_listed():
    results = list_results([DomainTrial("math", [GOOD]), DomainTrial("code", [FAULT])])
    load_checked(msgspec.json.encode(results).decode(), "try")
    first, second = results
    assert (first.domain, first.id, first.seed, first.outcome, first.reward) == ("math", GOOD.id, 7, "finished", 0.25)
    assert (first.num_tokens, first.reason) == (len(GOOD), "")
    assert (second.domain, second.outcome, second.reward) == ("code", "env-fault", None)
    assert second.reason == "no server\nanswered"
