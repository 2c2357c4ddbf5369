"""An env worker uses each row once: one whose group was cancelled again, one whose group is durable no more."""

import asyncio
import contextlib
import json
from types import SimpleNamespace
from typing import Any

from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import load_recipe
from hpcrl.envs.task_set import import_task_set
from hpcrl.roles.env import EnvWorker
from hpcrl.rollout.flow_control import InFlightVersions
from hpcrl.rollout.groups import EpisodeGroups
from hpcrl.rollout.task_sets import TaskSets
from hpcrl.rollout.tasks import TaskStream
from tests.support.trajectories import trajectory


class RowWorker:
    """An env worker with real groups and rows, whose episodes end when the test lets them: groups of 2 of 3."""

    def __init__(self, tmp_path):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps({"n": number}) + "\n" for number in range(4)))
        self.recipe = load_recipe("quickstart", settings=(f'domains.lake.tasks="{path}"',))
        import_task_set(self.recipe.domains["lake"].task_set, domain="lake", directory=tmp_path)
        self.directory = tmp_path
        self.ends: dict[str, asyncio.Future[str]] = {}
        self.cleanups: dict[str, asyncio.Event] = {}
        self.is_over = False
        worker = self.worker = object.__new__(EnvWorker)
        nothing: Any = SimpleNamespace(
            record_start=lambda *_: None,
            record_end=lambda *_, **__: None,
            record_release=lambda: False,
            end_episode=lambda *_, **__: None,
            forget=lambda _: None,
            discard_envs=lambda _: None,
            reserve_slot=lambda _: contextlib.nullcontext(),
        )
        worker.task_queue = worker.journal = worker.router = worker.reporter = worker.admission = nothing
        worker.rollouts = SimpleNamespace(writer=SimpleNamespace(has_room=True, append=lambda _: None))
        worker.context = SimpleNamespace(recipe=SimpleNamespace(rollout=SimpleNamespace(episodes_per_group=3)))
        worker.version = worker.num_unsealed = 0
        worker.episodes, worker.in_flight = {}, InFlightVersions()
        worker.groups = EpisodeGroups(group_size=2, episodes_per_group=3)
        worker.task_sets = self.load_rows()
        worker._play_training = self._play
        self.stream = TaskStream(EnvWorkerId(0, 1), recipe_seed=0, rows=worker.task_sets)

    def load_rows(self):
        """Read the rows and their saved progress, as the next run of this worker does."""
        return TaskSets(self.recipe, EnvWorkerId(0, 1), directory=self.directory, progress=self.directory / "0.json")

    def draw(self):
        return self.stream.draw({"lake": 1.0})

    async def start(self):
        task = self.draw()
        self.worker._start_group(task)
        await asyncio.sleep(0)
        return task

    async def end(self, task, index, status="done"):
        self.ends[task.episode(index)].set_result(status)
        await _settle()

    async def _play(self, task, index):
        end = self.ends[task.episode(index)] = asyncio.get_running_loop().create_future()
        try:
            status = await end
        except asyncio.CancelledError:
            if not self.is_over:
                await self.cleanups.setdefault(task.episode(index), asyncio.Event()).wait()
            raise
        return trajectory(task.number, index, status=status)

    async def clean_up(self, task, index):
        """Let a cancelled episode end."""
        self.cleanups.setdefault(task.episode(index), asyncio.Event()).set()
        await _settle()

    def close(self):
        """Let every episode end, also after a failure."""
        self.is_over = True
        for cleanup in self.cleanups.values():
            cleanup.set()


async def _settle():
    for _ in range(10):
        await asyncio.sleep(0)


def _run(test, tmp_path):
    async def run():
        with contextlib.closing(RowWorker(tmp_path)) as rows:
            return await test(rows)

    return asyncio.run(run())


def test_a_row_is_used_again_once_after_the_last_cancelled_episode_of_its_group(tmp_path):
    async def run(rows):
        spare = await rows.start()
        _, dropped = rows.worker.groups.close_all()
        assert not dropped
        for episode in list(rows.worker.episodes.values()):
            episode.cancel()
        await _settle()
        await rows.clean_up(spare, 0)
        other = rows.draw()
        await rows.clean_up(spare, 1)
        third = rows.draw()
        await rows.clean_up(spare, 2)
        again, fourth = rows.draw(), rows.draw()
        assert again.place == spare.place
        assert len({task.place for task in (spare, other, third, fourth)}) == 4

    _run(run, tmp_path)


def test_a_row_is_used_up_when_its_whole_group_is_durable(tmp_path):
    """A kill between the two loses the trajectories: the next run of the worker plays the row again."""

    async def run(rows):
        task = await rows.start()
        await rows.end(task, 0)
        await rows.end(task, 2)
        await rows.clean_up(task, 1)
        assert not rows.worker.episodes
        assert rows.draw().place != task.place  # it is still the row of a group that was released
        nexts = []
        for sealed in ([], [0], [2]):
            await rows.worker._seal(lambda sealed=sealed: [task.episode(index) for index in sealed])
            rows.worker.task_sets.save()
            nexts.append(rows.load_rows().take_place("lake"))
        return task.place, nexts

    place, nexts = _run(run, tmp_path)
    assert nexts[:2] == [place, place]
    assert nexts[2] != place


def test_the_row_of_a_lost_group_is_used_up(tmp_path):
    async def run(rows):
        task = await rows.start()
        await rows.end(task, 0, "env-fault")
        await rows.end(task, 1, "env-fault")
        await rows.clean_up(task, 2)
        rows.worker.task_sets.save()
        return task.place, rows.draw().place, rows.load_rows().take_place("lake")

    place, *later = _run(run, tmp_path)
    assert place not in later
