"""An env host's counts of what is on its way to the disk."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

from hpcrl.roles.env import Host
from hpcrl.rollout.awaited import UnderWay


def test_what_ends_while_a_segment_is_written_stays_counted() -> None:
    async def run() -> int:
        host: Any = SimpleNamespace(num_unsealed=4, under_way=UnderWay())
        writing, written = threading.Event(), threading.Event()

        def flush() -> list[str]:
            writing.set()
            assert written.wait(60)
            return ["a", "b", "c", "d"]

        sealing = asyncio.create_task(Host._seal(cast(Host, host), flush))
        await asyncio.to_thread(writing.wait, 60)
        host.num_unsealed += 8
        written.set()
        await sealing
        return int(host.num_unsealed)

    assert asyncio.run(run()) == 8
