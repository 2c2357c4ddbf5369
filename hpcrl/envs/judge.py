"""A reward from a language model behind an OpenAI-compatible endpoint.

    judge       a reward function: request a number from the model and scale it to 0..1
    read_score  read the number in its answer
    RUBRIC, MAX_TEXT_CHARS  constants

The request is repeated if the endpoint does not answer, or answers without a number. If all attempts fail, the reward
function fails: that is not the agent's fault and is never scored.
"""

import asyncio
import json
import os
import re
from collections.abc import Mapping
from typing import Any

import aiohttp

from hpcrl.envs.judge_access import find_judge
from hpcrl.errors import ConfigError, EnvFault
from hpcrl.spool.record import Trajectory

RUBRIC = "How well did the assistant do what it was asked in this conversation?"
MAX_TEXT_CHARS = 32_000
"""The number of characters at the end of a conversation that are shown."""
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


async def judge(
    trajectory: Trajectory,
    *,
    text: str,
    judge: str = "",
    url: str = "",
    model: str = "",
    rubric: str = RUBRIC,
    highest: float = 10.0,
    key_variable: str = "OPENAI_API_KEY",
    timeout_s: float = 30.0,
    attempts: int = 3,
    max_tokens: int = 2048,
) -> float:
    """Return a model's score of a conversation, from 0 to 1.

    judge         a judge of the campaign ([judge.NAME]), in place of an endpoint elsewhere
    url           of the endpoint, up to and including /v1
    model         the name of the model there
    highest       the upper end of the model's scale, which starts at 0
    max_tokens    the most tokens of an answer, thoughts included
    key_variable  the environment variable with the key, if the endpoint needs one
    """
    del trajectory
    key = os.environ.get(key_variable, "")
    if judge:
        url, key, model = find_judge(judge)
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"judge: url = {url!r}: it must start with http:// or https:// and end with /v1, or name a judge"
        )
    shown = f"<conversation>\n{text[-MAX_TEXT_CHARS:]}\n</conversation>"
    prompt = f"{rubric}\n\n{shown}\n\nAnswer with one number, 0 to {highest:g}."
    messages = [{"role": "user", "content": prompt}]
    body = {"model": model, "temperature": 0.0, "max_tokens": max_tokens, "messages": messages}
    problem: Exception | None = None
    for attempt in range(attempts):
        try:
            answer = await _request_judgement(f"{url}/chat/completions", body, key, timeout_s)
            return read_score(answer, highest=highest)
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            problem = error
            await asyncio.sleep(0.5 * 2**attempt * (attempt + 1 < attempts))
    raise EnvFault(f"judge: {url} returned no score in {attempts} attempts; the last error: {problem}")


def read_score(answer: str, *, highest: float) -> float:
    """Return the last number of an answer as a share of the highest; raises ValueError if it has none in that range."""
    numbers = _NUMBER.findall(answer)
    if not numbers or not 0 <= float(numbers[-1]) <= highest:
        raise ValueError(f"no number from 0 to {highest:g} in {answer[-200:]!r}")
    return float(numbers[-1]) / highest


async def _request_judgement(url: str, body: Mapping[str, Any], key: str, timeout_s: float) -> str:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limit = aiohttp.ClientTimeout(total=timeout_s)
    async with (
        aiohttp.ClientSession(timeout=limit, raise_for_status=True, trust_env=True) as session,
        session.post(url, json=body, headers=headers) as response,
    ):
        answer = json.loads(await response.read())
    return str(answer["choices"][0]["message"]["content"])
