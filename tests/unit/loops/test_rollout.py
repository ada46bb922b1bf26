"""A rollout worker: which groups it takes, which weights it serves. Queue, versions and ledger are real, the engine is a test's."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from asyncflow.attestation import Attestation, Probe, Probing
from asyncflow.control import SCHEDULES
from asyncflow.control.ledger import Ledger
from asyncflow.control.policy_versions import PolicyVersions
from asyncflow.control.progress_view import ProgressView
from asyncflow.control.signal import Signal
from asyncflow.control.worker_pool import WorkerPool
from asyncflow.engines.base import Response, SampleKey, Sampling
from asyncflow.loops import rollout
from asyncflow.loops.context import LoopContext, ResponseScoring
from asyncflow.loops.rollout import FIRST, EngineVersion, Rollout, ServedWeights, share_of
from asyncflow.loops.samples import Prompt, Shape, admission, priority_of, schema
from asyncflow.registry import build
from asyncflow.rewards.base import RewardFailure, Sample, Score
from asyncflow.telemetry.spans import Recorder, Span
from asyncflow.transfer_queue.client import Leased
from asyncflow.transfer_queue.controller import TaskEvents
from asyncflow.transfer_queue.queue import TransferQueue
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.transport import client_name
from asyncflow.types import Array, GroupMeta, Interval
from asyncflow.weight_sync.base import Manifest, WeightSyncError
from tests.builders import loop_turns
from tests.patience import patience

BITS = 2
WORKER = "rollout/0"


class Engine:
    """Ends a response when the test says so; its spans tell what was installed meanwhile."""

    is_deterministic, why_not_deterministic = True, ""

    def __init__(self, num_slots: int = 8) -> None:
        self.num_slots, self.version, self.done = num_slots, 0, list[str]()
        self.under_way: dict[tuple[int, int], list[int]] = {}  # by group and sample, the versions so far
        self.ended: dict[tuple[int, int], asyncio.Event] = {}

    async def generate(
        self, prompt_ids: Array, *, samples: Sequence[int], sampling: Sampling, key: SampleKey
    ) -> AsyncIterator[Response]:
        keys = [(key.prompt_index, sample) for sample in samples]
        for each in keys:
            self.under_way[each], self.ended[each] = [self.version], asyncio.Event()
        while keys:
            ends = {asyncio.ensure_future(self.ended[each].wait()): each for each in keys}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for each in [each for end, each in ends.items() if end.done()]:
                keys.remove(each)
                spans = np.array([*enumerate(self.under_way.pop(each))], np.int64)
                yield Response(each[1], np.arange(3), -np.ones(3, np.float32), spans, "stop")

    async def prepare(self, version: int, tensors: Mapping[str, Any]) -> None:
        self.done.append(f"prepare {version}")

    async def install(self, version: int, tensors: Mapping[str, Any]) -> None:
        assert tensors == {"of": version}
        self.version = version
        for versions in self.under_way.values():
            versions.append(version)
        self.done.append(f"install {version}")

    async def export_weights(self) -> None:
        pass

    async def pause(self) -> None:
        self.done.append("pause")

    async def resume(self) -> None:
        self.done.append("resume")

    async def close(self) -> None:
        pass


class Receiver:
    """Has what the test lets it have."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.released: list[int] = []
        self.lacks: set[int] = set()

    async def fetch(self, wanted: Manifest) -> dict[str, Any]:
        self.asked.append(wanted.version)
        if wanted.version in self.lacks:
            raise WeightSyncError(f"version {wanted.version} is no longer kept")
        return {"of": wanted.version}

    async def release(self) -> None:
        self.released += self.asked[-1:]

    async def close(self) -> None:
        pass


