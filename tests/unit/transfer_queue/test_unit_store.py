"""What a unit holds over a storage that outlives it, fails or takes its time: nothing acknowledged is lost, nobody hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from asyncflow.transfer_queue import durable_state
from asyncflow.transfer_queue.batches import WireBatch
from asyncflow.transfer_queue.controller import Controller, TaskEvents
from asyncflow.transfer_queue.durable_state import SavedDurableState
from asyncflow.transfer_queue.notices import Notice
from asyncflow.transfer_queue.schema import Schema, TaskSpec
from asyncflow.transfer_queue.storage.base import QueueOwner
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.transfer_queue.storage.servers.key_value import KeyValueStorage
from asyncflow.transfer_queue.table import RowState
from asyncflow.transfer_queue.unit import StorageUnit, UnitOptions
from asyncflow.types import Batch, Column, GroupMeta, Interval, RunError
from tests.builders import loop_turns
from tests.unit.transfer_queue.dictionary import Dictionary

BITS = 2
SCHEMA = Schema(
    (Column("prompt", "int64", per="group"), Column("reward", "float32")), (TaskSpec("train", ("prompt", "reward")),), BITS
)
NONE = np.empty(0, np.int64)


class Failing(Dictionary):
    """`failing`: whether each of the next changes fails, before it is made or `after` that."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: list[bool] = []
        self.after = False

    async def change(self, values: Mapping[str, bytes], gone: Sequence[str]) -> None:
        fails = self.failing.pop(0) if self.failing else False
        if not fails or self.after:
            await super().change(values, gone)
        if fails:
            raise RunError("no answer")


class SlowMemory(MemoryStorage):
    """Writes wait at a gate."""

    is_immediate = False

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def write(self, metas: Sequence[GroupMeta], batch: Batch) -> None:
        await self.gate.wait()
        await super().write(metas, batch)


async def opened(store: Failing, owner: QueueOwner | None = None) -> StorageUnit:
    """A unit over what an earlier one has left."""
    unit = StorageUnit(KeyValueStorage(store, "run"), SCHEMA)
    await unit.open(owner)
    return unit


async def put(unit: StorageUnit, group: int = 1, size: int = 4) -> None:
    prompt = Batch(NONE, np.array([group]), {"prompt": np.array([10 * group])})
    await unit.put([GroupMeta(group, size, 0, Interval(0, 0))], WireBatch.of(prompt), 0)


async def rewarded(unit: StorageUnit, *rows: int) -> list[bool]:
    """Put rewards. Returns which were stored."""
    indices = np.array(rows, np.int64)
    batch = Batch(indices, np.unique(indices >> BITS), {"reward": indices.astype(np.float32)})
    return (await unit.put([], WireBatch.of(batch), 0)).tolist()


async def there(unit: StorageUnit, *rows: int) -> list[int]:
    """Those of the rows that are there, and can be read."""
    found = await unit.present(np.array(rows, np.int64))
    if len(found):
        groups = found >> BITS
        assert (await unit.columns(found, ["prompt"])).dense("prompt").tolist() == (10 * np.unique(groups)).tolist()
    return found.tolist()


@pytest.mark.parametrize("num_failing", [0, 1, 2])
async def test_a_group_of_which_rows_were_dropped_survives_any_number_of_restarts(num_failing: int) -> None:
    store = Failing()
    unit = await opened(store)
    await put(unit)
    await unit.drop(np.array([5]))
    for _ in range(4):
        store.failing = [True] * num_failing
        while True:
            try:
                unit = await opened(store)
                break
            except RunError:  # its process ends, and another one is started
                pass
        store.failing = []
        assert await there(unit, 4, 5, 6, 7) == [4, 6, 7]
    assert await rewarded(unit, 4, 5, 6, 7) == [True, False, True, True]
    await unit.drop(np.array([4, 6]))
    unit = await opened(store)
    assert await there(unit, 4, 5, 6, 7) == [7]
    await unit.drop(np.array([7]))
    assert await there(await opened(store), 4, 5, 6, 7) == []
    assert not [key for key in store.values if "fact" not in key]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("failing", ["1", "01", "001", "010101", "01111", "001011"])
