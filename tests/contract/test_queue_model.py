"""The whole queue, over a virtual clock, against a dictionary: whatever is asked in whatever order, both have the same rows."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncflow.cluster.clock import VirtualLoop
from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.controller import Controller
from asyncflow.transfer_queue.leases import Lease, Want
from asyncflow.transfer_queue.queue import TransferQueue, follow_all
from asyncflow.transfer_queue.schema import Schema, TaskSpec
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.transfer_queue.unit import UnitOptions
from asyncflow.types import Batch, Column, GroupMeta, Interval, Ragged
from tests.contract.queue_model import MAX_FAILURES, Model, Row
from tests.depth import few

T = TypeVar("T")
LEASE_SECONDS = 30.0
TASKS = st.sampled_from(["rollout", "train"])
SCHEMA = Schema(
    (
        Column("prompt", "int64", ragged=True, per="group", counts_tokens=True),
        Column("value", "int64"),
        Column("values", "int64", ragged=True, counts_tokens=True),
    ),
    (
        TaskSpec("rollout", ("prompt",), ("value", "values"), False, lease_seconds=LEASE_SECONDS, max_failures=MAX_FAILURES),
        TaskSpec("train", ("prompt", "value", "values"), lease_seconds=LEASE_SECONDS),
    ),
    2,
)


class QueueMachine(RuleBasedStateMachine):
    """`leases` are those that somebody still has in hand: alive, expired, or of a controller that is no more."""

    @initialize(num_units=st.integers(1, 3))
    def start(self, num_units: int) -> None:
        self.loop, self.model, self.folder = VirtualLoop(), Model(), tempfile.TemporaryDirectory()
        self.leases: dict[tuple[str, str, int], Lease] = {}
        self.deadlines: dict[tuple[str, str, int], float] = {}
        self.writers: dict[tuple[str, int], tuple[str, str, int]] = {}  # (task, row) -> the lease that completed it
        self.told: set[tuple[str, str, int]] = set()  # leases that have expired with rows: the units know of them
        self.kept: dict[int, Row] | None = None
        self.value, self.has_moved = 0, False
        self.following: dict[str, asyncio.Task[None]] = {}
        self._open(num_units)

    def _open(self, num_units: int) -> None:
        storages = [MemoryStorage() for _ in range(num_units)]
        self.queue = TransferQueue(SCHEMA, storages, unit_options=UnitOptions(snapshot_dir=Path(self.folder.name)))
        self.do(self.queue.open())
        self.terms = 0
        self.client: TransferQueueClient = self.queue.client()
        for task in self.queue.controllers:
            self._follow(task)

    def _follow(self, task: str) -> None:
        async def follow() -> None:
            controller = self.queue.controllers[task]
            self.following[task] = asyncio.create_task(follow_all(controller, self.queue.places))
            for number in self.queue.places.units:
                await controller.subscription.caught_up(number)

        self.do(follow())

    def do(self, request: Coroutine[Any, Any, T]) -> T:
        """What does not need virtual time to go on."""

        async def at_once() -> T:
            return await asyncio.wait_for(request, 0.001)

        return self.loop.run_until_complete(at_once())

    def _stop(self, task: str) -> None:
        self.following[task].cancel()
        self.do(asyncio.sleep(0))
        self.queue.controllers[task].close()

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            for task in self.following:
                self._stop(task)
            self.do(self.queue.close())
            assert not self.loop.errors, self.loop.errors
            self.loop.finish()
            self.folder.cleanup()

    def _is_alive(self, key: tuple[str, str, int]) -> bool:
        task, incarnation, _ = key
        return incarnation == self.queue.controllers[task].table.incarnation and self.deadlines[key] > self.loop.now

    # -- rules ----------------------------------------------------------------------------------------------------------------

    @rule(group=st.integers(0, 9), size=st.integers(1, 4))
    def put(self, group: int, size: int) -> None:
        if self.has_moved and (group in self.model.gone or any(row >> 2 == group for row in self.model.rows)):
            return  # it may lie on another unit than the one that it would be put on now
        prompts = Ragged.from_arrays([np.full(group, group)], "int64")
        batch = Batch(np.empty(0, np.int64), np.array([group]), {"prompt": prompts})
        self.do(self.client.put([GroupMeta(group, size, 0, Interval(0, 0))], batch))
        self.model.put(group, size)

    @rule(task=TASKS, groups=st.integers(1, 3))
    def lease(self, task: str, groups: int) -> None:
        ready = self.model.may_be_leased(task)

        async def lease() -> Any:
            asked = asyncio.create_task(self.client.lease(task, Want(groups=groups)))
            for _ in range(20):
                await asyncio.sleep(0)
            if ready:
                return await asked
            assert not asked.done(), asked
            asked.cancel()
            return None

        if (leased := self.do(lease())) is None:
            return
        found, token = leased.lease, leased.lease.token
        touched = {row >> 2 for row in found.indices}
        assert len(touched) == min(groups, len({row >> 2 for row in ready}))
        assert sorted(found.indices) == sorted(row for row in ready if row >> 2 in touched)
        assert leased.batch.indices.tolist() == found.indices
        assert [p.tolist() for p in leased.batch.ragged("prompt")] == [[m.group] * m.group for m in found.groups]
        if task == "train":
            assert leased.batch.dense("value").tolist() == [self.model.rows[row].value for row in found.indices]
        deliveries = [number for of_group in found.deliveries for number in of_group]
        assert deliveries == self.model.lease(task, token.lease, found.indices)
        key = (task, token.incarnation, token.lease)
        self.leases[key], self.deadlines[key] = found, self.loop.now + LEASE_SECONDS

    def _some_lease(self, data: st.DataObject) -> tuple[tuple[str, str, int], Lease, list[int]]:
        """Of those in hand, with some of the rows that it holds or once held."""
        key = data.draw(st.sampled_from(list(self.leases)))
        rows = st.lists(st.sampled_from(sorted(self.leases[key].indices)), unique=True)
        return key, self.leases[key], data.draw(rows)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        key, lease, rows = self._some_lease(data)
        task = key[0]
        self.value += 1
        indices, groups = np.array(rows, np.int64), np.array(list(dict.fromkeys(row >> 2 for row in rows)), np.int64)
        columns: dict[str, Any] = {"done/train": np.ones(len(rows), np.uint8)}
        if task == "rollout":
            columns = {
                "value": np.full(len(rows), self.value),
                "values": Ragged.from_arrays([np.full(3, self.value)] * len(rows), "int64"),
            }
        is_stale = key in self.told or key[1] != self.queue.controllers[task].table.incarnation
        kept = self.do(self.client.complete(lease, Batch(indices, groups, columns)))
        assert kept.tolist() == self._model_completes(key, rows, is_stale)

    def _model_completes(self, key: tuple[str, str, int], rows: list[int], is_stale: bool) -> list[bool]:
        task = key[0]
        kept = [False] * len(rows) if is_stale else self.model.complete(task, rows, self.value)
        self.writers |= {(task, row): key for row, is_kept in zip(rows, kept, strict=True) if is_kept}
        return [self.writers.get((task, row)) == key for row in rows]  # it may be told again: the first answer may have been lost

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        key, lease, rows = self._some_lease(data)
        if key[0] == "rollout":
            held = self.model.holds(key[0], key[2]) if self._is_alive(key) else []
            self.do(self.client.fail(lease, rows, f"failure {self.value}"))
            self.model.fail([row for row in rows if row in held])

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        key, lease, _ = self._some_lease(data)
        holds = self._is_alive(key) and bool(self.model.holds(key[0], key[2]))
        assert self.do(self.client._controller(key[0]).renew([lease.token])) == ([] if holds else [lease.token])
        if holds:
            self.deadlines[key] = self.loop.now + LEASE_SECONDS

    @rule(seconds=st.sampled_from([9.0, 16.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        """Then the units are told of something, and so hear of the leases that are over."""
        self.loop.run_until_complete(asyncio.sleep(seconds + LEASE_SECONDS / 1000))
        for key in self.leases:
            task, incarnation, number = key
            if not self._is_alive(key) and incarnation == self.queue.controllers[task].table.incarnation:
                if self.model.holds(task, number):
                    self.told.add(key)
                self.model.leased.pop((task, number), None)
        for task in self.queue.controllers:
            self.do(self.client.end_partition(task, 77))

    @rule(rows=st.lists(st.integers(0, 39), unique=True, max_size=6))
    def filter(self, rows: list[int]) -> None:
        self.do(self.client.filter(rows, "so"))
        self.model.filter(rows)

    @rule(rows=st.lists(st.integers(0, 39), unique=True, max_size=6))
    def drop(self, rows: list[int]) -> None:
        self.do(self.client.drop(rows))
        self.model.drop(rows)

    @rule(task=TASKS)
    def restart_controller(self, task: str) -> None:
        self._stop(task)
        self.terms += 1
        self.queue.controllers[task] = Controller(task, SCHEMA, term=self.terms)
        self.queue._serve(f"controller/{task}", self.queue.controllers[task])
        self._follow(task)
        self.model.forget(task)

    @rule()
    def snapshot(self) -> None:
        self.do(self.queue.snapshot("s"))
        self.kept = self.model.snapshot()

    @precondition(lambda self: self.kept is not None)
    @rule(num_units=st.integers(1, 3))
    def restore(self, num_units: int) -> None:
        for task in list(self.following):
            self._stop(task)
        self.do(self.queue.close())
        self.has_moved |= num_units != len(self.queue.units)
        self._open(num_units)
        assert self.kept is not None and self.do(self.queue.restore("s")) == len(self.kept)
        self.model.restore(self.kept)
        self.leases.clear()
        self.writers.clear()

    # -- what always holds ----------------------------------------------------------------------------------------------------

    @invariant()
    def both_have_the_same(self) -> None:
        if not hasattr(self, "loop"):
            return
        tasks, units = self.do(self.client.status())
        for name, task in tasks.items():
            states = [self.model.state(name, row) for row in self.model.rows]
            for state in ("waiting", "ready", "leased", "done", "dead", "filtered"):
                assert task.counts[state] == states.count(state), (
                    name,
                    state,
                    task.counts,
                    dict(zip(self.model.rows, states, strict=True)),
                )
        assert (
            sum(unit.rows for unit in units.values())
            == sum(unit.capacity.reserved_rows for unit in units.values())
            == len(self.model.rows)
        )
        values = [row for row, it in self.model.rows.items() if it.value is not None]
        found: dict[int, tuple[int, list[int]]] = {}
        for number, unit in enumerate(self.queue.units):
            here = self.do(unit.present(np.array(values, np.int64)))
            [batch] = self.do(self.client.read({number: here}, ["value", "values"]))
            found |= {row: (batch.dense("value")[i], batch.ragged("values")[i].tolist()) for i, row in enumerate(here.tolist())}
        assert found == {row: (self.model.rows[row].value, [self.model.rows[row].value] * 3) for row in values}
        groups = {row >> 2 for row in self.model.rows}
        prompts = sum(8 * group for group in groups)
        marks = sum(unit.stored_bytes for unit in units.values()) - prompts - 32 * len(values)
        assert 0 <= marks <= 40 * len(self.model.rows), "nothing that has been dropped is still held"


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(
    max_examples=few(50, 250),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
