"""Evaluations: their tasks, schedule and results."""

import asyncio
import dataclasses
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest

from hpcrl.campaign_dir.checkpoints import list_saved_steps
from hpcrl.campaign_dir.endpoints import EndpointReader
from hpcrl.campaign_dir.events import EvaluationFinished, FaultReported
from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.engines.base import GenerateRequest
from hpcrl.errors import EnvFault, PlanError
from hpcrl.learn.evaluations import (
    EvaluationPart,
    EvaluationResult,
    EvaluationRound,
    EvaluationStore,
    find_version_score,
    is_round_due,
    merge_parts,
)
from hpcrl.plan.checks import check_recipe
from hpcrl.rollout.curriculum import Curriculum
from hpcrl.rollout.evaluation import MAX_EPISODE_ATTEMPTS, EvaluationHooks, EvaluationRunner, list_evaluated_domains
from hpcrl.rollout.reporting import CountingPolicy
from hpcrl.rollout.routing.router import Router
from hpcrl.rollout.routing.trajectories import NUM_LEVELS, TrajectoryState, TrajectoryTable, with_ids
from hpcrl.rollout.tasks import NUM_SEEDS, TaskStream, make_held_out_task
from hpcrl.spool.ids import is_held_out
from hpcrl.trainers import checkpoint
from tests.support.completions import make_completion
from tests.support.plans import make_recipe
from tests.support.trajectories import make_trajectory

EVERY = 10
BASE = ("evaluation.every_versions=10", "evaluation.num_episodes=4")


def result(number, version, reward):
    return EvaluationResult(
        number=number,
        version=version,
        reward_mean=reward,
        domains={},
        num_episodes=1,
        num_faults=0,
        length_mean=1.0,
        oldest=version,
        newest=version,
    )


def played(task, index, *, status="done", version=0):
    return make_trajectory(
        task.episode(index),
        seed=task.seed,
        status=status,
        version=version,
        token_ids=[1, 2],
        versions=[0, version],
        loss_mask=[False, True],
        turns=[],
        extra={"fault": "it broke"} if status == "env-fault" else {},
    )


class EnvWorkers:
    """The evaluation runners of one campaign, with the episodes they started and the events they emitted."""

    def __init__(self, directory, *, num=1, job=0, settings=BASE, status="done", score=1.0):
        self.recipe = make_recipe(*settings)
        self.record = EvaluationStore(directory)
        self.events, self.started, self.max_running, self.running = [], [], 0, 0
        self.served, self.status, self.score, self.go = 0, status, score, asyncio.Event()
        self.go.set()
        doing = EvaluationHooks(
            play=self.play, score=self.reward, emit=self.events.append, oldest_version=lambda: self.served
        )
        self.workers = [
            EvaluationRunner(self.recipe, EnvWorkerId(worker, num), job=job, record=self.record, hooks=doing)
            for worker in range(num)
        ]
        self.now = 0.0

    async def play(self, task, index, name, domain):
        self.started.append((task, index, name, domain))
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        await self.go.wait()
        self.running -= 1
        return played(task, index, status=self.status, version=self.served)

    async def reward(self, name, trajectory):
        assert trajectory.domain == name, "a reward function never sees that its trajectory is held out"
        return msgspec.structs.replace(trajectory, reward=self.score)

    def results(self):
        return [event for event in self.events if isinstance(event, EvaluationFinished)]

    async def tend(self, *, version=0, room=99, times=6):
        for _ in range(times):
            self.now += 1.0
            for worker in self.workers:
                worker.poll(version=version, room=room, now=self.now)
            for _ in range(20):
                await asyncio.sleep(0)


def test_the_first_evaluation_is_due_at_once_and_then_one_for_every_multiple_that_was_passed():
    assert is_round_due(None, newest=0, every=EVERY)
    assert not is_round_due(result(0, 0, 1.0), newest=9, every=EVERY)
    assert is_round_due(result(0, 0, 1.0), newest=10, every=EVERY)
    assert not is_round_due(result(1, 13, 1.0), newest=19, every=EVERY)
    assert is_round_due(result(1, 13, 1.0), newest=31, every=EVERY)


