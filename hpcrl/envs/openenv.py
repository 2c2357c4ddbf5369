"""An environment on an OpenEnv server, used over its websocket; only the client is installed here."""

import json
from typing import Any

from openenv.core.generic_client import GenericEnvClient

from hpcrl.envs.base import Step


class OpenEnv:
    """The environment served at `url`, one session at a time.

    action_field        the field of the server's action for the model's text; the other fields are `action`
    observation_field   the field of the server's observation that the model is shown; without one, all of it as JSON
    """

    def __init__(
        self,
        *,
        url: str,
        action_field: str = "message",
        observation_field: str | None = None,
        action: dict[str, Any] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._url = url
        self._action_field = action_field
        self._observation_field = observation_field
        self._action = action or {}
        self._timeout_s = timeout_s
        self._client: GenericEnvClient | None = None

    async def reset(self, seed: int, task: dict[str, Any] | None = None) -> str:
        """Start a task; the fields of a row are sent beside the seed."""
        if self._client is None:
            self._client = GenericEnvClient(self._url, message_timeout_s=self._timeout_s)
            await self._client.connect()
        result = await self._client.reset(**{"seed": seed, **(task or {})})
        return self._text(result.observation)

    async def step(self, action: str) -> Step:
        assert self._client is not None, "reset comes first"
        result = await self._client.step({**self._action, self._action_field: action})
        reward = 0.0 if result.reward is None else float(result.reward)
        return Step(observation=self._text(result.observation), reward=reward, done=bool(result.done))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    def _text(self, observation: dict[str, Any]) -> str:
        if self._observation_field is None:
            return json.dumps(observation)
        try:
            return str(observation[self._observation_field])
        except KeyError:
            fields = ", ".join(sorted(observation))
            raise RuntimeError(
                f"OpenEnv: the observation has no {self._observation_field!r}; it has {fields}"
            ) from None
