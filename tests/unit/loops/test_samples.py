"""Samples on their way: into columns, out of leases, into micro-batches."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncflow.control.ledger import Consumed
from asyncflow.control.modes import NEVER
from asyncflow.engines.base import MicroBatchResult, Response
from asyncflow.loops import samples
from asyncflow.loops import training_batches as batches
from asyncflow.loops.samples import COLUMNS, Prompt
from asyncflow.rewards.base import Sample, Score
from asyncflow.transfer_queue.client import Leased
from asyncflow.transfer_queue.leases import Lease, Token
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.types import Batch, GroupMeta, Interval, Ragged
from tests.builders import scored

BITS = 2


def response(sample: int, length: int, *, versions: tuple[int, ...] = (0,), reason: Any = "stop") -> Response:
    spans = np.array([(i, version) for i, version in enumerate(versions)], np.int64)
    return Response(sample, np.arange(length) + 10 * sample, -np.ones(length, np.float32) * sample, spans, reason)


def meta(group: int, *, step: int = 0, size: int = 3, low: int = 0) -> GroupMeta:
    return GroupMeta(group, size, step, Interval(low, step))


def leased(metas: list[GroupMeta], rows: list[list[int]], batch: Batch) -> Leased:
    return Leased(Lease(Token("t", "i", 1), metas, rows, [[0] * len(of_group) for of_group in rows], [0] * len(metas)), batch)


def stored(m: GroupMeta, *responses: Response, prompt_length: int = 2) -> Leased:
    """A trainer's lease of one group, through a storage."""
    first = m.group << BITS
    rows = [first + r.sample for r in responses]
    schema = samples.schema(BITS, 9.0, 2)

    async def store() -> Batch:
        storage = MemoryStorage()
        await storage.open(schema)
        await storage.write([m], samples.admission([m], [Prompt(np.arange(prompt_length), {})], [1.0]))
        rows_scored = [scored(row, each, each.sample / 2) for row, each in zip(rows, responses, strict=True)]
        await storage.write([], samples.outputs(m.group, rows_scored))
        return await storage.read(np.array(rows), schema.task("train").reads)

    return leased([m], [rows], asyncio.run(store()))


def test_the_tasks_read_and_write_declared_columns_and_take_the_limits() -> None:
    schema = samples.schema(BITS, 9.0, 5)
    rollout, train, evaluation = schema.tasks
    declared = {column.name for column in COLUMNS}
    assert schema.declared == COLUMNS and schema.group_bits == BITS
    for task in (rollout, train, evaluation):
        assert set(task.reads) | set(task.writes) <= declared and (task.lease_seconds, task.max_failures) == (9.0, 5)
    assert (rollout.whole_groups, train.whole_groups, evaluation.whole_groups) == (False, True, True)
    assert (rollout.topic, train.topic, evaluation.topic) == ("", "train", "eval")
    assert set(train.reads) - {"prompt_ids"} == set(rollout.writes)


def test_admitted_prompts_come_back_as_requests() -> None:
    metas = [meta(5), meta(9)]
    prompts = [Prompt(np.array([1, 2, 3]), {"question": "wie groß?", "answer": 3.5}), Prompt(np.array([4]), {"question": "b"})]
    batch = samples.admission(metas, prompts, [0.5, 0.0])
    assert batch.groups.tolist() == [5, 9]
    other_order = Batch(np.array([36, 20, 22]), np.array([9, 5]), {name: v[[1, 0]] if isinstance(v, np.ndarray) else v.take([1, 0])
                        for name, v in batch.columns.items()})  # fmt: skip
    found = list(samples.requests(leased(metas, [[20, 22], [36]], other_order)))
    assert [(r.meta.group, r.rows, r.prompt_ids.tolist(), r.temperature) for r in found] == [
        (5, [20, 22], [1, 2, 3], 0.5),
        (9, [36], [4], 0.0),
    ]
    assert [dict(r.example) for r in found] == [dict(p.example) for p in prompts]


