"""Columns in a key-value store: a write becomes one packed value for each of its groups; where everything is, is kept here.

    <prefix>/unit-<u>/group/<group>/<serial>    what one write said of a group: its rows' columns, its own, its meta if it is new
    <prefix>/unit-<u>/dropped/<group>           the rows of a group that have been dropped, while the group is still there
    <prefix>/unit-<u>/fact/<name>               a part of the unit's durable state

Where the queue is a run's, <prefix> is followed by /<run>/<attempt>: so an attempt finds what its own units have stored, if one is
started again, and nothing else.

A value is deleted when nothing of it is wanted any more, and written anew without the rest when that has become more than half.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Protocol

import msgspec
import numpy as np

from asyncflow.transfer_queue.batches import take, taken
from asyncflow.transfer_queue.schema import Schema
from asyncflow.transfer_queue.storage.base import QueueOwner, Stored
from asyncflow.transfer_queue.storage.memory import groups_of
from asyncflow.transfer_queue.storage.packed import pack, unpack
from asyncflow.types import Array, Batch, Column, GroupMeta, Ragged, RunError, UserError, Values

log = logging.getLogger(__name__)

FETCH_KEYS = 64  # values fetched at once by `recover`


class KeyValue(Protocol):
    """A key-value store. Every call has a deadline and raises `RunError`, saying what to do, when the store does not answer."""

    is_durable: bool
    address: str
    """Address for messages: no password."""

    async def open(self, *, is_of_a_run: bool = False) -> None:
        """Connect to the store. `is_of_a_run`: what has been written may go by itself when weeks have passed."""

    async def change(self, values: Mapping[str, bytes], gone: Sequence[str]) -> None:
        """Set values and delete keys: all or nothing where the store can do that; otherwise the deletions last."""

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values of these keys, in one round trip; None for a key that is not there."""

    def keys(self, prefix: str) -> AsyncIterator[str]:
        """The keys that begin so, each once."""

    async def close(self) -> None:
        """Leave the store."""


class _Value:
    """Facts of a stored value, which is one group's. `rows`: row -> its position and its bytes, of those that are there.
    `is_going`: it is being deleted."""

    __slots__ = ("columns", "group_columns", "has_meta", "is_going", "is_gone", "key", "nbytes", "num_stored", "rows")

    def __init__(self, key: str, batch: Batch, has_meta: bool, schema: Schema) -> None:
        self.key, self.has_meta = key, has_meta
        self.is_going = self.is_gone = False
        self.columns = frozenset(batch.columns)
        self.group_columns = frozenset(name for name in batch.columns if schema.column(name).per == "group")
        of_rows = self.columns - self.group_columns
        rows = batch.indices.tolist() if of_rows else []
        sizes = sum((_entry_bytes(batch.columns[name]) for name in of_rows), np.zeros(len(rows), np.int64)).tolist()
        self.rows = dict(zip(rows, enumerate(sizes), strict=True))
        self.num_stored = len(rows)
        self.nbytes = sum(sizes) + sum(batch.columns[name].nbytes for name in self.group_columns)

    def is_wanted_without(self, rows: set[int]) -> bool:
        """Whether something of it is still wanted when these rows have gone."""
        return self.has_meta or bool(self.group_columns) or not self.rows.keys() <= rows

    def forget(self, rows: Iterable[int]) -> None:
        self.nbytes -= sum(self.rows.pop(row, (0, 0))[1] for row in rows)


