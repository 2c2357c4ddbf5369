"""An environment and reward functions, of which some are quick."""

from typing import Any

from hpcrl.envs.base import Step, quick_reward


class QuickEnv:
    async def reset(self, seed: int) -> str:
        return ""

    async def step(self, action: str) -> Step:
        return Step(observation="", done=True)

    async def close(self) -> None: ...


@quick_reward
def count_turns(trajectory: Any) -> float:
    return len(trajectory.turns)


def not_marked(trajectory: Any) -> float:
    return 1.0


@quick_reward
def count_in_list(trajectories: list[Any]) -> list[float]:
    return [1.0 for _ in trajectories]


@quick_reward
async def count_later(trajectory: Any) -> float:
    return 1.0


@quick_reward
def read_text(trajectory: Any, text: str) -> float:
    return len(text)


@quick_reward
def fail(trajectory: Any) -> float:
    raise ValueError("no")
