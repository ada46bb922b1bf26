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
| reward | row | rollout, or reward where `reward.place` is `task` | float32 |
| ref_logprobs | row | reference | float32, ragged; only where `train.reference` is `task` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asyncflow.engines.base import MicroBatch, MicroBatchResult, Response
from asyncflow.rewards.base import Sample
from asyncflow.transfer_queue.client import Leased
from asyncflow.transfer_queue.schema import Schema, TaskSpec
from asyncflow.types import Array, Batch, Column, GroupMeta, Interval, Ragged, Values, is_maximum
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
REFERENCE_COLUMN = Column("ref_logprobs", "float32", ragged=True)
RESPONSE_COLUMNS = ("response_ids", "rollout_logprobs", "loss_mask", "version_spans", "truncated", "reward")
EVALUATION_GROUPS = 1 << 40  # evaluation prompts are numbered from here, so that they shift no training prompt's noise


def schema(
    group_bits: int, lease_seconds: float, max_failures: int, *, has_reward_task: bool = False, has_reference_task: bool = False
) -> Schema:
    """The queue's columns and tasks: rollout makes responses and scores them, train and eval read whole groups of them.

    With `has_reward_task` it is another task that scores them, with `has_reference_task` one more adds the reference's log-probs.
    """
    made = tuple(name for name in RESPONSE_COLUMNS if name != "reward" or not has_reward_task)
    added = (REFERENCE_COLUMN,) if has_reference_task else ()
    names = tuple(column.name for column in added)
    tasks = [
        TaskSpec("rollout", PROMPT_COLUMNS, made, whole_groups=False),
        TaskSpec("train", ("prompt_ids", *RESPONSE_COLUMNS, *names), purpose="train", sampler="whole_groups"),
        TaskSpec("eval", RESPONSE_COLUMNS, purpose="eval", sampler="whole_groups"),
    ]
    if has_reward_task:
        reads = ("prompt_ids", "example", "response_ids", "truncated")
        tasks.append(TaskSpec("reward", reads, ("reward",), whole_groups=False))
    if has_reference_task:
        tasks.append(TaskSpec("reference", ("prompt_ids", "response_ids"), names, purpose="train", sampler="whole_groups"))
    timed = (msgspec.structs.replace(task, lease_seconds=lease_seconds, max_failures=max_failures) for task in tasks)
    return Schema((*COLUMNS, *added), tuple(timed), group_bits)


@dataclass(frozen=True, slots=True)
class Shape:
    """The run's fixed numbers: B prompts a step, G responses each, noise seed, and how much a worker takes at once."""

    prompts_per_step: int
    group_size: int
    group_bits: int
    seed: int
    temperature: float
    max_new_tokens: int
    rows_per_micro_batch: int
    groups_per_turn: int
    groups_ahead: int

    @property
    def row_bytes(self) -> int:
        """Bytes that a row's response columns take at most: ids, log-probs (two models') and mask per token; spans and scalars."""
        return self.max_new_tokens * (8 + 4 + 4 + 1) + 256


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


class UnusableResponse(Exception):
    """A response that cannot be trained on; the message says why."""


def check_response(response: Response) -> None:
    """What an engine must not return: no token at all, or a log-prob that is no number. Raises `UnusableResponse`."""
    if not len(response.token_ids):
        raise UnusableResponse("the response is empty")
    if not np.isfinite(response.logprobs).all():
        first = int(np.flatnonzero(~np.isfinite(response.logprobs))[0])
        raise UnusableResponse(f"the log-prob of token {first} of the response is {response.logprobs[first]}")


class ScoredRow(NamedTuple):
    """A response that can be stored; without a reward where another task scores."""

    row: int
    response: Response
    sample: Sample
    reward: float | None


def outputs(group: int, scored: Sequence[ScoredRow]) -> Batch:
    """The columns that responses of one group complete their rows with."""
    responses = [one.response for one in scored]
    columns: dict[str, Values] = {
        "response_ids": Ragged.from_arrays([response.token_ids for response in responses], "int64"),
        "rollout_logprobs": Ragged.from_arrays([response.logprobs for response in responses], "float32"),
        "loss_mask": Ragged.from_arrays([np.ones(len(response.token_ids), np.uint8) for response in responses], "uint8"),
        "version_spans": Ragged.from_arrays([response.version_spans.reshape(-1) for response in responses], "int64"),
        "truncated": np.array([response.finish_reason == "length" for response in responses], np.uint8),
    }
    rewards = [one.reward for one in scored if one.reward is not None]
    if rewards:
        columns["reward"] = np.array(rewards, np.float32)
    return Batch(np.array([one.row for one in scored], np.int64), np.array([group], np.int64), columns)


def kept_sample(meta: GroupMeta, row: int, sample: Sample, reward: float) -> dict[str, Any]:
    """A line of `samples.jsonl`."""
    return {
        "step": meta.step,
        "purpose": meta.purpose,
        "row": row,
        "prompt": sample.prompt,
        "response": sample.response,
        "reward": reward,
        "finish_reason": "stop" if sample.is_finished else "length",
    }


