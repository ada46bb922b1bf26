"""Which rollout workers serve: what is said of those without weights, when the run ends, and whom it goes on without."""

from __future__ import annotations

import asyncio
import contextvars
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncflow.cluster.clock import VirtualLoop
from asyncflow.config import Config, parse
from asyncflow.control import SCHEDULES
from asyncflow.control.policy_versions import PolicyVersions
from asyncflow.control.signal import Signal
from asyncflow.control.worker_pool import WorkerPool
from asyncflow.loops import evaluation
from asyncflow.loops.evaluation import EVALUATORS, Evaluations, EvaluationSettings, HeldOut
from asyncflow.registry import build
from asyncflow.run.health import Health
from asyncflow.transport import client_name
from asyncflow.types import RunError
from asyncflow.waits import EVALUATION_DUE

A, B = "rollout/0", "rollout/1"
OF_A, OF_B = (f"worker {worker} has no weights to serve, and tries again: " for worker in (A, B))


def context_of(config: Config, signal: Signal, said: list[str], failures: list[RunError]) -> Any:
    """The part of a `RunContext` that `Health` uses."""
    return SimpleNamespace(config=config, signal=signal, log=said.append, background=SimpleNamespace(fail=failures.append))


class World:
    """Two rollout workers, of which so many are needed, and 60 s for whoever has no weights."""

    def __init__(self, needed: int) -> None:
        self.loop, self.said, self.failures = VirtualLoop(), list[str](), list[RunError]()
        tree = {"model": {"path": "none"}, "data": {"path": "none"}, "rollout": {"num_workers": 2}}
        config = parse(tree | {"weight_sync": {"min_healthy_workers": needed, "deadline_seconds": 60}})
        schedule = build("schedule", "delayed", {}, SCHEDULES)
        self.signal, self.silent = Signal(), set[str]()
        self.versions = PolicyVersions(schedule, object(), self.signal, self.loop.time, WorkerPool(2))  # type: ignore[arg-type]
        hub: Any = SimpleNamespace(states=dict.fromkeys((A, B, "trainer/0")), is_silent=lambda worker, _: worker in self.silent)
        self.health = Health(context_of(config, self.signal, self.said, self.failures), [self.versions], hub)

    async def fails(self, worker: str, why: str) -> None:
        await self._as(worker, self.versions.failed(why))

    async def serves(self, worker: str) -> None:
        await self._as(worker, self.versions.installed(1))

    async def fails_until(self, end: float, worker: str, why: str) -> None:
        """At every retry, as a worker does."""
        while self.loop.time() < end:
            await self.fails(worker, why)
            await asyncio.sleep(2.0)

    def run(self, main: Any) -> None:
        self.loop.run_until_complete(main)
        self.loop.finish()

    async def _as(self, worker: str, report: Any) -> None:
        context = contextvars.copy_context()
        context.run(client_name.set, worker)
        await asyncio.create_task(report, context=context)


def test_a_worker_that_tries_again_is_told_of_once_and_again_for_another_reason() -> None:
    world = World(needed=1)

    async def main() -> None:
        await world.fails_until(20.0, A, "the disk is gone")
        assert world.said == [OF_A + "the disk is gone"]
        await world.fails_until(30.0, A, "the hash is not the manifest's")
        await world.fails_until(40.0, A, "the disk is gone")
        await world.fails(B, "the disk is gone")
        await world.serves(A)
        await world.fails_until(50.0, A, "the disk is gone")  # that is news
        await world.fails_until(500.0, A, "the disk is gone")
        disk, another = "the disk is gone", "the hash is not the manifest's"
        assert world.said == [OF_A + disk, OF_A + another, OF_B + disk, OF_A + disk]

    world.run(main())


def test_an_engine_that_tells_nothing_of_its_weights_is_told_of_once_of_each_pool() -> None:
    world = World(needed=1)
    for worker in (A, B, A, f"{EVALUATORS}/0"):
        world.versions.on_unattested(worker)
    assert [line.partition(" does not tell what it generates with")[0] for line in world.said] == [
        f"worker {A}",
        "worker evaluator/0",
    ]


