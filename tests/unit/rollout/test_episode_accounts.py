"""Accounts that stay in step: groups, start versions, the journal and rows, however episodes and the worker end."""

import json

import pytest

from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import load_recipe
from hpcrl.envs.task_set import import_task_set
from hpcrl.rollout.episode_accounts import EpisodeAccounts
from hpcrl.rollout.groups import EpisodeGroups
from hpcrl.rollout.journal import EpisodeJournal
from hpcrl.rollout.task_sets import TaskSets
from hpcrl.rollout.tasks import TaskStream
from tests.support.campaign_spools import trajectory

WORKER = EnvWorkerId(0, 1)


class WorkerRun:
    """The accounts of one run of a worker: groups of 2 of 3 episodes, whose tasks are the 4 rows of a file."""

    def __init__(self, directory, *, replacements=0):
        recipe = load_recipe("quickstart", settings=(f'domains.lake.tasks="{directory}/rows.jsonl"',))
        self.task_sets = TaskSets(recipe, WORKER, directory=directory, progress=directory / "0.json")
        self.stream = TaskStream(WORKER, recipe_seed=0, rows=self.task_sets)
        self.accounts = EpisodeAccounts(
            EpisodeGroups(group_size=2, episodes_per_group=3, replacements=replacements, max_lag=1),
            journal=EpisodeJournal(directory / "journal.jsonl"),
            task_sets=self.task_sets,
        )
        self.num_lost = self.accounts.recover()

    def draw(self):
        return self.stream.draw({"lake": 1.0})

    def start(self, *, version=0):
        task = self.draw()
        assert self.accounts.start_group(task, version=version) == 3
        return task

    def end(self, task, index, status="done", *, newest=0):
        ended = trajectory(task.number, index, status=status, start_version=0)
        return self.accounts.end_episode(task, ended, newest=newest)

    def limit(self, *, newest):
        return self.accounts.in_flight.limit(newest=newest, max_lag=1)


@pytest.fixture(autouse=True)
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"n": number}) + "\n" for number in range(4)))
    recipe = load_recipe("quickstart", settings=(f'domains.lake.tasks="{path}"',))
    import_task_set(recipe.domains["lake"].task_set, domain="lake", directory=tmp_path)


@pytest.fixture
def worker(tmp_path, rows):
    return WorkerRun(tmp_path)


def find_next_place(directory):
    """Return the place of the row that the next run of the worker plays first."""
    return WorkerRun(directory).draw().place


def test_a_row_is_used_again_once_after_the_last_cancelled_episode_of_its_group(worker):
    spare = worker.start()
    assert worker.accounts.close_groups() == [spare.episode(index) for index in range(3)]
    places = []
    for index in range(3):
        worker.accounts.abort_episode(spare, index)
        places.append(worker.draw().place)
    assert places[2] == spare.place
    assert len({spare.place, *places[:2], worker.draw().place}) == 4


def test_a_row_is_used_up_when_its_whole_group_is_durable(worker, tmp_path):
    """A kill between the two loses the trajectories: the next run of the worker plays the row again."""
    task = worker.start()
    worker.end(task, 0)
    assert worker.end(task, 2).abort == [task.episode(1)]
    worker.accounts.abort_episode(task, 1)
    assert worker.draw().place != task.place  # it is still the row of a group that was released
    nexts = []
    for sealed in ([], [0], [2]):
        worker.accounts.record_sealed([task.episode(index) for index in sealed])
        worker.task_sets.save()
        nexts.append(find_next_place(tmp_path))
    assert nexts[:2] == [task.place, task.place]
    assert nexts[2] != task.place


def test_the_row_of_a_lost_group_is_used_up(worker, tmp_path):
    task = worker.start()
    worker.end(task, 0, "env-fault")
    assert worker.end(task, 1, "env-fault").is_lost
    worker.accounts.abort_episode(task, 2)
    worker.accounts.close()
    assert task.place not in (worker.draw().place, find_next_place(tmp_path))


def test_episodes_of_a_killed_worker_are_recorded_as_lost_once(worker, tmp_path):
    task = worker.start()
    worker.end(task, 0)
    after_kill = WorkerRun(tmp_path)
    assert after_kill.num_lost == after_kill.accounts.groups.endings["env-fault"] == 2
    assert WorkerRun(tmp_path).num_lost == 0


def test_replacements_are_in_the_journal_and_delay_training(tmp_path):
    worker = WorkerRun(tmp_path, replacements=1)
    task = worker.start(version=5)
    worker.end(task, 0, "env-fault", newest=6)
    assert worker.end(task, 1, "env-fault", newest=6).start == [3]
    worker.accounts.abort_episode(task, 2)
    assert worker.limit(newest=6) == 7  # of the replacement alone, which started at version 6
    assert WorkerRun(tmp_path).num_lost == 1


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
    for episode in worker.accounts.close_groups():
        worker.accounts.abort_episode(task, int(episode.rpartition("/")[2]))
    assert worker.limit(newest=4) is None


def test_an_unknown_episode_changes_nothing(worker):
    task = worker.start()
    worker.end(task, 0)
    assert worker.end(task, 0) is None
    assert worker.accounts.groups.ledger.is_balanced
