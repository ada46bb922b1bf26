"""No test waits for real seconds: state machines have nobody at the other end."""

from __future__ import annotations

from typing import Any

from tests.unhurried import loop_of


def pytest_asyncio_loop_factories() -> Any:
    return loop_of(True)
