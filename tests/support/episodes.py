"""Episodes in one environment, played action by action."""

import asyncio
from collections.abc import Iterable
from typing import Any

from hpcrl.envs.base import Step


def play(env: Any, actions: Iterable[Any], *, seed: int = 0) -> tuple[Any, list[Step]]:
    """Return the first observation, and the steps up to the end of the episode."""

    async def run() -> tuple[Any, list[Step]]:
        steps: list[Step] = []
        first = await env.reset(seed)
        for action in actions:
            steps.append(await env.step(action))
            if steps[-1].done:
                break
        await env.close()
        return first, steps

    return asyncio.run(run())
