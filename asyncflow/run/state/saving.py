"""Checkpoints while a run runs: the driver's part and the trainers'.

    trainer/0..n: CheckpointWriter --begin--> driver: CheckpointCoordinator
              |                               says which older versions are still needed, and writes its own part
              |  engine.save_state: staged, then written beside training
              +--written----------> hashes, manifest, rename; the oldest one goes

consumes: commits after which a checkpoint is due; the end of the run
waits for: the one before in the same place, which must be whole or left out before the next begins; the metrics of its last step
is unblocked by: the disk

A checkpoint lies on the disk or in shared memory of the driver's machine: the same files, by the same code. One in memory is for
the attempt after a trainer's death, and only the newest one stays.

A checkpoint that cannot be written (a full disk) is left out, and logged; the run goes on, and the earlier ones stay. Once it
has its name, it counts, whatever fails then.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
from collections.abc import Awaitable, Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, ParamSpec, Protocol, TypeVar

import msgspec
import numpy as np

from asyncflow.checkpoint.folder import Checkpoints
from asyncflow.config import Config, dump
from asyncflow.control.signal import Signal
from asyncflow.data.order import Pushed, SeededOrder
from asyncflow.loops.admissions import Admissions
from asyncflow.loops.samples import Prompt
from asyncflow.run.context import RunContext
from asyncflow.run.evaluating import Evaluating
from asyncflow.run.records.record import RecordState, RunRecord
from asyncflow.run.state.driver_state import TRAINER_DIR, DriverState, as_saved, data_hash, version_file, write_added, write_driver
from asyncflow.run.state.memory_pace import MAX_SHARE, MemoryPace
from asyncflow.run_dir import CRITIC_DIR, RunDir
from asyncflow.telemetry.spans import Recorder
from asyncflow.threads import CHECKPOINT_FILES, at_files
from asyncflow.transfer_queue.unit import StorageUnit
from asyncflow.transport import remote
from asyncflow.types import Array, Batch, CheckpointPlace, Ragged, RunError, Values
from asyncflow.waits import CHECKPOINT, CHECKPOINT_WHOLE, CRITIC_PART, waiting
from asyncflow.weight_sync.base import Manifest
from asyncflow.weight_sync.files import held

if TYPE_CHECKING:
    from asyncflow.run.in_worker.connection import JobFile

P = ParamSpec("P")
T = TypeVar("T")
_COPIED_BYTES: Final = 1 << 20  # at once
_BegunCheckpoint = tuple[CheckpointPlace, int]  # of a checkpoint that is under way: its place and version


def checkpoints_of(config: Config) -> Checkpoints:
    """Checkpoints of a run on the disk."""
    return Checkpoints(RunDir(config.run_dir).checkpoints, config.checkpoint.keep)


def checkpoints_in(memory: Path) -> Checkpoints:
    """Checkpoints of a run in a folder of shared memory."""
    return Checkpoints(memory, keep=1)


def places_of(config: Config, memory: Path | None) -> dict[CheckpointPlace, Checkpoints]:
    """Places of a run's checkpoints; `memory`: folder of those in shared memory, if there are any."""
    places: dict[CheckpointPlace, Checkpoints] = {"disk": checkpoints_of(config)}
    return places if memory is None else places | {"memory": checkpoints_in(memory)}


