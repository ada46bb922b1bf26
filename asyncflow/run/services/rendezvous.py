"""Rendezvous of the ranks of a train engine that lie on several machines: at the driver, through its TLS port.

    trainer/1: torch.distributed --store.py, from its thread--> proxy --TLS--> driver: Rendezvous <-- trainer/0 ...

consumes: the addresses that gloo and NCCL leave for one another
waits for: those of the others, `torch.distributed`'s own timeout at most
is unblocked by: their coming

So nobody else can join them, or tell them wrong addresses. What they then send each other goes without credentials.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any, Final

import psutil

from asyncflow.cluster.remote_node import own_address
from asyncflow.control.signal import Signal
from asyncflow.engines.base import EXCHANGE_SECONDS, RANKS_INTERFACES, RANKS_STORE
from asyncflow.registry import load
from asyncflow.transport import remote
from asyncflow.waits import RENDEZVOUS

AT_DRIVER: Final = "driver://"
"""Value in the environment of such ranks that says where they find each other."""


class Rendezvous:
    """The driver's service: `torch.distributed`'s store, of one attempt of the run's trainers."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = Signal()

    @remote
    async def put(self, key: str, value: bytes) -> None:
        """Have a value under this key from now on."""
        self._put(key, value)

    @remote
    async def get(self, key: str) -> bytes:
        """The value, when there is one."""
        await self._changed.until(lambda: key in self._values, RENDEZVOUS, key=key)
        return self._values[key]

    @remote
    async def add(self, key: str, amount: int) -> int:
        """Count: the sum of all amounts, which is the value, in decimal."""
        total = int(self._values.get(key, b"0")) + amount
        self._put(key, str(total).encode())
        return total

    @remote
    async def put_if(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Put it if the value is the expected one, or empty is expected and there is none. Returns what there is then."""
        if self._values.get(key, b"") == expected:
            self._put(key, value)
        return self._values.get(key, expected)

    @remote
    async def has(self, keys: list[str]) -> bool:
        """Whether all of them are there."""
        return all(key in self._values for key in keys)

    @remote
    async def remove(self, key: str) -> bool:
        """Remove a key. True: it was there."""
        return self._values.pop(key, None) is not None

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._changed.notify()


def meet_at_driver(rendezvous: Rendezvous, door: str) -> None:
    """Have this process's ranks find the others there, where its environment says so; they are asked from other threads then.

    Their libraries connect by the interface by which this machine reaches the driver's `door`, unless the user has named another.
    """
    if os.environ.get(RANKS_STORE) != AT_DRIVER:
        return
    if (interface := _interface_of(own_address(door).strip("[]"))) is not None:
        for name in RANKS_INTERFACES:
            os.environ.setdefault(name, interface)
    loop = asyncio.get_running_loop()

    def call(method: str, *arguments: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(getattr(rendezvous, method)(*arguments), loop).result(EXCHANGE_SECONDS)

    offer: Callable[[str, Callable[..., Any]], None] = load("function", "asyncflow.transport.torch_store:offer")
    offer(AT_DRIVER.partition(":")[0], call)


def _interface_of(address: str) -> str | None:
    kinds = (socket.AF_INET, socket.AF_INET6)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family in kinds and each.address.partition("%")[0] == address for each in addresses):
            return name
    return None
