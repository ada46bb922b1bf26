"""Helpers: threads that take passes, and pieces of one, beside the compute thread, with the same bits, and only while they may."""

import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, cast

import pytest
import torch
from torch import nn

from asyncflow.engines.train import helpers as module_of_helpers
from asyncflow.engines.train.accumulate import make_accumulator, order_free_norm
from asyncflow.engines.train.helpers import Helpers
from asyncflow.engines.train.optimizer import Optimizer
from asyncflow.engines.train.pass_gradients import PassGradients
from asyncflow.engines.train.passes import Passes
from asyncflow.engines.train.pieces import AT_ONCE
from asyncflow.types import LoraSpec
from tests.patience import patience
from tests.unit.engines.train.conftest import micro_batch
from tests.unit.engines.train.test_pass_gradients import batches, with_entropy
from tests.unit.engines.train.training import (
    ModelPath,
    Sum,
    assert_same,
    hold_back,
    leave_pieces_to_helpers,
    policy_gradient,
    torch_engine,
    train_options,
    untied,
    weights_of,
)

T = TypeVar("T")

OWN, OTHERS = object(), [object(), object()]
"""Of tests without a model: what the compute thread and two helpers compute with."""


def as_passes(each: object) -> Passes:
    return each  # type: ignore[return-value]


@contextmanager
def helpers(allowed: int = 0) -> Iterator[Helpers]:
    made = Helpers([as_passes(each) for each in OTHERS], num_threads=1)
    made.allow(range(allowed))
    yield made
    made.close()


async def trained(path: Path, passes_of_helpers: int, **changes: Any) -> tuple[Any, Any, list[Any]]:
    """Two updates: hashes of weights and optimiser, weights, and results. Of each round the helpers compute `passes_of_helpers`
    passes at least: the compute thread waits for them."""
    options = {"accumulate": "exact", "learning_rate": 1e-3, "tokens_per_pass": 40, "check_shared_prompt": False}
    engine = torch_engine(path, **{**options, "helpers": ("cpu",) * min(2, passes_of_helpers), **changes})
    if passes_of_helpers:
        hold_back(engine, passes_of_helpers)
    results = []
    for _ in range(2):
        await engine.begin_step()
        for some in (batches()[:4], batches()[4:]):
            results += await engine.forward_backward(some, Sum(with_entropy))
        await engine.optim_step(40)
    found, weights = await engine.fingerprint(), await weights_of(engine)
    await engine.close()
    return found, weights, results


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2-tiny", {}),
        ("qwen3-tiny", {"tokens_per_pass": None, "has_reference": True}),
        ("llama-tiny", {"dtype": "bfloat16", "old": "step_start", "activation_checkpointing": True}),
        ("qwen2-tiny", {"lora": LoraSpec(rank=2, alpha=4.0, targets=("q_proj", "down_proj")), "has_reference": True}),
        ("qwen2-tiny", {"lora": LoraSpec(rank=2, alpha=4.0, targets=("q_proj", "down_proj")), "old": "step_start"}),
    ],
)
async def test_bits_do_not_depend_on_who_has_computed_a_pass(name: str, changes: dict[str, Any], model_path: ModelPath) -> None:
    expected, _, results = await trained(model_path(name), 0, **changes)
    for count in (1, 2):
        found, _, of_helped = await trained(model_path(name), count, **changes)
        assert of_helped == results
        assert found == expected, [key for key in found if found[key] != expected[key]]


async def test_plain_sums_are_those_without_helpers_but_for_rounding(model_path: ModelPath) -> None:
    _, expected, results = await trained(model_path("qwen2-tiny"), 0, accumulate="fp32")
    _, found, of_helped = await trained(model_path("qwen2-tiny"), 2, accumulate="fp32")
    assert of_helped[:7] == results[:7]  # of the first update: the second one's weights differ in the last bits
    assert found.keys() == expected.keys()
    for key, weight in found.items():
        if not key.endswith("k_proj.bias"):  # whose gradient is rounding error alone
            assert weight.allclose(expected[key], atol=1e-5), key