class KeyValueStorage:
    """The storage contract over a `KeyValue`."""

    def __init__(self, store: KeyValue, prefix: str, unit: int = 0) -> None:
        """Raises `UserError` when `prefix` has characters that could mean something to the store."""
        if not re.fullmatch(r"[A-Za-z0-9._:/-]+", prefix):
            raise UserError(f"the storage prefix {prefix!r} is to be made of letters, digits and . _ : / -")
        self.is_durable, self.is_immediate = store.is_durable, False
        self._store = store
        self._of_all, self._unit = f"{prefix}/", f"unit-{unit}/"  # the prefix of all units' keys, and what follows it in this one's
        self._session, self._serials = uuid.uuid4().hex[:8], itertools.count()
        self._schema = Schema((), (), 1)
        self._values: dict[int, list[_Value]] = {}
        self._dropped: dict[int, set[int]] = {}
        self._kept: set[str] = set()
        self._strays: set[str] = set()  # values of writes that failed: they may be there all the same
        self._dropping = asyncio.Lock()

    async def open(self, schema: Schema, owner: QueueOwner | None = None) -> None:
        """See `Storage.open`. A store that cannot list its keys is left to forget those of other attempts."""
        self._schema = schema
        await self._store.open(is_of_a_run=owner is not None)
        if owner is not None:
            of_run = f"{self._of_all}{owner.run}/"
            self._of_all = f"{of_run}{owner.attempt}/"
            await self._remove(of_run, but=self._of_all)

    async def write(self, metas: Sequence[GroupMeta], batch: Batch) -> None:
        """See `Storage.write`."""
        of_group = {meta.group: [meta] for meta in metas}
        packed: dict[str, bytes] = {}
        values: list[tuple[int, _Value]] = []
        for group, part in _by_group(batch, self._schema):
            meta = of_group.get(group, [])
            value = _Value(self._new_key(group), part, bool(meta), self._schema)
            packed[value.key] = b"".join(pack(part, meta))
            values.append((group, value))
        strays = list(self._strays)
        try:
            await self._store.change(packed, strays)
        except BaseException:
            self._strays.update(packed)
            raise
        self._strays.difference_update(strays)
        for group, value in values:
            self._values.setdefault(group, []).append(value)

    async def read(self, indices: Array, columns: Sequence[str]) -> Batch:
        """Values of these rows; see `Storage.read`. Raises `RunError` when the store has lost a value or damaged it."""
        groups = groups_of(indices, self._schema.group_bits)
        while True:
            places = {name: self._places(indices, groups, name) for name in columns}
            wanted = list({value.key: value for at in places.values() for value, _ in at}.values())
            fetched = await self._store.get_many([value.key for value in wanted])
            lost = [value for value, packed in zip(wanted, fetched, strict=True) if packed is None]
            if not lost:
                break
            if any(value.is_going for value in lost):
                async with self._dropping:  # then it is gone, or is not
                    continue
            if not all(value.is_gone for value in lost):  # those that are gone have been written anew meanwhile
                raise RunError(f"{self._store.address} has lost {lost[0].key}: is it out of memory, or shared with another run?")
        batches = {value.key: self._unpacked(value.key, packed)[1] for value, packed in zip(wanted, fetched, strict=True)}
        return Batch(
            indices, groups, {name: _assembled(self._schema.column(name), found, batches) for name, found in places.items()}
        )

    async def drop(self, rows: Array, groups: Array) -> None:
        """See `Storage.drop`."""
        going = set(groups.tolist())
        async with self._dropping:  # of two at once each would write anew what the other lets go
            of_group: dict[int, set[int]] = {}
            for row in rows.tolist():
                if (group := row >> self._schema.group_bits) not in going and group in self._values:
                    of_group.setdefault(group, set()).add(row)
            for group, dropped in list(of_group.items()):
                if not any(value.is_wanted_without(dropped) for value in self._values[group]):
                    going.add(group)
                    del of_group[group]
            old_tombs = [self._tomb(group) for group in going if group in self._dropped]
            tombs: dict[str, bytes] = {}
            for group, dropped in of_group.items():
                known = self._dropped.setdefault(group, set())  # empty: its tomb may be there from now on
                tombs[self._tomb(group)] = msgspec.msgpack.encode(sorted(dropped | known))
            await self._shrink(of_group, tombs)
            gone = [value for group in going for value in self._values.get(group, ())]
            for group, dropped in of_group.items():
                gone += [value for value in self._values[group] if not value.is_wanted_without(dropped)]
            strays = list(self._strays)
            for value in gone:
                value.is_going = True
            try:
                if tombs or gone or old_tombs:
                    await self._store.change(tombs, [*(value.key for value in gone), *old_tombs, *strays])
                    self._strays.difference_update(strays)
            finally:
                for value in gone:
                    value.is_going = False
            for value in gone:
                value.is_gone = True
            for group in (*going, *of_group):
                self._values[group] = [value for value in self._values.get(group, ()) if not value.is_gone]
                if not self._values[group]:
                    del self._values[group]
            for group, dropped in of_group.items():
                for value in self._values.get(group, ()):
                    value.forget(dropped)
                self._dropped[group].update(dropped)
            for group in going:
                self._dropped.pop(group, None)

    async def _shrink(self, of_group: Mapping[int, set[int]], tombs: Mapping[str, bytes]) -> None:
        """Write values anew of which less than half will be left. The old ones are deleted later, and not with the same change:
        when it fails, nobody knows whether it was made, and what is left has to be found all the same."""
        anew: dict[_Value, _Value] = {}
        packed: dict[str, bytes] = {}
        for group, dropped in of_group.items():
            for value in self._values[group]:
                num_left = len(value.rows.keys() - dropped)
                if num_left < len(value.rows) and 2 * num_left < value.num_stored and value.is_wanted_without(dropped):
                    smaller, packed_value = await self._without(group, value, dropped)
                    anew[value], packed[smaller.key] = smaller, packed_value
        if not anew:
            return
        try:
            await self._store.change({**packed, **tombs}, ())
        except BaseException:
            self._strays.update(packed)
            raise
        for value in anew:
            value.is_gone = True
            self._strays.add(value.key)
        for group in of_group:
            self._values[group] = [anew.get(value, value) for value in self._values[group]]

    async def recover(self) -> AsyncIterator[Stored]:
        """Raises `RunError` naming the value that is damaged, or that is not of this schema."""
        if not self.is_durable:
            return
        keys = sorted([key async for key in self._store.keys(self._prefix)])
        self._kept = {key for key in keys if key.startswith(f"{self._prefix}fact/")}
        tombs = [key for key in keys if key.startswith(f"{self._prefix}dropped/")]
        for key, packed in zip(tombs, await self._store.get_many(tombs), strict=True):
            self._dropped[int(key.rpartition("/")[2])] = set(msgspec.msgpack.decode(packed or b"\x90", type=list[int]))
        metas: dict[int, GroupMeta] = {}
        stored = [key for key in keys if key.startswith(f"{self._prefix}group/")]
        for start in range(0, len(stored), FETCH_KEYS):
            some = stored[start : start + FETCH_KEYS]
            for key, packed in zip(some, await self._store.get_many(some), strict=True):
                found, batch = self._unpacked(key, packed, is_checked=True)
                group = int(batch.groups[0])
                value = _Value(key, batch, bool(found), self._schema)
                value.forget(self._dropped.get(group, ()))
                self._values.setdefault(group, []).append(value)
                metas.update({meta.group: meta for meta in found})
        if orphans := sorted(self._values.keys() - metas.keys()):
            log.error(
                "%s has something of groups %s and no longer the groups themselves: a write that failed has arrived after they "
                "were dropped, or the store has lost them. What is left of them is deleted",
                self._store.address,
                orphans,
            )
            self._strays.update(value.key for group in orphans for value in self._values.pop(group))
        for recovered in self._alike(metas):
            yield recovered

    async def keep(self, name: str, value: bytes) -> None:
        """See `Storage.keep`."""
        key = f"{self._prefix}fact/{name}"
        await self._store.change({key: msgspec.msgpack.encode(value)}, ())  # encoded: some stores take no empty values
        self._kept.add(key)

    async def kept(self, name: str) -> bytes | None:
        """See `Storage.kept`."""
        found = (await self._store.get_many([f"{self._prefix}fact/{name}"]))[0]
        return None if found is None else msgspec.msgpack.decode(found, type=bytes)

    @property
    def nbytes(self) -> int:
        """See `Storage.nbytes`."""
        return sum(value.nbytes for values in self._values.values() for value in values)

    async def remove(self) -> None:
        """See `Storage.remove`. What is not durable goes with `close`."""
        await self._remove(self._of_all)

    async def close(self) -> None:
        """Delete what is not durable, which would only fill the store, and hang up."""
        try:
            if not self.is_durable:
                keys = [value.key for values in self._values.values() for value in values]
                await self._store.change({}, [*keys, *map(self._tomb, self._dropped), *self._kept, *self._strays])
        finally:
            await self._store.close()

    @property
    def _prefix(self) -> str:
        return self._of_all + self._unit

    async def _remove(self, prefix: str, but: str | None = None) -> None:
        """Delete all keys that begin with `prefix`, and not with `but`."""
        keys = [key async for key in self._store.keys(prefix) if but is None or not key.startswith(but)]
        if keys:
            await self._store.change({}, keys)

    def _new_key(self, group: int) -> str:
        return f"{self._prefix}group/{group}/{self._session}-{next(self._serials)}"

    def _tomb(self, group: int) -> str:
        return f"{self._prefix}dropped/{group}"

    def _unpacked(self, key: str, packed: bytes | None, is_checked: bool = False) -> tuple[list[GroupMeta], Batch]:
        try:
            metas, batch = unpack(packed or b"")
            if is_checked:
                self._schema.check(batch)
                self._schema.check_metas(metas)
        except ValueError as error:
            raise RunError(f"{self._store.address}: {key} cannot be used: {error}") from error
        return metas, batch

    def _places(self, indices: Array, groups: Array, name: str) -> list[tuple[_Value, int]]:
        """Value that has each entry of a column, and the position there. Raises `LookupError` when there is none."""
        if self._schema.column(name).per == "group":
            return [(self._value_with(group, name, None), 0) for group in groups.tolist()]
        bits = self._schema.group_bits
        found = [(self._value_with(row >> bits, name, row), row) for row in indices.tolist()]
        return [(value, value.rows[row][0]) for value, row in found]

    def _value_with(self, group: int, name: str, row: int | None) -> _Value:
        for value in self._values.get(group, ()):
            if name in value.columns and (row is None or row in value.rows):
                return value
        raise LookupError(f"group {group} has no column {name!r}" if row is None else f"row {row} has no column {name!r}")

    async def _without(self, group: int, value: _Value, dropped: set[int]) -> tuple[_Value, bytes]:
        """A value anew, without the rows that are being dropped or have been."""
        metas, batch = self._unpacked(value.key, (await self._store.get_many([value.key]))[0])
        left = np.array([at for row, (at, _) in value.rows.items() if row not in dropped], np.int64)
        names = value.columns if len(left) else value.group_columns
        columns = {n: batch.columns[n] if n in value.group_columns else taken(batch.columns[n], left) for n in names}
        part = Batch(batch.indices[left], batch.groups, columns)
        return _Value(self._new_key(group), part, value.has_meta, self._schema), b"".join(pack(part, metas))

    def _alike(self, metas: Mapping[int, GroupMeta]) -> Iterator[Stored]:
        """Rows that are there, those with the same columns together."""
        alike: dict[frozenset[str], tuple[dict[int, GroupMeta], list[int]]] = {}
        for group, values in self._values.items():
            of_group = frozenset(name for value in values for name in value.group_columns)
            first, dropped = group << self._schema.group_bits, self._dropped.get(group, set())
            for row in range(first, first + metas[group].size):
                if row not in dropped:
                    names = of_group.union(*(value.columns for value in values if row in value.rows))
                    of_kind, rows = alike.setdefault(names, ({}, []))
                    of_kind[group] = metas[group]
                    rows.append(row)
        for names, (of_kind, rows) in alike.items():
            columns = [column.name for column in self._schema.columns if column.name in names]
            yield Stored(list(of_kind.values()), np.array(rows, np.int64), columns)


