"""The driver's side of a run: the books, the queue's controllers and units, telemetry, and the server for the workers."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections import ChainMap
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from asyncflow.build.prepare import Prepared, shape_of, tasks_before_training
from asyncflow.build.record import RecordState, RunRecord, Told
from asyncflow.build.resume import Resumed, as_prompt, evaluated_versions
from asyncflow.build.saving import Saves
from asyncflow.cluster.torchrun import launch_of
from asyncflow.config import Config
from asyncflow.data.order import SeededOrder
from asyncflow.registry import build
from asyncflow.run_dir import KEY_FILE, SNAPSHOTS_DIR
from asyncflow.transfer_queue import STORAGES
from asyncflow.transfer_queue.leases import DeadRow, Lease, Want
from asyncflow.transfer_queue.queue import TransferQueue
from asyncflow.transfer_queue.unit import UnitOptions
from asyncflow.transport import Arena, Credentials, Server
from asyncflow.types import RunError
from asyncflow.workflows import SCHEDULES
from asyncflow.workflows.admissions import Admissions
from asyncflow.workflows.board import Board
from asyncflow.workflows.books import Books
from asyncflow.workflows.evaluation import HeldOut, Row, evaluate
from asyncflow.workflows.ledger import Ledger, LedgerService, StepTotals, Update
from asyncflow.workflows.loop import feed
from asyncflow.workflows.samples import Prompt, schema
from asyncflow.workflows.schedule import Schedule
from asyncflow.workflows.signal import Signal


class Driver:
    """A run's, from the step on that it has been `resumed` at, or from the start. `told.failed` is the driver's own."""

    def __init__(self, config: Config, prepared: Prepared, told: Told, resumed: Resumed | None = None) -> None:
        self.config, self._says = config, told.says
        self._clock = asyncio.get_running_loop().time
        self.shape = shape_of(config)
        self.schedule: Schedule = build("schedule", config.schedule.name, config.schedule.options, SCHEDULES)
        self.last_progress = self._clock()
        self._background: set[asyncio.Task[None]] = set()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._first = first = resumed.state.version if resumed is not None else 0

        self._signal = signal = Signal()
        self._build_queue()
        ledger = Ledger(
            self.shape.group_bits,
            tasks_before_training(config),
            self.schedule.max_staleness,
            num_ranks=config.layout.dp,
            groups_per_turn=self.shape.groups_per_turn,
            first=first,
        )
        books = Books(ledger, self.transfer_queue.controllers)
        self.ledger = LedgerService(ledger, self.schedule, books, signal, self._end_step)
        self.board = Board(self.schedule, books, signal, self._clock, first=first)
        self.record = RunRecord(
            config,
            self.schedule,
            ledger,
            self.queue,
            self.transfer_queue.controllers,
            dataclasses.replace(told, failed=self._failed),
            start=self._start,
            now=self._clock,
            progress=self.progress,
            before=resumed.record if resumed is not None else RecordState(),
        )
        self.hub = self.record.hub
        self._evaluated_versions = evaluated_versions(config.run_dir)
        again = {0, *(resumed.versions if resumed is not None else ())}
        lost = {v for v in range(first) if v not in again or v < first - self.schedule.max_staleness}
        self.held_out = HeldOut(
            prepared.held_out,
            last_version=config.run.steps,
            every_steps=config.eval.every_steps,
            samples=config.eval.samples_per_prompt,
            temperature=config.rollout.temperature,
            greedy=config.eval.greedy,
            on_row=self._evaluated,
            done=self._evaluated_versions | lost,
        )
        for version in sorted(lost - self._evaluated_versions):
            if self.held_out.is_planned(version):
                told.says(f"the evaluation of version {version} was cut short, and nobody has its weights any more: it is left out")
        self.source: SeededOrder[Prompt] = SeededOrder(
            prepared.prompts, config.run.seed, resumed.state.position if resumed is not None else 0
        )
        admissions: dict[str, Any] = {}
        if resumed is not None:
            self.source.push([as_prompt(prompt) for prompt in resumed.state.pushed])
            columns = {column.name for column in self.queue.schema.columns}
            admissions = {"first": first, "steps": resumed.steps, "rows": resumed.rows, "columns": columns}
        self._admissions = Admissions(self.source, self.schedule, self.shape, **admissions)
        self.saves = Saves(
            config,
            self.schedule,
            ledger,
            self.board,
            self.transfer_queue,
            self.held_out,
            self.source,
            self._admissions,
            self.record,
            says=told.says,
            evaluated=self._evaluated_versions,
        )
        self.ledger.on_opened, self.ledger.on_consumed = self.record.opened, self.record.consumed
        self.ledger.on_committed = self._committed
        self.board.on_installed = self.record.installed
        self.board.on_stale = self._stale
        self.board.is_silent = lambda worker: self.hub.is_silent(worker, config.queue.lease_seconds / 2)
        self.ledger.on_displaced = self.transfer_queue.controllers["rollout"].narrow
        self._silent: set[str] = set()

    def _callbacks(self, task: str) -> dict[str, Callable[..., None]]:
        """What a task's controller tells the books."""
        callbacks: dict[str, Callable[..., None]] = {"on_done": partial(self._done, task), "on_dead": self._gave_up}
        if task == "rollout":
            callbacks |= {"on_lost": self._lost, "on_leased": self._begun, "on_change": self._notify}
        return callbacks

    def _build_queue(self) -> None:
        config, tasks = self.config.queue, tasks_before_training(self.config)
        storages = [
            build("queue storage", config.storage.name, {**config.storage.options, "unit": number}, STORAGES)
            for number in range(config.num_units)
        ]
        self.transfer_queue = TransferQueue(
            schema(
                self.shape.group_bits,
                config.lease_seconds,
                self.config.reward.max_attempts,
                has_reward_task="reward" in tasks,
                has_reference_task="reference" in tasks,
            ),
            storages,
            callbacks={task: self._callbacks(task) for task in tasks},
            unit_options=UnitOptions(
                notify_timeout_seconds=config.notify_timeout_seconds,
                capacity_rows=config.capacity_rows,
                capacity_bytes=config.unit_capacity_bytes,
                snapshot_dir=self.config.run_dir / SNAPSHOTS_DIR,
            ),
        )
        self.queue = self.transfer_queue.client()

    def services(self, status: object) -> Mapping[str, object]:
        """What workers call, by name; `status` answers `asyncflow status`."""
        own: dict[str, object] = {
            "status": status,
            "ledger": self.ledger,
            "board": self.board,
            "hub": self.hub,
            "saves": self.saves,
        }
        return ChainMap(own, self.transfer_queue.services)  # units may join

    def server(self, status: object, arena: Path) -> Server:
        """Serves the run's services. Large columns lie in the file `arena`."""
        queue = self.config.queue
        memory = Arena(queue.unit_capacity_bytes * queue.num_units, arena)
        has_key = queue.listen is not None or self.config.weight_sync.needs_key
        credentials = Credentials.create(self.config.run_dir / KEY_FILE) if has_key else None
        return Server(self.services(status), self.disconnected, credentials=credentials, arena=memory)

    def disconnected(self, client_key: str) -> None:
        """A client has gone: what it held is handed out again, and nothing is waited for on its behalf."""
        worker = client_key.partition("@")[0]
        self.transfer_queue.abandon(client_key)
        self.board.forget(worker)
        self.hub.left(worker)
        if worker.startswith("trainer/") and launch_of(os.environ) and not self.ledger.is_stopping and not self.failure.done():
            self.failure.set_exception(RunError(f"worker {worker}, which torchrun had started, has gone: its output says why"))

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """The driver's own loops; they end when the run stops."""
        return [
            self.transfer_queue.run(),
            feed(self.queue, self.ledger, self.schedule, self._admissions, self.held_out, self.shape),
            self._evaluations_in_order(),
        ]

    @property
    def has_begun(self) -> bool:
        """Whether the trainer serves weights: one that goes on has read its checkpoint then."""
        return self.board.published >= self._first

    async def begun(self) -> None:
        """See `has_begun`."""
        await self._signal.until(lambda: self.has_begun)

    async def stop(self) -> None:
        """Tell every loop, here and in the workers, that the run is over."""
        self.ledger.stop()
        self.board.stop()
        self.transfer_queue.stop()

    async def close(self) -> None:
        """Write what is left and close the files."""
        await asyncio.gather(*self._background)
        if self.failure.done():
            self.failure.exception()  # taken, if it came too late to be why the run ended: else the event loop reports it at exit
        await self.transfer_queue.close()
        self.record.close()

    def progress(self) -> None:
        """Something has moved: the run is not stalled."""
        self.last_progress = self._clock()

    async def _evaluations_in_order(self) -> None:
        for version in self.held_out.versions():
            await evaluate(self.queue, self.ledger, self.held_out, version)

    def _evaluated(self, row: Row) -> None:
        if self.ledger.is_stopping:
            return  # cut short: its figures would be of some prompts only
        self.record.evaluated(row)
        self._evaluated_versions.add(int(row["step"]))

    # -- what the books tell ------------------------------------------------------------------------------------------------

    def _end_step(self, purpose: str, step: int) -> None:
        self._start(self.queue.end_step(purpose, step))

    def _notify(self) -> None:
        for worker in {worker for worker in self.hub.states if worker.startswith("rollout/") and self.board.is_silent(worker)}:
            if worker not in self._silent:
                self._silent.add(worker)
                self._says(f"worker {worker} says nothing any more: what it holds is given to others")
        self._silent = {worker for worker in self._silent if self.board.is_silent(worker)}
        self._signal.notify()

    def _begun(self, lease: Lease, want: Want) -> None:
        if want.installed is not None:
            self.ledger.ledger.begun((meta.group for meta in lease.groups), want.installed)

    def _done(self, task: str, rows: list[int]) -> None:
        self.progress()
        self.ledger.done(task, rows)

    def _gave_up(self, dead: list[DeadRow]) -> None:
        self.progress()
        for letter in dead:
            self._says(f"row {letter.row} is given up after {self.config.reward.max_attempts} attempts: {letter.error}")
        self.record.rows_died(len(dead))
        self._start(self.queue.drop([letter.row for letter in dead]))
        self.ledger.give_up(dead)

    def died(self, worker: str, why: str, is_given_up: bool) -> None:
        """A rollout worker's process has ended, and is started again or given up."""
        self.board.died(worker, is_given_up)
        self._unhealthy(worker, why)

    def _stale(self, worker: str, why: str) -> None:
        """A rollout worker could not get its weights. It tries again, for a while."""
        self._says(f"worker {worker} has no weights to serve, and tries again: {why}")
        patience, loop = self.config.weight_sync.deadline_seconds, asyncio.get_running_loop()
        told = f"has had no weights to serve for {patience:g} s: {why}"

        def look_again() -> None:
            if worker in self.board.stale:
                self._judge(worker, told)

        loop.call_later(patience, look_again)

    def _unhealthy(self, worker: str, why: str) -> None:
        """A rollout worker serves nothing for now."""
        self._says(f"worker {worker} {why}")
        self._judge(worker, why)

    def _judge(self, worker: str, why: str) -> None:
        """With too few others the run stops."""
        workers, needed = self.config.rollout.num_workers, self.config.weight_sync.min_healthy_workers
        healthy = workers - self.board.num_unhealthy(self.config.weight_sync.deadline_seconds)
        if healthy < needed and not self.ledger.is_stopping and not self.failure.done():
            numbers = f"{healthy} of {workers} rollout workers are left, and weight_sync.min_healthy_workers is {needed}"
            self.failure.set_exception(RunError(f"worker {worker} {why}; {numbers}"))

    def _lost(self, unit: int, rows: list[int]) -> None:
        if not self.failure.done():
            shown = ", ".join(map(str, rows[:8])) + (" ..." if len(rows) > 8 else "")
            why = f"storage unit {unit} has died and lost {len(rows)} rows ({shown}); a durable queue.storage would have kept them"
            self.failure.set_exception(RunError(why))

    def _committed(self, totals: StepTotals, update: Update) -> None:
        self.record.committed(totals, update)
        self.saves.committed()

    def _failed(self, error: RunError) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.failure.done():
            self.failure.set_exception(error)