def test_parts_make_one_result_in_which_faults_do_not_count_as_zeros():
    parts = [
        EvaluationPart(rewards={"a": [1.0, 0.0]}, num_tokens=10, oldest=3, newest=3),
        EvaluationPart(rewards={"a": [0.5], "b": [1.0]}, num_tokens=6, num_faults=2, oldest=3, newest=4),
        EvaluationPart(rewards={}),
    ]
    found = merge_parts(EvaluationRound(number=7, job=0, version=3), parts)
    assert (found.number, found.version, found.num_episodes, found.num_faults) == (7, 3, 4, 2)
    assert found.reward_mean == 2.5 / 4
    assert found.domains == {"a": 0.5, "b": 1.0}
    assert (found.length_mean, found.oldest, found.newest) == (4.0, 3, 4)


def test_a_round_without_a_single_score_has_no_mean():
    assert (
        merge_parts(EvaluationRound(number=0, job=0, version=0), [EvaluationPart(rewards={}, num_faults=3)]).reward_mean
        is None
    )


def test_a_version_has_the_score_of_the_evaluation_nearest_to_it():
    results = [result(0, 0, 0.1), result(1, 11, 0.5), result(2, 20, 0.9)]
    assert find_version_score(10, results, every=EVERY) == 0.5
    assert find_version_score(19, results, every=EVERY) == 0.9
    assert find_version_score(40, results, every=EVERY) is None
    assert find_version_score(10, [], every=EVERY) is None


def test_held_out_tasks_are_the_same_in_every_round_and_have_seeds_that_no_training_task_has():
    stream = TaskStream(EnvWorkerId(0, 1), recipe_seed=0)
    assert all(stream.draw({"lake": 1.0}).seed < NUM_SEEDS for _ in range(100))
    first, later = (make_held_out_task("lake", recipe_seed=0, round=number, index=3) for number in (0, 9))
    assert first.seed == later.seed >= NUM_SEEDS
    assert first.seed < 1 << 32  # what every generator takes
    assert first.episode(3) != later.episode(3)
    assert is_held_out(first.domain)
    assert not is_held_out("lake")


def test_one_worker_plays_every_task_once_and_reports_the_result_with_its_version(tmp_path):
    async def run():
        workers = EnvWorkers(tmp_path)
        workers.served = 3
        await workers.tend(version=3)
        assert [index for _, index, _, _ in workers.started] == [0, 1, 2, 3]
        assert [(found.number, found.version, found.num_episodes) for found in workers.results()] == [(0, 3, 4)]
        assert workers.record.last_result().reward_mean == 1.0
        await workers.tend(version=9)
        assert len(workers.results()) == 1
        workers.served = 10
        await workers.tend(version=10)
        assert [found.version for found in workers.results()] == [3, 10]

    asyncio.run(run())


def test_several_workers_share_a_round_and_only_the_first_concludes_it(tmp_path):
    async def run():
        workers = EnvWorkers(tmp_path, num=3)
        await workers.tend()
        assert sorted(index for _, index, _, _ in workers.started) == [0, 1, 2, 3]
        assert len(workers.results()) == 1
        assert workers.results()[0].num_episodes == 4

    asyncio.run(run())


def test_a_round_waits_for_the_engines_to_serve_its_version_but_not_for_ever(tmp_path):
    async def run():
        workers = EnvWorkers(tmp_path)
        workers.served = 1
        await workers.tend(version=2)
        assert workers.started == []
        await workers.tend(version=2, times=40)
        assert len(workers.started) == 4
        assert workers.results()[0].oldest == 1  # the version that was used is reported

    asyncio.run(run())


def test_evaluation_takes_the_room_that_training_leaves_and_one_place_where_it_leaves_none(tmp_path):
    async def run(room):
        workers = EnvWorkers(tmp_path / str(room))
        workers.go.clear()
        await workers.tend(room=room)
        return workers.max_running

    assert asyncio.run(run(-5)) == 1
    assert asyncio.run(run(2)) == 2
    assert asyncio.run(run(99)) == 4


def test_an_interrupted_round_is_never_counted_and_the_next_job_starts_another(tmp_path):
    async def run():
        first = EnvWorkers(tmp_path, num=2)
        await first.tend(times=1, room=1)
        first.workers[1].poll(version=0, room=1, now=5.0)
        first.go.clear()
        await first.tend(version=0)
        for worker in first.workers:
            await worker.close()
        assert first.results() == []
        again = EnvWorkers(tmp_path, num=2, job=1)
        again.served = 7
        await again.tend(version=7)
        return again

    again = asyncio.run(run())
    assert [(found.number, found.version, found.num_episodes) for found in again.results()] == [(1, 7, 4)]
    assert [found.number for found in again.record.results()] == [1]


