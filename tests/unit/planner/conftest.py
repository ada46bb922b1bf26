"""What tests of the search share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncflow.config import Config
from asyncflow.planner import search as module
from asyncflow.planner.cost import Model
from asyncflow.planner.search import Found
from asyncflow.simulation.seeds import Simulators

Searched = Callable[[Config, Model, dict[str, Any], int], Found]


@pytest.fixture(scope="module")
def searched() -> Iterator[Searched]:
    """A search, whose simulations are all in one process."""
    with asyncio.Runner() as runner:
        simulators = Simulators(1)
        runner.run(simulators.__aenter__())
        try:
            yield lambda *given: runner.run(module.search(*given, simulators, 1, most_rows=200))
        finally:
            runner.run(simulators.__aexit__())
