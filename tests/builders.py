"""What many tests need, made in one place."""

from __future__ import annotations

import asyncio

from asyncflow.engines.base import Response
from asyncflow.rewards.base import Sample
from asyncflow.types import GroupMeta, Interval
from asyncflow.workflows.samples import ScoredRow


def meta(
    group: int, step: int = 0, *, size: int = 2, low: int | None = None, high: int | None = None, purpose: str = "train"
) -> GroupMeta:
    """A group, whose interval is its step's alone unless one is given."""
    return GroupMeta(group, size, step, Interval(step if low is None else low, step if high is None else high), purpose)


async def turns(count: int = 60) -> None:
    """So many of the event loop's, in which whoever can go on does."""
    for _ in range(count):
        await asyncio.sleep(0)


def scored(row: int, response: Response, reward: float | None) -> ScoredRow:
    """A row that is ready to be stored."""
    return ScoredRow(row, response, Sample("", "", {}, response.finish_reason == "stop"), reward)
