"""The tasks that an env worker starts next, with environments prepared ahead; its journal; its curriculum."""

import asyncio
import json
import threading
from collections import Counter

import pytest

from hpcrl.campaign_dir.event_log import EventReader
from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import DomainConfig
from hpcrl.envs.pool import EnvPool, EnvSlots, open_env
from hpcrl.errors import ConfigError, EnvFault
from hpcrl.rollout.admission import get_mode_lag, limit_to_batch
from hpcrl.rollout.curriculum import UPDATE_INTERVAL_S, Curriculum
from hpcrl.rollout.episode_accounts import MAX_TASK_STARTS
from hpcrl.rollout.fault_budget import MIN_ENDINGS, FaultBudget
from hpcrl.rollout.journal import TaskJournal
from hpcrl.rollout.task_queue import TaskQueue
from hpcrl.rollout.tasks import AgentTask, TaskStream
from tests.support.bad_envs import AsyncEcho, Echo


class Noted(AsyncEcho):
    """An environment that records its calls."""

    def __init__(self, notes):
        self.notes = notes
        notes.append("made")

    async def reset(self, seed):
        self.notes.append(f"reset {seed}")
        return await super().reset(seed)

    async def close(self):
        self.notes.append("closed")


def pool(notes, *, make=None, **changed):
    async def made():
        return Noted(notes)

    limits = {"create_timeout_s": 30.0, "reset_timeout_s": 30.0, "max_starting": 4}
    return EnvPool(make or made, **(limits | changed))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_a_prepared_environment_is_reset_before_it_is_taken_and_not_again():
    async def run():
        notes = []
        envs = pool(notes)
        envs.prepare(7, count=1)
        await until(lambda: "reset 7" in notes)
        env = await envs.take(7)
        assert await env.reset(7) == "s7"
        assert notes == ["made", "reset 7"]
        assert (await env.step("done")).done
        await env.close()

    asyncio.run(run())


def test_without_a_prepared_one_an_environment_is_made():
    async def run():
        notes = []
        env = await pool(notes).take(7)
        assert await env.reset(7) == "s7"
        assert notes == ["made", "reset 7"]

    asyncio.run(run())


def test_environments_that_are_not_taken_are_closed():
    async def run():
        notes = []
        envs = pool(notes)
        envs.prepare(7, count=2)
        envs.prepare(8, count=1)
        await until(lambda: len(notes) == 6)
        envs.forget(7)
        await envs.close()
        assert notes.count("closed") == 3

    asyncio.run(run())


def test_a_preparation_that_hangs_is_a_fault_of_its_taker_and_the_next_is_fresh():
    async def run():
        async def never():
            await asyncio.Event().wait()

        envs = pool([], make=never, create_timeout_s=0.01)
        envs.prepare(7, count=1)
        with pytest.raises(EnvFault, match="no answer in"):
            await envs.take(7)

    asyncio.run(run())


def test_no_more_than_max_starting_start_at_once_and_their_time_starts_then():
    async def run():
        starting, most, done = 0, 0, asyncio.Event()

        async def slow():
            nonlocal starting, most
            starting += 1
            most = max(most, starting)
            await done.wait()
            starting -= 1
            return Noted([])

        envs = pool([], make=slow, max_starting=2)
        envs.prepare(7, count=3)
        taken = [asyncio.create_task(envs.take(seed)) for seed in (7, 7, 7, 8, 9)]
        await until(lambda: starting == 2)
        await asyncio.sleep(0.01)
        done.set()
        assert len(await asyncio.gather(*taken)) == 5
        assert most == 2

    asyncio.run(run())


def test_environments_are_made_ahead_only_while_there_are_slots():
    async def run():
        notes = []
        places = EnvSlots(4, num_ahead=8)
        envs = pool(notes, slots=places)
        envs.prepare(7, count=3)
        envs.prepare(8, count=3)
        await until(lambda: notes.count("reset 7") == 2)
        assert notes.count("made") == 2, "half of the places are for episodes that run"
        await envs.take(7)
        envs.prepare(9, count=3)
        await until(lambda: "reset 9" in notes)
        assert notes.count("made") == 3
        envs.forget(7)
        envs.forget(9)
        await envs.close()
        assert places.reserve(8) == 2, "all of them were given back"

    asyncio.run(run())


