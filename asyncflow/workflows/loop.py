"""Algorithm 1 (PA, section 4): the feed, the producers and the consumer, side by side. The numbers are the algorithm's lines.

    feed      consumes: prompts            waits for: the schedule's leave       is unblocked by: commits
    produce   consumes: an admitted group  waits for: slots, rewards             is unblocked by: the engine, the reward processes
    train     consumes: complete groups    waits for: groups of its step         is unblocked by: producers, the end of the step

One `produce` runs for every group that a rollout worker has taken (rollout.py says when it takes one); what `train` takes is
made ready in turns.py. Line 20, moving the policy into the old policy, is the engine's, before its update; with staleness 0 and one
update per step it is nothing, since the old policy is the policy itself, detached.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from asyncflow.algorithms.base import Algorithm
from asyncflow.engines.base import OptimResult, Response, RolloutEngine, SampleKey, Sampling, TrainEngine
from asyncflow.rewards.base import RewardFailure, Sample
from asyncflow.telemetry.fingerprints import FingerprintLog
from asyncflow.telemetry.spans import Recorder
from asyncflow.transfer_queue.client import Leased, TransferQueueClient
from asyncflow.types import Array, GroupMeta, WeightSource, row_index
from asyncflow.weight_sync.base import WeightSender
from asyncflow.workflows.admissions import Admissions
from asyncflow.workflows.board import Board
from asyncflow.workflows.ledger import LedgerService, StepTotals, Update
from asyncflow.workflows.samples import (
    Prompt,
    Request,
    ScoredRow,
    Shape,
    UnusableResponse,
    admission,
    check_response,
    kept_sample,
    outputs,
)
from asyncflow.workflows.schedule import Schedule
from asyncflow.workflows.scored import ScoredRows
from asyncflow.workflows.turns import Turns


class EvaluationPlan(Protocol):
    def is_due(self, version: int) -> bool:
        """Whether this version is evaluated, and has not been yet."""
        ...

    def admission(self, version: int) -> tuple[list[GroupMeta], list[Prompt], list[float]]:
        """The evaluation's groups, their prompts and temperatures."""
        ...


@dataclass(frozen=True, slots=True)
class Producer:
    """What producing a group takes. `on_response` is told of every response, `keep_sample` of every one that is stored.

    Without `score`, a task of its own does that.
    """

    queue: TransferQueueClient
    engine: RolloutEngine
    score: Callable[[Sample], Awaitable[float]] | None
    decode: Callable[[Array], str]
    shape: Shape
    on_response: Callable[[Response], None]
    on_scored: Callable[[], None]
    keep_sample: Callable[[Mapping[str, Any]], None]


class Keeper(Protocol):
    """Keeps what a run can go on from."""

    async def committed(self, version: int) -> None:
        """So many steps are committed and their weights published; the engine is between two steps."""
        ...


async def feed(
    queue: TransferQueueClient,
    ledger: LedgerService,
    schedule: Schedule,
    admissions: Admissions,
    evaluation: EvaluationPlan,
    shape: Shape,
) -> None:
    """Prompts enter the queue as early as the schedule lets them. A run that is gone on with ends its evaluations first."""
    for step in itertools.count(max(0, admissions.first - schedule.max_staleness)):  # 2
        if evaluation.is_due(step):
            metas, prompts, temperatures = evaluation.admission(step)
            await ledger.open(metas)
            await queue.put(metas, admission(metas, prompts, temperatures), row_bytes=shape.row_bytes)
        if step < admissions.first:
            continue
        if not await ledger.may_admit(step):
            return
        metas, batch = admissions.step(step)  # 4: take B prompts
        await ledger.open(metas)
        ledger.begun(admissions.begun(batch))
        await queue.put(metas, batch, row_bytes=shape.row_bytes)


