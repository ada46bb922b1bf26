"""The end of a hosted run: one that cannot be written, and clients that are to know of it."""

from __future__ import annotations

import asyncio
import errno
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncflow.cli.serve import until_stopped
from asyncflow.config import parse
from asyncflow.run_dir import RunDir
from asyncflow.service import hosted as hosted_module
from asyncflow.service.hosted import HostedRun
from asyncflow.types import RunError
from tests.patience import patience, until


async def test_a_server_whose_run_cannot_be_stopped_in_order_ends_all_the_same(tmp_path: Path) -> None:
    """On a full disk: else it would listen for ever, and refuse whatever it is asked."""

    async def stop() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    config: Any = None
    hosted = HostedRun(config, tmp_path / "journal")
    run: Any = SimpleNamespace(stop=stop, is_resuming=False, job=SimpleNamespace(interrupt=lambda: None, journal=None))
    hosted._run = run
    for _ in range(2):  # a client's request, and the server's own end
        with pytest.raises(OSError, match="No space left"):
            await hosted.stop()
    assert hosted.over.is_set()
    assert hosted.failure == "the run has not ended in order: [Errno 28] No space left on device", "its exit status is not 0"


async def test_a_run_is_stopped_to_its_end_also_where_the_client_that_asked_for_it_is_gone(tmp_path: Path) -> None:
    """Else nothing of its end is written, and the server would say that all is in order."""
    may_end, calls = asyncio.Event(), []

    async def stop() -> None:
        calls.append("begun")
        await may_end.wait()
        calls.append("ended")

    hosted = HostedRun(cast(Any, None), tmp_path / "journal")
    job = SimpleNamespace(interrupt=lambda: None, journal=None)
    hosted._run = cast(Any, SimpleNamespace(stop=stop, is_resuming=False, job=job))
    asked = asyncio.create_task(hosted.stop())
    while not calls:
        await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert not hosted.over.is_set()
    may_end.set()
    await hosted.stop()
    assert calls == ["begun", "ended"] and hosted.over.is_set() and not hosted.failure


def test_a_run_that_an_earlier_server_has_begun_is_not_stopped_before_its_model_is_written(tmp_path: Path) -> None:
    """Else a client whose first request to stop was lost with that server would be told that the run has ended in order."""
    config = cast(Any, SimpleNamespace(run_dir=tmp_path / "run"))
    resumed, fresh = (HostedRun(config, tmp_path / "journal", resume=resume) for resume in (True, False))
    config.run_dir.mkdir()
    resumed.check_may_stop()  # nothing was trained
    (config.run_dir / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    with pytest.raises(RunError, match="has 2 steps, and its model is yet to be written: call init_engines first"):
        resumed.check_may_stop()
    fresh.check_may_stop()
    folder = RunDir(config.run_dir)
    folder.model.mkdir()
    folder.note_model(1)
    with pytest.raises(RunError, match="has 2 steps"):
        resumed.check_may_stop()
    folder.note_model(2)
    resumed.check_may_stop()


async def test_a_server_goes_when_the_clients_that_generated_know_that_the_run_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the answer to their next request. One that makes no more requests is not waited for."""
    farewell = patience(60)
    monkeypatch.setattr(hosted_module, "FAREWELL_SECONDS", farewell)
    now, config = asyncio.get_running_loop().time(), cast(Any, None)

    async def close() -> None:
        hosted.end_is_known("outside-1")  # it waits for prompts just then

    async def stop() -> None: ...

    hosted = HostedRun(config, tmp_path / "journal")
    hosted._run = cast(
        Any, SimpleNamespace(stop=stop, is_resuming=False, job=SimpleNamespace(interrupt=lambda: None, journal=None))
    )
    last = {"outside-0": now, "outside-1": now, "outside-2": now - farewell - 1}
    hosted._workers = cast(Any, SimpleNamespace(last_requests=last, close=close))
    await hosted.stop()
    going = asyncio.ensure_future(hosted.farewell())
    await asyncio.sleep(0.1)
    assert not going.done()
    assert hosted.is_over_for("outside-0")
    await asyncio.wait_for(going, patience(10))


async def test_a_run_that_is_trained_from_outside_stops_without_the_weights_that_nobody_publishes_any_more(
    small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """All groups of the step are handed out by then: its updates have begun, as far as the ledger knows."""
    hosted = HostedRun(parse(small(run={"stop_grace_seconds": 0.1}, train={"engine": "outside"}, cluster="inline")), tmp_path / "j")
    await hosted.init_engines()
    driver = hosted.run.driver
    await until(lambda: driver.ledger.is_finishing)
    await asyncio.wait_for(hosted.stop(), patience(30))
    assert not hosted.failure and driver.ledger.is_finishing


async def test_a_second_signal_ends_a_server_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = {}
    monkeypatch.setattr(
        asyncio.get_running_loop(),
        "add_signal_handler",
        lambda number, call, *given: handlers.update({number: lambda: call(*given)}),
    )

    async def serving() -> None:
        assert await until_stopped(asyncio.Event()) == 128 + signal.SIGTERM
        await asyncio.Event().wait()  # an end that does not come

    server = asyncio.create_task(serving())
    await asyncio.sleep(0)
    handlers[signal.SIGTERM]()
    await asyncio.sleep(0.05)
    assert not server.done()
    handlers[signal.SIGINT]()
    await asyncio.wait([server], timeout=patience(10))
    assert server.cancelled()


async def test_what_watches_a_run_sees_its_end_and_is_not_cancelled(tmp_path: Path) -> None:
    """Cancelled, it would count as a second interrupt: workers would have no time for a checkpoint, and no model be pushed."""
    interrupted, told = asyncio.Event(), list[str]()

    async def until(condition: object) -> bool:
        try:
            await interrupted.wait()
        except asyncio.CancelledError:
            told.append("cancelled")
            raise
        told.append("seen")
        return False

    async def stop() -> None:
        told.append("stopped")

    hosted = HostedRun(cast(Any, None), tmp_path / "journal")
    job = SimpleNamespace(interrupt=interrupted.set, journal=None)
    hosted._run = run = cast(Any, SimpleNamespace(stop=stop, until=until, is_resuming=False, job=job))
    hosted._watching = asyncio.create_task(hosted._watch(run))
    await asyncio.sleep(0)
    await hosted.stop()
    assert told == ["seen", "stopped"]