def test_responses_become_the_columns_that_are_declared_for_them() -> None:
    long, short = response(2, 4, versions=(3, 4), reason="length"), response(0, 1)
    batch = samples.outputs(5, [scored(22, long, 0.25), scored(20, short, 0.0)])  # as they have ended
    assert set(batch.columns) == set(samples.RESPONSE_COLUMNS)
    assert (batch.indices.tolist(), batch.groups.tolist()) == ([22, 20], [5])
    assert [each.tolist() for each in batch.ragged("response_ids")] == [[20, 21, 22, 23], short.token_ids.tolist()]
    assert [each.tolist() for each in batch.ragged("rollout_logprobs")] == [[-2.0] * 4, short.logprobs.tolist()]
    assert [each.tolist() for each in batch.ragged("loss_mask")] == [[1, 1, 1, 1], [1]]
    assert [each.tolist() for each in batch.ragged("version_spans")] == [[0, 3, 1, 4], short.version_spans.reshape(-1).tolist()]
    assert batch.dense("truncated").tolist() == [1, 0] and batch.dense("reward").tolist() == [0.25, 0.0]
    samples.schema(BITS, 9.0, 2).check(batch)
    assert "reward" not in samples.outputs(5, [scored(22, long, None)]).columns


def test_a_token_of_a_version_outside_the_interval_is_refused_naming_the_row() -> None:
    m = meta(1, step=3, low=2)
    batches.check_interval(stored(m, response(0, 4, versions=(2, 3)), response(1, 2, versions=(3,))), 3, 1)
    for versions in ((2, 4), (1, 2), (4,)):
        with pytest.raises(ValueError, match=r"row 6, trained in step 3, .* outside Interval\(low=2, high=3\)"):
            batches.check_interval(stored(m, response(0, 4, versions=(3,)), response(2, 4, versions=versions)), 3, 1)


@pytest.mark.parametrize(
    ("step", "versions", "is_right"),
    [(2, (2,), True), (2, (1, 2), True), (2, (1, 3), False), (4, (2, 4), True), (4, (1,), False), (5, (2, 5), False)],
)
def test_in_the_step_of_another_its_tokens_may_be_as_old_as_the_schedule_says(
    step: int, versions: tuple[int, ...], is_right: bool
) -> None:
    group = stored(GroupMeta(1, 3, 3, Interval(1, NEVER)), response(0, 4, versions=versions))
    if is_right:
        batches.check_interval(group, step, 2)
    else:
        with pytest.raises(ValueError, match=f"row 4, trained in step {step},"):
            batches.check_interval(group, step, 2)


@pytest.mark.parametrize(("rows_each", "pieces"), [(1, [[4], [5], [6]]), (2, [[4, 5], [6]]), (3, [[4, 5, 6]]), (9, [[4, 5, 6]])])
def test_micro_batches_are_pieces_of_a_group_in_its_order(rows_each: int, pieces: list[list[int]]) -> None:
    m = meta(1, step=4)
    responses = [response(0, 3, versions=(2, 3)), response(1, 1, versions=(4,)), response(2, 2, versions=(3,))]
    group = stored(m, *responses, prompt_length=5)
    found = list(batches.micro_batches(m.partition, group.batch, np.array([4, 5, 6], np.float32), rows_each))
    assert [piece.indices.tolist() for piece in found] == pieces
    for piece in found:
        own = piece.indices - 4
        assert piece.advantages.tolist() == piece.indices.tolist()
        assert [ids[0] for ids in piece.response_ids] == [10 * sample for sample in own]
        assert piece.response_ids.lengths.tolist() == [[3, 1, 2][sample] for sample in own]
        assert piece.loss_mask.lengths.tolist() == piece.rollout_logprobs.lengths.tolist() == piece.response_ids.lengths.tolist()
        assert piece.prompt_ids.tolist() == [0, 1, 2, 3, 4] and piece.ref_logprobs is None
        assert piece.staleness.tolist() == [[2, 0, 1][sample] for sample in own]
    assert sum(piece.logical_tokens for piece in found) == 3 * 5 + 6


