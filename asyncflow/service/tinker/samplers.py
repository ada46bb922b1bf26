"""Sampling under the weights of many models, by few rollout engines.

    requests, in the order in which they came --> an engine that has their weights --> responses
                                        |
                                        +--> else one that is idle: the weights are installed first

consumes: requests for samples, each with the folder of its weights
waits for: an engine with these weights, or an idle one, for the oldest request; younger ones do not overtake it
is unblocked by: engines that become idle
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from asyncflow.engines.base import Response, RolloutEngine, SampleKey, Sampling
from asyncflow.service.limits import Busy
from asyncflow.service.tinker.answers import Sampled, SampleOutput
from asyncflow.types import Array, UserError

if TYPE_CHECKING:
    from torch import Tensor


class SamplingEngine(RolloutEngine, Protocol):
    """Rollout engine that scores sequences, too."""

    async def log_probs(self, token_ids: Array) -> Array:
        """Log-probs (float32 [L - 1]) of the tokens of a sequence (int64 [L]) after its first."""
        ...


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Request for samples. `weights`: folder of a model. `scored_tokens`: of the prompt's end, to be scored; 0: none."""

    weights: Path
    prompt_ids: Array
    num_samples: int
    sampling: Sampling
    key: SampleKey
    scored_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Place:
    engine: SamplingEngine
    weights: Path
    version: int = 0
    num_under_way: int = 0
    is_installing: bool = False  # for the request that it was given to last


class Samplers:
    """Rollout engines that share the requests of all clients. The engines are closed with it."""

    def __init__(
        self,
        engines: Sequence[SamplingEngine],
        weights: Path,
        load: Callable[[Path], Mapping[str, Tensor]],
        largest_queue: int,
    ) -> None:
        """`weights`: the folder whose model all engines have at the start. `load` reads what an engine installs from a folder; it
        raises `OSError` if that is gone. `largest_queue`: requests that wait at most."""
        self._places = [_Place(engine, weights) for engine in engines]
        self._load, self._largest_queue = load, largest_queue
        self._queue: deque[tuple[Path, asyncio.Future[_Place]]] = deque()

    def check_room(self) -> None:
        """Raises `Busy` where too many requests wait."""
        if len(self._queue) >= self._largest_queue:
            raise Busy(f"{len(self._queue)} requests for samples wait already: send fewer at a time", 1.0)

    async def sample(self, request: SampleRequest) -> SampleOutput:
        """Samples, and if asked for the prompt's log-probs. Raises `UserError` for weights that are not there any more, and
        `ValueError` for an impossible request."""
        place = await self._place_for(request.weights)
        try:
            prompt_logprobs = await _scored(place.engine, request) if request.scored_tokens else None
            found = await _responses(place.engine, request)
        except RuntimeError as error:  # such as that the weights a client has trained are not finite
            raise UserError(str(error)) from error
        finally:
            place.num_under_way -= 1
            self._serve_queue()
        sequences = [Sampled(one.token_ids, one.logprobs, one.finish_reason) for _, one in sorted(found.items())]
        return SampleOutput(sequences, prompt_logprobs)

    async def close(self) -> None:
        """Close the engines; requests that wait are cancelled."""
        for _, waiter in self._queue:
            waiter.cancel()
        self._queue.clear()
        for place in self._places:
            await place.engine.close()

    async def _place_for(self, weights: Path) -> _Place:
        """An engine with these weights, on which one request more is under way now."""
        self.check_room()
        waiter: asyncio.Future[_Place] = asyncio.get_running_loop().create_future()
        self._queue.append((weights, waiter))
        self._serve_queue()
        try:
            place = await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # it was given one that it does not take any more
                given = waiter.result()
                given.num_under_way, given.is_installing = given.num_under_way - 1, False
                self._serve_queue()
            raise
        if place.is_installing:
            try:
                await self._install(place, weights)
            except BaseException:
                place.num_under_way -= 1
                raise
            finally:
                place.is_installing = False
                self._serve_queue()
        return place

    def _serve_queue(self) -> None:
        """Give engines to the oldest requests, up to the first one for which there is none."""
        while self._queue:
            weights, waiter = self._queue[0]
            if waiter.cancelled():
                self._queue.popleft()
                continue
            place = self._find(weights)
            if place is None:
                return
            self._queue.popleft()
            place.num_under_way += 1
            waiter.set_result(place)

    def _find(self, weights: Path) -> _Place | None:
        ready = [place for place in self._places if not place.is_installing]
        if having := [place for place in ready if place.weights == weights]:
            return min(having, key=lambda place: place.num_under_way)
        idle = next((place for place in ready if not place.num_under_way), None)
        if idle is not None:
            idle.is_installing = True
        return idle

    async def _install(self, place: _Place, weights: Path) -> None:
        try:
            tensors = await asyncio.to_thread(self._load, weights)
        except OSError as error:
            raise UserError(
                "the weights of this sampler are not there any more: of samplers without a name the newest ones of each model stay"
            ) from error
        await place.engine.install(place.version + 1, tensors)
        place.version, place.weights = place.version + 1, weights


async def _responses(engine: SamplingEngine, request: SampleRequest) -> dict[int, Response]:
    samples = range(request.num_samples)
    stream = engine.generate(request.prompt_ids, samples=samples, sampling=request.sampling, key=request.key)
    try:
        return {response.sample: response async for response in stream}
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()  # at once, so that slots do not go on for a request that was cancelled


async def _scored(engine: SamplingEngine, request: SampleRequest) -> Array:
    """Log-probs of the prompt's tokens, float32 [Lp]; NaN for those that were not asked for, and the first one."""
    logprobs = np.full(len(request.prompt_ids), np.nan, np.float32)
    if len(logprobs) > 1:
        scored = await engine.log_probs(request.prompt_ids)
        count = min(request.scored_tokens, len(scored))
        logprobs[-count:] = scored[-count:]
    return logprobs
