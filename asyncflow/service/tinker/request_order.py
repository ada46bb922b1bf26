"""Order of the training requests of one model: by their numbers, each once. Pure.

A client numbers its requests from 1 and may send them in any order, and again: a request that is sent twice is one request.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, TypeVar

from asyncflow.service.limits import Busy

T = TypeVar("T")
REMEMBERED: Final = 10_000
"""Requests of a model that are recognised when they come again."""


class RequestOrder(Generic[T]):
    """Requests of one model that wait for those before them. `largest_number`, `largest_bytes`: of all that wait but the next."""

    def __init__(self, largest_number: int, largest_bytes: int) -> None:
        self.next_number = 1
        self._largest_number, self._bytes_left = largest_number, largest_bytes
        self._waiting: dict[int, tuple[T, int]] = {}
        self._contents: OrderedDict[int, bytes] = OrderedDict()  # hash of each request, by number

    def offer(self, number: int | None, content: bytes, item: T, num_bytes: int = 0) -> tuple[int, bool]:
        """Take a request with this number (None: the next free one) and hash of its content, and of this size.

        Returns its number, and whether it is new. Raises `ValueError` if the number belongs to a request with another content, or
        is that of a request so old that it is not known whether it is the same, and `Busy` if there is no room. There always is for
        the next request: all others wait for that one.
        """
        if number is None:
            number = max([self.next_number - 1, *self._waiting]) + 1
        if number < 1:
            raise ValueError(f"the first request of a model has the number 1, and this one has {number}")
        if (known := self._contents.get(number)) is not None:
            if known != content:
                raise ValueError(f"the number {number} belongs to another request of this model: give each request its own")
            return number, False
        if number < self.next_number:
            raise ValueError(f"the number {number} belongs to a request long ago: this model's next one is {self.next_number}")
        if number != self.next_number and (len(self._waiting) >= self._largest_number or num_bytes > self._bytes_left):
            raise Busy(f"{len(self._waiting)} requests of this model wait already: send fewer at a time", 1.0)
        self._waiting[number], self._contents[number] = (item, num_bytes), content
        self._bytes_left -= num_bytes
        while len(self._contents) > REMEMBERED + len(self._waiting):
            self._contents.popitem(last=False)
        return number, True

    def take(self) -> T | None:
        """Next request; None if it has not come yet."""
        found = self._waiting.pop(self.next_number, None)
        if found is None:
            return None
        item, num_bytes = found
        self.next_number += 1
        self._bytes_left += num_bytes
        return item
