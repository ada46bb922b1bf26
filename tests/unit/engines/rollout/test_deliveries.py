"""Responses are handed over some together, in order, to the loops that wait for them; what is the last of its request is due."""

import asyncio

import numpy as np
import pytest

from asyncflow.engines.base import Response
from asyncflow.engines.rollout import deliveries
from asyncflow.engines.rollout.deliveries import HOLD_SECONDS, Deliveries


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(deliveries, "time", clock)
    return clock


def response(sample: int) -> Response:
    spans = np.zeros((1, 2), np.int64)
    return Response(sample, np.zeros(1, np.int64), np.zeros(1, np.float32), version_spans=spans, finish_reason="stop")


async def test_from_one_handing_over_to_the_next_what_is_made_waits_and_goes_in_order(clock: Clock) -> None:
    made, taken = Deliveries(), list[Response | Exception]()
    deliver, items = made.to(asyncio.get_running_loop(), taken.append, 4), [response(sample) for sample in (2, 0, 1)]
    assert not made.are_due
    deliver(items[0])
    assert made.are_due  # nothing was handed over before
    made.hand_over()
    for item in items[1:]:
        clock.now += 0.4 * HOLD_SECONDS
        deliver(item)
        assert not made.are_due
    await asyncio.sleep(0)
    assert taken == items[:1]
    clock.now += 0.4 * HOLD_SECONDS
    assert made.are_due
    made.hand_over()
    assert not made.are_due
    await asyncio.sleep(0)
    assert taken == items


async def test_the_last_of_a_request_and_errors_are_due_at_once(clock: Clock) -> None:
    made, loop = Deliveries(), asyncio.get_running_loop()
    taken: dict[str, list[Response | Exception]] = {"whole": [], "part": [], "failed": []}
    whole, part, failed = (made.to(loop, taken[name].append, 2) for name in taken)
    part(response(0))
    made.hand_over()
    whole(response(0))
    assert not made.are_due
    whole(response(1))
    assert made.are_due
    made.hand_over()
    part(response(1))
    assert made.are_due
    made.hand_over()
    failed(ValueError("broken"))
    assert made.are_due
    made.hand_over()
    await asyncio.sleep(0)
    assert [len(items) for items in taken.values()] == [2, 2, 1] and isinstance(taken["failed"][0], ValueError)


async def test_every_loop_gets_its_own_and_a_closed_one_stops_no_other(clock: Clock) -> None:
    made, here, gone = Deliveries(), list[Response | Exception](), list[Response | Exception]()
    closed = asyncio.new_event_loop()
    made.to(closed, gone.append, 1)(response(0))
    made.to(asyncio.get_running_loop(), here.append, 1)(response(1))
    closed.close()
    made.hand_over()
    await asyncio.sleep(0)
    assert len(here) == 1 and not gone
