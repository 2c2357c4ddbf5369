"""The counts of an env worker: which of the tokens that were generated are left to training, and why the others not."""

import asyncio
from contextlib import aclosing
from types import SimpleNamespace

import msgspec
import pytest

from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import DomainConfig
from hpcrl.engines.base import CompletionChunk, GenerateRequest
from hpcrl.rollout.agents.episode_record import build_record
from hpcrl.rollout.fault_budget import MIN_SAMPLES, FaultBudget
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


@pytest.mark.parametrize(("num_read", "versions"), [(2, [7, 6]), (1, [7])])
@pytest.mark.parametrize("domain", ["lake", "held-out:lake"])
def test_the_versions_of_a_streamed_turn_are_known_at_its_end(domain, num_read, versions):
    """The hold counts on it: an engine may have used an older version than the episode's first."""

    async def stream(request):
        for version in (7, 6):
            yield CompletionChunk(token_ids=[1], logprobs=[0.0], versions=[version], remote_prefill=version == 7)

    async def read():
        async with aclosing(policy.stream(request)) as chunks:
            for _ in range(num_read):
                await anext(chunks)

    acted = []
    policy = CountingPolicy(
        SimpleNamespace(stream=stream), on_turn=lambda episode, completion: acted.append((episode, completion.versions))
    )
    request = GenerateRequest(request_id=f"{domain}/0/1/0/0", token_ids=[1], max_new_tokens=9)
    asyncio.run(read())
    counted = domain == "lake"
    assert acted == [(f"{domain}/0/1", versions)] * counted
    assert (policy.num_turns, policy.num_remote_prefills) == (counted, counted)


def test_the_fate_of_every_generated_token_is_counted():
    emitted = []
    reporter = make_reporter(emitted)
    endings = [(play(), "done"), (play(choice="longest"), "truncated"), (play(), "aborted-redundant")]
    reporter.count_endings([*endings, (play(status="aborted-stale"), "aborted-stale")])
    reporter.report()
    (counts,) = emitted
    assert counts.by_domain[FACTS.domain] == {"done": 1, "truncated": 1, "aborted-redundant": 1, "aborted-stale": 1}
    assert counts.token_fates == {
        FACTS.domain: {
            "trained": 7 + 5,
            "choice": 2,
            "sampling": 10 + 10,
            "aborted-stale": 17,
            "aborted-redundant": 17,
        }
    }


def test_the_length_of_every_episode_is_counted_also_of_one_that_was_cancelled():
    emitted = []
    reporter = make_reporter(emitted)
    reporter.count_endings([(play(), "done"), (play(), "aborted-stale")])
    for num_tokens in (100, 28):
        reporter.record_turn("lake/0/0", num_tokens)
    reporter.abort_episode("lake/0/0")
    reporter.abort_episode("lake/0/1")  # before its first turn
    reporter.report()
    assert emitted[0].lengths == {
        "done": {"5": 1, "tokens": 17},
        "aborted-stale": {"5": 1, "tokens": 17},
        "aborted-redundant": {"8": 1, "0": 1, "tokens": 128},
    }


def test_the_report_of_a_pause_names_the_domain():
    emitted = []
    reporter = make_reporter(emitted)
    for _ in range(MIN_SAMPLES):
        reporter.end_episode(play(status="env-fault"), now=0.0)
    (pause,) = [event for event in emitted if event.what == "env-paused"]
    assert pause.domain == FACTS.domain
    assert f"domains.{FACTS.domain} (tests.support.bad_envs:Echo) is paused for 15 s" in pause.detail
