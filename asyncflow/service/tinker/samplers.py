"""Sampling under the weights of many models, by few rollout engines.

    requests, in the order in which they came --> an engine that has their whole model, and room for their adapter --> responses
                                        |                      ^ the adapter is loaded beside others, if it is not there
                                        +--> else one that is idle: their whole model is installed first

An engine generates with one whole model at a time, and with any adapters over it at once (engines/rollout/engine.py). Of those that
no request names, the one that was named longest ago goes when another one needs its room.

consumes: requests for samples, each with the folders of its weights
waits for: an engine as above, for the oldest request; younger ones do not overtake it
is unblocked by: requests that end
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from asyncflow.attestation import fault_of
from asyncflow.engines.base import Response, SampleKey, Sampling
from asyncflow.service.limits import Busy
from asyncflow.service.tinker.answers import SampleOutput
from asyncflow.types import Array, LoraSpec, RunError, UserError

if TYPE_CHECKING:
    from torch import Tensor

    from asyncflow.engines.rollout.engine import SlotEngine


class SamplerFiles(NamedTuple):
    """Folders of what is sampled from: a whole model, and an adapter over it."""

    model: Path
    adapter: Path | None = None


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Request for samples. `scored_tokens`: of the prompt's end, to be scored; 0: none."""

    weights: SamplerFiles
    prompt_ids: Array
    num_samples: int
    sampling: Sampling
    key: SampleKey
    scored_tokens: int = 0


class ReadWeights(NamedTuple):
    """Tensors of a folder; `lora` None: of a whole model. `sums`: of each as engines have it (asyncflow/attestation.py); empty:
    what engines make of them is not looked at."""

    tensors: Mapping[str, Tensor]
    lora: LoraSpec | None = None
    sums: Mapping[str, int] = {}


NOTHING: Final = Path()
"""Folder of weights that nobody has asked for: an engine has others than it was given."""