class World:
    """One worker, and everything around it."""

    def __init__(
        self,
        mode: str,
        options: Mapping[str, Any],
        *,
        num_slots: int,
        rewards: Callable[[Sample], float],
        prompts: int = 2,
        workers: int = 1,
    ) -> None:
        self.schedule = build("schedule", mode, options, SCHEDULES)
        self.signal, self.ledger = Signal(), Ledger(BITS, max_staleness=self.schedule.max_staleness)
        events = TaskEvents(on_done=self._done, on_change=self.signal.notify)
        self.queue = TransferQueue(schema(BITS, 30.0, 3), [MemoryStorage()], events={"rollout": events})
        progress = ProgressView(self.ledger, self.queue.controllers)
        self.versions = PolicyVersions(self.schedule, progress, self.signal, lambda: 0.0, WorkerPool(workers))
        self.engine, self.receiver, self.client = Engine(num_slots), Receiver(), self.queue.client()
        self.spans: list[Span] = []
        self._rewards = rewards
        self.shape = Shape(prompts, 2, BITS, 0, 1.0, 8, 2)
        recorder = Recorder(WORKER, lambda: 0.0, self.spans.append)
        nobodys: Any = None
        context = LoopContext(self.client, nobodys, self.versions, self.schedule, self.shape, recorder)
        scoring = ResponseScoring(self._score, lambda ids: "", lambda sample: None)
        self.weights = ServedWeights(self.receiver, lambda: {"of": 0})
        self.loop = Rollout(context, self.engine, self.weights, scoring)

    def _done(self, rows: list[int]) -> None:
        self.ledger.done("rollout", rows)
        self.signal.notify()

    async def _score(self, sample: Sample) -> Score:
        return Score(self._rewards(sample), ())

    def start(self) -> asyncio.Task[None]:
        context = contextvars.copy_context()
        context.run(client_name.set, WORKER)
        return asyncio.create_task(self.loop.run(), context=context)

    async def admit(self, *metas: GroupMeta) -> None:
        self.ledger.open(metas)
        batch = admission(metas, [Prompt(np.arange(2), {})] * len(metas), [1.0] * len(metas))
        await self.queue.client().put(list(metas), batch)
        await loop_turns()

    async def publish(self, version: int) -> None:
        await self.versions.publish(Manifest("i", version, "", "", 0, {}))
        await loop_turns()

    async def end(self, group: int, *samples: int) -> None:
        """The responses end."""
        for sample in samples or (0, 1):
            self.engine.ended[group, sample].set()
        await loop_turns()

    @property
    def groups(self) -> list[int]:
        return sorted({group for group, _ in self.engine.under_way})

    async def spans_of(self, group: int) -> list[list[int]]:
        """That made the responses of a group, by sample."""
        rows = np.array([group << BITS, (group << BITS) + 1])
        (batch,) = await self.client.read({0: rows}, ["version_spans"])
        return [spans[1::2].tolist() for spans in batch.ragged("version_spans")]


def meta(group: int, step: int, low: int, high: int, topic: str = "train") -> GroupMeta:
    interval = Interval(low, high)
    return GroupMeta(group, 2, step, interval, topic, priority_of(interval, is_evaluation=topic == "eval"))


@contextlib.asynccontextmanager
async def a_worker(
    mode: str = "delayed",
    *,
    num_slots: int = 8,
    rewards: Callable[[Sample], float] = lambda sample: 0.0,
    before: Callable[[World], Awaitable[None]] | None = None,
    prompts: int = 2,
    workers: int = 1,
    **options: Any,
) -> AsyncIterator[World]:
    """Running, in a world that `before` has prepared; it ends well when `PolicyVersions` stops."""
    world = World(mode, options, num_slots=num_slots, rewards=rewards, prompts=prompts, workers=workers)
    async with world.queue.running():
        await loop_turns()
        if before is not None:
            await before(world)
        running = world.start()
        await loop_turns()
        yield world
        world.versions.stop()
        await asyncio.wait_for(running, 5)


@pytest.mark.parametrize(
    ("has", "installs"),
    [
        (EngineVersion(2, "h2"), []),
        (EngineVersion(2, "another"), ["install 2"]),  # of an attempt that is over, trained again to other bits
        (EngineVersion(1, "h2"), ["install 2"]),
        (None, ["install 2"]),
    ],
)
async def test_a_worker_that_stayed_for_an_attempt_installs_what_its_engine_does_not_have(
    has: EngineVersion | None, installs: list[str]
) -> None:
    async def prepare(world: World) -> None:
        await world.versions.publish(Manifest("i", 2, "", "h2", 0, {}))
        world.weights.has = has

    async with a_worker(before=prepare) as world:
        assert [done for done in world.engine.done if done.startswith("install")] == installs
        assert world.versions.serving == {WORKER: 2} and world.weights.has == EngineVersion(2, "h2")
    assert world.receiver.asked == [2] * len(installs)


