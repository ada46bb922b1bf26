"""Columns in a Mooncake store: the memory of many machines as one, reached over TCP or RDMA.

Left out: recovery. The memory that a unit lends to the store goes with the unit, and a store cannot list its keys.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncflow.registry import by_name
from asyncflow.transfer_queue.storage.servers.key_value import KeyValueStorage
from asyncflow.types import RunError, UserError

NOT_FOUND = -704


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """Options of a unit in a Mooncake store.

    `master`: the address of `mooncake_master`; `metadata`: that of its metadata server, or `P2PHANDSHAKE` for none. `hostname`:
    where other machines reach this one; `protocol`: `tcp` or `rdma`, the latter over `devices`. The unit lends `segment_bytes` of
    memory to the store, and moves values through `buffer_bytes`: what one write says of one group is to fit into them.
    """

    master: str = "127.0.0.1:50051"
    metadata: str = "P2PHANDSHAKE"
    hostname: str = "127.0.0.1"
    protocol: str = "tcp"
    devices: str = ""
    segment_bytes: int = 4 << 30
    buffer_bytes: int = 256 << 20
    prefix: str = "asyncflow"
    timeout_seconds: float = 30.0
    unit: int = 0


class MooncakeStorage(KeyValueStorage):
    """`KeyValueStorage` over a Mooncake store. A write is not a transaction: one that fails may leave values, deleted later."""

    @by_name(MooncakeOptions)
    def __init__(self, options: MooncakeOptions) -> None:
        """Raises `UserError` when the package is missing or does not load."""
        super().__init__(MooncakeKeyValue(options), options.prefix, options.unit)


class MooncakeKeyValue:
    """A `KeyValue` in a Mooncake store."""

    is_durable = False

    def __init__(self, options: MooncakeOptions) -> None:
        try:
            store: Any = importlib.import_module("mooncake.store")  # only where it is chosen; it has no types
        except ImportError as error:
            hint = "" if isinstance(error, ModuleNotFoundError) else f"; it is there and does not load: {error}"
            raise UserError(f"the mooncake storage needs a package: pip install 'asyncflow-rl[mooncake]'{hint}") from error
        self.address = f"the mooncake master at {options.master}"
        self._options, self._timeout_seconds = options, options.timeout_seconds
        self._chunk_bytes = options.buffer_bytes // 2
        self._store: Any = store.MooncakeDistributedStore()
        self._config: Any = store.ReplicateConfig()
        self._config.with_hard_pin = True  # a queue's values are its only copy: none may be evicted

    async def open(self, *, is_of_a_run: bool = False) -> None:
        """See `KeyValue.open`."""
        own = self._options
        sizes = own.segment_bytes, own.buffer_bytes
        if code := await self._call(self._store.setup, own.hostname, own.metadata, *sizes, own.protocol, own.devices, own.master):
            raise RunError(f"{self.address} was not reached or took no segment of this unit's memory (code {code}): is it running?")

    async def change(self, values: Mapping[str, bytes], gone: Sequence[str]) -> None:
        """See `KeyValue.change`."""
        for some in self._chunks(values):
            if code := await self._call(self._store.upsert_batch, some, [values[key] for key in some], self._config):
                size = sum(len(values[key]) for key in some)
                raise RunError(f"{self.address} did not take {size} bytes (code {code}): raise segment_bytes or buffer_bytes")
        if gone:  # by force: a value that has just been read is protected for some seconds otherwise
            codes: list[int] = await self._call(self._store.batch_remove, list(gone), True)
            if wrong := [code for code in codes if code not in (0, NOT_FOUND)]:
                raise RunError(f"{self.address} did not delete {len(wrong)} values (code {wrong[0]}): is it running?")

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `KeyValue.get_many`."""
        if not keys:
            return []
        found: list[bytes] = await self._call(self._store.get_batch, list(keys))
        return [value or None for value in found]

    async def keys(self, prefix: str) -> AsyncIterator[str]:
        """None: the store cannot list them."""
        for nothing in list[str]():
            yield nothing

    async def close(self) -> None:
        """See `KeyValue.close`."""
        await self._call(self._store.close)

    def _chunks(self, values: Mapping[str, bytes]) -> Iterator[list[str]]:
        """The keys of values that fit through the buffer together."""
        some: list[str] = []
        room = self._chunk_bytes
        for key, value in values.items():
            if some and len(value) > room:
                yield some
                some, room = [], self._chunk_bytes
            some.append(key)
            room -= len(value)
        if some:
            yield some

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the store in a thread: its calls block."""
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await asyncio.to_thread(function, *arguments)
        except TimeoutError as error:
            raise RunError(f"{self.address} did not answer within {self._timeout_seconds:g} s: is it running?") from error
