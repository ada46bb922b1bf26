"""Environments of `skyrl-gym`, unchanged: `environment: {name: skyrl_gym, env_class: gsm8k_multi_turn}`.

A row of the data is as in SkyRL's data sets: `prompt` (messages), and the columns that the environment reads from its `extras`,
such as `reward_spec`. The reward of a turn is the environment's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncflow.environments.base import Action, Message, TurnResult
from asyncflow.registry import package_module
from asyncflow.types import UserError


class SkyRLGym:
    """Adapter of one text environment of `skyrl-gym`."""

    def __init__(self, env_class: str, **env_config: Any) -> None:
        """`env_class`: a registered name, or `package.module:Class`, which is registered. `env_config`: its own settings.

        Raises `UserError` if the package is not installed, or knows no such environment.
        """
        skyrl_gym = package_module("skyrl_gym", "skyrl-gym", "environment skyrl_gym")
        if ":" in env_class and env_class not in skyrl_gym.registry:
            skyrl_gym.register(id=env_class, entry_point=env_class)
        if env_class not in skyrl_gym.registry:
            raise UserError(f"skyrl-gym has no environment {env_class!r}; it has {', '.join(sorted(skyrl_gym.registry))}")
        self._make, self._env_class, self._config = skyrl_gym.make, env_class, env_config

    def reset(self, example: Mapping[str, Any], seed: int) -> list[Message] | None:
        """See `Environment`. What the environment makes of the prompt; None where it leaves it as it is."""
        prompt = _messages(example.get("prompt", ""))
        extras = {name: value for name, value in example.items() if name != "prompt"}
        self._env = self._make(self._env_class, env_config=_Settings(self._config), extras=extras)
        made, _ = self._env.init([dict(message) for message in prompt])
        return None if list(made) == prompt else list(made)

    def step(self, action: Action) -> TurnResult:
        """See `Environment`."""
        out = self._env.step(str(action))
        return TurnResult(
            list(out["observations"]) or None, float(out["reward"]), bool(out["done"]), _plain(out.get("metadata") or {})
        )

    def close(self) -> None:
        """See `Environment`."""
        self._env.close()


class _Settings(dict):
    """A mapping whose keys are attributes, too: environments read their settings as a `DictConfig`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


def _messages(prompt: str | list[Message]) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]


def _plain(info: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in info.items() if isinstance(value, str | int | float | bool | None)}