async def test_what_a_drop_leaves_can_be_read_however_often_it_fails(failing: str, after: bool) -> None:
    store = Failing()
    unit = await opened(store)
    await put(unit)
    assert await rewarded(unit, 4, 5, 6, 7) == [True] * 4
    store.failing, store.after = [fails == "1" for fails in failing], after
    while True:
        try:
            await unit.drop(np.array([4, 5, 6]))  # more than half: what is left is written anew
            break
        except RunError:
            assert (await unit.columns(np.array([7]), ["prompt", "reward"])).dense("reward").tolist() == [7.0]
    store.failing = []
    for one in (unit, await opened(store)):
        assert await there(one, 4, 5, 6, 7) == [7]
        assert (await one.columns(np.array([7]), ["reward"])).dense("reward").tolist() == [7.0]
    assert len([key for key in store.values if "/group/" in key]) == 2
    await unit.drop(np.array([7]))
    assert not [key for key in store.values if "fact" not in key]


async def test_a_dropped_row_stays_away_when_the_storage_could_not_free_it() -> None:
    store = Failing()
    unit = await opened(store)
    await put(unit)
    keeping = unit.unit_store.storage.keep

    async def keep_and_break(name: str, value: bytes) -> None:
        await keeping(name, value)
        store.failing = [True]

    unit.unit_store.storage.keep = keep_and_break  # type: ignore[method-assign]
    with pytest.raises(RunError):
        await unit.drop(np.array([5]))
    assert await there(await opened(store), 4, 5, 6, 7) == [4, 6, 7]


async def test_a_row_that_a_drop_names_twice_counts_once() -> None:
    unit = StorageUnit(MemoryStorage(), SCHEMA, UnitOptions(capacity_rows=4))
    await unit.open()
    await put(unit)
    await unit.drop(np.array([6, 5, 6, 6, 6]))
    assert await there(unit, 4, 5, 6, 7) == [4, 7]
    assert (await unit.status()).capacity.reserved_rows == 2
    assert await rewarded(unit, 4, 7) == [True, True]


async def test_a_unit_that_ends_in_the_middle_of_a_write_waits_for_no_controller() -> None:
    storage = SlowMemory()
    unit = StorageUnit(storage, SCHEMA, UnitOptions(notify_timeout_seconds=60.0))
    await unit.open()
    await unit.follow("train", "one", "", 0, [])  # and nothing more is heard of it
    storage.gate.set()
    told = asyncio.create_task(put(unit, 1))
    while unit.unit_store.index.first_without(np.array([4]), SCHEMA.mask(["prompt"])):
        await asyncio.sleep(0)
    storage.gate.clear()
    writing = asyncio.create_task(put(unit, 2))
    await asyncio.sleep(0)
    closing = asyncio.create_task(unit.close())
    await asyncio.sleep(0)
    storage.gate.set()
    async with asyncio.timeout(5.0):
        await asyncio.gather(told, writing, closing)


async def test_a_group_put_again_after_its_units_death_begins_anew_for_who_knew_it() -> None:
    lost: list[int] = []
    controller = Controller("train", SCHEMA, TaskEvents(on_lost=lambda unit, rows: lost.extend(rows)))
    for start in range(2):
        unit = StorageUnit(MemoryStorage(), SCHEMA)
        await unit.open()
        await put(unit)
        await put(unit, 2)
        if not start:
            await rewarded(unit, 5, 6)
        news = await unit.follow("train", controller.table.incarnation, "", 0, [])
        controller.subscription.take(0, news, is_new_epoch=start > 0)
    assert lost == [4, 5, 6, 7]
    assert {controller.table.state_of(row) for row in (4, 5, 6, 7, 8)} == {RowState.WAITING}
    controller.close()


