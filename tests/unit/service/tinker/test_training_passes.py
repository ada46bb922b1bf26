"""Passes of a server's models: how many compute at the same time, who is joined, and who hears of what."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from asyncflow.config import parse
from asyncflow.engines.base import MicroBatch, MicroBatchResult, TrainEngine
from asyncflow.engines.train import mixed_passes
from asyncflow.engines.train.torch_engine import TorchEngine
from asyncflow.service.tinker.training_passes import TrainingPasses, passes_of
from asyncflow.types import LoraSpec, RunError
from tests.conftest import MODEL
from tests.patience import patience
from tests.unit.engines.train.conftest import micro_batch
from tests.unit.engines.train.training import Sum, policy_gradient, torch_engine

LOSS = Sum(policy_gradient)
BATCHES = [micro_batch(seed, (5, 1, 9, 5), 6) for seed in range(5)]  # of 26 tokens


class Slow:
    """Engine that computes until it may end, and counts those that compute."""

    computing = most = 0

    def __init__(self, error: Exception | None = None) -> None:
        self.may_end, self.error, self.seen = asyncio.Event(), error, 0

    async def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: Any) -> list[MicroBatchResult]:
        self.seen += len(micro_batches)
        Slow.computing += 1
        Slow.most = max(Slow.most, Slow.computing)
        try:
            await self.may_end.wait()
        finally:
            Slow.computing -= 1
        if self.error is not None:
            raise self.error
        return [MicroBatchResult(0.0, 1, 26) for _ in micro_batches]


def begun(passes: TrainingPasses, engine: Any, number: int = 0) -> asyncio.Task[MicroBatchResult]:
    return asyncio.create_task(passes.forward_backward(cast(TrainEngine, engine), BATCHES[number], LOSS))


async def test_as_many_models_compute_at_once_as_there_is_room_for_and_each_hears_of_its_own() -> None:
    passes, engines = TrainingPasses(2, 1000), [Slow(), Slow(RuntimeError("broken")), Slow(), Slow()]
    Slow.most = 0
    tasks = [begun(passes, engine) for engine in engines]
    for _ in range(3):
        await asyncio.sleep(0)
    tasks[2].cancel()  # one that waits, and is not begun
    for engine in engines:
        engine.may_end.set()
    async with asyncio.timeout(patience(60)):
        found = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(found[0], MicroBatchResult) and isinstance(found[3], MicroBatchResult)
    assert str(found[1]) == "broken" and isinstance(found[2], asyncio.CancelledError)
    assert [engine.seen for engine in engines] == [1, 1, 0, 1] and Slow.most == 2 and passes.num_joined == 0


async def test_a_caller_that_goes_leaves_its_pass_to_its_end_and_then_its_room() -> None:
    passes, engines = TrainingPasses(1, 1000), [Slow(), Slow()]
    first, second = (begun(passes, engine) for engine in engines)
    await asyncio.sleep(0)
    first.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert engines[1].seen == 0
    engines[0].may_end.set()
    engines[1].may_end.set()
    async with asyncio.timeout(patience(60)):
        assert isinstance(await second, MicroBatchResult)


def made_of_seeds() -> list[TorchEngine]:
    options: dict[str, Any] = {"lora": LoraSpec(rank=2, alpha=4.0), "accumulate": "exact", "tokens_per_pass": 1000}
    return [torch_engine(MODEL, seed=seed, **options) for seed in range(5)]


@pytest.fixture
async def adapters() -> Any:
    made = made_of_seeds()
    yield made
    for engine in made:
        await engine.close()


async def ended(engines: Sequence[TorchEngine]) -> list[Any]:
    return [((await engine.optim_step(20)).grad_norm, await engine.fingerprint()) for engine in engines]


async def test_adapters_that_wait_for_room_are_rows_of_one_pass(adapters: list[TorchEngine]) -> None:
    alone = made_of_seeds()
    expected = [(await engine.forward_backward([batch], LOSS))[0] for engine, batch in zip(alone, BATCHES, strict=True)]
    passes = TrainingPasses(1, 80)  # tokens of three of them
    tasks = [begun(passes, engine, number) for number, engine in enumerate(adapters)]
    async with asyncio.timeout(patience(60)):
        assert await asyncio.gather(*tasks) == expected
    assert passes.num_joined == 1  # the first alone, three together, the last alone
    assert await ended(adapters) == await ended(alone)
    for engine in alone:
        await engine.close()


async def test_an_error_of_one_adapter_is_not_that_of_those_beside_it(
    adapters: list[TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise RunError("exact sums take none above")

    monkeypatch.setattr(adapters[2].training.passes.sums, "add", full)  # type: ignore[attr-defined]
    passes = TrainingPasses(1, 1000)
    found = await asyncio.gather(*(begun(passes, engine, number) for number, engine in enumerate(adapters)), return_exceptions=True)
    assert passes.num_joined == 1 and isinstance(found[2], RunError)
    assert all(isinstance(one, MicroBatchResult) for number, one in enumerate(found) if number != 2)


async def test_a_pass_leaves_others_their_part_of_what_waits(adapters: list[TorchEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    passes, slow, sizes = TrainingPasses(2, 1000), [Slow(), Slow()], []
    real = mixed_passes.forward_backward
    monkeypatch.setattr(mixed_passes, "forward_backward", lambda shares: sizes.append(len(shares)) or real(shares))
    blocking = [begun(passes, engine) for engine in slow]
    await asyncio.sleep(0)
    tasks = [begun(passes, engine, number) for number, engine in enumerate(adapters[:4])]
    for _ in range(3):
        await asyncio.sleep(0)
    for engine in slow:
        engine.may_end.set()
    async with asyncio.timeout(patience(60)):
        await asyncio.gather(*blocking, *tasks)
    assert sizes == [2] and passes.num_joined == 1  # and one, and one


def test_there_is_room_for_a_pass_on_the_cores_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncflow.service.tinker.training_passes.num_cores", lambda: 8)
    for train, room in (({}, 8), ({"num_threads": 3}, 2), ({"num_threads": 16}, 1), ({"device": "cuda"}, 1)):
        config = parse({"model": {"path": "m"}, "data": {"path": "d"}, "train": train})
        assert passes_of(config, 10)._room == room
