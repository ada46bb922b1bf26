"""Sums and norms whose bits are those of exact arithmetic on the grid, whatever the order, the pieces and the chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncflow.engines.train import accumulate
from asyncflow.engines.train.accumulate import (
    GRADIENT_GRID,
    LARGEST_CHUNK,
    Accumulator,
    Grid,
    RangeError,
    add_rounded,
    largest_magnitude,
    make_accumulator,
    norm_of,
    order_free_norm,
    sum_of_squares,
)
from asyncflow.types import RunError
from tests.depth import few

FINITE = st.floats(-1000, 1000, width=32)


def parameter(num_elements: int) -> Tensor:
    return torch.nn.Parameter(torch.zeros(num_elements))


def add(accumulator: Accumulator, parameters: dict[str, Tensor], **gradients: Tensor) -> None:
    """One micro-batch."""
    torch.autograd.backward([parameters[name] for name in gradients], [gradient.clone() for gradient in gradients.values()])
    accumulator.add()


def summed(kind: str, addends: Sequence[Tensor], normaliser: int = 1) -> Tensor:
    parameters = {"weight": parameter(len(addends[0]))}
    accumulator = make_accumulator(kind, parameters)
    for addend in addends:
        add(accumulator, parameters, weight=addend)
    return accumulator.gradients(normaliser)[0]


def wide_gradients(seed: int, num_gradients: int, num_elements: int) -> list[Tensor]:
    """float32 [num_elements] each, of all magnitudes from far below the grid up to hundreds."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(num_gradients, num_elements)) * 2.0 ** rng.integers(-45, 7, (num_gradients, num_elements))
    return list(torch.tensor(values, dtype=torch.float32))


@given(st.lists(st.lists(FINITE, min_size=3, max_size=3), min_size=1, max_size=8), st.randoms(use_true_random=False))
@settings(max_examples=few(20, 100), deadline=None)
def test_sums_are_those_of_exact_arithmetic_on_the_grid(rows: list[list[float]], random: Random) -> None:
    addends = torch.tensor(rows)
    random.shuffle(rows)
    steps = [sum(round(Fraction(row[element]) / Fraction(GRADIENT_GRID.spacing)) for row in rows) for element in range(3)]
    sums = torch.zeros(3, dtype=torch.float64)
    for addend in addends:
        add_rounded(sums, addend, GRADIENT_GRID)
    assert [Fraction(total) for total in sums.tolist()] == [step * Fraction(GRADIENT_GRID.spacing) for step in steps]


@given(st.integers(0, 2**32), st.permutations(range(12)), st.lists(st.integers(0, 12), max_size=3).map(sorted))
@settings(max_examples=few(10, 50), deadline=None)
def test_no_order_and_no_sharding_over_processes_changes_a_bit(seed: int, order: list[int], cuts: list[int]) -> None:
    addends = wide_gradients(seed, 12, 50)
    whole = torch.zeros(50, dtype=torch.float64)
    for addend in addends:
        add_rounded(whole, addend, GRADIENT_GRID)
    parts = torch.zeros(len(cuts) + 1, 50, dtype=torch.float64)
    for begin, end, part in zip([0, *cuts], [*cuts, 12], parts, strict=True):
        for i in order[begin:end]:
            add_rounded(part, addends[i], GRADIENT_GRID)
    assert parts.sum(0).equal(whole)
    assert summed("exact", [addends[i] for i in order], 7).equal((whole / 7).float())


def test_plain_sums_do_depend_on_the_order() -> None:
    addends = wide_gradients(0, 12, 50)
    assert summed("exact", addends).equal(summed("exact", addends[::-1]))
    assert not summed("fp32", addends).equal(summed("fp32", addends[::-1]))
    torch.testing.assert_close(summed("exact", addends), summed("fp32", addends), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "same"), [("exact", True), ("fp32", False)])
def test_training_in_another_order_of_micro_batches(kind: str, same: bool) -> None:
    def trained(order: Sequence[int]) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
        model[2].weight = model[0].weight  # tied: used twice, once in the sums
        accumulator = make_accumulator(kind, dict(model.named_parameters()))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
        inputs = torch.randn(3, 8, 5, 8, generator=torch.Generator().manual_seed(1))
        for step in range(3):
            for i in order:
                model(inputs[step, i]).square().sum().backward()
                accumulator.add()
            gradients = accumulator.gradients(40)
            torch._foreach_mul_(gradients, min(1.0, 0.1 / order_free_norm(gradients)))
            optimizer.step()
            accumulator.clear()
        return [p.detach() for p in model.parameters()]

    ours, theirs = trained(range(8)), trained([5, 2, 7, 0, 1, 6, 4, 3])
    assert len(ours) == 3
    assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True)) == same


