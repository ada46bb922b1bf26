"""Samples on their way: prompts into the queue, responses into columns, leased groups into micro-batches.

| column | per | written by | what |
|---|---|---|---|
| prompt_ids | group | feed | int64, ragged |
| example | group | feed | the data set's row, JSON in UTF-8 |
| temperature | group | feed | float32, 0 is greedy |
| response_ids | row | rollout | int64, ragged, the end token included |
| rollout_logprobs | row | rollout | float32, ragged, of the distribution sampled from |
| loss_mask | row | rollout | uint8, ragged, 1 where the policy itself produced the token |
| version_spans | row | rollout | int64, ragged: (first token, policy version) pairs, flat |
| truncated | row | rollout | uint8, 1 where the length limit ended the response |
| reward | row | rollout | float32 |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from asyncflow.engines.base import MicroBatch, MicroBatchResult, Response
from asyncflow.rewards.base import Sample
from asyncflow.transfer_queue.client import Leased
from asyncflow.transfer_queue.schema import Schema, TaskSpec
from asyncflow.types import Array, Batch, Column, GroupMeta, Ragged, Values
from asyncflow.workflows.ledger import Consumed

COLUMNS = (
    Column("prompt_ids", "int64", ragged=True, per="group", counts_tokens=True),
    Column("example", "uint8", ragged=True, per="group"),
    Column("temperature", "float32", per="group"),
    Column("response_ids", "int64", ragged=True, counts_tokens=True),
    Column("rollout_logprobs", "float32", ragged=True),
    Column("loss_mask", "uint8", ragged=True),
    Column("version_spans", "int64", ragged=True),
    Column("truncated", "uint8"),
    Column("reward", "float32"),
)
PROMPT_COLUMNS = ("prompt_ids", "example", "temperature")
RESPONSE_COLUMNS = ("response_ids", "rollout_logprobs", "loss_mask", "version_spans", "truncated", "reward")
EVALUATION_GROUPS = 1 << 40  # evaluation prompts are numbered from here, so that they shift no training prompt's noise


def schema(group_bits: int, lease_seconds: float, max_failures: int) -> Schema:
    """The queue's columns and tasks: rollout makes responses, train and eval read whole groups of them."""
    tasks = (
        TaskSpec("rollout", PROMPT_COLUMNS, RESPONSE_COLUMNS, whole_groups=False),
        TaskSpec("train", ("prompt_ids", *RESPONSE_COLUMNS), purpose="train", sampler="whole_groups"),
        TaskSpec("eval", RESPONSE_COLUMNS, purpose="eval", sampler="whole_groups"),
    )
    timed = (msgspec.structs.replace(task, lease_seconds=lease_seconds, max_failures=max_failures) for task in tasks)
    return Schema(COLUMNS, tuple(timed), group_bits)


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

    @property
    def row_bytes(self) -> int:
        """Bytes that a row's response columns take at most: ids, log-probs and mask per token; spans and scalars."""
        return self.max_new_tokens * (8 + 4 + 1) + 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a data set: its token ids (int64) and the data set's row."""

    ids: Array
    example: Mapping[str, Any]


def admission(metas: Sequence[GroupMeta], prompts: Sequence[Prompt], temperatures: Sequence[float]) -> Batch:
    """The group columns that prompts enter the queue with."""
    examples = [np.frombuffer(msgspec.json.encode(p.example), np.uint8) for p in prompts]
    columns: dict[str, Values] = {
        "prompt_ids": Ragged.from_arrays([p.ids for p in prompts], "int64"),
        "example": Ragged.from_arrays(examples, "uint8"),
        "temperature": np.asarray(temperatures, np.float32),
    }
    return Batch(np.empty(0, np.int64), np.array([m.group for m in metas], np.int64), columns)


@dataclass(frozen=True, slots=True)
class Request:
    """One leased group, ready to be generated."""

    meta: GroupMeta
    rows: list[int]
    prompt_ids: Array
    example: Mapping[str, Any]
    temperature: float


