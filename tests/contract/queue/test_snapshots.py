"""Snapshots, and what is taken up from them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.leases import Want
from asyncflow.transfer_queue.queue import TransferQueue
from asyncflow.transfer_queue.schema import Schema
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.transfer_queue.unit import UnitOptions
from asyncflow.types import Batch, Column, Ragged
from tests.builders import meta
from tests.contract.queue.house import (
    BITS,
    COLUMNS,
    House,
    Open,
    alone,
    counts,
    everything,
    generate,
    is_outputs,
    leased,
    outputs,
    over,
    parked,
    prompt_of,
    prompts_in,
    put,
    schema,
    stored_bytes,
    until,
    within,
)

SNAPSHOTS = over("process-1", "process-3", "units-1", "apart-3", "apart-tls-1")


async def contents(client: TransferQueueClient) -> dict[int, dict[str, bytes]]:
    """Every column of every row, mark, and state."""
    found: dict[int, dict[str, bytes]] = {}
    units = sorted((await client.status())[1])
    for row in range(4 * 40):
        for unit in units:
            for column in client.schema.columns:
                try:
                    [batch] = await client.read({unit: np.array([row])}, [column.name])
                except LookupError:
                    continue
                values = batch.columns[column.name]
                found.setdefault(row, {})[column.name] = (values[0] if isinstance(values, Ragged) else values[:1]).tobytes()
    return found


async def filled(client: TransferQueueClient) -> None:
    """Rows in all states, with columns of all kinds, and ends of steps and streams."""
    await client.put([meta(group, size=4, step=1) for group in (8, 9, 10)], everything([8, 9, 10]))
    await put(client, 0, 1, 2, 3, size=3)
    lease = (await leased(client, groups=3)).lease
    for rows in lease.rows:
        await client.complete(lease, outputs(*rows[:2]))
    await client.fail(lease, [lease.rows[0][2]], "again")
    await client.fail((await leased(client, rows=1)).lease, [lease.rows[0][2]], "dead of it")
    await client.filter([lease.rows[1][2]], "too easy")
    await client.complete_marks([(await leased(client, "train", partition=1)).lease])
    await leased(client, "train", partition=1)
    await leased(client, rows=1)
    await client.drop([lease.rows[2][0]])
    await client.end_partition("train", 5)
    await client.end_partition("rollout", 6)
    await client.close("eval")


@SNAPSHOTS
@pytest.mark.parametrize("num_units", [1, 2, 3])
async def test_a_snapshot_restored_into_any_number_of_units_is_the_queue_as_it_was(
    open_house: Open, tmp_path: Path, num_units: int
) -> None:
    house = await open_house(snapshot_dir=tmp_path / "snapshots")
    client = await house.connect("w")
    await filled(client)
    before, states = await contents(client), {task: await counts(client, task) for task in ("rollout", "train")}
    assert states["train"]["leased"] and states["rollout"]["leased"] and states["rollout"]["filtered"] and states["rollout"]["dead"]
    manifest = await within(house.queue.snapshot("s"))
    assert sum(file.rows for file in manifest.files) == 23 and len(manifest.files) == house.num_units
    await put(client, 30)  # later than the snapshot
    restored = TransferQueue(
        schema(), [MemoryStorage() for _ in range(num_units)], unit_options=UnitOptions(snapshot_dir=tmp_path / "snapshots")
    )
    async with restored.running():
        assert await restored.restore("s") == 23
        other = restored.client()
        await until(lambda: _has_rows(other, 23))
        assert await contents(other) == before
        for task, old in states.items():  # what was leased is ready again
            old["ready"] = old.get("ready", 0) + old.pop("leased")
            assert await counts(other, task) == old
        for task, partition in (("train", 5), ("rollout", 6)):
            assert await within(other.lease(task, Want(partition=partition))) is None
        assert await within(other.lease("eval")) is None
        rest = await leased(other, groups=99)
        assert (await other.complete(rest.lease, outputs(*rest.lease.indices))).all()
        train = await leased(other, "train", groups=99, partition=0)
        assert is_outputs(train) and sorted(prompts_in(train).items()) == [(group, prompt_of(group)) for group in range(4)]
        rows = np.array(sorted(before))
        await other.drop(rows)
        assert await stored_bytes(other) == 0 and sum(unit.rows for unit in (await other.status())[1].values()) == 0


async def _has_rows(client: TransferQueueClient, count: int) -> bool:
    return [sum((await counts(client, task)).values()) for task in ("rollout", "train")] == [count, count]


class Slow(MemoryStorage):
    """Reads wait until they may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_read = asyncio.Event()
        self.may_read.set()

    async def read(self, indices: np.ndarray, columns: Sequence[str]) -> Batch:
        await self.may_read.wait()
        return await super().read(indices, columns)


@over("process-1", "units-1")
async def test_what_is_dropped_and_put_during_a_snapshot_neither_spoils_nor_stops_it(open_house: Open, tmp_path: Path) -> None:
    house = await open_house(storage=lambda number: Slow(), snapshot_dir=tmp_path)
    client = await house.connect("w")
    await put(client, 0, 1)
    await generate(client)
    before, slow = await contents(client), house.storages[0]
    assert isinstance(slow, Slow)
    slow.may_read.clear()
    writing = await parked(house.queue.snapshot("s"))
    await within(client.drop([0, 1, 4]), 1.0)
    await put(client, 2)
    assert sorted((await leased(client, columns=[])).lease.indices) == [8, 9] and not writing.done()
    slow.may_read.set()
    assert (await within(writing)).files[0].rows == 4
    assert sorted(await contents(client)) == [5, 8, 9]
    await client.drop([5, 8, 9])
    assert await stored_bytes(client) == 0
    restored = TransferQueue(schema(), [MemoryStorage()], unit_options=UnitOptions(snapshot_dir=tmp_path))
    async with restored.running():
        assert await restored.restore("s") == 4
        assert await contents(restored.client()) == before


