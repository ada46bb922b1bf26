"""Samples on their way: prompts into the queue, responses into columns, leased groups into micro-batches.

| column | per | written by | what |
|---|---|---|---|
| prompt_ids | group | feed | int64, ragged |
| example | group | feed | the data set's row, JSON in UTF-8 |
| temperature | group | feed | float32, 0 is greedy |
| response_ids | row | rollout, evaluate | int64, ragged, the end token included |
| rollout_logprobs | row | rollout, evaluate | float32, ragged, of the distribution sampled from |
| loss_mask | row | rollout, evaluate | uint8, ragged, 1 where the policy itself produced the token |
| version_spans | row | rollout, evaluate | int64, ragged: (first token, policy version) pairs, flat |
| truncated | row | rollout, evaluate | uint8, 1 where the length limit ended the response |
| turns | row | rollout, evaluate | int64, ragged, flat: first token, tokens, tools called, tools failed; with an environment |
| turn_rewards | row | rollout, evaluate | float32, ragged, the environment's, NaN: none; as the next two only with an environment |
| environment_seconds | row | rollout, evaluate | float32, spent in the environment |
| timed_out | row | rollout, evaluate | uint8, 1 where the environment's deadline ended the episode |
| branches | row | rollout, evaluate | int64, ragged, flat: further sequences of the row (branches.py), with an environment |
| reward | row | rollout, evaluate, or reward where `reward.place` is `task` | float32 |
| reward_parts | row | as reward | float32, ragged: what each scorer gave, NaN: nothing; only where the run asks for it |
| ref_logprobs | row | reference | float32, ragged; only where `train.reference` is `task` |
| member | row | select | uint8, 1: the row is trained in its step; only where steps choose their members |
| values | row | values | float32, ragged; only where the algorithm has a critic |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import xxhash

from asyncflow.control.ledger import Consumed, num_to_admit
from asyncflow.engines.base import MicroBatch, MicroBatchResult, Response, Sampling
from asyncflow.loops.branches import (
    BRANCHES,
    PER_TOKEN,
    branch_micro_batches,
    check_alone,
    first_sequences,
    has_branches,
)
from asyncflow.loops.transcript import Played, conversation
from asyncflow.own_metrics import MetricSums
from asyncflow.rewards.base import Sample, Score
from asyncflow.telemetry.metrics import EpisodeFigures, GroupFigures
from asyncflow.transfer_queue.client import Leased
from asyncflow.transfer_queue.schema import Schema, TaskSpec
from asyncflow.types import (
    MAX_CANDIDATES,
    Advantages,
    Array,
    Batch,
    Column,
    GroupMeta,
    Interval,
    Ragged,
    RunError,
    ScoredGroup,
    Values,
    is_maximum,
)

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
EPISODE_COLUMNS = (
    Column("turns", "int64", ragged=True),
    Column("turn_rewards", "float32", ragged=True),
    Column("environment_seconds", "float32"),
    Column("timed_out", "uint8"),
    Column(BRANCHES, "int64", ragged=True),
)
PARTS_COLUMN = Column("reward_parts", "float32", ragged=True)
REFERENCE_COLUMN = Column("ref_logprobs", "float32", ragged=True)
VALUES_COLUMN = Column("values", "float32", ragged=True)
MEMBER_COLUMN = Column("member", "uint8")
SELECT_TASK: Final = "select"
EVALUATE_TASK: Final = "evaluate"  # what rollout does, for evaluations alone
VALUES_TASK: Final = "values"
UPDATE_TASK: Final = "critic_update"
COLUMN_OF_TASK = {"reference": REFERENCE_COLUMN, VALUES_TASK: VALUES_COLUMN}
RESPONSE_COLUMNS = ("response_ids", "rollout_logprobs", "loss_mask", "version_spans", "truncated", "reward")
BEHIND_TRAINING: Final = 1 << 41
"""Priority of evaluations for which nobody waits."""
EVALUATION_GROUPS = 1 << 40  # evaluation prompts are numbered from here, so that they shift no training prompt's noise


def priority_of(interval: Interval, *, is_evaluation: bool = False) -> int:
    """Priority of a group in the queue: by the first version that may make it, and training before evaluation.

    So the evaluation of a version comes behind all training rows that this version may make, of whichever step, and before those
    that it may not.
    """
    return 2 * interval.low + is_evaluation


def schema(
    group_bits: int,
    lease_seconds: float,
    max_failures: int,
    before: Sequence[str] = ("rollout",),
    *,
    has_reward_parts: bool = False,
    has_evaluators: bool = False,
    has_episodes: bool = False,
) -> Schema:
    """The queue's columns and tasks: rollout makes responses and scores them, train and eval read whole groups of them.

    `before`: the tasks that a row passes before training. With `reward` it is this task that scores; `reference` adds the
    reference's log-probs; `values` adds a critic's values, and one more task trains on them beside the policy's training. `select`
    says which groups are trained, and the tasks behind it see only those. `has_episodes`: rows are episodes of several turns. With
    `has_evaluators` rollout sees training's groups alone, and another task those of evaluations.

    A model computes a group in pieces, so reference and values wait for rewards: a row without one leaves its group, and which rows
    they see, and training does after them, is not to depend on which task was there first.
    """
    parts = (PARTS_COLUMN,) if has_reward_parts else ()
    scored = ("reward", *(column.name for column in parts))
    of_episodes = EPISODE_COLUMNS if has_episodes else ()
    response = (*RESPONSE_COLUMNS, *(column.name for column in of_episodes))
    made = tuple(name for name in response if name != "reward") + (() if "reward" in before else scored)
    added = {task: column for task, column in COLUMN_OF_TASK.items() if task in before}
    chosen = (MEMBER_COLUMN,) if SELECT_TASK in before else ()
    columns = (*chosen, *added.values())
    trained = ("prompt_ids", *response, *scored[1:], *(column.name for column in (*added.values(), *chosen)))
    tasks = [
        TaskSpec("rollout", PROMPT_COLUMNS, made, whole_groups=False, topic="train" if has_evaluators else ""),
        TaskSpec("train", trained, topic="train", sampler="whole_groups"),
        TaskSpec("eval", (*response, *scored[1:]), topic="eval", sampler="whole_groups"),
    ]
    if has_evaluators:
        tasks.append(TaskSpec(EVALUATE_TASK, PROMPT_COLUMNS, made, whole_groups=False, topic="eval"))
    if "reward" in before:
        reads = ("prompt_ids", "example", "response_ids", "truncated", *(("turn_rewards",) if has_episodes else ()))
        tasks.append(TaskSpec("reward", reads, scored, whole_groups=False))
    if chosen:
        tasks.append(TaskSpec(SELECT_TASK, ("reward",), (MEMBER_COLUMN.name,), topic="train", sampler="whole_groups"))
    awaited = (MEMBER_COLUMN.name,) if chosen else ("reward",) if "reward" in before else ()
    for task, column in added.items():
        reads = ("prompt_ids", "response_ids", *awaited)
        tasks.append(TaskSpec(task, reads, (column.name,), topic="train", sampler="whole_groups"))
    if VALUES_TASK in before:
        tasks.append(TaskSpec(UPDATE_TASK, trained, topic="train", sampler="whole_groups"))
    timed = (msgspec.structs.replace(task, lease_seconds=lease_seconds, max_failures=max_failures) for task in tasks)
    return Schema((*COLUMNS, *of_episodes, *parts, *columns), tuple(timed), group_bits)


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
    epochs: int = 1
    mini_batches: int = 1
    has_reward_parts: bool = False
    skips_zero_advantages: bool = False
    max_candidates: int | None = None  # of a step, where it chooses its prompts among them
    oversampling: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    max_turns: int | None = None  # of an episode; None: there is no environment
    samples_per_step: int = 0

    def is_sampled(self, row: int) -> bool:
        """Whether a training row is of the few of a step that `samples.jsonl` keeps: all responses of the first prompt, and one of
        each of the next prompts."""
        is_of_first = (row >> self.group_bits) % self.numbers_per_step == 0
        return self.is_examined(row) or (is_of_first and self.samples_per_step > 0)

    def is_examined(self, row: int) -> bool:
        """Whether a training row is of the few of a step that `tokens.jsonl` tells of token by token: the first response of the
        first prompts."""
        group, number = divmod(row, 1 << self.group_bits)
        return number == 0 and group % self.numbers_per_step < self.samples_per_step

    def sampling(self, temperature: float) -> Sampling:
        """Settings of an engine for a group that is sampled at `temperature`."""
        return Sampling(temperature, self.max_new_tokens, self.top_p, self.top_k, self.min_p, self.stop)

    @property
    def numbers_per_step(self) -> int:
        """Step s has the groups from s times this on, so that a group's number does not depend on what other steps have used up."""
        return MAX_CANDIDATES if self.max_candidates else self.prompts_per_step

    @property
    def prompts_at_first(self) -> int:
        """Number of prompts that a step is opened with."""
        return num_to_admit(self.prompts_per_step, self.oversampling) if self.max_candidates else self.prompts_per_step

    @property
    def num_updates(self) -> int:
        """Number of updates of a step, by each model."""
        return self.epochs * self.mini_batches

    @property
    def row_bytes(self) -> int:
        """Bytes that a row's columns take at most: ids, log-probs (two models'), values, mask per token; turns; spans, scalars."""
        return self.max_new_tokens * (8 + 4 + 4 + 4 + 1) + (self.max_turns or 0) * (4 * 8 + 4) + 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a data set: its token ids (int64) and the data set's row."""

    ids: Array
    example: Mapping[str, Any]


