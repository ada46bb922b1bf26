"""Results of requests by request id: there as soon as a request is accepted, and kept until they have been retrieved.

consumes: answers
waits for: the answer that a client asks for
is unblocked by: the engines, or the end of the session that the request belongs to
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import NamedTuple

from asyncflow.service.limits import Busy, Denied
from asyncflow.service.tinker.answers import Answer, Failure


class _Entry(NamedTuple):
    owner: str
    answer: asyncio.Future[Answer]


class Results:
    """Results of all sessions. A result that was retrieved may be asked for again (the answer may have been lost on the way) until
    later ones, `kept_bytes` together, have been retrieved. One that was not is kept as long as its session lives."""

    def __init__(self, *, kept_bytes: int, largest_number: int) -> None:
        """`largest_number`: of results of one session that have not been retrieved."""
        self._kept_bytes, self._largest_number = kept_bytes, largest_number
        self._entries: dict[str, _Entry] = {}
        self._open: dict[str, int] = {}  # number of results that were not retrieved, by session
        self._retrieved: OrderedDict[str, int] = OrderedDict()  # bytes of each, the one retrieved last at the end
        self._num_bytes = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def check_room(self, owner: str) -> None:
        """Raises `Busy` where a session has too many results that it has not retrieved."""
        if (count := self._open.get(owner, 0)) >= self._largest_number:
            raise Busy(f"{count} results of this session have not been retrieved: retrieve some first", 1.0)

    def begin(self, request_id: str, owner: str) -> None:
        """Accept a request of a session. Raises `Busy` as `check_room`."""
        self.check_room(owner)
        self._open[owner] = self._open.get(owner, 0) + 1
        self._entries[request_id] = _Entry(owner, asyncio.get_running_loop().create_future())

    def settle(self, request_id: str, answer: Answer) -> None:
        """Answer a request, once; nothing happens if its session has ended."""
        entry = self._entries.get(request_id)
        if entry is not None and not entry.answer.done():
            entry.answer.set_result(answer)

    async def get(self, request_id: str, seconds: float) -> Answer | None:
        """Answer to a request; None if it is not there within so many seconds. Raises `Denied`."""
        entry = self._entries.get(request_id)
        if entry is None:
            raise Denied(410, "there is no such request: its session has ended, or its result was retrieved long ago")
        try:
            async with asyncio.timeout(seconds):
                answer = await asyncio.shield(entry.answer)
        except TimeoutError:
            return None
        self._note_retrieved(request_id, entry.owner, answer)
        return answer

    def forget(self, owner: str) -> None:
        """Drop all results of a session that has ended; those that somebody waits for are failures."""
        for request_id in [request_id for request_id, entry in self._entries.items() if entry.owner == owner]:
            self.settle(request_id, Failure("the session has ended"))
            del self._entries[request_id]
            self._num_bytes -= self._retrieved.pop(request_id, 0)
        self._open.pop(owner, None)

    def _note_retrieved(self, request_id: str, owner: str, answer: Answer) -> None:
        if request_id not in self._entries:  # dropped while it was waited for
            return
        if request_id in self._retrieved:
            self._retrieved.move_to_end(request_id)
            return
        self._open[owner] -= 1
        self._retrieved[request_id] = answer.nbytes
        self._num_bytes += answer.nbytes
        while self._num_bytes > self._kept_bytes and len(self._retrieved) > 1:
            oldest, nbytes = self._retrieved.popitem(last=False)
            self._num_bytes -= nbytes
            del self._entries[oldest]
