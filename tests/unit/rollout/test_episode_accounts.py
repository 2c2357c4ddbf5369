"""Accounts that stay in step: groups, start versions and the journal, however episodes and the worker end."""

import json
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.campaign_dir.events import TaskFailed, TasksRestarted
from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.envs.task_set import import_task_set
from hpcrl.rollout.episode_accounts import MAX_TASK_STARTS, EpisodeAccounts
from hpcrl.rollout.groups import EpisodeGroups
from hpcrl.rollout.journal import TaskJournal
from hpcrl.rollout.task_sets import TaskSets
from hpcrl.rollout.tasks import TaskStream
from hpcrl.spool.ids import get_index
from tests.support.episodes import is_balanced
from tests.support.plans import make_recipe
from tests.support.trajectories import make_lake_trajectory

WORKER = EnvWorkerId(0, 1)


class WorkerRun:
    """The accounts of one run of a worker: groups of 2 of 3 episodes, whose tasks are the 4 rows of a file."""

    def __init__(self, directory, *, replacements=0, durable=()):
        recipe = make_recipe(f'domains.lake.tasks="{directory}/rows.jsonl"')
        self.journal = TaskJournal(directory / "journal.jsonl")
        draws = self.journal.state.draws
        self.task_sets = TaskSets(recipe, WORKER, directory=directory, num_drawn=draws.rows)
        self.stream = TaskStream(
            WORKER, recipe_seed=0, rows=self.task_sets, progress=draws, record_draw=self.journal.record_draw
        )
        self.events = []
        self.accounts = EpisodeAccounts(
            EpisodeGroups(group_size=2, episodes_per_group=3, replacements=replacements, max_lag=1, late_after_s=0),
            journal=self.journal,
            return_task=self.stream.return_task,
            emit=self.events.append,
            find_oldest_start=lambda newest: newest,
        )
        self.released = self.accounts.list_released()
        self.accounts.recover(durable=durable)

    def draw(self):
        return self.stream.draw({"lake": 1.0})

    def start(self, *, version=0):
        task = self.draw()
        assert len(self.accounts.start_group(task, newest=version)) == 3
        return task

    def end(self, task, index, status="done", *, newest=0):
        ended = make_lake_trajectory(task.number, index, status=status, start_version=0)
        return self.accounts.end_episode(task, ended, newest=newest)

    def find_first(self, task):
        """Return the index of the first episode of a group that runs."""
        return min(get_index(one) for one in self.accounts.groups.ledger.running if one.startswith(f"{task.group}/"))

    def release(self, task):
        """End two episodes of a group and abort the third; return those that are released."""
        first = self.find_first(task)
        for index in (first, first + 1):
            self.end(task, index)
        self.abort_all(task)
        return [task.episode(first), task.episode(first + 1)]

    def abort_all(self, task):
        for episode in sorted(self.accounts.groups.ledger.running):
            if episode.startswith(f"{task.group}/"):
                self.accounts.abort_episode(task, get_index(episode))

    def limit(self, *, newest):
        return self.accounts.in_flight.limit(newest=newest, max_lag=1)


def write_rows(directory):
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps({"n": number}) + "\n" for number in range(4)))
    recipe = make_recipe(f'domains.lake.tasks="{path}"')
    import_task_set(recipe.domains["lake"].task_set, domain="lake", directory=directory)
    return directory


@pytest.fixture(autouse=True)
def rows(tmp_path):
    write_rows(tmp_path)


@pytest.fixture
def worker(tmp_path, rows):
    return WorkerRun(tmp_path)


def test_a_task_that_was_not_needed_is_started_again_and_the_start_does_not_count(worker):
    for _ in range(2 * MAX_TASK_STARTS):
        spare = worker.start()
        assert spare.place == 0
        assert worker.accounts.close_groups().abort == sorted(worker.accounts.groups.ledger.running)
        worker.abort_all(spare)
    assert worker.draw() == spare
    assert worker.draw().place == 1
    assert not worker.events


