"""The order of rows: each once an epoch, whoever plays it, also across jobs."""

import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.campaign.request import load_request
from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import Recipe, TaskSetConfig
from hpcrl.envs.task_set import import_task_set
from hpcrl.errors import EnvFault, PlanError
from hpcrl.plan.checks import check_recipe
from hpcrl.rollout.fault_budget import FaultBudget
from hpcrl.rollout.task_queue import TaskQueue
from hpcrl.rollout.task_sets import TaskSets
from hpcrl.rollout.tasks import DrawProgress, RowOrder, TaskStream, make_held_out_task, shuffle_number
from hpcrl.testing.recipes import load_recipe


@given(st.integers(1, 300), st.text(max_size=5))
def test_a_shuffle_has_each_number_once(count, key):
    assert sorted(shuffle_number(number, count=count, key=key) for number in range(count)) == list(range(count))


def test_a_shuffle_is_the_same_on_every_machine():
    assert [shuffle_number(number, count=8, key="0/sums/0") for number in range(8)] == [5, 4, 6, 3, 0, 7, 1, 2]


def test_each_epoch_has_a_separate_order():
    order = RowOrder(num_rows=50, shuffle_key="0/sums")
    epochs = [[order.find_row(place) for place in range(epoch * 50, epoch * 50 + 50)] for epoch in range(3)]
    assert all(sorted(rows) == list(range(50)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 3
    assert order.find_epoch(149) == 2


def test_without_a_shuffle_rows_come_in_the_order_of_the_file():
    order = RowOrder(num_rows=3, shuffle_key=None)
    assert [order.find_row(place) for place in range(5)] == [0, 1, 2, 0, 1]


@given(st.integers(1, 3), st.integers(1, 20))
def test_env_workers_share_an_epoch_without_overlap(num_workers, num_rows):
    with TemporaryDirectory() as directory:
        recipe = make_rows_recipe(Path(directory), num_rows=num_rows, epochs=1)
        places = []
        for index in range(num_workers):
            worker, progress = EnvWorkerId(index, num_workers), DrawProgress()
            rows = TaskSets(recipe, worker, directory=Path(directory) / "tasks", num_drawn=progress.rows)
            stream = TaskStream(worker, recipe_seed=0, rows=rows, progress=progress)
            while not stream.is_ended("sums"):
                places.append(stream.draw({"sums": 1.0}).place)
    assert sorted(places) == list(range(num_rows))


def make_rows_recipe(tmp_path, *, num_rows=6, **config):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"n": number}) + "\n" for number in range(num_rows)))
    domain = {"env": "tests.support.row_envs:RowQuestion", "tasks": {"path": str(path), **config}}
    table = {
        "name": "rows",
        "model": {"tiny": {}},
        "rollout": {"group_size": 2},
        "train": {"num_steps": 1, "groups_per_step": 1, "learning_rate": 1e-3},
        "domains": {"sums": domain, "lake": {"env": "hpcrl.envs.gymnasium_text:FrozenLake"}},
    }
    recipe = msgspec.convert(table, Recipe)
    if not (tmp_path / "tasks").exists():
        (tmp_path / "tasks").mkdir()
        import_task_set(recipe.domains["sums"].task_set, domain="sums", directory=tmp_path / "tasks")
    return recipe


def make_task_sets(tmp_path, **config):
    return TaskSets(make_rows_recipe(tmp_path, **config), EnvWorkerId(0, 1), directory=tmp_path / "tasks", num_drawn={})


def make_rows_queue(recipe, task_sets, **changed):
    usual = {
        "budget": FaultBudget(max_fault_share=0.5),
        "groups_ahead": 0,
        "episodes_per_group": 2,
        "cpus": 1,
        "mem_gib": 4.0,
        "read_fields": task_sets.read_fields,
    }
    progress = DrawProgress(rows=task_sets._num_drawn)
    stream = TaskStream(EnvWorkerId(0, 1), recipe_seed=0, rows=task_sets, progress=progress)
    return TaskQueue(recipe.domains, tasks=stream, **(usual | changed))


def take_rows(queue, count):
    """Return the tasks of the domain with rows among the next ones."""
    tasks = [queue.take_task(now=0.0) for _ in range(count)]
    return [task for task in tasks if task.domain == "sums"]


