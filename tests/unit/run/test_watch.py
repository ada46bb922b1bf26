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


def test_workers_that_stand_are_told_once_each_and_of_many_the_first() -> None:
    lines: list[str] = []
    watch = Watch(cast(Any, SimpleNamespace(log=lines.append)), cast(Any, None), None)
    why = {f"rollout/{number}": f"rollout/{number} has not reported (ended by x)" for number in range(10)}
    watch._log_standing(why, cause="rollout/3 has not reported; y")  # which was told as what nothing moves for
    assert len(lines) == watch_module.MOST_LOGGED + 1 and not any("rollout/3" in line for line in lines)
    assert lines[-1] == "1 more workers stand: `asyncflow why` names them"
    lines.clear()
    watch._log_standing({name: f"{text}, and so on" for name, text in why.items()}, cause="")
    assert not lines
    watch._log_standing({}, cause="")
    watch._log_standing({"rollout/0": why["rollout/0"]}, cause="")
    assert lines == ["a worker stands, whatever else moves: rollout/0 has not reported (ended by x)"]


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