def requests(leased: Leased) -> Iterator[Request]:
    """The groups of a rollout lease."""
    batch = leased.batch
    position = {group: i for i, group in enumerate(batch.groups.tolist())}
    for meta, rows in zip(leased.lease.groups, leased.lease.rows, strict=True):
        i = position[meta.group]
        example = msgspec.json.decode(batch.ragged("example")[i].tobytes())
        yield Request(meta, rows, batch.ragged("prompt_ids")[i], example, float(batch.dense("temperature")[i]))


def outputs(row: int, group: int, response: Response, reward: float) -> Batch:
    """The columns that a scored response completes its row with."""
    columns: dict[str, Values] = {
        "response_ids": Ragged.from_arrays([response.token_ids], "int64"),
        "rollout_logprobs": Ragged.from_arrays([response.logprobs], "float32"),
        "loss_mask": Ragged.from_arrays([np.ones(len(response.token_ids), np.uint8)], "uint8"),
        "version_spans": Ragged.from_arrays([response.version_spans.reshape(-1)], "int64"),
        "truncated": np.array([response.finish_reason == "length"], np.uint8),
        "reward": np.array([reward], np.float32),
    }
    return Batch(np.array([row], np.int64), np.array([group], np.int64), columns)


def kept_sample(request: Request, row: int, sample: Sample, response: Response, reward: float) -> dict[str, Any]:
    """A line of `samples.jsonl`."""
    return {
        "step": request.meta.step,
        "purpose": request.meta.purpose,
        "row": row,
        "prompt": sample.prompt,
        "response": sample.response,
        "reward": reward,
        "finish_reason": response.finish_reason,
    }


def check_interval(leased: Leased) -> None:
    """The law once more, at consumption: every token's version lies in its group's interval. Raises `ValueError` naming the row."""
    spans = leased.batch.ragged("version_spans")
    for meta, rows in zip(leased.lease.groups, leased.lease.rows, strict=True):
        for row in rows:
            versions = spans[leased.batch.indices.tolist().index(row)][1::2]
            if not all(version in meta.interval for version in versions.tolist()):
                raise ValueError(f"row {row} of step {meta.step} was generated by version {versions}, outside {meta.interval}")


def micro_batches(batch: Batch, advantages: Array, rows_each: int) -> Iterator[MicroBatch]:
    """A leased group in pieces of `rows_each` rows: a function of which rows there are, in the order of their samples."""
    for first in range(0, len(batch), rows_each):
        positions = range(first, min(first + rows_each, len(batch)))
        yield MicroBatch(
            indices=batch.indices[first : first + rows_each],
            prompt_ids=batch.ragged("prompt_ids")[0],
            response_ids=batch.ragged("response_ids").take(positions),
            loss_mask=batch.ragged("loss_mask").take(positions),
            rollout_logprobs=batch.ragged("rollout_logprobs").take(positions),
            advantages=advantages[first : first + rows_each],
        )


def consumed(meta: GroupMeta, batch: Batch, pieces: Sequence[MicroBatch], results: Sequence[MicroBatchResult]) -> Consumed:
    """What the ledger is told of a trained group."""
    spans = batch.ragged("version_spans")
    metrics: dict[str, float] = {}
    for result in results:
        for name, total in result.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + total
    return Consumed(
        rows=batch.indices.tolist(),
        prompt_length=len(batch.ragged("prompt_ids")[0]),
        rewards=batch.dense("reward"),
        response_lengths=batch.ragged("response_ids").lengths,
        truncated=batch.dense("truncated"),
        staleness=np.array([meta.step - spans[i][1::2].min() for i in range(len(batch))], np.int64),
        loss_sum=sum(r.loss_sum for r in results),
        loss_tokens=sum(r.loss_tokens for r in results),
        logical_tokens=sum(piece.logical_tokens for piece in pieces),
        physical_tokens=sum(r.physical_tokens for r in results),
        metrics=metrics,
        is_finite=all(r.is_finite for r in results),
    )
