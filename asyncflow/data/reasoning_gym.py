"""Tasks of `reasoning-gym` as data: `data.path: "reasoning_gym:leg_counting"`, or with options, `...?min_animals=2&max_animals=4`.

Several tasks, separated by commas, take turns. A row has the question, the answer, and where it comes from, so that the scorer
`reasoning_gym` asks the package for the task's own evaluation. Held-out rows come from another seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import parse_qsl

import yaml

from asyncflow.registry import package_module
from asyncflow.settings import from_yaml
from asyncflow.types import UserError

PREFIX: Final = "reasoning_gym:"
ORIGIN: Final = "reasoning_gym"
ROWS: Final = 5_000
"""Rows of a set that has no limit."""
_HELD_OUT_SEED: Final = 1 << 20


def rows(path: str, seed: int, *, is_held_out: bool, count: int) -> list[dict[str, Any]]:
    """`count` rows. Raises `UserError` if the package is not installed, or refuses the task or its options."""
    tasks = [_GymTask(one, seed % (1 << 20) + _HELD_OUT_SEED * is_held_out, count) for one in path.removeprefix(PREFIX).split(",")]
    return list(itertools.islice(_in_turns(tasks), count))


class _GymTask:
    def __init__(self, text: str, seed: int, size: int) -> None:
        reasoning_gym = package_module("reasoning_gym", "reasoning-gym", "data reasoning_gym")
        self.name, _, query = text.partition("?")
        try:
            self.options = {key: from_yaml(value) for key, value in parse_qsl(query, strict_parsing=bool(query))}
            self.entries = reasoning_gym.create_dataset(self.name, seed=seed, size=size, **self.options)
        except (ValueError, TypeError, AssertionError, yaml.YAMLError) as error:
            raise UserError(f"data reasoning_gym: task {self.name!r} with {query or 'no options'}: {error}") from error
        self.origin = {"task": self.name, "seed": seed, "size": size, "options": self.options}


def _in_turns(tasks: list[_GymTask]) -> Iterator[dict[str, Any]]:
    for index in itertools.count():
        for task in tasks:
            entry = task.entries[index]
            yield {"question": entry["question"], "answer": entry["answer"], ORIGIN: {**task.origin, "index": index}}