async def test_a_worker_that_stayed_installs_its_own_files_where_the_first_version_is_needed() -> None:
    async def prepare(world: World) -> None:
        world.weights.has = EngineVersion(3, "h3")

    async with a_worker(before=prepare) as world:
        assert [done for done in world.engine.done if done.startswith("install")] == ["install 0"]
        assert world.versions.serving == {WORKER: 0} and world.weights.has == FIRST


async def test_a_worker_takes_what_its_version_may_generate_and_stores_it_with_its_version() -> None:
    async with a_worker() as world:
        assert world.versions.serving == {WORKER: 0}
        await world.admit(meta(0, 0, 0, 0), meta(1, 0, 0, 0), meta(2, 2, 1, 1))
        assert world.groups == [0, 1]
        await world.end(0)
        assert await world.spans_of(0) == [[0], [0]] and world.ledger.unfinished(9) == 4


async def test_it_takes_no_more_than_its_share_of_a_step_and_the_next_group_when_there_is_room_for_all_of_it() -> None:
    async with a_worker(num_slots=99) as world:
        await world.admit(*(meta(group, 0, 0, 0) for group in range(5)))
        assert world.groups == [0, 1]
        await world.end(0, 0)
        assert world.groups == [0, 1]
        await world.end(0, 1)
        assert world.groups == [1, 2]


@pytest.mark.parametrize("workers", range(1, 8))
@pytest.mark.parametrize("prompts", [7, 12, 32])
def test_shares_add_up_to_the_step_and_differ_by_one_at_most_in_a_step_and_over_all_of_them(workers: int, prompts: int) -> None:
    totals = [0] * workers
    for version in range(50):
        shares = [share_of(prompts, place, workers, version) for place in range(workers)]
        totals = [total + share for total, share in zip(totals, shares, strict=True)]
        for each, expected in ((shares, prompts), (totals, (version + 1) * prompts)):
            assert sum(each) == expected and max(each) - min(each) <= 1 <= min(each)


async def test_the_larger_share_is_another_workers_with_each_version_and_follows_who_joins() -> None:
    async with a_worker(num_slots=99, prompts=4, workers=3) as world:
        for version, share in enumerate([2, 1, 1, 2, 1, 1]):
            if version:
                await world.publish(version)
            first = 4 * version
            await world.admit(*(meta(first + k, version + 1 if version else 0, version, version) for k in range(4)))
            assert world.engine.version == version and world.groups == [first + k for k in range(share)], version
            if version == 5:
                break
            for group in range(first, first + 4):
                await world.end(group)
        assert world.versions.resize(4)[0] == ["rollout/3"]
        for group in range(first, first + 4):
            await world.end(group)
        await world.publish(6)
        await world.admit(*(meta(24 + k, 7, 6, 6) for k in range(4)))
        assert world.groups == [24], "with three workers it would be two"


async def test_new_weights_are_fetched_at_once_and_installed_when_what_is_under_way_has_ended() -> None:
    async with a_worker() as world:
        await world.admit(meta(0, 0, 0, 0), meta(1, 2, 1, 1))
        await world.publish(1)
        assert world.engine.done == ["prepare 1"] and world.versions.installing == {WORKER: 1}
        await world.end(0, 0)
        assert world.engine.done == ["prepare 1"] and world.receiver.released == []
        await world.end(0, 1)
        assert world.engine.done == ["prepare 1", "install 1"] and world.versions.serving == {WORKER: 1}
        assert world.receiver.released == [1]
        assert world.groups == [1]
        await world.end(1)
        assert await world.spans_of(0) == [[0], [0]] and await world.spans_of(1) == [[1], [1]]


async def test_without_staleness_nothing_is_prepared_beside_generation_for_there_is_none() -> None:
    async with a_worker("periodic") as world:
        await world.admit(meta(0, 0, 0, 0))
        await world.end(0)
        await world.publish(1)
        assert world.engine.done == ["install 1"] and world.receiver.released == [1]


async def test_weights_that_are_not_to_be_installed_after_all_are_given_back() -> None:
    """Whoever publishes may be waiting for the file that they are in, and this worker for what is published."""
    async with a_worker() as world:
        grant, released = world.versions.may_install, world.receiver.released

        async def refuse_once(version: int, serving: int) -> bool:
            world.versions.may_install = grant  # type: ignore[method-assign]
            return False

        world.versions.may_install = refuse_once  # type: ignore[method-assign]
        await world.admit(meta(0, 0, 0, 0))
        await world.publish(1)
        assert world.receiver.asked == [1, 1] and released == [1]
        await world.end(0)
        assert world.engine.version == 1 and released == [1, 1]


