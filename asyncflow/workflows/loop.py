"""Algorithm 1 (PA, section 4): the feed, the producers and the consumer, side by side.

    feed      consumes: prompts               waits for: the schedule's leave     is unblocked by: commits
    rollout   consumes: admitted groups       waits for: groups, weights, slots   is unblocked by: feed, publish, responses
    train     consumes: complete groups       waits for: groups of its step       is unblocked by: rollout, the end of the step
    evaluate  consumes: complete eval groups  waits for: groups of its version    is unblocked by: rollout, the evaluation's end

The numbers at the right are the lines of the algorithm. Line 20, moving the policy into the old policy, is nothing here: with
staleness 0 and one update per step the old policy is the policy itself, detached.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from asyncflow.algorithms.base import Algorithm
from asyncflow.engines.base import OptimResult, Response, RolloutEngine, SampleKey, Sampling, TrainEngine
from asyncflow.rewards.base import RewardFailure, Sample
from asyncflow.telemetry.spans import Recorder
from asyncflow.transfer_queue.client import Leased, TransferQueueClient
from asyncflow.types import Array, GroupMeta
from asyncflow.weight_sync.base import WeightReceiver, WeightSender
from asyncflow.workflows.board import Board
from asyncflow.workflows.ledger import LedgerService, StepTotals, Update
from asyncflow.workflows.samples import (
    Prompt,
    Request,
    admission,
    check_interval,
    consumed,
    kept_sample,
    micro_batches,
    outputs,
    requests,
)
from asyncflow.workflows.schedule import Schedule
from asyncflow.workflows.signal import Signal


@dataclass(frozen=True, slots=True)
class Shape:
    """The run's fixed numbers: B prompts a step, G responses each, noise seed, and how much a worker may hold at once."""

    prompts_per_step: int
    group_size: int
    group_bits: int
    seed: int
    temperature: float
    max_new_tokens: int
    rows_per_micro_batch: int
    num_rollout_workers: int


class PromptSource(Protocol):
    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts of the run's order."""
        ...


class Evaluation(Protocol):
    """The held-out prompts and what becomes of their rewards."""

    def is_due(self, version: int) -> bool: ...
    def admission(self, version: int) -> tuple[list[GroupMeta], list[Prompt], list[float]]: ...
    def finished(self, version: int, rewards: Mapping[int, Array], truncated: Mapping[int, Array]) -> None: ...


async def feed(
    queue: TransferQueueClient,
    ledger: LedgerService,
    schedule: Schedule,
    source: PromptSource,
    evaluation: Evaluation,
    shape: Shape,
) -> None:
    """Prompts enter the queue as early as the schedule lets them."""
    for step in itertools.count():
        if evaluation.is_due(step):
            metas, prompts, temperatures = evaluation.admission(step)
            await ledger.open(metas)
            await queue.put(metas, admission(metas, prompts, temperatures))
        if not await ledger.may_admit(step):  # 2
            return
        size, interval = shape.prompts_per_step, schedule.interval(step)
        metas = [GroupMeta(step * size + i, shape.group_size, step, interval) for i in range(size)]
        await ledger.open(metas)
        await queue.put(metas, admission(metas, source.take(size), [shape.temperature] * size))  # 4


async def train(
    queue: TransferQueueClient,
    ledger: LedgerService,
    board: Board,
    engine: TrainEngine,
    algorithm: Algorithm,
    sender: WeightSender,
    shape: Shape,
    spans: Recorder,
) -> None:
    """The consumer: gradients add up group by group, in the order in which groups complete; one update per step."""
    for step in itertools.count():
        spans.waiting("batch")
        if not await ledger.may_train(step):
            return
        held: dict[int, Leased] = {}
        spans.waiting("rows")
        async for leased in queue.stream("train", step):  # 11-12: dequeue
            check_interval(leased)
            meta, batch = leased.lease.groups[0], leased.batch
            is_known, held[meta.group] = meta.group in held, leased
            if is_known:  # its lease had expired: it was delivered again, and its gradient is in the sum already
                continue
            advantages = algorithm.advantages(batch.dense("reward"))
            pieces = list(micro_batches(batch, advantages, shape.rows_per_micro_batch))
            work = {"group": meta.group, "rows": len(batch), "tokens": sum(piece.logical_tokens for piece in pieces)}
            with spans.busy("forward_backward", step=step, version=step, **work):
                results = [await engine.forward_backward(piece, algorithm.loss) for piece in pieces]  # 13-18: O += gradient
            await ledger.consume(step, consumed(meta, batch, pieces, results))
        totals = await ledger.totals(step)
        if totals is None:
            return
        with spans.busy("optim_step", step=step, version=step):
            update = await apply(engine, algorithm, totals)  # 21
        await ledger.commit(step, update)
        with spans.busy("publish", step=step, version=step + 1):
            manifest = await sender.publish(step + 1, await engine.export_weights())  # 3: the weights of the next step
            await board.publish(manifest)
        await queue.complete_marks([leased.lease for leased in held.values()])
        await queue.drop([row for leased in held.values() for row in leased.lease.indices])


async def apply(engine: TrainEngine, algorithm: Algorithm, totals: StepTotals) -> Update:
    """One optimiser step on the sums of a closed step; none when a row's loss was not finite, or when no row is left."""
    normaliser = totals.tokens if algorithm.normaliser == "tokens" else totals.sequences
    if totals.non_finite_rows or normaliser == 0:
        await engine.discard()
        result = OptimResult(grad_norm=float("nan"), learning_rate=0.0, skipped=True)
    else:
        result = await engine.optim_step(normaliser)
    return Update(result.grad_norm, result.learning_rate, normaliser, result.skipped)


