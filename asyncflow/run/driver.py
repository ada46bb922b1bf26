"""The driver's side of a run: ledger, versions, the queue's controllers and units, telemetry, and the server for the workers."""

from __future__ import annotations

import asyncio
import os
import re
from collections import ChainMap, Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from asyncflow.attestation import Probing
from asyncflow.cluster.torchrun import launch_of
from asyncflow.config import Config
from asyncflow.control.critic_versions import CriticVersions
from asyncflow.control.ledger import Decided, Ledger, LedgerService, StepTotals, Update
from asyncflow.control.policy_versions import PolicyVersions
from asyncflow.control.progress_view import ProgressView
from asyncflow.control.signal import Signal
from asyncflow.control.worker_pool import WorkerPool
from asyncflow.data.order import SeededOrder
from asyncflow.engines.train import OUTSIDE
from asyncflow.loops.admissions import Admissions, AdmittedBefore
from asyncflow.loops.algorithm1 import feed
from asyncflow.loops.samples import EVALUATE_TASK, UPDATE_TASK, Prompt
from asyncflow.loops.score_batching import NO_REWARD, SKIPPED
from asyncflow.loops.selection import Selection
from asyncflow.loops.taking import Taking
from asyncflow.model_folder import read_json
from asyncflow.run.background import BackgroundTasks
from asyncflow.run.context import Listener, RunContext
from asyncflow.run.device_shares import num_devices
from asyncflow.run.evaluating import Evaluating
from asyncflow.run.factories import (
    leaves_out_equal_rewards,
    make_schedule,
    make_storage,
    new_owner,
    queue_schema,
    shape_of,
    task_plan,
    tasks_before_training,
    unit_options,
    update_plan,
    weights_need_key,
)
from asyncflow.run.health import Health
from asyncflow.run.in_worker.connection import CRITIC_VERSIONS, EVALUATORS_VERSIONS
from asyncflow.run.models.model_files import ModelFiles
from asyncflow.run.preparation.memory import Shapes, checkpoint_bytes
from asyncflow.run.preparation.prepare import Prepared
from asyncflow.run.records.record import RecordState, RunRecord
from asyncflow.run.services.cores import FreeCores, computing_beside, pools_of
from asyncflow.run.services.desk import TrainDesk
from asyncflow.run.services.handover import Handover
from asyncflow.run.services.rendezvous import Rendezvous
from asyncflow.run.services.scaling import Devices
from asyncflow.run.state.driver_state import Resumed, as_prompt
from asyncflow.run.state.journal import Kept
from asyncflow.run.state.memory_pace import MemoryPace
from asyncflow.run.state.saving import CheckpointCoordinator
from asyncflow.run.stored_rows import reaches_storage, remove_from_server
from asyncflow.run_dir import KEY_FILE, UNSCORED_FILE
from asyncflow.transfer_queue.controller import Handed, TaskEvents
from asyncflow.transfer_queue.leases import DeadRow, Lease, Want
from asyncflow.transfer_queue.queue import TransferQueue
from asyncflow.transport import Arena, Credentials, Server
from asyncflow.types import RunError, UserError
from asyncflow.waits import BEGUN, ROWS_REMOVED, UNITS, waiting

UNITS_SECONDS: Final = 60.0
"""Seconds that storage units in processes of their own have to come, once they have been started."""
REMOVE_SECONDS: Final = 5.0
"""Seconds that the units have, at the attempt's end, to remove what they have stored."""
FAILURES_LOGGED: Final = 8
"""Rows that fail for the same reason and are named one by one; after them each hundredth is."""