async def test_between_the_grant_and_the_installation_nothing_is_taken() -> None:
    async with a_worker() as world:
        await world.admit(meta(0, 0, 0, 0))
        await world.publish(1)
        assert world.versions.installing == {WORKER: 1}
        await world.admit(meta(1, 3, 0, 1))  # this version may make it, and so may the next
        assert world.groups == [0]
        await world.end(0)
        assert world.groups == [1]
        await world.end(1)
        assert await world.spans_of(1) == [[1], [1]]


async def test_a_run_that_stops_waits_for_no_response_before_an_installation() -> None:
    async with a_worker() as world:
        await world.admit(meta(0, 0, 0, 0))
        await world.publish(1)
        assert world.versions.installing == {WORKER: 1} and world.groups == [0]
    assert world.engine.done == ["prepare 1"]


async def test_a_group_on_its_way_to_the_worker_is_not_overtaken_by_an_installation() -> None:
    """Its units may be far away: the lease counts as handed out, and the worker does not have it yet."""
    async with a_worker() as world:
        arrived, lease = asyncio.Event(), world.client.lease

        async def slow_lease(*arguments: Any, **wanted: Any) -> Leased | None:
            leased = await lease(*arguments, **wanted)
            if leased is not None:
                await arrived.wait()
            return leased

        world.client.lease = slow_lease  # type: ignore[method-assign]
        await world.admit(meta(9, 0, 0, 0))
        await world.end(9)  # the first request was made before
        await world.admit(meta(0, 1, 0, 0))
        await world.publish(1)
        assert world.versions.installing == {WORKER: 1} and world.groups == []
        assert world.engine.done == ["prepare 1"]
        arrived.set()
        await loop_turns()
        assert world.groups == [0] and world.engine.done == ["prepare 1"]
        await world.end(0)
        assert await world.spans_of(0) == [[0], [0]] and world.engine.version == 1


async def test_all_of_a_group_that_was_taken_twice_is_waited_for() -> None:
    """A row whose reward failed comes again while its sibling is still being generated."""
    failures = iter([True])

    def fails_once(sample: Sample) -> float:
        if next(failures, False):
            raise RewardFailure("raised", "the grader's own bug")
        return 1.0

    async with a_worker(rewards=fails_once) as world:
        await world.admit(meta(0, 0, 0, 0))
        await world.end(0, 0)
        assert (0, 0) in world.engine.under_way and (0, 1) in world.engine.under_way  # both again
        await world.publish(1)
        await world.end(0, 0)
        assert world.engine.done == ["prepare 1"] and world.engine.version == 0
        await world.end(0, 1)
        assert world.engine.version == 1 and await world.spans_of(0) == [[0], [0]]


# -- in flight ------------------------------------------------------------------------------------------------------------------


async def test_in_flight_a_response_goes_on_under_the_new_weights() -> None:
    async with a_worker("bounded", max_staleness=2) as world:
        await world.admit(meta(0, 1, 0, 1), meta(1, 2, 0, 2))
        await world.publish(1)
        assert world.engine.done == ["prepare 1", "pause", "install 1", "resume"] and world.receiver.released == [1]
        await world.end(0)
        await world.publish(2)
        await world.end(1)
        assert await world.spans_of(0) == [[0, 1], [0, 1]] and await world.spans_of(1) == [[0, 1, 2], [0, 1, 2]]


async def test_in_flight_too_a_response_that_the_new_weights_may_not_end_is_waited_for() -> None:
    async with a_worker("bounded", max_staleness=2) as world:
        await world.admit(meta(1 << 20, 0, 0, 0, "eval"), meta(1, 2, 0, 2))
        assert world.groups == [1, 1 << 20]
        await world.publish(1)
        assert world.engine.done == ["prepare 1"] and world.versions.installing == {WORKER: 1}
        await world.end(1 << 20)
        assert world.engine.done == ["prepare 1", "pause", "install 1", "resume"]
        await world.end(1)
        assert await world.spans_of(1) == [[0, 1], [0, 1]] and await world.spans_of(1 << 20) == [[0], [0]]


