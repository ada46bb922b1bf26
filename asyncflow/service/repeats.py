"""Repeated requests: one with a request id that was answered before gets that answer again, and has no second effect.

consumes: requests with a header `Idempotency-Key`
waits for: the answer of the first one, where that is under way
is unblocked by: that answer
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

HEADER: Final = b"idempotency-key"
MAX_ID: Final = 128
"""Bytes of a request id at most."""
LARGE: Final = 64 << 10
"""An answer of more bytes, as experience and prompts are, is kept apart from the many small ones."""


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """Answer of a request, whole: two ASGI messages."""

    start: Mapping[str, Any]
    body: bytes


class Repeats:
    """The latest answers by client, route and request id: `max_bytes` of small ones, `max_large_bytes` of large ones. The newest is
    kept whatever its size.

    Only answers of requests that had an effect (2xx) are kept: any other request may be repeated anyway.
    """

    def __init__(self, max_bytes: int, max_large_bytes: int) -> None:
        self._answers: OrderedDict[tuple[str, ...], WholeAnswer] = OrderedDict()
        self._large: OrderedDict[tuple[str, ...], WholeAnswer] = OrderedDict()
        self._under_way: dict[tuple[str, ...], asyncio.Future[None]] = {}
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._max_large_bytes = max_large_bytes

    async def begin(self, request: tuple[str, ...]) -> WholeAnswer | None:
        """Answer of this request, if it was made before; else None, and it is under way until `end`."""
        while (first := self._under_way.get(request)) is not None:
            await first
        for answers in (self._answers, self._large):
            if (answer := answers.get(request)) is not None:
                answers.move_to_end(request)
                return answer
        self._under_way[request] = asyncio.get_running_loop().create_future()
        return None

    def end(self, request: tuple[str, ...], answer: WholeAnswer | None) -> None:
        """Keep the answer of a request, or, with None, note that it has had no effect."""
        self._under_way.pop(request).set_result(None)
        if answer is None:
            return
        if len(answer.body) > LARGE:
            self._keep_large(request, answer)
            return
        self._answers[request] = answer
        self._num_bytes += _size(request, answer)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= _size(*self._answers.popitem(last=False))

    def _keep_large(self, request: tuple[str, ...], answer: WholeAnswer) -> None:
        self._large[request] = answer
        while len(self._large) > 1 and sum(len(kept.body) for kept in self._large.values()) > self._max_large_bytes:
            self._large.popitem(last=False)


def _size(request: tuple[str, ...], answer: WholeAnswer) -> int:
    return sum(map(len, request)) + len(answer.body) + 512
