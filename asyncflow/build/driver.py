"""The driver's side of a run: the books, the queue's controllers and units, telemetry, and the server for the workers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections import ChainMap, Counter
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from asyncflow.build.prepare import Prepared, num_devices, shape_of, tasks_before_training
from asyncflow.cluster.torchrun import launch_of
from asyncflow.config import Config
from asyncflow.data.order import SeededOrder
from asyncflow.registry import build
from asyncflow.telemetry.certificate import Certificate, Observed
from asyncflow.telemetry.hub import Hub
from asyncflow.telemetry.metrics import StepMetrics, StepTimes
from asyncflow.telemetry.trace import SPANS_FILE, SpanLog
from asyncflow.telemetry.trackers import make_trackers
from asyncflow.transfer_queue import STORAGES
from asyncflow.transfer_queue.leases import DeadRow, Lease, Want
from asyncflow.transfer_queue.metrics import run_metrics
from asyncflow.transfer_queue.queue import TransferQueue
from asyncflow.transport import Arena, Credentials, Server
from asyncflow.types import RunError
from asyncflow.workflows import SCHEDULES
from asyncflow.workflows.board import Board
from asyncflow.workflows.books import Books
from asyncflow.workflows.evaluation import HeldOut, Row, evaluate
from asyncflow.workflows.ledger import Consumed, Ledger, LedgerService, StepTotals, Update
from asyncflow.workflows.loop import feed
from asyncflow.workflows.samples import Prompt, schema
from asyncflow.workflows.schedule import Schedule
from asyncflow.workflows.signal import Signal

SOCKET_FILE = "control.sock"
EVAL_FILE = "eval.jsonl"
KEY_FILE = "key.pem"
SNAPSHOTS_DIR = "snapshots"
SAMPLES_FILE = "samples.jsonl"


class Driver:
    """`on_group` is told of every trained group by its step, `on_step` of every committed step with its metrics, `on_evaluation` of
    every evaluation, `says` of what is odd."""

    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        *,
        on_group: Callable[[int], None],
        on_step: Callable[[int, Mapping[str, float]], None],
        on_evaluation: Callable[[Row], None],
        says: Callable[[str], None],
    ) -> None:
        self.config = config
        self._on_group, self._on_step, self._on_evaluation, self._says = on_group, on_step, on_evaluation, says
        self._clock = asyncio.get_running_loop().time
        self.shape = shape_of(config)
        self.schedule: Schedule = build("schedule", config.schedule.name, config.schedule.options, SCHEDULES)
        self.source: SeededOrder[Prompt] = SeededOrder(prepared.prompts, config.run.seed)
        self.last_progress = self._clock()
        self._background: set[asyncio.Task[None]] = set()

        signal = Signal()
        self._build_queue()
        ledger = Ledger(
            self.shape.group_bits,
            tasks_before_training(config),
            self.schedule.max_staleness,
            num_ranks=config.layout.dp,
            groups_per_turn=self.shape.groups_per_turn,
        )
        books = Books(ledger, self.transfer_queue.controllers)
        self.ledger = LedgerService(ledger, self.schedule, books, signal, self._end_step)
        self.board = Board(self.schedule, books, signal, self._clock)
        self._signal = signal
        self._open_files()
        self.held_out = HeldOut(
            prepared.held_out,
            last_version=config.run.steps,
            every_steps=config.eval.every_steps,
            samples=config.eval.samples_per_prompt,
            temperature=config.rollout.temperature,
            greedy=config.eval.greedy,
            on_row=self._evaluated,
        )
        self._metrics: dict[int, StepMetrics] = {}
        self._moments: dict[tuple[str, int], float] = {}  # ("opened", step) and ("installed", version): when first
        self._started: float | None = None  # of the step under way: the first admission, or the last commit
        self._finishing = asyncio.Lock()  # rows of metrics are written in the order of their steps
        self._observed = Observed()
        self._skipped_in_a_row = 0
        self._has_said_unshared = False
        self._redelivered = 0
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ledger.on_opened = lambda step: self._note("opened", step)
        self.board.on_installed = lambda version: self._note("installed", version)
        self.board.on_stale = lambda worker, why: self._unhealthy(worker, f"has no weights to serve, and tries again: {why}")
        self.ledger.on_consumed, self.ledger.on_committed = self._consumed, self._committed

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
            notify_timeout_seconds=config.notify_timeout_seconds,
            capacity_rows=config.capacity_rows,
            capacity_bytes=config.unit_capacity_bytes,
            snapshot_dir=self.config.run_dir / SNAPSHOTS_DIR,
        )
        self.queue = self.transfer_queue.client()

    def _open_files(self) -> None:
        run_dir, config = self.config.run_dir, self.config
        self.hub = Hub(SpanLog(run_dir / SPANS_FILE), self._keep_sample, self.progress)
        self._samples = (run_dir / SAMPLES_FILE).open("a", buffering=1, encoding="utf-8")
        self._evaluations = (run_dir / EVAL_FILE).open("a", buffering=1, encoding="utf-8")
        names = ["jsonl", *config.telemetry.trackers]
        self._trackers = make_trackers(names, run_dir, config.model_dump(mode="json"), config.run.name)

    def services(self, status: object) -> Mapping[str, object]:
        """What workers call, by name; `status` answers `asyncflow status`."""
        own: dict[str, object] = {"ledger": self.ledger, "board": self.board, "hub": self.hub, "status": status}
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
            feed(self.queue, self.ledger, self.schedule, self.source, self.held_out, self.shape),
            self._evaluations_in_order(),
        ]

    async def stop(self) -> None:
        """Tell every loop, here and in the workers, that the run is over."""
        self.ledger.stop()
        self.board.stop()
        self.transfer_queue.stop()

    def certificate(self) -> Certificate:
        """What the run was so far, once every worker has made its last report."""
        workers = [*self.hub.states.values(), *self.hub.past]
        return self._observed.certificate(
            schedule=self.config.schedule.name,
            promised_staleness=self.schedule.max_staleness,
            steps=self.ledger.ledger.committed,
            planned_steps=self.config.run.steps,
            rows_redelivered=self._rows_redelivered(),
            reward_failures=sum((Counter(worker.reward_failures) for worker in workers), Counter()),
            why_not_deterministic=next((w.why_not_deterministic for w in workers if w.why_not_deterministic), ""),
        )

    async def close(self) -> None:
        """Write what is left and close the files."""
        await asyncio.gather(*self._background)
        if self.failure.done():
            self.failure.exception()  # taken, if it came too late to be why the run ended: else the event loop reports it at exit
        await self.transfer_queue.close()
        for tracker in self._trackers:
            tracker.close()
        self._samples.close()
        self._evaluations.close()
        self.hub.log.close()

    def progress(self) -> None:
        """Something has moved: the run is not stalled."""
        self.last_progress = self._clock()

    async def _evaluations_in_order(self) -> None:
        for version in self.held_out.versions():
            await evaluate(self.queue, self.ledger, self.held_out, version)

    def _evaluated(self, row: Row) -> None:
        if self.ledger.is_stopping:
            return  # cut short: its figures would be of some prompts only
        self._evaluations.write(json.dumps(row) + "\n")
        self._on_evaluation(row)

    def _keep_sample(self, sample: Mapping[str, Any]) -> None:
        self._samples.write(json.dumps(sample, ensure_ascii=False) + "\n")

    # -- what the books tell ------------------------------------------------------------------------------------------------

    def _end_step(self, purpose: str, step: int) -> None:
        self._start(self.queue.end_step(purpose, step))

    def _notify(self) -> None:
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
        self._observed.rows_dead += len(dead)
        self._start(self.queue.drop([letter.row for letter in dead]))
        self.ledger.give_up(dead)

    def died(self, worker: str, why: str, is_given_up: bool) -> None:
        """A rollout worker's process has ended, and is started again or given up."""
        self.board.died(worker, is_given_up)
        self._unhealthy(worker, why)

    def _unhealthy(self, worker: str, why: str) -> None:
        """A rollout worker serves nothing for now. With too few others the run stops."""
        self._says(f"worker {worker} {why}")
        workers, needed = self.config.rollout.num_workers, self.config.rollout.min_healthy_workers
        healthy = workers - self.board.num_unhealthy()
        if healthy < needed and not self.failure.done():
            numbers = f"{healthy} of {workers} rollout workers are left, and rollout.min_healthy_workers is {needed}"
            self.failure.set_exception(RunError(f"worker {worker} {why}; {numbers}"))

    def _lost(self, unit: int, rows: list[int]) -> None:
        if not self.failure.done():
            shown = ", ".join(map(str, rows[:8])) + (" ..." if len(rows) > 8 else "")
            why = f"storage unit {unit} has died and lost {len(rows)} rows ({shown}); a durable queue.storage would have kept them"
            self.failure.set_exception(RunError(why))

    def _consumed(self, step: int, group: Consumed) -> None:
        self.progress()
        is_overlapped = not self.ledger.ledger.is_done("rollout", step)
        self._observed.group(step, staleness=group.staleness, num_spans=group.num_spans, is_overlapped=is_overlapped)
        metrics = self._metrics.setdefault(step, StepMetrics())
        metrics.add_group(
            rewards=group.rewards,
            response_lengths=group.response_lengths,
            truncated=group.truncated,
            staleness=group.staleness,
            prompt_length=group.prompt_length,
        )
        metrics.add_micro_batch(
            loss_sum=group.loss_sum,
            loss_tokens=group.loss_tokens,
            logical_tokens=group.logical_tokens,
            physical_tokens=group.physical_tokens,
            metrics=group.metrics,
            is_finite=group.is_finite,
        )
        metrics.count_rows(empty=len(group.empty_rows))
        if group.empty_rows:
            rows = ", ".join(map(str, group.empty_rows))
            self._says(f"rows without a token to train on, which train nothing and do not count in the normaliser: {rows}")
        self._look_at_sharing(group)
        self._on_group(step)

    def _look_at_sharing(self, group: Consumed) -> None:
        """Say once that a shared prompt was not worth it, where it was asked for."""
        is_shared = group.physical_tokens < group.logical_tokens
        if self._has_said_unshared or is_shared or self.shape.rows_per_micro_batch == 1 or len(group.rows) == 1:
            return
        self._has_said_unshared = True
        tokens = f"a prompt of {group.prompt_length} tokens, {len(group.rows)} responses of {group.response_lengths.mean():.0f}"
        self._says(f"prompts are not shared where that saves less than a tenth of the tokens ({tokens})")

    def _committed(self, totals: StepTotals, update: Update) -> None:
        self.progress()
        metrics = self._metrics.pop(totals.step, StepMetrics())
        metrics.add_update(
            grad_norm=update.grad_norm,
            learning_rate=update.learning_rate,
            normaliser=update.normaliser,
            is_skipped=update.is_skipped,
        )
        redelivered = self._rows_redelivered()
        metrics.count_rows(dead=totals.dead, redelivered=redelivered - self._redelivered)
        self._redelivered = redelivered
        committed = self._clock()
        times = StepTimes(
            started=committed if self._started is None else self._started,
            committed=committed,
            could_generate=self._could_generate(totals.step),
        )
        self._started = committed
        self._start(self._finish_step(totals.step, metrics, times))
        self._check_update(totals, update)

    def _rows_redelivered(self) -> int:
        return sum(c.table.counts()["redelivered"] for c in self.transfer_queue.controllers.values())

    def _check_update(self, totals: StepTotals, update: Update) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if update.is_skipped else 0
        if not update.is_skipped:
            return
        self._observed.skipped_updates += 1
        rows, shape = totals.non_finite_rows, self.shape
        first_group, next_group = (step * shape.prompts_per_step for step in (totals.step, totals.step + 1))
        first, last = first_group << shape.group_bits, ((next_group - 1) << shape.group_bits) + shape.group_size - 1
        why = f"the gradient of rows {first} to {last} together was not finite"
        if rows:
            why = f"the loss of rows {', '.join(map(str, rows[:8]))} was not finite"
        if not update.normaliser:
            why = "nothing was left to train on"
        self._says(f"step {totals.step} is skipped, the weights stay as they are: {why}")
        if self._skipped_in_a_row >= self.config.train.max_skipped_updates and not self.failure.done():
            way_out = "lower train.learning_rate, or look at these rows' rewards and log-probs"
            if not update.normaliser:
                way_out = "the messages above say why the rows were given up"
            told = f"{self._skipped_in_a_row} updates in a row were skipped, the last because {why}; {way_out}"
            self.failure.set_exception(RunError(told))

    async def _finish_step(self, step: int, metrics: StepMetrics, times: StepTimes) -> None:
        """The step's row of metrics, once every worker has told what it did until the commit."""
        async with self._finishing:
            await self.hub.settle(times.committed)
            spans = self.hub.log.window(times.started, times.committed)
            began = min((s.start for s in spans if s.task == "forward_backward" and s.step == step), default=None)
            row = metrics.row(dataclasses.replace(times, train_began=began), num_devices(self.config), spans)
            row |= run_metrics(*await self.queue.status())
            row |= {f"memory/rss_bytes/{name}": state.rss_bytes for name, state in self.hub.states.items()}
            self.hub.log.flush()
            for tracker in self._trackers:
                tracker.log(step, row)
            self._on_step(step, row)

    def _note(self, what: str, number: int) -> None:
        self.progress()
        moment = self._moments.setdefault((what, number), self._clock())
        if self._started is None and what == "opened":
            self._started = moment

    def _could_generate(self, step: int) -> float | None:
        """When the step's first group was admitted and a worker had weights for it."""
        interval, opened = self.schedule.interval(step), self._moments.get(("opened", step))
        installed = [moment for (what, v), moment in self._moments.items() if what == "installed" and v in interval]
        return max(opened, min(installed)) if opened is not None and installed else None

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.failure.done():
            self.failure.set_exception(error)


def control_socket(run_dir: Path) -> Path:
    """Where a run's driver listens."""
    return run_dir / SOCKET_FILE