def test_a_failed_preparation_gives_its_place_back():
    async def run():
        async def broken():
            raise EnvFault("no")

        places = EnvSlots(2, num_ahead=1)
        envs = pool([], make=broken, slots=places)
        envs.prepare(7, count=1)
        with pytest.raises(EnvFault):
            await envs.take(7)
        assert places.reserve(1) == 1

    asyncio.run(run())


class Stuck(Echo):
    """An environment whose constructor waits for an event that is set late."""

    freed = threading.Event()

    def __init__(self):
        self.freed.wait(60)


def test_a_constructor_that_hangs_costs_only_its_taker():
    async def run():
        domain = DomainConfig(env="test_task_queue:Stuck")
        stuck = pool([], make=lambda: open_env("a", domain), create_timeout_s=0.05)
        with pytest.raises(EnvFault, match=r"no answer in 0\.05 s"):
            await stuck.take(7)
        env = await open_env("b", DomainConfig(env="tests.support.bad_envs:Echo"))
        assert await env.reset(3) == "s3"
        await env.close()
        Stuck.freed.set()

    asyncio.run(run())


AGENT_ENV = "hpcrl.envs.agent:AgentProgram"


def make_queue(*, domain=None, **changed):
    domains = {
        name: DomainConfig(**({"env": f"tests.support.bad_envs:{env}"} | (domain or {})))
        for name, env in (("a", "Echo"), ("b", "AsyncEcho"))
    }
    usual = {
        "budget": FaultBudget(max_fault_share=0.5),
        "groups_ahead": 2,
        "episodes_per_group": 2,
        "cpus": 1,
        "mem_gib": 4.0,
    }
    return TaskQueue(domains, tasks=TaskStream(EnvWorkerId(0, 1), recipe_seed=0), **(usual | changed))


def pause_domain(queue, domain):
    """Let the first episode of several groups fail; return for how many seconds the domain is paused."""
    pauses = [
        queue.record_end(domain, group=f"{domain}/{number}", fault=True, now=0.0) for number in range(MIN_ENDINGS)
    ]
    assert pauses[-1]
    return pauses[-1]


def test_isolated_environments_run_at_once_only_as_far_as_they_fit_into_memory():
    async def run():
        plans = make_queue(domain={"isolation": "process", "env_memory_gib": 0.5}, mem_gib=3.0, groups_ahead=0)
        task = plans.take_task(now=0.0)
        running, most = 0, 0

        async def episode():
            nonlocal running, most
            async with plans.reserve_slot(task):
                running += 1
                most = max(most, running)
                await asyncio.sleep(0)
                running -= 1

        await asyncio.gather(*(episode() for _ in range(20)))
        assert most == 4, "one GiB is the worker's own"

    asyncio.run(run())


def test_environments_without_separate_processes_need_no_slot():
    async def run():
        plans = make_queue(mem_gib=1.0, groups_ahead=0)
        task = plans.take_task(now=0.0)
        async with plans.reserve_slot(task), plans.reserve_slot(task), plans.reserve_slot(task):
            pass

    asyncio.run(run())


def test_domains_take_turns_and_their_environments_are_ready():
    async def run():
        plans = make_queue()
        tasks = [plans.take_task(now=0.0) for _ in range(4)]
        assert [task.domain for task in tasks] == ["a", "b", "a", "b"]
        env = await plans.take_env(tasks[0])
        assert await env.reset(tasks[0].seed) == f"s{tasks[0].seed}"
        await env.close()
        await plans.close()

    asyncio.run(run())


def test_a_domain_whose_environment_fails_is_skipped_and_the_others_continue():
    async def run():
        plans = make_queue(groups_ahead=0)
        pause_s = pause_domain(plans, "a")
        assert {plans.take_task(now=0.0).domain for _ in range(6)} == {"b"}
        later = [plans.take_task(now=pause_s).domain for _ in range(6)]
        assert later.count("a") == 1, "one group is tried"

    asyncio.run(run())


