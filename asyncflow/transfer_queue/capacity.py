"""Capacity of a storage unit: admitted rows reserve their largest size, and admission waits for room."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping

import msgspec

from asyncflow.waits import CAPACITY, waiting


class CapacityState(msgspec.Struct):
    """Rows and bytes that are reserved, admissions that wait, and the seconds that all admissions have waited so far."""

    reserved_rows: int
    reserved_bytes: int
    waiting: int
    waited_seconds: float
    longest_wait_seconds: float


class Capacity:
    """First come, first served: a small admission does not overtake a large one. No limit where one is None."""

    def __init__(self, capacity_rows: int | None, capacity_bytes: int | None) -> None:
        self._capacity_rows, self._capacity_bytes = capacity_rows, capacity_bytes
        self._rows = self._bytes = 0
        self._each: dict[int, int] = {}  # group -> what every row of it has reserved
        self._waiting: deque[tuple[int, int, float, asyncio.Future[None]]] = deque()
        self._waited_seconds = self._longest_wait_seconds = 0.0

    async def reserve(self, rows: int, num_bytes: int) -> None:
        """Wait until there is room. Raises `ValueError` when there could never be."""
        for what, asked, capacity in (("rows", rows, self._capacity_rows), ("bytes", num_bytes, self._capacity_bytes)):
            if capacity is not None and asked > capacity:
                raise ValueError(
                    f"an admission of {asked} {what} cannot fit into a storage unit of {capacity} {what}; "
                    f"admit less at once, or raise queue.capacity_{what}"
                )
        if not self._waiting and self._fits(rows, num_bytes):
            self.take(rows, num_bytes)
            return
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[None] = loop.create_future()
        entry = (rows, num_bytes, loop.time(), granted)
        self._waiting.append(entry)
        try:
            with waiting(CAPACITY, rows=rows):
                await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():  # it was granted in the very moment in which the caller went
                self.release(rows, num_bytes)
            elif entry in self._waiting:
                self._waiting.remove(entry)
                self._admit()
            raise
        finally:
            waited = loop.time() - entry[2]
            self._waited_seconds += waited
            self._longest_wait_seconds = max(self._longest_wait_seconds, waited)

    def note(self, groups: Iterable[int], each: int) -> None:
        """Take note that every row of these groups has reserved so many bytes, which `leave` frees."""
        self._each.update((group, each) for group in groups)

    def leave(self, num_rows: Mapping[int, int], gone: Iterable[int]) -> None:
        """Free the room of rows that have gone: so many of each group, and all of the groups that are `gone`."""
        num_bytes = sum(self._each.get(group, 0) * count for group, count in num_rows.items())
        for group in gone:
            self._each.pop(group, None)
        self.release(sum(num_rows.values()), num_bytes)

    def take(self, rows: int, num_bytes: int) -> None:
        """Count rows, whether they fit or not (recovered rows)."""
        self._rows += rows
        self._bytes += num_bytes

    def release(self, rows: int, num_bytes: int) -> None:
        """Release the room of rows that have gone."""
        self._rows -= rows
        self._bytes -= num_bytes
        self._admit()

    def state(self, now: float) -> CapacityState:
        """`now`: the event loop's time."""
        still = [now - since for _, _, since, _ in self._waiting]
        waited, longest = self._waited_seconds + sum(still), max([self._longest_wait_seconds, *still])
        return CapacityState(self._rows, self._bytes, len(self._waiting), waited, longest)

    def _admit(self) -> None:
        while self._waiting and self._fits(*self._waiting[0][:2]):
            rows, num_bytes, _, granted = self._waiting.popleft()
            if not granted.done():
                self.take(rows, num_bytes)
                granted.set_result(None)

    def _fits(self, rows: int, num_bytes: int) -> bool:
        return (self._capacity_rows is None or self._rows + rows <= self._capacity_rows) and (
            self._capacity_bytes is None or self._bytes + num_bytes <= self._capacity_bytes
        )
