"""Environments that only take their time, for simulated runs: an episode's course is a function of its seed and actions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncflow.environments.base import Action, EnvironmentFailure, Opening, TurnResult, Words
from asyncflow.types import Array
from asyncflow.waits import PROCESS, waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepingEnvironments:
    """`Environments` whose episodes sleep: `seconds` is the median of a turn, whose logarithm has the standard deviation `sigma`.

    Episodes have 1 to `turns` turns, all equally often. A turn that would take longer than `deadline_seconds` ends its episode as a
    real one would.
    """

    seconds: float
    sigma: float
    turns: int
    deadline_seconds: float

    async def begin(self, example: Mapping[str, Any], seed: int) -> tuple[SleepingEpisode, Opening | None]:
        """See `Environments`."""
        return SleepingEpisode(self, seed), None


class SleepingEpisode:
    """`Episode` that sleeps; its reward, at the end, is 0 or 1."""

    def __init__(self, environments: SleepingEnvironments, seed: int) -> None:
        self._of, self._story, self._num_turns = environments, str(seed), 0

    async def step(self, action: Action) -> TurnResult:
        """See `Episode`."""
        of, self._story = self._of, f"{self._story}/{action}"
        self._num_turns += 1
        rng = random.Random(self._story)
        seconds = of.seconds * rng.lognormvariate(0.0, of.sigma)
        with waiting(PROCESS, seconds=of.deadline_seconds, process="environment process", pid=0):
            await asyncio.sleep(min(seconds, of.deadline_seconds))
        if seconds > of.deadline_seconds:
            raise EnvironmentFailure("timeout", f"the environment had not answered after {of.deadline_seconds:g} s")
        done = rng.random() * (of.turns - self._num_turns + 1) < 1.0
        return TurnResult(None if done else "", float(rng.random() < 0.5) if done else None, done, {})

    def end(self) -> None:
        """See `Episode`."""


class SleepingFormat:
    """`TurnFormat` without text: an observation is so many zeros."""

    def __init__(self, observed_tokens: int) -> None:
        self._observed_tokens = observed_tokens

    def opening(self, prompt_ids: Array, words: Words, tools: Sequence[Mapping[str, Any]]) -> Array:
        """See `TurnFormat`."""
        return np.zeros(self._observed_tokens, np.int64)

    def between(self, turn_ids: Array, words: Words | None, *, is_finished: bool) -> Array:
        """See `TurnFormat`."""
        return np.zeros(self._observed_tokens, np.int64)

    def branch(self, prompt_ids: Array, turns: Sequence[tuple[Array, Words | None]]) -> Array | None:
        """See `TurnFormat`."""
        return None

    def action(self, turn_ids: Array, *, is_finished: bool) -> Action:
        """See `TurnFormat`: a sleeping engine's turn is told by its first token."""
        return Action(str(turn_ids[0]), is_finished)