def test_a_task_ends_when_its_whole_group_is_durable(worker, tmp_path):
    """A kill between the two loses the trajectories: the next run of the worker starts the task again."""
    task = worker.start()
    worker.end(task, 0)
    assert worker.end(task, 2).abort == [task.episode(1)]
    worker.accounts.abort_episode(task, 1)
    assert worker.draw().number != task.number  # it is still the task of a group that was released
    nexts = []
    for sealed in ([], [0], [2]):
        worker.accounts.record_sealed([task.episode(index) for index in sealed])
        nexts.append(WorkerRun(tmp_path).draw())
        worker.journal._rewrite()
    assert nexts[:2] == [task, task]
    assert nexts[2] != task


def test_a_group_that_became_durable_just_before_a_kill_is_not_started_again(worker, tmp_path):
    task = worker.start()
    worker.end(task, 0)
    worker.end(task, 1)
    after_kill = WorkerRun(tmp_path, durable={task.group})
    assert after_kill.released == [task.group]
    assert after_kill.draw() != task


def test_a_group_that_the_trainer_dropped_as_too_old_is_started_again(worker, tmp_path):
    """A crash of the trainer takes it back by some steps, and then most of what waits is too old."""
    dropped, trained = worker.start(), worker.start()
    for task in (dropped, trained):
        worker.accounts.record_sealed(worker.release(task))
    next_job = WorkerRun(tmp_path)
    next_job.accounts.record_trained({trained.group})
    next_job.accounts.record_dropped([dropped.group, trained.group, "lake/99"], at=time.time() + 1)
    assert [next_job.start().number for _ in range(2)] == [dropped.number, 2]
    next_job.accounts.record_dropped([dropped.group], at=time.time() + 1)  # of its first start
    assert next_job.draw().number == 3


def test_a_group_may_be_trained_on_before_its_worker_knows_that_it_is_durable(worker, tmp_path):
    """Batches are written in the background, and a trainer that drops a group as flat is done with it at once."""
    task, later = worker.start(), worker.start()
    episodes = [*worker.release(task), *worker.release(later)]
    worker.accounts.record_trained({task.group})
    worker.accounts.record_sealed(episodes)
    assert worker.limit(newest=0) is None
    assert [group for group, known in worker.journal.state.open.items() if known.is_durable] == [later.group]
    assert WorkerRun(tmp_path).start().number == 2


def test_a_group_may_be_dropped_as_too_old_before_its_worker_knows_that_it_is_durable(worker, tmp_path):
    task, later = worker.start(), worker.start()
    first, other = worker.release(task), worker.release(later)
    worker.accounts.record_dropped([task.group], at=time.time() + 1)
    assert worker.start() == task
    again = worker.release(task)
    worker.accounts.record_sealed([*first, *other])  # of the first start: the second is not durable yet
    assert [group for group, known in worker.journal.state.open.items() if known.is_durable] == [later.group]
    worker.accounts.record_sealed(again)
    assert worker.limit(newest=0) is None
    assert not set(first) & set(again)
    assert worker.journal.state.open[task.group].is_durable
    assert WorkerRun(tmp_path).start().number == 2


def test_a_group_that_was_dropped_as_too_old_starts_again_after_its_last_episode(worker):
    task = worker.start()
    worker.end(task, 0)
    worker.end(task, 1)  # the group is complete: episode 2 is cancelled, which takes a while
    worker.accounts.record_dropped([task.group], at=time.time() + 1)
    assert worker.start() != task
    worker.accounts.abort_episode(task, 2)
    assert worker.start() == task


def test_an_old_report_of_the_trainer_does_not_start_a_group_again(worker, tmp_path):
    task = worker.start()
    dropped_at = time.time() - 1
    worker.accounts.record_sealed(worker.release(task))
    next_job = WorkerRun(tmp_path)
    next_job.accounts.record_dropped([task.group], at=dropped_at)
    assert next_job.draw() != task


