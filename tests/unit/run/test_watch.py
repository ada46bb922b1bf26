"""The watch of a run in which nothing moves."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncflow.run import watch as watch_module
from asyncflow.run.watch import Status, Watch
from asyncflow.types import RunError
from tests.patience import patience


async def test_a_run_that_waits_for_others_has_no_end_of_its_own_until_it_is_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nobody puts prompts, generates or trains for it any more, and what does not move by itself hangs."""
    monkeypatch.setattr(watch_module, "sentence", lambda situation: "the trainer computes")
    config = SimpleNamespace(run=SimpleNamespace(stall_timeout_seconds=0.1), queue=SimpleNamespace(lease_seconds=0.05))
    ledger = SimpleNamespace(is_held=False, is_stopping=False)
    now = asyncio.get_running_loop().time
    driver = SimpleNamespace(config=config, ledger=ledger, waits_outside=True, last_progress=now())
    driver.progress = lambda: setattr(driver, "last_progress", now())
    watch = Watch(cast(Any, driver), cast(Any, SimpleNamespace(now=lambda: None)), None)

    async def status() -> Status:
        return Status("r", 0, 1, 0.0, [], [], {}, [])

    monkeypatch.setattr(watch, "status", status)
    guarding = asyncio.create_task(watch.guard())
    await asyncio.sleep(0.5)
    assert not guarding.done()
    ledger.is_stopping = True
    with pytest.raises(RunError, match=r"nothing has moved for 0\.1 s .*: the trainer computes"):
        await asyncio.wait_for(guarding, patience(20))
