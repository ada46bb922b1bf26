"""Helpers: threads that take passes beside the compute thread, with the same bits, and only while they have leave."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from asyncflow.engines.train.accumulate import make_accumulator, order_free_norm
from asyncflow.engines.train.helpers import Helpers
from asyncflow.engines.train.optimizer import Optimizer
from asyncflow.engines.train.passes import Passes
from asyncflow.engines.train.torch_engine import TorchEngine
from asyncflow.types import LoraSpec
from tests.patience import patience
from tests.unit.engines.train.conftest import micro_batch
from tests.unit.engines.train.test_pass_gradients import batches, with_entropy
from tests.unit.engines.train.training import (
    ModelPath,
    Sum,
    assert_same,
    policy_gradient,
    torch_engine,
    train_options,
    weights_of,
)

OWN, OTHERS = object(), [object(), object()]
"""Of tests without a model: what the compute thread and two helpers compute with."""


def as_passes(each: object) -> Passes:
    return each  # type: ignore[return-value]


@contextmanager
def helpers(allowed: int = 0) -> Iterator[Helpers]:
    made = Helpers([as_passes(each) for each in OTHERS], num_threads=1)
    made.allow(allowed)
    yield made
    made.close()


async def trained(path: Path, passes_of_helpers: int, **changes: Any) -> tuple[Any, Any, list[Any]]:
    """Two updates: hashes of weights and optimiser, weights, and results. Of each round the helpers compute `passes_of_helpers`
    passes at least: the compute thread waits for them."""
    options = {"accumulate": "exact", "learning_rate": 1e-3, "tokens_per_pass": 40, "check_shared_prompt": False}
    engine = torch_engine(path, **{**options, "num_helpers": min(2, passes_of_helpers), **changes})
    if passes_of_helpers:
        _hold_back(engine, passes_of_helpers)
    results = []
    for _ in range(2):
        await engine.begin_step()
        for some in (batches()[:4], batches()[4:]):
            results += await engine.forward_backward(some, Sum(with_entropy))
        await engine.optim_step(40)
    found, weights = await engine.fingerprint(), await weights_of(engine)
    await engine.close()
    return found, weights, results


def _hold_back(engine: TorchEngine, passes_of_helpers: int) -> None:
    """Let the compute thread take a second pass of each round only when the helpers have computed so many."""
    made = engine.helpers
    assert made is not None
    made.allow(2)
    computed = threading.Semaphore(0)
    made.on_pass = lambda start, end: computed.release()
    compute, next_of_own = made.compute, made._next

    def held_back(*arguments: Any) -> Any:
        still = [*range(passes_of_helpers)]

        def held() -> int | None:
            while still:
                assert computed.acquire(timeout=patience(60))
                still.pop()
            return next_of_own()

        made._next = held  # type: ignore[method-assign]
        return compute(*arguments)

    made.compute = held_back  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2-tiny", {}),
        ("qwen3-tiny", {"tokens_per_pass": None, "has_reference": True}),
        ("llama-tiny", {"dtype": "bfloat16", "old": "step_start", "activation_checkpointing": True}),
        ("qwen2-tiny", {"lora": LoraSpec(rank=2, alpha=4.0, targets=("q_proj", "down_proj")), "has_reference": True}),
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
            model_path("qwen2-tiny"), accumulate="exact", num_helpers=1, tokens_per_pass=30, check_shared_prompt=False
        )
        if has_discarded:
            _hold_back(engine, 1)
            await engine.forward_backward(batches(), Sum(policy_gradient))
            await engine.discard()
        await engine.forward_backward([micro_batch(9)], Sum(policy_gradient))
        norms.append((await engine.optim_step(8)).grad_norm)
        await engine.close()
    assert norms[0] == norms[1]


async def test_helpers_read_the_weights_that_an_update_has_made(model_path: ModelPath) -> None:
    engine = torch_engine(model_path("qwen2-tiny"), num_helpers=1, learning_rate=1e-2)
    before = await weights_of(engine)
    await engine.forward_backward([micro_batch(0)], Sum(policy_gradient))
    await engine.optim_step(8)
    after = await weights_of(engine)
    made = engine.helpers
    assert made is not None
    assert_same(after, dict(made.passes[0].policy.parameters))
    assert any(not after[name].equal(before[name]) for name in after)
    await engine.close()


async def test_an_update_uses_the_cores_of_the_helpers_that_are_allowed(
    model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = torch_engine(model_path("qwen2-tiny"), accumulate="exact", num_helpers=2, check_shared_prompt=False)
    made, seen = engine.helpers, []
    assert made is not None
    update = Optimizer.update

    def watched(*arguments: Any) -> Any:
        seen.append(torch.get_num_threads())
        return update(*arguments)

    monkeypatch.setattr(Optimizer, "update", watched)
    for allowed in (0, 1, 2):
        made.allow(allowed)
        await engine.forward_backward([micro_batch(0)], Sum(policy_gradient))
        await engine.optim_step(8)
    assert seen == [1, 2, 3]
    assert await engine._thread.run(torch.get_num_threads) == 1
    await engine.close()


@pytest.mark.parametrize("kind", ["exact", "fp32"])
def test_no_bit_of_an_update_depends_on_the_number_of_threads(kind: Literal["exact", "fp32"]) -> None:
    updated, options = [], train_options(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.1)
    for num_threads in (1, 2, 3):
        generator = torch.Generator().manual_seed(0)
        parameters = {str(n): nn.Parameter(torch.randn(n, generator=generator)) for n in (300_017, 70_001, 5)}
        sums, others, optimizer = (
            make_accumulator(kind, parameters),
            make_accumulator(kind, parameters),
            Optimizer(parameters, options),
        )
        torch.set_num_threads(num_threads)
        try:
            for _ in range(2):
                for each in (sums, others):
                    for parameter in parameters.values():
                        parameter.grad = torch.randn(parameter.shape, generator=generator)
                    each.add()
                if kind == "exact":
                    sums.join(others)
                gradients = sums.gradients(3)
                assert not optimizer.update(gradients, order_free_norm(gradients)).skipped
                sums.clear()
        finally:
            torch.set_num_threads(1)
        updated.append(torch.cat([p.detach() for p in parameters.values()]))
    assert updated[0].equal(updated[1]) and updated[0].equal(updated[2])


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
                made.allow(0)
                may_end.set()
            return passes

        found = made.compute(6, by, as_passes(OWN))
        assert found.count(OTHERS[0]) == 1 and found.count(OWN) == 5
        made.allow(5)
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