async def produce(by: Producer, leased: Leased, request: Request, on_generated: Callable[[], None]) -> None:
    """One group: generate, score each response as soon as it ends, and enqueue what is scored."""
    samples = [row - row_index(request.meta.group, 0, by.shape.group_bits) for row in request.rows]
    sampling = Sampling(temperature=request.temperature, max_new_tokens=by.shape.max_new_tokens)
    key, prompt = SampleKey(by.shape.seed, request.meta.group), by.decode(request.prompt_ids)
    scored = ScoredRows(len(samples))
    async with asyncio.TaskGroup() as scoring:
        async for response in by.engine.generate(request.prompt_ids, samples=samples, sampling=sampling, key=key):  # 6
            by.on_response(response)
            scoring.create_task(_score_and_enqueue(by, leased, request, prompt, response, scored))
        on_generated()


async def _score_and_enqueue(
    by: Producer, leased: Leased, request: Request, prompt: str, response: Response, scored: ScoredRows
) -> None:
    row = row_index(request.meta.group, response.sample, by.shape.group_bits)
    sample = Sample(prompt, by.decode(response.token_ids), request.example, response.finish_reason == "stop")
    try:
        check_response(response)
        reward = None if by.score is None else await by.score(sample)  # 7
    except (UnusableResponse, RewardFailure) as failure:  # it fails its row; it does not become a 0
        scored.failed()
        await by.queue.fail(leased.lease, [row], str(failure))
    else:
        rows = await scored.to_store(ScoredRow(row, response, sample, reward))
        if rows:
            is_stored = await by.queue.complete(leased.lease, outputs(request.meta.group, rows))  # 8: enqueue
            for one in itertools.compress(rows, is_stored):
                if one.reward is not None:
                    by.keep_sample(kept_sample(request.meta, one.row, one.sample, one.reward))
    finally:
        by.on_scored()


async def train(
    queue: TransferQueueClient,
    ledger: LedgerService,
    board: Board,
    schedule: Schedule,
    engine: TrainEngine,
    algorithm: Algorithm,
    sender: WeightSender | None,
    shape: Shape,
    spans: Recorder,
    fingerprints: FingerprintLog,
    keeper: Keeper,
    first: int = 0,
) -> int:
    """The consumer: gradients add up group by group, in the order in which groups complete; one update per step.

    Each data-parallel group runs this loop, from step `first` on. All call their engines alike; the first one, which has the
    `sender`, commits. Returns the version of the weights: how many steps are committed.
    """
    rank = engine.data_parallel_rank or 0
    put_aside: dict[int, Leased] = {}
    for step in itertools.count(first):
        spans.waiting("batch")
        may_start = await ledger.may_start("train", step)
        await engine.begin_step()
        if not may_start:
            return step
        spans.waiting("rows")
        async with Turns(queue, ledger, schedule, algorithm, shape, rank, step, put_aside) as turns:
            async for turn in turns:  # 11-12: dequeue
                with turn.computing(spans, step):
                    results = await engine.forward_backward(turn.micro_batches, algorithm)  # 13-18: O += gradient
                turns.trained(turn, results, fingerprints)
        totals = await ledger.totals(step)
        if totals is None:
            return step
        with spans.busy("optim_step", step=step, version=step):
            update = await apply(engine, algorithm, totals)  # 21
        await fingerprints.step(step, engine)
        if sender is not None:
            await ledger.commit(step, update)
        with spans.busy("publish", step=step, version=step + 1):
            await publish(step + 1, await engine.export_weights(), sender, board)  # 3: the weights of the next step
        await turns.commit()
        await keeper.committed(step + 1)
    raise AssertionError("steps do not end")


async def publish(version: int, weights: WeightSource, sender: WeightSender | None, board: Board) -> None:
    """Let every rollout worker have a version's weights. Of the leaders one has a `sender`; the others help to gather."""
    if sender is not None:
        await board.publish(await sender.publish(version, weights))
    else:
        async for _ in weights.tensors():
            pass


async def apply(engine: TrainEngine, algorithm: Algorithm, totals: StepTotals) -> Update:
    """One optimiser step on the sums of a closed step; none when a row's loss was not finite, or when no row is left."""
    normaliser = totals.tokens if algorithm.normaliser == "tokens" else totals.sequences
    if totals.non_finite_rows or normaliser == 0:
        await engine.discard()
        result = OptimResult(grad_norm=float("nan"), learning_rate=0.0, skipped=True)
    else:
        result = await engine.optim_step(normaliser)
    return Update(result.grad_norm, result.learning_rate, normaliser, result.skipped, result.fill_tokens)
