"""A key-value store in this process, without failures."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence


class Dictionary:
    """`KeyValue` over a dictionary."""

    address = "the dictionary"

    def __init__(self, is_durable: bool = True) -> None:
        self.is_durable = is_durable
        self.values: dict[str, bytes] = {}

    async def open(self, *, is_of_a_run: bool = False) -> None: ...

    async def change(self, values: Mapping[str, bytes], gone: Sequence[str]) -> None:
        self.values.update(values)
        for key in gone:
            self.values.pop(key, None)

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.values.get(key) for key in keys]

    async def keys(self, prefix: str) -> AsyncIterator[str]:
        for key in list(self.values):
            if key.startswith(prefix):
                yield key

    async def close(self) -> None: ...