class Driver:
    """Driver of a run, from the step at which it is `resumed`, or from the start."""

    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        listener: Listener,
        kept: Callable[[Resumed | None], tuple[Kept, Sequence[Prompt]]],
        resumed: Resumed | None = None,
        memory: Path | None = None,
    ) -> None:
        """`kept`: rows that the run resumes with, and prompts that were pushed and are in no checkpoint.
        `memory`: folder of the checkpoints in shared memory, if there are to be any."""
        self.config, self.log, self._failures = config, listener.log, Counter[str]()
        self._clock = asyncio.get_running_loop().time
        self.shape = shape_of(config)
        self.schedule = make_schedule(config)
        self.last_progress = self._clock()
        self.on_disconnected: Callable[[str], None] = lambda worker: None
        self.background = BackgroundTasks()
        self._first = resumed.state.version if resumed is not None else 0
        has_key = config.queue.listen is not None or weights_need_key(config)
        self._credentials = Credentials.create(config.run_dir / KEY_FILE) if has_key else None
        self.signal = Signal()
        self._owner = new_owner(config)
        self.transfer_queue = self._make_queue()
        self.queue = self.transfer_queue.client()
        fields = read_json(prepared.model / "config.json")
        self.ledger, self.versions = self._make_control(fields, prepared.probing)
        self._selection = Selection(self.queue, self.ledger, self.background.start)
        self.critic_versions = CriticVersions(self.signal, self._first)
        self.devices = Devices(num_devices(config), self._clock)
        context = self._make_context()
        before = resumed.record if resumed is not None else RecordState()
        self.cores = FreeCores(config, self.signal, self._generating, self._is_training, self._beside)
        self.record = RunRecord(context, listener, num_devices=self.devices.mean, cores=self.cores, before=before)
        self.hub = self.record.hub
        self.evaluating = Evaluating(context, self.record, prepared.held_out, resumed)
        evaluators = self.evaluating.evaluators
        self.all_versions = [self.versions, *([evaluators] if evaluators is not None else [])]
        self.health = Health(context, self.all_versions, self.hub)
        self.source, self._admissions = self._make_order(prepared, resumed, kept)
        pace = self._memory_pace(memory, fields) if memory is not None else None
        self.saves = CheckpointCoordinator(context, self.evaluating, self.source, self._admissions, self.record, pace)
        self.desk = TrainDesk(self.progress)
        self.handover = Handover()
        self._own_services = self._make_services(prepared.model)
        self._connect()

    # -- its parts ----------------------------------------------------------------------------------------------------------

    def _make_queue(self) -> TransferQueue:
        config, tasks = self.config.queue, tasks_before_training(self.config)
        storages = [make_storage(self.config, number) for number in range(config.num_units)] if config.place == "driver" else []
        return TransferQueue(
            queue_schema(self.config),
            storages,
            events={task: self._events(task) for task in (*tasks, EVALUATE_TASK)},
            unit_options=unit_options(self.config),
            credentials=self._credentials,
            owner=self._owner,
        )

    def _events(self, task: str) -> TaskEvents:
        """Events of a task, which the ledger hears of."""
        done = partial(self._done, "rollout" if task == EVALUATE_TASK else task)  # to the ledger it is the same
        events = TaskEvents(on_done=done, on_dead=self._rows_failed)
        if task in (EVALUATE_TASK, *pools_of(self.config)):  # whose workers compute
            events = replace(events, on_change=self.signal.notify)
        if task == EVALUATE_TASK:
            return replace(events, on_lost=self._lost)
        if task == "rollout":
            return replace(events, on_lost=self._lost, on_leased=self._begun)
        return events

    def _make_control(self, fields: Mapping[str, Any], probing: Probing) -> tuple[LedgerService, PolicyVersions]:
        """Make the ledger, of what belongs to which step, and the versions, of which worker serves which. `fields`: of the model's
        `config.json`."""
        config, schedule, first = self.config, self.schedule, self._first
        ledger = Ledger(
            self.shape.group_bits,
            task_plan(config),
            update_plan(config, fields),
            max_staleness=schedule.max_staleness,
            first=first,
            has_evaluators=config.eval.num_workers > 0,
        )
        progress, workers = ProgressView(ledger, self.transfer_queue.controllers), WorkerPool(config.rollout.num_workers)
        versions = PolicyVersions(schedule, progress, self.signal, self._clock, workers, first=first, probing=probing)
        return LedgerService(ledger, schedule, progress, self.signal, self._end_step), versions

    def _make_context(self) -> RunContext:
        return RunContext(
            config=self.config,
            shape=self.shape,
            schedule=self.schedule,
            transfer_queue=self.transfer_queue,
            queue=self.queue,
            ledger=self.ledger,
            versions=self.versions,
            background=self.background,
            signal=self.signal,
            clock=self._clock,
            log=self.log,
            progress=self.progress,
        )

    def _make_order(
        self,
        prepared: Prepared,
        resumed: Resumed | None,
        kept: Callable[[Resumed | None], tuple[Kept, Sequence[Prompt]]],
    ) -> tuple[SeededOrder[Prompt], Admissions]:
        """The order of the data, and what enters the queue at each step."""
        source = SeededOrder(prepared.prompts, self.config.data_seed, resumed.state.position if resumed is not None else 0)
        if resumed is not None:
            for saved in resumed.state.pushed:
                source.push([as_prompt(saved)], saved.after)
            source.num_pushed = resumed.state.num_pushed
        going_on, prompts = kept(resumed)
        for prompt, put in zip(prompts, going_on.prompts, strict=True):
            source.push([prompt], put.after)
        steps = resumed.steps if resumed is not None else {}
        before = AdmittedBefore(first=self._first, steps=steps, rows=going_on.rows, prompt_hashes=going_on.hashes)
        columns = {column.name for column in self.queue.schema.columns}
        return source, Admissions(source, self.schedule, self.shape, before, columns)

    def _memory_pace(self, memory: Path, fields: Mapping[str, Any]) -> MemoryPace | None:
        """Pace of the checkpoints in shared memory; None for a model whose size is not known, unless there are to be some in any
        case."""
        is_unbounded, num_bytes = self.config.checkpoint.in_memory is True, 0
        try:
            num_bytes = checkpoint_bytes(self.config, Shapes.of(fields), self.schedule.max_staleness)
        except UserError as error:
            if not is_unbounded:
                self.log(f"no checkpoints in shared memory: {error}")
                return None
        return MemoryPace(memory, num_bytes, self._clock, self.log, is_unbounded=is_unbounded)

    def _make_services(self, model: Path) -> dict[str, object]:
        """Services by name, but for the queue's."""
        evaluators = self.evaluating.evaluators
        return {
            "ledger": self.ledger,
            "versions": self.versions,
            CRITIC_VERSIONS: self.critic_versions,
            "hub": self.hub,
            "saves": self.saves,
            "model": ModelFiles(model, self.progress),
            "rendezvous": Rendezvous(),
            "desk": self.desk,
            "cores": self.cores,
            "handover": self.handover,
            **({EVALUATORS_VERSIONS: evaluators} if evaluators is not None else {}),
        }

    def _connect(self) -> None:
        """Connect the callbacks of ledger and versions."""
        self.ledger.on_opened, self.ledger.on_consumed = self.record.opened, self.record.consumed
        self.ledger.on_committed, self.ledger.on_decided = self._committed, self._decided
        self.ledger.checkpoint_due = self.saves.due
        self.ledger.on_displaced = self.transfer_queue.controllers["rollout"].narrow
        self.versions.on_installed = self.record.installed

    # -- what it serves -----------------------------------------------------------------------------------------------------

    def serve(self, name: str, service: object) -> None:
        """Add a service under this name."""
        self._own_services[name] = service

    @property
    def services(self) -> Mapping[str, object]:
        """Services by name, for workers and other clients of the run's sockets."""
        return ChainMap(self._own_services, self.transfer_queue.services)  # units may join

    def server(self, arena: Path) -> Server:
        """Serves the run's services. Large columns lie in the file `arena`."""
        queue = self.config.queue
        memory = Arena(queue.unit_capacity_bytes * queue.num_units, arena)
        return Server(self.services, self.disconnected, credentials=self._credentials, arena=memory)

    def disconnected(self, client_key: str) -> None:
        """Forget a client that has gone: what it held is handed out again, and nothing is waited for on its behalf."""
        worker = client_key.partition("@")[0]
        self.transfer_queue.abandon(client_key)
        for versions in self.all_versions:
            versions.forget(worker)
        self.hub.left(worker)
        self.handover.left(worker)
        self.on_disconnected(worker)
        is_needed = not self.ledger.is_stopping or self.ledger.is_finishing
        if worker.startswith("trainer/") and launch_of(os.environ) and is_needed:
            self.background.fail(RunError(f"worker {worker}, which torchrun had started, has gone: its output says why"))

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """The driver's own loops; they end when the run stops."""
        return [
            self.transfer_queue.run(),
            self.queue.renew_held(),
            self._feed(),
            self._evaluate(),
            self.health.run(),
            *([self._selection.run()] if self.shape.max_candidates else []),
            *(self._taking(task).run() for task in self.ledger.ledger.tasks.trained),
        ]

    def _taking(self, task: str) -> Taking:
        leases = self.transfer_queue.controllers[task].table.leases
        leaves_out = task == self.ledger.ledger.tasks.policy and leaves_out_equal_rewards(self.config)

        def num_tokens(handed: Handed) -> int:
            token = handed.lease.token
            if handed.batch is None:
                return leases.of(token).num_tokens if token in leases else 0  # or it has expired
            if leaves_out and len(set(handed.batch.column("reward").tolist())) == 1:
                return 0  # it is not computed, most likely
            return len(handed.batch.column("prompt_ids")) + len(handed.batch.column("response_ids"))

        return Taking(task, self.queue, self.ledger, self.schedule, num_tokens)

    @property
    def waits_outside(self) -> bool:
        """Whether processes from outside put this run's prompts, generate for it or train for it: nobody knows when they will. What
        they hold has its deadline (`queue.lease_seconds`)."""
        config = self.config
        return config.data.path is None or config.rollout.num_workers == 0 or config.train.engine.name == OUTSIDE

    @property
    def has_begun(self) -> bool:
        """Whether the trainer serves weights: one that resumes has read its checkpoint then."""
        return self.versions.published >= self._first

    async def begun(self) -> None:
        """Wait until the trainer serves weights (`has_begun`)."""
        await self.signal.until(lambda: self.has_begun, BEGUN)

    async def stop(self) -> None:
        """Tell every loop, here and in the workers, that the run is over."""
        self.ledger.stop()
        for versions in self.all_versions:
            versions.stop()
        self.critic_versions.stop()
        self.desk.stop()
        self.cores.stop()
        self.transfer_queue.stop()

    async def hand_over(self, may_stay: Collection[str]) -> Collection[str]:
        """Tell every loop that the attempt is over, and these workers that another follows. Returns those that stay for it, and
        have let go of this one. One that is not connected, or loads a model, cannot."""
        states = self.hub.states
        self.handover.begin({name for name in may_stay if name in states and states[name].task != "load"})
        await self.stop()
        return await self.handover.staying()

    async def settle(self) -> None:
        """Do what is to be done beside the run with storage units that are in processes of their own, while there are any."""
        if self.config.queue.place == "workers":
            await self.background.settle(self.transfer_queue.places.patience_seconds)
            if not reaches_storage(self.config):
                await self._remove_rows(self.transfer_queue.remove)

    async def close(self) -> None:
        """Write what is left and close the files."""
        await self.background.close()
        if self.config.queue.place == "driver":
            await self._remove_rows(self.transfer_queue.remove)
        await self.transfer_queue.close()
        if self.config.queue.place == "workers" and reaches_storage(self.config):
            await self._remove_rows(lambda: remove_from_server(self.config, self._owner))
        self.record.close()

    async def _remove_rows(self, remove: Callable[[], Awaitable[None]]) -> None:
        """Remove what the attempt has stored outside of its processes. What is left goes when another attempt begins."""
        if self.config.queue.storage.name == "memory":
            return
        try:
            with waiting(ROWS_REMOVED):
                async with asyncio.timeout(REMOVE_SECONDS):
                    await remove()
        except (RunError, TimeoutError) as error:
            why = str(error) or f"no answer in {REMOVE_SECONDS:g} s"
            self.log(f"what the queue has stored stays there until the run is resumed, if it is: {why}")

    def progress(self) -> None:
        """Something has moved: the run is not stalled."""
        self.last_progress = self._clock()

    async def _feed(self) -> None:
        await self._units_there()
        await feed(self.queue, self.ledger, self.schedule, self._admissions, self.evaluating.for_feed, self.shape)

    async def _evaluate(self) -> None:
        await self._units_there()
        await self.evaluating.run()

    async def _units_there(self) -> None:
        """Wait for the storage units that are in processes of their own: rows go to all of them from the start."""
        config = self.config.queue
        if config.place == "driver":
            return
        try:
            with waiting(UNITS, seconds=UNITS_SECONDS, units=config.num_units):
                async with asyncio.timeout(UNITS_SECONDS):
                    await self.queue.wait_for_units(config.num_units)
        except TimeoutError as error:
            there = len(self.transfer_queue.places.units)
            raise RunError(
                f"{there} of {config.num_units} storage units have come within {UNITS_SECONDS:g} s: "
                f"{self.config.run_dir / 'logs'}/storage-*.log say what the others do"
            ) from error

    # -- what ledger, versions and queue know ------------------------------------------------------------------------------

    def _generating(self) -> set[str]:
        """Workers whose engines generate, or are about to: they hold rows, or install weights. While the last rows are scored, or
        wait for environments, the processes below the worker compute on its cores in the engine's place."""
        installing = (worker for versions in self.all_versions for worker in versions.installing)
        known = self.transfer_queue.controllers
        holding = (worker for task in ("rollout", EVALUATE_TASK) if task in known for worker in known[task].holders())
        return {*installing, *holding}

    def _is_training(self) -> bool:
        return self._is_under_way(self.ledger.ledger.tasks.policy)

    def _beside(self) -> dict[str, int]:
        """Workers beside trainer and rollout that compute, by their pool: see `computing_beside`; and the critic in its rounds."""
        counts = computing_beside(self.cores.pools, self.transfer_queue.controllers)
        has_critic = UPDATE_TASK in self.ledger.ledger.tasks.trained
        return counts | ({"critic": 1} if has_critic and self._is_under_way(UPDATE_TASK) else {})

    def _is_under_way(self, task: str) -> bool:
        """Whether who trains by this task computes: there is a round that is not trained, or an update to make."""
        ledger = self.ledger.ledger
        step = ledger.committed_by(task)
        return ledger.is_open(step) and ledger.step_state(step).is_under_way(task)

    def _end_step(self, task: str, step: int) -> None:
        self.background.start(self.queue.end_partition(task, step))

    def _begun(self, lease: Lease, want: Want) -> None:
        if want.installed is not None:
            self.ledger.ledger.begun((meta.group for meta in lease.groups), want.installed)

    def _done(self, task: str, rows: list[int]) -> None:
        self.progress()
        self.ledger.done(task, rows)

    def _decided(self, step: int, decided: Decided) -> None:
        self._selection.decided(decided)
        self._admissions.put_back(decided.surplus)
        self.record.decided(step, decided)

    def _rows_failed(self, dead: list[DeadRow]) -> None:
        self.progress()
        dead = [letter for letter in dead if self.ledger.ledger.knows(letter.group)]  # surplus is dropped, whatever becomes of it
        for letter in dead:
            attempts = "" if letter.error.startswith(SKIPPED) else f" after {self.config.reward.max_attempts} attempts"
            kind = re.sub(r"\d+", "", letter.error)  # the same but for the numbers in it
            self._failures[kind] += 1
            if (number := self._failures[kind]) <= FAILURES_LOGGED or number % 100 == 0:
                again = "" if number < FAILURES_LOGGED else f" ({number} rows by now; from here on each hundredth is logged)"
                where = f"; it is in {self.config.run_dir / UNSCORED_FILE}" if letter.error.startswith(NO_REWARD) else ""
                self.log(f"row {letter.row} of the queue failed for good{attempts}: {letter.error}{where}{again}")
        self.record.rows_died(dead)
        self.evaluating.held_out.rows_died(dead)
        self.background.start(self.queue.drop([letter.row for letter in dead]))
        self.ledger.fail(dead)

    def _lost(self, unit: int, rows: list[int]) -> None:
        shown = ", ".join(map(str, rows[:8])) + (" ..." if len(rows) > 8 else "")
        why = f"storage unit {unit} has died and lost {len(rows)} rows ({shown}); a durable queue.storage would have kept them"
        self.background.fail(RunError(why))

    def _committed(self, task: str, totals: list[StepTotals], updates: list[Update]) -> None:
        self.record.committed(task, totals, updates)
        if task == self.ledger.ledger.tasks.policy:
            self.saves.committed()