class CheckpointCoordinator:
    """The driver's end: what it knows at every commit, and what makes files a checkpoint."""

    def __init__(
        self,
        context: RunContext,
        evaluating: Evaluating,
        source: SeededOrder[Prompt],
        admissions: Admissions,
        record: RunRecord,
        pace: MemoryPace | None = None,
    ) -> None:
        """`pace`: of the checkpoints in shared memory; None: there are none."""
        self._config, self._schedule = context.config, context.schedule
        self._versions, self._transfer_queue = context.versions, context.transfer_queue
        self._ledger, self._log, self._group_size = context.ledger.ledger, context.log, context.shape.group_size
        self._evaluating, self._source, self._admissions, self._record = evaluating, source, admissions, record
        self._places = places_of(context.config, None if pace is None else pace.folder)
        self._checkpoints, self._pace = self._places["disk"], pace
        self._data = ""
        self._own: dict[_BegunCheckpoint, asyncio.Task[None]] = {}  # this end's part
        self._parts: dict[_BegunCheckpoint, str] = {}  # why the critic's part could not be written; "" if it was
        self._under_way: set[CheckpointPlace] = set()
        self._finishing: set[asyncio.Task[None]] = set()  # of checkpoints whose files are all there
        self._kept: set[int] | None = None  # the rows in the newest checkpoint on the disk, if it is of this attempt
        self._has_critic = len(self._ledger.tasks.trained) > 1
        self._clock = context.clock
        self._begun_at, self._took_seconds = self._clock(), 0.0  # of the newest checkpoint on the disk
        self._came = Signal()
        # The last version of which there is a checkpoint on the disk, or will be none.
        self.settled = self.newest = max(self._checkpoints.versions(), default=0)  # and the last one of which there is
        self.on_settled: Callable[[], None] = lambda: None
        self.committed()

    def committed(self) -> None:
        """Remember how things are now, right after a commit: nothing of the next step has been trained."""
        admissions, committed = self._admissions, self._ledger.committed
        open_groups = self._ledger.groups()
        admissions.forget(admissions.prompts.keys() - {group for groups in open_groups.values() for group in groups})
        self._steps = self._admitted()
        self._version, self._order = committed, self._order_now()
        self._state: RecordState = self._record.state()
        self._has_more = self._is_behind = False  # than the checkpoint of this version; the order that is remembered

    def pushed(self) -> None:
        """Remember prompts that were pushed since the last commit."""
        self._has_more = self._is_behind = True

    def _catch_up(self) -> None:
        """Remember the order with prompts pushed since the last commit. What is admitted by now stays before them."""
        if self._is_behind:
            self._steps, self._order, self._is_behind = self._admitted(), self._order_now(), False

    async def close(self) -> None:
        """Keep prompts that were pushed after the last checkpoint was begun beside that and, where it matters, a note that no
        row is lost. To be called when the run stops."""
        is_whole = not self._loses_rows()
        has_news = self._has_more or (is_whole and not self._record.is_deterministic)
        if has_news and self.settled == self._version and self._version in self._checkpoints.versions():
            path, state = self._checkpoints.added(self._version), self._driver_state()
            try:
                await asyncio.to_thread(write_added, path, state, is_whole=is_whole)
            except OSError as error:
                what = "prompts that were pushed after the last checkpoint" if self._has_more else "a note that it has all rows"
                self._log(f"{what} could not be kept: {error.strerror or error}")

    async def settle(self) -> None:
        """Wait until every checkpoint whose files are all there is one, or has been left out, whichever process has died
        meanwhile."""
        if self._finishing:
            await asyncio.wait(self._finishing)

    def due(self) -> CheckpointPlace | None:
        """Place where a checkpoint is due by the clock, if it is. On the disk: `checkpoint.every_minutes` after the last one there,
        later where that took long. In memory: at its own pace (`MemoryPace`), while no other one is under way."""
        minutes = self._config.checkpoint.every_minutes
        seconds = math.inf if minutes is None or not self._config.checkpoint.keep else 60 * minutes
        if self._clock() - self._begun_at >= max(seconds, self._took_seconds / MAX_SHARE):
            return "disk"
        return "memory" if self._pace is not None and not self._under_way and self._pace.is_due() else None

    @remote
    async def begin(self, version: int, place: CheckpointPlace = "disk") -> list[Manifest]:
        """Begin the checkpoint of the last committed version, which the trainers write. Returns what they are to keep of older
        weights.

        Raises `ValueError` for another version.
        """
        if version != self._version:
            raise ValueError(f"a checkpoint of version {version} was begun after {self._version} commits")
        self._under_way.add(place)
        if place == "disk":
            self._has_more, self._begun_at = False, self._clock()
        elif self._pace is not None:
            self._pace.begun()
        # The critic may have committed the step after the policy, and has by now.
        in_a_row = self._record.critic_skipped_in_a_row
        self._state = msgspec.structs.replace(self._state, critic_skipped_in_a_row=in_a_row)
        self._own[place, version] = own = asyncio.ensure_future(self._write_own(version, place))
        own.add_done_callback(_seen)  # by a trainer that is there to say `written`, too
        first = self._schedule.interval(version).high
        manifests = {
            each.version: each for each in [*self._evaluating.waiting(version), *self._versions.kept(range(first, version))]
        }
        return [manifests[each] for each in sorted(manifests)]

    @remote
    async def written(self, version: int, place: CheckpointPlace = "disk", held_seconds: float = 0.0, why: str = "") -> None:
        """Make the trainers' files a checkpoint, for which training was held up so long, or leave it out, if they could not be
        written, and why. Returns when it is one, or has been left out."""
        try:
            await self._own.pop((place, version))
        except OSError as error:
            why = why or _why(error)
        of_critic = await self._part_of_critic(version, place)  # in any case: its files would stay else
        finishing = asyncio.ensure_future(self._finish(version, place, why or of_critic, held_seconds))
        self._finishing.add(finishing)
        finishing.add_done_callback(self._finishing.discard)
        await asyncio.shield(finishing)  # should the trainer die now

    async def _finish(self, version: int, place: CheckpointPlace, why: str, held_seconds: float) -> None:
        """Make the files a checkpoint, or leave it out because of `why`."""
        if not why:
            try:
                await self._record.rows.finished(version)
                checkpoints = self._places[place]
                with waiting(CHECKPOINT, version=version, folder=str(checkpoints.partial(version))):
                    troubles = await _at_files(checkpoints.commit, version)
                for trouble in troubles:
                    self._log(trouble)
            except (OSError, RunError) as error:
                why = _why(error) if isinstance(error, OSError) else str(error)
        if why:
            await self._abandon(version, place, why)
        elif place == "disk":
            self.newest = version
        self._settle(version, place, held_seconds)

    @remote
    async def critic_written(self, version: int, why: str, place: CheckpointPlace = "disk") -> None:
        """Take note that the critic's files are there, or could not be written, and why. Returns at once."""
        self._parts[place, version] = why
        self._came.notify()

    async def _part_of_critic(self, version: int, place: CheckpointPlace) -> str:
        if not self._has_critic:
            return ""
        await self._came.until(lambda: (place, version) in self._parts, CRITIC_PART, version=version)
        return self._parts.pop((place, version))

    async def _abandon(self, version: int, place: CheckpointPlace, why: str) -> None:
        checkpoints = self._places[place]
        await asyncio.to_thread(checkpoints.discard, version)
        if place == "memory" and self._pace is not None:
            self._pace.end(f"that of step {version} could not be written: {why}")
            return
        left = checkpoints.versions()
        stays = f"the one of step {left[-1]} stays" if left else "there is none before it"
        self._log(f"the checkpoint of step {version} could not be written, and {stays}: {why}")

    def _settle(self, version: int, place: CheckpointPlace, held_seconds: float) -> None:
        self._under_way.discard(place)
        if place == "memory" and self._pace is not None:
            self._pace.written(held_seconds)
            return
        self.settled = version
        self._took_seconds = self._clock() - self._begun_at
        self.on_settled()

    async def _write_own(self, version: int, place: CheckpointPlace) -> None:
        state, steps = self._driver_state(), self._steps
        if not self._data:
            self._data = await asyncio.to_thread(data_hash, self._source.items)
        state = msgspec.structs.replace(state, data=self._data)
        rows = [] if self._is_made_again_exactly() else await self._completed(steps)
        if place == "disk":
            self._kept = {row for batch in rows for row in batch.indices.tolist()}
        folder = self._places[place].partial(version)
        with waiting(CHECKPOINT, version=version, folder=str(folder)):
            await _at_files(write_driver, folder, state, rows)

    def _loses_rows(self) -> bool:
        """Whether rows were begun that are not in the newest checkpoint. It may be so where that is of an earlier attempt."""
        bits, size = self._transfer_queue.schema.group_bits, self._group_size
        begun = {row for group in self._ledger.groups_begun() for row in range(group << bits, (group << bits) + size)}
        return self._kept is None or not begun <= self._kept

    def _admitted(self) -> dict[int, dict[int, Prompt]]:
        """Steps that are not committed, each with the prompts of its groups."""
        admissions, committed = self._admissions, self._ledger.committed
        open_groups = self._ledger.groups()
        steps = {step: {group: admissions.prompts[group] for group in groups} for step, groups in open_groups.items()}
        return {step: groups for step, groups in (admissions.waiting | steps).items() if step >= committed}

    def _order_now(self) -> tuple[int, list[Pushed[Prompt]], int]:
        return self._source.position, list(self._source.pushed), self._source.num_pushed

    def _driver_state(self) -> DriverState:
        """State that was remembered at the last commit, with the prompts that were pushed since."""
        self._catch_up()
        position, pushed, num_pushed = self._order
        return DriverState(
            version=self._version,
            config=dump(self._config),
            data=self._data,
            position=position,
            pushed=[as_saved(each.item, each.after) for each in pushed],
            steps={step: {group: as_saved(prompt) for group, prompt in groups.items()} for step, groups in self._steps.items()},
            record=self._state,
            num_pushed=num_pushed,
        )

    def _is_made_again_exactly(self) -> bool:
        """Whether every response is a function of its key: one version may make it, and engines are deterministic."""
        interval = self._schedule.interval(self._version + self._schedule.max_staleness)
        return interval.low == interval.high and self._record.is_deterministic

    async def _completed(self, steps: dict[int, dict[int, Prompt]]) -> list[Batch]:
        """The rows of these steps that have all that comes before training, wherever they are."""
        schema, lacking, size = self._transfer_queue.schema, self._ledger.not_generated(), self._group_size
        numbers = [group << schema.group_bits for groups in steps.values() for group in groups]
        rows = np.array([row for n in numbers for row in range(n, n + size) if row not in lacking], np.int64)
        made = {name for task in self._ledger.tasks.kept for name in schema.task(task).outputs}
        columns = [column.name for column in schema.declared if column.name in made]
        units = [self._transfer_queue.places.get(StorageUnit, f"unit/{number}") for number in self._transfer_queue.places.units]
        return [batch for unit in units for batch in await _read(unit, rows, columns)]