async def test_what_helpers_have_added_is_gone_when_a_step_is_discarded(model_path: ModelPath) -> None:
    norms = []
    for has_discarded in (False, True):
        engine = torch_engine(
            model_path("qwen2-tiny"), accumulate="exact", helpers=("cpu",), tokens_per_pass=30, check_shared_prompt=False
        )
        if has_discarded:
            hold_back(engine, 1)
            await engine.forward_backward(batches(), Sum(policy_gradient))
            await engine.discard()
        await engine.forward_backward([micro_batch(9)], Sum(policy_gradient))
        norms.append((await engine.optim_step(8)).grad_norm)
        await engine.close()
    assert norms[0] == norms[1]


async def test_helpers_read_the_weights_that_an_update_has_made(model_path: ModelPath) -> None:
    engine = torch_engine(model_path("qwen2-tiny"), helpers=("cpu",), learning_rate=1e-2)
    before = await weights_of(engine)
    await engine.forward_backward([micro_batch(0)], Sum(policy_gradient))
    await engine.optim_step(8)
    after = await weights_of(engine)
    made = engine.helpers
    assert made is not None
    assert_same(after, dict(made.passes[0].policy.parameters))
    assert any(not after[name].equal(before[name]) for name in after)
    await engine.close()


@pytest.mark.parametrize("accumulate", ["exact", "fp32"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2-tiny", {}),
        ("llama-tiny", {"dtype": "bfloat16", "activation_checkpointing": True}),
        ("untied", {"log_prob_chunk_tokens": 16}),
        ("qwen2-tiny", {"lora": LoraSpec(rank=2, alpha=4.0, targets=("q_proj", "down_proj"))}),
    ],
)
async def test_helpers_take_pieces_of_the_only_pass_and_of_the_update_with_the_same_bits(
    name: str, changes: dict[str, Any], accumulate: str, model_path: ModelPath, tmp_path: Path
) -> None:
    path = untied(model_path("qwen2-tiny"), tmp_path / "untied") if name == "untied" else model_path(name)
    found, done = [], []
    for count in (0, 2):
        engine = torch_engine(
            path,
            **{"learning_rate": 1e-2, "tokens_per_pass": 200, "check_shared_prompt": False, "max_grad_norm": 0.1, **changes},
            accumulate=accumulate,
            helpers=("cpu",) * count,
        )
        takers: list[str] = []
        if (made := engine.helpers) is not None:
            made.allow(range(2))
            takers = leave_pieces_to_helpers(made)
        for number in range(2):
            await engine.begin_step()
            done.append(await engine.forward_backward([micro_batch(number, (9, 4, 7), 6)], Sum(with_entropy)))
            in_pass = len(takers)
            await engine.optim_step(8)
            assert not count or 0 < in_pass < len(takers)
            assert all(taker.startswith("train-helper") for taker in takers)
            takers.clear()
        found.append(await engine.fingerprint())
        await engine.close()
    assert done[:2] == done[2:]
    assert found[0] == found[1], [key for key in found[0] if found[0][key] != found[1][key]]


