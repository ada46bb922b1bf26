"""Two runs compared: one changed bit anywhere is found and named, and equal bits without differing timing prove nothing."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest

from asyncflow.telemetry.certificate import Certificate, Observed
from asyncflow.telemetry.equivalence import Equivalence, compare, kendall_distance, lead_seconds
from asyncflow.telemetry.fingerprints import GroupPrint, RowPrint, StepPrint
from asyncflow.telemetry.spans import Span
from asyncflow.types import RunError

Steps = list[StepPrint]


def group(number: int) -> GroupPrint:
    rows = [RowPrint(row, f"r{row}", f"l{row}", (row / 3).hex(), [0, 1]) for row in (2 * number, 2 * number + 1)]
    return GroupPrint(number, rows, [(number + 0.5).hex(), (-1.0).hex()])


def step(number: int, order: list[int]) -> StepPrint:
    tensors = {"optimizer/w/exp_avg": f"o{number}", "weights/w": f"w{number}", "weights/b": f"b{number}"}
    return StepPrint(number, [group(3 * number + g) for g in order], tensors, 12, 5 + number, (0.25 / (1 + number)).hex())


def steps(*orders: list[int]) -> Steps:
    return [step(number, order) for number, order in enumerate(orders)]


def certificate(schedule: str, num_steps: int, overlapped: int, **failures: Any) -> Certificate:
    seen = Observed(max_spans=1, overlapped_steps=set(range(overlapped)), rows_dead=len(failures))
    return seen.certificate(
        schedule=schedule, promised_staleness=0, steps=num_steps, planned_steps=num_steps, rows_redelivered=0,
        reward_failures=failures, is_deterministic=True,
    )  # fmt: skip


def verdict(synchronous: Steps, periodic: Steps, *, overlapped: int = 1, num_steps: int = 2, **failures: Any) -> Equivalence:
    runs = certificate("synchronous", num_steps, 0), certificate("periodic", num_steps, overlapped, **failures)
    return compare("c0ffee", (synchronous, periodic), runs, [])


def test_the_same_bits_in_another_order_are_equal() -> None:
    result = verdict(steps([0, 1, 2], [0, 1, 2]), steps([2, 0, 1], [0, 1, 2]))
    assert (result.verdict, result.difference, result.reasons) == ("equal", None, [])
    assert (result.reordered_steps, result.order_distance) == (1, pytest.approx(1 / 3))
    assert result.weights_hash[0] == result.weights_hash[1] and result.everything_hash[0] == result.everything_hash[1]
    assert result.num_facts == 2 * (6 * 4 + 3 * 2 + 3) and result.logprobs == (48, 22, 0.25)
    shown = "\n".join(result.lines)
    assert "EQUAL" in shown and "other in 1 of 2 steps" in shown and "22 of 48 bit-equal (45.83%)" in shown


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


def test_of_several_differences_the_first_is_named_and_a_difference_is_no_matter_of_timing() -> None:
    plain, other = steps([0, 1, 2], [0, 1, 2]), steps([0, 1, 2], [0, 1, 2])
    other[0] = changed_tensor(changed_tensor(other[0], "optimizer/w/exp_avg"), "weights/w")
    other[1] = changed_row(other[1], response="other")
    result = verdict(plain, other, overlapped=0)
    assert result.verdict == "differs" and result.difference is not None
    assert (result.difference.step, result.difference.where) == (0, "weights/w")


@pytest.mark.parametrize(
    ("orders", "overlapped", "failures", "words"),
    [
        (([0, 1, 2], [0, 1, 2]), 1, {}, "the same order in every step"),
        (([0, 2, 1], [0, 1, 2]), 0, {}, "only after the last response"),
        (([0, 2, 1], [0, 1, 2]), 1, {"timeout": 2}, "periodic: 1 rows were given up with 2 reward timeouts"),
    ],
)
def test_equal_bits_that_prove_nothing_are_void(orders: Any, overlapped: int, failures: dict[str, int], words: str) -> None:
    result = verdict(steps([0, 1, 2], [0, 1, 2]), steps(*orders), overlapped=overlapped, **failures)
    assert result.verdict == "void" and len(result.reasons) == 1 and words in result.reasons[0]
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
    with pytest.raises(RunError, match="the periodic run left 1 of 2 steps"):
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


def test_the_lead_is_from_the_first_training_to_the_last_complete_group() -> None:
    def span(task: str, number: int, start: float, end: float) -> Span:
        return Span(worker="w", task=task, step=number, start=start, end=end)

    spans = [
        span("generate_group", 0, 0.0, 1.0), span("generate_group", 0, 0.0, 5.0), span("forward_backward", 0, 3.0, 3.5),
        span("forward_backward", 0, 2.0, 3.0), span("generate_group", 1, 6.0, 7.0), span("forward_backward", 1, 8.0, 9.0),
        span("forward_backward", 2, 9.0, 9.5), span("optim_step", 1, 0.0, 0.5),
    ]  # fmt: skip
    assert lead_seconds(spans) == {0: 3.0, 1: -1.0}
