"""Ranks that find each other at the driver."""

from __future__ import annotations

import asyncio
import os
import ssl
import stat
import sys
from pathlib import Path

import pytest
from torch.distributed import FileStore

from asyncflow.config import parse
from asyncflow.engines.base import RANKS_STORE
from asyncflow.run.fleet import workers
from asyncflow.run.services.rendezvous import Rendezvous, meet_at_driver
from asyncflow.run_dir import RunDir, remove_shared_dir
from asyncflow.transport import Credentials, Server
from tests.patience import patience, until
from tests.unit.transport.bench import HELLO, frame, packed

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


async def test_a_stranger_changes_nothing_of_what_ranks_leave_for_one_another(tmp_path: Path) -> None:
    key, rendezvous = Credentials.create(tmp_path / "key.pem"), Rendezvous()
    Credentials.create(tmp_path / "other.pem")
    await rendezvous.put("0", b"127.0.0.1:1")
    server = Server({"rendezvous": rendezvous}, credentials=key)
    host, port = (await server.start("tls:127.0.0.1:0")).removeprefix("tls:").split(":")

    async def put(context: ssl.SSLContext | None) -> bytes:
        """Put another address there. What the server says to it."""
        try:
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
            writer.write(HELLO + frame(packed("request", 1, "rendezvous", "put", ("0", b"10.0.0.1:1"))))
            said = await asyncio.wait_for(reader.read(4096), patience(20))
            writer.close()
        except (ssl.SSLError, ConnectionError):
            return b""
        return said

    try:
        careless = [ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) for _ in range(3)]
        for context in careless:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        careless[1].load_cert_chain(tmp_path / "other.pem")  # the first one has no certificate at all
        careless[2].load_cert_chain(tmp_path / "key.pem")
        for stranger in (None, *careless[:2]):
            assert b"welcome" not in await put(stranger)
        assert rendezvous._values == {"0": b"127.0.0.1:1"}
        assert b"welcome" in await put(careless[2])  # the same words, of one who has the key
        await until(lambda: rendezvous._values == {"0": b"10.0.0.1:1"})
    finally:
        await server.close()


def test_ranks_of_one_machine_meet_in_a_folder_that_is_theirs_alone(tmp_path: Path) -> None:
    sections = {"model": {"path": "model"}, "data": {"path": "data"}, "plan": {"train": {"dp": 2}}}
    mask = os.umask(0)
    try:
        folder = RunDir(tmp_path).make_weights_dir()  # in which a job's fleet begins
        specs = workers(parse(sections), folder, is_training=True, are_trainers_there=False)
        (store,) = {
            Path(spec.environment[RANKS_STORE].removeprefix("file://")) for spec in specs if RANKS_STORE in spec.environment
        }
        rendezvous = FileStore(str(store), 1)
        rendezvous.set("0", "127.0.0.1:1")
        assert store.parent == folder and [entry.name for entry in folder.iterdir()] == [store.name]
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        os.umask(mask)
        remove_shared_dir(folder)


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
