"""The tasks between rollout and training, one shape for all: lease a group, work on it, add columns.

consumes: groups that have the columns which the task reads
waits for: such groups; with a schedule of one task at a time, the end of the task before it on the whole step
is unblocked by: the task before it
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from asyncflow.engines.base import LogProbEngine
from asyncflow.rewards.base import RewardFailure, Sample
from asyncflow.telemetry.spans import Recorder
from asyncflow.transfer_queue.client import Leased, TransferQueueClient
from asyncflow.types import Array, Batch, GroupMeta
from asyncflow.workflows.ledger import LedgerService
from asyncflow.workflows.samples import Shape, kept_sample, pieces, reference_outputs, reward_outputs, samples_of

Work = Callable[[Leased], Awaitable[tuple[Batch | None, Mapping[int, str]]]]
"""What a task does to a group: the columns that it adds, and why rows have failed, by row."""


async def serve(task: str, queue: TransferQueueClient, ledger: LedgerService, work: Work, spans: Recorder) -> None:
    """Until the task is closed or the run is stopping."""
    while True:
        spans.waiting("rows")
        leased = await queue.lease(task)
        if leased is None:
            return
        meta = leased.lease.groups[0]
        spans.waiting("batch")
        if meta.purpose == "train" and not await ledger.may_start(task, meta.step):
            return
        tokens = len(leased.batch.ragged("response_ids").values)
        with spans.busy(task, step=meta.step, group=meta.group, rows=len(leased.batch), tokens=tokens):
            outputs, failures = await work(leased)
        if outputs is not None:
            await queue.complete(leased.lease, outputs)
        for row, error in failures.items():
            await queue.fail(leased.lease, [row], error)


def refer(engine: LogProbEngine, shape: Shape) -> Work:
    """Adds the reference's log-probs, computed in the pieces that training will use, so that the bits are those of `fused`."""

    async def work(leased: Leased) -> tuple[Batch, Mapping[int, str]]:
        prompt_ids, response_ids = leased.batch.ragged("prompt_ids")[0], leased.batch.ragged("response_ids")
        cut = pieces(len(leased.batch), shape.rows_per_micro_batch)
        log_probs = [await engine.log_probs(prompt_ids, response_ids.take(piece)) for piece in cut]
        return reference_outputs(leased.batch, log_probs), {}

    return work


def reward(
    score: Callable[[Sample], Awaitable[float]],
    decode: Callable[[Array], str],
    keep_sample: Callable[[Mapping[str, Any]], None],
    shape: Shape,
) -> Work:
    """Adds rewards, the rows of a group scored side by side."""

    async def work(leased: Leased) -> tuple[Batch | None, Mapping[int, str]]:
        rewards: dict[int, float] = {}
        failures: dict[int, str] = {}

        async def score_row(meta: GroupMeta, row: int, sample: Sample) -> None:
            try:
                rewards[row] = await score(sample)
            except RewardFailure as failure:  # it fails its row; it does not become a 0
                failures[row] = str(failure)
            else:
                keep_sample(kept_sample(meta, row, sample, rewards[row]))

        async with asyncio.TaskGroup() as rows:
            for each in samples_of(leased, decode):
                rows.create_task(score_row(*each))
        return (reward_outputs(rewards, shape.group_bits) if rewards else None), failures

    return work
