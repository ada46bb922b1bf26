"""Environments with Gymnasium's interface whose observations are text: `environment: {name: gymnasium, env: my_env.py:Class}`.

reset(seed=..., options=the row) -> observation, info        step(action) -> observation, reward, terminated, truncated, info
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from asyncflow.environments.base import Action, Message, TurnResult
from asyncflow.registry import load, package_module
from asyncflow.types import UserError

_NUMBER: Final = re.compile(r"-?\d+")


class Gymnasium:
    """Adapter of one environment. Where its actions are numbers (`Discrete`), the turn's last number is the action."""

    def __init__(self, env: str, **options: Any) -> None:
        """`env`: `file.py:Class`, `package.module:Class`, or an id that `gymnasium.make` knows. `options`: its own.

        Raises `UserError` if it cannot be had.
        """
        if ":" in env and "/" not in env.rpartition(":")[2]:
            self._env = load("environment", env)(**options)
        else:
            gymnasium = package_module("gymnasium", "gymnasium", "environment gymnasium")
            try:
                self._env = gymnasium.make(env, **options)
            except gymnasium.error.Error as error:
                raise UserError(f"gymnasium has no environment {env!r}: {error}") from error
        self._num_actions = getattr(getattr(self._env, "action_space", None), "n", None)

    def reset(self, example: Mapping[str, Any], seed: int) -> list[Message]:
        """See `Environment`."""
        observation, _ = self._env.reset(seed=seed % (1 << 31), options=dict(example))
        return _messages(observation)

    def step(self, action: Action) -> TurnResult:
        """See `Environment`. A turn without a number that is an action changes nothing, and is told so."""
        taken: Any = str(action)
        if self._num_actions is not None:
            found = _NUMBER.findall(action)
            taken = int(found[-1]) if found else -1
            if not 0 <= taken < self._num_actions:
                return TurnResult(_messages(f"An action is a number from 0 to {self._num_actions - 1}."), 0.0, False, {})
        observation, reward, terminated, truncated, _ = self._env.step(taken)
        done = bool(terminated or truncated)
        return TurnResult(None if done else _messages(observation), float(reward), done, {"truncated": bool(truncated)})

    def close(self) -> None:
        """See `Environment`."""
        self._env.close()


def _messages(observation: Any) -> list[Message]:
    if not isinstance(observation, str):
        observation = json.dumps(observation.tolist() if hasattr(observation, "tolist") else observation, default=str)
    return [{"role": "user", "content": observation}]
