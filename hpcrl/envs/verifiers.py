"""The environments of verifiers, driven by the parts of that library's loop: prompt, response, stop conditions, rubric.

    Verifiers  one environment

An environment with tools that are called by OpenAI's protocol needs the proxy instead: run it as an agent program.
"""

from functools import partial
from typing import Any

import verifiers
from openai.types.chat import ChatCompletion

from hpcrl.config.user_code import load_code
from hpcrl.envs.base import Step
from hpcrl.errors import ConfigError


class Verifiers:
    """The environment `id`: a name for verifiers.load_environment, or a "package.module:name" that makes one.

    The other options are passed to it. The seed selects a row of its data set. The rubric's score is the reward of the
    last turn.
    """

    def __init__(self, *, id: str, **options: Any) -> None:
        try:
            make = load_code(id, what="Verifiers: id") if ":" in id else partial(verifiers.load_environment, id)
            self._env = make(**options)
        except (ValueError, TypeError, ImportError) as error:
            raise ConfigError(f"Verifiers: id = {id!r} with options {options!r}: {error}") from error
        self._rows = self._env.get_dataset()

    async def reset(self, seed: int) -> str:
        row = self._rows[seed % len(self._rows)]
        self._state = await self._env.init_state(row, client=None, model="policy", sampling_args={})
        self._state = await self._env.setup_state(self._state)
        self._prompt = await self._env.get_prompt_messages(self._state)
        return _join_texts(self._prompt)

    async def step(self, action: str) -> Step:
        await self._env.add_model_response(self._state, self._prompt, _make_response(action))
        seen = ""
        if not await self._env.is_completed(self._state):
            before = len(self._prompt) + 1
            self._prompt = await self._env.get_prompt_messages(self._state)
            seen = _join_texts(self._prompt[before:])
            if self._state.get("final_env_response") is None:
                return Step(observation=seen)
            await self._env.is_completed(self._state)
        await self._env.render_completion(self._state)
        await self._env.rubric.score_rollout(self._state)
        reward = float(self._state["reward"])
        return Step(observation=seen or f"reward {reward:g}", reward=reward, done=True)

    async def close(self) -> None:
        """Do nothing: all state is in this object."""


def _join_texts(messages: Any) -> str:
    """Join the messages that a model is shown: all but its own."""
    if isinstance(messages, str):
        return messages
    return "\n\n".join(str(message["content"]) for message in messages if message["role"] != "assistant")


def _make_response(text: str) -> ChatCompletion:
    """Return the model's text in the form that verifiers expects from an endpoint."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    body = {"id": "0", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
    return ChatCompletion.model_validate(body)
