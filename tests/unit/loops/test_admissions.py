"""What enters the queue at each step, in the first attempt of a run and in the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from asyncflow.control.ledger import Candidates
from asyncflow.control.modes import Bounded, SubStep
from asyncflow.data.order import SeededOrder
from asyncflow.loops.admissions import Admissions, AdmittedBefore
from asyncflow.loops.samples import Prompt, Shape, prompt_hash
from asyncflow.types import MAX_CANDIDATES, Batch, Interval, Ragged, RunError

SHAPE = Shape(
    prompts_per_step=2,
    group_size=2,
    group_bits=1,
    seed=0,
    temperature=0.5,
    max_new_tokens=4,
    rows_per_micro_batch=2,
)
PROMPTS = [Prompt(np.array([n, n]), {"n": n}) for n in range(7)]
SCHEDULE = Bounded(max_staleness=2, membership="first_come")


def prompts_of(batch: Batch) -> list[int]:
    return [int(ids[0]) for ids in batch.ragged("prompt_ids")]


def completed(rows: Sequence[int], versions: Sequence[int]) -> Batch:
    """Rows of one token, each made by one version."""
    spans = Ragged.from_arrays([np.array([0, version]) for version in versions], "int64")
    return Batch(np.array(rows, np.int64), np.empty(0, np.int64), {"version_spans": spans, "reward": np.arange(len(rows))})


def test_a_step_takes_the_next_prompts_and_they_are_known_until_they_are_forgotten() -> None:
    order = SeededOrder(PROMPTS, seed=3)
    admissions = Admissions(order, SCHEDULE, SHAPE)
    admitted = [admissions.step(step) for step in range(2)]
    assert [[meta.group for meta in metas] for metas, _ in admitted] == [[0, 1], [2, 3]]
    expected = [int(prompt.ids[0]) for prompt in SeededOrder(PROMPTS, seed=3).take(4)]
    assert [n for _, batch in admitted for n in prompts_of(batch)] == expected
    assert admitted[0][1].dense("temperature").tolist() == [0.5, 0.5] and order.position == 4
    assert {group: int(p.ids[0]) for group, p in admissions.prompts.items()} == dict(enumerate(expected))
    assert admissions.begun(admitted[0][1]) == {}
    admissions.forget({0, 1})
    assert [*admissions.prompts] == [2, 3]


def test_the_last_groups_of_a_step_may_be_kept_for_its_own_version() -> None:
    """But for those that an older one has begun."""
    shape = replace(SHAPE, prompts_per_step=4)
    admissions = Admissions(SeededOrder(PROMPTS, seed=3), SubStep(), shape)
    assert [meta.interval for meta in admissions.step(5)[0]] == [Interval(4, 5)] * 4
    assert [meta.interval for meta in admissions.step(6, 3)[0]] == [Interval(5, 6)] + [Interval(6, 6)] * 3
    steps = {3: dict(zip(range(12, 16), PROMPTS, strict=False))}
    before = AdmittedBefore(first=3, steps=steps, rows=completed([28], [2]))
    again = Admissions(SeededOrder(PROMPTS, seed=3), SubStep(), shape, before)
    metas, _ = again.step(3, 2)
    assert [(meta.group, meta.interval.low) for meta in metas] == [(12, 2), (13, 2), (14, 2), (15, 3)]


def test_what_was_admitted_is_admitted_again_with_the_rows_that_were_complete() -> None:
    steps = {3: {6: PROMPTS[5], 9: PROMPTS[1]}, 4: {8: PROMPTS[2], 7: PROMPTS[0]}}  # 7 and 9 have changed places
    rows = completed([12, 13, 15, 18], [3, 2, 1, 3])
    order = SeededOrder(PROMPTS, seed=3, position=4)
    before = AdmittedBefore(first=3, steps=steps, rows=rows)
    admissions = Admissions(order, SCHEDULE, SHAPE, before)
    assert admissions.waiting == steps
    metas, batch = admissions.step(3)
    assert [(meta.group, meta.partition, meta.interval.low) for meta in metas] == [(6, 3, 1), (9, 3, 1)]
    assert prompts_of(batch) == [5, 1] and batch.indices.tolist() == [12, 13, 18] and batch.groups.tolist() == [6, 9]
    assert batch.dense("reward").tolist() == [0, 1, 3]
    assert admissions.begun(batch) == {6: 2, 9: 3}  # a group is as old as its oldest row
    metas, batch = admissions.step(4)
    assert [(meta.group, meta.interval.low) for meta in metas] == [(8, 2), (7, 2)]
    assert batch.indices.tolist() == [15] and admissions.waiting == {}
    fewer = Admissions(order, SCHEDULE, SHAPE, before, ["version_spans", "more"])
    _, batch = fewer.step(3)
    assert batch.indices.tolist() == [12, 13, 18] and "reward" not in batch.columns and fewer.begun(batch) == {6: 2, 9: 3}
    metas, batch = admissions.step(5)  # what was never admitted goes on in the data's order
    assert [meta.group for meta in metas] == [10, 11] and not len(batch)
    assert prompts_of(batch) == [int(prompt.ids[0]) for prompt in SeededOrder(PROMPTS, seed=3, position=4).take(2)]


N = MAX_CANDIDATES
CHOOSING = replace(SHAPE, max_candidates=5, oversampling=1.5)


def lacking(count: int, *degenerate: int) -> Candidates:
    """Of a step of two members whose candidates are 0 to `count` - 1."""
    candidates = Candidates(2)
    for group in range(count):
        candidates.add(group, [group])
        candidates.decide(group, is_varied=group not in degenerate)
    return candidates


def test_candidates_are_consecutive_prompts_and_have_numbers_of_their_step() -> None:
    order = SeededOrder(PROMPTS, seed=3)
    due = [int(prompt.ids[0]) for prompt in SeededOrder(PROMPTS, seed=3).take(12)]
    admissions = Admissions(order, SCHEDULE, CHOOSING)
    metas, batch = admissions.step(0)
    assert [meta.group for meta in metas] == [0, 1, 2] and prompts_of(batch) == due[:3]
    metas, batch = admissions.more(0, lacking(3, 0, 1))
    assert [(meta.group, meta.partition) for meta in metas] == [(3, 0), (4, 0)] and prompts_of(batch) == due[3:5]
    admissions.put_back([4, 3])
    assert [*admissions.prompts] == [0, 1, 2]
    metas, batch = admissions.step(1)
    assert [(meta.group, meta.partition) for meta in metas] == [(N, 1), (N + 1, 1), (N + 2, 1)] and prompts_of(batch) == due[3:6]
    order.push([Prompt(np.array([99]), {})])
    admissions.put_back([N + 2])
    metas, batch = admissions.step(2)
    assert [meta.group for meta in metas] == [2 * N, 2 * N + 1, 2 * N + 2] and prompts_of(batch) == [due[5], 99, due[6]]


def test_a_step_that_got_more_candidates_continues_behind_its_last_one_in_the_next_attempt() -> None:
    steps = {1: {N + place: PROMPTS[place] for place in range(4)}}
    order = SeededOrder(PROMPTS, seed=3, position=4)
    admissions = Admissions(order, SCHEDULE, CHOOSING, AdmittedBefore(first=1, steps=steps))
    assert [meta.group for meta in admissions.step(1)[0]] == [N, N + 1, N + 2, N + 3]
    assert [meta.group for meta in admissions.more(1, lacking(4, 0, 1, 2))[0]] == [N + 4]


def test_a_step_that_finds_no_more_candidates_ends_the_run_in_a_sentence() -> None:
    admissions = Admissions(SeededOrder(PROMPTS, seed=3), SCHEDULE, CHOOSING)
    admissions.step(0)
    admissions.more(0, lacking(3, 0, 1))
    with pytest.raises(RunError) as refused:
        admissions.more(0, lacking(5, 0, 1, 2, 3))
    for words in ("step 0 has gone through 5 prompts, of which 1 had", "it needs 2", "group_size", "train.max_candidates above 5"):
        assert words in str(refused.value)
    assert admissions.step(1)[0][0].group == N


def test_rows_that_answer_another_prompt_than_their_group_has_now_are_not_used() -> None:
    hashes = {0: prompt_hash(PROMPTS[0].ids), 1: prompt_hash(PROMPTS[3].ids)}
    order: SeededOrder[Prompt] = SeededOrder([], seed=3)
    order.push([PROMPTS[0], PROMPTS[1]])
    before = AdmittedBefore(rows=completed([0, 2, 3], [0, 0, 0]), prompt_hashes=hashes)
    admissions = Admissions(order, SubStep(), SHAPE, before)
    assert admissions.has_prompts(0)
    metas, batch = admissions.step(0, 1)
    assert batch.indices.tolist() == [0] and admissions.begun(batch) == {0: 0}
    assert [meta.interval.low for meta in metas] == [0, 0] and not admissions.has_prompts(1)


def test_a_step_waits_for_prompts_where_they_come_from_outside() -> None:
    order: SeededOrder[Prompt] = SeededOrder([], seed=3)
    shape = replace(SHAPE, max_candidates=8)
    admissions = Admissions(order, SCHEDULE, shape)
    order.push([PROMPTS[0]])
    assert not admissions.has_prompts(0)
    order.push([PROMPTS[1]])
    assert admissions.has_prompts(0)
    admissions.step(0)
    one, both = lacking(2, 0), lacking(2, 0, 1)
    assert not admissions.has_prompts(0, one)
    order.push([PROMPTS[2]])
    assert admissions.has_prompts(0, one) and not admissions.has_prompts(0, both)
    before = AdmittedBefore(first=3, steps={3: {6: PROMPTS[5], 7: PROMPTS[1]}})
    resumed = Admissions(SeededOrder([], seed=3), SCHEDULE, SHAPE, before)
    assert resumed.has_prompts(3) and not resumed.has_prompts(4)