def test_the_gradients_of_uneven_micro_batches_of_a_tied_weight_are_autograds_own() -> None:
    weight = torch.nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    accumulator = make_accumulator("exact", {"weight": weight})
    for part in inputs.split([1, 3]):
        (part @ weight @ weight).sum().backward()
        accumulator.add()
        assert weight.grad is None
    (expected,) = torch.autograd.grad((inputs @ weight @ weight).sum(), weight)
    (gradient,) = accumulator.gradients(4)
    assert gradient is weight.grad and gradient.dtype == torch.float32
    torch.testing.assert_close(gradient, expected / 4, rtol=1e-5, atol=1e-6)


def test_the_sum_is_divided_once_in_float64() -> None:
    addends = wide_gradients(3, 5, 400)
    exact = torch.stack(addends).double().div(GRADIENT_GRID.spacing).round().mul(GRADIENT_GRID.spacing).sum(0)
    assert summed("exact", addends, 7).equal((exact / 7).float())
    assert not summed("exact", addends, 7).equal(exact.float() / 7)
    assert summed("fp32", addends, 7).equal(summed("fp32", addends) / 7)


@pytest.mark.parametrize("kind", ["exact", "fp32"])
def test_a_parameter_without_a_gradient_is_left_out(kind: str) -> None:
    parameters = {"first": parameter(2), "unused": parameter(2), "empty": parameter(0), "last": parameter(2)}
    accumulator = make_accumulator(kind, parameters)
    assert accumulator.gradients(1) == []
    add(accumulator, parameters, last=torch.tensor([4.0, 0.0]), empty=torch.zeros(0))
    add(accumulator, parameters, first=torch.tensor([2.0, 2.0]))
    gradients = accumulator.gradients(2)
    assert [gradient.tolist() for gradient in gradients] == [[1, 1], [], [2, 0]]
    assert all(p.grad is g for p, g in zip([parameters[name] for name in ("first", "empty", "last")], gradients, strict=True))
    assert parameters["unused"].grad is None


@pytest.mark.parametrize("kind", ["exact", "fp32"])
def test_nothing_is_left_after_clear(kind: str) -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            raise ArithmeticError("planted")

    early, late = parameter(3), parameter(3)
    parameters = {"early": early, "late": late}
    accumulator = make_accumulator(kind, parameters)
    add(accumulator, parameters, early=torch.ones(3), late=torch.ones(3))
    with pytest.raises(ArithmeticError, match="planted"):
        (Broken.apply(early * 2) + late).sum().backward()
    assert late.grad is not None  # the failure left half a micro-batch
    accumulator.clear()
    assert early.grad is None and late.grad is None and accumulator.gradients(1) == []
    add(accumulator, parameters, early=torch.full((3,), 5.0))
    assert [gradient.tolist() for gradient in accumulator.gradients(1)] == [[5, 5, 5]] and late.grad is None


@pytest.mark.parametrize("sign", [1, -1])
def test_an_addend_out_of_range_is_named(sign: int) -> None:
    parameters = {"small": parameter(2), "large": parameter(2)}
    accumulator = make_accumulator("exact", parameters)
    add(accumulator, parameters, large=torch.tensor([0.0, sign * 2.0**15]))  # the last that fits
    with pytest.raises(RangeError, match=r"gradient of large has an entry of magnitude 3\.28e\+04.* fp32") as caught:
        add(accumulator, parameters, small=torch.ones(2), large=torch.tensor([0.0, sign * 2.0**15 * (1 + 2**-23)]))
    assert isinstance(caught.value, RunError)
    accumulator.clear()
    add(accumulator, parameters, large=torch.ones(2))
    assert accumulator.gradients(1)[0].tolist() == [1, 1]


@given(st.permutations([2.0**15, -(2.0**15), 2.0**15, 2.0**15 - 2.0**-8, 2.0**-8 - 2.0**-30]))
@settings(deadline=None)
def test_a_sum_that_could_leave_the_range_is_refused_in_every_order(addends: list[float]) -> None:
    parameters = {"weight": parameter(1)}
    accumulator = make_accumulator("exact", parameters)
    for _ in range(2):
        for addend in addends:  # all together, the magnitudes fit by a hair
            add(accumulator, parameters, weight=torch.tensor([addend]))
        with pytest.raises(RangeError, match=r"gradients of weight could add up to 1\.31e\+05, .* fp32"):
            add(accumulator, parameters, weight=torch.tensor([2.0**-7]))
        accumulator.clear()