def test_what_the_ledger_is_told_adds_up() -> None:
    m = meta(1, step=3)
    group = stored(m, response(0, 3, versions=(1, 3)), response(1, 1, versions=(3,), reason="length"), prompt_length=5)
    pieces = list(batches.micro_batches(m.partition, group.batch, np.zeros(2, np.float32), 1))
    results = [
        MicroBatchResult(0.5, 3, 8, {"ratio": 3.0, "a/max": 2.0}),
        MicroBatchResult(0.25, 1, 6, {"ratio": 1.0, "a/max": 1.5}, is_finite=False),
    ]
    told, of_group = (
        batches.consumed(group.batch, results),
        batches.figures_of(m.partition, group.batch, pieces, results, {}),
    )
    assert told.rows == [4, 5] and told.loss_tokens == 4 and told.is_finite is False and of_group.prompt_length == 5
    told = of_group
    assert told.rewards.tolist() == [0.0, 0.5] and told.response_lengths.tolist() == [3, 1] and told.truncated.tolist() == [0, 1]
    assert told.staleness.tolist() == [2, 0]  # from the oldest span
    assert told.num_spans.tolist() == [2, 1]
    assert (told.loss_sum, told.logical_tokens, told.physical_tokens) == (0.75, 14, 14)
    assert told.metrics == {"ratio": 4.0, "a/max": 2.0}
    assert batches.consumed(group.batch, results[:1]).is_finite is True

    results = [results[0], batches.left_out(pieces[1])]
    told = batches.figures_of(m.partition, group.batch, pieces, results, {})
    assert (told.computed_tokens, told.logical_tokens, told.physical_tokens) == (3, 8, 8)
    assert told.left_out == 1 and told.metrics == {"ratio": 3.0, "a/max": 2.0}
    assert batches.consumed(group.batch, results) == Consumed([4, 5], [], 4, True)
    assert batches.consumed(group.batch, [batches.left_out(piece) for piece in pieces]) == Consumed([4, 5], [], 4, True, True)


def test_a_row_without_a_token_to_train_on_is_told() -> None:
    m = meta(1)
    batch = stored(m, response(0, 3), response(1, 2)).batch
    batch.ragged("loss_mask").values[3:] = 0
    told = batches.consumed(batch, [MicroBatchResult(0.5, 3, 8)])
    assert told.rows == [4, 5] and told.empty_rows == [5]


def test_the_reference_as_a_task_adds_a_column_that_training_waits_for_and_cuts_as_training_does() -> None:
    schema = samples.schema(BITS, 9.0, 2, ("rollout", "reference"))
    reference, train = schema.task("reference"), schema.task("train")
    assert reference.writes == ("ref_logprobs",) and set(reference.writes) <= set(train.reads)
    m = meta(1)
    batch = stored(m, response(0, 3), response(1, 1), response(2, 2)).batch
    responses = batch.ragged("response_ids")
    parts = [Ragged(p.values / 8, p.offsets) for p in map(responses.take, batches.pieces(3, 2))]
    added = samples.token_outputs(batch, samples.REFERENCE_COLUMN, parts)
    whole = Batch(batch.indices, batch.groups, {**batch.columns, **added.columns})
    for micro in batches.micro_batches(m.partition, whole, np.zeros(3, np.float32), 2):
        assert micro.ref_logprobs is not None
        assert [row.tolist() for row in micro.ref_logprobs] == [(row / 8).tolist() for row in micro.response_ids]


