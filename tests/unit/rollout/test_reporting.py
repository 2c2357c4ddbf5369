"""The counts of an env worker: which of the tokens that were generated are left to training, and why the others not."""

import msgspec

from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import DomainConfig
from hpcrl.rollout.agents.episode_record import build_record
from hpcrl.rollout.fault_budget import FaultBudget
from hpcrl.rollout.groups import EpisodeGroups
from hpcrl.rollout.reporting import CountingPolicy, EpisodeReporter
from hpcrl.rollout.task_queue import TaskQueue
from hpcrl.rollout.tasks import TaskStream
from tests.support.conversations import FACTS, answer


def make_reporter(emitted):
    domains = {FACTS.domain: DomainConfig(env="tests.support.bad_envs:Echo")}
    return EpisodeReporter(
        domains,
        groups=EpisodeGroups(group_size=2, episodes_per_group=2),
        policy=CountingPolicy(None, on_turn=lambda *_: None),
        agenda=TaskQueue(
            domains,
            tasks=TaskStream(EnvWorkerId(0, 1), recipe_seed=0),
            budget=FaultBudget(max_fault_share=0.5),
            groups_ahead=1,
            episodes_per_group=2,
            cpus=1,
            mem_gib=4.0,
        ),
        emit=emitted.append,
    )


def play(status="done", choice="all"):
    turns = [
        answer(0, None, [1], [2, 2]),
        answer(1, None, [1], [3] * 5),
        answer(2, None, [1], [4] * 10, is_trained=False),
    ]
    facts = msgspec.structs.replace(FACTS, status=status)
    return build_record(turns, facts, reward=1.0, choice=choice)


def test_the_fate_of_every_generated_token_is_counted():
    emitted = []
    reporter = make_reporter(emitted)
    reporter.end_episode(play(), "done", now=0.0)
    reporter.end_episode(play(choice="longest"), "truncated", now=0.0)
    reporter.end_episode(play(status="aborted-stale"), "aborted-stale", now=0.0)
    reporter.end_episode(play(), "aborted-redundant", now=0.0)
    reporter.report()
    (counts,) = emitted
    assert counts.token_fates == {
        FACTS.domain: {
            "trained": 7 + 5,
            "choice": 2,
            "sampling": 10 + 10,
            "aborted-stale": 17,
            "aborted-redundant": 17,
        }
    }
