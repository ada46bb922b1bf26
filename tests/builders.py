"""What many tests need, made in one place."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain

import numpy as np

from asyncflow.config import Config, parse
from asyncflow.engines.base import Response
from asyncflow.loops.samples import ScoredRow, priority_of
from asyncflow.loops.transcript import Played
from asyncflow.rewards.base import Sample, Score
from asyncflow.types import GroupMeta, Interval


def meta(
    group: int, step: int = 0, *, size: int = 2, low: int | None = None, high: int | None = None, topic: str = "train"
) -> GroupMeta:
    """A group, whose interval is its step's alone unless one is given."""
    interval = Interval(step if low is None else low, step if high is None else high)
    return GroupMeta(group, size, step, interval, topic, priority_of(interval, is_evaluation=topic == "eval"))


class Unmade:
    """The part of a `Progress` that tells of rows without a response: `waiting` are in nobody's hands, `held` in somebody's. By the
    last version that may generate them. `num_ready`: rows that lie ready for whatever task."""

    waiting: Sequence[int]
    held: Sequence[int]
    num_ready: int

    def unfinished(self, version: int) -> int:
        return sum(high <= version for high in chain(self.waiting, self.held))

    def unleased(self, version: int) -> int:
        return sum(high <= version for high in self.waiting)

    def oldest_unleased(self, at_least: int) -> int | None:
        return min((high for high in self.waiting if high >= at_least), default=None)

    def ready(self, task: str) -> int:
        return self.num_ready


async def loop_turns(count: int = 60) -> None:
    """So many of the event loop's, in which whoever can go on does."""
    for _ in range(count):
        await asyncio.sleep(0)


def scored(row: int, response: Response, reward: float | None) -> ScoredRow:
    """A row that is ready to be stored."""
    score = None if reward is None else Score(reward, ())
    played = Played(response, np.ones(len(response.token_ids), np.uint8), response.finish_reason)
    return ScoredRow(row, played, Sample("", "", {}, response.finish_reason == "stop"), score)


def every_task_apart(mode: str, *, steps: int) -> Config:
    """Of a simulated run whose rewards and reference are tasks of their own."""
    return parse(
        {
            "run": {"steps": steps},
            "model": {"path": "none"},
            "data": {"path": "generated:arithmetic"},
            "schedule": mode,
            "algorithm": {"name": "grpo", "kl_coefficient": 0.1},
            "reward": {"place": "task"},
            "rollout": {"num_workers": 2, "num_slots": 8, "group_size": 4, "max_new_tokens": 300},
            "train": {"prompts_per_step": 6, "reference": "task"},
        }
    )
