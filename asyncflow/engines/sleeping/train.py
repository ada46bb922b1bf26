"""Train engines that sleep, of a policy and of a critic, and their passes, of which helpers take some."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from asyncflow.attestation import Attestation
from asyncflow.engines.base import Hyperparameters, MicroBatch, MicroBatchResult, OptimResult
from asyncflow.engines.cores import CRITIC, TRAIN, Cores
from asyncflow.engines.costs import Costs
from asyncflow.engines.cuts import cut_evenly
from asyncflow.types import Array, HeldWeights, Objective, Ragged, ValueObjective, WeightSource

if TYPE_CHECKING:
    from torch import Tensor

_STATE_FILE: Final = "updates.txt"


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
            (folder / _STATE_FILE).write_text(str(self.updates))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async def load_state(self, folder: Path) -> None:
        """See `TrainEngine`."""
        self.updates = int((folder / _STATE_FILE).read_text())

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
