"""What a key-value storage does when its store fails, loses or damages something; and which sentences the user gets."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from asyncflow.transfer_queue.schema import Schema
from asyncflow.transfer_queue.storage.base import QueueOwner
from asyncflow.transfer_queue.storage.servers.key_value import KeyValueStorage
from asyncflow.transfer_queue.storage.servers.mooncake import MooncakeKeyValue, MooncakeOptions, MooncakeStorage
from asyncflow.transfer_queue.storage.servers.redis import RedisStorage
from asyncflow.types import Batch, Column, GroupMeta, Interval, Ragged, RunError, UserError
from tests.builders import loop_turns
from tests.patience import patience
from tests.unit.transfer_queue.dictionary import Dictionary

SCHEMA = Schema((Column("prompt", "int64", ragged=True, per="group"), Column("reward", "float32"), Column("flag", "bool")), (), 3)
META = GroupMeta(1, 8, 0, Interval(0, 0))
NONE = np.empty(0, np.int64)


class Watched(Dictionary):
    """One that counts round trips and fails when told to: before it has done anything, or after."""

    def __init__(self, is_durable: bool = True) -> None:
        super().__init__(is_durable)
        self.fails = ""
        self.num_gets = 0
        self.gate: asyncio.Event | None = None
        self.answer: asyncio.Event | None = None  # holds up the answers to changes that have been made

    async def change(self, values: Mapping[str, bytes], gone: Sequence[str]) -> None:
        await asyncio.sleep(0)
        if self.fails == "before":
            raise RunError("no answer")
        await super().change(values, gone)
        if self.answer is not None:
            await self.answer.wait()
        if self.fails == "after":
            raise RunError("no answer")

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        self.num_gets += 1
        gate, self.gate = self.gate, None  # holds up one call
        await (gate.wait() if gate else asyncio.sleep(0))
        return await super().get_many(keys)


async def opened(store: Watched, schema: Schema = SCHEMA) -> KeyValueStorage:
    storage = KeyValueStorage(store, "run")
    await storage.open(schema)
    return storage


def put() -> tuple[list[GroupMeta], Batch]:
    return [META], Batch(np.arange(8, 16), np.array([1]), {"prompt": Ragged(np.arange(3), np.array([0, 3]))})


def rewards(*rows: int) -> Batch:
    return Batch(np.array(rows), np.array([1]), {"reward": np.array(rows, np.float32)})


async def test_a_read_is_one_round_trip() -> None:
    store = Watched()
    storage = await opened(store)
    await storage.write(*put())
    for row in range(8, 16):
        await storage.write((), rewards(row))
    found = await storage.read(np.arange(15, 7, -1), ["prompt", "reward"])
    assert store.num_gets == 1 and found.dense("reward").tolist() == list(range(15, 7, -1))


@pytest.mark.parametrize("when", ["before", "after"])
async def test_what_a_failed_write_may_have_left_is_deleted_by_the_next(when: str) -> None:
    store = Watched()
    storage = await opened(store)
    store.fails = when
    with pytest.raises(RunError):
        await storage.write(*put())
    assert storage.nbytes == 0
    store.fails = ""
    await storage.write(*put())
    assert len(store.values) == 1
    await storage.drop(np.arange(8, 16), np.array([1]))
    assert not store.values


async def test_a_read_finds_what_is_written_anew_meanwhile() -> None:
    store = Watched()
    storage = await opened(store)
    await storage.write(*put())
    await storage.write((), rewards(*range(8, 16)))
    store.gate = gate = asyncio.Event()
    reading = asyncio.create_task(storage.read(np.array([15]), ["reward"]))
    await asyncio.sleep(0)
    await storage.drop(np.arange(8, 15), NONE)
    gate.set()
    assert (await reading).dense("reward").tolist() == [15] and store.num_gets == 3


async def test_a_read_of_what_is_being_dropped_is_told_that_it_has_gone_and_not_that_it_is_lost() -> None:
    store = Watched()
    storage = await opened(store)
    await storage.write(*put())
    await storage.write((), rewards(8))
    store.answer = answer = asyncio.Event()
    dropping = asyncio.create_task(storage.drop(np.array([8]), NONE))
    while len(store.values) > 2:  # the prompt, and what has been dropped
        await asyncio.sleep(0)
    reading = asyncio.create_task(storage.read(np.array([8]), ["reward"]))
    await loop_turns()
    assert not reading.done()
    answer.set()
    await dropping
    with pytest.raises(LookupError, match="row 8 has no column 'reward'"):
        await reading


async def test_drops_and_writes_of_one_group_overlap() -> None:
    store = Watched()
    storage = await opened(store)
    await storage.write(*put())
    await storage.write((), rewards(*range(8, 16)))
    flag = Batch(np.array([15]), np.array([1]), {"flag": np.array([True])})
    await asyncio.gather(storage.drop(np.arange(8, 13), NONE), storage.drop(np.array([13, 14]), NONE), storage.write((), flag))
    found = await storage.read(np.array([15]), ["flag", "reward"])
    assert found.dense("flag").tolist() == [True] and found.dense("reward").tolist() == [15]
    assert len(store.values) == 4 and storage.nbytes == 24 + 4 + 1  # prompt, reward, flag, what has been dropped


async def test_a_group_outlives_the_rows_that_were_written_with_it() -> None:
    store = Watched()
    storage = await opened(store)
    await storage.write([META], rewards(*range(8, 16)))
    await storage.drop(np.arange(8, 14), NONE)
    await storage.drop(np.array([14]), NONE)
    again = await opened(store)
    assert [(s.metas, s.rows.tolist(), s.columns) async for s in again.recover()] == [([META], [15], ["reward"])]
    assert (await again.read(np.array([15]), ["reward"])).dense("reward").tolist() == [15] and again.nbytes == 4
    await storage.drop(np.array([15]), NONE)  # the meta is left, for the group is still there, and what has been dropped
    assert len(store.values) == 2
    third = await opened(store)
    assert [s async for s in third.recover()] == [] and third.nbytes == 0
    await third.drop(NONE, np.array([1]))
    assert not store.values


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_drop_that_failed_can_be_repeated(when: str) -> None:
    store = Watched()
    storage = await opened(store)
    await storage.write(*put())
    await storage.write((), rewards(8, 9, 10, 11))
    store.fails = when
    with pytest.raises(RunError):
        await storage.drop(np.array([8]), NONE)
    store.fails = ""
    await storage.drop(np.array([8]), NONE)
    assert storage.nbytes == 24 + 12
    again = await opened(store)
    rows = sorted(row for stored in [s async for s in again.recover()] for row in stored.rows.tolist())
    assert rows == list(range(9, 16)) and again.nbytes == 24 + 12


async def test_a_value_that_was_lost_or_damaged_is_named(caplog: pytest.LogCaptureFixture) -> None:
    store = Watched()
    storage = await opened(store)
    await storage.write(*put())
    (key,) = store.values
    whole = store.values[key]
    store.values[key] = whole[:-1] + b"\1"
    with pytest.raises(RunError, match=f"the dictionary: {key} cannot be used: the checksum is wrong"):
        await storage.read(np.array([8]), ["prompt"])
    del store.values[key]
    with pytest.raises(RunError, match=f"the dictionary has lost {key}"):
        await storage.read(np.array([8]), ["prompt"])
    store.values[key] = whole[:50]
    with pytest.raises(RunError, match="cannot be used"):
        [s async for s in (await opened(store)).recover()]
    store.values[key] = whole
    with pytest.raises(RunError, match="column 'prompt' is not declared"):
        [s async for s in (await opened(store, Schema((Column("reward", "float32"),), (), 3))).recover()]
    await storage.write((), rewards(8))
    del store.values[key]
    again = await opened(store)
    assert [s async for s in again.recover()] == []
    assert "the dictionary has something of groups [1] and no longer the groups themselves" in caplog.text
    await again.write(*put())
    assert len(store.values) == 1


async def test_what_is_not_durable_is_deleted_at_the_end() -> None:
    store = Watched(is_durable=False)
    storage = await opened(store)
    await storage.write(*put())
    await storage.keep("epoch", b"1")
    await storage.drop(np.array([8]), NONE)
    store.values["another's"] = b""
    await storage.close()
    assert list(store.values) == ["another's"]


async def test_units_do_not_see_each_other() -> None:
    store = Watched()
    first, second = KeyValueStorage(store, "run", unit=1), KeyValueStorage(store, "run", unit=11)
    for storage in (first, second):
        await storage.open(SCHEMA)
    await second.write(*put())
    await second.keep("epoch", b"2")
    assert [s async for s in first.recover()] == [] and await first.kept("epoch") is None


@pytest.mark.parametrize("prefix", ["", "a*", "a b", "a[1]", "ä"])
def test_a_prefix_that_could_mean_something_is_refused(prefix: str) -> None:
    with pytest.raises(UserError, match=r"the storage prefix .* is to be made of letters"):
        RedisStorage(prefix=prefix)


@pytest.mark.parametrize("url", ["redis://", "http://host", "unix://", "host:1", "redis://h:port"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="the redis url"):
        RedisStorage(url)


async def test_a_redis_that_is_not_there_is_named_without_its_password(tmp_path: Path) -> None:
    for url, address in (
        (f"unix://{tmp_path}/no", f"unix://{tmp_path}/no"),
        ("redis://me:secret@127.0.0.1:1/2", "redis://127.0.0.1:1/2"),
    ):
        with pytest.raises(RunError, match=f"the redis server at {address} does not .*is it running") as caught:
            await RedisStorage(url, timeout_seconds=2).open(SCHEMA)
        assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


async def test_a_redis_that_does_not_answer_has_failed_at_the_deadline(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(silent, tmp_path / "s")
    started = asyncio.get_running_loop().time()
    storage = RedisStorage(f"unix://{tmp_path}/s", timeout_seconds=0.3)
    with pytest.raises(RunError, match=r"no answer in 0.3 s; is it running"):
        await storage.open(SCHEMA)
    assert asyncio.get_running_loop().time() - started < 2
    await storage.close()
    server.close()


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(UserError, match=r"pip install 'asyncflow-rl\[redis\]'"):
        RedisStorage()
    with pytest.raises(UserError, match=r"pip install 'asyncflow-rl\[mooncake\]'"):
        MooncakeStorage()


def test_values_go_through_mooncakes_buffer_in_parts() -> None:
    store = MooncakeKeyValue.__new__(MooncakeKeyValue)
    store._chunk_bytes = 10
    parts = store._chunks({"a": bytes(4), "b": bytes(6), "c": bytes(1), "d": bytes(99), "e": b""})
    assert list(parts) == [["a", "b"], ["c"], ["d"], ["e"]]


# Mooncake, over a stand-in of its package: codes are its answers, and a value that is not there is an empty one


class Mooncake:
    """A store in this process. `codes`: what its calls answer where that is not 0."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.codes: dict[str, int] = {}
        self.told: list[object] = []
        self.can_answer = threading.Event()
        self.can_answer.set()

    def setup(self, *arguments: object) -> int:
        self.told.append(arguments)
        return self.codes.get("setup", 0)

    def upsert_batch(self, keys: list[str], values: list[bytes], config: SimpleNamespace) -> int:
        assert config.with_hard_pin
        self.told.append(keys)
        self.values.update(zip(keys, values, strict=True))
        return self.codes.get("upsert", 0)

    def batch_remove(self, keys: list[str], is_forced: bool) -> list[int]:
        assert is_forced
        return [self.codes.get("remove", 0 if self.values.pop(key, None) else -704) for key in keys]

    def get_batch(self, keys: list[str]) -> list[bytes]:
        self.can_answer.wait(patience(5))
        return [self.values.get(key, b"") for key in keys]

    def close(self) -> None:
        self.told.append("closed")