def test_a_worker_restarted_in_its_job_keeps_the_existing_parts(tmp_path):
    async def run():
        first = EnvWorkers(tmp_path, num=2)
        first.workers.pop()
        await first.tend()
        again = EnvWorkers(tmp_path, num=2)
        await again.tend()
        return first, again

    first, again = asyncio.run(run())
    assert sorted(index for _, index, _, _ in first.started) == [0, 2]
    assert sorted(index for _, index, _, _ in again.started) == [1, 3]
    assert again.results()[0].num_episodes == 4


@pytest.mark.parametrize(("status", "score"), [("env-fault", 1.0), ("policy-fault", 1.0), ("done", None)])
def test_an_episode_without_a_score_is_reported_and_counted_apart(tmp_path, status, score):
    workers = EnvWorkers(tmp_path, status=status, score=score)
    asyncio.run(workers.tend())
    assert workers.results()[0].num_faults == 4
    assert workers.results()[0].reward_mean is None
    assert workers.results()[0].outcomes == {"lake": {"env-fault": 4}}
    assert sum(isinstance(event, FaultReported) for event in workers.events) == 4 * MAX_EPISODE_ATTEMPTS


def test_an_episode_that_was_a_fault_once_is_played_again_and_counts(tmp_path):
    async def run():
        workers = EnvWorkers(tmp_path)
        play, failing = workers.play, [EnvFault("the node was lost")]

        async def fail_once(*args):
            if failing:
                raise failing.pop()
            return await play(*args)

        for worker in workers.workers:
            worker._hooks = dataclasses.replace(worker._hooks, play=fail_once)
        await workers.tend()
        return workers.results()[0]

    result = asyncio.run(run())
    assert (result.num_episodes, result.num_faults, result.outcomes) == (4, 0, {"lake": {"finished": 4}})


def test_an_evaluation_counts_what_the_policy_failed_at_and_not_what_had_no_turn(tmp_path):
    async def run():
        workers = EnvWorkers(tmp_path, score=0.0)
        play = workers.play

        async def play_variously(task, index, name, domain):
            trajectory = await play(task, index, name, domain)
            if index == 0:
                return msgspec.structs.replace(trajectory, status="aborted-redundant", outcome="unplayed")
            return msgspec.structs.replace(trajectory, outcome="exit") if index == 1 else trajectory

        for worker in workers.workers:
            worker._hooks = dataclasses.replace(worker._hooks, play=play_variously)
        await workers.tend()
        return workers.results()[0]

    result = asyncio.run(run())
    assert (result.num_episodes, result.num_faults, result.reward_mean) == (3, 0, 0.0)
    assert result.outcomes == {"lake": {"unplayed": 1, "exit": 1, "finished": 2}}


def test_a_disk_that_fails_delays_an_evaluation_and_loses_nothing(tmp_path):
    async def run():
        workers = EnvWorkers(tmp_path)
        leave, failing = workers.record.save_part, [OSError(28, "No space left on device")]

        def full_once(part, **where):
            if failing:
                raise failing.pop()
            leave(part, **where)

        workers.record.save_part = full_once
        await workers.tend()
        assert workers.results() == []
        assert [event.what for event in workers.events if isinstance(event, FaultReported)] == ["evaluation"]
        await workers.tend(times=40)
        assert workers.results()[0].num_episodes == 4
        assert len(workers.started) == 4

    asyncio.run(run())


def test_a_damaged_file_is_measured_again_under_another_number(tmp_path):
    async def run():
        workers = EnvWorkers(tmp_path)
        await workers.tend()
        (tmp_path / "round.json").write_bytes(b"{")
        (tmp_path / "000000.json").write_bytes(b"\0" * 9)
        again = EnvWorkers(tmp_path, job=1)
        await again.tend()
        return again

    again = asyncio.run(run())
    assert [(found.number, found.num_episodes) for found in again.results()] == [(1, 4)]
    assert len(again.started) == 4


def test_domains_and_options_of_evaluations_are_the_recipes_choice():
    recipe = make_recipe(*BASE, name="multitask")
    assert set(list_evaluated_domains(recipe)) == set(recipe.domains)
    name = next(iter(recipe.domains))
    asked = msgspec.structs.replace(recipe.evaluation, domains=[name], options={name: {"split": "test"}})
    chosen = list_evaluated_domains(msgspec.structs.replace(recipe, evaluation=asked))
    assert list(chosen) == [name]
    assert chosen[name].options == {**recipe.domains[name].options, "split": "test"}


