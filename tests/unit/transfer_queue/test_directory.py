"""Who is where, and connections that are made again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asyncflow.transfer_queue.directory import HERE, Directory, Places
from asyncflow.transfer_queue.notices import Superseded
from asyncflow.transfer_queue.schema import Schema, TaskSpec
from asyncflow.transport import ConnectionLost, Peer, Server, remote
from asyncflow.types import Column
from tests.patience import patience, until

SCHEMA = Schema((Column("a", "int8"),), (TaskSpec("t", ("a",)),), 1)


class Echo:
    def __init__(self, says: str = "") -> None:
        self.says, self.calls = says, 0

    @remote
    async def say(self, what: str) -> str:
        self.calls += 1
        if what == "fail":
            raise ValueError("no")
        if what == "wait":
            await asyncio.sleep(30)
        return f"{self.says} {what}"


async def test_the_version_rises_with_every_place_and_who_waits_is_told() -> None:
    directory = Directory(SCHEMA)
    assert (await directory.describe(-1)).version == 0
    waiting = [asyncio.create_task(directory.describe(0)) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in waiting)
    await directory.register("unit/3", "unix:/a", 1)
    for task in waiting:
        assert (await asyncio.wait_for(task, 1)).places == {"unit/3": "unix:/a"}
    await directory.register("controller/t", "unix:/b", 2)
    await directory.register("unit/3", "unix:/c", 3)
    found = await directory.describe(0)
    assert (found.version, found.places) == (3, {"unit/3": "unix:/c", "controller/t": "unix:/b"}) and found.schema is SCHEMA


async def test_what_is_no_place_is_refused() -> None:
    directory = Directory(SCHEMA)
    for name in ("", "unit", "unit/", "unit/x", "unit/-1", "unit/1/2", "queue", "directory/0"):
        with pytest.raises(ValueError, match="is no place in a queue"):
            await directory.register(name, "unix:/a", 1)
    for name in ("controller/", "controller/u", "controller"):
        with pytest.raises(ValueError, match="there is no task"):
            await directory.register(name, "unix:/a", 1)
    assert directory.current.version == 0


def test_units_are_told_in_the_order_of_their_numbers() -> None:
    directory = Directory(SCHEMA)
    assert directory.current.units == []
    for number in (10, 2, 0):
        directory.add(f"unit/{number}")
    directory.add("controller/t")
    assert directory.current.units == [0, 2, 10]


async def test_changes_tell_of_units_once() -> None:
    directory = Directory(SCHEMA)
    directory.add("unit/0")
    seen: list[list[int]] = []

    async def watch() -> None:
        async for units in Places(directory, "w").changes():
            seen.append(units)

    watching = asyncio.create_task(watch())
    for name in ("controller/t", "unit/1", "unit/0", "unit/2"):
        await asyncio.sleep(0.01)
        directory.add(name)
    await asyncio.sleep(0.01)
    assert seen == [[0], [0, 1], [0, 1, 2]]
    watching.cancel()


class Town:
    """A hub with a directory, and a service that moves."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.directory = folder, Directory(SCHEMA)
        self.hub = Server({"directory": self.directory, "unit/9": Echo("hub")})
        self.servers: list[Server] = []
        self.echoes: list[Echo] = []
        self.peers: list[Peer] = []

    async def places(self, patience_seconds: float = 5.0) -> Places:
        peer = await Peer.connect(self.folder / "hub", "w")
        self.peers.append(peer)
        places = Places(self.directory, "w", peer=peer, patience_seconds=patience_seconds)
        await places.learn()
        return places

    async def serve(self, says: str, path: str) -> Server:
        self.echoes.append(Echo(says))
        self.servers.append(Server({"unit/0": self.echoes[-1]}))
        self.directory.add("unit/0", await self.servers[-1].start(self.folder / path))
        return self.servers[-1]


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    town = Town(tmp_path)
    await town.hub.start(tmp_path / "hub")
    yield town
    for peer in town.peers:
        await peer.close()
    for server in [*town.servers, town.hub]:
        await server.close()


