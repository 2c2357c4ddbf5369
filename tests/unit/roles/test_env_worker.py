"""An env worker counts unsealed trajectories and starts nothing while its engines are stale."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

from hpcrl.campaign_dir.workers import EnvWorkerId
from hpcrl.config.recipe import load_recipe
from hpcrl.roles.env import EnvWorker
from hpcrl.rollout.admission import AdmissionControl
from hpcrl.rollout.flow_control import InFlightVersions
from hpcrl.rollout.groups import EpisodeGroups


def test_trajectories_that_end_while_a_segment_is_written_stay_counted() -> None:
    async def run() -> int:
        worker: Any = SimpleNamespace(
            num_unsealed=4, in_flight=InFlightVersions(), task_sets=SimpleNamespace(record_sealed=lambda _: None)
        )
        writing, written = threading.Event(), threading.Event()

        def flush() -> list[str]:
            writing.set()
            assert written.wait(60)
            return ["a", "b", "c", "d"]

        sealing = asyncio.create_task(EnvWorker._seal(cast(EnvWorker, worker), flush))
        await asyncio.to_thread(writing.wait, 60)
        worker.num_unsealed += 8
        written.set()
        await sealing
        return int(worker.num_unsealed)

    assert asyncio.run(run()) == 8


def test_no_group_starts_while_the_engines_are_too_far_behind() -> None:
    """Every episode would become stale in its first turn, and so would its replacement."""
    recipe = load_recipe("quickstart", settings=("rollout.max_lag=2",))
    versions, asked = [0], []

    async def refresh() -> None:
        asked.append(versions[0])

    worker: Any = SimpleNamespace(
        version=3,
        num_unsealed=0,
        curriculum=None,
        groups=EpisodeGroups(group_size=2, episodes_per_group=2),
        admission=AdmissionControl(recipe, EnvWorkerId(0, 1)),
        rollouts=SimpleNamespace(num_sealed=lambda: 0),
        router=SimpleNamespace(versions=lambda: [*versions, -1], refresh=refresh),
        task_queue=SimpleNamespace(take_task=lambda now: SimpleNamespace(group=f"lake/{now}")),
        _read_num_settled=lambda: 0,
    )
    worker._is_served = lambda: EnvWorker._is_served(worker)
    worker._start_group = lambda task: worker.groups.start(task.group)
    asyncio.run(EnvWorker._start_groups(cast(EnvWorker, worker)))
    assert (worker.groups.num_open, asked) == (0, [0])
    versions[0] = 1
    asyncio.run(EnvWorker._start_groups(cast(EnvWorker, worker)))
    assert worker.groups.num_open > 0
