"""One seed: a queue in several processes, the loops that use it, and everything that can go wrong, under a virtual clock.

plan      what the seed makes of the queue: how many units, over which storage, which process serves what, how often things fail
faults    for some seconds: connections break, links are cut, processes pause, die and are replaced, storages do not answer
quiet     nothing fails any more: every row that was acknowledged has to come to its end
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import gc
import logging
import os
import random
import tempfile
import traceback
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from asyncflow.cluster.clock import Deadlock, Process, VirtualLoop, current_process
from asyncflow.transfer_queue import client, directory, node, queue, unit
from asyncflow.transfer_queue.batches import WireBatch
from asyncflow.transfer_queue.client import Leased
from asyncflow.transfer_queue.controller import Controller, TaskEvents
from asyncflow.transfer_queue.leases import Token
from asyncflow.transfer_queue.notices import News, Superseded
from asyncflow.transfer_queue.schema import DEAD, FILTERED, Schema, TaskSpec
from asyncflow.transfer_queue.storage.base import Storage
from asyncflow.transfer_queue.storage.memory import MemoryStorage
from asyncflow.transfer_queue.storage.servers.key_value import KeyValueStorage
from asyncflow.transfer_queue.table import RowState
from asyncflow.transfer_queue.unit import StorageUnit, UnitOptions
from asyncflow.transport import ConnectionLost, remote
from asyncflow.types import Column, GroupMeta, RunError
from tests.sim.facts import Facts
from tests.sim.network import Network, SimPeer, SimServer
from tests.sim.storages import SimKeyValue, SlowMemory, Weather, Witness
from tests.sim.workload import Feeder, Keeper, Loop, Roller, StepTrainer, StreamTrainer

QUIET_SECONDS = 150.0  # so long after the last fault everything has come to its end, or never will


@dataclass
class Plan:
    """What a seed has in store."""

    seed: int
    group_bits: int = 2
    units: list[tuple[str, str]] = field(default_factory=list)  # (memory | slow | durable, hub | own)
    hub_tasks: tuple[str, ...] = ()
    by_steps: bool = False
    steps: int = 2
    sizes: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(f"{self.seed}/plan")
        self.by_steps = rng.random() < 0.4
        self.follows_versions = self.by_steps and rng.random() < 0.7
        self.slack = rng.choice([0, 1])
        self.steps = rng.randint(2, 3) if self.by_steps else 1
        groups = rng.randint(2, 4) if self.by_steps else rng.randint(3, 10)
        self.sizes = [[rng.randint(1, 4) for _ in range(groups)] for _ in range(self.steps)]
        kinds = rng.choice([["memory"], ["slow"], ["durable"], ["durable"], ["memory", "slow", "durable"]])
        self.units = [(rng.choice(kinds), rng.choice(["hub", "own", "own"])) for _ in range(rng.randint(1, 3))]
        self.units.sort(key=lambda unit: unit[1] == "own")  # those of the hub have the first numbers
        self.hub_tasks = tuple(task for task in ("rollout", "train") if rng.random() < 0.3)
        self.num_rollers = rng.randint(1, 3)
        self.num_trainers = 1 if self.by_steps else rng.randint(1, 2)
        self.has_tags = rng.random() < 0.5
        self.lease_seconds = rng.choice([1.0, 3.0])
        self.max_failures = rng.randint(1, 3)
        self.rollout_sampler = rng.choice(["oldest", "shortest_queue"])
        self.train_sampler = rng.choice(["oldest", "whole_groups", "shortest_queue"])
        self.failing = rng.choice([0.0, 0.05, 0.2])
        self.forgetting = rng.choice([0.0, 0.1])
        self.filtering = rng.choice([0.0, 0.1])
        self.notify_timeout = rng.choice([0.3, 1.0])
        self.latency = rng.choice([0.001, 0.01])
        self.is_loose = rng.random() < 0.4
        self.storage_seconds = rng.choice([0.001, 0.02])
        self.storage_failures = rng.choice([0.0, 0.0, 0.03, 0.1])
        self.row_bytes = rng.choice([0, 100])
        rows = max(sum(sizes) for sizes in self.sizes)
        self.capacity_rows = rng.choice([None, 2 * rows if self.by_steps else rng.randint(4, 8)])
        self.fault_seconds = rng.choice([0.0, 3.0, 6.0, 6.0])
        self.fault_pause = rng.choice([0.2, 0.6])
        self.notices_kept = rng.choice([1, 3, 4096])
        self.closes_early = rng.random() < 0.1
        rng = random.Random(f"{self.seed}/more")
        if not self.by_steps and rng.random() < 0.2:
            self.train_sampler, self.capacity_rows = "token_balanced", None  # without room for a round there would never be one
        self.has_snapshots = rng.random() < 0.1

    @property
    def is_balanced(self) -> bool:
        """Whether all trainers are served together, as ranks, one step after the other."""
        return self.train_sampler == "token_balanced"

    def interval(self, step: int) -> tuple[int, int]:
        return max(0, step - self.slack), step

    def groups_of(self, step: int) -> list[tuple[int, int]]:
        """(number, size)"""
        first = sum(len(sizes) for sizes in self.sizes[:step])
        return [(first + i, size) for i, size in enumerate(self.sizes[step])]

    def unit_options(self) -> UnitOptions:
        return UnitOptions(notify_timeout_seconds=self.notify_timeout, capacity_rows=self.capacity_rows)

    def schema(self) -> Schema:
        columns = [
            Column("prompt", "int64", ragged=True, per="group", counts_tokens=True),
            Column("ids", "int64", ragged=True, counts_tokens=True),
            Column("reward", "float32"),
        ]
        reads: tuple[str, ...] = ("prompt",)
        if self.has_tags:
            columns.append(Column("tag", "int32"))
            reads = ("prompt", "tag")
        limits: dict[str, Any] = {"lease_seconds": self.lease_seconds, "max_failures": self.max_failures}
        options = {"ranks": self.num_trainers} if self.is_balanced else {}
        tasks = (
            TaskSpec("rollout", reads, ("ids", "reward"), whole_groups=False, sampler=self.rollout_sampler, **limits),
            TaskSpec("train", ("prompt", "ids", "reward"), sampler=self.train_sampler, sampler_options=options, **limits),
        )
        return Schema(tuple(columns), tasks, self.group_bits)


@dataclass
class Result:
    """`violations`: what was wrong, empty if nothing was."""

    seed: int
    digest: str
    violations: list[str]
    counts: Counter[str]
    seconds: float
    trace: list[str]


class World:
    """The processes of a seed and what is known of them."""

    active: World

    def __init__(self, seed: int, *, keeps_trace: bool = False) -> None:
        World.active = self
        self.plan = Plan(seed)
        self.loop = VirtualLoop()
        self.rng = random.Random(f"{seed}/faults")
        self.network = Network(self.loop, random.Random(f"{seed}/network"), latency=self.plan.latency, loose=self.plan.is_loose)
        self.counts = self.network.counts
        if keeps_trace:
            self.network.trace = []
        self.facts = Facts(self.plan.group_bits, self.plan.max_failures)
        self.weather = Weather(random.Random(f"{seed}/storage"), self.plan.storage_seconds, self.plan.storage_failures, self.counts)
        self.schema = self.plan.schema()
        self.data: dict[str, bytes] = {}  # of all durable storages
        self.processes: dict[str, Process] = {}
        self.mains: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {}
        self.starts: Counter[str] = Counter()
        self.controllers: list[tuple[Process, SimController]] = []
        self.units: dict[int, SimUnit] = {}
        self.knew: list[tuple[Process, SimController, set[int]]] = []  # rows that controllers knew when their memory was lost
        self.zombies: list[Process] = []
        self.has_faults = self.plan.fault_seconds > 0
        self.hub_broken: set[str] = set()
        self.version = 0
        self.consumed: set[int] = set()
        self.closed_steps: set[int] = set()
        self.swept: set[int] = set()
        self.has_fed = self.is_closed = self.may_close = False
        self._num_starts = 0
        self._uuids = random.Random(f"{seed}/uuid")

    # -- running ------------------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        with self._installed():
            try:
                self.loop.run_until_complete(self.loop.create_task(self._story(), name="the story"))
            except Deadlock as deadlock:
                self.facts.violated(str(deadlock))
            digest, now = self.network.digest(), self.loop.now
            self._look_at_errors()
            violations = list(self.facts.violations)
            self._count_at_the_end()
            result = Result(self.plan.seed, digest, violations, Counter(self.counts), now, list(self.network.trace or []))
            self.loop.finish()
        return result

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        """The simulated wire, witnesses in the place of services, and random numbers that the seed determines."""
        Network.active = self.network
        watch = _LogWatch(self.counts)
        logger = logging.getLogger("asyncflow")
        level, propagates = logger.level, logger.propagate
        logger.addHandler(watch)
        logger.setLevel(logging.WARNING)
        logger.propagate = False
        patches = [
            mock.patch.object(directory, "Peer", SimPeer),
            mock.patch.object(client, "Peer", SimPeer),
            mock.patch.object(node, "Peer", SimPeer),
            mock.patch.object(node, "Server", SimServer),
            mock.patch.object(node, "Controller", SimController),
            mock.patch.object(queue, "Controller", SimController),
            mock.patch.object(node, "StorageUnit", SimUnit),
            mock.patch.object(queue, "StorageUnit", SimUnit),
            mock.patch.object(unit, "NOTICES_KEPT", self.plan.notices_kept),
            mock.patch.object(os, "fsync", lambda file: None),
            mock.patch.object(uuid, "uuid4", lambda: uuid.UUID(int=self._uuids.getrandbits(128), version=4)),
        ]
        gc.disable()
        try:
            with contextlib.ExitStack() as stack:
                for patch in patches:
                    stack.enter_context(patch)
                yield
        finally:
            gc.enable()
            Network.active = None
            logger.removeHandler(watch)
            logger.setLevel(level)
            logger.propagate = propagates

    async def _story(self) -> None:
        plan = self.plan
        self._spawn("hub", self._hub)
        while "hub" not in self.network.servers:
            await asyncio.sleep(0.01)
        for number, (_, where) in enumerate(plan.units):
            if where == "own":
                self._spawn(f"unit/{number}", functools.partial(self._unit, number))
        for task in ("rollout", "train"):
            if task not in plan.hub_tasks:
                self._spawn(f"controller/{task}", functools.partial(self._controller, task))
        trainer = StepTrainer if plan.by_steps else StreamTrainer
        loops: dict[str, type[Loop]] = {"feeder": Feeder, "keeper": Keeper}
        loops |= {f"rollout-{i}": Roller for i in range(plan.num_rollers)}
        loops |= {f"trainer-{i}": trainer for i in range(plan.num_trainers)}
        for name, kind in loops.items():
            self._spawn(name, functools.partial(self._loop, name, kind))
        if plan.has_snapshots:
            shooting = asyncio.ensure_future(self._snapshots())
            shooting.set_name("snapshots")
        if self.has_faults:
            await self._faults()
        self.weather.failures = 0.0
        for process in [*self.processes.values(), *self.zombies]:
            if process.is_alive and process.is_paused:
                process.resume()
        self.may_close = plan.closes_early
        deadline = self.loop.now + QUIET_SECONDS
        while not self._is_over() and not self.facts.violations:
            if self.loop.now > deadline:
                self.facts.violated(f"not over after {QUIET_SECONDS:g} quiet seconds: {self._what_is_left()}")
                return
            await asyncio.sleep(0.5)
        if not self.facts.violations:
            await asyncio.sleep(6.0)  # for controllers to hear of everything
            self.facts.settle()
            self._compare_controllers_with_units()
            self._look_at_losses()

    def _is_over(self) -> bool:
        if self.may_close:
            return self.is_closed
        if not self.has_fed:
            return False
        return all(self.has_ended(row) for group in self.facts.acknowledged for row in self.facts.rows(group))

    def _what_is_left(self) -> str:
        facts = self.facts
        left = [row for group in sorted(facts.acknowledged) for row in facts.rows(group) if not self.has_ended(row)]
        lines = [f"rows {left} have come to no end; fed: {self.has_fed}, version {self.version}, consumed {sorted(self.consumed)}"]
        for number, at in sorted(self.units.items()):
            masks = {row: f"{mask:b}" for rows, mask, _ in at.unit_store.index.records() for row in rows.tolist() if row in left}
            lines.append(
                f"unit {number} has {masks}, capacity {at.unit_store.capacity.state(self.loop.time())}, away {at._log.away()}"
            )
        for process, controller in self.controllers:
            if process.is_alive:
                states = {row: getattr(controller.table.state_of(row), "name", None) for row in left}
                lines.append(
                    f"{controller.spec.name}: {states}, holders {controller.table.leases.holders()}, parked {controller._parked}"
                )
        return "\n".join(lines) + "\n" + self.loop.waiting()

    def _look_at_errors(self) -> None:
        for context in self.loop.errors:
            error = context.get("exception")
            if error is not None and not isinstance(error, ConnectionLost) and type(error) is not RunError:
                self.facts.violated(f"an exception that nobody took: {context.get('message')}: {error!r}")

    # -- processes ----------------------------------------------------------------------------------------------------------

    def _spawn(self, name: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.mains[name] = main
        self.starts[name] += 1
        process = self.processes[name] = Process(self.loop, name)
        self.network.note(f"{name} starts, number {self.starts[name]}")

        async def guarded() -> None:
            try:
                await main()
                error: BaseException | None = None
            except (Exception, ExceptionGroup) as raised:
                error = raised
            self.has_failed(process, error)

        process.start(guarded(), name)

    def has_failed(self, process: Process, error: BaseException | None) -> None:
        """A process is at its end; it is started again if that was no plan of its own."""
        if not process.is_alive or self.loop.is_over:
            return
        if isinstance(error, ExceptionGroup):
            error = next((e for e in error.exceptions if not isinstance(e, Superseded | ConnectionLost)), error.exceptions[0])
        self.network.note(f"{process.name} ends: {error!r}")
        excused = type(error) is RunError or (isinstance(error, ConnectionLost) and process.name in self.hub_broken)
        if isinstance(error, Superseded):
            self.counts["superseded"] += 1
        elif error is not None and not excused:
            where = " > ".join(f"{at.filename.rpartition('/')[2]}:{at.lineno}" for at in traceback.extract_tb(error.__traceback__))
            self.facts.violated(f"{process.name} has ended with {error!r} at {where}")
        is_current = self.processes.get(process.name) is process
        process.kill()
        if is_current and (error is not None or process.name.startswith(("unit/", "controller/"))):
            self._restart_later(process.name)

    def _crash(self, name: str) -> None:
        self.network.note(f"{name} is killed")
        self.processes[name].kill()
        self._restart_later(name)

    def _restart_later(self, name: str) -> None:
        kind = name.partition("/")[0].partition("-")[0]
        self.counts[f"restart of a {kind}"] += 1
        self.loop.call_later(0.2 + self.rng.random(), self._spawn, name, self.mains[name], context=contextvars.Context())

    def next_start(self) -> int:
        self._num_starts += 1
        return self._num_starts

    async def _hub(self) -> None:
        plan = self.plan
        while True:
            hub = queue.TransferQueue(
                self.schema,
                [self._storage(number) for number, (_, where) in enumerate(plan.units) if where == "hub"],
                tasks=plan.hub_tasks,
                unit_options=plan.unit_options(),
            )
            try:
                await hub.open()
                break
            except RunError:  # a storage does not answer
                await asyncio.sleep(0.01)
        await SimServer(hub.services, hub.abandon).start("hub")
        await hub.run()

    async def _unit(self, number: int) -> None:
        await node.serve_unit(
            "hub",
            number,
            self._storage(number),
            f"unit/{number}@{self.starts[f'unit/{number}']}",
            options=self.plan.unit_options(),
        )

    async def _controller(self, task: str) -> None:
        name = f"controller/{task}"
        await node.serve_controller("hub", task, f"{name}@{self.starts[name]}")

    async def _loop(self, name: str, kind: type[Loop]) -> None:
        await kind(self, name).main()

    def _storage(self, number: int) -> Storage:
        kind = self.plan.units[number][0]
        inner: Storage
        if kind == "durable":
            inner = KeyValueStorage(SimKeyValue(self.data, self.weather), "sim", number)
        else:
            inner = SlowMemory(self.weather) if kind == "slow" else MemoryStorage()
            current_process().on_death.append(functools.partial(self._memory_died, number))
        current_process().on_death.append(functools.partial(self.facts.died, number))
        return Witness(inner, number, self.facts)

    def _memory_died(self, number: int) -> None:
        for process, controller in self.controllers:
            if process.is_alive and number in self.units and controller.epochs.get(number) == self.units[number]._log.epoch:
                self.knew.append((process, controller, set(controller.table.rows_of(number).tolist()) - self.facts.dropped))
        again = self.facts.memory_died(number)
        for _, controller in self.controllers:
            controller.done -= again

    # -- faults -------------------------------------------------------------------------------------------------------------

    async def _faults(self) -> None:
        plan, rng, until = self.plan, self.rng, self.loop.now + self.plan.fault_seconds
        faults = [self._break, self._break, self._partition, self._pause, self._kill, self._replace]
        while self.loop.now < until:
            await asyncio.sleep(rng.random() * 2 * plan.fault_pause)
            rng.choice(faults)()

    async def _snapshots(self) -> None:
        """Of one unit after the other, in the middle of everything."""
        rng = random.Random(f"{self.plan.seed}/snapshots")
        for _ in range(4):
            await asyncio.sleep(rng.random())
            at = self.units[rng.choice(sorted(self.units))] if self.units else None
            if at is not None and at.process.is_alive:
                at.process.start(self._snapshot(at), "a snapshot")  # which may die with it

    async def _snapshot(self, at: SimUnit) -> None:
        """What another unit takes up from the file is what this one had when it was asked, no more and no less."""
        if at.unit_store.freeing.held_off.locked():  # it would be one of a later moment
            return
        then = _masks(at)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "unit"
            try:
                await at.unit_store.snapshot(path)
            except RunError:  # the storage does not answer: the file is whole or not there
                if not path.exists():
                    return
            restored = StorageUnit(MemoryStorage(), self.schema)
            await restored.open()
            count = await restored.unit_store.restore(path)
        self.counts["snapshot"] += 1
        self.counts["row in a snapshot"] += count
        if _masks(restored) != then or count != len(then):
            self.facts.violated(f"unit {at.number} had {then}, and its snapshot has {_masks(restored)}")
        rows = np.array([row for row, mask in then.items() if mask & self.schema.mask(["ids"])], np.int64)
        for row, ids in zip(rows.tolist(), (await restored.columns(rows, ["ids"])).ragged("ids"), strict=True):
            if row in self.facts.kept and self.facts.kept[row] != tuple(ids.tolist()):
                self.facts.violated(f"row {row} was completed with {self.facts.kept[row]} and is {ids.tolist()} in a snapshot")

    def _break(self) -> None:
        links = [peer for peer in self.network.links if peer.is_served and not peer.is_lost and peer.client.is_alive]
        self.network.links = [peer for peer in self.network.links if peer.is_served]
        links = [peer for peer in links if peer.address != "hub" or self.rng.random() < 0.1]
        if links:
            peer = self.rng.choice(links)
            if peer.address == "hub":
                self.hub_broken.add(peer.client.name)
            self.counts["break"] += 1
            self.network.note(f"break of {peer.name} to {peer.address}")
            peer.break_off(self.rng.random() * 0.3, self.rng.random() * 0.6)

    def _partition(self) -> None:
        one, other = self.rng.sample(sorted(self.processes), 2)
        self.counts["partition"] += 1
        self.network.note(f"partition of {one} and {other}")
        self.network.cut(one, other, 2.0 * self.rng.random())

    def _pause(self) -> None:
        process = self.processes[self.rng.choice(sorted(self.processes))]
        if process.is_alive and not process.is_paused:
            self.counts["pause"] += 1
            self.network.note(f"pause of {process.name}")
            process.pause()
            self.loop.call_later(2.0 * self.rng.random(), self._resume, process, context=contextvars.Context())

    def _resume(self, process: Process) -> None:
        if process.is_alive and process.is_paused:
            self.network.note(f"{process.name} goes on")
            process.resume()

    def _kill(self) -> None:
        name = self.rng.choice([name for name in sorted(self.processes) if name != "hub"])
        if self.processes[name].is_alive:
            self.counts["crash"] += 1
            self._crash(name)

    def _replace(self) -> None:
        """A controller that is taken for dead and is not: another one is started, and the old one wakes up later."""
        names = [name for name in sorted(self.processes) if name.startswith("controller/") and self.processes[name].is_alive]
        if names:
            name = self.rng.choice(names)
            old = self.processes[name]
            self.counts["replacement"] += 1
            self.network.note(f"replacement of {name}")
            old.pause()
            self.zombies.append(old)
            self.loop.call_later(2.0 * self.rng.random(), self._resume, old, context=contextvars.Context())
            self._spawn(name, self.mains[name])

    # -- the ledger ---------------------------------------------------------------------------------------------------------

    def has_ended(self, row: int) -> bool:
        facts = self.facts
        if row in facts.dead or row in facts.filtered or row in facts.lost:
            return True
        return row in facts.trained if self.plan.by_steps else row in facts.done

    def is_accounted(self, step: int) -> bool:
        if not self.plan.by_steps:
            return False
        groups = [group for group, _ in self.plan.groups_of(step)]
        if not all(group in self.facts.acknowledged for group in groups):
            return False
        return all(self.has_ended(row) or row in self.consumed for group in groups for row in self.facts.rows(group))

    def is_known_to_have_ended(self, step: int) -> bool:
        """Whether anybody who is alive can still tell of it: then everybody is to hear of it."""
        tables = [c.table for process, c in self.controllers if process.is_alive and c.spec.name == "train"]
        facts = [unit.unit_store.durable_state.now for unit in self.units.values() if unit.process.is_alive]
        ended = [*(table.ended_partitions for table in tables), *(fact.ended_partitions.get("train", ()) for fact in facts)]
        return any(step in each for each in ended)

    def close_step(self, step: int) -> None:
        self.closed_steps.add(step)

    async def closed(self, step: int) -> None:
        while step not in self.closed_steps or not self.is_accounted(step):
            if self.is_closed:
                return
            await asyncio.sleep(0.1)

    def commit(self, step: int) -> None:
        rows = [row for group, _ in self.plan.groups_of(step) for row in self.facts.rows(group)]
        self.facts.train(row for row in rows if row in self.consumed)
        self.version = step + 1

    # -- laws ---------------------------------------------------------------------------------------------------------------

    def check_lease(self, task: str, leased: Leased, installed: int | None, want: dict[str, int]) -> None:
        """What was handed out may be handed out so."""
        lease, facts = leased.lease, self.facts
        self.counts[f"lease {task}"] += 1
        if lease.most_deliveries:
            self.counts["redelivery"] += 1
        for meta, rows in zip(lease.groups, lease.rows, strict=True):
            if meta != facts.metas.get(meta.group):
                facts.violated(f"group {meta.group} was put as {facts.metas.get(meta.group)} and is leased as {meta}")
            elif not rows or not set(rows) <= set(facts.rows(meta.group)):
                facts.violated(f"a lease of group {meta.group} has rows {rows}")
            if installed is not None and installed not in meta.interval:
                facts.violated(f"group {meta.group} of {meta.interval} was leased to a worker of version {installed}")
            if task == "train":
                missing = set(facts.rows(meta.group)) - set(rows)
                alive = [row for row in sorted(missing) if not facts.has_ended(row) and row not in facts.dropped]
                if alive:
                    facts.violated(f"group {meta.group} was split: rows {rows} were leased without {alive}")
        if "groups" in want and len(lease.groups) > want["groups"]:
            facts.violated(f"{len(lease.groups)} groups were leased where {want['groups']} were wanted")
        if "rows" in want and len(lease.indices) > want["rows"] and (task == "rollout" or len(lease.groups) > 1):
            facts.violated(f"{len(lease.indices)} rows were leased where {want['rows']} were wanted")

    def check_told(self, at: SimUnit, metas: list[GroupMeta]) -> None:
        """A put is answered when every controller in session knows of it."""
        rows = at.unit_store.index.present(self.schema.rows_of(metas)).tolist()
        followers = {follower.incarnation for follower in at._log._followers.values() if not follower.is_away}
        for process, controller in self.controllers:
            if process.is_alive and controller.table.incarnation in followers:
                unknown = [row for row in rows if controller.table.state_of(row) is None]
                if unknown and controller.epochs.get(at.number) == at._log.epoch and not self.counts["away"]:
                    self.facts.violated(f"controller {controller.spec.name} was not told of rows {unknown}, whose put was answered")

    def _compare_controllers_with_units(self) -> None:
        """Controllers know what the units have, no more and no less."""
        by_incarnation = {c.table.incarnation: c for process, c in self.controllers if process.is_alive}
        bits = {name: self.schema.mask([name]) for name in (DEAD, FILTERED)}
        for spec in self.schema.tasks:
            task, reads, outputs = spec.name, self.schema.mask(spec.reads), self.schema.mask(spec.outputs)
            for number, at in sorted(self.units.items()):
                controller = by_incarnation.get(at._log.incarnation(task) or "")
                if controller is None:
                    self.facts.violated(f"nobody follows unit {number} for task {task}")
                    continue
                masks = {row: mask for rows, mask, _ in at.unit_store.index.records() for row in rows.tolist()}
                known = controller.table.rows_of(number).tolist()
                if sorted(masks) != known:
                    more, less = sorted(set(known) - set(masks)), sorted(set(masks) - set(known))
                    self.facts.violated(f"controller {task}, unit {number}: it does not know of {less}, and {more} are gone")
                    continue
                for row, mask in masks.items():
                    state = controller.table.state_of(row)
                    if mask & bits[DEAD]:
                        fits = state == RowState.DEAD
                    elif mask & bits[FILTERED]:
                        fits = state in (RowState.FILTERED, RowState.DONE, RowState.DEAD)
                    elif mask & outputs == outputs:
                        fits = state == RowState.DONE
                    else:
                        fits = state in ((RowState.READY, RowState.LEASED) if mask & reads == reads else (RowState.WAITING,))
                    if not fits:
                        self.facts.violated(f"controller {task}: row {row} has columns {mask:b} in unit {number} and is {state!r}")

    def _look_at_losses(self) -> None:
        facts = self.facts
        is_durable = all(kind == "durable" or where == "hub" for kind, where in self.plan.units)
        kept = set().union(*(facts.ever_present[number] for number, (kind, _) in enumerate(self.plan.units) if kind == "durable"))
        for task, rows in sorted(facts.named.items()):
            if wrong := sorted(rows - facts.ever_lost - (facts.dropped - kept)):  # a memory forgets what it had been asked to drop
                facts.violated(f"controller {task} has named rows {wrong} as lost, which are not")
            if rows - facts.ever_lost:
                self.counts["named as lost, and dropped"] += 1
        if is_durable and facts.lost:
            facts.violated(f"rows {sorted(facts.lost)} were lost with durable storages")
        there = set().union(*facts.present.values())
        for process, controller, knew in self.knew:
            unnamed = (knew & facts.lost) - there - controller.named
            if process.is_alive and self.processes[process.name] is process and unnamed:
                facts.violated(
                    f"controller {controller.spec.name} has not named rows {sorted(unnamed)}, which it knew and are lost"
                )

    def _count_at_the_end(self) -> None:
        counts, facts = self.counts, self.facts
        counts["rows"] += sum(len(facts.rows(group)) for group in facts.acknowledged)
        counts["trained"] += len(facts.trained)
        counts["dead letter"] += len(facts.dead)
        counts["filtered"] += len(facts.filtered)
        counts["lost"] += len(facts.lost)
        for _, controller in self.controllers:
            counts["expired"] += controller.table.leases.num_expired
            counts["redelivered"] += controller.table.num_redelivered
        for at in self.units.values():
            counts["admission wait"] += at.unit_store.capacity.state(self.loop.time()).longest_wait_seconds > 0


def _masks(at: StorageUnit) -> dict[int, int]:
    """The columns of all rows that a unit has."""
    return {row: mask for rows, mask, _ in at.unit_store.index.records() for row in rows.tolist()}


class SimController(Controller):
    """A controller whose calls for `Facts` go into the world's."""

    def __init__(self, task: str, schema: Schema, events: TaskEvents | None = None, *, term: int = 0) -> None:
        world, facts, self.done = World.active, World.active.facts, set[int]()
        self.epochs: dict[int, str] = {}
        self.named: set[int] = set()

        def on_done(rows: list[int]) -> None:
            if twice := sorted(self.done.intersection(rows)):
                facts.violated(f"controller {task} has told twice that rows {twice} are done")
            self.done.update(rows)

        def on_lost(unit: int, rows: list[int]) -> None:
            world.counts["loss named"] += 1
            self.named.update(rows)
            self.done.difference_update(rows)
            facts.named[task].update(rows)

        super().__init__(task, schema, replace(events or TaskEvents(), on_done=on_done, on_lost=on_lost), term=term)
        self._taken, self.subscription.take = self.subscription.take, self._take  # type: ignore[method-assign]
        world.controllers.append((current_process(), self))

    def _take(self, unit: int, news: News, *, is_new_epoch: bool) -> None:
        counts = World.active.counts
        if not news.is_full:
            counts["news"] += 1
        elif is_new_epoch:
            counts["resync: restart of a unit"] += 1
        elif self.epochs.get(unit) == news.epoch:
            counts["resync: the log is too short"] += 1
        else:
            counts["resync: new session"] += 1
        self.epochs[unit] = news.epoch
        for notice in news.notices:
            if notice.is_drop:  # should the unit die before the drop is over, the rows are there again, done as they were
                self.done.difference_update(np.frombuffer(notice.rows, np.int64).tolist())
        self._taken(unit, news, is_new_epoch=is_new_epoch)


