"""What a client asks for is held by it, or given back: no lease is left that nobody works on and somebody renews."""

from __future__ import annotations

import asyncio
import itertools
import re
from typing import cast

import pytest

from asyncflow.transfer_queue.client_leases import ClientLeases
from asyncflow.transfer_queue.controller import Controller, Handed
from asyncflow.transfer_queue.leases import Lease, Token, Want
from asyncflow.transfer_queue.queue import TransferQueue
from asyncflow.transfer_queue.schema import Schema, TaskSpec
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.types import Column
from tests.builders import loop_turns, meta
from tests.patience import patience

SCHEMA = Schema((Column("x", "int64"),), (TaskSpec("train", ("x",), lease_seconds=0.03),), 2)


def lease(number: int = 1) -> Lease:
    return Lease(Token("train", "now", number), [meta(0)], [[0, 1]], [[0, 0]], [0])


class Asked:
    """A controller: it answers when it is told to, and notes what it hears."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Handed | None] = asyncio.get_running_loop().create_future()
        self.heard: list[str] = []
        self.stale: set[int] = set()

    async def lease(self, want: Want, columns: list[str], key: int) -> Handed | None:
        return await self.answer

    async def give_back(self, token: Token) -> None:
        self.heard.append(f"back {token.lease}")

    async def renew(self, tokens: list[Token]) -> list[Token]:
        self.heard += [f"renew {token.lease}" for token in tokens]
        return [token for token in tokens if token.lease in self.stale]

    async def withdraw(self, key: int | None = None) -> None:
        self.heard.append("withdraw" if key is None else f"withdraw {key}")


def opened() -> tuple[ClientLeases, Asked]:
    asked = Asked()
    return ClientLeases(SCHEMA, lambda task: cast(Controller, asked), itertools.count(1)), asked


async def test_a_lease_is_held_until_something_has_been_said_of_its_last_row() -> None:
    leases, _ = opened()
    leases.hold(lease())
    leases.let_go(lease(), [0])
    assert leases.held == {lease().token: {1}}
    leases.let_go(lease(), [1])
    assert leases.held == {}
    leases.let_go(lease(), [1])  # of one that it does not hold


@pytest.mark.parametrize("is_on_its_way", [False, True])
async def test_a_request_whose_asker_has_gone_is_withdrawn_and_its_lease_given_back(is_on_its_way: bool) -> None:
    """The request alone: others of the same task are still wanted. It is not cancelled, or the answer would be lost on its way."""
    leases, asked = opened()
    asking = asyncio.create_task(leases.ask("train", Want(rows=2), []))
    await loop_turns(5)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await loop_turns()
    asked.answer.set_result(Handed(lease(3), None) if is_on_its_way else None)
    await loop_turns()
    assert re.fullmatch(r"withdraw \d+", asked.heard[0]) and leases.held == {}
    assert asked.heard[1:] == (["back 3"] if is_on_its_way else [])
    assert leases.num_withdrawals("train") == 0


async def test_a_request_whose_asker_has_gone_takes_none_of_another_client_with_it() -> None:
    queue = TransferQueue(SCHEMA, [MemoryStorage()])
    controller = queue.controllers["train"]  # to which both clients of its process have the same name
    asking = [asyncio.create_task(queue.client().leases.ask("train", Want(groups=1), [])) for _ in range(2)]
    await loop_turns(5)
    asking[0].cancel()
    await loop_turns(5)
    assert asking[0].cancelled() and not asking[1].done()
    controller.close()
    assert await asyncio.wait_for(asking[1], patience(5)) is None


async def test_a_withdrawn_request_comes_to_nothing_though_it_was_lost_on_its_way() -> None:
    leases, asked = opened()
    asking = asyncio.create_task(leases.ask("train", Want(rows=2), []))
    await loop_turns(5)
    assert leases.num_withdrawals("train") == 0
    await leases.withdraw("train")
    assert await asyncio.wait_for(asking, 5.0) is None and leases.num_withdrawals("train") == 1 and asked.heard == ["withdraw"]


async def test_a_lease_that_was_on_its_way_when_its_request_was_withdrawn_is_given_back() -> None:
    """The controller has handed it out and reads its columns; the answer to the withdrawal overtakes it."""
    leases, asked = opened()
    asking = asyncio.create_task(leases.ask("train", Want(rows=2), []))
    await loop_turns(5)
    await leases.withdraw("train")
    assert await asyncio.wait_for(asking, 5.0) is None
    asked.answer.set_result(Handed(lease(3), None))
    await loop_turns()
    assert asked.heard == ["withdraw", "back 3"] and leases.held == {}


async def test_a_request_that_was_withdrawn_and_has_no_answer_ends_with_the_connection() -> None:
    leases, asked = opened()
    asking = asyncio.create_task(leases.ask("train", Want(rows=2), []))
    await loop_turns(5)
    await leases.withdraw("train")
    assert await asyncio.wait_for(asking, 5.0) is None
    before = {task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "Asked.lease"}  # type: ignore[union-attr]
    leases.close()
    await loop_turns()
    assert len(before) == 1 and all(task.cancelled() for task in before) and asked.heard == ["withdraw"]


async def test_what_is_held_is_renewed_until_it_is_over() -> None:
    leases, asked = opened()
    leases.hold(lease(1))
    leases.hold(lease(2))
    asked.stale.add(2)
    renewing = asyncio.create_task(leases.renew_held())
    async with asyncio.timeout(60):
        while asked.heard.count("renew 1") < 3:
            await asyncio.sleep(0.005)
    renewing.cancel()
    assert asked.heard.count("renew 2") == 1 and list(leases.held) == [lease(1).token]
