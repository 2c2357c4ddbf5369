"""Hold an engine of ours between two steps, to see what waits there.

PausableEngine  an engine whose requests are served by a loop of steps
pause_steps     keep it from stepping for the duration of a block
"""

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hpcrl.engines.embedded.engine import EmbeddedEngine
from hpcrl.engines.sim.engine import SimEngine

PausableEngine = EmbeddedEngine | SimEngine


@asynccontextmanager
async def pause_steps(engine: PausableEngine) -> AsyncIterator[None]:
    """Keep an engine from stepping; its requests are kept, may be aborted, and continue afterwards."""
    loop = engine._request_loop
    hooks = loop._hooks
    loop._hooks = dataclasses.replace(hooks, can_step=lambda: False)
    async with loop.between_steps:
        pass  # the step that was running has ended
    try:
        yield
    finally:
        loop._hooks = hooks
        loop.wake()