def test_a_group_of_episodes_is_given_one_row_and_domains_without_rows_none(tmp_path):
    task_sets = make_task_sets(tmp_path)
    queue = make_rows_queue(make_rows_recipe(tmp_path), task_sets)
    tasks = [queue.take_task(now=0.0) for _ in range(12)]
    rows = [task_sets.read_fields(task)["n"] for task in tasks if task.domain == "sums"]
    assert sorted(rows) == list(range(6))
    assert rows != list(range(6))
    assert all(task_sets.read_fields(task) is None for task in tasks if task.domain == "lake")


def test_a_task_that_is_returned_has_the_same_row_and_is_needed_for_its_epoch(tmp_path):
    task_sets = make_task_sets(tmp_path, num_rows=3, epochs=1)
    queue = make_rows_queue(make_rows_recipe(tmp_path, num_rows=3, epochs=1), task_sets)
    rows = take_rows(queue, 12)
    assert len(rows) == 3
    queue.return_task(rows[1])
    assert take_rows(queue, 6) == [rows[1]]


def test_a_domain_ends_after_its_epochs_and_the_others_continue(tmp_path):
    task_sets = make_task_sets(tmp_path, num_rows=3, epochs=2)
    queue = make_rows_queue(make_rows_recipe(tmp_path, num_rows=3, epochs=2), task_sets)
    domains = [queue.take_task(now=0.0).domain for _ in range(20)]
    assert domains.count("sums") == 6
    assert set(domains[12:]) == {"lake"}


def test_held_out_rows_are_the_same_in_every_round_and_never_trained_on(tmp_path):
    task_sets = make_task_sets(tmp_path, held_out_rows=2)
    rounds = [
        [
            task_sets.read_fields(make_held_out_task("sums", recipe_seed=0, round=number, index=index))["n"]
            for index in range(3)
        ]
        for number in range(2)
    ]
    assert rounds == [[2, 5, 2], [2, 5, 2]]
    tasks = take_rows(make_rows_queue(make_rows_recipe(tmp_path, held_out_rows=2), task_sets), 16)
    assert {task_sets.read_fields(task)["n"] for task in tasks} == {0, 1, 3, 4}


def test_rows_that_are_gone_are_a_fault_of_their_domain_and_the_others_continue(tmp_path):
    async def run():
        task_sets = make_task_sets(tmp_path)
        queue = make_rows_queue(make_rows_recipe(tmp_path), task_sets, groups_ahead=1)
        for path in (tmp_path / "tasks").iterdir():
            path.unlink()
        tasks = [queue.take_task(now=0.0) for _ in range(4)]
        for task in tasks:
            if task.domain == "sums":
                with pytest.raises(EnvFault, match="cannot be read"):
                    await queue.take_env(task)
            else:
                env = await queue.take_env(task)
                assert await env.reset(task.seed)
                await env.close()
        await queue.close()
        return {task.domain for task in tasks}

    assert asyncio.run(run()) == {"sums", "lake"}


def test_a_task_set_may_be_in_the_order_of_its_file(tmp_path):
    task_sets = make_task_sets(tmp_path, shuffle=False)
    tasks = take_rows(make_rows_queue(make_rows_recipe(tmp_path, shuffle=False), task_sets), 14)
    assert [task_sets.read_fields(task)["n"] for task in tasks] == [0, 1, 2, 3, 4, 5, 0]


def test_a_table_needs_a_path():
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"rows": [0, 1]}, TaskSetConfig)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("domains.lake.tasks={path='a.jsonl', epochs=2}",), "every domain ends before the campaign does"),
        (("domains.lake.tasks='a.jsonl'", "evaluation.every_versions=1"), "no rows that only evaluations use"),
    ],
)
def test_task_sets_that_leave_nothing_to_train_on_or_to_evaluate_are_refused(settings, message):
    with pytest.raises(PlanError, match=message):
        check_recipe(load_recipe("quickstart", settings=settings))


def test_a_path_is_looked_for_beside_the_recipe_and_then_in_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "a.jsonl").touch()
    (tmp_path / "b.jsonl").touch()
    (tmp_path / "beside" / "r.toml").write_text(
        'extends = "quickstart"\n[domains.lake.tasks]\npath = ["a.jsonl", "b.jsonl"]\n'
    )
    monkeypatch.chdir(tmp_path)
    tasks = load_request(str(tmp_path / "beside" / "r.toml"), site="local").recipe.domains["lake"].task_set
    assert tasks.path == [str(tmp_path / "beside" / "a.jsonl"), str(tmp_path / "b.jsonl")]