@pytest.fixture
def mooncake(monkeypatch: pytest.MonkeyPatch) -> Mooncake:
    store = Mooncake()
    package = SimpleNamespace(MooncakeDistributedStore=lambda: store, ReplicateConfig=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "mooncake", SimpleNamespace(store=package))
    monkeypatch.setitem(sys.modules, "mooncake.store", package)
    return store


async def test_columns_lie_in_a_mooncake_store_until_they_are_dropped(mooncake: Mooncake) -> None:
    storage = MooncakeStorage("there:1", hostname="here", segment_bytes=1 << 20, buffer_bytes=1 << 10)
    await storage.open(SCHEMA)
    assert mooncake.told == [("here", "P2PHANDSHAKE", 1 << 20, 1 << 10, "tcp", "", "there:1")]
    await storage.write(*put())
    await storage.write((), rewards(9, 8))
    found = await storage.read(np.array([8, 9]), ["prompt", "reward"])
    assert found.dense("reward").tolist() == [8.0, 9.0] and found.columns["prompt"][0].tolist() == [0, 1, 2]
    await storage.drop(np.arange(8, 16), np.array([1]))
    assert not mooncake.values
    await storage.close()
    assert mooncake.told[-1] == "closed"


async def test_an_attempt_has_keys_of_its_own_in_a_mooncake_store_and_takes_them_with_it(mooncake: Mooncake) -> None:
    for attempt in ("first", "second"):
        storage = MooncakeStorage("there:1", buffer_bytes=1 << 10)
        await storage.open(SCHEMA, QueueOwner("run", attempt))
        assert [s async for s in storage.recover()] == []
        await storage.write(*put())
        assert all(key.startswith(f"asyncflow/run/{attempt}/unit-0/") for key in mooncake.values) and mooncake.values
        await storage.remove()
        await storage.close()
        assert not mooncake.values