@pytest.mark.parametrize("accumulate", ["exact", "fp32"])
@pytest.mark.parametrize("name", ["qwen2-tiny", "llama-tiny"])
async def test_helpers_take_rows_of_a_forward_pass_with_the_same_bits(
    name: str, accumulate: str, model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has biases. A part of rows is left to a helper."""
    monkeypatch.setattr(module_of_helpers, "LEAST_WORK", 1)
    take, product = module_of_helpers._HelperCall.take, PassGradients.product
    found, done, shapes = [], [], set()
    for count in (0, 1, 2):
        engine = torch_engine(
            model_path(name),
            learning_rate=1e-2,
            tokens_per_pass=400,
            check_shared_prompt=False,
            accumulate=accumulate,
            helpers=("cpu",) * count,
        )
        if (made := engine.helpers) is not None:
            made.allow(range(count))

        def noted(to: PassGradients, *arguments: Any, count: int = count) -> torch.Tensor:
            shapes.add((count, len(to.pieces.parts(len(arguments[0]), arguments[0].numel()))))
            return product(to, *arguments)

        def patient(other: Any, seconds: float) -> torch.Tensor:
            with other._helpers._changed:
                assert other._helpers._changed.wait_for(lambda: other._is_begun, patience(60))
            rows = take(other, patience(60))
            assert rows is not None
            return rows

        with monkeypatch.context() as patched:
            patched.setattr(PassGradients, "product", noted)
            patched.setattr(module_of_helpers._HelperCall, "take", patient)
            done.append(await engine.forward_backward([micro_batch(0, (19, 24, 47), 26)], Sum(with_entropy)))
        await engine.optim_step(8)
        found.append(await engine.fingerprint())
        await engine.close()
    assert shapes == {(0, 1), (1, 2), (2, 3)}
    assert done[0] == done[1] == done[2]
    assert found[0] == found[1] == found[2], [key for key in found[0] if not found[0][key] == found[1][key] == found[2][key]]


def test_rows_are_cut_where_vectors_begin_and_only_for_who_takes_them() -> None:
    with helpers() as made:
        pieces = made.pieces()
        assert pieces.parts(1000, 1 << 40) == [slice(0, 1000)]
        made.allow(range(2))
        assert pieces.parts(1000, 1 << 40) == [slice(0, 336), slice(336, 672), slice(672, 1000)]
        assert pieces.parts(1000, module_of_helpers.LEAST_WORK * 2) == [slice(0, 512), slice(512, 1000)]
        assert pieces.parts(1000, module_of_helpers.LEAST_WORK) == [slice(0, 1000)]
        assert pieces.parts(0, 0) == [slice(0, 0)]
        for rows in range(1, 200):
            parts = pieces.parts(rows, 1 << 40)
            assert [row for part in parts for row in range(rows)[part]] == [*range(rows)]
            assert all(part.start % 16 == 0 and part.stop - part.start >= 16 for part in parts) or parts == [slice(0, rows)]
        made.late_until = math.inf
        assert pieces.parts(1000, 1 << 40) == [slice(0, 1000)]
    assert AT_ONCE.parts(1000, 1 << 40) == [slice(0, 1000)]


def test_rows_that_come_too_late_are_not_waited_for_and_none_are_cut_for_a_while() -> None:
    begun, may_end, done = threading.Event(), threading.Event(), threading.Event()

    def slow() -> torch.Tensor:
        begun.set()
        assert may_end.wait(patience(60))
        return torch.ones(1)

    with helpers(1) as made:
        pieces, result = made.pieces(), torch.ones(1)
        assert pieces.share(lambda: result).take(patience(60)) in (result, None)  # whether it has begun by then, or not
        late = pieces.share(slow)
        assert begun.wait(patience(60))
        assert late.take(0.0) is None and made.late_until > time.monotonic()
        never = pieces.share(lambda: (done.set(), result)[1])
        assert never.take(patience(60)) is None  # the helper is busy, so it is left out at once
        may_end.set()
        pieces.add(lambda: None)
        pieces.end()
    assert not done.is_set()
    assert AT_ONCE.share(lambda: result).take(1.0) is None


def test_rows_that_nobody_is_to_compute_any_more_are_not_held() -> None:
    """Their part stands among the pieces until a helper comes to it, which may be much later."""
    has_begun, may_end = threading.Event(), threading.Event()
    with helpers(allowed=1) as made:
        pieces, rows = made.pieces(), torch.ones(3)
        pieces.add(lambda: (has_begun.set(), may_end.wait(patience(60))))
        assert has_begun.wait(patience(60))
        part, is_held = pieces.share(partial(torch.neg, rows)), weakref.ref(rows)
        del rows
        assert is_held() is not None and len(made._waiting) == 1
        assert part.take(0.0) is None
        assert is_held() is None and len(made._waiting) == 1
        may_end.set()
        pieces.end()


@pytest.mark.parametrize("kind", ["exact", "fp32"])
def test_no_bit_of_an_update_depends_on_who_computes_its_pieces(kind: Literal["exact", "fp32"]) -> None:
    updated, options = [], train_options(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.1)
    for allowed in (0, 1, 2):
        generator = torch.Generator().manual_seed(0)
        parameters = {str(n): nn.Parameter(torch.randn(n, generator=generator)) for n in (300_017, 70_001, 5)}
        sums, others = make_accumulator(kind, parameters), make_accumulator(kind, _alike(parameters))
        optimizer = Optimizer(parameters, options)
        with helpers(allowed) as made:
            sums.pieces = optimizer.pieces = made.pieces()
            for _ in range(2):
                for each in (sums, others):
                    for parameter in each._parameters.values():
                        parameter.grad = torch.randn(parameter.shape, generator=generator)
                    each.add()
                sums.join(others)
                gradients = sums.gradients(3)
                assert not optimizer.update(gradients, sums.norm(gradients)).skipped
                sums.clear()
        updated.append(torch.cat([p.detach() for p in parameters.values()]))
    assert updated[0].equal(updated[1]) and updated[0].equal(updated[2])


def _alike(parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(parameter.detach()) for name, parameter in parameters.items()}


async def test_a_norm_that_is_not_finite_is_told_whatever_is_beside_it() -> None:
    whole, broken = torch.ones(3), torch.tensor([1.0, float("nan")])
    assert all(math.isnan(order_free_norm(each)) for each in ([whole, broken], [broken, whole]))
    assert order_free_norm([]) == 0.0 and order_free_norm([whole, torch.tensor([-math.inf])]) == math.inf


def test_without_leave_who_adds_a_piece_computes_it() -> None:
    with helpers() as made:
        pieces, takers = made.pieces(), list[str]()
        pieces.add(lambda: takers.append(threading.current_thread().name))
        assert takers == [threading.current_thread().name]
        pieces.end()


def test_pieces_of_the_last_pass_go_to_who_has_none_left() -> None:
    with helpers(allowed=1) as made:
        pieces, takers, is_waiting = made.pieces(), list[str](), threading.Event()

        def by(passes: Passes, number: int) -> object:
            if passes is OTHERS[0]:
                assert is_waiting.wait(patience(60))
                for _ in range(3):
                    while not made._is_waiting:
                        time.sleep(0.001)
                    computed = threading.Event()
                    pieces.add(lambda computed=computed: takers.append(threading.current_thread().name) or computed.set())
                    assert computed.wait(patience(60))
                pieces.end()
            else:
                is_waiting.set()
                while not made._taken:  # the helper has the other pass
                    time.sleep(0.001)
            return passes

        assert made.compute(2, by, as_passes(OWN)) == [OWN, OTHERS[0]]
        assert takers == [threading.current_thread().name] * 3


def test_a_helper_whose_leave_ends_takes_no_other_piece() -> None:
    with helpers(allowed=1) as made:
        pieces, takers, has_begun, may_end = made.pieces(), list[str](), threading.Event(), threading.Event()

        def first() -> None:
            has_begun.set()
            assert may_end.wait(patience(60))

        def other() -> None:
            takers.append(threading.current_thread().name)

        pieces.add(first)
        assert has_begun.wait(patience(60))
        pieces.add(other)  # waits for the helper
        made.allow(())
        pieces.add(other)
        may_end.set()
        with made._changed:
            assert made._changed.wait_for(lambda: pieces.num_left == 1, patience(60))  # type: ignore[attr-defined]
        time.sleep(0.05)
        assert len(takers) == 1  # nobody has taken the other one
        pieces.end()
        assert takers == [threading.current_thread().name] * 2


def test_no_graph_is_made_of_what_a_helper_computes() -> None:
    with helpers(allowed=1) as made:
        pieces, told = made.pieces(), queue.SimpleQueue[bool]()
        pieces.add(lambda: told.put(torch.is_grad_enabled()))
        assert told.get(timeout=patience(60)) is False
        pieces.end()


def test_gradients_of_one_matrix_are_added_one_after_another(model_path: ModelPath) -> None:
    """Layers may have a matrix in common."""
    inside: list[int] = []

    class Sums:
        def add_products(self, name: str, *_: Any) -> None:
            inside.append(1)
            time.sleep(0.02)
            overlaps.append(sum(inside) > 1)
            inside.pop()

    with helpers(allowed=2) as made:
        overlaps: list[bool] = []
        model = Passes(model_path("qwen2-tiny"), train_options()).policy
        gradients = PassGradients(model, cast(Any, Sums()))
        gradients.pieces = made.pieces()
        for _ in range(4):
            gradients._add_products(next(iter(model.parameters)))
        gradients.pieces.end()
        assert overlaps == [False] * 4


@pytest.mark.parametrize("kind", ["exact", "fp32"])
def test_a_gradient_of_the_whole_head_waits_for_a_piece_of_it(
    kind: Literal["exact", "fp32"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper is adding the piece when the pass's thread comes with another micro-batch's gradient."""
    head = nn.Linear(1, 1, bias=False)
    module = nn.Sequential(head)
    module.get_output_embeddings, module.get_input_embeddings = lambda: head, lambda: None  # type: ignore[assignment]
    model = SimpleNamespace(module=module, parameters={"head": head.weight}, device=torch.device("cpu"))
    sums, is_inside, overlaps = make_accumulator(kind, model.parameters), threading.Event(), []
    add_products, add_whole, has_come = sums.add_products, sums.add_whole, threading.Event()

    def slow(*arguments: Any) -> None:
        is_inside.set()
        overlaps.append(has_come.wait(patience(0.2)))
        add_products(*arguments)
        is_inside.clear()

    def whole(*arguments: Any) -> None:
        if is_inside.is_set() and threading.current_thread() is threading.main_thread():
            has_come.set()
        add_whole(*arguments)

    monkeypatch.setattr(sums, "add_products", slow)
    monkeypatch.setattr(sums, "add_whole", whole)
    with helpers(allowed=1) as made:
        gradients = PassGradients(cast(Any, model), sums)
        gradients.pieces = made.pieces()
        gradients.add_head(torch.full((1, 1), 5.0), torch.ones(1, 1), [(0, slice(0, 1))])
        assert is_inside.wait(patience(60))
        gradients.add_head_whole(1, torch.full((1, 1), 100.0))
        gradients.pieces.end()
    (gradient,) = sums.gradients(1)
    assert overlaps == [False] and gradient.item() == 105.0


def test_the_error_of_a_piece_is_raised_where_its_end_is_waited_for() -> None:
    with helpers(allowed=1) as made:
        pieces, has_failed = made.pieces(), threading.Event()

        def fails() -> None:
            has_failed.set()
            raise ArithmeticError("a piece")

        pieces.add(fails)
        assert has_failed.wait(patience(60))
        with pytest.raises(ArithmeticError, match="a piece"):
            pieces.end()
        pieces.end()


def test_helpers_tell_of_their_pieces_together() -> None:
    with helpers(allowed=1) as made:
        told: queue.SimpleQueue[float] = queue.SimpleQueue()
        made.on_pass = lambda start, end: told.put(end - start)
        pieces, seconds = made.pieces(), 0.05
        for _ in range(3):
            pieces.add(partial(time.sleep, seconds))
        with made._changed:
            assert made._changed.wait_for(lambda: not pieces.num_left, patience(60))  # type: ignore[attr-defined]
        assert told.get(timeout=patience(60)) >= 3 * seconds
        assert told.empty()


def test_without_leave_the_compute_thread_does_all_itself() -> None:
    with helpers() as made:
        for count in (5, 0):  # a round of which nothing is to be computed
            found = made.compute(count, lambda passes, number: (passes, number), as_passes(OWN))
            assert found == [(OWN, number) for number in range(count)]


def test_results_are_in_order_whoever_computes() -> None:
    with helpers(allowed=2) as made:
        together = threading.Barrier(3)

        def by(passes: Passes, number: int) -> tuple[object, int]:
            if number < 3:
                together.wait(patience(60))  # three threads are at work
            return passes, number

        found = made.compute(9, by, as_passes(OWN))
    assert [number for _, number in found] == [*range(9)]
    assert {passes for passes, _ in found[:3]} == {OWN, *OTHERS}


def test_a_helper_whose_leave_ends_takes_no_other_pass() -> None:
    with helpers(allowed=1) as made:
        has_begun, may_end = threading.Event(), threading.Event()

        def by(passes: Passes, number: int) -> object:
            if passes is OTHERS[0]:
                has_begun.set()
                assert may_end.wait(patience(60))
            elif number == 0:
                assert has_begun.wait(patience(60))
                made.allow(())
                may_end.set()
            return passes

        found = made.compute(6, by, as_passes(OWN))
        assert found.count(OTHERS[0]) == 1 and found.count(OWN) == 5
        made.allow(range(5))
        assert made.allowed == len(OTHERS)


@pytest.mark.parametrize("who", [OWN, OTHERS[0]])
def test_the_first_error_ends_the_round_and_the_next_one_is_whole(who: object) -> None:
    with helpers(allowed=1) as made:
        has_begun = threading.Event()

        def by(passes: Passes, number: int) -> int:
            if passes is OTHERS[0]:
                has_begun.set()
            elif number == 0:
                assert has_begun.wait(patience(60))
            if passes is who:
                raise ArithmeticError(f"pass {number}")
            return number

        with pytest.raises(ArithmeticError, match="pass"):
            made.compute(4, by, as_passes(OWN))
        assert made.compute(4, lambda passes, number: number, as_passes(OWN)) == [0, 1, 2, 3]


def test_a_report_of_a_pass_that_fails_ends_the_round_with_its_error() -> None:
    with helpers(allowed=1) as made:
        has_begun = threading.Event()

        def by(passes: Passes, number: int) -> int:
            if passes is OTHERS[0]:
                has_begun.set()
            assert has_begun.wait(patience(60))
            return number

        made.on_pass = _failing
        with pytest.raises(ArithmeticError, match="a report"):
            _in_time(partial(made.compute, 2, by, as_passes(OWN)))
        made.on_pass = lambda start, end: None
        has_begun.clear()
        assert _in_time(partial(made.compute, 2, by, as_passes(OWN))) == [0, 1]  # by the same helper


def test_a_report_of_pieces_that_fails_ends_the_next_round_with_its_error() -> None:
    with helpers(allowed=1) as made:
        made.on_pass = _failing
        for _ in range(2):  # what was computed for the first is reported when the helper comes to the second
            pieces, is_done = made.pieces(), threading.Event()
            pieces.add(is_done.set)
            assert is_done.wait(patience(60))
            _in_time(pieces.end)
        made.allow(())
        with made._changed:
            assert made._changed.wait_for(lambda: made._error is not None, patience(60))
        made.on_pass = lambda start, end: None
        with pytest.raises(ArithmeticError, match="a report"):
            made.compute(2, lambda passes, number: number, as_passes(OWN))
        assert made.compute(2, lambda passes, number: number, as_passes(OWN)) == [0, 1]


def _failing(start: float, end: float) -> None:
    raise ArithmeticError("a report")


def _in_time(call: Callable[[], T]) -> T:
    """What a call returns or raises, in a thread that may wait for ever."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found.result(patience(20))
