"""Products of linear layers: the numbers of torch's own, and for each row bits of its own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from asyncflow.engines.train.model import products
from asyncflow.engines.train.model.products import (
    add_over_rows,
    adopt,
    filled,
    for_sums,
    over_rows,
    rows_by,
    rows_by_transposed,
    write_rows_by_transposed,
)


@pytest.fixture(params=["torch's own", "oneDNN's"], autouse=True)
def of_each(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On whatever processor this is, both ways."""
    if request.param == "oneDNN's" and not torch._C._has_mkldnn:
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "_TAKES_ONEDNN", request.param == "oneDNN's")


SHAPES = ((128, 64), (64, 281), (576, 128))


def rows(count: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("inputs,outputs", SHAPES)
def test_the_numbers_are_those_of_plain_products(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x_PI, dy_PO, weight_OI = (rows(*shape, dtype=dtype) for shape in ((37, inputs), (37, outputs), (outputs, inputs)))
    bias_O = rows(1, outputs, 3, dtype)[0]
    written_PO, sums_OI = x_PI.new_empty(37, outputs), weight_OI.clone()
    write_rows_by_transposed(written_PO, x_PI, weight_OI, bias_O)
    add_over_rows(sums_OI, dy_PO, x_PI)
    for made, expected in (
        (written_PO, x_PI @ weight_OI.t() + bias_O),
        (sums_OI, weight_OI + dy_PO.t() @ x_PI),
        (rows_by_transposed(x_PI, weight_OI), x_PI @ weight_OI.t()),
        (rows_by_transposed(x_PI, weight_OI, bias_O), x_PI @ weight_OI.t() + bias_O),
        (rows_by(dy_PO, weight_OI), dy_PO @ weight_OI),
        (over_rows(dy_PO, x_PI), dy_PO.t() @ x_PI),
    ):
        own = {torch.float32: {"rtol": 1e-4, "atol": 2e-4}, torch.bfloat16: {"rtol": 0.02, "atol": 0.1}}.get(dtype, {})
        torch.testing.assert_close(made, expected, **own)


@pytest.mark.parametrize("inputs,outputs", SHAPES)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(inputs: int, outputs: int) -> None:
    x_PI, dy_PO, weight_OI = rows(700, inputs), rows(700, outputs, 1), rows(outputs, inputs, 2)
    forward, backward = rows_by_transposed(x_PI, weight_OI), rows_by(dy_PO, weight_OI)
    for begin, count in ((0, 4), (3, 16), (64, 17), (100, 200), (256, 256), (1, 699)):
        part = slice(begin, begin + count)
        assert rows_by_transposed(x_PI[part], weight_OI).equal(forward[part])
        assert rows_by(dy_PO[part], weight_OI).equal(backward[part])


@pytest.mark.parametrize("inputs,outputs", SHAPES)
def test_the_bits_of_a_sum_over_rows_do_not_depend_on_where_they_are(inputs: int, outputs: int) -> None:
    for count in (5, 16, 130):
        dy_PO, x_PI = rows(count, outputs), rows(count, inputs, 1)
        expected = over_rows(dy_PO, x_PI)
        among_O, among_I = rows(400, outputs, 2), rows(400, inputs, 3)
        among_O[77 : 77 + count], among_I[77 : 77 + count] = dy_PO, x_PI
        assert over_rows(among_O[77 : 77 + count], among_I[77 : 77 + count]).equal(expected)
        if inputs * outputs > 2**16:  # of several blocks
            assert over_rows(dy_PO, for_sums(x_PI)).equal(expected)
            assert over_rows(dy_PO[:, 5:77], for_sums(x_PI)).equal(over_rows(dy_PO[:, 5:77], x_PI))


def test_rows_are_filled_up_to_one_of_few_numbers() -> None:
    assert [filled(count) for count in (1, 16, 17, 130, 257, 1000, 2049)] == [16, 16, 32, 144, 288, 1024, 2304]
    numbers = {filled(count) for count in range(1, 8193)}
    assert len(numbers) < 80 and all(filled(number) == number for number in numbers)
    assert all(filled(count) <= max(count + 15, 1.125 * count) for count in range(1, 8193))


def test_layers_that_are_adopted_have_the_same_gradients() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8, bias=False))
    ours = copy.deepcopy(plain)
    adopt(ours)
    ours = copy.deepcopy(ours)  # and in a copy, of its own weights
    x = rows(2 * 19, 24).view(2, 19, 24)
    made = []
    for model in (plain, ours):
        inputs = x.clone().requires_grad_()
        model(inputs).square().sum().backward()
        made.append([inputs.grad, *(parameter.grad for parameter in model.parameters())])
    for theirs, own in zip(*made, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        ours[0].weight.zero_()
        assert ours(x).equal(ours[2](torch.tanh(ours[0].bias).expand(2, 19, 40)))
