"""A storage unit in a file, without pickle: a header, then packed frames of groups and of rows that have the same columns.

Written beside its final name, flushed to the disk and renamed: a crash leaves the old file, or the new one, whole.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import numpy as np

from asyncflow.transfer_queue.index import Index
from asyncflow.transfer_queue.schema import Schema
from asyncflow.transfer_queue.storage.base import Storage
from asyncflow.transfer_queue.storage.packed import read_frames, write_frame
from asyncflow.types import Batch, Column, GroupMeta

MAGIC = b"AFQS1\n"
ENTRIES_A_FRAME = 1024
MAX_HEADER_BYTES = 64 << 20


class SnapshotFile(msgspec.Struct):
    """A unit's part of a snapshot."""

    name: str
    rows: int
    bytes: int


class _Header(msgspec.Struct):
    columns: list[Column]
    group_bits: int
    facts: bytes


async def write_snapshot(path: Path, schema: Schema, index: Index, storage: Storage, facts: bytes) -> SnapshotFile:
    """Write what a unit has now; rows dropped while it is being written may be missing. Other requests are served meanwhile."""
    header = msgspec.msgpack.encode(_Header(list(schema.columns), schema.group_bits, facts))
    partial, rows = path.with_name(path.name + ".partial"), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("wb") as file:
        file.write(MAGIC + len(header).to_bytes(8, "little") + header)
        async for metas, batch in _frames(schema, index, storage):
            await asyncio.to_thread(write_frame, file, metas, batch)
            rows += len(batch)
        file.flush()
        await asyncio.to_thread(os.fsync, file.fileno())
        size = file.tell()
    partial.rename(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the new name, too, is on the disk
    finally:
        os.close(directory)
    return SnapshotFile(path.name, index.num_rows, size)


def read_snapshot(path: Path, schema: Schema) -> tuple[bytes, Iterator[tuple[list[GroupMeta], Batch]]]:
    """(facts, frames). Raises `ValueError` when the file is none, is damaged, or is of a queue with other columns."""
    file = path.open("rb")
    try:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{path} is no snapshot of a transfer queue")
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{path} is damaged: a header of {length} bytes")
        try:
            header = msgspec.msgpack.decode(file.read(length), type=_Header)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if tuple(header.columns) != schema.columns or header.group_bits != schema.group_bits:
            raise ValueError(f"{path} was written by a queue with other columns, tasks or group size")
    except BaseException:
        file.close()
        raise

    def frames() -> Iterator[tuple[list[GroupMeta], Batch]]:
        with file:
            yield from read_frames(file)

    return header.facts, frames()


async def _frames(schema: Schema, index: Index, storage: Storage) -> AsyncIterator[tuple[list[GroupMeta], Batch]]:
    """Groups first, with their columns, then rows with theirs. What is there is looked at now, and read piece by piece."""
    groups = [(metas[i : i + ENTRIES_A_FRAME], m) for metas, m in index.group_records() for i in range(0, len(metas), ENTRIES_A_FRAME)]
    rows = [(r[i : i + ENTRIES_A_FRAME], m) for r, m, _ in index.records() for i in range(0, len(r), ENTRIES_A_FRAME)]
    none = np.empty(0, np.int64)
    for metas, mask in groups:
        live = [meta for meta in metas if meta.group in index.metas]
        names = [column.name for column in schema.columns if schema.mask([column.name]) & mask]
        of_each = [index.rows_of([meta.group])[:1] for meta in live]
        columns = (await storage.read(np.concatenate(of_each), names)).columns if live and names else {}
        yield live, Batch(none, np.array([meta.group for meta in live], np.int64), columns)
    for indices, mask in rows:
        there = index.present(indices)
        names = [c.name for c in schema.columns if c.per == "row" and schema.mask([c.name]) & mask]
        if len(there) and names:
            batch = await storage.read(there, names)
            yield [], batch
