"""Results: there when they are asked for, kept until they have been retrieved, dropped with their session."""

import asyncio

import pytest

from asyncflow.service.limits import Busy, Denied
from asyncflow.service.tinker.answers import Failure, Fields
from asyncflow.service.tinker.results import Results


def results(kept_bytes: int = 10_000, largest_number: int = 10) -> Results:
    return Results(kept_bytes=kept_bytes, largest_number=largest_number)


async def test_a_result_is_waited_for_and_may_be_asked_for_again() -> None:
    made = results()
    made.begin("s:1", "s")
    assert await made.get("s:1", 0.01) is None
    waiting = asyncio.create_task(made.get("s:1", 10))
    await asyncio.sleep(0)
    made.settle("s:1", Fields({"a": 1}))
    made.settle("s:1", Failure("too late"))
    assert await waiting == await made.get("s:1", 0) == Fields({"a": 1})
    with pytest.raises(Denied):
        await made.get("s:2", 0)


async def test_only_results_that_were_retrieved_make_room_for_others() -> None:
    made = results(kept_bytes=2_500)
    for number in range(6):
        made.begin(f"s:{number}", "s")
        made.settle(f"s:{number}", Fields({"number": number}))
    for number in range(1, 5):
        await made.get(f"s:{number}", 0)
    assert [f"s:{number}" in made for number in range(6)] == [True, False, False, True, True, True]


async def test_a_session_may_leave_so_many_results_and_takes_them_with_it() -> None:
    made = results(largest_number=2)
    for number in range(2):
        made.begin(f"s:{number}", "s")
    with pytest.raises(Busy, match="2 results of this session"):
        made.begin("s:2", "s")
    made.begin("other:0", "other")
    made.settle("s:0", Fields({}))
    await made.get("s:0", 0)
    made.begin("s:2", "s")
    waiting = asyncio.create_task(made.get("s:2", 10))
    await asyncio.sleep(0)
    made.forget("s")
    assert isinstance(await waiting, Failure)
    assert "s:0" not in made and "s:2" not in made and "other:0" in made
    made.settle("s:2", Fields({}))  # by work that ends late
    assert "s:2" not in made