async def test_one_that_is_called_back_ends_all_first() -> None:
    """Otherwise a response might go through more versions than the schedule promises."""

    async def at_version_1(world: World) -> None:
        await world.publish(1)

    async with a_worker("bounded", max_staleness=2, before=at_version_1) as world:
        assert world.versions.serving == {WORKER: 1}
        await world.admit(meta(1, 2, 0, 2))
        await world.admit(meta(1 << 20, 0, 0, 0, "eval"))
        assert world.versions.installing == {WORKER: 0} and world.engine.version == 1
        await world.end(1)
        assert world.engine.version == 0 and world.groups == [1 << 20]
        await world.end(1 << 20)
        assert world.engine.version == 1
        assert await world.spans_of(1) == [[1], [1]] and await world.spans_of(1 << 20) == [[0], [0]]


# -- weights that cannot be had -------------------------------------------------------------------------------------------------


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "RETRY_SECONDS", (0.02, 0.05))


@pytest.mark.usefixtures("soon")
async def test_without_its_weights_a_worker_takes_nothing_and_asks_again_for_what_is_newest_then() -> None:
    async with a_worker() as world:
        world.receiver.lacks = {1}
        await world.publish(1)
        assert world.versions.stale == {WORKER: "version 1 is no longer kept"}
        await world.admit(meta(0, 1, 0, 0), meta(1, 3, 2, 2))
        assert world.groups == []
        await world.queue.client().drop([0, 1])  # somebody else has made them
        await world.publish(2)
        await asyncio.sleep(0.1)
        assert world.receiver.asked[0] == 1 and world.receiver.asked[-1] == 2
        assert world.versions.stale == {} and world.versions.serving == {WORKER: 2} and world.groups == [1]


@pytest.mark.usefixtures("soon")
async def test_a_worker_that_was_busy_when_its_weights_could_not_be_had_takes_nothing_when_it_has_room() -> None:
    async with a_worker(num_slots=4) as world:
        await world.admit(meta(0, 0, 0, 0), meta(1, 0, 0, 0), meta(2, 1, 0, 0))
        assert world.groups == [0, 1]
        world.receiver.lacks = {1}
        await world.publish(1)
        assert world.versions.stale
        await world.end(0)
        assert world.groups == [1]


@pytest.mark.usefixtures("soon")
async def test_one_that_was_called_back_in_vain_goes_on_with_the_version_that_it_serves() -> None:
    async with a_worker() as world:
        for version in (1, 2):
            await world.publish(version)
        assert world.versions.serving == {WORKER: 2}
        world.receiver.lacks = {1}
        await world.admit(meta(0, 2, 1, 1))
        assert world.versions.stale
        await world.queue.client().drop([0, 1])  # somebody else has made them
        await asyncio.sleep(0.1)
        assert world.versions.stale == {} and world.versions.serving == {WORKER: 2}
        await world.admit(meta(1, 3, 2, 2))
        assert world.groups == [1]


@pytest.mark.usefixtures("soon")
async def test_one_that_was_called_back_and_has_something_else_installs_again_what_it_served() -> None:
    async with a_worker() as world:
        installs: list[int] = []

        async def attest() -> Attestation:
            installs.append(world.engine.version)
            return Attestation([(["a"], 8 if installs[-1] == 1 and len(installs) > 2 else 7)])

        world.engine.attest = attest  # type: ignore[attr-defined]
        for version in (1, 2):
            await world.versions.publish(Manifest("i", version, "", "", 0, {}, sums={"a": 7}))
            await loop_turns()
        await world.admit(meta(0, 2, 1, 1))
        assert world.versions.stale and world.versions.attested == {WORKER: False}
        await world.queue.client().drop([0, 1])  # somebody else has made them
        await asyncio.sleep(0.1)
        assert world.versions.serving == {WORKER: 2} and not world.versions.stale
        assert installs == [1, 2, 1, 2] and world.engine.version == 2, "it generates with what was refused"


