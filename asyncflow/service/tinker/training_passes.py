"""Passes of all models of a server: as many at the same time as there is room for, and what waits for room in as few as can be.

    models' requests --micro-batches--> waiting --+--> a pass of one model, in its engine's thread
                                                  +--> a pass of several adapters (engines/train/mixed_passes.py)

consumes: micro-batches of models, of each one at a time
waits for: a pass that ends
is unblocked by: the engines' compute threads

On a CPU there is room for a pass on each `train.num_threads` cores: few models compute side by side, each in its own thread, which
is the fastest way. More of them than that would take turns on the cores, with short passes. So of those that wait each pass takes
its even part, up to the tokens of a micro-batch: the base's products are then made once for all of their rows. A device has room
for one pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from asyncflow.config import Config
from asyncflow.devices import CPU, kind_of
from asyncflow.engines.base import MicroBatch, MicroBatchResult, TrainEngine
from asyncflow.threads import num_cores
from asyncflow.types import Objective


@dataclass(slots=True, eq=False)
class _Asked:
    engine: TrainEngine
    micro_batch: MicroBatch
    objective: Objective
    result: asyncio.Future[MicroBatchResult]


class TrainingPasses:
    """Passes of the models of a server. `num_joined`: passes of several models so far."""

    def __init__(self, num_at_once: int, most_tokens: int) -> None:
        """`num_at_once`: passes that compute at the same time. `most_tokens`: of a pass of several models."""
        self.num_joined = 0
        self._room, self._most_tokens = num_at_once, most_tokens
        self._waiting: list[_Asked] = []
        self._under_way: set[asyncio.Task[None]] = set()

    async def forward_backward(self, engine: TrainEngine, micro_batch: MicroBatch, objective: Objective) -> MicroBatchResult:
        """See `TrainEngine.forward_backward`, of a micro-batch. An engine whose caller is cancelled is still used to the pass's
        end."""
        result: asyncio.Future[MicroBatchResult] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Asked(engine, micro_batch, objective, result))
        self._begin()
        return await result

    def _begin(self) -> None:
        """Begin as many passes as there is room for."""
        self._waiting = [one for one in self._waiting if not one.result.done()]  # without those that nobody waits for any more
        while self._waiting and len(self._under_way) < self._room:
            task = asyncio.create_task(self._compute(self._chosen()), name="training pass")
            self._under_way.add(task)
            task.add_done_callback(self._ended)

    def _chosen(self) -> Sequence[_Asked]:
        """The first that waits, and of the others, where there are more than passes that compute at the same time, its pass's even
        part: those of the same base for which it has tokens left."""
        from asyncflow.engines.train.mixed_passes import may_join  # heavy, and loaded by the first engine

        first, *others = self._waiting
        chosen, tokens = [first], _tokens(first)
        part = -(-len(self._waiting) // self._room)
        for other in others:
            own = _tokens(other)
            if len(chosen) < part and tokens + own <= self._most_tokens and may_join(first.engine, other.engine):
                chosen.append(other)
                tokens += own
        self._waiting = [one for one in self._waiting if one not in chosen]
        return chosen

    async def _compute(self, chosen: Sequence[_Asked]) -> None:
        from asyncflow.engines.train.mixed_passes import ShareOfPass, forward_backward

        made: Sequence[MicroBatchResult | BaseException]
        try:
            if len(chosen) == 1:
                made = await chosen[0].engine.forward_backward([chosen[0].micro_batch], chosen[0].objective)
            else:
                self.num_joined += 1
                made = await forward_backward([ShareOfPass(one.engine, one.micro_batch, one.objective) for one in chosen])
        except Exception as error:  # whatever it is, whoever waits must hear of it
            made = [error] * len(chosen)
        for one, result in zip(chosen, made, strict=True):
            if one.result.done():
                continue
            if isinstance(result, BaseException):
                one.result.set_exception(result)
            else:
                one.result.set_result(result)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            self._begin()


def passes_of(config: Config, most_tokens: int) -> TrainingPasses:
    """Passes of a server whose models train by this configuration."""
    cores = num_cores() // config.train.least_threads if kind_of(config.train.device) == CPU else 1
    return TrainingPasses(max(1, cores), most_tokens)


def _tokens(one: _Asked) -> int:
    return len(one.micro_batch.prompt_ids) + len(one.micro_batch.response_ids.values)
