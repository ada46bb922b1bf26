"""The tasks between rollout and training, one shape for all: lease a group, work on it, add columns.

consumes: groups that have the columns which the task reads
waits for: such groups; with a schedule of one task at a time, the end of the task before it on the whole step
is unblocked by: the task before it
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from asyncflow.engines.base import LogProbEngine
from asyncflow.loops.context import LoopContext, ResponseScoring
from asyncflow.loops.samples import REFERENCE_COLUMN, Shape, kept_sample, reward_outputs, samples_of, token_outputs
from asyncflow.loops.score_batching import why_failed
from asyncflow.loops.training_batches import pieces
from asyncflow.own_metrics import step_scored
from asyncflow.rewards.base import RewardFailure, Sample, Score
from asyncflow.telemetry.spans import SharedLane
from asyncflow.transfer_queue.client import Leased
from asyncflow.types import Batch, GroupMeta

TaskWork = Callable[[Leased], Awaitable[tuple[Batch | None, Mapping[int, Exception]]]]
"""Work of a task on a group: it returns the columns that it adds, and why rows have failed, by row."""


async def serve(task: str, context: LoopContext, work: TaskWork, *, at_once: int = 1) -> None:
    """Work on the task's leases until it is closed or the run is stopping; on `at_once` leases side by side."""
    free, lane, queue = asyncio.Semaphore(at_once), SharedLane(context.spans), context.queue

    async def work_on(leased: Leased) -> None:
        meta, rows, tokens = leased.lease.groups[0], len(leased.batch), len(leased.batch.ragged("response_ids").values)
        with lane.busy(task, step=meta.partition, group=meta.group, rows=rows, tokens=tokens):
            outputs, failures = await work(leased)
        if outputs is not None:
            await queue.complete(leased.lease, outputs)
        for row, failure in failures.items():
            error, is_final = why_failed(failure)
            await queue.fail(leased.lease, [row], error, is_final=is_final)
        free.release()

    async with asyncio.TaskGroup() as under_way:
        while True:
            await free.acquire()
            lane.waiting("rows")
            leased = await queue.lease(task)
            if leased is None:
                return
            meta = leased.lease.groups[0]
            lane.waiting("batch")
            if meta.topic == "train" and not await context.ledger.may_start(task, meta.partition):
                return
            under_way.create_task(work_on(leased))


def reference(engine: LogProbEngine, shape: Shape) -> TaskWork:
    """Adds the reference's log-probs, computed in the pieces that training will use, so that the bits are those of `fused`."""

    async def work(leased: Leased) -> tuple[Batch, Mapping[int, Exception]]:
        prompt_ids, response_ids = leased.batch.ragged("prompt_ids")[0], leased.batch.ragged("response_ids")
        cut = pieces(len(leased.batch), shape.rows_per_micro_batch)
        log_probs = [await engine.log_probs(prompt_ids, response_ids.take(piece)) for piece in cut]
        return token_outputs(leased.batch, REFERENCE_COLUMN, log_probs), {}

    return work


def reward(scoring: ResponseScoring, shape: Shape) -> TaskWork:
    """Adds rewards, the rows of a group scored side by side."""
    score = scoring.score
    assert score is not None, "this task scores"

    async def work(leased: Leased) -> tuple[Batch | None, Mapping[int, Exception]]:
        scores: dict[int, Score] = {}
        failures: dict[int, Exception] = {}

        async def score_row(meta: GroupMeta, row: int, sample: Sample) -> None:
            step_scored.set(meta.partition if meta.topic == "train" else None)
            try:
                scores[row] = await score(sample)
            except RewardFailure as failure:  # it fails its row; it does not become a 0
                failures[row] = failure
            else:
                scoring.keep_sample(kept_sample(meta, row, sample, scores[row]))

        async with asyncio.TaskGroup() as rows:
            for each in samples_of(leased, scoring.decode):
                rows.create_task(score_row(*each))
        return (reward_outputs(scores, shape.group_bits, has_parts=shape.has_reward_parts) if scores else None), failures

    return work