def _entry_bytes(values: Values) -> Array:
    """int64 [n]: the bytes of each entry."""
    if isinstance(values, Ragged):
        return values.lengths * (values.values.itemsize * prod(values.values.shape[1:]))
    return np.full(len(values), values.itemsize * prod(values.shape[1:]), np.int64)


def _by_group(batch: Batch, schema: Schema) -> Iterator[tuple[int, Batch]]:
    """Each group's part of a batch, with one entry of the group columns."""
    of_rows = batch.indices >> schema.group_bits
    order = np.argsort(of_rows, kind="stable")
    ordered = of_rows[order]
    lows, highs = np.searchsorted(ordered, batch.groups, "left").tolist(), np.searchsorted(ordered, batch.groups, "right").tolist()
    for at, (group, low, high) in enumerate(zip(batch.groups.tolist(), lows, highs, strict=True)):
        part = take(schema, batch, order[low:high], np.array([at]))
        yield group, Batch(part.indices, part.groups, {name: values for name, values in part.columns.items() if len(values)})


def _assembled(column: Column, places: Sequence[tuple[_Value, int]], batches: Mapping[str, Batch]) -> Values:
    """The entries at places, copied, neighbours together."""
    runs: list[tuple[str, int, int]] = []
    for value, position in places:
        if runs and runs[-1][0] == value.key and runs[-1][2] == position:
            runs[-1] = (value.key, runs[-1][1], position + 1)
        else:
            runs.append((value.key, position, position + 1))
    empty = np.empty((0, *column.shape), column.dtype)
    if not column.ragged:
        return np.concatenate([empty, *(batches[key].dense(column.name)[low:high] for key, low, high in runs)])
    arrays, lengths = [empty], [np.zeros(1, np.int64)]
    for key, low, high in runs:
        ragged = batches[key].ragged(column.name)
        arrays.append(ragged.values[ragged.offsets[low] : ragged.offsets[high]])
        lengths.append(np.diff(ragged.offsets[low : high + 1]))
    return Ragged(np.concatenate(arrays), np.cumsum(np.concatenate(lengths)))