def test_the_run_stops_when_too_many_have_had_no_weights_for_too_long() -> None:
    world = World(needed=2)

    async def main() -> None:
        await world.fails_until(50.0, A, "the disk is gone")
        await world.serves(A)
        await world.fails_until(108.0, A, "it came too late")  # since 50 s
        assert world.failures == []
        await world.fails_until(112.0, A, "the disk is full")
        (failure,) = world.failures
        assert str(failure) == (
            "worker rollout/0 has had no weights to serve for 60 s: the disk is full; "
            "1 of 2 rollout workers are left, and weight_sync.min_healthy_workers is 2"
        )

    world.run(main())


def test_the_run_goes_on_while_enough_others_have_weights() -> None:
    world = World(needed=1)

    async def main() -> None:
        await world.fails_until(200.0, A, "the disk is gone")
        assert world.failures == []
        world.versions.died(A, is_final=False)  # what it has left is not kept on its behalf
        await asyncio.sleep(200.0)
        assert world.failures == []
        await world.fails_until(410.0, A, "the disk is gone")
        await world.fails_until(475.0, B, "the disk is gone")
        assert len(world.failures) == 1 and "0 of 2 rollout workers are left" in str(world.failures[0])

    world.run(main())


def test_whoever_becomes_silent_or_is_heard_again_is_told_of_though_nothing_else_happens() -> None:
    world = World(needed=1)

    async def main() -> None:
        looking, waiting = (
            asyncio.create_task(work)
            for work in (world.health.run(), world.signal.until(lambda: bool(world.silent), EVALUATION_DUE))
        )
        await asyncio.sleep(30.0)
        assert not world.said and not waiting.done()
        world.silent = {A, "trainer/0"}  # leases last 120 s, and whoever says nothing for 60 s is silent
        await asyncio.wait_for(waiting, 16.0)
        heard = asyncio.create_task(world.signal.until(lambda: not world.silent, EVALUATION_DUE))
        await asyncio.sleep(60.0)
        assert world.said == [f"worker {A} says nothing any more: what it holds is given to others"] and not heard.done()
        world.silent = set()
        await asyncio.wait_for(heard, 16.0)
        looking.cancel()

    world.run(main())


async def test_a_run_goes_on_without_a_rollout_worker_only_when_one_has_served() -> None:
    config = parse({"model": {"path": "none"}, "data": {"path": "none"}, "weight_sync": {"min_healthy_workers": 1}})
    versions = PolicyVersions(build("schedule", "periodic", {}, SCHEDULES), object(), Signal(), lambda: 0.0, WorkerPool(2))  # type: ignore[arg-type]
    said, failures = list[str](), list[RunError]()
    hub: Any = None
    health = Health(context_of(config, Signal(), said, failures), [versions], hub)
    assert not health.continues_without("rollout/1")
    client_name.set("rollout/0")
    await versions.installed(0)
    assert health.continues_without("rollout/1") and not health.continues_without("storage/0")
    health.died("rollout/1", "found a mistake", True)
    assert said == ["worker rollout/1 found a mistake"] and not failures
    versions.died("rollout/0", is_final=False)
    assert health.continues_without("rollout/0")  # it may be started again: the run has come up
    health.died("rollout/0", "found a mistake", True)
    (failure,) = failures
    assert str(failure).startswith("worker rollout/0 found a mistake; 0 of 2 rollout workers are left")


@pytest.mark.parametrize("done", [(), (0,)], ids=["by this attempt", "by the one before"])
async def test_a_run_does_without_evaluators_once_the_last_version_is_evaluated(
    done: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def evaluated(*_: Any) -> None:
        assert not done

    monkeypatch.setattr(evaluation, "admit_evaluation", evaluated)
    monkeypatch.setattr(evaluation, "evaluate", evaluated)
    config = parse({"model": {"path": "none"}, "data": {"path": "none"}})
    signal, said, failures, none = Signal(), list[str](), list[RunError](), cast(Any, None)
    versions = PolicyVersions(build("schedule", "periodic", {}, SCHEDULES), none, signal, lambda: 0.0, WorkerPool(1, EVALUATORS))
    plan = HeldOut([none], EvaluationSettings(last_version=0, greedy=False), on_row=lambda row: None, done=done)
    ledger: Any = SimpleNamespace(is_stopping=False)
    health = Health(context_of(config, signal, said, failures), [versions], none)
    await Evaluations(none, ledger, plan, versions, none, signal, log=said.append).run()
    client_name.set(f"{EVALUATORS}/0")
    assert await versions.next_target(0) is None, "it has nothing more to do"
    health.died(f"{EVALUATORS}/0", "has ended too often", True)
    assert said == [f"worker {EVALUATORS}/0 has ended too often"] and not failures
