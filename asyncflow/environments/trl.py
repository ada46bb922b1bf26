"""Environments that were written for TRL's `environment_factory`, unchanged: `environment: {name: trl, factory: my_env.py:Class}`.

Its public methods are tools, `reset(**row)` begins an episode and may say something more, and `get_reward()`, where it has one, is
called once, when the policy has answered without a call. Nothing of TRL is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from asyncflow.environments.base import Action, TurnResult
from asyncflow.environments.tool_calls import calls_in
from asyncflow.environments.tools import TOOLS, ToolBox
from asyncflow.registry import load, resolve
from asyncflow.types import UserError


class TRLEnvironment:
    """Adapter of one environment, and of TRL's `tools` beside it."""

    def __init__(
        self, factory: str, *, tools: Sequence[str] = (), max_calls: int | None = None, is_deterministic: bool = True
    ) -> None:
        """`factory`: `file.py:Class`, or a function that makes one. `tools`: more functions, as of the environment `tools`.
        `max_calls`: turns with calls; the one behind them is the last (TRL: `max_tool_calling_iterations`).

        Raises `UserError` if it cannot be had, or has no `reset`.
        """
        self._environment = load("environment", factory)()
        named = inspect.getmembers(type(self._environment), predicate=inspect.isfunction)
        methods = [getattr(self._environment, name) for name, _ in named if not name.startswith("_")]
        if not callable(getattr(self._environment, "reset", None)):
            raise UserError(f"environment {factory} has no method reset")
        own = [method for method in methods if method.__name__ not in ("reset", "get_reward")]
        self._box = ToolBox([*(load("tool", resolve("tool", name, TOOLS)) for name in tools), *own])
        self._max_calls, self._turns = max_calls, 0
        self.tools = self._box.specifications
        self.is_deterministic = is_deterministic

    async def reset(self, example: Mapping[str, Any], seed: int) -> str | None:
        """See `Environment`."""
        self._turns = 0
        observation = self._environment.reset(**example)
        return await observation if inspect.isawaitable(observation) else observation

    async def step(self, action: Action) -> TurnResult:
        """See `Environment`."""
        calls = calls_in(action)
        if not calls or (self._max_calls is not None and self._turns >= self._max_calls):
            return TurnResult(None, await self._reward(), True, {})
        self._turns += 1
        return await self._box.answer_to(action, calls, 1 << 20)

    async def _reward(self) -> float | None:
        if (get_reward := getattr(self._environment, "get_reward", None)) is None:
            return None
        reward = get_reward()
        return float(await reward if inspect.isawaitable(reward) else reward)
