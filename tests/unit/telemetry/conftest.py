"""Tests of modules without processes or threads wait for no real seconds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unhurried import loop_of

UNHURRIED = {"test_hub"}


def pytest_asyncio_loop_factories(item: pytest.Item) -> Any:
    return loop_of(item.path.stem in UNHURRIED)
