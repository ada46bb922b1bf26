"""Bytes that another process has, read in order, a few chunks asked for ahead."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")
CHUNK_BYTES: Final = 4 << 20
_AHEAD: Final = 3  # chunks asked for beside the one that is used


async def read_ahead(
    read: Callable[[int, int], Coroutine[Any, Any, T]], begin: int, end: int, seconds: float
) -> AsyncGenerator[T, None]:
    """Answers of `read` for each chunk, from one byte to another, in order. Raises what it raises, and `TimeoutError` where none
    comes for so many seconds; what was asked for is cancelled at the end."""
    begins = iter(range(begin, end, CHUNK_BYTES))
    asked: deque[asyncio.Task[T]] = deque()

    def ask(count: int) -> None:
        asked.extend(asyncio.create_task(read(at, min(at + CHUNK_BYTES, end))) for at in itertools.islice(begins, count))

    try:
        ask(1 + _AHEAD)
        while asked:
            async with asyncio.timeout(seconds):
                chunk = await asked[0]
            asked.popleft()
            ask(1)
            yield chunk
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
