"""Storages of the simulation: slow or failing ones, one that outlives its process, and a witness of all that is stored."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from asyncflow.transfer_queue.schema import DEAD, FILTERED, Schema
from asyncflow.transfer_queue.storage.base import QueueOwner, Storage, Stored
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.types import Array, Batch, GroupMeta, Ragged, RunError
from tests.sim.facts import Facts

Value = bytes


class Weather:
    """How the stores fare: seconds that an operation takes at most, and the share of them that fail."""

    def __init__(self, rng: random.Random, seconds: float, failures: float, counts: Counter[str]) -> None:
        self.rng, self.seconds, self.failures, self.counts = rng, seconds, failures, counts


class SlowMemory(MemoryStorage):
    """Memory behind a wait, which may end in an error."""

    def __init__(self, weather: Weather) -> None:
        super().__init__()
        self._weather = weather

    async def write(self, metas: Sequence[GroupMeta], batch: Batch) -> None:
        await self._wait()
        await super().write(metas, batch)

    async def read(self, indices: Array, columns: Sequence[str]) -> Batch:
        found = await super().read(indices, columns)
        await asyncio.sleep(self._weather.rng.random() * self._weather.seconds)
        return found

    async def drop(self, rows: Array, groups: Array) -> None:
        await self._wait()
        await super().drop(rows, groups)

    async def _wait(self) -> None:
        weather = self._weather
        await asyncio.sleep(weather.rng.random() * weather.seconds)
        if weather.rng.random() < weather.failures:
            weather.counts["storage failure"] += 1
            raise RunError("the memory does not answer")


class SimKeyValue:
    """A key-value store elsewhere: `data` outlives whoever uses it. What is on its way when its client dies still arrives."""

    is_durable = True
    is_immediate = False
    address = "simulated store"

    def __init__(self, data: dict[str, bytes], weather: Weather) -> None:
        self._data, self._weather = data, weather

    async def open(self, *, is_of_a_run: bool = False) -> None:
        await self._operation(lambda: None)

    async def change(self, values: Mapping[str, bytes], gone: Sequence[str]) -> None:
        def apply() -> None:
            self._data.update(values)
            for key in gone:
                self._data.pop(key, None)

        await self._operation(apply)

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return await self._operation(lambda: [self._data.get(key) for key in keys])

    async def keys(self, prefix: str) -> AsyncIterator[str]:
        for key in await self._operation(lambda: sorted(key for key in self._data if key.startswith(prefix))):
            yield key

    async def close(self) -> None:
        pass

    async def _operation(self, apply: Callable[[], Any]) -> Any:
        weather, loop = self._weather, asyncio.get_running_loop()
        fate, answer = weather.rng.random(), loop.create_future()

        def arrive() -> None:
            result = apply() if fate >= weather.failures / 2 else None  # some fail before, some after they were done
            if answer.done():
                return
            if fate < weather.failures:
                weather.counts["storage failure"] += 1
                answer.set_exception(RunError("the store does not answer"))
            else:
                answer.set_result(result)

        there = loop.call_later(weather.rng.random() * weather.seconds, arrive, context=contextvars.Context())
        try:
            return await answer
        except asyncio.CancelledError:
            there.cancel()
            if weather.rng.random() < 0.5:
                apply()
            raise


class Witness:
    """A storage that notes in `Facts` what another one has stored, and complains of what must not be."""

    def __init__(self, inner: Storage, number: int, facts: Facts) -> None:
        self.inner, self.number, self.facts = inner, number, facts
        self.is_durable, self.is_immediate = inner.is_durable, False
        self._schema = Schema((), (), 1)

    async def open(self, schema: Schema, owner: QueueOwner | None = None) -> None:
        self._schema = schema
        await self.inner.open(schema, owner)

    async def write(self, metas: Sequence[GroupMeta], batch: Batch) -> None:
        entries = list(self._entries(batch))
        for key, name, value in entries:
            self.facts.about_to_store(self.number, key, name, value)
        try:
            await self.inner.write(metas, batch)
        finally:
            self.facts.being_stored.difference_update((self.number, key, name) for key, name, _ in entries)
        for meta in metas:
            self.facts.admitted(self.number, meta)
        for key, name, value in entries:
            self.facts.stored(self.number, key, name, value)

    async def read(self, indices: Array, columns: Sequence[str]) -> Batch:
        return await self.inner.read(indices, columns)

    async def drop(self, rows: Array, groups: Array) -> None:
        await self.inner.drop(rows, groups)
        self.facts.freed(self.number, rows.tolist(), groups.tolist())

    async def recover(self) -> AsyncIterator[Stored]:
        found: dict[tuple[str, int, str], Any] = {}
        rows: list[int] = []
        async for stored in self.inner.recover():
            rows += stored.rows.tolist()
            if len(stored.rows) and stored.columns:
                batch = await self.inner.read(stored.rows, stored.columns)
                found.update({(self._kind(name), key, name): value for key, name, value in self._entries(batch)})
            yield stored
        if self.is_durable:
            self.facts.recovered(self.number, rows, found)

    async def keep(self, name: str, value: bytes) -> None:
        await self.inner.keep(name, value)

    async def kept(self, name: str) -> bytes | None:
        return await self.inner.kept(name)

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    async def remove(self) -> None:
        await self.inner.remove()

    async def close(self) -> None:
        await self.inner.close()

    def _kind(self, name: str) -> str:
        return self._schema.column(name).per

    def _entries(self, batch: Batch) -> Any:
        for name, values in batch.columns.items():
            keys = batch.indices if self._kind(name) == "row" else batch.groups
            for i, key in enumerate(keys.tolist()):
                if name in (DEAD, FILTERED):
                    yield key, name, bytes(np.asarray(values[i])).decode()
                else:
                    yield key, name, tuple(values[i].tolist()) if isinstance(values, Ragged) else float(values[i])