class Saveable(Protocol):
    """The part of `TrainEngine` and `CriticEngine` that a checkpoint calls."""

    async def begin_step(self) -> None:
        """Begin a step: what is saved is its beginning."""

    async def save_state(self, folder: Path) -> Awaitable[None]:
        """Save what the step depends on. Returns when the engine may be called again; what it returns ends the writing."""
        ...


class CheckpointWriter:
    """A leading trainer's end, or the critic's."""

    def __init__(
        self,
        config: Config,
        saves: CheckpointCoordinator,
        engine: Saveable,
        spans: Recorder,
        job: JobFile,
        *,
        is_first: bool,
        part: str = TRAINER_DIR,
    ) -> None:
        """`is_first`: whether it is the leader that talks with the driver. `part`: folder of the checkpoint that the engine's state
        goes to."""
        self._part, self._is_first = part, is_first
        self._saves, self._engine, self._spans = saves, engine, spans
        self._places = places_of(config, Path(job.memory) if job.memory else None)
        self._settings, self._last = config.checkpoint, config.run.steps
        self._saved = job.saved  # on the disk
        self._files: asyncio.Future[str] | None = None
        self._writing: dict[CheckpointPlace, asyncio.Task[None]] = {}

    async def committed(
        self, version: int, asked: CheckpointPlace | None, published: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """See `Keeper`."""
        every, began = self._settings.every_steps, self._spans.clock()
        is_due = self._settings.keep and (version == self._last or (every is not None and version % every == 0))
        if (place := "disk" if is_due else asked) is not None:
            if published is not None:
                await published()
            await self._engine.begin_step()  # what is saved is the state at the beginning of a step
            await self.save(version, place, began)

    async def save(self, version: int, place: CheckpointPlace = "disk", began: float | None = None) -> None:
        """Stage a checkpoint of this version; it is written while the engine goes on. Nothing is done for one on the disk that is
        there, or where none are kept. `began`: when training was first held up for it."""
        if place == "disk" and (version == self._saved or not self._settings.keep):
            return
        with self._spans.busy("checkpoint", version=version):
            if (before := self._writing.pop(place, None)) is not None:
                await before
            if self._files is not None:  # in the other place: an engine writes one state at a time
                await self._files
            if place == "disk":
                self._saved = version
            folder, older = self._places[place].partial(version), {}
            if self._is_first:
                older = {manifest.version: held(manifest) for manifest in await self._saves.begin(version, place)}
            is_written = await self._engine.save_state(folder / self._part)
        self._files = asyncio.ensure_future(self._written_files(version, folder, is_written, older))
        held_seconds = 0.0 if began is None else self._spans.clock() - began
        self._writing[place] = asyncio.ensure_future(self._written(version, place, self._files, held_seconds))

    async def written(self) -> None:
        """Wait until all that was staged is a checkpoint, or has been left out."""
        while self._writing:
            await self._writing.popitem()[1]

    async def _written_files(self, version: int, folder: Path, is_written: Any, older: dict[int, BinaryIO | None]) -> str:
        """Wait for the files. Returns why they could not be written; "" if they were."""
        whys = []
        for part in (
            _at_files(_write_all, folder, older),
            is_written,
        ):  # first what the next publish may want to write over
            try:
                with waiting(CHECKPOINT, version=version, folder=str(folder)):
                    await part
            except (OSError, RunError) as error:
                whys.append(error.strerror or str(error) if isinstance(error, OSError) else str(error))
        return whys[0] if whys else ""

    async def _written(self, version: int, place: CheckpointPlace, files: asyncio.Future[str], held_seconds: float) -> None:
        why = await files
        if self._part == CRITIC_DIR:
            await self._saves.critic_written(version, why, place)
        elif self._is_first:
            with waiting(CHECKPOINT_WHOLE, version=version, folder=str(self._places[place].partial(version))):
                await self._saves.written(version, place, held_seconds, why)


async def _at_files(function: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Call it in a thread that tells where it is, should the disk hang."""

    def call() -> T:
        with at_files(CHECKPOINT_FILES):
            return function(*args, **named)

    return await asyncio.to_thread(call)


def _why(error: OSError) -> str:
    return f"{error.filename or 'a file'}: {error.strerror or error}"


def _seen(task: asyncio.Task[None]) -> None:
    """Take the task's exception, for a run that is over: nothing awaits the task then."""
    if not task.cancelled():
        task.exception()


async def _read(unit: StorageUnit, rows: Array, columns: list[str]) -> list[Batch]:
    """Rows, of these, that the unit has with all these columns, copied: the unit may drop them. A row that it has lost, or that
    failed meanwhile, is made again by the run that resumes."""
    if not len(here := await unit.present(rows)):
        return []
    try:
        return [_copied((await unit.read(here, columns)).batch())]
    except LookupError:  # of one row: row by row then
        each = [here[i : i + 1] for i in range(len(here))] if len(here) > 1 else []
        return [batch for row in each for batch in await _read(unit, row, columns)]


def _copied(batch: Batch) -> Batch:
    columns: dict[str, Values] = {
        name: Ragged(values.values.copy(), values.offsets.copy()) if isinstance(values, Ragged) else values.copy()
        for name, values in batch.columns.items()
    }
    return Batch(batch.indices.copy(), batch.groups.copy(), columns)


def _write_all(folder: Path, versions: dict[int, BinaryIO | None]) -> None:
    """Copy versions that are held (None: weights are simulated) to the disk, and let go of them."""
    with contextlib.ExitStack() as stack:
        for source in versions.values():
            stack.enter_context(source or contextlib.nullcontext())
        for version, source in versions.items():
            path = folder / version_file(version)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as target:
                shutil.copyfileobj(source or BytesIO(), target, _COPIED_BYTES)
