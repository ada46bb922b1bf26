"""Which request, sample and tokens each slot of the embedded engine holds, and one step of all of them: the thread's half."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from asyncflow.engines.base import Response, Sampling, Timing
from asyncflow.engines.rollout.decoder import Decoder
from asyncflow.engines.rollout.sampling import Truncation, draw_tokens, uniforms
from asyncflow.engines.rollout.stop_strings import StopStrings
from asyncflow.types import Array

PREFILL_TOKENS = 256  # prompt tokens of one pass: enough for full speed, few enough to stay in the cache
TIMED_TOGETHER = 8  # decode steps: they are short and many; a number, since those of a time would be few where they are slow
MAX_TIMINGS = 10_000  # kept until they are taken


@dataclass(slots=True, eq=False)
class SlotRequest:
    """Samples of one prompt. `deliver` takes each response, or the error that ends the request."""

    prompt_ids: Array
    sampling: Sampling
    pending: deque[tuple[int, np.uint64]]  # sample number, noise key: not in a slot yet
    deliver: Callable[[Response | Exception], None]
    first_logits_V: Tensor | None = None  # after the prompt, under the weights of its last prefill


class Slots:
    """The thread's half: which request, sample and tokens each slot holds. Slots 0 .. num_active - 1 are active."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_slots: int,
        max_context: int,
        stop_ids: Iterable[int],
        version: int,
        stop_strings: StopStrings,
        recomputes: bool = False,
    ) -> None:
        self.version, self._recomputes = version, recomputes
        self.is_paused = False
        self._decoder, self._num_slots, self._stop_strings = decoder, num_slots, stop_strings
        self._is_stop = np.zeros(decoder.config.vocab_size, bool)
        self._is_stop[[token for token in stop_ids if token < len(self._is_stop)]] = True
        self._waiting: deque[SlotRequest] = deque()
        self._num_active = 0
        self._requests: list[SlotRequest] = []  # of the active slots; the arrays below have an entry for every slot
        self._spans: list[list[tuple[int, int]]] = []
        self._samples = np.zeros(num_slots, np.int64)
        self._keys = np.zeros(num_slots, np.uint64)
        self._temperatures = np.zeros(num_slots, np.float32)
        self._top_ps = np.ones(num_slots, np.float32)
        self._top_ks = np.zeros(num_slots, np.int64)
        self._min_ps = np.zeros(num_slots, np.float32)
        self._prompt_lengths = np.zeros(num_slots, np.int64)
        self._counts = np.zeros(num_slots, np.int64)  # response tokens so far
        self._limits = np.zeros(num_slots, np.int64)
        self._is_current = np.zeros(num_slots, bool)  # the prompt's keys are those of the installed weights
        self._tokens = np.zeros((num_slots, max_context), np.int64)
        self._logprobs = np.zeros((num_slots, max_context), np.float32)
        self._timings: deque[Timing] = deque(maxlen=MAX_TIMINGS)
        self._steps: Timing | None = None  # decode steps that are timed together, so far
        self._arrays = (
            *(self._samples, self._keys, self._temperatures, self._prompt_lengths, self._counts, self._limits),
            *(self._top_ps, self._top_ks, self._min_ps),
            *(self._is_current, self._tokens, self._logprobs),
        )

    @property
    def is_busy(self) -> bool:
        """Whether anything is generated or waits."""
        return bool(self._num_active or self._waiting)

    @property
    def has_room(self) -> bool:
        """A slot stands empty for want of a sample."""
        return self._num_active < self._num_slots and not self._waiting

    def submit(self, request: SlotRequest) -> None:
        """Add a request, which waits for free slots."""
        self._waiting.append(request)

    def cancel(self, request: SlotRequest) -> None:
        """Free the slots of `request` and forget its waiting samples."""
        if request in self._waiting:
            self._waiting.remove(request)
        for slot in reversed(range(self._num_active)):
            if self._requests[slot] is request:
                self._free(slot)

    def fail(self, error: Exception) -> None:
        """Free every slot, clearing keys that may not be finite; every request ends with `error`."""
        self._decoder.cache.tensor.zero_()
        requests = dict.fromkeys([*self._requests, *self._waiting])
        self._num_active = 0
        self._requests.clear()
        self._spans.clear()
        self._waiting.clear()
        for request in requests:
            request.deliver(error)

    def install(self, version: int, tensors: Mapping[str, Tensor], prepared: Sequence[Tensor] | None) -> None:
        """New weights for the tokens from now on; `ValueError`, changing nothing, when they are not the model's."""
        self._decoder.install(tensors, prepared)
        self.version = version
        self._is_current[:] = False
        for slot, spans in enumerate(self._spans):
            count = int(self._counts[slot])
            if spans[-1][0] == count:  # two installs without a token between them
                spans.pop()
            spans.append((count, version))
        if self._recomputes:
            self._compute_keys_again()

    def _compute_keys_again(self) -> None:
        """Keys and values of every response under way, by the weights installed now, some `PREFILL_TOKENS` at a time."""
        pending: list[int] = []
        for slot in range(self._num_active):
            pending.append(slot)
            num_tokens = int((self._prompt_lengths[pending] + self._counts[pending]).sum())
            if num_tokens >= PREFILL_TOKENS or slot == self._num_active - 1:
                # The last token's own are computed when it is decoded.
                rows = [[*self._requests[s].prompt_ids, *self._tokens[s, : self._counts[s] - 1]] for s in pending]
                self._decoder.prefill([np.array(row, np.int64) for row in rows], [(s, 1) for s in pending])
                pending.clear()

    def step(self) -> None:
        """Fill the free slots, then one more token for every active one."""
        while self._waiting and self._num_active < self._num_slots:
            before, began = self._num_active, time.monotonic()
            if not (num_tokens := self._admit()):
                continue  # copied from other slots, which is not worth a timing of its own: the decode steps around it have it
            self.end_timing()
            self._timings.append(Timing("prefill", began, time.monotonic(), self._num_active - before, num_tokens))
        if self._num_active:
            began = time.monotonic()
            rows, num_tokens = self._num_active, int((self._prompt_lengths + self._counts)[: self._num_active].sum())
            active = np.arange(self._num_active)
            tokens = self._tokens[active, self._counts[active] - 1]
            positions = (self._prompt_lengths + self._counts)[active] - 1
            self._append(0, self._decoder.decode(tokens, positions))
            so_far = self._steps or Timing("decode_step", began, began, 0, 0, 0)
            sums = (so_far.rows + rows, so_far.tokens + num_tokens, so_far.calls + 1)
            self._steps = Timing("decode_step", so_far.start, time.monotonic(), *sums)
            if self._steps.calls == TIMED_TOGETHER:
                self.end_timing()

    def end_timing(self) -> None:
        """End the decode steps that are timed together: something else comes before the next one."""
        if self._steps is not None:
            self._timings.append(self._steps)
            self._steps = None

    def take_timings(self) -> list[Timing]:
        """Timings since the last call, in the order of time. May be called from any thread."""
        return [self._timings.popleft() for _ in range(len(self._timings))]

    def _admit(self) -> int:
        """Give slots to waiting samples, one prefill pass of prompts at most, and draw their first tokens.

        Returns the number of prompt tokens that the pass computed.
        """
        start, budget = self._num_active, PREFILL_TOKENS
        admitted: list[SlotRequest] = []  # one entry for each new slot
        fresh: list[tuple[SlotRequest, int, int]] = []
        while self._waiting and self._num_active < self._num_slots:
            request, first = self._waiting[0], self._num_active
            count = min(len(request.pending), self._num_slots - first)
            siblings = (slot for slot, other in enumerate(self._requests) if other is request and self._is_current[slot])
            if (sibling := next(siblings, None)) is not None:
                self._decoder.cache.copy(sibling, first, count, len(request.prompt_ids))
            elif fresh and budget < len(request.prompt_ids):
                break
            else:
                fresh.append((request, first, count))
                budget -= len(request.prompt_ids)
            self._occupy(request, count)
            admitted += [request] * count
            if not request.pending:
                self._waiting.popleft()
        if fresh:
            logits_PV = self._decoder.prefill([r.prompt_ids for r, _, _ in fresh], [(first, count) for _, first, count in fresh])
            for (request, _, _), logits_V in zip(fresh, logits_PV, strict=True):
                request.first_logits_V = logits_V
        self._append(start, torch.stack([r.first_logits_V for r in admitted if r.first_logits_V is not None]))
        return PREFILL_TOKENS - budget

    def _occupy(self, request: SlotRequest, count: int) -> None:
        """The next `count` slots hold the next pending samples of `request`, without tokens so far."""
        slots = slice(self._num_active, self._num_active + count)
        samples, keys = zip(*(request.pending.popleft() for _ in range(count)), strict=True)
        self._samples[slots], self._keys[slots] = samples, keys
        sampling = request.sampling
        self._temperatures[slots] = sampling.temperature
        left = (sampling.top_p, sampling.top_k, sampling.min_p) if sampling.is_truncated else (1.0, 0, 0.0)
        self._top_ps[slots], self._top_ks[slots], self._min_ps[slots] = left
        self._prompt_lengths[slots] = len(request.prompt_ids)
        self._counts[slots] = 0
        self._limits[slots] = sampling.max_new_tokens
        self._is_current[slots] = True
        self._requests += [request] * count
        self._spans += [[(0, self.version)] for _ in range(count)]
        self._num_active += count

    def _append(self, first: int, logits_NV: Tensor) -> None:
        """Draw a token for the slots from `first` on, and deliver and free those that end with it."""
        slots = slice(first, first + len(logits_NV))
        counts = self._counts[slots]
        left = Truncation(self._top_ps[slots], self._top_ks[slots], self._min_ps[slots])
        noise = uniforms(self._keys[slots], counts)
        tokens, logprobs = draw_tokens(logits_NV, self._temperatures[slots], noise, None if left.is_none else left)
        if not np.isfinite(logprobs).all():
            raise RuntimeError("the model's logits are not finite: the installed weights are broken")
        rows = np.arange(slots.start, slots.stop)
        self._tokens[rows, counts], self._logprobs[rows, counts] = tokens, logprobs
        self._counts[slots] += 1
        is_stopped = self._is_stop[tokens]
        for row, slot in enumerate(rows.tolist()):
            if (own := self._requests[slot].sampling.stop_ids) is not None:
                is_stopped[row] = tokens[row] in own
            if (stop := self._requests[slot].sampling.stop) and not is_stopped[row]:
                is_stopped[row] = self._stop_strings.are_completed(self._tokens[slot, : self._counts[slot]], stop)
        for row in np.flatnonzero(is_stopped | (self._counts[slots] == self._limits[slots]))[::-1]:
            self._finish(first + int(row), "stop" if is_stopped[row] else "length")

    def _finish(self, slot: int, reason: Literal["stop", "length"]) -> None:
        count = self._counts[slot]
        response = Response(
            sample=int(self._samples[slot]),
            token_ids=self._tokens[slot, :count].copy(),
            logprobs=self._logprobs[slot, :count].copy(),
            version_spans=np.array([span for span in self._spans[slot] if span[0] < count], np.int64),
            finish_reason=reason,
        )
        request = self._requests[slot]
        self._free(slot)
        request.deliver(response)

    def _free(self, slot: int) -> None:
        """Move the last active slot into the place of `slot`."""
        last = self._num_active = self._num_active - 1
        if slot != last:
            self._decoder.cache.copy(last, slot, 1, int(self._prompt_lengths[last] + self._counts[last]))
            for array in self._arrays:
                array[slot] = array[last]
            self._requests[slot], self._spans[slot] = self._requests[last], self._spans[last]
        self._requests.pop()
        self._spans.pop()
