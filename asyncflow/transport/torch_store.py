"""A store for `torch.distributed` that somebody else keeps: where processes leave their addresses for one another. And what its
errors say.

It is reached by one function, which blocks: `call(method, *arguments)`, of the methods put, get, add, put_if, has and remove.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from asyncflow.types import RunError


class RendezvousStore(dist.Store):  # type: ignore[name-defined]
    """Store with the methods that torch's rendezvous and process groups call. It leaves timeouts to `call`, which has its own."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call

    def set(self, key: str, value: str | bytes) -> None:
        """See torch's `Store.set`."""
        self._call("put", key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """See torch's `Store.get`."""
        found: bytes = self._call("get", key)
        return found

    def add(self, key: str, amount: int) -> int:
        """See torch's `Store.add`."""
        total: int = self._call("add", key, amount)
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """See torch's `Store.compare_set`."""
        old, new = (value.encode() if isinstance(value, str) else bytes(value) for value in (expected, desired))
        found: bytes = self._call("put_if", key, old, new)
        return found

    def check(self, keys: list[str]) -> bool:
        """See torch's `Store.check`."""
        has_all: bool = self._call("has", keys)
        return has_all

    def delete_key(self, key: str) -> bool:
        """See torch's `Store.delete_key`."""
        was_there: bool = self._call("remove", key)
        return was_there

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See torch's `Store.wait`."""
        for key in keys:
            self._call("get", key)


def offer(scheme: str, call: Callable[..., Any]) -> None:
    """Ranks of this process that are to meet at `<scheme>://` find each other in the store that `call` reaches."""
    store = RendezvousStore(call)

    def handler(url: str, **_: Any) -> Iterator[tuple[RendezvousStore, int, int]]:
        numbers = dict(parse_qsl(urlsplit(url).query))  # which torch has written there
        yield store, int(numbers["rank"]), int(numbers["world_size"])

    register_rendezvous_handler(scheme, handler)  # type: ignore[no-untyped-call]


def word_of_first(key: str, word: str | None, timeout_seconds: float) -> tuple[str, dist.Store]:  # type: ignore[name-defined]
    """Word that the first of torchrun's ranks says to all of them; the others' `word` is None. And torchrun's store, which the
    first rank may have to keep open for the others. Raises `RunError` if the first one does not say it in time."""
    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_seconds))))
        if word is not None:
            store.set(key, word)
        return store.get(key).decode(), store
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise RunError(
            f"rank 0 of torchrun was not heard of within {timeout_seconds:g} s ({reason(error)}): it says why"
        ) from error


def reason(error: BaseException) -> str:
    """Reason why processes have lost one another, without the place in a library's source and its advice."""
    text = " ".join(str(error).split()) or "no answer in time"
    return text.partition("] ")[2].partition(". ")[0] if text.startswith("[/") else text
