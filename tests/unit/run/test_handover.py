"""Which workers stay for the next attempt of a run."""

from __future__ import annotations

import asyncio

import pytest

from asyncflow.run.services import handover
from asyncflow.run.services.handover import Handover
from asyncflow.transport import client_name


async def ask(service: Handover, worker: str) -> bool:
    client_name.set(worker)
    return await service.stays()


async def test_workers_stay_that_are_told_so_and_have_let_go() -> None:
    service = Handover()
    assert not await asyncio.create_task(ask(service, "rollout/0"))  # the run is over
    service.begin(["rollout/0", "rollout/1"])
    staying = asyncio.create_task(service.staying())
    assert await asyncio.create_task(ask(service, "rollout/0")) and not await asyncio.create_task(ask(service, "trainer/0"))
    service.left("rollout/0")
    assert await asyncio.create_task(ask(service, "rollout/1"))
    await asyncio.sleep(0.01)
    assert not staying.done()  # its connection has not ended
    service.left("rollout/1")
    assert await staying == {"rollout/0", "rollout/1"}


async def test_a_worker_that_is_late_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "STAY_SECONDS", 0.05)
    service = Handover()
    service.begin(["rollout/0", "rollout/1", "rollout/2"])
    for worker in ("rollout/0", "rollout/1"):
        await asyncio.create_task(ask(service, worker))
    service.left("rollout/1")
    assert await service.staying() == {"rollout/1"}