@pytest.mark.parametrize("kind", ["exact", "fp32"])
def test_joined_sums_are_those_of_one_accumulator(kind: str) -> None:
    sums = []
    for has_other in (False, True):
        parameters = {"both": parameter(3), "one": parameter(2), "none": parameter(1)}
        own = other = make_accumulator(kind, parameters)
        of_other = parameters
        if has_other:
            of_other = {name: parameter(len(each)) for name, each in parameters.items()}
            other = make_accumulator(kind, of_other)
        add(own, parameters, both=torch.tensor([1.0, 2**-20, -3.0]))
        add(other, of_other, both=torch.tensor([0.5, 2**-21, 3.0]), one=torch.tensor([7.0, -2.0]))
        if has_other:
            own.join(other)
            assert other.gradients(1) == [] and all(each.grad is None for each in of_other.values())
        sums.append([gradient.tolist() for gradient in own.gradients(4)])
    assert sums[0] == sums[1] == [[0.375, 1.5 * 2**-22, 0.0], [1.75, -0.5]]


def test_joined_sums_are_refused_where_those_of_one_would_be() -> None:
    parameters, of_other = {"weight": parameter(1)}, {"weight": parameter(1)}
    own, other = make_accumulator("exact", parameters), make_accumulator("exact", of_other)
    for _ in range(2):
        add(own, parameters, weight=torch.tensor([2.0**15]))
        add(other, of_other, weight=torch.tensor([-(2.0**15)]))
    own.join(other)  # the magnitudes fit
    add(other, of_other, weight=torch.tensor([2.0**-7]))
    with pytest.raises(RangeError, match=r"gradients of weight could add up to 1\.31e\+05, .* fp32"):
        own.join(other)


