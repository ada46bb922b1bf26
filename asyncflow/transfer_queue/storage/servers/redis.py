"""Columns in a Redis server: they outlive the unit's process, and the server's too where it writes its log (`appendonly yes`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from asyncflow.transfer_queue.storage.servers.key_value import KeyValueStorage
from asyncflow.types import RunError, UserError

if TYPE_CHECKING:
    from redis.asyncio import Redis

KEYS_A_COMMAND = 1000  # a command of too many arguments keeps a server busy
RUN_SECONDS = 30 * 86400
"""So long a value of a run's stays after it was written: one that is killed and never goes on leaves nothing for ever."""
SCHEMES = ("unix", "redis", "rediss")


class RedisStorage(KeyValueStorage):
    """`KeyValueStorage` over a Redis server, each change a transaction (MULTI/EXEC)."""

    def __init__(
        self, url: str = "redis://127.0.0.1:6379", prefix: str = "asyncflow", timeout_seconds: float = 30.0, unit: int = 0
    ) -> None:
        """`url`: `unix:///path/to/socket`, `rediss://[user:password@]host:port/db` (TLS), or `redis://...` for a server on this
        machine or a network of one's own. All keys begin with `prefix`; each attempt of a run has some of its own there, which
        go with it, and queues that are served alone (`asyncflow queue serve`) are told apart by it. Raises `UserError` when the
        package is missing or `url` is none."""
        super().__init__(RedisKeyValue(url, timeout_seconds), prefix, unit)


class RedisKeyValue:
    """A `KeyValue` in a Redis server."""

    is_durable = True

    def __init__(self, url: str, timeout_seconds: float) -> None:
        try:
            import redis.asyncio  # only where it is chosen
        except ImportError as error:
            raise UserError("the redis storage needs a package: pip install 'asyncflow-rl[redis]'") from error
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES or not (parts.path if parts.scheme == "unix" else parts.hostname):
            raise UserError(f"the redis url {_public(url)!r} is to begin with unix:///path, rediss://host or redis://host")
        self.address = f"the redis server at {_public(url)}"
        self._timeout_seconds = timeout_seconds
        self._expires: int | None = None  # seconds
        self._errors = (redis.RedisError, OSError, TimeoutError)
        limits: dict[str, Any] = {"socket_timeout": timeout_seconds, "socket_connect_timeout": timeout_seconds}
        try:
            self._client: Redis = redis.asyncio.Redis.from_url(url, **limits)
        except ValueError as error:
            raise UserError(f"the redis url {_public(url)!r} cannot be used: {error}") from error

    async def open(self, *, is_of_a_run: bool = False) -> None:
        """See `KeyValue.open`."""
        self._expires = RUN_SECONDS if is_of_a_run else None
        async with self._deadline("is it running, and may this user connect?"):
            memory: dict[str, Any] = await self._client.info("memory")
        policy = memory.get("maxmemory_policy", "noeviction")
        if memory.get("maxmemory", 0) and policy != "noeviction":
            raise RunError(f"{self.address} throws values away when it is full ({policy}): set its maxmemory-policy to noeviction")

    async def change(self, values: Mapping[str, bytes], gone: Sequence[str]) -> None:
        """See `KeyValue.change`."""
        asked = self._deadline("is it still running, and has it memory left?")
        async with asked, self._client.pipeline(transaction=True) as transaction:
            for key, value in values.items():
                transaction.set(key, value, ex=self._expires)
            for start in range(0, len(gone), KEYS_A_COMMAND):
                transaction.delete(*gone[start : start + KEYS_A_COMMAND])
            await transaction.execute()

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `KeyValue.get_many`."""
        if not keys:
            return []
        async with self._deadline("is it still running?"):
            found: list[Any] = await self._client.mget(keys)
        return found

    async def keys(self, prefix: str) -> AsyncIterator[str]:
        """See `KeyValue.keys`."""
        cursor, seen = 0, set[str]()  # SCAN may name a key twice
        while True:
            async with self._deadline("is it still running?"):
                cursor, found = await self._client.scan(cursor, match=f"{prefix}*", count=1000)
            for name in (key if isinstance(key, str) else key.decode() for key in found):
                if name not in seen:
                    seen.add(name)
                    yield name
            if not cursor:
                return

    async def close(self) -> None:
        """See `KeyValue.close`."""
        async with self._deadline("it was being left"):
            await self._client.aclose()

    @asynccontextmanager
    async def _deadline(self, what_to_do: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                yield
        except self._errors as error:
            why = f"no answer in {self._timeout_seconds:g} s" if isinstance(error, TimeoutError) else f"{error}".rstrip(".")
            raise RunError(f"{self.address} does not do what it is asked: {why}; {what_to_do}") from error


def _public(url: str) -> str:
    """A url without its password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