def check_interval(leased: Leased, step: int, max_staleness: int) -> None:
    """The law once more, at consumption: every token's version lies in its group's interval, and is not too old for this step.

    Raises `ValueError` naming the row.
    """
    spans, position = leased.batch.ragged("version_spans"), {row: i for i, row in enumerate(leased.batch.indices.tolist())}
    for meta, rows in zip(leased.lease.groups, leased.lease.rows, strict=True):
        allowed = Interval(max(meta.interval.low, step - max_staleness), min(meta.interval.high, step))
        for row in rows:
            versions = spans[position[row]][1::2].tolist()
            if not all(version in allowed for version in versions):
                raise ValueError(f"row {row}, trained in step {step}, was generated by versions {versions}, outside {allowed}")


def pieces(num_rows: int, rows_each: int) -> Iterator[range]:
    """A group's rows in pieces of `rows_each`: every task that computes on them cuts alike, in the order of their samples."""
    for first in range(0, num_rows, rows_each):
        yield range(first, min(first + rows_each, num_rows))


def micro_batches(step: int, batch: Batch, advantages: Array, rows_each: int) -> Iterator[MicroBatch]:
    """A leased group, trained in this step, in pieces: a function of which rows there are."""
    row_staleness, has_reference = staleness(step, batch), REFERENCE_COLUMN.name in batch.columns
    for piece in pieces(len(batch), rows_each):
        rows = slice(piece.start, piece.stop)
        yield MicroBatch(
            indices=batch.indices[rows],
            prompt_ids=batch.ragged("prompt_ids")[0],
            response_ids=batch.ragged("response_ids").take(piece),
            loss_mask=batch.ragged("loss_mask").take(piece),
            rollout_logprobs=batch.ragged("rollout_logprobs").take(piece),
            advantages=advantages[rows],
            staleness=row_staleness[rows],
            ref_logprobs=batch.ragged(REFERENCE_COLUMN.name).take(piece) if has_reference else None,
        )


def staleness(step: int, batch: Batch) -> Array:
    """Of each row (int64), in versions, counted from its oldest token."""
    spans = batch.ragged("version_spans")
    return np.array([step - spans[i][1::2].min() for i in range(len(batch))], np.int64)


def samples_of(leased: Leased, decode: Callable[[Array], str]) -> Iterator[tuple[GroupMeta, int, Sample]]:
    """The responses of a reward lease, as a scorer sees them: group, row, sample."""
    batch, position = leased.batch, 0
    for i, (meta, rows) in enumerate(zip(leased.lease.groups, leased.lease.rows, strict=True)):
        prompt, example = decode(batch.ragged("prompt_ids")[i]), msgspec.json.decode(batch.ragged("example")[i].tobytes())
        for row in rows:
            response, is_truncated = decode(batch.ragged("response_ids")[position]), batch.dense("truncated")[position]
            yield meta, row, Sample(prompt, response, example, not is_truncated)
            position += 1


def reward_outputs(rewards: Mapping[int, float], group_bits: int) -> Batch:
    """The column that scoring adds to rows."""
    indices = np.array(list(rewards), np.int64)
    groups = np.array(list(dict.fromkeys((indices >> group_bits).tolist())), np.int64)
    return Batch(indices, groups, {"reward": np.array(list(rewards.values()), np.float32)})


def reference_outputs(batch: Batch, log_probs: Sequence[Ragged]) -> Batch:
    """The column that the reference adds to a group: the pieces' log-probs, in order."""
    column = Ragged(np.concatenate([each.values for each in log_probs]), batch.ragged("response_ids").offsets)
    return Batch(batch.indices, batch.groups, {REFERENCE_COLUMN.name: column})


def consumed(step: int, batch: Batch, pieces: Sequence[MicroBatch], results: Sequence[MicroBatchResult]) -> Consumed:
    """What the ledger is told of a trained group."""
    spans = batch.ragged("version_spans")
    metrics: dict[str, float] = {}
    for result in results:
        for name, total in result.metrics.items():
            metrics[name] = max(metrics.get(name, total), total) if is_maximum(name) else metrics.get(name, 0.0) + total
    return Consumed(
        rows=batch.indices.tolist(),
        empty_rows=[row for row, mask in zip(batch.indices.tolist(), batch.ragged("loss_mask"), strict=True) if not mask.any()],
        prompt_length=len(batch.ragged("prompt_ids")[0]),
        rewards=batch.dense("reward"),
        response_lengths=batch.ragged("response_ids").lengths,
        truncated=batch.dense("truncated"),
        staleness=staleness(step, batch),
        num_spans=spans.lengths // 2,
        loss_sum=sum(r.loss_sum for r in results),
        loss_tokens=sum(r.loss_tokens for r in results),
        logical_tokens=sum(piece.logical_tokens for piece in pieces),
        physical_tokens=sum(r.physical_tokens for r in results),
        metrics=metrics,
        is_finite=all(r.is_finite for r in results),
    )
