"""Watch of a run: its situations on disk, its words in the log, its status, and the end of a run in which nothing moves.

consumes: situations
waits for: the next second, or in a simulation for a tenth of `run.stall_timeout_seconds` in which nothing has moved, or a worker
    has not; and for all of these seconds
is unblocked by: the clock
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from asyncflow.run.driver import Driver
from asyncflow.run.situations import SECONDS, Situations
from asyncflow.telemetry.situation import Situation, write_situation
from asyncflow.telemetry.why import SILENT_SECONDS, sentence, standing
from asyncflow.transport import remote
from asyncflow.types import RunError

LOGGED_SHARE: Final = 0.1
"""Share of `run.stall_timeout_seconds` after which the log says why nothing moves, or why a worker stands."""
MOST_LOGGED: Final = 8
"""Workers that stand since the same moment and are named one by one: a network that is cut off is one cause."""


class Status(msgspec.Struct, frozen=True):
    """The answer to `asyncflow status`: what each worker does, what waits for what, and what each storage unit holds."""

    run: str
    committed: int
    steps: int
    idle_seconds: float
    workers: list[str]
    waits: list[str]
    queue: dict[str, dict[str, int]]
    stored: list[str]


class Watch:
    """Watch of a run, and its service `status`."""

    def __init__(self, driver: Driver, situations: Situations, folder: Path | None) -> None:
        """`folder`: where situations are written, if they are."""
        self._driver, self.situations, self._folder = driver, situations, folder
        self._logged = ""  # the cause that the log has named last
        self._standing: set[str] = set()  # workers that stood when it was looked last
        self._writing: asyncio.Task[None] | None = None
        self._why_unwritten = ""
        self._has_ended = False

    @remote
    async def status(self) -> Status:
        """Status: which worker does what, and what waits for what."""
        driver, now = self._driver, asyncio.get_running_loop().time()
        workers, serving = [], {name: version for versions in driver.all_versions for name, version in versions.serving.items()}
        for name, state in sorted(driver.hub.states.items()):
            what = f"{state.task}{f' for {state.cause}' if state.cause else ''} since {now - state.since:.1f} s"
            leaves = ", to leave" if name in driver.versions.workers.leaving else ""
            version = serving.get(name, "-")
            workers.append(f"{name} (process {state.pid}): {what}, {state.rss_bytes / 1e6:.0f} MB, version {version}{leaves}")
        waits = driver.ledger.ledger.missing()
        tasks, units = await driver.queue.status()
        for name, task in tasks.items():
            waits += [f"{worker} holds {rows} rows of task {name}" for worker, rows in task.holders.items()]
        queue = {name: task.counts for name, task in tasks.items()}
        stored = [f"unit/{number}: {unit.rows} rows, {unit.stored_bytes / 1e6:.1f} MB" for number, unit in sorted(units.items())]
        run, idle = driver.config.run, now - driver.last_progress
        return Status(run.name, driver.ledger.ledger.committed, run.steps, idle, workers, waits, queue, stored)

    async def run(self) -> None:
        """Write a situation at once, then one and all spans every second, and say in the log what has stood for too long, until the
        run ends."""
        driver, loop = self._driver, asyncio.get_running_loop()
        patience = LOGGED_SHARE * driver.config.run.stall_timeout_seconds
        if self._folder is not None:
            await self._write(self._folder, self.situations.now())
        while not self._has_ended:
            idle = loop.time() - driver.last_progress
            await asyncio.sleep(SECONDS if self._folder is not None else max(SECONDS, patience - idle))
            idle = loop.time() - driver.last_progress
            if self._has_ended or (self._folder is None and idle < patience and not self._may_stand(patience)):
                continue
            situation = self.situations.now()
            if self._folder is not None:
                await self._write(self._folder, situation)
                with contextlib.suppress(OSError):  # a disk that is full is told of above
                    driver.hub.log.flush()
            cause = ""
            if idle < patience:
                self._logged = ""
            elif not situation.is_held and not driver.ledger.is_stopping:
                cause = sentence(situation)
                self._log_cause(idle, cause)
            if not driver.ledger.is_stopping:
                self._log_standing(standing(situation, patience) if self._may_stand(patience) else {}, cause)

    def _may_stand(self, patience: float) -> bool:
        """Whether a worker may have stood for so long: a look that costs nothing, since mostly none has."""
        hub = self._driver.hub
        return any(
            hub.is_silent(name, max(patience, SILENT_SECONDS)) or any(wait.seconds >= patience for wait in state.waits)
            for name, state in hub.states.items()
        )

    def _log_standing(self, why: Mapping[str, str], cause: str) -> None:
        """Say once of each worker that stands while others may go on why it does, unless it is what nothing moves for."""
        new = [text for name, text in why.items() if name not in self._standing and text.partition(" (ended by ")[0] not in cause]
        self._standing = set(why)
        with contextlib.suppress(OSError):  # a full disk below standard output
            for text in new[:MOST_LOGGED]:
                self._driver.log(f"a worker stands, whatever else moves: {text}")
            if len(new) > MOST_LOGGED:
                self._driver.log(f"{len(new) - MOST_LOGGED} more workers stand: `asyncflow why` names them")

    def _log_cause(self, idle: float, cause: str) -> None:
        """Say once what the cause is, and again when it is another one."""
        if _timeless(cause) != self._logged:
            self._logged = _timeless(cause)
            with contextlib.suppress(OSError):  # a full disk below standard output
                self._driver.log(f"nothing has moved for {idle:.0f} s: {cause}")

    @property
    def has_stood(self) -> bool:
        """Whether nothing has moved for so long that the log says why."""
        idle = asyncio.get_running_loop().time() - self._driver.last_progress
        return idle >= LOGGED_SHARE * self._driver.config.run.stall_timeout_seconds

    async def ended(self, why: str) -> str:
        """Write the last situation, which says `why` the run ends. Returns what waited for what, in words."""
        self._has_ended, situation = True, self.situations.now(ended=why)
        if self._folder is not None:
            if self._writing is not None:
                await asyncio.wait([self._writing], timeout=SECONDS)
            await self._write(self._folder, situation)
        return sentence(situation)

    async def guard(self) -> None:
        """Guard the run for ever. Raises `RunError`, which says what waits for what, when nothing has moved for too long."""
        driver, loop = self._driver, asyncio.get_running_loop()
        limit = driver.config.run.stall_timeout_seconds
        while True:
            await asyncio.sleep(max(0.05, driver.last_progress + limit - loop.time()))
            if (driver.ledger.is_held or driver.waits_outside) and not driver.ledger.is_stopping:
                driver.progress()  # a user by hand, or a worker from outside, may take any time
            elif loop.time() - driver.last_progress >= limit:
                status, lease = await self.status(), driver.config.queue.lease_seconds
                late = (
                    f". What a worker that hangs holds is others' after queue.lease_seconds ({lease:g}): take less than {limit:g}"
                )
                raise RunError(
                    f"nothing has moved for {limit:g} s (run.stall_timeout_seconds): {sentence(self.situations.now())}. "
                    f"Workers: {'; '.join(status.workers) or 'none yet'}. Waited for: {'; '.join(status.waits) or 'nothing'}"
                    f"{late if lease >= limit else ''}"
                )

    # -- the file -----------------------------------------------------------------------------------------------------------

    async def _write(self, folder: Path, situation: Situation) -> None:
        """Write in a thread, since a disk may hang; no second one is begun meanwhile. If a disk is full the log says so, once."""
        if self._writing is not None and not self._writing.done():
            return
        self._writing = asyncio.create_task(self._written(folder, situation))
        await asyncio.wait([self._writing], timeout=SECONDS)

    async def _written(self, folder: Path, situation: Situation) -> None:
        try:
            await asyncio.to_thread(write_situation, folder, situation)
        except OSError as error:
            if error.strerror != self._why_unwritten:
                self._why_unwritten = error.strerror or str(error)
                self._driver.log(f"`asyncflow why` knows nothing new of this run: {folder}: {self._why_unwritten}")


def _timeless(cause: str) -> str:
    """The words without their numbers of seconds, by which a cause is known for the one that was told before."""
    return "".join(word for word in cause.split() if not word.replace(".", "").rstrip("),;").isdigit())