def test_a_domain_on_trial_is_tried_again_after_its_group_was_cancelled():
    async def run():
        plans = make_queue(groups_ahead=0)
        pause_s = pause_domain(plans, "a")
        for _ in range(3):
            tasks = [plans.take_task(now=pause_s) for _ in range(4)]
            (trial,) = (task for task in tasks if task.domain == "a")
            plans.end_task(trial)

    asyncio.run(run())


@pytest.mark.parametrize("groups_ahead", [0, 2, 8])
def test_a_domain_of_which_a_task_in_ten_cannot_be_played_continues(groups_ahead):
    async def run():
        queue = make_queue(groups_ahead=groups_ahead)
        queue.set_weights({"a": 1.0, "b": 0.0})
        num_played, starts = 0, Counter()
        for now in range(400):  # seconds, each of which is enough for a group
            task = queue.take_task(now=now)
            if task is None:
                continue
            is_bad = task.number % 10 == 0
            for _ in range(36 if is_bad else 4):  # each lost episode is replaced, for a while
                queue.record_end("a", group=task.group, fault=is_bad, now=now)
            queue.end_task(task)
            starts[task.group] += 1
            num_played += not is_bad
            if is_bad and starts[task.group] < MAX_TASK_STARTS:
                queue.return_task(task, lost=True)
        await queue.close()
        assert num_played > 270, "of 10 groups 9 are played once and 1 is tried 4 times"
        assert max(starts.values()) == MAX_TASK_STARTS

    asyncio.run(run())


def test_a_domain_that_fails_does_not_pause_another_of_the_same_environment():
    """All agent programs are one environment with different options, of which only one domain's may be wrong."""
    plans = make_queue(groups_ahead=0, domain={"env": AGENT_ENV})
    pause_domain(plans, "a")
    assert {plans.take_task(now=0.0).domain for _ in range(6)} == {"b"}


def test_with_every_environment_paused_nothing_starts():
    async def run():
        plans = make_queue(groups_ahead=0)
        for domain in "ab":
            pause_domain(plans, domain)
        assert plans.take_task(now=0.0) is None

    asyncio.run(run())


def test_a_domain_of_weight_zero_is_not_asked():
    async def run():
        plans = make_queue(groups_ahead=0)
        plans.set_weights({"a": 0.0, "b": 1.0})
        assert {plans.take_task(now=0.0).domain for _ in range(6)} == {"b"}

    asyncio.run(run())


def make_task(number, domain="a"):
    return AgentTask(domain=domain, number=number, seed=7 * number)


def test_a_journal_continues_where_a_killed_worker_left_it(tmp_path):
    journal = TaskJournal(tmp_path / "j")
    for number in range(3):
        journal.record_draw(make_task(number), {"a": 1.0})
    journal.record_start(make_task(0))
    journal.record_start(make_task(1))
    journal.record_end(make_task(0))
    journal.record_release(make_task(1))
    with (tmp_path / "j").open("ab") as file:
        file.write(b'{"end": "a/1')  # it was killed just then
    for _ in range(2):  # the second reads what the first has rewritten
        state = TaskJournal(tmp_path / "j").state
        assert list(state.open) == ["a/1", "a/2"]
        assert [(known.task, known.num_starts, known.released_at > 0) for known in state.open.values()] == [
            (make_task(1), 1, True),
            (make_task(2), 0, False),
        ]
        assert (state.draws.num_drawn, state.draws.drawn) == (3, {"a": 3})


def test_a_journal_that_has_grown_keeps_only_open_tasks(tmp_path, monkeypatch):
    monkeypatch.setattr("hpcrl.rollout.journal.MAX_JOURNAL_BYTES", 1000)
    journal = TaskJournal(tmp_path / "j")
    journal.record_draw(make_task(0), {"a": 1.0})
    for number in range(1, 100):
        journal.record_draw(make_task(number), {"a": 1.0})
        journal.record_start(make_task(number))
        journal.record_end(make_task(number))
    assert (tmp_path / "j").stat().st_size < 2000
    state = TaskJournal(tmp_path / "j").state
    assert (list(state.open), state.draws.num_drawn) == (["a/0"], 100)


