"""An env host: what it counts as on its way to the disk, and when it begins nothing."""

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


def test_what_ends_while_a_segment_is_written_stays_counted() -> None:
    async def run() -> int:
        host: Any = SimpleNamespace(num_unsealed=4, under_way=InFlightVersions())
        writing, written = threading.Event(), threading.Event()

        def flush() -> list[str]:
            writing.set()
            assert written.wait(60)
            return ["a", "b", "c", "d"]

        sealing = asyncio.create_task(EnvWorker._seal(cast(EnvWorker, host), flush))
        await asyncio.to_thread(writing.wait, 60)
        host.num_unsealed += 8
        written.set()
        await sealing
        return int(host.num_unsealed)

    assert asyncio.run(run()) == 8


def test_nothing_begins_while_the_engines_are_too_far_behind() -> None:
    """Every episode would end as stale with its first turn, and be replaced by one that does so too."""
    recipe = load_recipe("quickstart", settings=("rollout.max_lag=2",))
    told, asked = [0], []

    async def refresh() -> None:
        asked.append(told[0])

    host: Any = SimpleNamespace(
        version=3,
        num_unsealed=0,
        curriculum=None,
        groups=EpisodeGroups(group_size=2, episodes_per_group=2),
        gate=AdmissionControl(recipe, EnvWorkerId(0, 1)),
        rollouts=SimpleNamespace(num_sealed=lambda: 0),
        router=SimpleNamespace(versions=lambda: [*told, -1], refresh=refresh),
        agenda=SimpleNamespace(next=lambda now: SimpleNamespace(group=f"lake/{now}")),
        _settled=lambda: 0,
    )
    host._is_served = lambda: EnvWorker._is_served(host)
    host._begin = lambda task: host.groups.begin(task.group)
    asyncio.run(EnvWorker._start_groups(cast(EnvWorker, host)))
    assert (host.groups.num_open, asked) == (0, [0])
    told[0] = 1
    asyncio.run(EnvWorker._start_groups(cast(EnvWorker, host)))
    assert host.groups.num_open > 0
