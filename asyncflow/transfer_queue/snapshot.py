"""A storage unit in a file, without pickle: a header, then packed frames of groups and of rows that have the same columns.

Written beside its final name, flushed to the disk and renamed: a crash leaves the old file, or the new one, whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from asyncflow.run_dir import sync_folder
from asyncflow.transfer_queue.index import Index
from asyncflow.transfer_queue.schema import Schema
from asyncflow.transfer_queue.storage.base import Storage
from asyncflow.transfer_queue.storage.packed import read_frames, write_frame
from asyncflow.types import Array, Batch, Column, GroupMeta

MAGIC = b"AFQS1\n"
ENTRIES_A_FRAME = 1024
MAX_HEADER_BYTES = 64 << 20


class SnapshotFile(msgspec.Struct):
    """A unit's part of a snapshot."""

    name: str
    rows: int
    bytes: int


class _SnapshotHeader(msgspec.Struct):
    """`frames`: how many follow."""

    columns: list[Column]
    group_bits: int
    durable_state: bytes = msgspec.field(name="facts")
    frames: int


async def write_snapshot(path: Path, schema: Schema, index: Index, storage: Storage, durable_state: bytes) -> SnapshotFile:
    """Write what a unit has at this moment. Until this returns, nothing may be freed; new rows may come and are not in it."""
    groups = [(m[i : i + ENTRIES_A_FRAME], mask) for m, mask in index.group_records() for i in range(0, len(m), ENTRIES_A_FRAME)]
    rows = [(r[i : i + ENTRIES_A_FRAME], mask) for r, mask, _ in index.records() for i in range(0, len(r), ENTRIES_A_FRAME)]
    count, a_row_of = index.num_rows, _a_row_of_each_group([r for r, _ in rows], schema.group_bits)
    columns_of_rows = [(r, names) for r, mask in rows if (names := _names(schema, mask, "row"))]
    num_frames = len(groups) + len(columns_of_rows)
    header = msgspec.msgpack.encode(_SnapshotHeader(list(schema.columns), schema.group_bits, durable_state, num_frames))
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as unless_whole:
        unless_whole.callback(partial.unlink, missing_ok=True)
        with partial.open("wb") as file:
            file.write(MAGIC + len(header).to_bytes(8, "little") + xxhash.xxh3_64_digest(header) + header)
            for metas, mask in groups:
                names = _names(schema, mask, "group")
                numbers = np.array([meta.group for meta in metas], np.int64)
                of_each = np.array([a_row_of[meta.group] for meta in metas], np.int64)
                columns = (await storage.read(of_each, names)).columns if names else {}
                await asyncio.to_thread(write_frame, file, metas, Batch(np.empty(0, np.int64), numbers, columns))
            for indices, names in columns_of_rows:
                await asyncio.to_thread(write_frame, file, [], await storage.read(indices, names))
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
            size = file.tell()
        partial.rename(path)
        unless_whole.pop_all()
    sync_folder(path.parent)
    return SnapshotFile(path.name, count, size)


def snapshot_path(directory: Path | None, name: str) -> Path:
    """Path of a snapshot's file. Raises `ValueError` without a directory, and for a name that could lead out of it."""
    if directory is None:
        raise ValueError("there is no snapshot directory; give one (snapshot_dir)")
    if not name or not all(c.isalnum() or c in "._-" for c in name) or name.startswith("."):
        raise ValueError(f"{name!r} is no name for a snapshot: letters, digits, '.', '_' and '-'")
    return directory / name


def read_snapshot(path: Path, schema: Schema) -> tuple[bytes, Iterator[tuple[list[GroupMeta], Batch]]]:
    """(durable state, frames). Raises `ValueError` when the file is none, is damaged, or is of a queue with other columns."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    try:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{path} is no snapshot of a transfer queue")
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{path} is damaged: a header of {length} bytes")
        checksum, packed = file.read(8), file.read(length)
        if len(packed) < length or xxhash.xxh3_64_digest(packed) != checksum:
            raise ValueError(f"{path} is damaged: its header is not whole")
        try:
            header = msgspec.msgpack.decode(packed, type=_SnapshotHeader)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if tuple(header.columns) != schema.columns or header.group_bits != schema.group_bits:
            raise ValueError(f"{path} was written by a queue with other columns, tasks or group size")
    except BaseException:
        file.close()
        raise

    def frames() -> Iterator[tuple[list[GroupMeta], Batch]]:
        count = 0
        try:
            with file:
                for frame in read_frames(file):
                    count += 1
                    yield frame
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if count != header.frames:
            raise ValueError(f"{path} is damaged: it has {count} of its {header.frames} frames")

    return header.durable_state, frames()


def _names(schema: Schema, mask: int, per: str) -> list[str]:
    return [column.name for column in schema.columns if column.per == per and schema.mask([column.name]) & mask]


def _a_row_of_each_group(rows: list[Array], group_bits: int) -> dict[int, int]:
    everything = np.concatenate(rows) if rows else np.empty(0, np.int64)
    groups, first = np.unique(everything >> group_bits, return_index=True)
    return dict(zip(groups.tolist(), everything[first].tolist(), strict=True))