async def test_rows_that_were_dropped_and_whose_unit_died_before_it_could_say_so_are_not_lost() -> None:
    store, lost = Failing(), list[int]()
    controller = Controller("train", SCHEMA, TaskEvents(on_lost=lambda unit, rows: lost.extend(rows)))
    for start in range(2):
        unit = StorageUnit(KeyValueStorage(store, "run", unit=0), SCHEMA, UnitOptions(notify_timeout_seconds=0.01))
        await unit.open()
        if not start:
            await put(unit, 1)
            await put(unit, 2)
        controller.subscription.take(0, await unit.follow("train", controller.table.incarnation, "", 0, []), is_new_epoch=start > 0)
        if not start:
            assert controller.table.rows_of(0).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
            await unit.drop(np.array([5, 8, 9, 10, 11]))  # part of a group, and a whole one: the controller hears of neither
    assert lost == controller.subscription.lost == []
    assert controller.table.rows_of(0).tolist() == [4, 6, 7]
    controller.close()


@pytest.mark.parametrize("starts", [1, 2])
async def test_a_dropped_group_does_not_come_back_when_its_put_is_repeated(starts: int) -> None:
    """The answer of the put was lost, and by the time it is asked again its group has been trained and dropped."""
    store = Failing()
    unit = StorageUnit(KeyValueStorage(store, "run", unit=0), SCHEMA)
    await unit.open()
    meta = GroupMeta(5, 2, 0, Interval(0, 0))
    batch = Batch(SCHEMA.rows_of([meta]), np.array([5]), {"reward": np.ones(2, np.float32)})
    assert (await unit.put([meta], WireBatch.of(batch), 0)).all()
    await unit.drop(batch.indices)
    if starts == 2:
        await unit.close()
        unit = StorageUnit(KeyValueStorage(store, "run", unit=0), SCHEMA)
        await unit.open()
    assert not (await unit.put([meta], WireBatch.of(batch), 0)).any()
    assert len(await unit.present(batch.indices)) == 0
    await unit.close()


async def test_an_attempt_finds_what_its_own_units_have_stored_and_nothing_of_another_one() -> None:
    """Group 1 went in the first attempt, and group 2 stayed. Both come again."""
    store, first, second = Failing(), QueueOwner("mine", "first"), QueueOwner("mine", "second")
    unit = await opened(store, first)
    await put(unit, 1)
    await put(unit, 2)
    await unit.drop(np.arange(4, 8))
    again = await opened(store, first)
    await put(again, 1)
    assert await there(again, *range(4, 12)) == [8, 9, 10, 11]
    next_one = await opened(store, second)
    assert await there(next_one, *range(4, 12)) == []
    assert not [key for key in store.values if "first" in key]
    await put(next_one, 1)
    await put(next_one, 2)
    assert await there(next_one, *range(4, 12)) == [4, 5, 6, 7, 8, 9, 10, 11]


async def test_runs_over_one_prefix_leave_each_other_alone_and_a_queue_of_no_run() -> None:
    store = Failing()
    alone = await opened(store)
    await put(alone, 1)
    one, other = await opened(store, QueueOwner("mine", "a")), await opened(store, QueueOwner("mine-too", "b"))
    await put(one, 2)
    await put(other, 3)
    assert [await there(unit, *range(4, 16)) for unit in (alone, one, other)] == [[*range(n, n + 4)] for n in (4, 8, 12)]
    before = dict(store.values)
    await one.remove()
    assert before.keys() - store.values.keys() == {key for key in before if key.startswith("run/mine/")} != set()
    assert await there(await opened(store), 4) == [4]
    assert await there(await opened(store, QueueOwner("mine-too", "b")), 12) == [12]


