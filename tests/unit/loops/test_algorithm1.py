"""What the loops do by themselves: a group's rows are stored as they are scored, and an update is made or left out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncflow.control.ledger import StepTotals
from asyncflow.engines.base import OptimResult, Response
from asyncflow.loops import score_batching
from asyncflow.loops.algorithm1 import Producer, apply, produce
from asyncflow.loops.context import ResponseScoring
from asyncflow.loops.episode import EpisodePlayer
from asyncflow.loops.samples import GroupRequest, Shape
from asyncflow.rewards.base import RewardFailure, Sample, Score
from asyncflow.types import Batch
from tests.builders import meta

BITS = 2


class Engine:
    """Says what it was told to do."""

    def __init__(self) -> None:
        self.done: list[str] = []

    async def optim_step(self, normaliser: int) -> OptimResult:
        self.done.append(f"step by {normaliser}")
        return OptimResult(grad_norm=1.0, learning_rate=0.5)

    async def discard(self) -> None:
        self.done.append("discard")


def of_update(*, tokens: int = 7, sequences: int = 3, non_finite: Sequence[int] = ()) -> StepTotals:
    return StepTotals(0, tokens, sequences, 0, [*non_finite])


def divided_by(normaliser: str | int) -> Any:
    return SimpleNamespace(normaliser=normaliser)


@pytest.mark.parametrize(("normaliser", "divisor"), [("tokens", 7), ("sequences", 3), (100, 100)])
async def test_an_update_is_divided_by_what_the_algorithm_says(normaliser: str | int, divisor: int) -> None:
    engine = Engine()
    made = await apply(engine, divided_by(normaliser), of_update())
    assert engine.done == [f"step by {divisor}"] and made.normaliser == divisor
    assert (made.grad_norm, made.learning_rate, made.is_skipped) == (1.0, 0.5, False)


@pytest.mark.parametrize("normaliser", ["tokens", "sequences", 100])
@pytest.mark.parametrize("totals", [of_update(non_finite=[4]), of_update(tokens=0, sequences=0)])
async def test_no_update_is_made_of_a_loss_that_is_not_finite_nor_of_no_row_at_all(
    normaliser: str | int, totals: StepTotals
) -> None:
    engine = Engine()
    made = await apply(engine, divided_by(normaliser), totals)
    assert engine.done == ["discard"] and made.is_skipped and made.learning_rate == 0.0


async def test_a_model_that_is_held_is_left_as_it_is_and_that_is_no_skipped_update() -> None:
    engine = Engine()
    made = await apply(engine, divided_by("tokens"), of_update(), is_held=True)
    assert engine.done == ["discard"] and not made.is_skipped and (made.normaliser, made.learning_rate) == (7, 0.0)


class Queue:
    """`taken`: rows that somebody else has completed. What came is noted."""

    def __init__(self, *taken: int) -> None:
        self.taken, self.completed, self.failed = set(taken), list[int](), dict[int, tuple[str, bool]]()

    async def complete(self, lease: Any, columns: Batch) -> list[bool]:
        self.completed += columns.indices.tolist()
        return [row not in self.taken for row in columns.indices.tolist()]

    async def fail(self, lease: Any, rows: Sequence[int], error: str, *, is_final: bool) -> None:
        self.failed |= dict.fromkeys(rows, (error, is_final))


async def three_responses(*_: Any, samples: Sequence[int], **__: Any) -> AsyncIterator[Response]:
    for sample in samples:
        spans = np.array([(0, 0)], np.int64)
        yield Response(sample, np.array([sample, 9]), -np.ones(2, np.float32), spans, "stop" if sample else "length")


async def score_of(sample: Sample) -> Score:
    """That of sample 2 cannot be had."""
    if sample.token_ids[0] == 2:
        raise RewardFailure("skipped", "nothing to say")
    return Score(float(sample.is_finished), ())


async def produced(queue: Queue) -> list[Mapping[str, Any]]:
    """Group 1, of three rows. Returns the samples that were kept."""
    kept: list[Mapping[str, Any]] = []
    shape = Shape(2, 3, BITS, 0, 1.0, 8, 2)
    engine: Any = SimpleNamespace(generate=three_responses)
    client: Any = queue
    scoring = ResponseScoring(score_of, lambda ids: "", kept.append)
    by = Producer(client, engine, EpisodePlayer(engine), scoring, shape, lambda num_sampled: None, lambda: None)
    leased: Any = SimpleNamespace(lease=None)
    request = GroupRequest(meta(1, size=3), [4, 5, 6], np.arange(2), {}, 1.0)
    await asyncio.wait_for(produce(by, leased, request, lambda: None), 5)
    return kept


async def test_a_row_that_has_no_reward_fails_alone_and_the_others_do_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_batching, "SIBLINGS_SECONDS", 60.0)
    queue = Queue()
    kept = await produced(queue)
    assert queue.failed == {6: ("skipped: nothing to say", True)} and sorted(queue.completed) == [4, 5]
    assert {line["row"]: (line["reward"], line["finish_reason"]) for line in kept} == {4: (0.0, "length"), 5: (1.0, "stop")}


async def test_the_sample_of_a_row_that_came_second_is_not_kept() -> None:
    queue = Queue(5)
    assert [line["row"] for line in await produced(queue)] == [4]
    assert sorted(queue.completed) == [4, 5]