def prompt_hash(prompt_ids: Array) -> int:
    """Hash of a prompt (int64 [Lp]), as a signed number of 64 bits."""
    return int(np.uint64(xxhash.xxh3_64_intdigest(np.ascontiguousarray(prompt_ids, np.int64).tobytes())).astype(np.int64))


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
class GroupRequest:
    """One leased group, ready to be generated."""

    meta: GroupMeta
    rows: list[int]
    prompt_ids: Array
    example: Mapping[str, Any]
    temperature: float


def requests(leased: Leased) -> Iterator[GroupRequest]:
    """The groups of a rollout lease."""
    batch = leased.batch
    position = {group: i for i, group in enumerate(batch.groups.tolist())}
    for meta, rows in zip(leased.lease.groups, leased.lease.rows, strict=True):
        i = position[meta.group]
        example = msgspec.json.decode(batch.ragged("example")[i].tobytes())
        yield GroupRequest(meta, rows, batch.ragged("prompt_ids")[i], example, float(batch.dense("temperature")[i]))


class UnusableResponse(Exception):
    """A response that cannot be trained on; the message says why."""


def check_response(response: Response) -> None:
    """Refuse a response without a token, or with a log-prob that is no number. Raises `UnusableResponse`."""
    if not len(response.token_ids):
        raise UnusableResponse("the response is empty")
    if not np.isfinite(response.logprobs).all():
        first = int(np.flatnonzero(~np.isfinite(response.logprobs))[0])
        raise UnusableResponse(f"the log-prob of token {first} of the response is {response.logprobs[first]}")


