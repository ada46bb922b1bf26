"""Environments of `verifiers` (its v1 API), unchanged, over the capture endpoint: `environment: {name: verifiers, taskset: an-id}`.

A row's `idx` says which task of the taskset it is. The harness (the program that plays) and the runtime are the package's; it
reaches the policy as any OpenAI endpoint. The reward is the sum of a trace's rewards, as the package's own evaluation has it;
of several traces the mean.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from asyncflow.environments.agent import Endpoint
from asyncflow.environments.base import Action, TurnResult
from asyncflow.registry import package_module
from asyncflow.types import UserError


class Verifiers:
    """Environment of one episode; the tool servers and the interception of an environment are shared by a process."""

    episodes_per_process = 16
    is_captured = True
    is_deterministic = False
    _served: ClassVar[dict[bytes, tuple[asyncio.Future[Any], asyncio.Task[None]]]] = {}

    def __init__(
        self,
        taskset: str,
        *,
        harness: str = "null",
        runtime: str = "subprocess",
        env: str = "",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`taskset`, `env`: ids, as `vf-eval` takes them. `harness`, `runtime`: of the agent. `options`: of the taskset.

        Raises `UserError` if the package is not installed, or its configuration refuses these.
        """
        loaders = package_module("verifiers.v1.utils.loaders", "verifiers", "environment verifiers")
        known = {"taskset": {"id": taskset, **(options or {})}, "agent": {"harness": {"id": harness}, "runtime": {"type": runtime}}}
        self._key = msgspec.json.encode([known, env])
        try:
            self._class = loaders.environment_class(taskset, env)
            (config,) = (base.__args__[0] for base in self._class.__orig_bases__ if hasattr(base, "__args__"))
            self._config = config.model_validate({"id": env, **known})
        except (ValueError, ModuleNotFoundError, AttributeError, TypeError) as error:
            raise UserError(f"environment verifiers: taskset {taskset!r} with harness {harness!r}: {error}") from error

    def reset(self, example: Mapping[str, Any], seed: int) -> None:
        """See `Environment`. Raises `KeyError` for a row without `idx`."""
        self._index = int(example["idx"])

    async def step(self, action: Action) -> TurnResult:
        """See `Agent.step`. Raises `RuntimeError` with the package's words where the episode has failed."""
        from verifiers.v1 import EvalClientConfig, ModelContext

        endpoint = msgspec.json.decode(str(action), type=Endpoint)
        environment = await self._shared()
        task = next(itertools.islice(iter(environment.taskset), self._index, None))
        variable = f"ASYNCFLOW_EPISODE_{id(self)}"  # the package reads keys from the environment alone
        os.environ[variable] = endpoint.api_key
        try:
            client = EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable)
            episode = await environment.run_episode(task, ModelContext(model="policy", client=client))
        finally:
            del os.environ[variable]
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode is not ok")
        rewards = [trace.reward for trace in episode.traces]
        return TurnResult(None, sum(rewards) / len(rewards), True, {})

    async def _shared(self) -> Any:
        """The package's environment, served for as long as this process lives."""
        if self._key not in self._served:
            served = asyncio.get_running_loop().create_future()
            self._served[self._key] = served, asyncio.create_task(self._serve(served), name="verifiers")
        return await asyncio.shield(self._served[self._key][0])

    async def _serve(self, served: asyncio.Future[Any]) -> None:
        """Serve until the event loop cancels this task, or the process is killed, which nothing here hears of."""
        try:
            environment = self._class(self._config)
            async with environment.serving():
                served.set_result(environment)
                await asyncio.get_running_loop().create_future()  # the end of the process
        except BaseException as error:
            if served.done():
                raise
            del self._served[self._key]  # the next episode tries again
            served.set_exception(error if isinstance(error, Exception) else RuntimeError(f"its servers: {type(error).__name__}"))