@pytest.mark.parametrize("paths", [("a", "a"), ("a", "b")])
async def test_a_call_goes_on_when_who_serves_it_comes_back_here_or_elsewhere(town: Town, paths: tuple[str, str]) -> None:
    places = await town.places()
    await town.serve("first", paths[0])
    echo = places.get(Echo, "unit/0")
    assert await echo.say("x") == "first x"
    waiting = asyncio.create_task(echo.say("wait"))
    await asyncio.sleep(0.01)
    await town.servers[0].close()
    again = asyncio.create_task(echo.say("y"))
    await asyncio.sleep(0.1)
    assert not waiting.done() and not again.done()
    await town.serve("second", paths[1])
    assert await asyncio.wait_for(again, 3) == "second y"
    while town.echoes[1].calls < 2:  # the one that was under way has been repeated
        await asyncio.sleep(0.01)
    waiting.cancel()
    await places.close()


async def test_a_call_of_one_that_was_replaced_and_never_hung_up_is_asked_of_the_other(town: Town) -> None:
    places = await town.places()
    await town.serve("first", "a")
    places.watch()
    echo = places.get(Echo, "unit/0")
    parked = asyncio.create_task(echo.say("wait"))
    await until(lambda: town.echoes[0].calls)
    await town.serve("second", "b")  # the first one's machine is cut off: its connection stays open
    await until(lambda: town.echoes[1].calls)
    assert not parked.done()
    parked.cancel()
    await places.close()


async def test_a_connection_that_is_made_while_its_place_moves_is_not_used(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    places = await town.places()
    await town.serve("first", "a")
    connect = Peer.connect

    async def slowly(*arguments: Any, **options: Any) -> Peer:
        peer = await connect(*arguments, **options)
        if not town.servers[1:]:
            await town.serve("second", "b")
            await places.learn()
        return peer

    monkeypatch.setattr(Peer, "connect", slowly)
    assert await asyncio.wait_for(places.get(Echo, "unit/0").say("x"), patience(5)) == "second x"
    await places.close()


async def test_who_is_not_there_yet_is_waited_for(town: Town) -> None:
    places = await town.places()
    saying = asyncio.create_task(places.get(Echo, "unit/0").say("x"))
    await asyncio.sleep(0.05)
    await town.serve("late", "a")
    assert await asyncio.wait_for(saying, 3) == "late x"
    await places.close()


async def test_who_does_not_come_back_is_named_when_patience_is_over(town: Town) -> None:
    places = await town.places(0.2)
    with pytest.raises(ConnectionLost, match=r"unit/0 has not come back within 0\.2 s: unit/0 is not registered"):
        await asyncio.wait_for(places.get(Echo, "unit/0").say("x"), 3)
    server = await town.serve("x", "a")
    await places.get(Echo, "unit/0").say("x")
    await server.close()
    with pytest.raises(ConnectionLost, match=r"unit/0 has not come back within 0\.2 s: nothing answers at"):
        await asyncio.wait_for(places.get(Echo, "unit/0").say("x"), 3)
    await places.close()


async def test_an_error_of_the_service_is_not_a_reason_to_ask_again(town: Town) -> None:
    places = await town.places()
    await town.serve("x", "a")
    with pytest.raises(ValueError, match="no"):
        await places.get(Echo, "unit/0").say("fail")
    assert town.echoes[0].calls == 1
    await places.close()


async def test_when_the_queue_itself_is_gone_nobody_waits(town: Town) -> None:
    places = await town.places(60.0)
    server = await town.serve("x", "a")
    await places.get(Echo, "unit/0").say("x")
    await server.close()
    await town.hub.close()
    with pytest.raises(ConnectionLost):
        await asyncio.wait_for(places.get(Echo, "unit/0").say("x"), 3)
    await places.close()


async def test_who_asked_sooner_does_not_take_the_place_of_who_asked_later() -> None:
    directory = Directory(SCHEMA)
    first, second = await directory.term(), await directory.term()
    await directory.register("unit/0", "unix:/second", second)
    with pytest.raises(Superseded, match="another process serves unit/0"):
        await directory.register("unit/0", "unix:/first", first)
    await directory.register("unit/0", "unix:/second", second)  # said twice
    assert directory.current.places == {"unit/0": "unix:/second"}


async def test_what_the_hub_or_this_process_serves_needs_no_connection_of_its_own(town: Town) -> None:
    town.directory.add("unit/9", HERE)
    places = await town.places()
    assert await places.get(Echo, "unit/9").say("x") == "hub x"
    mine = Echo("mine")
    here = Places(town.directory, "w", here={"unit/9": mine}, known=town.directory.current)
    assert here.get(Echo, "unit/9") is mine
    places.known = None
    with pytest.raises(RuntimeError, match="`learn` first"):
        _ = places.units
