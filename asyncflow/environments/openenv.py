"""Environments that an OpenEnv server serves, over its WebSocket: `environment: {name: openenv, url: http://host:8000}`.

The server runs anywhere, in an environment of its own; the client is OpenEnv's generic one (`openenv-core`), which needs none of
the server's packages. Actions and observations are JSON objects there: options say which field is the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from asyncflow.environments.base import Action, Message, TurnResult
from asyncflow.registry import package_module


class OpenEnv:
    """Client of one episode."""

    episodes_per_process = 16  # it waits for the server

    def __init__(
        self,
        url: str,
        *,
        action_field: str | None = "message",
        observation_field: str | None = None,
        is_deterministic: bool = False,
        reset_columns: tuple[str, ...] | list[str] = (),
    ) -> None:
        """`action_field`: field of the action that is the turn; None: the turn is the action itself, as JSON. `observation_field`:
        field of the observation that the policy reads; None: all of it, as JSON. `reset_columns`: columns of the data for `reset`.

        Raises `UserError` if the package is not installed.
        """
        self._client = package_module("openenv.core", "openenv-core", "environment openenv").GenericEnvClient(base_url=url)
        self._action_field, self._observation_field = action_field, observation_field
        self.is_deterministic, self._columns = is_deterministic, reset_columns

    async def reset(self, example: Mapping[str, Any], seed: int) -> list[Message]:
        """See `Environment`."""
        result = await self._client.reset(seed=seed % (1 << 31), **{name: example[name] for name in self._columns})
        return self._messages(result.observation)

    async def step(self, action: Action) -> TurnResult:
        """See `Environment`. A turn that is to be JSON and is not changes nothing, and is told so."""
        taken: Any = {self._action_field: str(action)}
        if self._action_field is None:
            try:
                taken = json.loads(action)
            except json.JSONDecodeError as error:
                return TurnResult([{"role": "user", "content": f"An action is a JSON object: {error}"}], 0.0, False, {})
        result = await self._client.step(taken)
        reward = None if result.reward is None else float(result.reward)
        return TurnResult(None if result.done else self._messages(result.observation), reward, bool(result.done), {})

    async def close(self) -> None:
        """See `Environment`."""
        await self._client.close()

    def _messages(self, observation: Mapping[str, Any]) -> list[Message]:
        value = observation if self._observation_field is None else observation.get(self._observation_field, "")
        return [{"role": "user", "content": value if isinstance(value, str) else json.dumps(value)}]