class SimUnit(StorageUnit):
    """A unit that the world knows."""

    def __init__(self, storage: Storage, schema: Schema, options: UnitOptions) -> None:
        super().__init__(storage, schema, options)
        assert isinstance(storage, Witness)
        World.active.units[storage.number] = self
        self.number, self.over, self.process = storage.number, set[Token](), current_process()

    @remote
    async def put(self, metas: list[GroupMeta], batch: WireBatch, row_bytes: int) -> np.ndarray:
        stored = await super().put(metas, batch, row_bytes)
        World.active.check_told(self, metas)
        return stored

    @remote
    async def complete(self, token: Token, batch: WireBatch) -> np.ndarray:
        was_over = token in self.over or self._log.incarnation(token.task) not in (None, token.incarnation)
        before = {row: (token.task, row) in self.unit_store._writers for row in batch.batch().indices.tolist()}
        stored = await super().complete(token, batch)
        late = [row for row, is_kept in zip(before, stored.tolist(), strict=True) if is_kept and not before[row]]
        if was_over and late:
            World.active.facts.violated(f"rows {late} were completed under {token}, which unit {self.number} knew to be over")
        return stored

    @remote
    def follow(self, task: str, incarnation: str, epoch: str, acked: int, ended_leases: list[int]) -> Awaitable[News]:
        self.over.update(Token(task, incarnation, lease) for lease in ended_leases)
        return super().follow(task, incarnation, epoch, acked, ended_leases)


class _LogWatch(logging.Handler):
    """Counts what the queue logs."""

    SAYS = (("has not taken a notice", "away"), ("is back", "back"), ("has lost", "loss logged"))

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        for log, what in self.SAYS:
            if log in message:
                self._counts[what] += 1


def simulate(seed: int, *, keeps_trace: bool = False) -> Result:
    """Run one seed."""
    return World(seed, keeps_trace=keeps_trace).run()
