"""Which versions are evaluated, on which groups, and the figures that come of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncflow.loops.evaluation import EvaluationRow, EvaluationSettings, HeldOut, _without_score
from asyncflow.loops.samples import EVALUATION_GROUPS, Prompt, priority_of
from asyncflow.loops.score_batching import NO_REWARD, SKIPPED
from asyncflow.telemetry.accuracy import Responses
from asyncflow.transfer_queue.leases import DeadRow
from asyncflow.types import Batch, Interval, Ragged

PROMPTS = [Prompt(np.arange(n + 1), {"question": str(n)}) for n in range(3)]


def held_out(rows: list[EvaluationRow] | None = None, **changes: Any) -> HeldOut:
    kept: list[EvaluationRow] = [] if rows is None else rows
    prompts, done = changes.pop("prompts", PROMPTS), changes.pop("done", ())
    settings = EvaluationSettings(**{"last_version": 10, "samples": 2, "temperature": 0.7, **changes})
    return HeldOut(prompts, settings, on_row=kept.append, done=done)


@pytest.mark.parametrize(
    ("changes", "due"),
    [
        ({}, [0, 10]),
        ({"every_steps": 4}, [0, 4, 8, 10]),
        ({"every_steps": 5}, [0, 5, 10]),
        ({"last_version": 0}, [0]),
        ({"prompts": []}, []),
    ],
)
def test_the_first_and_the_last_version_are_evaluated_and_every_so_many_between(changes: dict[str, Any], due: list[int]) -> None:
    assert list(held_out(**changes).versions()) == due
    assert [version for version in range(20) if held_out(**changes).is_due(version)] == due


def test_every_prompt_is_a_sampled_and_a_greedy_group_under_one_version() -> None:
    metas, prompts, temperatures = held_out().admission(4)
    assert [(m.size, m.partition, m.interval, m.topic) for m in metas] == [
        *[(2, 4, Interval(4, 4), "eval")] * 3,
        *[(1, 4, Interval(4, 4), "eval")] * 3,
    ]
    assert prompts == PROMPTS * 2 and temperatures == [0.7] * 3 + [0.0] * 3
    metas, prompts, temperatures = held_out(greedy=False).admission(4)
    assert len(metas) == len(prompts) == len(temperatures) == 3 and {m.size for m in metas} == {2}


def test_evaluations_that_nobody_waits_for_come_behind_all_of_training() -> None:
    def priorities(**changes: bool) -> set[int]:
        return {m.priority for version in (0, 10) for m in held_out(**changes).admission(version)[0]}

    steps = [priority_of(Interval(step, step)) for step in (0, 1, 9, 10, 11, 1 << 39)]
    assert priorities() == {priority_of(Interval(0, 0)) + 1, priority_of(Interval(10, 10)) + 1} and steps == sorted(steps)
    assert steps[0] < min(priorities()) < steps[1] and steps[3] < max(priorities()) < steps[4]
    assert max(steps) < min(priorities(is_behind_training=True))


def test_no_two_groups_of_a_run_share_a_number() -> None:
    numbers = [m.group for version in range(11) for m in held_out().admission(version)[0]]
    assert len(set(numbers)) == len(numbers) and min(numbers) >= EVALUATION_GROUPS
    assert (max(numbers) << 10) < 2**63


def responses(rewards: list[float], lengths: list[int], truncated: list[bool]) -> Responses:
    return Responses(-1, np.array(rewards, np.float32), np.array(lengths), np.array(truncated))


def test_the_figures_are_means_over_prompts_and_what_could_not_be_scored_is_counted_out() -> None:
    rows: list[EvaluationRow] = []
    evaluation = held_out(rows)
    metas, _, _ = evaluation.admission(4)
    one, two, lost, _, greedy_two, *_ = [m.group for m in metas]
    done = {
        two: responses([1.0, 0.0], [4, 6], [False, True]),
        one: responses([1.0], [2], [False]),
        greedy_two: responses([0.0], [9], [True]),
    }
    assert lost not in done
    evaluation.finished(4, done)
    (row,) = rows
    assert (row["step"], row["num_prompts"], row["num_responses/sampled"], row["num_responses/greedy"]) == (4, 3, 3, 1)
    assert row["accuracy/sampled"] == 0.75 and row["clipped_ratio/sampled"] == pytest.approx(1 / 3)
    assert row["pass@2/sampled"] == 1.0, "of the prompt that has two"
    assert (row["interval/pass@2/sampled/low"], row["interval/pass@2/sampled/high"]) == pytest.approx((0.2065, 1.0), abs=6e-5)
    assert row["accuracy/greedy"] == 0.0 and row["clipped_ratio/greedy"] == 1.0 and row["response_length/greedy/max"] == 9
    latest = {kind: [each.prompt for each in of_kind] for kind, of_kind in evaluation.latest.items()}
    assert latest == {"sampled": [0, 1], "greedy": [1]}


def test_of_an_evaluation_without_any_score_no_figure_is_made_up() -> None:
    rows: list[EvaluationRow] = []
    evaluation = held_out(rows)
    evaluation.finished(0, {})
    assert rows == [{"step": 0, "num_prompts": 3, "unscored/sampled": 0, "unscored/greedy": 0}] and evaluation.latest == {}


def test_what_could_not_be_scored_is_told_by_kind_and_version() -> None:
    """Rows that have failed, and those that have the value for failures; not those that a scorer skips."""
    rows: list[EvaluationRow] = []
    evaluation = held_out(rows)
    groups = [[meta.group for meta in evaluation.admission(version)[0]] for version in (4, 10)]
    dead = [(groups[0][0], 0, NO_REWARD), (groups[0][0], 1, ""), (groups[0][2], 0, SKIPPED), (groups[0][4], 0, NO_REWARD)]
    dead += [(groups[1][1], 1, NO_REWARD), (7, 0, NO_REWARD)]  # the last one of training
    evaluation.rows_died([DeadRow(group, (group << 1) | sample, f"{error}why") for group, sample, error in dead])
    patched = replace(responses([1.0, 0.5], [4, 6], [False, False]), num_unscored=1)
    evaluation.finished(4, {groups[0][1]: patched})
    evaluation.finished(10, {})
    assert [(row["unscored/sampled"], row["unscored/greedy"]) for row in rows] == [(3, 1), (1, 0)]
    quiet: list[EvaluationRow] = []
    held_out(quiet, greedy=False).finished(0, {})
    assert quiet == [{"step": 0, "num_prompts": 3, "unscored/sampled": 0}]


def test_a_row_without_any_part_has_no_score() -> None:
    parts = Ragged.from_arrays([np.array(p, np.float32) for p in ([np.nan, np.nan], [np.nan, 1.0], [0.0, 0.0])], "float32")
    batch = Batch(np.arange(3), np.array([0]), {"reward": np.zeros(3, np.float32)})
    assert _without_score(batch) == 0
    assert _without_score(replace(batch, columns={**batch.columns, "reward_parts": parts})) == 1


def test_what_an_earlier_attempt_has_evaluated_is_not_due_again_and_is_planned_all_the_same() -> None:
    evaluation = held_out(every_steps=4, done={0, 4, 7})
    assert list(evaluation.versions()) == [8, 10] and not evaluation.is_due(4)
    assert [version for version in range(20) if evaluation.is_planned(version)] == [0, 4, 8, 10]


def test_what_was_left_out_is_told_with_the_next_figures_and_once() -> None:
    rows = list[EvaluationRow]()
    plan = held_out(rows, greedy=False)
    of = {number: responses([1.0, 0.0], [1, 2], [False, False]) for number in range(EVALUATION_GROUPS, EVALUATION_GROUPS + 3)}
    plan.leave_out()
    plan.leave_out()
    plan.finished(0, of)
    plan.finished(0, of)
    assert [row.get("left_out") for row in rows] == [2, None]
