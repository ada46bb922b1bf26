"""Ranks that find each other at the driver."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from asyncflow.run.services.rendezvous import Rendezvous, meet_at_driver
from asyncflow.transport import Credentials, Server
from tests.patience import patience

RANK = Path(__file__).parent / "rendezvous_rank.py"


async def test_ranks_that_know_the_driver_alone_find_each_other_by_tls(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    rendezvous = Rendezvous()
    server = Server({"rendezvous": rendezvous}, credentials=Credentials.create(key))
    address = await server.start("tls:127.0.0.1:0")
    pipe = asyncio.subprocess.PIPE
    ranks = [
        await asyncio.create_subprocess_exec(sys.executable, str(RANK), str(rank), "3", address, str(key), stdout=pipe, stderr=pipe)
        for rank in range(3)
    ]
    try:
        async with asyncio.timeout(patience(100)):
            said = await asyncio.gather(*(rank.communicate() for rank in ranks))
    finally:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()
        await server.close()
    assert [out.decode() for out, _ in said] == [f"{rank} 6 lo\n" for rank in range(3)], said
    assert rendezvous._values  # it was there that they met


async def test_what_is_counted_and_what_is_swapped() -> None:
    store = Rendezvous()
    waiting = asyncio.create_task(store.get("late"))
    await asyncio.sleep(0)  # it waits by now
    assert [await store.add("n", 2), await store.add("n", 3), await store.get("n")] == [2, 5, b"5"]
    assert await store.put_if("a", b"", b"1") == b"1" and await store.put_if("a", b"2", b"3") == b"1"
    assert await store.put_if("b", b"2", b"3") == b"2" and not await store.has(["b"])
    assert await store.has(["a", "n"]) and not await store.has(["a", "late"]) and not waiting.done()
    await store.put("late", b"x")
    assert await asyncio.wait_for(waiting, patience(5.0)) == b"x"
    assert await store.remove("a") and not await store.remove("a") and not await store.has(["a"])


def test_a_worker_that_is_told_nothing_meets_where_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCFLOW_RANKS_STORE", "file:///somewhere")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    meet_at_driver(Rendezvous(), "")  # asks nobody: it would have no event loop for it
