"""Samples on their way: prompts into the queue, responses into columns. What a trainer makes of them: training_batches.py.

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

from asyncflow.control.ledger import num_to_admit
from asyncflow.engines.base import Response, Sampling
from asyncflow.loops.branches import BRANCHES
from asyncflow.loops.transcript import Played, conversation
from asyncflow.rewards.base import Sample, Score
from asyncflow.transfer_queue.client import Leased
from asyncflow.transfer_queue.schema import Schema, TaskSpec
from asyncflow.types import MAX_CANDIDATES, Array, Batch, Column, GroupMeta, Interval, Ragged, Values

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


def token_outputs(batch: Batch, column: Column, of_pieces: Sequence[Ragged]) -> Batch:
    """A column with a number for each response token that a model adds to a group, from the group's pieces, in order."""
    numbers = Ragged(np.concatenate([each.values for each in of_pieces]), batch.ragged("response_ids").offsets)
    return Batch(batch.indices, batch.groups, {column.name: numbers})
