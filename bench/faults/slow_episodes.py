"""Episodes and training steps that take time but no computing, for campaigns and for their peers.

SlowEnv       an environment whose turns take the times of its seed
wait_step     a node of the pipeline: the time of a training step
list_turns    the times of the turns of an episode
TRAIN_S       the time of a training step
"""

import asyncio
import random
import time
from collections.abc import Sequence

from hpcrl.envs.base import Step, quick_reward
from hpcrl.spool.record import Trajectory

TRAIN_S = 10.0
_NUM_TURNS = 6
_TURN_S = (5.0, 10.0)


def list_turns(seed: int) -> list[float]:
    """Return the times that an environment takes for its turns."""
    rng = random.Random(seed)
    return [rng.uniform(*_TURN_S) for _ in range(_NUM_TURNS)]


class SlowEnv:
    """An environment that waits."""

    def __init__(self) -> None:
        self._waits: list[float] = []

    async def close(self) -> None:
        """Nothing is open."""

    async def reset(self, seed: int) -> str:
        self._waits = list_turns(seed)
        return "a"

    async def step(self, action: str) -> Step:
        await asyncio.sleep(self._waits.pop())
        return Step(observation="a", done=not self._waits)


@quick_reward
def draw_reward(trajectory: Trajectory) -> float:
    """Return a reward that differs within a group, as groups of equal rewards teach nothing."""
    return random.Random(trajectory.id).random()


def wait_step(trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
    """Take the time of a training step."""
    time.sleep(TRAIN_S)
    return trajectories
