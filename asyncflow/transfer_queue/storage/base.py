"""The storage contract: where a unit keeps columns. What may be written, and which tasks are told, is the unit's business."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from asyncflow.transfer_queue.schema import Schema
from asyncflow.types import Array, Batch, GroupMeta


class Stored(msgspec.Struct):
    """Rows that `recover` finds, which have the same columns, with the groups (each once) that they belong to."""

    metas: list[GroupMeta]
    rows: Array
    columns: list[str]


class QueueOwner(msgspec.Struct, frozen=True):
    """Attempt of a run whose queue this is. What other attempts of the run have stored is nobody's any more: each makes again what
    is not in its checkpoint."""

    run: str
    attempt: str


class Storage(Protocol):
    """Columns by row or by group. Calls may overlap; two that concern the same entry of a column never do."""

    is_durable: bool
    """Whether what is written outlives the unit's process."""

    is_immediate: bool
    """Whether `write`, `drop` and `keep` never wait: nothing else happens between their beginning and their end."""

    async def open(self, schema: Schema, owner: QueueOwner | None = None) -> None:
        """Once, before anything else. `owner`: `recover` and `kept` find what this one has stored, and nothing else; what other
        attempts of its run have left is removed. None: a queue of no run, in which everything stays. Raises `RunError` saying what
        to do when the backend cannot be reached."""

    async def write(self, metas: Sequence[GroupMeta], batch: Batch) -> None:
        """Store a batch that fits the schema: all of it, or nothing and an exception. Row columns have an entry for each of
        `batch.indices`, group columns one for each of `batch.groups`; no entry has been there before. `metas`: the groups that are
        new. An array that is writeable is the caller's and is copied; a read-only one may be kept as it is."""

    async def read(self, indices: Array, columns: Sequence[str]) -> Batch:
        """The columns of rows, in the order asked; `groups` in the order of first appearance. All entries are there."""

    async def drop(self, rows: Array, groups: Array) -> None:
        """Free rows, and groups whose last row has gone. Their memory is given back, also when neighbours of theirs stay."""

    def recover(self) -> AsyncIterator[Stored]:
        """Rows that have outlived an earlier process."""

    async def keep(self, name: str, value: bytes) -> None:
        """Keep a part of the unit's durable state, in place of the one of this name before."""

    async def kept(self, name: str) -> bytes | None:
        """The part of this name."""

    @property
    def nbytes(self) -> int:
        """Bytes of values held."""

    async def remove(self) -> None:
        """Remove all that the owner has stored: nobody wants it any more. Nothing but `close` comes after it."""

    async def close(self) -> None:
        """Let go of the backend; what is durable stays there."""
