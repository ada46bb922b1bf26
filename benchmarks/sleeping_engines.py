"""Sleeping engines for runs in real processes: what the loops, the queue and the driver themselves take is all that is real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from asyncflow.engines.base import NO_TOKENS, Response, SampleKey, Sampling, TrainEngineOptions
from asyncflow.engines.costs import Costs
from asyncflow.engines.sleeping.rollout import SleepingRolloutEngine
from asyncflow.engines.sleeping.train import SleepingTrainEngine
from asyncflow.types import Array

WORDS = 32
"""Tokens that every vocabulary has."""


class SleepingRollout(SleepingRolloutEngine):
    """`SleepingRolloutEngine` that the embedded engine's options build, in any thread: it begins to run with its first request.

    `costs`: fields of `Costs`.
    """

    def __init__(
        self, model_path: Path, *, num_slots: int, max_context: int, costs: Mapping[str, Any], kv_on_install: Any, **options: Any
    ) -> None:
        self.num_slots, self.max_context, self.installed_version = num_slots, max_context, 0
        self._arguments = (msgspec.convert(costs, Costs), kv_on_install)
        self._running: asyncio.Task[None] | None = None  # type: ignore[assignment]

    def generate(
        self, prompt_ids: Array, *, samples: Sequence[int], sampling: Sampling, key: SampleKey, after: Array = NO_TOKENS
    ) -> AsyncGenerator[Response, None]:
        """See `RolloutEngine`. The token that tells a response from others is one of the vocabulary."""
        self._begin()
        return self._with_words(super().generate(prompt_ids, samples=samples, sampling=sampling, key=key, after=after))

    async def install(self, version: int, tensors: Mapping[str, Any]) -> None:
        """See `RolloutEngine`."""
        self._begin()
        await super().install(version, tensors)

    async def close(self) -> None:
        """See `RolloutEngine`."""
        self._begin()
        await super().close()

    def _begin(self) -> None:
        if self._running is None:
            costs, kv_on_install = self._arguments
            super().__init__(
                costs,
                num_slots=self.num_slots,
                max_context=self.max_context,
                version=self.installed_version,
                kv_on_install=kv_on_install,
            )

    async def _with_words(self, found: AsyncGenerator[Response, None]) -> AsyncGenerator[Response, None]:
        async for response in found:
            yield replace(response, token_ids=response.token_ids % WORDS)


class SleepingTrain(SleepingTrainEngine):
    """`SleepingTrainEngine` that a run's options build. `costs`: fields of `Costs`."""

    def __init__(self, model_path: Path, options: TrainEngineOptions, *, costs: Mapping[str, Any]) -> None:
        super().__init__(msgspec.convert(costs, Costs), learning_rate=options.learning_rate)