def test_staleness_counts_from_the_oldest_token_to_the_step_that_trains() -> None:
    batch = stored(meta(1, step=3), response(0, 4, versions=(1, 2, 3)), response(1, 2, versions=(3,))).batch
    assert batches.staleness(3, batch).tolist() == [2, 0] and batches.staleness(4, batch).tolist() == [3, 1]


def test_the_reward_as_a_task_reads_what_a_scorer_sees_and_adds_the_column_that_rollout_leaves_out() -> None:
    schema = samples.schema(BITS, 9.0, 2, ("rollout", "reward"))
    rollout, task = schema.task("rollout"), schema.task("reward")
    assert set(rollout.writes) == set(samples.RESPONSE_COLUMNS) - {"reward"} and task.writes == ("reward",)
    assert not task.whole_groups and task.topic == ""  # row by row, of training and of evaluation
    assert "reward" in schema.task("train").reads and "reward" in schema.task("eval").reads
    m, other = meta(5), meta(9)

    async def store() -> Batch:
        storage = MemoryStorage()
        await storage.open(schema)
        prompts = [Prompt(np.array([7, 7]), {"answer": "5"}), Prompt(np.array([8]), {"answer": "9"})]
        await storage.write([m, other], samples.admission([m, other], prompts, [1.0, 1.0]))
        for row, group, r in ((20, 5, response(0, 2)), (22, 5, response(2, 3, reason="length")), (37, 9, response(1, 1))):
            made = samples.outputs(group, [scored(row, r, None)])
            schema.check_outputs("rollout", made)
            await storage.write([], made)
        return await storage.read(np.array([20, 22, 37]), task.reads)

    group = leased([m, other], [[20, 22], [37]], asyncio.run(store()))
    found = list(samples.samples_of(group, lambda ids: " ".join(map(str, ids))))
    assert [(meta.group, row) for meta, row, _ in found] == [(5, 20), (5, 22), (9, 37)]
    assert [sample for _, _, sample in found] == [
        Sample("7 7", "0 1", {"answer": "5"}, True, [0, 1], [7, 7]),
        Sample("7 7", "20 21 22", {"answer": "5"}, False, [20, 21, 22], [7, 7]),
        Sample("8", "10", {"answer": "9"}, True, [10], [8]),
    ]
    added = samples.reward_outputs({22: Score(0.5, (0.5,)), 37: Score(1.0, (1.0,))}, BITS)
    schema.check_outputs("reward", added)
    assert (added.indices.tolist(), added.groups.tolist(), added.dense("reward").tolist()) == ([22, 37], [5, 9], [0.5, 1.0])


def test_what_each_scorer_gave_is_a_column_of_its_own_where_the_run_asks_for_it() -> None:
    scores = {20: Score(0.5, (1.0, None)), 22: Score(-1.0, (None, None))}
    for place in ("rollout", "reward"):
        kept = samples.schema(BITS, 30.0, 2, ("rollout", place), has_reward_parts=True)
        if place == "rollout":
            rows = [scored(row, response(row & 3, 2), 0.0)._replace(reward=score) for row, score in scores.items()]
            added = samples.outputs(5, rows, has_parts=True)
        else:
            added = samples.reward_outputs(scores, BITS, has_parts=True)
        kept.check_outputs(place, added)
        assert added.dense("reward").tolist() == [0.5, -1.0]
        parts = added.ragged("reward_parts")
        assert parts[0][0] == 1.0 and np.isnan([parts[0][1], *parts[1]]).all()
        assert "reward_parts" in kept.task("train").reads


def test_a_response_that_cannot_be_trained_on_is_told_by_what_is_wrong_with_it() -> None:
    samples.check_response(response(1, 3))
    with pytest.raises(samples.UnusableResponse, match="the response is empty"):
        samples.check_response(response(1, 0))
    for value in (np.nan, np.inf, -np.inf):
        bad = response(1, 3)
        bad.logprobs[2] = value
        with pytest.raises(samples.UnusableResponse, match=f"token 2 of the response is {value}"):
            samples.check_response(bad)