class _Held:
    """Weights of a folder that an engine has, or that are on their way to it; the way may fail, of which all waiting calls hear."""

    _numbers = itertools.count()

    def __init__(self, folder: Path) -> None:
        self.folder, self.num_requests = folder, 0
        self.name = f"{folder} {next(self._numbers)}"
        """By which an engine knows an adapter: one that goes may still be there when it comes again."""
        self._arriving: asyncio.Task[None] | None = None

    def come_by(self, way: Coroutine[Any, Any, None]) -> None:
        self._arriving = asyncio.create_task(way)
        self._arriving.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may wait any more

    async def arrived(self) -> None:
        """Wait for the weights. Raises the error of their loading."""
        if self._arriving is not None:
            await asyncio.shield(self._arriving)  # which others wait for, too

    async def have_arrived(self) -> bool:
        """Whether the weights have arrived. Waits until that is known."""
        if self._arriving is None:
            return True
        await asyncio.wait([self._arriving])
        return not self._arriving.cancelled() and self._arriving.exception() is None

    def cancel(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()


@dataclass(slots=True, eq=False)
class _SamplingEngine:
    """An engine with its whole model, and its adapters, the one that was named longest ago first."""

    engine: SlotEngine
    installed: Path
    model: _Held
    adapters: OrderedDict[Path, _Held] = field(default_factory=OrderedDict)
    version: int = 0


@dataclass(slots=True, eq=False)
class _Grant:
    """Share of an engine that a request has until it has ended."""

    engine: SlotEngine
    model: _Held
    adapter: _Held | None

    @property
    def held(self) -> list[_Held]:
        """Weights that it holds: the model, and the adapter if there is one."""
        return [self.model] if self.adapter is None else [self.model, self.adapter]

    @property
    def name(self) -> str | None:
        """Name by which its engine knows the adapter."""
        return None if self.adapter is None else self.adapter.name

    def end(self) -> None:
        for each in self.held:
            each.num_requests -= 1


class Samplers:
    """Rollout engines that share the requests of all clients. The engines are closed with it."""

    def __init__(
        self,
        engines: Sequence[SlotEngine],
        model: Path,
        read: Callable[[Path], ReadWeights],
        *,
        largest_queue: int,
        num_adapters: int,
    ) -> None:
        """`model`: the folder whose model all engines have at the start. `read` reads a folder's weights; it raises `OSError` if
        they are gone. `largest_queue`: requests that wait at most. `num_adapters`: that each engine has room for."""
        self._places = [_SamplingEngine(engine, model, _Held(model)) for engine in engines]
        self._read, self._largest_queue, self._num_adapters = read, largest_queue, num_adapters
        self._queue: deque[tuple[SamplerFiles, asyncio.Future[_Grant]]] = deque()

    def check_room(self) -> None:
        """Raises `Busy` where too many requests wait."""
        if len(self._queue) >= self._largest_queue:
            raise Busy(f"{len(self._queue)} requests for samples wait already: send fewer at a time", 1.0)

    async def sample(self, request: SampleRequest) -> SampleOutput:
        """Samples, and if asked for the prompt's log-probs. Raises `UserError` for weights that are not there any more,
        `ValueError` for an impossible request, or weights that do not fit, and `RunError` where an engine has not the weights that
        it was given."""
        grant = await self._granted(request.weights)
        try:
            for held in grant.held:
                await held.arrived()
            prompt_logprobs = await _scored(grant, request) if request.scored_tokens else None
            found = await _responses(grant, request)
        except RuntimeError as error:  # such as that the weights a client has trained are not finite
            raise UserError(str(error)) from error
        finally:
            grant.end()
            self._serve_queue()
        return SampleOutput([response for _, response in sorted(found.items())], prompt_logprobs)

    async def close(self) -> None:
        """Close the engines; requests that wait are cancelled."""
        for _, waiter in self._queue:
            waiter.cancel()
        self._queue.clear()
        for place in self._places:
            for held in (place.model, *place.adapters.values()):
                held.cancel()
            await place.engine.close()

    async def _granted(self, weights: SamplerFiles) -> _Grant:
        """An engine that has these weights, or will have them soon, on which one request more is under way now."""
        self.check_room()
        waiter: asyncio.Future[_Grant] = asyncio.get_running_loop().create_future()
        self._queue.append((weights, waiter))
        self._serve_queue()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # it was given one that it does not take any more
                waiter.result().end()
                self._serve_queue()
            raise

    def _serve_queue(self) -> None:
        """Give engines to the oldest requests, up to the first one for which there is none."""
        while self._queue:
            weights, waiter = self._queue[0]
            if not waiter.cancelled():
                place = self._place_for(weights)
                if place is None:
                    return
                waiter.set_result(self._grant(place, weights))
            self._queue.popleft()

    def _place_for(self, weights: SamplerFiles) -> _SamplingEngine | None:
        """The best engine for these weights: one that has the model, with few requests, and if possible the adapter; else idle."""
        able = [place for place in self._places if self._can_serve(place, weights)]

        def cost(place: _SamplingEngine) -> tuple[bool, int, bool]:
            return place.model.folder != weights.model, place.model.num_requests, weights.adapter not in place.adapters

        return min(able, key=cost, default=None)

    def _can_serve(self, place: _SamplingEngine, weights: SamplerFiles) -> bool:
        if place.model.folder != weights.model and place.model.num_requests:
            return False
        has_room = len(place.adapters) < self._num_adapters or any(not held.num_requests for held in place.adapters.values())
        return weights.adapter is None or weights.adapter in place.adapters or has_room

    def _grant(self, place: _SamplingEngine, weights: SamplerFiles) -> _Grant:
        """Grant to one request more, of an engine that can serve it. What it lacks comes, and others go on meanwhile."""
        if place.model.folder != weights.model:
            before, place.model = place.model, _Held(weights.model)
            place.model.come_by(self._install(place, place.model, before))
        if weights.adapter is not None:
            if weights.adapter not in place.adapters:
                self._begin_to_load(place, weights.adapter)
            place.adapters.move_to_end(weights.adapter)
        adapter = None if weights.adapter is None else place.adapters[weights.adapter]
        grant = _Grant(place.engine, place.model, adapter)
        for each in grant.held:
            each.num_requests += 1
        return grant

    def _begin_to_load(self, place: _SamplingEngine, folder: Path) -> None:
        """Have an adapter come, in the place of one that no request names if there is no room beside it."""
        before = None
        if len(place.adapters) >= self._num_adapters:
            before = next(held for held in place.adapters.values() if not held.num_requests)
            del place.adapters[before.folder]
        adapter = place.adapters[folder] = _Held(folder)
        adapter.come_by(self._load(place, adapter, before))

    async def _install(self, place: _SamplingEngine, model: _Held, before: _Held) -> None:
        """Install a whole model, where no request needs the one before any more."""
        try:
            await before.have_arrived()
            read = await self._read_in_thread(model.folder)
            await place.engine.install(place.version + 1, read.tensors)
            place.version, place.installed = place.version + 1, NOTHING
            await self._check(place, read, None)
        except BaseException:
            if place.model is model:
                place.model = _Held(place.installed)  # the engine has what it had, if it has not got something else
            raise
        place.installed = model.folder

    async def _load(self, place: _SamplingEngine, adapter: _Held, before: _Held | None) -> None:
        try:
            if before is not None and await before.have_arrived():
                await place.engine.unload_adapter(before.name)
            read = await self._read_in_thread(adapter.folder)
            assert read.lora is not None, "a request's adapter is one"
            await place.engine.load_adapter(adapter.name, read.lora, read.tensors)
            try:
                await self._check(place, read, adapter.name)
            except RunError:
                await place.engine.unload_adapter(adapter.name)
                raise
        except BaseException:
            if place.adapters.get(adapter.folder) is adapter:
                del place.adapters[adapter.folder]
            raise

    async def _check(self, place: _SamplingEngine, read: ReadWeights, adapter: str | None) -> None:
        """Raises `RunError` where an engine generates with other weights than it was given, as a model or an adapter."""
        if read.sums and (fault := fault_of(await place.engine.attest(adapter), place.version, read.sums)):
            raise RunError(f"nothing is sampled by these weights, since the server's engine has others: {fault}")

    async def _read_in_thread(self, folder: Path) -> ReadWeights:
        try:
            return await asyncio.to_thread(self._read, folder)
        except OSError as error:
            raise UserError(
                "the weights of this sampler are not there any more: of samplers without a name the newest ones of each model stay"
            ) from error


async def _responses(grant: _Grant, request: SampleRequest) -> dict[int, Response]:
    samples, sampling, key = range(request.num_samples), request.sampling, request.key
    stream = grant.engine.generate(request.prompt_ids, samples=samples, sampling=sampling, key=key, adapter=grant.name)
    try:
        return {response.sample: response async for response in stream}
    finally:
        await stream.aclose()  # at once, so that slots do not go on for a request that was cancelled


async def _scored(grant: _Grant, request: SampleRequest) -> Array:
    """Log-probs of the prompt's tokens, float32 [Lp]; NaN for those that were not asked for, and the first one."""
    logprobs = np.full(len(request.prompt_ids), np.nan, np.float32)
    if len(logprobs) > 1:
        scored = await grant.engine.log_probs(request.prompt_ids, grant.name)
        count = min(request.scored_tokens, len(scored))
        logprobs[-count:] = scored[-count:]
    return logprobs
