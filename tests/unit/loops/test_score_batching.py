"""Which of a group's rows are stored together, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np

from asyncflow.cluster.clock import VirtualLoop
from asyncflow.engines.base import Response
from asyncflow.loops.score_batching import SIBLINGS_SECONDS, ScoredRows
from tests.builders import scored

RESPONSE = Response(0, np.zeros(1, np.int64), np.zeros(1, np.float32), np.zeros((1, 2), np.int64), "stop")


def stored(num_rows: int, scored_at: dict[int, float], failed_at: tuple[float, ...] = ()) -> dict[float, list[int]]:
    """Rows by the moment at which they are stored together, of a group whose rows are scored, or fail, at these moments."""
    found: dict[float, list[int]] = {}

    async def score(rows: ScoredRows, row: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        together = await rows.to_store(scored(row, RESPONSE, 1.0))
        if together:
            found[loop.time()] = [one.row for one in together]

    async def fail(rows: ScoredRows, seconds: float) -> None:
        await asyncio.sleep(seconds)
        rows.ended()

    async def main() -> None:
        rows = ScoredRows(num_rows)
        ends: list[Coroutine[Any, Any, None]] = [score(rows, row, seconds) for row, seconds in scored_at.items()]
        await asyncio.gather(*ends, *(fail(rows, seconds) for seconds in failed_at))

    loop = VirtualLoop()
    loop.run_until_complete(main())
    loop.finish()
    return found


def test_a_group_that_ends_at_about_one_time_is_stored_when_its_last_row_is_scored() -> None:
    assert stored(3, {7: 0.25, 5: 0.125, 6: 0.375}) == {0.375: [5, 7, 6]}
    assert stored(1, {4: 0.25}) == {0.25: [4]}


def test_no_row_waits_for_long() -> None:
    late = 4 * SIBLINGS_SECONDS
    assert stored(4, {4: 0.0, 5: 0.125, 6: late, 7: late + 0.25}) == {SIBLINGS_SECONDS: [4, 5], late + 0.25: [6, 7]}


def test_nobody_waits_for_a_row_that_has_failed() -> None:
    assert stored(3, {4: 0.125, 5: 0.25}, failed_at=(0.375,)) == {0.375: [4, 5]}
    assert stored(3, {4: 0.25, 5: 0.375}, failed_at=(0.125,)) == {0.375: [4, 5]}
    assert stored(2, {}, failed_at=(0.125, 0.25)) == {}
