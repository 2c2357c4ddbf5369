"""The counts of an env worker: which of the tokens that were generated are left to training, and why the others not."""

import asyncio
from contextlib import aclosing
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest

from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import DomainConfig
from hpcrl.engines.base import CompletionChunk, GenerateRequest
from hpcrl.rollout import reporting
from hpcrl.rollout.agents.episode_record import build_record
from hpcrl.rollout.fault_budget import MIN_ENDINGS, FaultBudget
from hpcrl.rollout.groups import EpisodeGroups
from hpcrl.rollout.reporting import CountingPolicy, EpisodeReporter, LoopMeter
from hpcrl.rollout.task_queue import TaskQueue
from hpcrl.rollout.tasks import TaskStream
from tests.support.conversations import FACTS, answer


def make_reporter(emitted, *, num_workers=1):
    domains = {FACTS.domain: DomainConfig(env="tests.support.bad_envs:Echo")}
    return EpisodeReporter(
        domains,
        groups=EpisodeGroups(group_size=2, episodes_per_group=2),
        policy=CountingPolicy(None, on_turn=lambda *_: None),
        task_queue=TaskQueue(
            domains,
            tasks=TaskStream(EnvWorkerId(0, 1), recipe_seed=0),
            budget=FaultBudget(max_fault_share=0.5),
            groups_ahead=1,
            episodes_per_group=2,
            cpus=1,
            mem_gib=4.0,
        ),
        emit=emitted.append,
        num_workers=num_workers,
    )


@pytest.mark.parametrize(("num_workers", "interval_s"), [(1, 1), (30, 1), (300, 10), (4096, 20)])
def test_many_workers_report_no_more_in_all_than_few(num_workers, interval_s):
    emitted = []
    reporter = make_reporter(emitted, num_workers=num_workers)
    for second in range(1, 61):
        reporter.count_endings([(play(), "done")])
        reporter.report_due(now=100.0 + second)
    assert len(emitted) == 60 // interval_s
    reporter.count_endings([(play(), "done")])
    reporter.report()  # at the end of a job
    assert emitted[-1].outcomes[FACTS.domain] == {"finished": 61}


def play(status="done", choice="all", **changed):
    turns = [
        answer(0, None, [1], [2, 2]),
        answer(1, None, [1], [3] * 5),
        answer(2, None, [1], [4] * 10, is_trained=False),
    ]
    facts = msgspec.structs.replace(FACTS, status=status, **changed)
    return build_record(turns, facts, reward=1.0, choice=choice)


def test_the_log_of_a_worker_has_the_1st_and_the_10th_fault_of_a_domain(caplog):
    emitted = []
    reporter = make_reporter(emitted)
    for _ in range(12):
        reporter.end_episode(play(status="env-fault", extra={"fault": "no such file"}), now=0.0)
    assert len([event for event in emitted if event.what == "env-fault"]) == 12
    assert [record.getMessage().partition(" of ")[0] for record in caplog.records] == ["fault 1", "fault 10"]
    assert caplog.records[0].getMessage().endswith("no such file")


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
        "done": {"16+": 1, "16+tokens": 17, "tokens": 17},
        "aborted-stale": {"16+": 1, "16+tokens": 17, "tokens": 17},
        "aborted-redundant": {"128+": 1, "128+tokens": 128, "0+": 1, "0+tokens": 0, "tokens": 128},
    }


def test_a_fault_of_an_environment_names_its_domain():
    emitted = []
    make_reporter(emitted).end_episode(play(status="env-fault", extra={"fault": "reset: gone"}), now=0.0)
    (fault,) = emitted
    assert (fault.what, fault.detail, fault.domain) == ("env-fault", "reset: gone", FACTS.domain)


def test_the_report_of_a_pause_names_the_domain():
    emitted = []
    reporter = make_reporter(emitted)
    for number in range(MIN_ENDINGS):
        reporter.end_episode(play(status="env-fault", group=f"{FACTS.domain}/{number}"), now=0.0)
    (pause,) = [event for event in emitted if event.what == "env-paused"]
    assert pause.domain == FACTS.domain
    assert f"domains.{FACTS.domain} (tests.support.bad_envs:Echo) is paused for 15 s" in pause.detail


def test_a_loop_meter_measures_shares_and_delays_between_readings():
    times = iter([10.0, 14.0, 16.0])
    cpu_times = iter([1.0, 4.0, 4.5])
    meter = LoopMeter(clock=lambda: next(times), cpu_clock=lambda: next(cpu_times))
    for delay_s in (0.1, 0.5, 0.2):
        meter.note_delay(delay_s)
    assert meter.read() == (0.75, 0.5)
    assert meter.read() == (0.25, 0.0)


@pytest.mark.parametrize(("share", "num_faults"), [(0.95, 1), (0.5, 0)])
def test_an_event_loop_that_is_the_limit_is_reported_once(monkeypatch, share, num_faults):
    now = [0.0]
    monkeypatch.setattr(
        reporting, "LoopMeter", partial(LoopMeter, clock=lambda: now[0], cpu_clock=lambda: share * now[0])
    )
    emitted = []
    reporter = make_reporter(emitted)
    for second in range(200):
        now[0] = float(second)
        reporter.note_delay(0.4)
    assert [event.what for event in emitted] == ["env-loop"] * num_faults
    if emitted:
        assert "95% of a core, and calls wait up to 0.4 s" in emitted[0].detail
        assert "set resources.env.num_workers = 2 or more (now 1)" in emitted[0].detail


def test_counts_have_the_figures_of_the_loop_and_are_emitted_only_when_they_change(monkeypatch):
    times = iter(range(100))
    meter = partial(LoopMeter, clock=lambda: float(next(times)), cpu_clock=lambda: 0.0)
    monkeypatch.setattr(reporting, "LoopMeter", meter)
    emitted = []
    reporter = make_reporter(emitted)
    reporter.note_delay(0.25)
    reporter.report()
    reporter.report()
    assert [(event.loop_share, event.loop_delay_s) for event in emitted] == [(0.0, 0.25)]