class ScoredRow(NamedTuple):
    """A response that can be stored; without a reward where another task scores."""

    row: int
    played: Played
    sample: Sample
    reward: Score | None


def outputs(group: int, scored: Sequence[ScoredRow], *, has_parts: bool = False, has_episodes: bool = False) -> Batch:
    """The columns that episodes of one group complete their rows with."""
    episodes = [one.played for one in scored]
    responses = [played.response for played in episodes]
    columns: dict[str, Values] = {
        "response_ids": Ragged.from_arrays([response.token_ids for response in responses], "int64"),
        "rollout_logprobs": Ragged.from_arrays([response.logprobs for response in responses], "float32"),
        "loss_mask": Ragged.from_arrays([played.loss_mask for played in episodes], "uint8"),
        "version_spans": Ragged.from_arrays([response.version_spans.reshape(-1) for response in responses], "int64"),
        "truncated": np.array([response.finish_reason == "length" for response in responses], np.uint8),
    }
    if has_episodes:
        columns |= {
            "turns": Ragged.from_arrays([played.turns.reshape(-1) for played in episodes], "int64"),
            "turn_rewards": Ragged.from_arrays([played.rewards for played in episodes], "float32"),
            "environment_seconds": np.array([played.seconds for played in episodes], np.float32),
            "timed_out": np.array([played.ended == "timeout" for played in episodes], np.uint8),
            BRANCHES: Ragged.from_arrays([played.branches.reshape(-1) for played in episodes], "int64"),
        }
    columns |= _reward_columns([one.reward for one in scored if one.reward is not None], has_parts)
    return Batch(np.array([one.row for one in scored], np.int64), np.array([group], np.int64), columns)