@pytest.mark.parametrize(
    "line",
    [
        '{"draw": 3, "weights": {}}',
        '{"draw": {"domain": 1}, "weights": 0}',
        '{"start": ["a"]}',
        '{"state": []}',
        "[]",
        "\0",
    ],
)
def test_damaged_lines_of_a_journal_are_skipped(tmp_path, line):
    TaskJournal(tmp_path / "j").record_draw(make_task(0), {"a": 1.0})
    with (tmp_path / "j").open("a") as file:
        file.write(line + "\n")
    assert list(TaskJournal(tmp_path / "j").state.open) == ["a/0"]


def test_a_journal_keeps_a_bounded_number_of_tasks_that_wait_for_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("hpcrl.rollout.journal.MAX_DURABLE_TASKS", 2)
    for number in range(4):
        journal = TaskJournal(tmp_path / "j")
        journal.record_draw(make_task(number), {"a": 1.0})
        journal.record_durable(make_task(number))
    assert list(TaskJournal(tmp_path / "j").state.open) == ["a/2", "a/3"]


def test_a_task_that_runs_again_no_longer_waits_for_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("hpcrl.rollout.journal.MAX_DURABLE_TASKS", 2)
    journal = TaskJournal(tmp_path / "j")
    for number in range(3):
        journal.record_draw(make_task(number), {"a": 1.0})
    journal.record_durable(make_task(0))
    journal.record_return(make_task(0), counts=True)  # it was dropped as too old
    for number in (1, 2):
        journal.record_durable(make_task(number))
    assert journal.record_start(make_task(0)) == 1
    assert list(TaskJournal(tmp_path / "j").state.open) == ["a/0", "a/1", "a/2"]


def test_a_process_that_outlived_its_job_sees_that_another_continues_its_journal(tmp_path):
    leftover = TaskJournal(tmp_path / "j")
    assert not leftover.is_replaced
    TaskJournal(tmp_path / "j")
    assert leftover.is_replaced


def test_a_full_disk_delays_lines_of_the_journal_and_loses_none(tmp_path, monkeypatch):
    def refuse(fd, data):
        raise OSError(28, "No space left on device")

    journal = TaskJournal(tmp_path / "j")
    with monkeypatch.context() as patch:
        patch.setattr("os.write", refuse)
        journal.record_draw(make_task(0), {"a": 1.0})
        assert not journal.flush()
    journal.record_start(make_task(0))
    assert journal.flush()
    assert TaskJournal(tmp_path / "j").state.open["a/0"].num_starts == 1


def test_synchronous_modes_start_fewer_steps_ahead():
    assert [get_mode_lag(mode, max_lag=4) for mode in ("sync", "one-step-off", "async")] == [0, 1, 4]


def test_one_step_off_starts_a_whole_batch_once_the_last_one_is_complete():
    assert limit_to_batch(12, num_in_flight=1, batch=8) == 0
    assert limit_to_batch(12, num_in_flight=0, batch=8) == 8
    assert limit_to_batch(3, num_in_flight=0, batch=8) == 3


def curriculum(directory, hook):
    return Curriculum(hook, name="x:y", weights={"a": 1.0, "b": 1.0}, events=EventReader(directory))


def test_a_curriculum_sees_recent_rewards_and_gives_new_weights(tmp_path):
    line = {"event": "scored", "time": 1.0, "rewards": {"a": [1.0, 0.5]}}
    (tmp_path / "000-reward-0.jsonl").write_text(json.dumps(line) + "\n")
    seen = []

    def harder(recent):
        seen.append(recent)
        return {"a": 0.5}

    plans = curriculum(tmp_path, harder)
    assert plans.poll_weights(now=0.0) == {"a": 0.5, "b": 1.0}
    assert seen == [{"a": [1.0, 0.5], "b": []}]
    assert plans.poll_weights(now=1.0) is None, "not asked again so soon"
    assert plans.poll_weights(now=UPDATE_INTERVAL_S) is None, "nothing has changed"


@pytest.mark.parametrize("answer", [{"c": 1.0}, {"a": float("nan")}, {"a": -1.0}, {"a": 0.0, "b": 0.0}, 3, {"a": "x"}])
def test_invalid_weights_are_refused_with_the_name_of_the_function(tmp_path, answer):
    with pytest.raises(ConfigError, match="x:y"):
        curriculum(tmp_path, lambda _: answer).poll_weights(now=0.0)