@pytest.mark.parametrize("kind", ["exact", "fp32"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_and_raises_nothing(kind: str, bad: float) -> None:
    parameters = {"bad": parameter(3), "good": parameter(3)}
    accumulator = make_accumulator(kind, parameters)
    for value in (1.0, bad, 1.0):
        add(accumulator, parameters, bad=torch.tensor([0.0, value, 0.0]), good=torch.ones(3))
    gradients = accumulator.gradients(1)
    assert gradients[0].isfinite().tolist() == [True, False, True] and gradients[1].tolist() == [3, 3, 3]
    assert not math.isfinite(accumulator.norm(gradients)) and not math.isfinite(order_free_norm(gradients))
    accumulator.clear()
    add(accumulator, parameters, bad=torch.ones(3))
    assert accumulator.gradients(1)[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_addends_of_every_dtype_and_layout(dtype: torch.dtype) -> None:
    addend = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(dtype).t()
    sums = torch.zeros(4, 6, dtype=torch.float64)
    extremes = add_rounded(sums, addend, GRADIENT_GRID)
    assert sums.equal((addend.double() / GRADIENT_GRID.spacing).round() * GRADIENT_GRID.spacing)
    assert torch.stack(extremes).tolist() == [addend.min().item(), addend.max().item()]


def test_bfloat16_gradients_of_float32_parameters() -> None:
    weight = parameter(3)
    weight.grad_dtype = None  # as a sharded backward in bfloat16 leaves them
    accumulator = make_accumulator("exact", {"weight": weight})
    for value in (1.0, 2.0**-9, 2.0**-9):  # in bfloat16 the small ones would be lost beside the 1
        weight.grad = torch.full((3,), value, dtype=torch.bfloat16)
        accumulator.add()
    (gradient,) = accumulator.gradients(1)
    assert gradient.dtype == torch.float32 and gradient.tolist() == [1 + 2.0**-8] * 3


def test_no_bit_depends_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    addends = wide_gradients(1, 3, 5000)
    seen = set()
    for chunk in (1, 7, 64, 4999, 5000, LARGEST_CHUNK):
        monkeypatch.setattr(accumulate, "CHUNK_ELEMENTS", chunk)
        gradient = summed("exact", addends, 3)
        seen.add((gradient.numpy().tobytes(), order_free_norm([gradient])))
    assert len(seen) == 1


@given(st.integers(0, 2**32), st.permutations(range(200)), st.lists(st.integers(0, 200), max_size=3).map(sorted))
@settings(max_examples=few(10, 50), deadline=None)
def test_the_norm_does_not_depend_on_order_or_cut(seed: int, order: list[int], cuts: list[int]) -> None:
    (gradient,) = wide_gradients(seed, 1, 200)
    parts = list(gradient[order].tensor_split(cuts))
    expected = order_free_norm([gradient])
    assert order_free_norm(parts) == expected
    # As processes do it, which hold one part each.
    largest = max(largest_magnitude([part]) for part in parts)
    assert norm_of(sum(sum_of_squares([part], largest) for part in parts), largest) == expected


def true_norm(values: np.ndarray) -> float:
    return math.sqrt(math.fsum((values.astype(np.float64) ** 2).tolist()))


@pytest.mark.parametrize("scale", [2.0**-145, 2.0**-90, 1e-8, 1.0, 2.0**120])
def test_the_norm_is_right(scale: float) -> None:
    rng = np.random.default_rng(0)
    normal = rng.normal(size=300_000)
    one_large = np.full(300_000, 1.1e-5)  # squares that a single grid for all would lose beside that of the large one
    one_large[1000] = 1.0
    wide = normal * 2.0 ** rng.integers(-30, 1, 300_000)
    for values in (normal, one_large, wide, np.ones(1), np.array([1.0, 2.0**-20])):
        gradient = torch.tensor(values * scale, dtype=torch.float32)
        expected = true_norm(gradient.numpy())
        assert abs(order_free_norm([gradient]) / expected - 1) < 1e-9


def test_norms_of_nothing_of_zeros_and_of_what_is_not_finite() -> None:
    assert order_free_norm([]) == order_free_norm([torch.zeros(0)]) == order_free_norm([torch.zeros(3), torch.zeros(2)]) == 0
    assert order_free_norm([torch.ones(2), torch.tensor([1.0, -math.inf])]) == math.inf
    assert math.isnan(order_free_norm([torch.tensor([math.nan, math.inf]), torch.ones(2)]))
    # A process whose own part is finite learns of it by the largest magnitude.
    assert norm_of(sum_of_squares([torch.ones(2)], math.inf), math.inf) == math.inf


@given(st.integers(0, 2**32))
@settings(max_examples=few(10, 50), deadline=None)
def test_squares_are_summed_exactly_on_their_grid(seed: int) -> None:
    (gradient,) = wide_gradients(seed, 1, 200)
    largest = largest_magnitude([gradient])
    step = Fraction(2) ** (2 * math.frexp(largest)[1] - 66)
    assert sum_of_squares([gradient], largest) == sum(round(Fraction(value) ** 2 / step) for value in gradient.tolist())


def test_a_chunk_of_the_largest_size_is_summed_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulate, "CHUNK_ELEMENTS", LARGEST_CHUNK)
    # All close to the bound that the grids are made for: k * 2**-23 < 2, whose squares end at 2**-46, in steps of 2**(2 - 66).
    k = np.random.default_rng(0).integers(2**24 - 2**20, 2**24, LARGEST_CHUNK, np.uint64)
    squares = int((k * k >> np.uint64(24)).sum()) * 2**24 + int((k * k % np.uint64(2**24)).sum())
    assert sum_of_squares([torch.tensor(k * 2.0**-23, dtype=torch.float32)], 2.0 - 2.0**-23) == squares * 2**18


def test_rounding_at_the_edges_of_a_grid() -> None:
    grid = Grid(0.25)
    values = torch.tensor(
        [0.125, 0.375, -0.125, -0.375, 0.1251, grid.largest_addend, -grid.largest_addend, 0.0], dtype=torch.float64
    )
    expected = [0.0, 0.5, 0.0, -0.5, 0.25, grid.largest_addend, -grid.largest_addend, 0.0]  # halves go to the even multiple
    assert grid.round_(values.clone()).tolist() == expected
    assert not grid.round_(values).signbit()[[2, 7]].any()  # a zero has one sign, or its bits would tell the order


@pytest.mark.parametrize("kind", ["exact", "fp32"])
def test_the_norm_is_that_of_all_elements_however_many_and_unlike_they_are(kind: str) -> None:
    sums, gradients = (
        make_accumulator(kind, {}),
        [torch.randn(3_000_001), torch.randn(7, 11).T * 1e4, torch.zeros(0), torch.zeros(2)],
    )
    expected = torch.cat([gradient.reshape(-1) for gradient in gradients]).double().norm().item()
    assert sums.norm(gradients) == pytest.approx(expected, rel=1e-6)
    assert sums.norm([]) == sums.norm([torch.zeros(0)]) == sums.norm([torch.zeros(3)]) == 0.0
    for bad, others in ((math.nan, torch.ones(2)), (math.inf, torch.ones(2)), (math.nan, torch.tensor([math.inf]))):
        for order in ([torch.tensor([1.0, bad]), others], [others, torch.tensor([bad])]):
            assert not math.isfinite(sums.norm(order))