def _reward_columns(scores: Sequence[Score], has_parts: bool) -> dict[str, Values]:
    if not scores:
        return {}
    columns: dict[str, Values] = {"reward": np.array([score.reward for score in scores], np.float32)}
    if has_parts:
        parts = [np.array([np.nan if part is None else part for part in score.parts], np.float32) for score in scores]
        columns[PARTS_COLUMN.name] = Ragged.from_arrays(parts, "float32")
    return columns


def kept_episode(meta: GroupMeta, one: ScoredRow, decode: Callable[[Array], str]) -> dict[str, Any]:
    """A line of `samples.jsonl`; of an episode of several turns with its conversation. The row has a reward."""
    assert one.reward is not None
    kept = kept_sample(meta, one.row, one.sample, one.reward)
    if len(one.played.turns):
        kept |= {"finish_reason": one.played.ended, "turns": conversation(one.played, decode)}
    return kept


def kept_sample(meta: GroupMeta, row: int, sample: Sample, score: Score) -> dict[str, Any]:
    """A line of `samples.jsonl`."""
    return {
        "step": meta.partition,
        "purpose": meta.topic,
        "row": row,
        "group": meta.group,
        "prompt": sample.prompt,
        "response": sample.response,
        "reward": score.reward,
        **({"reward_parts": list(score.parts)} if len(score.parts) > 1 else {}),
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


def scored_group(batch: Batch) -> ScoredGroup:
    """Columns of a leased group that an algorithm sees."""
    return ScoredGroup(
        rewards=batch.dense("reward"),
        truncated=batch.dense("truncated"),
        loss_mask=batch.ragged("loss_mask"),
        rollout_logprobs=batch.ragged("rollout_logprobs"),
        ref_logprobs=batch.ragged(REFERENCE_COLUMN.name) if REFERENCE_COLUMN.name in batch.columns else None,
        values=batch.ragged(VALUES_COLUMN.name) if VALUES_COLUMN.name in batch.columns else None,
        turns=batch.ragged("turns") if "turns" in batch.columns else None,
        turn_rewards=batch.ragged("turn_rewards") if "turns" in batch.columns else None,
    )


def micro_batches(
    step: int, batch: Batch, advantages: Advantages, rows_each: int, is_examined: Callable[[int], bool] = lambda row: False
) -> Iterator[MicroBatch]:
    """A leased group, trained in this step, in pieces: a function of which rows there are. Raises `RunError` for advantages of
    another shape than the group's.

    `is_examined`: rows of which the engine is to give figures token by token. It gives none of a group that has branches.
    """
    check_advantages(batch, advantages)
    row_staleness, has_reference = staleness(step, batch), REFERENCE_COLUMN.name in batch.columns
    has_values = VALUES_COLUMN.name in batch.columns
    if has_branches(batch):
        yield from _with_branches(batch, advantages, row_staleness, rows_each)
        return
    for piece in pieces(len(batch), rows_each):
        rows = slice(piece.start, piece.stop)
        yield MicroBatch(
            indices=batch.indices[rows],
            prompt_ids=batch.ragged("prompt_ids")[0],
            response_ids=batch.ragged("response_ids").take(piece),
            loss_mask=batch.ragged("loss_mask").take(piece),
            rollout_logprobs=batch.ragged("rollout_logprobs").take(piece),
            advantages=advantages.take(piece).values if isinstance(advantages, Ragged) else advantages[rows],
            staleness=row_staleness[rows],
            ref_logprobs=batch.ragged(REFERENCE_COLUMN.name).take(piece) if has_reference else None,
            values=batch.ragged(VALUES_COLUMN.name).take(piece) if has_values else None,
            rewards=batch.dense("reward")[rows] if "reward" in batch.columns else None,
            examined_rows=tuple(number for number, row in enumerate(batch.indices[rows].tolist()) if is_examined(row)),
        )


def _with_branches(batch: Batch, advantages: Advantages, row_staleness: Array, rows_each: int) -> Iterator[MicroBatch]:
    """Pieces of a group that has branches: of the sequences behind its prompt, then each branch by itself."""
    check_alone(batch, (REFERENCE_COLUMN.name, VALUES_COLUMN.name))
    lengths = batch.ragged("response_ids").lengths
    if not isinstance(advantages, Ragged):
        advantages = Ragged.from_arrays(
            [np.full(n, each, np.float32) for n, each in zip(lengths, advantages, strict=True)], "float32"
        )
    columns = {name: first_sequences(batch, batch.ragged(name)) for name in PER_TOKEN}
    of_tokens = first_sequences(batch, advantages)
    for piece in pieces(len(batch), rows_each):
        rows = [row for row in piece if len(columns["response_ids"][row])]
        taken: Any = {name: column.take(rows) for name, column in columns.items()}
        if rows:
            yield MicroBatch(
                indices=batch.indices[rows],
                prompt_ids=batch.ragged("prompt_ids")[0],
                advantages=of_tokens.take(rows).values,
                staleness=row_staleness[rows],
                rewards=batch.dense("reward")[rows] if "reward" in batch.columns else None,
                **taken,
            )
    yield from branch_micro_batches(batch, advantages, row_staleness)


def check_advantages(batch: Batch, advantages: Advantages) -> None:
    """Check that a group has an advantage for each row, or for each token. Raises `RunError`."""
    lengths = batch.ragged("response_ids").lengths
    if isinstance(advantages, Ragged):
        if advantages.lengths.tolist() != lengths.tolist():
            raise RunError(
                f"the algorithm's advantages for responses of {lengths.tolist()} tokens (group {batch.groups[0]}) are "
                f"{advantages.lengths.tolist()} numbers: it is to return one for each token, or an array of one for each response"
            )
    elif advantages.shape != lengths.shape:
        raise RunError(
            f"the algorithm's advantages for the {len(lengths)} responses of group {batch.groups[0]} are an array of shape "
            f"{advantages.shape}: it is to return one for each, or a Ragged of one for each token"
        )


def staleness(step: int, batch: Batch) -> Array:
    """Staleness of each row (int64 [R]) in versions, counted from its oldest token."""
    spans = batch.ragged("version_spans")
    return np.array([step - spans[i][1::2].min() for i in range(len(batch))], np.int64)


def samples_of(leased: Leased, decode: Callable[[Array], str]) -> Iterator[tuple[GroupMeta, int, Sample]]:
    """The responses of a reward lease, as a scorer sees them: group, row, sample."""
    batch, position = leased.batch, 0
    for i, (meta, rows) in enumerate(zip(leased.lease.groups, leased.lease.rows, strict=True)):
        prompt_ids, example = batch.ragged("prompt_ids")[i], msgspec.json.decode(batch.ragged("example")[i].tobytes())
        prompt, prompt_ids = decode(prompt_ids), prompt_ids.tolist()
        for row in rows:
            ids, is_truncated = batch.ragged("response_ids")[position], batch.dense("truncated")[position]
            rewards = batch.ragged("turn_rewards")[position].tolist() if "turn_rewards" in batch.columns else ()
            turn_rewards = tuple(None if math.isnan(reward) else reward for reward in rewards)
            yield meta, row, Sample(prompt, decode(ids), example, not is_truncated, ids.tolist(), prompt_ids, turn_rewards)
            position += 1


def reward_outputs(scores: Mapping[int, Score], group_bits: int, *, has_parts: bool = False) -> Batch:
    """The columns that scoring adds to rows."""
    indices = np.array(list(scores), np.int64)
    groups = np.array(list(dict.fromkeys((indices >> group_bits).tolist())), np.int64)
    return Batch(indices, groups, _reward_columns(list(scores.values()), has_parts))


def left_out(piece: MicroBatch) -> MicroBatchResult:
    """Result of a micro-batch that is not computed, since it has no gradient; its tokens count in the normaliser all the same."""
    return MicroBatchResult(0.0, int(piece.loss_mask.values.sum()), 0, is_computed=False)


def token_outputs(batch: Batch, column: Column, of_pieces: Sequence[Ragged]) -> Batch:
    """A column with a number for each response token that a model adds to a group, from the group's pieces, in order."""
    numbers = Ragged(np.concatenate([each.values for each in of_pieces]), batch.ragged("response_ids").offsets)
    return Batch(batch.indices, batch.groups, {column.name: numbers})


def consumed(batch: Batch, results: Sequence[MicroBatchResult]) -> Consumed:
    """Report of a trained group to the ledger."""
    rows = batch.indices.tolist()
    return Consumed(
        rows=rows,
        empty_rows=[row for row, mask in zip(rows, batch.ragged("loss_mask"), strict=True) if not mask.any()],
        loss_tokens=sum(r.loss_tokens for r in results),
        is_finite=all(r.is_finite for r in results),
        is_left_out=not any(r.is_computed for r in results),
    )


def figures_of(
    step: int, batch: Batch, pieces: Sequence[MicroBatch], results: Sequence[MicroBatchResult], own_metrics: MetricSums
) -> GroupFigures:
    """Figures of a trained group, for metrics. `own_metrics`: the algorithm's own."""
    metrics: dict[str, float] = {}
    for result in results:
        for name, total in result.metrics.items():
            metrics[name] = max(metrics.get(name, total), total) if is_maximum(name) else metrics.get(name, 0.0) + total
    return GroupFigures(
        prompt_length=len(batch.ragged("prompt_ids")[0]),
        rewards=batch.dense("reward"),
        response_lengths=batch.ragged("response_ids").lengths,
        truncated=batch.dense("truncated"),
        staleness=staleness(step, batch),
        num_spans=batch.ragged("version_spans").lengths // 2,
        loss_sum=sum(r.loss_sum for r in results),
        computed_tokens=sum(r.loss_tokens for r in results if r.is_computed),
        logical_tokens=sum(piece.logical_tokens for piece, r in zip(pieces, results, strict=True) if r.is_computed),
        physical_tokens=sum(r.physical_tokens for r in results),
        metrics=metrics,
        left_out=sum(len(piece.indices) for piece, r in zip(pieces, results, strict=True) if not r.is_computed),
        reward_parts=batch.ragged(PARTS_COLUMN.name).values if PARTS_COLUMN.name in batch.columns else np.empty(0, np.float32),
        own_metrics=own_metrics,
        episodes=_episode_figures(batch) if "turns" in batch.columns else None,
    )


def _episode_figures(batch: Batch) -> EpisodeFigures:
    turns_T4 = batch.ragged("turns").values.reshape(-1, 4)
    return EpisodeFigures(
        num_turns=batch.ragged("turns").lengths // 4,
        num_observed=int((batch.ragged("loss_mask").values == 0).sum()),
        num_sampled=int(batch.ragged("loss_mask").values.sum()),
        tool_calls=int(turns_T4[:, 2].sum()),
        tool_failures=int(turns_T4[:, 3].sum()),
        seconds=batch.dense("environment_seconds"),
        num_timed_out=int(batch.dense("timed_out").sum()),
    )