@alone
async def test_a_snapshot_is_hardly_larger_than_what_is_in_it(open_house: Open, tmp_path: Path) -> None:
    house = await open_house(snapshot_dir=tmp_path)
    client = await house.connect("w")
    for group in range(64):
        ids = Ragged.from_arrays([np.full(510, group)] * 4, "int64")
        rows = np.arange(4) + 4 * group
        batch = Batch(rows, np.array([group]), {"ids": ids, "prompt": Ragged.from_arrays([np.arange(8)], "int64")})
        await client.put([meta(group, size=4)], batch)
    payload = await stored_bytes(client)
    assert payload >= 1 << 20
    [file] = (await house.queue.snapshot("s")).files
    assert (tmp_path / file.name).stat().st_size == file.bytes < 1.05 * payload


async def restores(folder: Path, name: str = "s") -> int:
    queue = TransferQueue(schema(), [MemoryStorage()], unit_options=UnitOptions(snapshot_dir=folder))
    async with queue.running():
        return await queue.restore(name)


@alone
async def test_what_is_no_whole_snapshot_is_refused_by_name(open_house: Open, tmp_path: Path) -> None:
    house = await open_house(snapshot_dir=tmp_path)
    client = await house.connect("w")
    await client.put([meta(group, size=4) for group in (0, 1)], everything([0, 1]))
    await house.queue.snapshot("s")
    [manifest], [file] = tmp_path.glob("s.json"), tmp_path.glob("s.*.unit-0")
    assert sorted(path for path in tmp_path.iterdir() if path.suffix != ".sock") == sorted([manifest, file])
    whole = file.read_bytes()
    frames = [at for at in range(len(whole)) if whole[at : at + 4] == b"AFP\x01"]
    assert len(frames) >= 2
    damaged = {
        "cut short": whole[:-9],
        "cut at a frame": whole[: frames[-1]],
        "without frames": whole[: frames[0]],
        "a flipped bit": whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:],
        **{f"byte {at}": whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, frames[0], 37)},
        "empty": b"",
        "another file": b"PK\x03\x04" + whole[4:],
        "longer": whole + bytes(64),
    }
    for what, content in damaged.items():
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"s\.\w+\.unit-0"):
            pytest.fail(f"{what}: {await restores(tmp_path)} rows")
    file.rename(file.with_name(file.name + ".partial"))
    with pytest.raises(ValueError, match=r"s\.\w+\.unit-0"):
        await restores(tmp_path)
    file.write_bytes(whole)
    assert await restores(tmp_path) == 8
    manifest.rename(tmp_path / "s.json.partial")
    with pytest.raises(ValueError, match="there is no snapshot 's'"):
        await restores(tmp_path)


@alone
async def test_a_snapshot_that_fails_leaves_the_one_before(
    open_house: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = await open_house(snapshot_dir=tmp_path)
    client = await house.connect("w")
    await put(client, 0)
    await house.queue.snapshot("s")
    await put(client, 1)

    async def broken(*arguments: Any) -> Batch:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(house.storages[0], "read", broken)
        with pytest.raises(OSError, match="no space left"):
            await house.queue.snapshot("s")
    assert await restores(tmp_path) == 2
    await house.queue.snapshot("s")
    assert await restores(tmp_path) == 4


@alone
async def test_a_snapshot_of_a_queue_with_other_columns_is_refused(open_house: Open, tmp_path: Path) -> None:
    house = await open_house(snapshot_dir=tmp_path)
    await put(await house.connect("w"), 0)
    await house.queue.snapshot("s")
    other = Schema((*COLUMNS, Column("more", "int8")), schema().tasks, BITS)
    queue = TransferQueue(other, [MemoryStorage()], unit_options=UnitOptions(snapshot_dir=tmp_path))
    async with queue.running():
        with pytest.raises(ValueError, match=r"s\.\w+\.unit-0 was written by a queue with other columns"):
            await queue.restore("s")


@over("process-1", "apart-tls-1")
async def test_a_snapshot_goes_nowhere_but_into_its_directory(open_house: Open, tmp_path: Path) -> None:
    house = await open_house(snapshot_dir=tmp_path / "snapshots")
    client = await house.connect("w")
    await put(client, 0)
    before = sorted(tmp_path.rglob("*"))
    for name in ("../s", "/tmp/s", "a/b", "..", ".", "", ".hidden", "a\0b", "a\\b", "a b"):
        for call in (house.queue.snapshot, house.queue.restore, client._unit(0).snapshot, client._unit(0).restore):
            with pytest.raises(ValueError, match="is no name for a snapshot"):
                await call(name)
    assert sorted(path for path in tmp_path.rglob("*") if path.name != "snapshots") == before
    await house.queue.snapshot("s-1.a_b")


@alone
async def test_without_a_directory_there_are_no_snapshots(house: House) -> None:
    with pytest.raises(ValueError, match=r"there is no snapshot directory; give one \(snapshot_dir\)"):
        await house.queue.snapshot("s")
    with pytest.raises(ValueError, match=r"no snapshot directory"):
        await house.queue.restore("s")
