"""Rollout engine that sleeps. A response's length and tokens depend on its key alone, so a lost response is made again exactly."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from asyncflow.engines.base import NO_TOKENS, Response, SampleKey, Sampling, Timing
from asyncflow.engines.cores import ROLLOUT, Cores
from asyncflow.engines.costs import Costs
from asyncflow.types import Array

if TYPE_CHECKING:
    from torch import Tensor

_ROUNDING: Final = 1e-9
"""Fraction of a decode step: a timer that fires at the step's end may be early by rounding."""


@dataclass(slots=True, eq=False)
class _PromptRequest:
    """Request for samples of one prompt. `arrived` gets each response, or the error that ends the request."""

    prompt_tokens: int
    key: SampleKey
    sampling: Sampling
    pending: deque[int]  # samples that are not in a slot yet
    after: int  # tokens between the prompt and the response
    arrived: asyncio.Queue[Response | Exception] = field(default_factory=asyncio.Queue)


@dataclass(slots=True, eq=False)
class _Slot:
    """Slot with an unfinished response: `count` of its `length` tokens are made."""

    request: _PromptRequest
    sample: int
    length: int
    number: int
    spans: list[tuple[int, int]]
    count: int = 0


class SleepingRolloutEngine:
    """`RolloutEngine` that sleeps. A response's tokens are its number, then zeros; all its log-probs are -1."""

    is_deterministic = True
    why_not_deterministic = ""

    def __init__(
        self,
        costs: Costs,
        *,
        num_slots: int,
        max_context: int,
        version: int = 0,
        kv_on_install: Literal["keep", "recompute"] = "keep",
        num_parked: int = 0,
        cores: Cores | None = None,
    ) -> None:
        """Start the engine's task, inside a running event loop. `cores`: those it computes on; without them it has its own.

        `max_context`: prompt and response tokens of one slot. `kv_on_install`: with `recompute`, an install also takes the time of
        a prefill of all unfinished responses, and of their prompts once each. `num_parked`: slots of the cache beyond `num_slots`.
        """
        self.num_slots, self.max_context = num_slots, max_context
        self.installed_version = version
        self._costs, self._recomputes = costs, kv_on_install == "recompute"
        self._waiting: deque[_PromptRequest] = deque()
        self._active: list[_Slot] = []
        self._num_cached = num_slots + num_parked
        self._parked: dict[tuple[SampleKey, int], int] = {}  # tokens with keys, by sample, the one that was parked first in front
        self.num_computed = 0
        """Tokens that went through the model so far."""
        self._calls: deque[tuple[Callable[[], float], asyncio.Future[None]]] = deque()  # call returns seconds; caller's
        self._is_paused = self._is_closed = False
        self._cores = cores or Cores()
        self._woken = asyncio.Event()
        self._running = asyncio.create_task(self._run(), name="sleeping rollout engine")
        self._running.add_done_callback(self._has_failed)

    def generate(
        self, prompt_ids: Array, *, samples: Sequence[int], sampling: Sampling, key: SampleKey, after: Array = NO_TOKENS
    ) -> AsyncGenerator[Response, None]:
        """See `RolloutEngine`."""
        if len(prompt_ids) + len(after) + sampling.max_new_tokens > self.max_context:
            raise ValueError(
                f"a prompt of {len(prompt_ids) + len(after)} and a response of {sampling.max_new_tokens} tokens exceed"
                f" the engine's context of {self.max_context}"
            )
        return self._generate(_PromptRequest(len(prompt_ids), key, sampling, deque(samples), len(after)))

    def forget(self, key: SampleKey, sample: int) -> None:
        """See `RolloutEngine`."""
        self._parked.pop((key, sample), None)

    async def _generate(self, request: _PromptRequest) -> AsyncGenerator[Response, None]:
        self._check_open()
        remaining = len(request.pending)
        if request.after:  # a later turn goes before first ones
            self._waiting.insert(next((i for i, r in enumerate(self._waiting) if not r.after), len(self._waiting)), request)
        else:
            self._waiting.append(request)
        if len(self._active) < self.num_slots:
            self._woken.set()
        try:
            while remaining:
                item = await request.arrived.get()
                if isinstance(item, Exception):
                    raise RuntimeError(f"generation ended: {item}") from item
                remaining -= 1
                yield item
        finally:
            if remaining:
                self._cancel(request)

    async def prepare(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """See `RolloutEngine`: there is nothing to prepare."""

    async def install(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """See `RolloutEngine`. The install happens between two decode steps."""
        await self._hand_in(partial(self._install, version))

    async def attest(self) -> None:
        """See `RolloutEngine.attest`: there are no weights."""

    async def log_probs(self, token_ids: Array) -> None:
        """See `RolloutEngine.log_probs`: there are no weights."""

    async def export_weights(self) -> None:
        """See `RolloutEngine`: there are no weights to export."""

    def timings(self) -> Sequence[Timing]:
        """See `RolloutEngine`: what the work takes is known."""
        return ()

    async def pause(self) -> None:
        """See `RolloutEngine`. The present decode step is finished first."""
        await self._hand_in(partial(self._set_paused, True))

    async def resume(self) -> None:
        """See `RolloutEngine`."""
        await self._hand_in(partial(self._set_paused, False))

    async def close(self) -> None:
        """See `RolloutEngine`."""
        if self._is_closed:
            return
        self._running.cancel()
        self._end(RuntimeError("the rollout engine is closed"))

    def _has_failed(self, running: asyncio.Task[None]) -> None:
        if not running.cancelled() and (error := running.exception()) is not None:
            self._end(RuntimeError(f"{type(error).__name__}: {error}"))

    def _end(self, error: Exception) -> None:
        """End all requests and calls with this error; there will be no others."""
        self._is_closed = True
        for request in dict.fromkeys([*(slot.request for slot in self._active), *self._waiting]):
            request.arrived.put_nowait(error)
        for _, done in self._calls:
            if not done.done():
                done.set_exception(error)
        self._active.clear()
        self._waiting.clear()

    # -- between decode steps -----------------------------------------------------------------------------------------------

    async def _hand_in(self, call: Callable[[], float]) -> None:
        """Run `call` between two decode steps, and sleep for the seconds that it returns, even if the caller was cancelled."""
        self._check_open()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls.append((call, done))
        self._woken.set()
        await done

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the rollout engine is closed")

    def _install(self, version: int) -> float:
        self.installed_version = version
        if self._recomputes:
            self._parked.clear()
        for slot in self._active:
            if slot.spans[-1][0] == slot.count:  # two installs without a token between them
                slot.spans.pop()
            slot.spans.append((slot.count, version))
        tokens = 0
        if self._recomputes:  # a prompt once for all of its slots
            prompts = {slot.request for slot in self._active}
            tokens = sum(request.prompt_tokens for request in prompts) + sum(slot.count for slot in self._active)
        return self._costs.install() + (self._costs.prefill(tokens) if tokens else 0.0)

    def _set_paused(self, is_paused: bool) -> float:
        self._is_paused = is_paused
        return 0.0

    def _cancel(self, request: _PromptRequest) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
        self._active = [slot for slot in self._active if slot.request is not request]
        self._woken.set()

    # -- the decode steps ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            if self._calls:
                call, done = self._calls[0]
                await self._cores.compute(ROLLOUT, call())
                self._calls.popleft()
                if not done.done():
                    done.set_result(None)
            elif self._is_paused or not (self._active or self._waiting):
                await self._woken.wait()
            elif self._waiting and len(self._active) < self.num_slots:
                await self._admit()
            else:
                await self._decode()

    async def _admit(self) -> None:
        """Give the free slots to waiting samples, in one prefill of their prompts, which makes the first token of each. A prompt is
        copied where another slot of its request has it, under the same weights."""
        prompt_tokens, admitted = 0, []
        while self._waiting and len(self._active) < self.num_slots:
            request = self._waiting[0]
            cached = self._parked.pop((request.key, request.pending[0]), 0) if request.after else 0
            if not cached and any(slot.request is request and slot.spans[0][1] == self.installed_version for slot in self._active):
                cached = request.prompt_tokens  # copied from a slot that has it
            prompt_tokens += request.prompt_tokens + request.after - cached
            for _ in range(min(len(request.pending), self.num_slots - len(self._active))):
                sample = request.pending.popleft()
                drawn = self._costs.lengths.draw(request.key, sample, request.sampling.max_new_tokens, request.after)
                admitted.append(_Slot(request, sample, *drawn, spans=[(0, self.installed_version)]))
                self._active.append(admitted[-1])
            if not request.pending:
                self._waiting.popleft()
        self._unpark_oldest()
        self.num_computed += prompt_tokens
        if prompt_tokens:
            await self._cores.compute(ROLLOUT, self._costs.prefill(prompt_tokens))
        self._count(admitted, 1)

    async def _decode(self) -> None:
        """Make tokens for all active slots until a response ends or a call comes; a step that has begun is finished."""
        decoding, most = self._active, min(slot.length - slot.count for slot in self._active)
        context = (
            sum(slot.request.prompt_tokens + slot.request.after + slot.count for slot in decoding) + len(decoding) * most / 2
        )  # half way there
        step = self._costs.decode_step(len(decoding), context)
        work = self._cores.begin(ROLLOUT, most * step, self._woken.set)
        await self._woken.wait()
        steps = min(most, math.ceil(work.done() / step - _ROUNDING) if step else most)
        await self._cores.end(work, steps * step)
        self.num_computed += steps * len(decoding)
        self._count(decoding, steps)

    def _count(self, slots: Sequence[_Slot], tokens: int) -> None:
        """Add `tokens` to each of the slots that was not cancelled meanwhile; hand finished responses to their requests."""
        there = set(self._active)
        for slot in slots:
            if slot in there:
                slot.count += tokens
                if slot.count == slot.length:
                    request = slot.request
                    if request.sampling.keeps:
                        self._parked[request.key, slot.sample] = request.prompt_tokens + request.after + slot.count - 1
                    request.arrived.put_nowait(_response(slot))
                    there.discard(slot)
        self._active = [slot for slot in self._active if slot in there]

    def _unpark_oldest(self) -> None:
        """Forget the episodes that were parked first, where their slots are used."""
        while len(self._active) + len(self._parked) > self._num_cached:
            del self._parked[next(iter(self._parked))]


def _response(slot: _Slot) -> Response:
    token_ids = np.zeros(slot.length, np.int64)
    token_ids[0] = slot.number
    return Response(
        sample=slot.sample,
        token_ids=token_ids,
        logprobs=np.full(slot.length, -1.0, np.float32),
        version_spans=np.array([span for span in slot.spans if span[0] < slot.length], np.int64),
        finish_reason="length" if slot.length == slot.request.sampling.max_new_tokens else "stop",
    )
