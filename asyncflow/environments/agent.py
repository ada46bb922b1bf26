"""Programs of the user's that speak to the capture endpoint: `environment: {name: agent, run: my_agent.py:run}`, or a command.

    async def run(example, base_url, api_key): ...        returns the reward, or None where a scorer is to give it
    command: [node, agent.js]                             OPENAI_BASE_URL and OPENAI_API_KEY set, the row as JSON on its standard
                                                          input; the last line that it prints is the reward, if it is a number

Its one step is the whole episode: the program runs, and the endpoint (capture/) keeps what it asks the policy for.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from asyncflow.environments.base import Action, TurnResult
from asyncflow.registry import load
from asyncflow.types import UserError

LAST_WORDS: Final = 2000


class Endpoint(msgspec.Struct, frozen=True):
    """Address and key of a program's calls, as the episode's one action says them."""

    base_url: str
    api_key: str


class Agent:
    """Environment of one run of a program."""

    episodes_per_process = 16
    is_captured = True
    """The policy's turns are the calls that the program makes."""

    def __init__(
        self, run: str | None = None, *, command: Sequence[str] | None = None, is_deterministic: bool = False, **options: Any
    ) -> None:
        """`run`: `file.py:function`, a coroutine or a plain function, which is given `options` as well. `is_deterministic`: the
        program depends on its row and its answers alone, and asks for one after another.

        Raises `UserError` if it cannot be had, or both or none are given.
        """
        if (run is None) == (command is None):
            raise UserError("environment agent runs one program: give either environment.run or environment.command")
        self._run = None if run is None else load("agent", run)
        self._command, self._options = command, options
        self.is_deterministic = is_deterministic

    def reset(self, example: Mapping[str, Any], seed: int) -> None:
        """See `Environment`."""
        self._example = example

    async def step(self, action: Action) -> TurnResult:
        """Run the program to its end; `action` is an `Endpoint` as JSON."""
        endpoint = msgspec.json.decode(str(action), type=Endpoint)
        reward = await (self._called(endpoint) if self._run is not None else self._started(endpoint))
        return TurnResult(None, None if reward is None else float(reward), True, {})

    async def _called(self, endpoint: Endpoint) -> float | None:
        assert self._run is not None
        run = functools.partial(self._run, dict(self._example), endpoint.base_url, endpoint.api_key, **self._options)
        if inspect.iscoroutinefunction(self._run):
            return await run()
        returned = await asyncio.to_thread(run)
        return await returned if inspect.isawaitable(returned) else returned

    async def _started(self, endpoint: Endpoint) -> float | None:
        assert self._command is not None
        keys = {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.api_key}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, stderr=pipe, env={**os.environ, **keys}
        )
        printed, errors = await process.communicate(json.dumps(dict(self._example)).encode())
        if process.returncode:
            words = errors.decode(errors="replace").strip()[-LAST_WORDS:]
            raise RuntimeError(f"{self._command[0]} exited with status {process.returncode}: {words}")
        try:
            reward = float(printed.decode(errors="replace").strip().rpartition("\n")[2])
        except ValueError:
            return None
        return reward if math.isfinite(reward) else None
