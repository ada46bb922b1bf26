"""Engines without a model: they sleep as long as the work would take, on the event loop's clock.

    Costs    seconds of each piece of work, and how long responses are      (guessed, or measured: `planner/measured.py`)
    SleepingRolloutEngine     continuous batching: all active slots get a token at a time, as `costs.decode_step` says
    SleepingCritic            values, and their training, likewise
    SleepingTrainEngine       one call after another, as in a compute thread, and passes of a call in its helpers

consumes: what the real engines consume, and weights without tensors
waits for: the clock, and nothing else
is unblocked by: its timers; a call, when the present decode step has ended

Under a virtual clock (`cluster/clock.py`) a run takes as long as its bookkeeping; under a real one these engines show what the
loops themselves cost. A response's length and tokens depend on its key alone, so a lost response is made again exactly.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from asyncflow.attestation import Attestation
from asyncflow.engines.base import (
    NO_TOKENS,
    Hyperparameters,
    MicroBatch,
    MicroBatchResult,
    OptimResult,
    Response,
    SampleKey,
    Sampling,
    Timing,
)
from asyncflow.engines.cores import Cores
from asyncflow.engines.costs import Costs
from asyncflow.engines.cuts import cut_evenly
from asyncflow.types import Array, HeldWeights, Objective, Ragged, ValueObjective, WeightSource

if TYPE_CHECKING:
    from torch import Tensor

STATE_FILE = "updates.txt"
ROLLOUT, TRAIN, CRITIC, REFERENCE = "rollout", "train", "critic", "reference"
"""Pools, by which contention knows what computes."""
ROUNDING = 1e-9  # fraction of a decode step: a timer that fires at the step's end may be early by rounding


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
        steps = min(most, math.ceil(work.done() / step - ROUNDING) if step else most)
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


def _packed_tokens(micro_batch: MicroBatch) -> int:
    return len(micro_batch.prompt_ids) + len(micro_batch.response_ids.values)


class SleepingPasses:
    """Passes of a sleeping engine, and `Helpers` that take some of them: tasks of the event loop."""

    def __init__(self, tokens: int | None = None, num_helpers: int = 0, num_parts: int = 1) -> None:
        """`tokens`: of a pass, up to which it takes several micro-batches; None: each is computed by itself. `num_parts`: passes
        that a call has at least, if it has micro-batches for them, as in a pipeline."""
        self._allowed: frozenset[int] = frozenset()
        self.on_pass: Callable[[float, float], None] = lambda start, end: None
        self._tokens, self._num_helpers, self._num_parts = tokens, num_helpers, num_parts
        self._changed = asyncio.Event()

    def allow(self, numbers: Iterable[int]) -> None:
        """See `Helpers.allow`."""
        self._allowed = frozenset(numbers).intersection(range(self._num_helpers))
        self._changed.set()

    def cut(self, micro_batches: Sequence[MicroBatch]) -> list[int]:
        """Packed tokens of each pass over these micro-batches."""
        tokens = [_packed_tokens(each) for each in micro_batches]
        if self._tokens is None:
            return tokens
        return [sum(part) for part in cut_evenly(tokens, int, self._tokens, self._num_parts)]

    async def compute(
        self, passes: Sequence[int], own: Callable[[int], Awaitable[None]], other: Callable[[int], Awaitable[None]]
    ) -> None:
        """Compute passes of so many tokens, here by `own` and in the helpers by `other`; the one that is free takes the next
        pass."""
        left, clock = deque(passes), asyncio.get_running_loop().time

        async def help_out(helper: int) -> None:
            while left:
                if helper in self._allowed:
                    tokens, began = left.popleft(), clock()
                    await other(tokens)
                    self.on_pass(began, clock())
                else:
                    self._changed.clear()
                    await self._changed.wait()

        helping: list[asyncio.Task[None]] = []
        try:
            while left:
                working = own(left.popleft())  # the first one is always the engine's own
                helping = helping or [asyncio.create_task(help_out(n), name=f"helper {n}") for n in range(self._num_helpers)]
                await working
            self._changed.set()
            await asyncio.gather(*helping)
        finally:
            for task in helping:
                task.cancel()


class SleepingTrainEngine:
    """`TrainEngine` that sleeps: its only weight is the number of updates, its losses are 0 and its log-probs -1."""

    device = "cpu"

    def __init__(
        self,
        costs: Costs,
        *,
        learning_rate: float = 0.0,
        data_parallel_rank: int | None = 0,
        ranks: asyncio.Barrier | None = None,
        pool: str = TRAIN,
        cores: Cores | None = None,
        passes: SleepingPasses | None = None,
    ) -> None:
        """Make an engine that has had no update. `learning_rate` is only reported; nothing is learnt.

        `ranks`: where the data-parallel ranks meet in each round. `cores`: those it computes on, by the name `pool`; without them
        it has its own. `passes`: how it computes micro-batches; by default each by itself.
        """
        self.updates = 0
        self.data_parallel_rank = data_parallel_rank
        self._costs, self._learning_rate = costs, learning_rate
        self._ranks, self._passes = ranks, passes or SleepingPasses()
        self._pool, self._cores = pool, cores or Cores()
        self._thread = asyncio.Lock()  # one call at a time, as a compute thread takes them

    async def follow(self, objective: Objective, busy: Callable[[str], AbstractContextManager[object]]) -> None:
        """See `TrainEngine`. Returns at once: the leader's time stands for that of the whole group."""

    async def begin_step(self) -> None:
        """See `TrainEngine`."""

    async def forward_backward(
        self, micro_batches: Sequence[MicroBatch], objective: Objective | ValueObjective
    ) -> list[MicroBatchResult]:
        """See `TrainEngine`. Takes the time of computing the prompt once for all its responses; all losses are 0."""
        seconds = self._costs.forward_backward
        await self._passes.compute(
            self._passes.cut(micro_batches),
            lambda tokens: self.occupied(seconds(tokens)),
            lambda tokens: self._cores.compute(self._pool, seconds(tokens)),
        )
        if self._ranks is not None and self._costs.collectives_seconds:
            await self._ranks.wait()
            await self.occupied(self._costs.collectives_seconds)
        return [MicroBatchResult(0.0, int(each.loss_mask.values.sum()), _packed_tokens(each)) for each in micro_batches]

    async def set_hyperparameters(self, chosen: Hyperparameters) -> None:
        """See `TrainEngine`. The learning rate is only reported."""
        self._learning_rate = chosen.learning_rate

    async def optim_step(self, normaliser: int) -> OptimResult:
        """See `TrainEngine`."""
        await self.occupied(self._costs.optim_step_seconds)
        self.updates += 1
        return OptimResult(grad_norm=0.0, learning_rate=self._learning_rate)

    async def discard(self) -> None:
        """See `TrainEngine`."""

    async def log_probs(
        self,
        prompt_ids: Array,
        response_ids: Ragged,
        target_ids: Ragged | None = None,
        temperature: float | None = None,
        rounded_to: str | None = None,
    ) -> Ragged:
        """See `LogProbEngine`."""
        return await self.pass_over(prompt_ids, response_ids, self._costs.log_probs)

    async def pass_over(self, prompt_ids: Array, response_ids: Ragged, seconds: Callable[[int], float]) -> Ragged:
        """Sleep as long as a pass takes, by its number of tokens; its results are -1."""
        await self.occupied(seconds(len(prompt_ids) + len(response_ids.values)))
        return Ragged(np.full(len(response_ids.values), -1.0, np.float32), response_ids.offsets)

    async def export_weights(self) -> WeightSource:
        """Weights without tensors; a publication is simulated by its time alone."""
        return HeldWeights({})

    async def fingerprint(self) -> Mapping[str, str]:
        """See `TrainEngine`."""
        return {"weights/updates": hashlib.sha256(str(self.updates).encode()).hexdigest()}

    async def save(self, path: Path) -> None:
        """Make the folder `path`, without a model in it."""
        path.mkdir(parents=True, exist_ok=True)

    async def save_state(self, folder: Path) -> Awaitable[None]:
        """See `TrainEngine`. The state is one small file with the number of updates."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.data_parallel_rank == 0:
            (folder / STATE_FILE).write_text(str(self.updates))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async def load_state(self, folder: Path) -> None:
        """See `TrainEngine`."""
        self.updates = int((folder / STATE_FILE).read_text())

    async def close(self) -> None:
        """See `LogProbEngine`."""

    async def occupied(self, seconds: float) -> None:
        """Sleep so long, when the calls before this one have ended."""
        async with self._thread:
            await self._cores.compute(self._pool, seconds)


class SleepingCritic:
    """`CriticEngine` that sleeps: all values are 0."""

    def __init__(
        self,
        costs: Costs,
        *,
        learning_rate: float = 0.0,
        pool: str = CRITIC,
        cores: Cores | None = None,
        passes: SleepingPasses | None = None,
    ) -> None:
        """See `SleepingTrainEngine`."""
        self._costs = costs
        self._engine = SleepingTrainEngine(costs.of_critic(), learning_rate=learning_rate, pool=pool, cores=cores, passes=passes)
        self.begin_step, self.forward_backward = self._engine.begin_step, self._engine.forward_backward
        self.optim_step, self.discard = self._engine.optim_step, self._engine.discard
        self.fingerprint, self.save, self.close = self._engine.fingerprint, self._engine.save, self._engine.close
        self.save_state, self.load_state = self._engine.save_state, self._engine.load_state
        self.export_weights = self._engine.export_weights

    async def values(self, prompt_ids: Array, response_ids: Ragged) -> Ragged:
        """See `CriticEngine`."""
        passed = await self._engine.pass_over(prompt_ids, response_ids, self._costs.values)
        return Ragged(np.zeros_like(passed.values), passed.offsets)

    async def install(self, tensors: Mapping[str, Tensor]) -> None:
        """See `CriticEngine`."""
        await self._engine.occupied(self._costs.install())

    async def attest(self) -> Attestation:
        """See `CriticEngine`: it has no weights."""
        return Attestation(None)
