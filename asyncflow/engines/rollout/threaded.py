"""Common half of engines that generate in a thread of their own: the event loop's half, and the thread's loop.

    generate -> inbox -> [ thread: calls from the inbox; a step of the rows that are generated; ... ] -> deliveries

consumes: requests (one prompt, several samples), installs, cancellations and pauses, in the order in which they were handed in
waits for: a call, while it is paused, or nothing is generated and no sample waits
is unblocked by: `generate`, `install`, `resume`, leaving a `generate` early, `close`

What the thread computes is `Rows`: slots.py's, or transformers_engine.py's.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Final, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from asyncflow.engines.base import NO_TOKENS, Response, RolloutEngine, RolloutEngineOptions, SampleKey, Sampling, Timing
from asyncflow.engines.rollout.checks import check_request
from asyncflow.engines.rollout.deliveries import Deliveries
from asyncflow.engines.rollout.requests import SlotRequest
from asyncflow.engines.rollout.sampling import stream_keys
from asyncflow.engines.rollout.stop_strings import StopStrings
from asyncflow.threads import end_at_exit
from asyncflow.types import Array

T = TypeVar("T")
INSTALLED_WEIGHTS: Final = nullcontext(0)
"""Context of requests that are made by what is installed."""


class Rows(Protocol):
    """Rows that are generated: the thread's half of an engine, such as `Slots`."""

    version: int
    is_paused: bool

    @property
    def is_busy(self) -> bool:
        """Whether anything is generated or waits."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether a row is free and no sample waits for it."""
        ...

    def submit(self, request: SlotRequest) -> None:
        """Add a request, which waits for free rows."""

    def cancel(self, request: SlotRequest) -> None:
        """End the rows of `request` and forget its waiting samples."""

    def fail(self, error: Exception) -> None:
        """End every request with `error`."""

    def install(self, version: int, tensors: Mapping[str, Tensor], prepared: Sequence[Tensor] | None) -> None:
        """Install new weights for the tokens from now on. Raises `ValueError`, changing nothing, if they are not the model's."""

    def step(self) -> None:
        """Begin what waits, as far as rows are free; then generate a token for every active row."""

    def end_timing(self) -> None:
        """End the decode steps that are timed together."""

    def take_timings(self) -> list[Timing]:
        """Timings since the last call, in the order of time. May be called from any thread."""
        ...


