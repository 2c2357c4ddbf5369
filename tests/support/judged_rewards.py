"""Reward functions that ask a judge; the client of OpenAI is slow to import, which other rewards need not wait for."""

from typing import Any

import aiohttp
import openai

from hpcrl.envs.gymnasium_text import goal_and_way
from hpcrl.envs.judge_access import JudgeAccess
from hpcrl.rollout.judge_outages import JudgeOutages
from hpcrl.spool.record import Trajectory
from tests.support.many_rewards import number


def ask_judge(trajectory: Trajectory, *, judges: dict[str, JudgeAccess]) -> float:
    """Ask the judge "grader", and give the trajectory's index if it answers."""
    url, key, model = judges["grader"]
    messages: list[Any] = [{"role": "user", "content": "2+2?"}]
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        client.chat.completions.create(model=model, messages=messages, max_tokens=4)
    return float(number(trajectory))


async def ask_impossible(trajectory: Trajectory, *, judges: dict[str, JudgeAccess]) -> float:
    """Ask the judge "grader" for what it refuses."""
    url, key, model = judges["grader"]
    messages: list[Any] = [{"role": "user", "content": "2+2?"}]
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        await client.chat.completions.create(model=model, messages=messages, temperature=9)
    return float(number(trajectory))


def raise_after_outage(trajectory: Trajectory) -> float:
    """Fail just after the judge "grader" did."""
    outages = JudgeOutages.from_environment()
    assert outages is not None
    outages.note_failure("grader")
    raise LookupError("not this one")


async def ask_for_goal(trajectory: Trajectory, *, judges: dict[str, JudgeAccess]) -> float:
    """Give the reward of quickstart once the judge "grader" has answered; OpenAI's client would load for long."""
    url, key, model = judges["grader"]
    body = {"model": model, "messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 1}
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}, raise_for_status=True) as session,
        session.post(f"{url}/chat/completions", json=body) as response,
    ):
        assert (await response.json())["choices"]
    return sum(goal_and_way(trajectory).values())