def test_groups_of_a_killed_worker_start_again_with_other_episodes(worker, tmp_path):
    tasks = [worker.start(), worker.start()]
    drawn_ahead = worker.draw()
    worker.end(tasks[0], 0)
    after_kill = WorkerRun(tmp_path)
    assert after_kill.events == [TasksRestarted(num=2)]
    assert [after_kill.start() for _ in range(3)] == [*tasks, drawn_ahead]
    assert after_kill.accounts.groups.ledger.running >= {tasks[0].episode(index) for index in (3, 4, 5)}
    assert after_kill.draw().number == drawn_ahead.number + 1


def test_a_task_that_never_finishes_is_abandoned_and_reported_once(tmp_path):
    for _ in range(MAX_TASK_STARTS):
        task = WorkerRun(tmp_path).start()
        assert task.number == 0
    last = WorkerRun(tmp_path)
    (failed,) = last.events
    assert isinstance(failed, TaskFailed)
    assert (failed.id, failed.seed, failed.place) == (task.group, task.seed, task.place)
    assert last.draw().number == 1
    assert WorkerRun(tmp_path).events == []


def test_a_task_whose_episodes_are_lost_is_started_again_after_others_and_then_abandoned(worker):
    started = []
    while not worker.events:
        task = worker.start()
        started.append(task.number)
        first = worker.find_first(task)
        worker.end(task, first, "env-fault")
        assert worker.end(task, first + 1, "env-fault").is_lost
        worker.abort_all(task)
    (failed,) = worker.events
    assert (failed.id, failed.reason) == (task.group, "env-fault")
    assert started[:3] == [0, 1, 0]
    assert started.count(0) == MAX_TASK_STARTS
    assert worker.draw() != task


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_each_task_is_durable_once_however_often_the_worker_is_killed(tmp_path_factory, data):
    """The tasks of a chain of killed workers are those of one that lived on."""
    directory = write_rows(tmp_path_factory.mktemp("chain"))
    durable, seen = Counter(), {}
    for _ in range(3):
        worker = WorkerRun(directory, durable=set(durable))
        for _ in range(data.draw(st.integers(1, 4), label="groups until the kill")):
            task = worker.start()
            seen[task.number] = task
            fate = data.draw(st.sampled_from(["durable", "released", "running", "unneeded"]), label="fate")
            released = worker.release(task) if fate in ("durable", "released") else []
            if fate == "durable":
                worker.accounts.record_sealed(released)
                durable[task.group] += 1
    last = WorkerRun(directory)
    while len(durable) < 12:
        task = last.start()
        seen[task.number] = task
        durable[task.group] += 1
    assert sorted(seen) == list(range(12))
    assert set(durable.values()) == {1}
    plain = TaskStream(WORKER, recipe_seed=0)
    assert [seen[number].seed for number in range(12)] == [plain.draw({"lake": 1.0}).seed for _ in range(12)]


def test_replacements_delay_training(tmp_path):
    worker = WorkerRun(tmp_path, replacements=1)
    task = worker.start(version=5)
    worker.end(task, 0, "env-fault", newest=6)
    assert worker.end(task, 1, "env-fault", newest=6).start == [3]
    worker.accounts.abort_episode(task, 2)
    assert worker.limit(newest=6) == 7  # of the replacement alone, which started at version 6


def test_training_is_delayed_until_a_released_group_is_durable(worker):
    task = worker.start(version=3)
    worker.end(task, 0)
    worker.end(task, 1)
    worker.accounts.abort_episode(task, 2)
    assert worker.limit(newest=4) == 4
    worker.accounts.record_sealed([task.episode(0), task.episode(1)])
    assert worker.limit(newest=4) is None


def test_a_closed_group_delays_nothing(worker):
    task = worker.start(version=3)
    worker.end(task, 0)
    for episode in worker.accounts.close_groups().abort:
        worker.accounts.abort_episode(task, get_index(episode))
    assert worker.limit(newest=4) is None


def test_an_unknown_episode_changes_nothing(worker):
    task = worker.start()
    worker.end(task, 0)
    assert worker.end(task, 0) is None
    assert is_balanced(worker.accounts.groups.ledger)
