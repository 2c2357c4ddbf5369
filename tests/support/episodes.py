"""Episodes in one environment, played action by action, and the account of those of a worker."""

import asyncio
from collections.abc import Iterable
from typing import Any

from hpcrl.envs.base import Step
from hpcrl.rollout.groups import EpisodeLedger


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


def is_balanced(ledger: EpisodeLedger) -> bool:
    """Return whether every started episode runs, is held, or has ended once."""
    return ledger.num_started == len(ledger.running) + len(ledger.kept) + ledger.endings.total()