async def test_what_a_mooncake_store_refuses_is_told_with_what_to_do(mooncake: Mooncake) -> None:
    store = MooncakeKeyValue(MooncakeOptions("there:1", buffer_bytes=20, timeout_seconds=0.2))
    mooncake.codes["setup"] = -1
    with pytest.raises(RunError, match=r"the mooncake master at there:1 was not reached .*\(code -1\): is it running"):
        await store.open()
    await store.change({"a": bytes(6), "b": bytes(6)}, ["nothing"])  # twice half of the buffer; a key that is not there is no fault
    assert mooncake.told[1:] == [["a"], ["b"]]
    assert await store.get_many([]) == [] and await store.get_many(["a", "none"]) == [bytes(6), None]
    assert [key async for key in store.keys("")] == []  # it cannot list them
    mooncake.codes["upsert"] = -200
    with pytest.raises(RunError, match=r"did not take 6 bytes \(code -200\): raise segment_bytes or buffer_bytes"):
        await store.change({"c": bytes(6)}, [])
    mooncake.codes = {"remove": -5}
    with pytest.raises(RunError, match=r"did not delete 1 values \(code -5\)"):
        await store.change({}, ["a"])
    mooncake.can_answer.clear()
    with pytest.raises(RunError, match=r"there:1 did not answer within 0\.2 s: is it running"):
        await store.get_many(["a"])
    mooncake.can_answer.set()