async def evaluate(queue: TransferQueueClient, ledger: LedgerService, evaluation: Evaluation, version: int) -> None:
    """Read one evaluation's rows as their groups complete, then hand their rewards over, by group."""
    rewards: dict[int, Array] = {}
    truncated: dict[int, Array] = {}
    async for leased in queue.stream("eval", version):
        group = int(leased.batch.groups[0])
        rewards[group] = leased.batch.dense("reward")
        truncated[group] = leased.batch.dense("truncated")
        await queue.complete_marks([leased.lease])
        await queue.drop(leased.batch.indices)
        await ledger.consume_evaluation(version, leased.batch.indices.tolist())
    evaluation.finished(version, rewards, truncated)


class Rollout:
    """The producers (lines 5-10): one coroutine per group, as many as the engine and the worker's fair share have room for."""

    def __init__(
        self,
        queue: TransferQueueClient,
        board: Board,
        engine: RolloutEngine,
        receiver: WeightReceiver,
        score: Callable[[Sample], Awaitable[float]],
        decode: Callable[[Array], str],
        shape: Shape,
        spans: Recorder,
        keep_sample: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._queue, self._board, self._engine, self._receiver = queue, board, engine, receiver
        self._score, self._decode, self._shape, self._spans, self._keep_sample = score, decode, shape, spans, keep_sample
        self._share = -(-shape.prompts_per_step // shape.num_rollout_workers) * shape.group_size
        self._installed = 0
        self._is_installing = False
        self._has_served = False  # anything since the last installation
        self._generating = 0  # rows without a response yet
        self._scoring = 0
        self._changed = Signal()

    async def run(self) -> None:
        """Until the board says that the run is stopping; what is unfinished then is abandoned."""
        await self._board.installed(0)
        async with asyncio.TaskGroup() as tasks:
            taking = tasks.create_task(self._take_groups())
            await self._follow_weights()
            taking.cancel()

    async def _take_groups(self) -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                self._show_lane()
                await self._changed.until(lambda: not self._is_installing and self._room() > 0)
                version = self._installed
                leased = await self._queue.lease("rollout", groups=self._room(), installed=version)
                if leased is None:  # withdrawn for an installation, or closed
                    await self._changed.until(partial(self._has_moved_on, version))
                    continue
                for request in requests(leased):
                    self._generating += len(request.rows)
                    groups.create_task(self._generate(leased, request))

    def _has_moved_on(self, version: int) -> bool:
        return self._installed != version

    def _room(self) -> int:
        """How many more groups may be taken."""
        rows = min(self._share - self._generating, self._engine.free_slots)
        return rows // self._shape.group_size if self._generating else max(1, rows // self._shape.group_size)

    async def _generate(self, leased: Leased, request: Request) -> None:
        """One group: generate; score and complete each response as soon as it ends."""
        self._show_lane()
        shape, start = self._shape, self._spans.clock()
        samples = [row - (request.meta.group << shape.group_bits) for row in request.rows]
        sampling = Sampling(temperature=request.temperature, max_new_tokens=shape.max_new_tokens)
        key = SampleKey(shape.seed, request.meta.group)
        tokens = 0
        async with asyncio.TaskGroup() as scoring:
            async for response in self._engine.generate(request.prompt_ids, samples=samples, sampling=sampling, key=key):  # 6
                tokens += len(response.token_ids)
                self._spans.add(rows=1, tokens=len(response.token_ids))
                self._generating -= 1
                self._scoring += 1
                self._show_lane()
                self._changed.notify()
                row = (request.meta.group << shape.group_bits) | response.sample
                scoring.create_task(self._finish(leased, request, row, response))
        meta, work = request.meta, {"group": request.meta.group, "rows": len(samples), "tokens": tokens}
        self._spans.beside("generate_group", start, step=meta.step, version=self._installed, **work)

    async def _finish(self, leased: Leased, request: Request, row: int, response: Response) -> None:
        """Score one response and complete its row; a row that cannot be scored fails, it does not become a 0."""
        text = self._decode(response.token_ids)
        sample = Sample(self._decode(request.prompt_ids), text, request.example, response.finish_reason == "stop")
        try:
            reward = await self._score(sample)  # 7
        except RewardFailure as failure:
            await self._queue.fail(leased.lease, [row], str(failure))
        else:
            batch = outputs(row, request.meta.group, response, reward)
            is_stored = await self._queue.complete(leased.lease, batch)  # 8: enqueue
            if is_stored.all():
                self._keep_sample(kept_sample(request, row, sample, response, reward))
        finally:
            self._scoring -= 1
            self._has_served = True
            self._show_lane()

    async def _follow_weights(self) -> None:
        """Fetch every published version in the background and install it when the board grants it."""
        while (manifest := await self._board.newer_than(self._installed)) is not None:
            start = self._spans.clock()
            tensors = await self._receiver.fetch(manifest)
            self._spans.beside("fetch", start, version=manifest.version, bytes=manifest.num_bytes)
            if not await self._board.may_install(manifest.version):
                return
            self._is_installing = True
            await self._queue.withdraw("rollout")  # nothing is leased while weights are being changed
            with self._spans.busy("install", version=manifest.version, bytes=manifest.num_bytes):
                await self._engine.install(manifest.version, tensors)
            self._installed, self._is_installing, self._has_served = manifest.version, False, False
            await self._board.installed(manifest.version)
            self._changed.notify()

    def _show_lane(self) -> None:
        if self._is_installing:
            return
        if self._generating:
            self._spans.enter("generate", version=self._installed)
        elif self._scoring:
            self._spans.waiting("reward")
        else:
            self._spans.waiting("weights" if self._has_served else "prompts")