@pytest.mark.usefixtures("soon")
async def test_the_pause_between_attempts_doubles_up_to_a_limit_and_starts_anew_after_a_success(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
        await sleep(0)

    async with a_worker() as world:
        monkeypatch.setattr(asyncio, "sleep", noted)
        for version, attempts in ((1, 4), (2, 2)):
            world.receiver.lacks = {version}
            await world.publish(version)
            while world.receiver.asked.count(version) < attempts:
                await sleep(0)
            world.receiver.lacks = set()
            while world.engine.version != version:
                await sleep(0)
        monkeypatch.setattr(asyncio, "sleep", sleep)
    assert pauses[:3] == [0.02, 0.04, 0.05] and set(pauses[2 : pauses.index(0.02, 1)]) == {0.05}
    assert pauses[pauses.index(0.02, 1) :][:2] == [0.02, 0.04]


# -- the beginning --------------------------------------------------------------------------------------------------------------


async def test_a_worker_begins_with_the_newest_version() -> None:
    async def at_version_2(world: World) -> None:
        await world.publish(1)
        await world.publish(2)

    async with a_worker(before=at_version_2) as world:
        assert world.receiver.asked == [2] and world.engine.done == ["prepare 2", "install 2"]
        assert world.versions.serving == {WORKER: 2} and world.versions.installing == {}


async def test_a_worker_begins_with_an_older_version_if_nobody_else_can_make_what_is_left() -> None:
    async def a_row_was_lost(world: World) -> None:
        await world.admit(meta(0, 2, 1, 1), meta(1, 3, 2, 2))
        await world.publish(1)
        await world.publish(2)

    async with a_worker(before=a_row_was_lost) as world:
        assert world.receiver.asked[0] == 1 and world.groups == [0]
        await world.end(0)
        assert world.engine.version == 2 and world.groups == [1]
        assert await world.spans_of(0) == [[1], [1]]


@pytest.mark.usefixtures("soon")
async def test_one_that_cannot_begin_tries_again() -> None:
    async def lacks_version_1(world: World) -> None:
        world.receiver.lacks = {1}
        await world.publish(1)

    async with a_worker(before=lacks_version_1) as world:
        assert world.versions.serving == {} and world.versions.num_healthy(0.0) == 0
        await world.publish(2)  # the first one is never there again
        await asyncio.sleep(0.1)
        assert world.versions.serving == {WORKER: 2} and world.versions.num_healthy(0.0) == 1


@contextlib.asynccontextmanager
async def a_leaver(
    *, groups: Sequence[int] = (0,), rewards: Callable[[Sample], float] = lambda sample: 0.0
) -> AsyncIterator[tuple[World, asyncio.Task[None]]]:
    """A worker with these groups that has been told to leave; another one is in the run."""
    world = World("periodic", {}, num_slots=8, rewards=rewards)
    world.versions.workers = WorkerPool(2)
    world.versions.workers.members.reverse()  # so that this one came last
    async with world.queue.running():
        running = world.start()
        await loop_turns()
        await world.admit(*(meta(group, 0, 0, 0) for group in groups))
        assert world.groups == [*groups]
        assert world.versions.resize(1) == ([], [WORKER])
        await loop_turns()
        yield world, running
        world.versions.stop()
        await asyncio.wait_for(running, 5)


async def test_one_that_is_to_leave_takes_nothing_more_ends_what_it_has_and_goes() -> None:
    async with a_leaver() as (world, running):
        await world.admit(meta(1, 1, 0, 0))
        await world.end(0, 0)
        assert not running.done() and world.groups == [0]
        await world.end(0, 1)
        await asyncio.wait_for(running, 5)
        assert await world.spans_of(0) == [[0], [0]] and world.ledger.unfinished(0) == 2
        assert world.queue.controllers["rollout"].holders() == {}
        assert [(span.task, span.group) for span in world.spans if span.task == "generate_group"] == [("generate_group", 0)]


async def test_one_that_waits_for_prompts_when_it_is_to_leave_goes_at_once() -> None:
    async with a_leaver(groups=()) as (world, running):
        await asyncio.wait_for(running, 5)
        await world.admit(meta(0, 0, 0, 0))
        assert world.groups == [] and world.queue.controllers["rollout"].holders() == {}


async def test_one_that_is_to_leave_ends_at_once_when_the_run_does() -> None:
    async with a_leaver() as (world, running):
        assert not running.done()
        world.versions.stop()
        await asyncio.wait_for(running, 5)
        assert world.groups == [0]


async def test_what_fails_while_it_leaves_is_for_others() -> None:
    def fails(sample: Sample) -> float:
        raise RewardFailure("raised", "the grader's own bug")

    async with a_leaver(rewards=fails) as (world, running):
        await world.end(0)
        await asyncio.wait_for(running, 5)
        assert world.queue.controllers["rollout"].table.counts()["ready"] == 2


async def test_its_share_of_a_step_follows_the_number_of_workers_with_its_next_version() -> None:
    async with a_worker("bounded", num_slots=99) as world:
        assert world.loop._share == 4
        world.versions.resize(2)
        assert world.loop._share == 4
        await world.publish(1)
        assert world.loop._installed == 1 and world.loop._share == 2


async def test_a_worker_that_joins_when_the_run_is_stopping_ends() -> None:
    async def stopping(world: World) -> None:
        world.versions.stop()

    async with a_worker(before=stopping) as world:
        assert world.versions.serving == {}


async def test_a_worker_takes_nothing_while_its_engine_has_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first install of version 1 comes to nothing; the second one is right."""
    monkeypatch.setattr(rollout, "RETRY_SECONDS", (0.01, 0.01))
    async with a_worker("periodic") as world:
        installs: list[int] = []

        async def attest() -> Attestation:
            installs.append(world.engine.version)
            return Attestation([(["a"], 7 if len(installs) > 1 else 8)])

        world.engine.attest = attest  # type: ignore[attr-defined]
        await world.versions.publish(Manifest("i", 1, "", "", 0, {}, sums={"a": 7}))
        await world.admit(meta(1, 1, 1, 1))
        while len(installs) < 2:
            assert not world.groups, "it has taken a group with weights that are not the version's"
            await asyncio.sleep(0.005)
        await loop_turns()
        assert world.groups == [1] and installs == [1, 1] and world.versions.attested == {WORKER: True}
        assert world.engine.done.count("install 1") == 2
        await world.end(1)


async def test_an_engine_that_was_paused_for_an_install_that_was_refused_goes_on_after_the_next_one() -> None:
    """One outside the run ends what it has although it is paused, so that the second install finds nothing under way."""
    async with a_worker("bounded", max_staleness=2) as world:
        sums = iter([8])

        async def attest() -> Attestation:
            return Attestation([(["a"], next(sums, 7))])

        world.engine.attest = attest  # type: ignore[attr-defined]
        await world.admit(meta(0, 1, 0, 1))
        await world.versions.publish(Manifest("i", 1, "", "", 0, {}, sums={"a": 7}))
        await loop_turns()
        assert world.versions.stale and world.engine.done == ["prepare 1", "pause", "install 1"]
        await world.end(0)
        deadline = time.monotonic() + patience(20)
        while world.versions.stale:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        await loop_turns()
        assert world.engine.done[3:] == ["prepare 1", "install 1", "resume"]
        await world.admit(meta(1, 2, 0, 2))
        await world.publish(2)
        assert world.engine.done[6:] == ["prepare 2", "pause", "install 2", "resume"]
        await world.end(1)


async def test_what_the_engine_makes_of_a_probe_is_told_with_what_it_attests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements in the wrong places: all sums are right, and the second install is."""
    monkeypatch.setattr(rollout, "RETRY_SECONDS", (0.01, 0.01))
    async with a_worker("periodic") as world:
        asked: list[list[int]] = []

        async def attest() -> Attestation:
            return Attestation([(["a"], 7)])

        async def log_probs(token_ids: np.ndarray) -> np.ndarray:
            asked.append(token_ids.tolist())
            return np.array([-1.0, -2.0 if len(asked) > 1 else -9.0], np.float32)

        world.engine.attest, world.engine.log_probs = attest, log_probs  # type: ignore[attr-defined]
        world.versions.probing = Probing([4, 5, 6], 0.2)
        probe = Probe(await world.versions.probe_ids(1), [-1.0, -2.0])
        await world.versions.publish(Manifest("i", 1, "", "", 0, {}, sums={"a": 7}, probe=probe))
        while len(asked) < 2:
            await asyncio.sleep(0.005)
        await loop_turns()
        assert asked == [[4, 5, 6]] * 2 and world.engine.done.count("install 1") == 2
        assert world.versions.attested == {WORKER: True} and not world.versions.stale
        await world.publish(2)
        assert len(asked) == 2 and world.engine.version == 2, "nobody compares what has no probe"
