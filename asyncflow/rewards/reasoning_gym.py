"""A task's own evaluation of an answer, for rows of `data.path: reasoning_gym:...`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from asyncflow.registry import package_module
from asyncflow.rewards.base import Sample


class ReasoningGym:
    """`score_answer` of the row's task, for what stands in `<answer>` of the response, or for all of it. Some tasks evaluate it as
    Python, so it is scored in a fork."""

    def __init__(self, *, needs_tag: bool = False) -> None:
        """`needs_tag`: a response without `<answer>` gets 0. Raises `UserError` if the package is not installed."""
        self._package = package_module("reasoning_gym", "reasoning-gym", "reward reasoning_gym")
        self._task = lru_cache(maxsize=64)(self._created)
        self._needs_tag = needs_tag

    def __call__(self, sample: Sample) -> float:
        """The package's score, 0 to 1; 0 for an answer that the task fails to read. Raises `ValueError` for a row that is not of
        reasoning-gym, and what a task raises that is out of memory or of stack."""
        if not isinstance(origin := sample.example.get("reasoning_gym"), dict):
            raise ValueError("the row is not of data.path=reasoning_gym:...: its column reasoning_gym is missing")
        answer = self._package.utils.extract_answer(sample.response)
        if answer is None and not self._needs_tag:
            answer = sample.response.strip()
        if answer is None:
            return 0.0
        task = self._task(msgspec.json.encode({name: origin[name] for name in ("task", "seed", "size", "options")}))
        entry = task[origin["index"]]
        try:
            return float(task.score_answer(answer=answer, entry=entry))
        except (MemoryError, RecursionError):
            raise
        except Exception:  # some tasks raise whatever their parser does
            return 0.0

    def _created(self, origin: bytes) -> Any:
        known = msgspec.json.decode(origin)
        return self._package.create_dataset(known["task"], seed=known["seed"], size=known["size"], **known["options"])
