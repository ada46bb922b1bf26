"""`PolicyVersions`: which version each worker is to serve, and when it may be installed."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from asyncflow.attestation import PROBE_EVERY, Attestation, Probe, Probing
from asyncflow.control import SCHEDULES
from asyncflow.control.policy_versions import PolicyVersions, Target
from asyncflow.control.signal import Signal
from asyncflow.control.worker_pool import WorkerPool
from asyncflow.registry import build
from asyncflow.transport import client_name
from asyncflow.types import Interval
from asyncflow.weight_sync.base import Manifest
from tests.builders import Unmade, loop_turns

A, B = "rollout/0", "rollout/1"


class Rows(Unmade):
    """Progress of rows without a response."""

    committed = 0

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.held: list[int] = []
        self.num_ready = 0

    def is_done(self, task: str, step: int) -> bool:
        raise NotImplementedError

    def task_before(self, task: str) -> str:
        raise NotImplementedError


class Served:
    """Policy versions over such progress, and workers that ask for them."""

    def __init__(self, mode: str = "periodic", **options: Any) -> None:
        self.rows, self.signal, self.now = Rows(), Signal(), 0.0
        self.schedule = build("schedule", mode, options, SCHEDULES)
        self.versions = PolicyVersions(self.schedule, self.rows, self.signal, lambda: self.now, WorkerPool(2))

    def asks(self, worker: str, question: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """In the context of a worker."""
        context = contextvars.copy_context()
        context.run(client_name.set, worker)
        return asyncio.create_task(asyncio.wait_for(question, 5), context=context)

    async def serves(self, worker: str, version: int) -> None:
        await self.asks(worker, self.versions.installed(version))

    async def publish(self, *versions: int) -> None:
        for version in versions:
            await self.versions.publish(manifest(version))

    async def changes(self, change: Callable[[], object]) -> None:
        change()
        self.signal.notify()
        await loop_turns()


def manifest(version: int) -> Manifest:
    return Manifest("incarnation", version, "nowhere", "hash", 0, {})


def target(version: int, worker: str = A) -> Target:
    return Target(version, manifest(version) if version else None, (A, B).index(worker), 2)


async def waits(task: asyncio.Task[Any]) -> bool:
    await loop_turns()
    return not task.done()


# -- publishing -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
async def test_versions_only_rise(version: int) -> None:
    served = Served()
    await served.publish(2)
    with pytest.raises(ValueError, match=f"version {version} was published after version 2"):
        await served.publish(version)
    assert served.versions.published == 2 and served.versions.newest == manifest(2)


@pytest.mark.parametrize(
    ("mode", "options", "oldest"), [("periodic", {}, 5), ("delayed", {}, 4), ("bounded", {"max_staleness": 3}, 2)]
)
async def test_as_many_versions_are_kept_as_rows_may_still_need(mode: str, options: dict[str, int], oldest: int) -> None:
    served = Served(mode, **options)
    await served.publish(1, 2, 3, 4, 5)
    for version in range(1, 6):
        served.rows.waiting = [version]
        called = await served.asks(A, served.versions.join())
        assert called == target(max(version, oldest) if version >= oldest else 5), version
        served.versions.forget(A)


async def test_the_time_between_publications_is_that_of_a_step() -> None:
    served = Served()
    for now, version, seconds in ((3.0, 1, None), (5.0, 2, 2.0), (9.0, 3, 4.0)):
        served.now = now
        await served.publish(version)
        assert served.versions.step_seconds == seconds


async def test_before_the_first_publication_nothing_is_newest() -> None:
    assert Served().versions.newest is None


# -- which version to serve -----------------------------------------------------------------------------------------------------


async def test_a_worker_waits_for_a_version_above_its_own() -> None:
    served = Served()
    behind = served.asks(A, served.versions.next_target(0))
    assert await waits(behind)
    await served.publish(1)
    assert await behind == target(1)
    level = served.asks(A, served.versions.next_target(1))
    assert await waits(level)
    await served.publish(2)
    assert await level == target(2)
    assert await served.asks(A, served.versions.next_target(0)) == target(2)


@pytest.mark.parametrize(("mode", "is_there"), [("periodic", False), ("synchronous", False), ("delayed", True)])
async def test_without_staleness_nobody_is_sent_for_weights_that_are_being_written_over(mode: str, is_there: bool) -> None:
    served = Served(mode)
    await served.publish(1)
    served.rows.committed = 2  # and the trainer publishes what came of it
    begins, late = served.asks(A, served.versions.join()), served.asks(B, served.versions.next_target(0))
    assert await waits(begins) is await waits(late) is not is_there
    await served.publish(2)
    version = 1 if is_there else 2
    assert await begins == target(version) and await late == target(version, B)


async def test_a_version_is_not_skipped_while_rows_in_nobodys_hands_need_it() -> None:
    served = Served("delayed")
    await served.publish(1, 2)
    served.rows.waiting = [1, 2]
    assert await served.asks(A, served.versions.next_target(0)) == target(1)
    served.rows.waiting, served.rows.held = [2], [1]
    assert await served.asks(A, served.versions.next_target(0)) == target(2)


async def test_prompts_that_lie_ready_for_a_version_to_come_call_nobody_beyond_what_is_published() -> None:
    served = Served("delayed")
    served.rows.waiting = [3]
    waiting = served.asks(A, served.versions.next_target(1))
    await served.publish(1)
    assert await waits(waiting)
    await served.publish(2)
    assert await waiting == target(2)


async def test_a_worker_joins_with_the_newest_version() -> None:
    served = Served()
    assert await served.asks(A, served.versions.join()) == target(0)
    await served.serves(A, 0)
    await served.publish(1, 2)
    served.rows.waiting = [2]
    assert await served.asks(B, served.versions.join()) == target(2, B)
    assert served.versions.installing == {B: 2} and served.versions.serving == {A: 0}


@pytest.mark.parametrize(("serving", "begins_with"), [(4, 3), (3, 4)], ids=["the other is past it", "the other serves it"])
async def test_one_that_joins_late_begins_with_what_nobody_else_can_make(serving: int, begins_with: int) -> None:
    served = Served("delayed")
    await served.publish(1, 2, 3, 4)
    await served.serves(A, serving)
    served.rows.waiting = [3, 4]
    assert await served.asks(B, served.versions.join()) == target(begins_with, B)


async def test_of_two_that_join_only_one_begins_with_the_old_version() -> None:
    served = Served("delayed")
    await served.publish(1, 2)
    served.rows.waiting = [1]
    assert [await served.asks(worker, served.versions.join()) for worker in (A, B)] == [target(1), target(2, B)]


async def test_version_0_is_the_workers_own_files_and_is_always_there() -> None:
    served = Served("delayed")
    await served.publish(1, 2, 3)
    served.rows.waiting = [0]
    assert await served.asks(A, served.versions.join()) == target(0)


# -- called back ----------------------------------------------------------------------------------------------------------------


async def called_back(mode: str = "delayed") -> tuple[Served, list[asyncio.Task[Any]]]:
    """Two workers at version 2 that follow `PolicyVersions`, when rows for version 1 come back from a dead one."""
    served = Served(mode)
    await served.publish(1, 2)
    for worker in (A, B):
        await served.serves(worker, 2)
    following = [served.asks(worker, served.versions.next_target(2)) for worker in (A, B)]
    assert await waits(following[0]) and await waits(following[1])
    await served.changes(lambda: served.rows.waiting.append(1))
    return served, following


async def test_rows_of_an_older_version_call_one_of_those_that_are_past_it_back() -> None:
    served, following = await called_back()
    assert await asyncio.gather(*following) == [target(1), target(1, B)]
    granted = [served.asks(worker, served.versions.may_install(1, 2)) for worker in (A, B)]
    assert await asyncio.gather(*granted) == [True, False]  # one goes: the other has no other target than what it serves by now
    assert served.versions.installing == {A: 1}
    assert await waits(served.asks(B, served.versions.next_target(2)))
    await served.serves(A, 1)
    assert await served.asks(A, served.versions.next_target(1)) == target(2)
    forward = served.asks(A, served.versions.may_install(2, 1))
    assert await waits(forward)  # first what it was called back for
    await served.changes(served.rows.waiting.clear)
    assert await forward is True


async def test_to_be_called_back_is_not_to_wait_for_those_that_change_over() -> None:
    served = Served("sub_step", max_installing=1)
    await served.publish(1, 2)
    await served.serves(A, 2)
    await served.asks(B, served.versions.join())
    assert served.versions.installing == {B: 2}
    await served.changes(lambda: served.rows.waiting.append(1))
    assert await served.asks(A, served.versions.next_target(2)) == target(1)
    assert await served.asks(A, served.versions.may_install(1, 2)) is True


@pytest.mark.parametrize("serving", [None, 0], ids=["one that begins", "one that lags"])
async def test_nobody_counts_on_an_older_version_that_is_still_to_be_fetched(serving: int | None) -> None:
    served = Served("delayed")
    await served.publish(1, 2)
    await served.serves(A, 2)
    served.rows.waiting = [1]
    if serving is None:
        assert await served.asks(B, served.versions.join()) == target(1, B)
    else:
        await served.serves(B, serving)
        assert await served.asks(B, served.versions.next_target(serving)) == target(1, B)
    assert await served.asks(A, served.versions.next_target(2)) == target(1)  # B's fetch hangs
    if serving is not None:
        assert await served.asks(B, served.versions.may_install(1, serving)) is True  # now it has come
        assert await served.asks(A, served.versions.may_install(1, 2)) is False
    await served.serves(B, 1)
    assert await waits(served.asks(A, served.versions.next_target(2)))


async def test_one_that_dies_when_it_was_called_back_is_replaced() -> None:
    served, _ = await called_back()
    assert await served.asks(A, served.versions.may_install(1, 2))
    other = served.asks(B, served.versions.next_target(2))
    assert await waits(other)
    served.versions.forget(A)
    assert await other == target(1, B)


async def test_nobody_is_called_back_for_a_version_that_is_not_kept() -> None:
    served = Served("periodic")
    await served.publish(1, 2)
    await served.serves(A, 2)
    served.rows.waiting = [1]
    assert await waits(served.asks(A, served.versions.next_target(2)))


async def test_a_worker_that_takes_nothing_does_not_keep_others_from_being_called_back() -> None:
    served = Served("delayed")
    await served.publish(1, 2)
    await served.serves(A, 1)
    await served.serves(B, 2)
    served.rows.waiting = [1]
    following = served.asks(B, served.versions.next_target(2))
    assert await waits(following)  # A will make them
    await served.asks(A, served.versions.failed("the disk is gone"))
    assert await following == target(1, B)


# -- leave to install -----------------------------------------------------------------------------------------------------------


async def test_in_periodic_an_installation_waits_for_the_responses_that_only_older_versions_may_make() -> None:
    served = Served()
    served.rows.waiting, served.rows.held = [0], [0]
    await served.publish(1)
    granted = served.asks(A, served.versions.may_install(1, 0))
    assert await waits(granted)
    await served.changes(served.rows.waiting.clear)
    assert await waits(granted)
    await served.changes(served.rows.held.clear)
    assert await granted is True


async def test_in_delayed_it_waits_until_nothing_is_left_to_take() -> None:
    served = Served("delayed")
    served.rows.waiting, served.rows.held = [0], [0]
    await served.publish(1)
    granted = served.asks(A, served.versions.may_install(1, 0))
    assert await waits(granted)
    await served.changes(served.rows.waiting.clear)
    assert await granted is True and served.rows.held


async def test_what_has_been_overtaken_is_not_granted() -> None:
    served = Served()
    served.rows.held = [0]
    await served.publish(1)
    granted = served.asks(A, served.versions.may_install(1, 0))
    assert await waits(granted)
    await served.publish(2)
    assert await granted is False and served.versions.installing == {}


async def test_in_sub_step_so_many_workers_change_at_once_and_the_next_when_one_has() -> None:
    served = Served("sub_step", max_installing=1)
    for worker in (A, B):
        await served.serves(worker, 0)
    await served.publish(1)
    first, second = (served.asks(worker, served.versions.may_install(1, 0)) for worker in (A, B))
    assert await first is True and await waits(second)
    assert served.versions.installing == {A: 1}
    await served.serves(A, 1)
    assert await second is True and served.versions.installing == {B: 1}


async def test_in_sub_step_all_change_at_once_to_a_version_that_is_called_for() -> None:
    served = Served("sub_step", max_installing=1)
    for worker in (A, B):
        await served.serves(worker, 0)
    await served.publish(1)
    first, second = (served.asks(worker, served.versions.may_install(1, 0)) for worker in (A, B))
    assert await first is True and await waits(second)
    served.versions.call_for(1)
    assert await second is True and served.versions.installing == {A: 1, B: 1}
    for worker in (A, B):
        await served.serves(worker, 1)
    await served.publish(2)
    served.versions.call_for(3)  # which is not there yet, and is not what they wait for
    first, second = (served.asks(worker, served.versions.may_install(2, 1)) for worker in (A, B))
    assert await first is True and await waits(second)
    await served.publish(3)
    assert await second is False  # it has another target by now
    assert await served.asks(B, served.versions.may_install(3, 1)) is True


async def test_in_sub_step_nobody_waits_for_the_first_weights_of_one_that_has_begun_again() -> None:
    served = Served("sub_step")
    await served.serves(A, 0)
    await served.publish(1)
    assert await served.asks(B, served.versions.join()) == target(1, B)  # and its fetch hangs
    assert await served.asks(A, served.versions.may_install(1, 0)) is True


@pytest.mark.parametrize("end", ["forget", "failed"])
async def test_a_grant_ends_with_the_worker_that_had_it_and_with_its_weights(end: str) -> None:
    served = Served("sub_step", max_installing=1)
    for worker in (A, B):
        await served.serves(worker, 0)
    await served.publish(1)
    assert await served.asks(A, served.versions.may_install(1, 0))
    second = served.asks(B, served.versions.may_install(1, 0))
    assert await waits(second)
    if end == "forget":
        served.versions.forget(A)
    else:
        await served.asks(A, served.versions.failed("the disk is gone"))
    assert await second is True


# -- progress of workers ---------------------------------------------------------------------------------------------------------


async def test_what_is_installed_is_kept_by_worker_and_told() -> None:
    served, told = Served(), list[int]()
    served.versions.on_installed = told.append
    for worker, version in ((A, 0), (B, 0), (A, 1)):
        await served.serves(worker, version)
    assert served.versions.serving == {A: 1, B: 0} and told == [0, 0, 1]


async def test_a_swap_takes_from_the_grant_to_the_installation() -> None:
    served = Served()
    await served.serves(A, 0)
    await served.publish(1)
    served.now = 5.0
    assert await served.asks(A, served.versions.may_install(1, 0))
    assert served.versions.installing == {A: 1}
    served.now = 5.75
    await served.serves(A, 1)
    assert served.versions.install_seconds == 0.75 and served.versions.installing == {}


async def test_a_worker_without_its_weights_is_stale_until_it_serves_again() -> None:
    served, told = Served(), list[tuple[str, str]]()
    served.versions.on_stale = lambda worker, why: told.append((worker, why))
    for worker in (A, B):
        await served.serves(worker, 0)
    await served.publish(1)
    assert served.versions.num_healthy(0.0) == 2
    await served.asks(A, served.versions.failed("the hash is not the manifest's"))
    await served.asks(A, served.versions.failed("nor is it now"))
    assert served.versions.num_healthy(0.0) == 1 and served.versions.stale == {A: "nor is it now"}
    assert A in served.versions.serving and A not in served.versions.generating, "no supply is to be counted on it"
    assert told == [(A, "the hash is not the manifest's"), (A, "nor is it now")]
    assert await served.asks(A, served.versions.next_target(0)) == target(1)  # it is asked again, for what is newest by then
    await served.serves(A, 1)
    assert served.versions.num_healthy(0.0) == 2 and served.versions.stale == {}


async def test_one_without_its_weights_counts_as_lost_after_a_while() -> None:
    served = Served()
    await served.serves(A, 0)
    await served.asks(A, served.versions.failed("the hash is not the manifest's"))
    served.now = 4.0
    await served.asks(A, served.versions.failed("nor is it now"))
    assert served.versions.num_healthy(5.0) == 2
    served.now = 5.0
    assert served.versions.num_healthy(5.0) == 1


async def test_one_that_was_stale_for_the_sake_of_another_version_goes_on_with_what_it_serves() -> None:
    served = Served("delayed")
    await served.serves(A, 2)
    await served.serves(B, 2)
    await served.publish(1, 2)
    served.rows.waiting = [1]
    assert await served.asks(A, served.versions.next_target(2)) == target(1)
    await served.asks(A, served.versions.failed("it did not come"))
    served.rows.waiting, served.rows.held = [], [1]  # B has taken them
    assert await served.asks(A, served.versions.next_target(2)) == target(2)
    await served.serves(A, 2)
    assert served.versions.stale == {}
    waiting = served.asks(A, served.versions.next_target(2))
    await loop_turns(10)
    assert not waiting.done()
    waiting.cancel()


async def test_one_that_says_nothing_any_more_is_not_waited_for() -> None:
    """Its rows are given to others once their lease has expired, and some may be due under a version that all others are past."""
    served, silent = Served("delayed"), set[str]()
    served.versions.is_silent = silent.__contains__
    await served.publish(1, 2)
    await served.serves(A, 2)
    await served.serves(B, 1)
    served.rows.waiting = [1]
    waiting = served.asks(A, served.versions.next_target(2))
    await loop_turns(10)
    assert not waiting.done()  # B serves it
    silent.add(B)
    served.signal.notify()
    assert await waiting == target(1)
    assert served.versions.serving == {A: 2}
    silent.clear()
    assert served.versions.serving == {A: 2, B: 1}


async def test_how_long_a_worker_takes_to_begin_is_not_what_a_swap_takes() -> None:
    served = Served()
    await served.asks(A, served.versions.join())
    served.now = 50.0
    await served.serves(A, 0)
    assert served.versions.install_seconds is None


async def test_all_serve_is_said_of_all_that_the_run_has() -> None:
    served = Served()
    await served.publish(1)
    waiting = asyncio.create_task(served.versions.all_serve(1))
    await served.serves(A, 1)
    await loop_turns(10)
    assert not waiting.done()  # nobody knows of B yet
    await served.asks(B, served.versions.failed("it did not come"))
    await loop_turns(10)
    assert not waiting.done()
    await served.serves(B, 1)
    await asyncio.wait_for(waiting, 5)
    served.versions.died(B, is_final=True)
    await asyncio.wait_for(served.versions.all_serve(1), 5)


async def test_a_dead_worker_counts_as_lost_when_it_has_failed_for_good_and_one_that_is_starting_does_not() -> None:
    served = Served()
    await served.serves(A, 0)
    await served.asks(A, served.versions.failed("the hash is not the manifest's"))
    served.versions.forget(A)  # its connection has gone, before or after its process
    served.versions.died(A, is_final=False)
    served.versions.forget(A)
    assert (
        served.versions.num_healthy(0.0) == 2
        and served.versions.serving == served.versions.stale == served.versions.installing == {}
    )
    await served.asks(A, served.versions.join())
    await served.serves(A, 0)
    assert served.versions.num_healthy(0.0) == 2
    served.versions.died(A, is_final=True)
    assert served.versions.num_healthy(0.0) == 1 and served.versions.serving == {}


async def test_who_joins_begins_with_what_is_needed_and_shares_a_step_with_the_others() -> None:
    served = Served("delayed")
    await served.publish(1, 2, 3)
    await served.serves(A, 3)
    await served.serves(B, 3)
    served.rows.waiting = [2, 3]
    assert served.versions.resize(4) == (["rollout/2", "rollout/3"], [])
    assert await served.asks("rollout/2", served.versions.join()) == Target(2, manifest(2), 2, 4)
    assert await served.asks("rollout/3", served.versions.join()) == Target(3, manifest(3), 3, 4)
    assert (await served.asks(B, served.versions.next_target(2))) == Target(3, manifest(3), 1, 4)
    served.versions.died(B, is_final=True)
    assert (await served.asks(A, served.versions.next_target(2))) == Target(3, manifest(3), 0, 3)
    assert (await served.asks("rollout/2", served.versions.next_target(2))) == Target(3, manifest(3), 1, 3)


async def test_who_is_to_leave_is_told_wherever_it_waits_and_is_granted_nothing_more() -> None:
    served = Served()
    served.rows.held = [0]
    await served.publish(1)
    await served.serves(B, 0)
    newer, grant = served.asks(B, served.versions.next_target(1)), served.asks(B, served.versions.may_install(1, 0))
    stopped = served.asks(B, served.versions.stopped())
    assert await waits(newer) and await waits(grant)
    assert served.versions.resize(1) == ([], [B])
    assert await newer is None and await grant is False
    assert await served.asks(B, served.versions.join()) is None and await served.asks(B, served.versions.next_target(0)) is None
    assert await waits(stopped)  # it may end what it has
    await served.changes(served.rows.held.clear)
    assert await served.asks(A, served.versions.may_install(1, 0)) is True  # it leaves alone
    served.versions.stop()
    assert await stopped is None


async def test_nobody_counts_on_who_is_to_leave() -> None:
    served = Served("delayed")
    await served.publish(1, 2)
    await served.serves(A, 2)
    await served.serves(B, 1)
    following = served.asks(A, served.versions.next_target(2))
    await served.changes(lambda: served.rows.waiting.append(1))
    assert await waits(following)  # B will make them
    served.versions.resize(1)
    assert served.versions.serving == {A: 2}
    assert await following == Target(1, manifest(1), 0, 1)
    assert served.versions.num_healthy(0.0) == 1
    await asyncio.wait_for(served.versions.all_serve(2), 5)
    await served.asks(B, served.versions.failed("and it has no weights"))
    assert served.versions.num_healthy(0.0) == 1


async def test_the_name_of_one_that_has_left_is_anothers() -> None:
    served = Served()
    await served.serves(B, 0)
    served.versions.resize(1)
    served.versions.left(B)
    served.versions.resize(2)
    assert served.versions.serving == {} and served.versions.workers.leaving == set()
    assert await served.asks(B, served.versions.join()) == target(0, B)


async def test_stopping_answers_everybody_who_waits() -> None:
    served = Served()
    served.rows.held = [0]
    await served.publish(1)
    newer, grant = served.asks(A, served.versions.next_target(1)), served.asks(A, served.versions.may_install(1, 0))
    assert await waits(newer) and await waits(grant)
    served.versions.stop()
    assert await newer is None and await grant is False
    assert await served.versions.next_target(0) is None and await served.versions.join() is None


def test_the_interval_of_every_mode_lies_in_what_policy_versions_keep() -> None:
    for mode in SCHEDULES:
        schedule = build("schedule", mode, {}, SCHEDULES)
        for step in range(9):  # while a step is trained, the newest version is the step's
            interval: Interval = schedule.interval(step)
            assert interval.low >= step - schedule.max_staleness or interval.low == 0, mode


# -- a run that is resumed ------------------------------------------------------------------------------------------------------


async def test_nobody_joins_before_the_version_that_the_run_goes_on_from_is_published() -> None:
    served = Served("delayed")
    served.versions = versions = PolicyVersions(
        served.schedule, served.rows, served.signal, lambda: served.now, WorkerPool(2), first=5
    )
    joining = served.asks("rollout/0", versions.join())
    await served.publish(4)
    assert await waits(joining) and versions.published == 4
    served.rows.waiting = [4]  # what lies ready may be made by the version before only
    served.now = 3.0
    await served.publish(5)
    assert await joining == target(4) and versions.step_seconds is None
    assert versions.kept([5, 4, 3, 0]) == [manifest(4), manifest(5)]
    served.now = 10.0
    await served.publish(6)
    assert versions.step_seconds == 7.0
    versions.stop()


async def test_whoever_waits_to_join_a_run_that_is_over_is_told() -> None:
    served = Served()
    versions = PolicyVersions(served.schedule, served.rows, served.signal, lambda: served.now, WorkerPool(2), first=2)
    joining = served.asks("rollout/0", versions.join())
    assert await waits(joining)
    versions.stop()
    assert await joining is None


# -- attestation ----------------------------------------------------------------------------------------------------------------


async def test_a_worker_whose_weights_are_not_the_version_is_refused_until_they_are() -> None:
    served = Served()
    promised = Manifest("incarnation", 1, "nowhere", "hash", 0, {}, sums={"a": 3, "b": 4})
    await served.versions.publish(promised)
    right, wrong = Attestation([(["a", "b"], 7)]), Attestation([(["a", "b"], 8)])
    fault = await served.asks(A, served.versions.installed(1, wrong))
    assert fault == "the engine generates with other weights than those of version 1 in 1 of 1 parts, a the first"
    assert served.versions.stale == {A: fault} and A not in served.versions.serving
    assert await served.asks(B, served.versions.installed(1, right)) == ""
    assert served.versions.attested == {A: False, B: True} and served.versions.generating == {B: 1}
    assert served.versions.share_attested == 0.5, "one that is refused at its first install counts"
    assert await served.asks(A, served.versions.installed(1, right)) == "" and not served.versions.stale
    assert await served.asks(A, served.versions.installed(1, None)) == "" and not served.versions.attested[A], "it cannot tell"


async def test_a_worker_that_cannot_tell_of_some_tensors_counts_with_the_share_of_the_others() -> None:
    served = Served()
    promised = Manifest("incarnation", 1, "nowhere", "hash", 0, {}, sums={"a": 3, "b": 4, "c": 5, "d": 6})
    await served.versions.publish(promised)
    told = Attestation([(["a", "b"], 7)], unseen=["c", "d", "some.layer"])
    assert await served.asks(A, served.versions.installed(1, told)) == ""
    assert served.versions.share_attested == 0.5
    fault = await served.asks(A, served.versions.installed(1, Attestation([(["a", "b"], 7)], unseen=["c"])))
    assert fault == "the engine generates without 1 of the 4 tensors of version 1, d the first"
    given = Attestation([(["a", "b"], 7), (["c"], 6)], unseen=["c", "d"])  # what a layer was given is compared
    assert "in 1 of 2 parts, c the first" in await served.asks(A, served.versions.installed(1, given))
    assert served.versions.share_attested == 0.0


async def test_a_worker_that_had_shown_one_version_and_has_another_than_the_next_counts_as_not_attested() -> None:
    served = Served()
    for version, total in ((1, 7), (2, 9)):
        await served.versions.publish(Manifest("incarnation", version, "nowhere", "hash", 0, {}, sums={"a": total}))
        assert bool(await served.asks(A, served.versions.installed(version, Attestation([(["a"], 7)])))) == (version == 2)
        assert served.versions.share_attested == (1.0 if version == 1 else 0.0)
    assert served.versions.serving == {A: 1} and not served.versions.generating


async def test_a_version_that_is_installed_late_is_compared_though_it_is_not_kept_any_more() -> None:
    served = Served()
    right, wrong = Attestation([(["a", "b"], 7)]), Attestation([(["a", "b"], 8)])
    await served.versions.publish(Manifest("incarnation", 1, "nowhere", "hash", 0, {}, sums={"a": 3, "b": 4}))
    assert await served.asks(A, served.versions.next_target(0)) is not None
    await served.publish(2)
    assert served.versions.kept([1]) == []
    assert await served.asks(A, served.versions.installed(1, wrong)) and A in served.versions.stale
    assert await served.asks(A, served.versions.installed(1, right)) == "" and served.versions.attested[A]


async def test_a_worker_that_still_serves_its_own_files_counts_for_nothing() -> None:
    """A trainer that is ahead by its staleness commits before the first version is installed."""
    served = Served("bounded")
    for worker in (A, B):
        assert await served.asks(worker, served.versions.installed(0)) == ""
    await served.versions.publish(Manifest("incarnation", 1, "nowhere", "hash", 0, {}, sums={"a": 3, "b": 4}))
    assert served.versions.share_attested is None
    assert await served.asks(A, served.versions.installed(1, Attestation([(["a", "b"], 7)]))) == ""
    assert served.versions.share_attested == 1.0
    assert await served.asks(B, served.versions.installed(1, None)) == ""
    assert served.versions.share_attested == 0.5


# -- the probe ------------------------------------------------------------------------------------------------------------------

TOKENS = [3, 5, 7]
SUMS = [(["a"], 7)]


def probing() -> Served:
    served = Served()
    served.versions = PolicyVersions(
        served.schedule, served.rows, served.signal, lambda: served.now, WorkerPool(2), probing=Probing(TOKENS, 0.2)
    )
    return served


async def next_version(served: Served, told: dict[str, Attestation | None]) -> bool:
    """The next version, published and installed by these workers. Returns whether it was probed."""
    version = served.versions.published + 1
    ids = await served.versions.probe_ids(version)
    probe = Probe(ids, [-1.0, -2.0]) if ids else None
    await served.versions.publish(Manifest("i", version, "", "", 0, {}, sums={"a": 7}, probe=probe))
    for worker, attested in told.items():
        assert await served.asks(worker, served.versions.installed(version, attested)) == ""
    return bool(ids)


async def test_the_first_installs_of_each_worker_are_probed_and_then_one_now_and_then() -> None:
    served, told = probing(), Attestation(SUMS, None, [-1.0, -2.0])
    both: dict[str, Attestation | None] = {A: told, B: told}
    assert [await next_version(served, both) for _ in range(4)] == [True, True, False, False]
    served.versions.died(B, is_final=False)
    assert [await next_version(served, both) for _ in range(3)] == [True, True, False], "one that is started again is new"
    while served.versions.published < PROBE_EVERY - 1:
        assert not await next_version(served, both)
    assert await next_version(served, both) and not await next_version(served, both)


async def test_an_engine_without_sums_is_probed_at_each_install_and_one_that_tells_nothing_is_not_asked_for_again() -> None:
    served = probing()
    workers: dict[str, Attestation | None] = {A: Attestation(None, None, [-1.5, -2.0]), B: None}
    assert [await next_version(served, workers) for _ in range(5)] == [True] * 5
    assert served.versions.attested == {A: False, B: False}, "neither has shown it"
    workers[A] = Attestation(SUMS, None, [-1.5, -2.0], unseen=["a"])
    assert [await next_version(served, workers) for _ in range(3)] == [True] * 3, "nor are all of its weights seen"
    workers[A] = Attestation(SUMS)
    assert [await next_version(served, workers) for _ in range(3)] == [True, False, False]


async def test_a_worker_with_other_log_probs_is_refused_though_its_sums_are_right() -> None:
    served = probing()
    probe = Probe(await served.versions.probe_ids(1), [-1.0, -2.0])
    assert probe.token_ids == TOKENS
    await served.versions.publish(Manifest("i", 1, "", "", 0, {}, sums={"a": 7}, probe=probe))
    fault = await served.asks(A, served.versions.installed(1, Attestation(SUMS, None, [-1.0, -2.5])))
    assert fault.startswith("the engine gives token 3 of the probe sequence the log-prob -2.5000, and the trainer -2.0000 under v")
    assert served.versions.stale == {A: fault} and served.versions.share_attested == 0.0
    assert await served.asks(A, served.versions.installed(1, Attestation(SUMS, None, [-1.0, -2.3]))) == ""
    assert served.versions.share_attested == 1.0


async def test_all_ranks_of_a_trainer_are_answered_alike_whatever_happens_between_them() -> None:
    served, told = probing(), Attestation(SUMS, None, [-1.0, -2.0])
    for _ in range(2):
        await next_version(served, {A: told, B: told})
    assert await served.versions.probe_ids(3) == []
    served.versions.died(A, is_final=False)
    assert await served.versions.probe_ids(3) == [] and await served.versions.probe_ids(4) == TOKENS


async def test_an_engine_that_tells_nothing_of_its_weights_serves_and_is_told_of() -> None:
    served, told = Served(), list[str]()
    served.versions.on_unattested = told.append
    for worker in (A, B):
        await served.serves(worker, 0)
    await served.versions.publish(Manifest("incarnation", 1, "nowhere", "hash", 0, {}, sums={"a": 3}))
    for worker, attested in ((A, Attestation([(["a"], 3)])), (B, None)):
        await served.asks(worker, served.versions.next_target(0))
        assert await served.asks(worker, served.versions.installed(1, attested)) == ""
    assert told == [B] and served.versions.share_attested == 0.5
    await served.asks(B, served.versions.installed(1, Attestation(None, log_probs=[-1.0])))
    assert told == [B], "its log-probs tell something"
    await served.asks(B, served.versions.installed(1, Attestation(None)))
    assert told == [B, B]
