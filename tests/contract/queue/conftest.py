"""Every way to the queue: in one process, over a socket, each part served apart, over TLS; one unit or three."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.storage.base import Storage
from asyncflow.transfer_queue.storage.servers.redis import RedisStorage
from asyncflow.transport import Credentials
from tests.contract.queue.house import (
    WAYS,
    House,
    Open,
)
from tests.unhurried import loop_of


def pytest_asyncio_loop_factories(item: pytest.Item) -> Any:
    """No test waits for real seconds, but for those with a process at the other end."""
    return loop_of("redis_storage" not in item.fixturenames)


@pytest.fixture(scope="session")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return Credentials.create(tmp_path_factory.mktemp("key") / "key.pem")


@pytest.fixture(params=WAYS)
async def open_house(request: pytest.FixtureRequest, tmp_path: Path, credentials: Credentials) -> AsyncIterator[Open]:
    way, _, num_units = request.param.rpartition("-")
    async with contextlib.AsyncExitStack() as stack:

        async def opened(**options: Any) -> House:
            made = House(way, options.pop("num_units", int(num_units)), tmp_path, credentials, **options)
            return await stack.enter_async_context(made.running())

        yield opened


@pytest.fixture
async def house(open_house: Open) -> House:
    return await open_house()


@pytest.fixture
async def client(house: House) -> TransferQueueClient:
    return await house.connect("w")


@pytest.fixture
def redis_storage(redis_url: str, tmp_path: Path) -> Callable[[int], Storage]:
    prefix = "".join(c for c in tmp_path.name if c.isalnum())
    return lambda number: RedisStorage(redis_url, prefix, unit=number)
