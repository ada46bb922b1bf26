"""No test waits for real seconds, but for those of modules that have processes or threads at the other end."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unhurried import loop_of

REAL = {"test_dataloader", "test_key_value"}


def pytest_asyncio_loop_factories(item: pytest.Item) -> Any:
    return loop_of(item.path.stem not in REAL)
