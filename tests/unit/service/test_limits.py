"""Limits as arithmetic; the connections themselves: tests/e2e/test_service_hostile.py."""

from __future__ import annotations

import asyncio

import pytest

from asyncflow.service.limits import WRITTEN_AT_ONCE, Bucket, Busy, ByteBudget, Callers, Limits, WholeAnswers


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    bucket = Bucket(rate=10.0, burst=3.0)
    assert [bucket.take(5.0) for _ in range(3)] == [0.0] * 3
    assert bucket.take(5.0) == pytest.approx(0.1)
    assert bucket.take(5.05) == pytest.approx(0.05)
    assert bucket.take(5.1) == 0.0 and bucket.take(5.1) > 0
    assert [bucket.take(100.0) for _ in range(4)][:3] == [0.0] * 3  # never more than the burst


def test_the_budget_is_shared_and_what_is_larger_than_all_of_it_comes_alone() -> None:
    budget = ByteBudget(100)
    budget.take(60)
    with pytest.raises(Busy):
        budget.take(41)
    budget.take(40)
    budget.give_back(60)
    budget.give_back(40)
    budget.take(1000)
    with pytest.raises(Busy):
        budget.take(1)
    budget.give_back(1000)
    budget.take(1)


def test_each_key_has_its_own_rate_and_its_own_requests_under_way() -> None:
    now = 0.0
    callers = Callers(Limits(requests_per_second=1.0, burst=2, under_way=3), lambda: now)
    callers.enter("a")
    callers.enter("a")
    with pytest.raises(Busy, match="more than 1 requests a second") as busy:
        callers.enter("a")
    assert busy.value.headers == {"Retry-After": "1"}
    callers.enter("b")
    now = 10.0
    callers.enter("a")
    with pytest.raises(Busy, match="3 requests of this key are under way"):
        callers.enter("a")
    callers.leave("a")
    callers.enter("a")


def test_addresses_that_guess_keys_are_told_to_wait_and_are_forgotten_in_turn() -> None:
    callers = Callers(Limits(refusals_per_second=1.0, connections=2), lambda: 0.0)
    for _ in range(2):
        callers.refuse("10.0.0.1")
    with pytest.raises(Busy):
        callers.refuse("10.0.0.1")
    for other in ("10.0.0.2", "10.0.0.3"):
        callers.refuse(other)
    assert len(callers._refused) == 2


def test_a_body_may_take_as_long_as_the_slowest_rate_allows() -> None:
    limits = Limits(head_seconds=10.0, slowest_bytes_per_second=1000)
    assert limits.body_seconds(5000) == 15.0


async def test_head_and_body_of_an_answer_are_written_at_once() -> None:
    class Transport:
        def __init__(self) -> None:
            self.written: list[bytes] = []
            self.is_closed = False

        def write(self, data: bytes) -> None:
            self.written.append(data)

        def close(self) -> None:
            self.is_closed = True

    inner = Transport()
    transport = WholeAnswers(inner, asyncio.get_running_loop())
    transport.write(b"head ")
    transport.write(b"body")
    assert inner.written == []
    await asyncio.sleep(0)
    assert inner.written == [b"head body"]
    transport.write(b"head ")
    transport.write(large := b"x" * (WRITTEN_AT_ONCE + 1))
    assert inner.written[1:] == [b"head " + large]  # what is large is not kept back
    transport.write(b"last words")
    transport.close()
    await asyncio.sleep(0)
    assert inner.written[2:] == [b"last words"] and inner.is_closed
