"""Two runs compared: one changed bit anywhere is found and named, and equal bits that timing could not change prove nothing."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest

from asyncflow.telemetry.certificate import Certificate, Observed
from asyncflow.telemetry.equivalence import Equivalence, Kill, compare, groups_after, kendall_distance, overlap_seconds
from asyncflow.telemetry.fingerprints import GroupPrint, RowPrint, StepPrint
from asyncflow.telemetry.spans import Span
from asyncflow.types import RunError

Steps = list[StepPrint]
KILL = Kill("rollout/1", 1, 6, 5.0)


def group(number: int) -> GroupPrint:
    rows = [RowPrint(row, f"r{row}", f"l{row}", (row / 3).hex(), [0, 1]) for row in (2 * number, 2 * number + 1)]
    return GroupPrint(number, rows, [(number + 0.5).hex(), (-1.0).hex()])


def step(number: int, order: list[int]) -> StepPrint:
    tensors = {"optimizer/w/exp_avg": f"o{number}", "weights/w": f"w{number}", "weights/b": f"b{number}"}
    return StepPrint(number, [group(3 * number + g) for g in order], tensors, 12, 5 + number, (0.25 / (1 + number)).hex())


def steps(*orders: list[int]) -> Steps:
    return [step(number, order) for number, order in enumerate(orders)]


def span(task: str, number: int, start: float, end: float, worker: str = "w") -> Span:
    return Span(worker=worker, task=task, step=number, start=start, end=end)


def certificate(redelivered: int, **failures: Any) -> Certificate:
    return Observed(max_spans=1, rows_dead=len(failures)).certificate(
        schedule="delayed", promised_staleness=1, steps=2, planned_steps=2, rows_redelivered=redelivered,
        reward_failures=failures, why_not_deterministic="",
    )  # fmt: skip


def verdict(
    first: Steps,
    second: Steps,
    *,
    overlap: float = 0.5,
    redelivered: int = 4,
    kill: Kill | None = KILL,
    critics: tuple[Steps, Steps] | None = None,
    **failures: Any,
) -> Equivalence:
    """Of the runs `one` and `other`; `overlap`: the seconds for which `other` generated in the training of step 1."""
    spans = [span("forward_backward", 0, 2.0, 3.0), span("forward_backward", 1, 4.0, 6.0)]
    spans += [span("generate_group", 1, 3.0, 4.0 + overlap), span("generate_group", 1, 6.0, 7.0, "rollout/1")]
    runs = certificate(0), certificate(redelivered, **failures)
    return compare(("one", "other"), "c0ffee", (first, second), runs, spans, kill, critics)


def test_the_same_bits_in_another_order_are_equal() -> None:
    result = verdict(steps([0, 1, 2], [0, 1, 2]), steps([2, 0, 1], [0, 1, 2]))
    assert (result.verdict, result.difference, result.reasons) == ("equal", None, [])
    assert (result.reordered_steps, result.order_distance) == (1, pytest.approx(1 / 3))
    assert result.weights_hash[0] == result.weights_hash[1] and result.everything_hash[0] == result.everything_hash[1]
    assert result.num_facts == 2 * (6 * 4 + 3 * 2 + 3) and result.logprobs == (48, 22, 0.25)
    shown = "\n".join(result.lines)
    for words in (
        "EQUAL: one and other gave the same bits in 2 steps",
        "other in 1 of 2 steps",
        "22 of 48 bit-equal (45.83%)",
        "other trained while responses were made or scored in 1 of 2 steps, for 0.25 s (median)",
        "rollout/1 in step 1 of other, holding 6 rows; 4 were made again; started again, it made 1 groups",
    ):
        assert words in shown


def changed_row(at: StepPrint, **changes: Any) -> StepPrint:
    first = at.groups[0]
    rows = [msgspec.structs.replace(first.rows[0], **changes), *first.rows[1:]]
    return msgspec.structs.replace(at, groups=[msgspec.structs.replace(first, rows=rows), *at.groups[1:]])


def changed_loss(at: StepPrint) -> StepPrint:
    first = at.groups[0]
    return msgspec.structs.replace(at, groups=[msgspec.structs.replace(first, losses=[first.losses[0], "0x1p-3"]), *at.groups[1:]])


def changed_tensor(at: StepPrint, name: str) -> StepPrint:
    return msgspec.structs.replace(at, tensors={**at.tensors, name: "other"})


@pytest.mark.parametrize(
    ("change", "what", "where", "values"),
    [
        (lambda s: changed_row(s, response="other"), "response", "row 6", ("r6", "other")),
        (lambda s: changed_row(s, logprobs="other"), "rollout log-probs", "row 6", ("l6", "other")),
        (lambda s: changed_row(s, reward="0x1p+0"), "reward", "row 6", ((6 / 3).hex(), "0x1p+0")),
        (lambda s: changed_row(s, spans=[0, 0]), "spans", "row 6", ("[0, 1]", "[0, 0]")),
        (changed_loss, "loss", "group 3, micro-batch 1", ((-1.0).hex(), "0x1p-3")),
        (lambda s: changed_tensor(s, "weights/b"), "tensor", "weights/b", ("b1", "other")),
        (lambda s: changed_tensor(s, "optimizer/w/exp_avg"), "tensor", "optimizer/w/exp_avg", ("o1", "other")),
        (lambda s: msgspec.structs.replace(s, groups=s.groups[1:]), "response", "row 6", ("r6", "absent")),
        (lambda s: changed_tensor(s, "weights/new"), "tensor", "weights/new", ("absent", "other")),
    ],
)
def test_one_difference_is_found_and_named(change: Any, what: str, where: str, values: tuple[str, str]) -> None:
    plain, other = steps([0, 1, 2], [0, 1, 2]), steps([2, 0, 1], [0, 1, 2])
    other[1] = change(other[1])
    result = verdict(plain, other)
    assert result.verdict == "differs" and result.difference is not None
    found = result.difference
    assert (found.step, found.what, found.where, found.values) == (1, what, where, values)
    assert result.everything_hash[0] != result.everything_hash[1]
    assert (result.weights_hash[0] != result.weights_hash[1]) == where.startswith("weights/")
    assert any(f"step 1, {what} of {where}: {values[0]} against {values[1]}" in line for line in result.lines)
    assert "DIFFERS: one and other gave different bits" in result.lines[0]
    weights = next(line for line in result.lines if line.startswith("final weights"))
    assert ("(one)" in weights and "(other)" in weights) == where.startswith("weights/")


@pytest.mark.parametrize(
    ("change", "what", "where", "values"),
    [
        (lambda s: changed_tensor(s, "weights/b"), "tensor", "critic/weights/b", ("b1", "other")),
        (lambda s: changed_tensor(s, "optimizer/w/exp_avg"), "tensor", "critic/optimizer/w/exp_avg", ("o1", "other")),
        (changed_loss, "loss", "critic/group 3, micro-batch 1", ((-1.0).hex(), "0x1p-3")),
    ],
)
def test_a_critic_that_differs_in_its_last_update_is_found(change: Any, what: str, where: str, values: tuple[str, str]) -> None:
    plain, other = steps([0, 1, 2], [0, 1, 2]), steps([2, 0, 1], [0, 1, 2])
    equal = verdict(plain, other, critics=(plain, other))
    assert equal.verdict == "equal" and equal.num_facts == 2 * verdict(plain, other).num_facts
    critic = [other[0], change(other[1])]
    result = verdict(plain, other, critics=(plain, critic))
    assert result.verdict == "differs" and result.difference is not None
    found = result.difference
    assert (found.step, found.what, found.where, found.values) == (1, what, where, values)
    assert result.weights_hash == equal.weights_hash and result.everything_hash[0] != result.everything_hash[1]
    with pytest.raises(RunError, match="the critic of the other run left 1 of 2 steps"):
        verdict(plain, other, critics=(plain, critic[:1]))


def test_of_several_differences_the_first_is_named_and_a_difference_is_no_matter_of_timing() -> None:
    plain, other = steps([0, 1, 2], [0, 1, 2]), steps([0, 1, 2], [0, 1, 2])
    other[0] = changed_tensor(changed_tensor(other[0], "optimizer/w/exp_avg"), "weights/w")
    other[1] = changed_row(other[1], response="other")
    result = verdict(plain, other, overlap=0.0, kill=None)
    assert result.verdict == "differs" and result.difference is not None
    assert (result.difference.step, result.difference.where) == (0, "weights/w")


@pytest.mark.parametrize(
    ("orders", "changes", "words"),
    [
        (([0, 1, 2], [0, 1, 2]), {}, "the same order in every step"),
        (([0, 2, 1], [0, 1, 2]), {"overlap": 0.0}, "other never trained while responses were made or scored"),
        (([0, 2, 1], [0, 1, 2]), {"redelivered": 0}, "other lost no row with a killed worker"),
        (([0, 2, 1], [0, 1, 2]), {"kill": None}, "other lost no row with a killed worker"),
        (([0, 2, 1], [0, 1, 2]), {"timeout": 2}, "other: 1 rows failed with 2 reward timeouts"),
    ],
)
def test_equal_bits_that_prove_nothing_are_void(orders: Any, changes: dict[str, Any], words: str) -> None:
    result = verdict(steps([0, 1, 2], [0, 1, 2]), steps(*orders), **changes)
    assert result.verdict == "void" and len(result.reasons) == 1 and words in result.reasons[0]
    assert any("killed" in line and "no worker" in line for line in result.lines) == (result.kill is None)
    assert "VOID" in result.lines[0] and words in result.lines[0]


def test_runs_that_learned_nothing_are_void() -> None:
    def idle(order: list[int]) -> Steps:
        return [
            msgspec.structs.replace(s, groups=[msgspec.structs.replace(g, losses=["0x0.0p+0", "-0x0.0p+0"]) for g in s.groups])
            for s in steps(order, order)
        ]

    result = verdict(idle([0, 1, 2]), idle([2, 1, 0]))
    assert result.verdict == "void" and result.reasons == ["every loss was 0, so nothing was learned"]


def test_a_run_without_all_its_steps_cannot_be_compared() -> None:
    with pytest.raises(RunError, match="the other run left 1 of 2 steps"):
        verdict(steps([0, 1, 2], [0, 1, 2]), steps([0, 1, 2]))


def test_kendall_distance_counts_the_pairs_that_are_the_other_way_round() -> None:
    draw = random.Random(0)
    for size in (2, 3, 7, 12):
        first, second = (draw.sample(range(size), size) for _ in range(2))
        pairs = list(itertools.combinations(range(size), 2))
        turned = sum((first.index(a) < first.index(b)) != (second.index(a) < second.index(b)) for a, b in pairs)
        assert kendall_distance(first, second) == pytest.approx(turned / len(pairs))
    assert kendall_distance([1, 2, 3], [1, 2, 3]) == 0.0 and kendall_distance([1, 2, 3], [3, 2, 1]) == 1.0
    assert kendall_distance([1, 2, 9], [2, 1, 8]) == 1.0  # of what both have
    assert kendall_distance([1], [1]) == kendall_distance([], []) == 0.0


def test_the_overlap_is_what_any_group_takes_of_a_step_s_training_counted_once() -> None:
    spans = [
        span("generate_group", 0, 0.0, 1.0), span("generate_group", 0, 0.0, 5.0), span("generate_group", 0, 4.0, 4.5),
        span("forward_backward", 0, 3.0, 3.5), span("forward_backward", 0, 2.0, 3.0), span("optim_step", 0, 5.5, 6.5),
        span("generate_group", 1, 6.0, 7.0), span("forward_backward", 1, 8.0, 9.0), span("optim_step", 1, 9.0, 9.5),
        span("forward_backward", 2, 10.0, 11.0), span("generate_group", 3, 10.5, 20.0), span("publish", 2, 11.0, 30.0),
    ]  # fmt: skip
    assert overlap_seconds(spans) == {0: 3.5, 1: 0.0, 2: 0.5}


def test_a_killed_worker_s_groups_count_that_began_after_its_next_start() -> None:
    spans = [
        span("generate_group", 1, 4.0, 5.5, "rollout/1"), span("generate_group", 2, 8.0, 9.0, "rollout/1"),
        span("generate_group", 2, 8.0, 9.0, "rollout/0"), span("install", 2, 7.0, 7.5, "rollout/1"),
    ]  # fmt: skip
    assert groups_after(spans, KILL) == 1