class ThreadedEngine(RolloutEngine):
    """`RolloutEngine` over `Rows`; the event loop's half. Leaving a `generate` early cancels its rows."""

    _slots: Rows

    def __init__(self, options: RolloutEngineOptions, vocab_size: int) -> None:
        self.num_slots, self.max_context = options.num_slots, options.max_context
        self._vocab_size = vocab_size
        self._is_closed = False
        self._stop_strings = StopStrings(options.model_path)
        self._deliveries = Deliveries()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def _start(self, rows: Rows, num_threads: int) -> None:
        """Start the thread, which computes with `num_threads`."""
        self._slots = rows
        self._thread = threading.Thread(target=self._run, args=(num_threads,), name="rollout", daemon=True)
        end_at_exit(self._thread, partial(self._inbox.put, None))
        self._thread.start()

    async def use_threads(self, count: int) -> None:
        """Compute with so many threads from the next step on. Bits depend on their number."""
        self._inbox.put(partial(torch.set_num_threads, count))

    @property
    def installed_version(self) -> int:
        """Version of the weights that the engine generates with."""
        return self._slots.version

    def generate(
        self, prompt_ids: Array, *, samples: Sequence[int], sampling: Sampling, key: SampleKey, after: Array = NO_TOKENS
    ) -> AsyncGenerator[Response, None]:
        """See `RolloutEngine.generate`; also a `ValueError` for an empty prompt, an unknown token, impossible sampling, or stop
        strings without a tokenizer."""
        return self._generate(self._request(prompt_ids, samples, sampling, key, after))

    def _request(self, prompt_ids: Array, samples: Sequence[int], sampling: Sampling, key: SampleKey, after: Array) -> SlotRequest:
        """Request that `generate` is asked for, checked; nobody takes its responses yet."""
        prompt_ids, after = np.asarray(prompt_ids, np.int64), np.asarray(after, np.int64)
        check_request(prompt_ids, sampling, after, vocab_size=self._vocab_size, max_context=self.max_context)
        if sampling.stop:
            self._stop_strings.load()
        return SlotRequest(prompt_ids, sampling, deque(zip(samples, noise_keys(key, samples), strict=True)), after)

    async def _generate(
        self, request: SlotRequest, adapter: AbstractContextManager[int] = INSTALLED_WEIGHTS
    ) -> AsyncGenerator[Response, None]:
        """The responses to a request. `adapter`: context in which they are made, which gives the adapter's number."""
        arrived: asyncio.Queue[Response | Exception] = asyncio.Queue()
        remaining = len(request.pending)
        request.deliver = self._deliveries.to(asyncio.get_running_loop(), arrived.put_nowait, remaining)
        self._check_open()
        with adapter as request.adapter:
            self._inbox.put(partial(self._slots.submit, request))
            try:
                while remaining:
                    item = await arrived.get()
                    if isinstance(item, Exception):
                        raise RuntimeError(f"generation ended: {item}") from item
                    remaining -= 1
                    yield item
            finally:
                if remaining:
                    self._inbox.put(partial(self._slots.cancel, request))

    def _check_open(self) -> None:
        """Raises `RuntimeError` when the engine is closed: its thread does no call any more."""
        if self._is_closed:
            raise RuntimeError("the rollout engine is closed")

    async def install(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Happens between two decode steps, see `RolloutEngine.install`."""
        self._check_open()
        call = partial(self._slots.install, version, tensors, self._take_prepared(version))
        await asyncio.wrap_future(self._hand_in(call))

    def _take_prepared(self, version: int) -> list[Tensor] | None:
        """Tensors that were made of a version ahead of its install; None: there are none."""
        return None

    def timings(self) -> Sequence[Timing]:
        """See `RolloutEngine`."""
        return self._slots.take_timings()

    async def pause(self) -> None:
        """The step under way is finished first, see `RolloutEngine.pause`."""
        await self._set_paused(True)

    async def resume(self) -> None:
        await self._set_paused(False)

    async def _set_paused(self, is_paused: bool) -> None:
        self._check_open()
        await asyncio.wrap_future(self._hand_in(partial(setattr, self._slots, "is_paused", is_paused)))

    async def reset(self) -> None:
        """End all requests, and forget what is kept of earlier ones; the weights stay. A worker whose engine has this method stays
        for the next attempt of its run."""
        self._check_open()
        await asyncio.wrap_future(self._hand_in(partial(self._end_requests, "the rollout engine was reset")))
        await self.resume()

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            failed = self._hand_in(partial(self._end_requests, "the rollout engine is closed"))
            self._inbox.put(None)
            await asyncio.wrap_future(failed)

    def _end_requests(self, why: str) -> None:
        self._slots.fail(RuntimeError(why))
        self._deliveries.hand_over()  # before the caller hears of the end

    def _hand_in(self, call: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Have the thread run `call` between two steps, even if nobody awaits the future any more."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def settle() -> None:
            is_awaited = future.set_running_or_notify_cancel()
            try:
                result = call()
            except Exception as error:
                if is_awaited:
                    future.set_exception(error)
            else:
                if is_awaited:
                    future.set_result(result)

        self._inbox.put(settle)
        return future

    def _run(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # counts for the thread that sets it
        with torch.inference_mode():
            while True:
                while self._slots.is_paused or not self._slots.is_busy or not self._inbox.empty():
                    self._slots.end_timing()
                    self._deliveries.hand_over()
                    call = self._inbox.get()
                    if call is None:
                        return
                    call()
                    del call  # with what it holds: weights that were prepared
                try:
                    self._slots.step()
                except Exception as error:  # whatever it is, all that wait must hear of it
                    self._slots.fail(error)
                if self._slots.has_room or self._deliveries.are_due:
                    self._deliveries.hand_over()


def noise_keys(key: SampleKey, samples: Sequence[int]) -> Array:
    """Keys of the sampling noise of a prompt's samples: uint64 [n]."""
    return stream_keys(key.seed, key.prompt_index, np.array(samples, np.int64))
