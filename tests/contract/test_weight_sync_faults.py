"""Ends of a weight sync that die, hang, come late or lose their connection: an error in time that names them, and then the bits."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from asyncflow.transport import Credentials, Server
from asyncflow.transport.ahead import CHUNK_BYTES
from asyncflow.types import Array, HeldWeights
from asyncflow.waits import PULL, OpenWait, OpenWaits
from asyncflow.weight_sync import collective, network
from asyncflow.weight_sync.base import Manifest, WeightReceiver, WeightSyncError
from asyncflow.weight_sync.group import Group
from asyncflow.weight_sync.network import WHOLE_EVERY, NetworkReceiver, NodeReceiver
from tests.contract.weight_processes import NUM_BYTES, digest, make, running, weights
from tests.depth import in_gate
from tests.patience import patience, until

Options = Callable[..., dict[str, Any]]


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """As JSON has them; the deadline is long, so that whoever waits for it is noticed."""
    Credentials.create(tmp_path / "key.pem")
    places = {"directory": str(tmp_path / "weights"), "key": str(tmp_path / "key.pem")}
    return lambda **options: {**places, "deadline_seconds": 30.0, **options}


def encoded(manifest: Manifest) -> str:
    return msgspec.json.encode(manifest).decode()


async def fetched(receiver: WeightReceiver, manifest: Manifest) -> str:
    """The hash of what arrives, at the first or the second attempt."""
    try:
        return digest(await receiver.fetch(manifest))
    except WeightSyncError:
        return digest(await receiver.fetch(manifest))


@pytest.mark.parametrize("kind", ["collective", "network", "shared_memory"])
async def test_a_receiver_that_is_killed_keeps_nobody_waiting_and_comes_back(
    options: Options, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "GATHER_SECONDS", 90)
    given = options(num_receivers=2)
    sync = make(kind, given)
    sender, receiver = sync.sender("first"), sync.receiver("rollout/0")
    manifest, start = await sender.publish(0, HeldWeights(weights(0))), time.monotonic()
    with running("receiver", kind, json.dumps(given), "rollout/1", str(signal.SIGKILL), str(NUM_BYTES // 3)) as dying:
        dying.tell(encoded(manifest))
        assert await fetched(receiver, manifest) == digest(weights(0))
        assert await dying.answer() == ""  # it has ended
    assert time.monotonic() - start < patience(80)
    if kind == "collective":
        assert "version 0 did not reach rollout/1" in caplog.text and "rollout/0" not in caplog.text
    manifest = await sender.publish(1, HeldWeights(weights(1)))
    assert await fetched(receiver, manifest) == digest(weights(1))
    with running("receiver", kind, json.dumps(given), "rollout/1", "0", "0") as returned:
        assert await returned.ask(encoded(manifest)) == digest(weights(1))
        manifest = await sender.publish(2, HeldWeights(weights(2)))
        returned.tell(encoded(manifest))
        assert await fetched(receiver, manifest) == digest(weights(2)) == await returned.answer()
    await receiver.close()
    await sender.close()


async def test_a_receiver_that_is_slow_to_say_how_a_broadcast_ended_is_not_named_for_one_that_has_died(
    options: Options, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "GATHER_SECONDS", 90)
    monkeypatch.setattr(collective, "LAST_WORDS_SECONDS", 0.5)
    given = options(num_receivers=2)
    sync = make("collective", given)
    sender, receiver = sync.sender("first"), sync.receiver("rollout/0")
    assert isinstance(receiver, collective.CollectiveReceiver)
    receive, deadline = receiver._receive, time.monotonic() + patience(60)

    def slow(*arguments: Any) -> Any:
        try:
            return receive(*arguments)
        finally:
            while "did not reach" not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.02)

    monkeypatch.setattr(receiver, "_receive", slow)
    manifest = await sender.publish(0, HeldWeights(weights(0)))
    with running("receiver", "collective", json.dumps(given), "rollout/1", str(signal.SIGKILL), str(NUM_BYTES // 3)) as dying:
        dying.tell(encoded(manifest))
        assert await fetched(receiver, manifest) == digest(weights(0))
    assert "version 0 did not reach rollout/1" in caplog.text and "rollout/0" not in caplog.text
    await receiver.close()
    await sender.close()


async def test_a_member_that_hangs_holds_up_a_broadcast_until_the_deadline(
    options: Options, caplog: pytest.LogCaptureFixture
) -> None:
    deadline = patience(2.0)
    given = options(num_receivers=2, deadline_seconds=deadline)
    sync = make("collective", given)
    sender, receiver = sync.sender("first"), sync.receiver("rollout/0")
    manifest, start = await sender.publish(0, HeldWeights(weights(0))), time.monotonic()
    with running("receiver", "collective", json.dumps(given), "rollout/1", str(signal.SIGSTOP), str(NUM_BYTES // 3)) as hanging:
        hanging.tell(encoded(manifest))
        while not sender._asked and time.monotonic() < start + 20:  # its interpreter starts
            await asyncio.sleep(0.02)
        start = time.monotonic()
        assert await fetched(receiver, manifest) == digest(weights(0))
        manifest = await sender.publish(1, HeldWeights(weights(1)))
        assert await fetched(receiver, manifest) == digest(weights(1))
    assert time.monotonic() - start < max(patience(15), 7.5 * deadline)
    assert "version 0 did not reach rollout/1" in caplog.text and "rollout/0" not in caplog.text
    await receiver.close()
    await sender.close()


@pytest.mark.parametrize("kind", ["collective", "network"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_sender_that_is_dead_or_hangs_is_named_in_time(options: Options, kind: str, number: int) -> None:
    given = options(deadline_seconds=patience(1.0))
    receiver = make(kind, given).receiver("rollout/0")
    with running("sender", kind, json.dumps(given)) as sender:
        manifest = msgspec.json.decode(await sender.ask("0"), type=Manifest)
        assert digest(await receiver.fetch(manifest)) == digest(weights(0))
        manifest = msgspec.json.decode(await sender.ask("1"), type=Manifest)
        sender.signal(number)
        start = time.monotonic()
        with pytest.raises(WeightSyncError, match=f"the trainer's sender at {manifest.served_at}"):
            await receiver.fetch(manifest)
        assert time.monotonic() - start < patience(25)
    await receiver.close()


class Silent:
    """A way to a sender that never answers, and says nothing of its end."""

    address, is_lost = "tls:there:1", False

    def __init__(self) -> None:
        self.num_closed = 0

    async def peer(self, address: str) -> Silent:
        return self

    async def call(self, *arguments: object) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.num_closed += 1


@pytest.mark.parametrize("kind", ["collective", "network"])
async def test_a_connection_that_has_gone_silent_is_not_used_again(options: Options, kind: str, tmp_path: Path) -> None:
    sync: Any = make(kind, options(deadline_seconds=0.1))
    sender, silent = sync.sender("first"), Silent()
    manifest = await sender.publish(0, HeldWeights({"w": torch.zeros(4)}))
    receiver: Any = sync.receiver("r") if kind == "collective" else NodeReceiver(tmp_path / "files", sync._options, "r")
    receiver._dialler = silent
    with pytest.raises(WeightSyncError, match=f"the trainer's sender at {manifest.served_at}"):
        await asyncio.wait_for((receiver.fetch if kind == "collective" else receiver._pull)(manifest), patience(10))
    assert silent.num_closed
    await receiver.close()
    await sender.close()


async def test_who_is_late_gets_a_broadcast_of_its_own(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "GATHER_SECONDS", 0.3)
    sync = make("collective", options(num_receivers=2))
    sender, receivers = sync.sender("first"), [sync.receiver(f"rollout/{i}") for i in range(2)]
    manifest = await sender.publish(0, HeldWeights(weights(0)))
    for receiver in receivers:
        assert digest(await receiver.fetch(manifest)) == digest(weights(0))
    start = time.monotonic()
    monkeypatch.setattr(collective, "GATHER_SECONDS", 30)
    manifest = await sender.publish(1, HeldWeights(weights(1)))
    assert [digest(tensors) for tensors in await asyncio.gather(*(r.fetch(manifest) for r in receivers))] == 2 * [
        digest(weights(1))
    ]
    assert digest(await receivers[0].fetch(manifest)) == digest(weights(1))  # nobody who has it is waited for
    assert time.monotonic() - start < patience(25)


async def test_a_group_is_kept_while_its_members_are_the_same(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    formed = []
    original = Group.__init__
    monkeypatch.setattr(Group, "__init__", lambda self, *args, **kwargs: formed.append(args[1]) or original(self, *args, **kwargs))
    sync = make("collective", options(num_receivers=2))
    sender, receivers = sync.sender("first"), [sync.receiver(f"rollout/{i}") for i in range(2)]
    for version in range(4):
        manifest = await sender.publish(version, HeldWeights(weights(version)))
        await asyncio.gather(*(receiver.fetch(manifest) for receiver in receivers))
    assert sorted(formed) == [0, 1, 2]
    await receivers[1].close()
    receivers[1] = sync.receiver("rollout/1")
    for version in range(4, 8):  # it is not waited for before it has come back
        num_formed = len(formed)
        manifest = await sender.publish(version, HeldWeights(weights(version)))
        await asyncio.gather(*(receiver.fetch(manifest) for receiver in receivers))
    assert num_formed == len(formed) > 3


async def test_a_joiner_is_in_the_next_group_and_nobody_waits_for_one_that_has_left(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    formed = []
    original = Group.__init__
    monkeypatch.setattr(Group, "__init__", lambda self, *args, **kwargs: formed.append(args[2]) or original(self, *args, **kwargs))
    monkeypatch.setattr(collective, "GATHER_SECONDS", 0.3)
    sync = make("collective", options(num_receivers=2))  # one of them never comes
    sender, receivers = sync.sender("first"), [sync.receiver("rollout/0")]
    version = 0

    async def travels() -> list[int]:
        """The sizes of the groups that are formed for one more version, which all receivers ask for, one after the other."""
        nonlocal version
        formed.clear()
        version += 1
        manifest = await sender.publish(version, HeldWeights(weights(version)))
        fetching = []
        for receiver in receivers:
            fetching.append(asyncio.create_task(receiver.fetch(manifest)))
            await asyncio.sleep(0.1)  # the first ones would not wait for the last, if nobody knew of it
        assert {digest(await each) for each in fetching} == {digest(weights(version))}
        return formed

    assert await travels() == [2, 2]
    monkeypatch.setattr(collective, "GATHER_SECONDS", 30)
    start = time.monotonic()
    assert await travels() == []
    joiner = sync.receiver("rollout/2")
    receivers.append(joiner)
    await travels()
    assert set(await travels()) <= {3}  # by now everybody is known
    assert await travels() == []
    await joiner.close()
    receivers.remove(joiner)
    assert await travels() == [2, 2]
    assert time.monotonic() - start < patience(25)


async def test_the_workers_of_a_machine_pull_a_version_once(options: Options) -> None:
    sync = make("network", options())
    sender, receivers = sync.sender("first"), [sync.receiver(f"rollout/{i}") for i in range(3)]
    manifest = await sender.publish(0, HeldWeights(weights(0)))
    async with proxy(manifest.served_at) as wire:
        manifest = msgspec.structs.replace(manifest, served_at=wire.address)
        for tensors in await asyncio.gather(*(receiver.fetch(manifest) for receiver in receivers)):
            assert digest(tensors) == digest(weights(0))
    assert manifest.num_bytes < wire.passed < 1.01 * manifest.num_bytes


async def test_a_lost_connection_costs_no_more_than_what_was_under_way(options: Options) -> None:
    sync = make("network", options())
    sender, receiver = sync.sender("first"), sync.receiver("rollout/0")
    manifest = await sender.publish(0, HeldWeights(weights(0)))
    tensors, passed = await fetched_in_pieces(receiver, manifest, [6 * NUM_BYTES // 8, 7 * NUM_BYTES // 8])
    assert digest(tensors) == digest(weights(0))
    assert manifest.num_bytes < passed < 1.01 * manifest.num_bytes + 2 * 4 * CHUNK_BYTES


async def test_a_fetch_that_stands_says_how_much_has_come_and_since_when_nothing_has(options: Options) -> None:
    sync, waits = make("network", options()), OpenWaits()
    sender, receiver = sync.sender("first"), sync.receiver("rollout/0")
    manifest = await sender.publish(0, HeldWeights(weights(0)))
    goes_on, clock = asyncio.Event(), asyncio.get_running_loop().time
    waits.begin()

    async def stand() -> None:
        if wire.passed > NUM_BYTES // 2:
            await goes_on.wait()

    def pulls() -> list[OpenWait]:
        return [wait for wait in waits.now(clock()) if wait.name == PULL.name]

    async with proxy(manifest.served_at, stand) as wire:
        fetching = asyncio.create_task(receiver.fetch(msgspec.structs.replace(manifest, served_at=wire.address)))
        async with asyncio.timeout(patience(20.0)):
            while not pulls() or not pulls()[0].moved or (pulls()[0].still or 0.0) < 0.3:
                await asyncio.sleep(0.02)
        (pull,) = pulls()
        assert pull.words == f"bytes of version 0 from the trainer's sender at {wire.address}"
        assert 0 < pull.moved < NUM_BYTES and pull.still is not None and pull.still < pull.seconds
        goes_on.set()
        assert digest(await fetching) == digest(weights(0)) and pulls() == []
    await receiver.close()
    await sender.close()


async def test_a_machines_receiver_remembers_no_more_versions_than_it_has(options: Options) -> None:
    given = options()
    sync = make("network", given)
    sender, receiver = sync.sender("first"), sync.receiver("rollout/0")
    for version in range(8):
        await receiver.fetch(await sender.publish(version, HeldWeights(weights(version % 2))))
    assert isinstance(receiver, NetworkReceiver) and receiver._node is not None
    assert len(receiver._node._pulls) <= 3  # those of its two files, and the one on its way
    await receiver.close()
    await sender.close()


async def test_another_worker_receives_for_the_machine_when_its_receiver_is_killed(options: Options) -> None:
    given = options()
    sync = make("network", given)
    sender, receiver = sync.sender("first"), sync.receiver("rollout/0")
    manifest, is_half, may_go_on = await sender.publish(0, HeldWeights(weights(0))), asyncio.Event(), asyncio.Event()

    async def stop_half_way() -> None:
        if wire.passed > NUM_BYTES // 2:
            is_half.set()
            await may_go_on.wait()

    with running("receiver", "network", json.dumps(given), "rollout/1", "0", "0") as first:
        assert await first.ask(encoded(manifest)) == digest(weights(0))
        assert digest(await receiver.fetch(manifest)) == digest(weights(0))
        assert isinstance(receiver, NetworkReceiver) and receiver._node is None  # the other one is the machine's
        manifest = await sender.publish(1, HeldWeights(weights(1)))
        async with proxy(manifest.served_at, stop_half_way) as wire:
            fetching = asyncio.create_task(receiver.fetch(msgspec.structs.replace(manifest, served_at=wire.address)))
            await asyncio.wait_for(is_half.wait(), patience(20))
            first.signal(signal.SIGKILL)
            may_go_on.set()
            assert digest(await fetching) == digest(weights(1)) and receiver._node is not None
    folders = [path for path in (Path(given["directory"]) / "node").iterdir() if path.is_dir()]
    assert len(folders) == 1  # what the one before had is gone
    await receiver.close()
    await sender.close()


async def test_one_that_cannot_become_its_machines_receiver_leaves_nothing_and_may_try_again(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = make("network", options())
    sender, receiver = sync.sender("first"), sync.receiver("rollout/0")
    manifest = await sender.publish(0, HeldWeights(weights(0)))

    async def refused(self: Server, address: object) -> str:
        raise OSError(24, "Too many open files")

    before = set(threading.enumerate())
    with monkeypatch.context() as patched:
        patched.setattr(Server, "start", refused)
        with pytest.raises(OSError, match="Too many open files"):
            await receiver.fetch(manifest)
    # A thread that is told to end does so by itself.
    await until(lambda: not [thread for thread in set(threading.enumerate()) - before if thread.name == "weight-node"])
    assert digest(await receiver.fetch(manifest)) == digest(weights(0))
    await receiver.close()
    await sender.close()


async def test_a_machines_receiver_that_hangs_is_named_in_time(options: Options) -> None:
    given = options(deadline_seconds=patience(2.0))
    sync = make("network", given)
    sender, receiver = sync.sender("first"), sync.receiver("rollout/0")
    manifest = await sender.publish(0, HeldWeights(weights(0)))
    with running("receiver", "network", json.dumps(given), "rollout/1", "0", "0") as first:
        assert await first.ask(encoded(manifest)) == digest(weights(0))
        first.signal(signal.SIGSTOP)
        with pytest.raises(WeightSyncError, match="rollout/1, which receives weights for the workers of its machine"):
            await asyncio.wait_for(receiver.fetch(manifest), patience(10))
        first.signal(signal.SIGCONT)
        assert digest(await receiver.fetch(manifest)) == digest(weights(0))


def narrow(version: int) -> dict[str, torch.Tensor]:
    """18 MiB of bfloat16; in each version another hundredth of the numbers differs from those of version 0."""
    numbers = torch.arange(9 << 20).remainder(1 << 14).to(torch.int16)
    numbers += (torch.rand(len(numbers), generator=torch.Generator().manual_seed(version)) < 0.01).to(torch.int16)
    return {f"layer.{i}": part.view(torch.bfloat16) for i, part in enumerate(numbers.chunk(3))}


NARROW_BYTES = 18 << 20


@pytest.mark.parametrize("keep", in_gate(2, of=[1, 2]))  # the receiver writes over the version before, or beside it
async def test_a_narrow_version_comes_as_its_difference_from_the_one_before(options: Options, keep: int) -> None:
    sender, receiver = make("network", options()).sender("first"), make("network", options(keep=keep)).receiver("rollout/0")
    is_whole = {}
    for version in (1, 2, 3, 4, 5, 6, 7, WHOLE_EVERY, WHOLE_EVERY + 1):
        manifest = await sender.publish(version, HeldWeights(narrow(version)))
        if version in (4, 5):  # then the sender has none any more that the receiver has
            continue
        async with proxy(manifest.served_at) as wire:
            tensors = await receiver.fetch(msgspec.structs.replace(manifest, served_at=wire.address))
        assert digest(tensors) == digest(narrow(version))
        await receiver.release()
        is_whole[version] = wire.passed > NARROW_BYTES
        assert is_whole[version] or wire.passed < NARROW_BYTES / 50
    assert [version for version, whole in is_whole.items() if whole] == [1, 6, WHOLE_EVERY]
    await receiver.close()
    await sender.close()


@pytest.mark.parametrize("fault", ["other", "damaged"])
async def test_a_wrong_difference_costs_time_and_no_bit(options: Options, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, spoilt = network.difference, []

    def spoil(new: Array, old: Array) -> Array | None:
        spoilt.append(len(new))
        other = new.copy()
        other[7] ^= 1
        right = made(other if fault == "other" else new, old)
        return right if right is None or fault == "other" else right[:-5]

    monkeypatch.setattr(network, "difference", spoil)
    sender, receiver = make("network", options()).sender("first"), make("network", options(keep=1)).receiver("rollout/0")
    for version in (1, 2, 3):
        manifest = await sender.publish(version, HeldWeights(narrow(version)))
        async with proxy(manifest.served_at) as wire:
            tensors = await receiver.fetch(msgspec.structs.replace(manifest, served_at=wire.address))
        assert digest(tensors) == digest(narrow(version)) and wire.passed > NARROW_BYTES
        await receiver.release()
    assert spoilt
    await receiver.close()
    await sender.close()


async def test_a_connection_that_is_lost_among_differences_goes_on_with_them(options: Options) -> None:
    sender, receiver = make("network", options()).sender("first"), make("network", options(keep=1)).receiver("rollout/0")
    await receiver.fetch(await sender.publish(1, HeldWeights(narrow(1))))
    await receiver.release()
    tensors, passed = await fetched_in_pieces(receiver, await sender.publish(2, HeldWeights(narrow(2))), [30_000, 60_000])
    assert digest(tensors) == digest(narrow(2)) and passed < NARROW_BYTES / 20
    await receiver.close()
    await sender.close()


@dataclasses.dataclass
class Wire:
    """`passed`: bytes that the server has sent through."""

    address: str = ""
    passed: int = 0


async def nothing() -> None:
    pass


@asynccontextmanager
async def proxy(address: str, on_answer: Callable[[], Awaitable[None]] = nothing) -> AsyncIterator[Wire]:
    """In front of a server; `on_answer` is awaited at each piece that it sends, and a `ConnectionError` hangs up."""
    host, port = address.removeprefix("tls:").split(":")
    wire = Wire()

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            wire.passed += len(data)
            await on_answer()
            writer.write(data)
            await writer.drain()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(host, int(port))
        ways = [asyncio.create_task(ask(reader, server_writer)), asyncio.create_task(answer(server_reader, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for end in (writer, server_writer):
            end.transport.abort()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    wire.address = f"tls:127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield wire
    finally:
        server.close()


async def fetched_in_pieces(receiver: WeightReceiver, manifest: Manifest, cuts: list[int]) -> tuple[Any, int]:
    """Tensors of a version over a connection that breaks each time so many bytes have come, and the bytes that came in all."""
    left = list(cuts)

    async def cut() -> None:
        if left and wire.passed > left[0]:
            left.pop(0)
            raise ConnectionError

    async with proxy(manifest.served_at, cut) as wire:
        tensors = await receiver.fetch(msgspec.structs.replace(manifest, served_at=wire.address))
    assert not left
    return tensors, wire.passed
