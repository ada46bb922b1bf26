"""A unit in a file: what is written is what is read, and nothing else is believed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from asyncflow.transfer_queue.index import PAGE_BITS, Index
from asyncflow.transfer_queue.queue import TransferQueue
from asyncflow.transfer_queue.schema import Schema
from asyncflow.transfer_queue.snapshot import ENTRIES_A_FRAME, SnapshotFile, read_snapshot, write_snapshot
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.transfer_queue.unit import UnitOptions
from asyncflow.types import Batch, Column, GroupMeta, Interval, Ragged

SCHEMA = Schema(
    (Column("prompt", "int64", ragged=True, per="group"), Column("ids", "int32", ragged=True), Column("r", "float32")), (), 2
)


async def write(path: Path, groups: list[int]) -> SnapshotFile:
    """Groups of 4 rows; even ones have a prompt, the rows 0 and 1 of each ids, row 1 a reward too, row 3 has been dropped."""
    index, storage = Index(2), MemoryStorage()
    await storage.open(SCHEMA)
    index.admit([GroupMeta(group, 4, 0, Interval(0, 0)) for group in groups])
    even = [group for group in groups if group % 2 == 0]
    prompts = Ragged.from_arrays([np.full(group % 5, group) for group in even], "int64")
    parts = [Batch(np.empty(0, np.int64), np.array(even, np.int64), {"prompt": prompts})]
    index.claim_groups(even, 1)
    index.settle_groups(even, 1, is_written=True)
    for sample, names in ((0, ["ids"]), (1, ["ids", "r"])):
        rows = np.array(groups, np.int64) * 4 + sample
        columns = {"ids": Ragged.from_arrays([np.full(row % 3, row) for row in rows], "int32"), "r": rows.astype(np.float32)}
        parts.append(Batch(rows, np.array(groups, np.int64), {name: columns[name] for name in names}))
        index.settle(rows, SCHEMA.mask(names), is_written=True)
    for part in parts:
        await storage.write([], part)
    index.drop(np.array(groups, np.int64) * 4 + 3)
    return await write_snapshot(path, SCHEMA, index, storage, b"durable state")


@pytest.mark.parametrize("count", [0, 1, 5, ENTRIES_A_FRAME + 3, (1 << PAGE_BITS) // 4 + 9])
async def test_what_is_written_is_read(tmp_path: Path, count: int) -> None:
    path = tmp_path / "new" / "s"
    groups = [3 * i + (1 << 40) * (i % 2) for i in range(count)]
    written = await write(path, groups)
    assert written == SnapshotFile("s", 3 * count, path.stat().st_size) and [p.name for p in path.parent.iterdir()] == ["s"]
    durable_state, frames = read_snapshot(path, SCHEMA)
    metas: list[int] = []
    prompts: dict[int, list[int]] = {}
    ids: dict[int, list[int]] = {}
    rewards: dict[int, float] = {}
    for found, batch in frames:
        assert max(len(batch.indices), len(batch.groups)) <= ENTRIES_A_FRAME
        metas += [meta.group for meta in found]
        if "prompt" in batch.columns:
            prompts |= dict(zip(batch.groups.tolist(), (p.tolist() for p in batch.ragged("prompt")), strict=True))
        if "ids" in batch.columns:
            ids |= dict(zip(batch.indices.tolist(), (p.tolist() for p in batch.ragged("ids")), strict=True))
        if "r" in batch.columns:
            rewards |= dict(zip(batch.indices.tolist(), batch.dense("r").tolist(), strict=True))
    assert durable_state == b"durable state" and sorted(metas) == sorted(groups)
    assert prompts == {group: [group] * (group % 5) for group in groups if group % 2 == 0}
    wanted = {row: np.full(row % 3, row).astype(np.int32).tolist() for group in groups for row in (4 * group, 4 * group + 1)}
    assert ids == wanted
    assert rewards == {4 * group + 1: float(np.float32(4 * group + 1)) for group in groups}


async def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    await write(path, [0, 1, 2])
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=str(path)):
            pytest.fail(f"byte {at} of {len(whole)}: {list(read_snapshot(path, SCHEMA)[1])}")


async def test_every_missing_end_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    await write(path, [0, 1, 2])
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=str(path)):
            pytest.fail(f"{length} of {len(whole)} bytes: {list(read_snapshot(path, SCHEMA)[1])}")
    path.unlink()
    with pytest.raises(ValueError, match=str(path)):
        read_snapshot(path, SCHEMA)


async def test_a_file_of_other_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    await write(path, [0])
    for other in (Schema(SCHEMA.declared[:2], (), 2), Schema(SCHEMA.declared, (), 3), Schema(SCHEMA.declared[::-1], (), 2)):
        with pytest.raises(ValueError, match="was written by a queue with other columns, tasks or group size"):
            read_snapshot(path, other)


async def test_a_crash_before_the_end_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    await write(path, [0])
    before = path.read_bytes()

    async def crash(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "to_thread", crash)
        with pytest.raises(KeyboardInterrupt):
            await write(path, [0, 1])
    assert path.read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == ["s"]
    await write(path, [0, 1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s"]


async def test_a_snapshot_that_one_unit_cannot_write_leaves_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = TransferQueue(SCHEMA, [MemoryStorage(), MemoryStorage()], unit_options=UnitOptions(snapshot_dir=tmp_path))
    await queue.open()

    async def fail(name: str) -> SnapshotFile:
        raise OSError("no room")

    monkeypatch.setattr(queue.units[0], "snapshot", fail)
    with pytest.raises(OSError, match="no room"):
        await queue.snapshot("s")
    assert list(tmp_path.iterdir()) == []
    await queue.close()
