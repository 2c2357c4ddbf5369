"""The order of tasks."""

from collections import Counter
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.rollout.tasks import AgentTask, DrawProgress, TaskStream, choose_domain, stable_hash


def stream(weights=None, **changed):
    tasks = TaskStream(**({"worker": EnvWorkerId(0, 1), "recipe_seed": 7} | changed))
    return iter(lambda: tasks.draw(weights or {"lake": 1.0}), None)


def test_a_task_names_its_group_and_its_episodes():
    task = next(stream(progress=DrawProgress(num_drawn=12)))
    assert (task.group, task.episode(3)) == ("lake/12", "lake/12/3")


def test_the_same_recipe_asks_the_same_tasks():
    assert list(islice(stream(), 20)) == list(islice(stream(), 20))


def test_another_seed_asks_other_tasks():
    assert {task.seed for task in islice(stream(), 20)}.isdisjoint(
        task.seed for task in islice(stream(recipe_seed=8), 20)
    )


def test_a_stable_hash_is_the_same_on_every_machine():
    assert stable_hash(0, "lake", 1, bits=31) == 316736684


@given(st.integers(1, 6))
def test_workers_never_share_a_number_and_leave_none_out(num_hosts):
    streams = [stream(worker=EnvWorkerId(host, num_hosts)) for host in range(num_hosts)]
    numbers = [task.number for one in streams for task in islice(one, 10)]
    assert sorted(numbers) == list(range(10 * num_hosts))


@given(st.integers(0, 50), st.dictionaries(st.sampled_from("abc"), st.floats(0.1, 10), min_size=1))
def test_a_stream_continues_with_the_tasks_that_would_have_followed(num_before, weights):
    progress = DrawProgress()
    before = list(islice(stream(weights, progress=progress), num_before))
    after = list(islice(stream(weights, progress=progress), 20))
    assert before + after == list(islice(stream(weights), num_before + 20))


def test_a_task_that_was_returned_comes_before_new_ones_once_its_domain_is_open():
    tasks = TaskStream(EnvWorkerId(0, 1), recipe_seed=7)
    first = tasks.draw({"a": 1.0})
    tasks.return_task(first)
    assert tasks.draw({"b": 1.0}).domain == "b"
    assert tasks.draw({"a": 1.0, "b": 1.0}) == first
    assert tasks.draw({"a": 1.0, "b": 1.0}).number == 2


def test_tasks_whose_episodes_were_lost_take_turns_with_new_ones():
    tasks = TaskStream(EnvWorkerId(0, 1), recipe_seed=7)
    lost = {tasks.draw({"a": 1.0}).number for _ in range(3)}
    for number in sorted(lost):
        tasks.return_task(AgentTask(domain="a", number=number, seed=0), lost=True)
    drawn = [tasks.draw({"a": 1.0}).number for _ in range(7)]
    assert drawn == [3, 0, 4, 1, 5, 2, 6]


def test_a_lost_task_of_another_domain_waits_until_that_is_open():
    tasks = TaskStream(EnvWorkerId(0, 1), recipe_seed=7)
    tasks.return_task(tasks.draw({"a": 1.0}), lost=True)
    assert [tasks.draw({"b": 1.0}).domain for _ in range(3)] == ["b"] * 3
    assert tasks.draw({"a": 1.0, "b": 1.0}).number == 0


@given(st.dictionaries(st.sampled_from("abcde"), st.floats(0.01, 100), min_size=1), st.integers(1, 300))
def test_no_domain_is_ever_a_whole_task_behind_its_share_by_more_than_the_number_of_domains(weights, num_tasks):
    started = Counter(task.domain for task in islice(stream(weights), num_tasks))
    whole = sum(weights.values())
    for domain, weight in weights.items():
        assert abs(started[domain] - weight / whole * num_tasks) <= len(weights)


def test_equal_domains_take_turns():
    assert [task.domain for task in islice(stream({"b": 1.0, "a": 1.0}), 4)] == ["a", "b", "a", "b"]


def test_the_domain_furthest_behind_comes_next():
    assert choose_domain({"a": 1.0, "b": 3.0}, {"a": 1, "b": 1}) == "b"


def test_a_domain_that_comes_back_after_a_pause_does_not_take_all_turns():
    tasks = TaskStream(EnvWorkerId(0, 1), recipe_seed=7)
    for _ in range(50):
        tasks.draw({"a": 1.0})
    assert [tasks.draw({"a": 1.0, "b": 1.0}).domain for _ in range(4)] == ["a", "b", "a", "b"]


def test_new_weights_count_from_when_they_are_given():
    tasks = TaskStream(EnvWorkerId(0, 1), recipe_seed=7)
    for _ in range(50):
        tasks.draw({"a": 1.0, "b": 1.0})
    assert Counter(tasks.draw({"a": 3.0, "b": 1.0}).domain for _ in range(40)) == {"a": 30, "b": 10}