async def test_what_an_attempt_has_stored_is_removed_when_all_writes_have_ended() -> None:
    store, owner = Failing(), QueueOwner("mine", "first")
    unit = await opened(store, owner)
    putting = asyncio.create_task(put(unit, 1))
    await asyncio.sleep(0)
    await asyncio.gather(putting, unit.remove())
    await unit.close()
    assert not store.values


class Forgetful(KeyValueStorage):
    """One that takes no notice of its owner."""

    async def open(self, schema: Schema, owner: QueueOwner | None = None) -> None:
        await super().open(schema)


async def test_a_storage_that_keeps_another_attempts_state_is_told_so() -> None:
    store = Failing()
    unit = StorageUnit(Forgetful(store, "run"), SCHEMA)
    await unit.open(QueueOwner("mine", "first"))
    await put(unit, 1)
    await unit.drop(np.arange(4, 8))
    with pytest.raises(RunError, match=r"the state of another attempt of this run: Forgetful\.open is to remove"):
        await StorageUnit(Forgetful(store, "run"), SCHEMA).open(QueueOwner("mine", "second"))


async def test_a_group_that_a_snapshot_brings_back_outlives_the_process(tmp_path: Path) -> None:
    store = Failing()
    unit = StorageUnit(KeyValueStorage(store, "run"), SCHEMA, UnitOptions(snapshot_dir=tmp_path))
    await unit.open()
    await put(unit)
    await unit.snapshot("s")
    await unit.drop(np.arange(4, 8))
    assert await unit.restore("s") == 4
    for one in (unit, await opened(store)):
        assert await there(one, 4, 5, 6, 7) == [4, 5, 6, 7]


async def test_groups_that_are_still_in_the_storage_stay_away_however_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_state, "GONE_KEPT", 1)
    store = Failing()
    unit = await opened(store)
    for group in (1, 2, 3):
        await put(unit, group)
    async with unit.unit_store.freeing.held_off:  # as while a snapshot is written
        for group in (1, 2, 3):
            await unit.drop(np.arange(4 * group, 4 * group + 4))
        assert await there(await opened(store), *range(4, 16)) == []
    await unit.unit_store.freeing.free()
    await put(unit, 4)
    await unit.drop(np.arange(16, 20))
    assert np.frombuffer(unit.unit_store.durable_state.now.gone, np.int64).tolist() == [4]


@pytest.mark.parametrize(("dropped", "left"), [([4, 5, 6, 7], []), ([5], [4, 6, 7])])
async def test_what_is_dropped_while_its_group_is_first_written_is_gone_for_the_controllers(
    dropped: list[int], left: list[int]
) -> None:
    storage, controller = SlowMemory(), Controller("train", SCHEMA)
    unit = StorageUnit(storage, SCHEMA)
    await unit.open()
    following = asyncio.create_task(controller.subscription.follow(0, unit))
    putting = asyncio.create_task(put(unit))
    await loop_turns()
    dropping = asyncio.create_task(unit.drop(np.array(dropped)))
    await loop_turns()
    storage.gate.set()
    await asyncio.gather(putting, dropping)
    assert controller.table.rows_of(0).tolist() == left == await there(unit, 4, 5, 6, 7)
    following.cancel()
    controller.close()


async def test_of_two_states_that_are_kept_at_once_the_newer_one_comes_last() -> None:
    storage, gate, kept = KeyValueStorage(Failing(), "run"), asyncio.Event(), list[bytes]()
    gates = [gate]

    async def keep(name: str, value: bytes) -> None:
        if gates:
            await gates.pop().wait()
        kept.append(value)

    storage.keep = keep  # type: ignore[method-assign]
    state, keeping = SavedDurableState(storage), list[asyncio.Task[None]]()
    for partition in range(2):
        state.end(Notice(task="train", ended_partition=partition))
        keeping.append(asyncio.create_task(state.keep()))
        await loop_turns()
    gate.set()
    await asyncio.gather(*keeping)
    assert kept[-1] == state.encoded()
