"""Requests of a model: by their numbers, each once."""

import pytest

from asyncflow.service.limits import Busy
from asyncflow.service.tinker import request_order
from asyncflow.service.tinker.request_order import RequestOrder


def test_requests_have_their_turn_by_their_numbers_whenever_they_come() -> None:
    queue: RequestOrder[str] = RequestOrder(10, 100)
    for number in (3, 1):
        assert queue.offer(number, b"%d" % number, f"request {number}") == (number, True)
    assert (queue.take(), queue.take()) == ("request 1", None)
    assert queue.offer(2, b"2", "request 2") == (2, True)
    assert [queue.take(), queue.take(), queue.take()] == ["request 2", "request 3", None]
    assert queue.offer(None, b"4", "request 4") == (4, True) and queue.take() == "request 4"


def test_a_request_that_comes_again_is_the_same_one_before_its_turn_and_after() -> None:
    queue: RequestOrder[str] = RequestOrder(10, 100)
    assert queue.offer(1, b"a", "first") == (1, True)
    assert queue.offer(1, b"a", "again") == (1, False)
    assert queue.take() == "first"
    assert queue.offer(1, b"a", "again") == (1, False)
    with pytest.raises(ValueError, match="number 1 belongs to another request"):
        queue.offer(1, b"b", "other")
    with pytest.raises(ValueError, match="has the number 1"):
        queue.offer(0, b"a", "none")
    assert queue.take() is None


def test_what_waits_is_bounded_and_so_is_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_order, "REMEMBERED", 2)
    queue: RequestOrder[int] = RequestOrder(3, 100)
    for number in (2, 3, 4):
        queue.offer(number, b"", number)
    with pytest.raises(Busy, match="3 requests of this model wait"):
        queue.offer(5, b"", 5)
    assert queue.offer(1, b"", 1) == (1, True)  # the others wait for it
    assert [queue.take() for _ in range(5)] == [1, 2, 3, 4, None]
    assert queue.offer(6, b"", 6, 60) == (6, True)
    with pytest.raises(Busy):
        queue.offer(7, b"", 7, 60)
    assert queue.offer(5, b"", 5, 60) == (5, True)
    assert [queue.take(), queue.take()] == [5, 6] and queue.offer(8, b"", 8, 100) == (8, True)
    queue = RequestOrder(3, 100)
    for number in range(1, 6):
        queue.offer(number, b"", number)
        assert queue.take() == number
    assert queue.offer(5, b"", 0) == (5, False)
    with pytest.raises(ValueError, match="long ago: this model's next one is 6"):
        queue.offer(1, b"", 0)