def test_a_held_out_domain_is_not_in_the_curriculum(tmp_path):
    recipe = make_recipe("rollout.curriculum=tests.support.curricula:weakest_first", name="multitask")
    name = next(iter(recipe.domains))
    domains = {**recipe.domains, name: msgspec.structs.replace(recipe.domains[name], held_out=True)}
    curriculum = Curriculum.from_recipe(msgspec.structs.replace(recipe, domains=domains), events=tmp_path)
    assert curriculum is not None
    assert name not in curriculum._weights


def test_a_held_out_turn_does_not_keep_training_domains_without_credit(tmp_path):
    courses = TrajectoryTable(weights={"a": 1.0})
    courses.credits.spend("a", 1e6)
    courses._num_active.update({"a": 1, "held-out:a": 1})
    assert courses.credit_penalty("a") == 0  # it has credit again: no other counted domain is active


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("evaluation.domains=['lak']",), "did you mean 'lake'"),
        (("evaluation.options.pond.size=3",), "evaluation.options names 'pond'"),
        (("domains.lake.held_out=true",), "nothing left to train on"),
        (("evaluation.every_versions=1", "job.stall_timeout_min=5"), "ended as stalled"),
    ],
)
def test_a_recipe_whose_evaluation_makes_no_sense_is_refused(settings, message):
    with pytest.raises(PlanError, match=message):
        check_recipe(make_recipe(*settings))


def test_a_held_out_domain_that_is_never_evaluated_is_refused():
    recipe = make_recipe(name="multitask")
    name = next(iter(recipe.domains))
    held_out, other = f"domains.{name}.held_out=true", next(one for one in recipe.domains if one != name)
    check_recipe(make_recipe(held_out, *BASE, name="multitask"))
    for settings in ((held_out,), (held_out, *BASE, f"evaluation.domains=['{other}']")):
        with pytest.raises(PlanError, match="held out and never evaluated"):
            check_recipe(make_recipe(*settings, name="multitask"))


def turn(domain):
    return GenerateRequest(request_id=f"{domain}/0/1/0/0", token_ids=[1], max_new_tokens=1)


def test_turns_of_evaluations_go_behind_all_others(tmp_path):
    router = Router(EndpointReader(tmp_path, job=0), connect=lambda _: None, seed=0, weights={"lake": 1.0})
    router.trajectories.credits.spend("lake", 1e9)
    router.trajectories._num_active.update({"lake": 1, "rich": 1})  # so that credit is not renewed
    long_course = TrajectoryState(served_tokens=1e9, served_s=1e9)
    worst = router._with_priority(with_ids(turn("lake")), long_course).priority
    held_out_first = router._with_priority(with_ids(turn("held-out:lake")), TrajectoryState()).priority
    assert NUM_LEVELS <= worst < held_out_first


def test_turns_of_evaluations_are_not_among_the_figures_of_training():
    async def generate(request):
        return make_completion([1, 2], version=3, logprob=0.0)

    acted = []
    policy = CountingPolicy(SimpleNamespace(generate=generate), on_turn=lambda *_: acted.append(1))
    asyncio.run(policy.generate(turn("held-out:lake")))
    assert (policy.num_turns, policy.num_tokens, acted) == (0, 0, [])
    asyncio.run(policy.generate(turn("lake")))
    assert (policy.num_turns, policy.num_tokens, acted) == (1, 2, [1])


class Weightless:
    """A placeholder for a trainer's state, of which only the commit matters."""

    def write(self, directory):
        (directory / "state-0.safetensors").write_bytes(b"")


def test_the_checkpoints_that_are_kept_are_those_with_the_best_evaluation(tmp_path):
    results = [result(0, 10, 0.9), result(1, 20, 0.1)]
    for version, reward in ((9, 0.0), (21, 1.0), (30, 0.5)):
        moment = checkpoint.PendingCheckpoint(
            step=version, version=version, state=Weightless(), consumed=b"{}", extra={"reward": reward}
        )
        checkpoint.commit_checkpoint(tmp_path, moment)
    by_evaluation = partial(score_of_manifest, results=results)
    checkpoint.prune_checkpoints(tmp_path, keep=1, keep_best=1, score=by_evaluation)
    assert list_saved_steps(tmp_path) == [9, 30]


def score_of_manifest(manifest, *, results):
    return find_version_score(manifest.version, results, every=EVERY)
