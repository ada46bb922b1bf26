"""A run that a service hosts: not begun, under way, or over. What a call of the API does beside calling the run is here.

consumes: calls of clients
waits for: the run
is unblocked by: the run, or its end
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final, Literal

from asyncflow.cluster.base import WorkerDied
from asyncflow.config import Config
from asyncflow.engines.train import OUTSIDE
from asyncflow.engines.train.experience import Published
from asyncflow.loops.samples import EVALUATION_GROUPS
from asyncflow.model_folder import read_json
from asyncflow.run.job import Listener
from asyncflow.run.state.resume import metrics_of
from asyncflow.run.stepwise import StepwiseRun
from asyncflow.run.watch import Status
from asyncflow.run_dir import RunDir
from asyncflow.service.workers import GONE, OutsideWorkers, TrainerSession
from asyncflow.settings import Choice
from asyncflow.types import Array, Batch, RunError, UserError, first_error

EnginePlace = Literal["own", "outside"]
"""Place of an engine: started by the run, or provided by clients."""
WATCH_SECONDS: Final = 5.0  # in which what watches a run has seen that it is interrupted
FAREWELL_SECONDS: Final = 5.0
"""Seconds in which a client that generates makes another request: `asyncflow join` makes one every 2 s."""


class HostedRun:
    """The one run of a service. `over` is set when it has been stopped, by a client or because it failed: `failure` says why."""

    def __init__(
        self,
        config: Config,
        journal: Path,
        listener: Listener | None = None,
        *,
        resume: bool = False,
        weights_from: Path | None = None,
    ) -> None:
        """`journal`: a folder for what clients were told is safe. `weights_from`: one below which clients may name weights, beside
        that of all runs."""
        self.config, self._journal, self._weights_from = config, journal, weights_from
        self.over = asyncio.Event()
        self._listener, self._resume = listener, resume
        self._places: dict[str, EnginePlace] = {}
        self._run: StepwiseRun | None = None
        self._workers: OutsideWorkers | None = None
        self.failure, self._is_stopping = "", False
        self._watching: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._last_requests: dict[str, float] = {}  # of clients that generated, when the run was over
        self._know_end: set[str] = set()  # of these, those who know it
        self._lock = asyncio.Lock()  # of what changes the run as a whole
        self.uploading = asyncio.Lock()  # weights, by one client at a time

    # -- the run as a whole -------------------------------------------------------------------------------------------------

    async def init_engines(self, rollout: EnginePlace | None = None, train: EnginePlace | None = None) -> int | None:
        """Say where engines are, and start the run when both are known: in one call or one by one. Without any the configuration
        says it. Returns the step that the run begins with; None while an engine is still to be named.

        Raises `UserError` for what cannot be, and for an engine that is named anew when the run has begun.
        """
        async with self._lock:
            named: dict[str, EnginePlace] = {
                name: place for name, place in (("rollout", rollout), ("train", train)) if place is not None
            }
            if self._run is not None:
                if changed := [name for name, place in named.items() if self._places.get(name, place) != place]:
                    raise UserError(f"the run has begun with the {changed[0]} engine {self._places[changed[0]]}")
                return self._run.steps_done
            self._places |= named
            if len(self._places) == 1:
                return None
            await self._start(_with_engines(self.config, self._places))
            return self.run.steps_done

    async def _start(self, config: Config) -> None:
        run = StepwiseRun(config, self._listener, resume=self._resume, journal=self._journal, between=self._between_attempts)
        await run.start()
        if run.job.driver is None:
            self.over.set()
            raise UserError(f"this run is finished already: raise run.steps to continue, or serve another one ({config.run_dir})")
        self.config, self._run = config, run
        self._take_workers(run)
        if config.train.engine.name == OUTSIDE:
            run.allow(config.run.steps)  # the client that trains says when
        self._watching = asyncio.create_task(self._watch(run))

    def _take_workers(self, run: StepwiseRun) -> None:
        """Let clients work for the attempt that is under way."""
        model = run.job.prepared.model
        vocabulary = int(read_json(model / "config.json")["vocab_size"])
        self._workers = OutsideWorkers(run.driver, model, vocabulary, self._kept)

    @contextlib.asynccontextmanager
    async def _between_attempts(self) -> AsyncIterator[None]:
        """End the sessions of an attempt's clients, as those of a server that was killed: they join the next attempt."""
        workers, self._workers = self._workers, None
        if workers is not None:
            await workers.close(GONE)
        yield
        self._take_workers(self.run)

    async def under_way(self) -> None:
        """Wait while the run is resumed after a worker's death: a request that comes meanwhile is answered by the next attempt."""
        if self._run is not None and self._run.is_resuming:
            await self._run.under_way()

    async def _watch(self, run: StepwiseRun) -> None:
        """Notice that a worker has died, or the run has failed, also while nobody waits for it: resume it, or stop."""
        try:
            await run.until(lambda: False)
        except Exception as error:  # whatever it is, the run is over
            self.failure = str(first_error(error))
            self._begin_to_stop()

    async def step(self) -> Mapping[str, float] | None:
        """Train one step; see `Trainer.step`."""
        async with self._lock:
            return await self.run.step()

    async def scale_rollout(self, num_workers: int, grace_seconds: float) -> str:
        """See `Trainer.scale_rollout`."""
        if not self.run.config.rollout.num_workers:
            raise UserError("generators of this run come from outside: they join and leave by themselves")
        return await self.run.scale_rollout(num_workers, grace_seconds)

    async def status(self) -> Status | None:
        """State of the run; None before it has begun, and when it is over."""
        run = self._run
        if run is None or run.job.attempt is None or self._is_stopping:
            return None
        return await run.job.attempt.watch.status()

    async def metrics(self) -> str:
        """The queue's metrics in Prometheus' text form; none where there is no run."""
        run = self._run
        return "" if run is None or run.job.driver is None else await run.job.driver.transfer_queue.metrics()

    def steps(self, first: int) -> dict[int, Mapping[str, float]]:
        """Metrics of the committed steps from this one on."""
        return {} if self._run is None else self._run.job.rows.since(first)

    def check_may_stop(self) -> None:
        """Check that nothing is left to be written of a run that an earlier server has begun. Raises `RunError` where this one has
        yet to begin it: a client may ask again whose first request to stop was lost with that server."""
        if not self._resume or self._run is not None or self._is_stopping:
            return
        run_dir = self.config.run_dir
        committed = max((row["step"] for row in metrics_of(run_dir)), default=-1) + 1
        if committed and RunDir(run_dir).model_version != committed:
            raise RunError(
                f"the run in {run_dir} has {committed} steps, and its model is yet to be written: call init_engines first, which "
                f"resumes it, or end the server by a signal"
            )

    async def stop(self) -> None:
        """Stop the run, if it is under way; model, trace and report are written. All callers wait for one end, and a caller that is
        cancelled does not end it. Raises what kept it from being in order, which `failure` says, too."""
        await asyncio.shield(self._begin_to_stop())

    def _begin_to_stop(self) -> asyncio.Task[None]:
        self._is_stopping = True
        self._ending = self._ending or asyncio.create_task(self._stop())
        return self._ending

    async def _stop(self) -> None:
        if self._run is not None:
            self._run.job.interrupt()  # a request that waits for a step is told
            await self.under_way()
        if self._watching is not None:
            await asyncio.wait([self._watching], timeout=WATCH_SECONDS)  # it is interrupted, too: cancelled, it would be in haste
            self._watching.cancel()
        async with self._lock:
            try:
                if self._workers is not None:
                    self._last_requests = self._workers.last_requests
                    await self._workers.close()
                    self._workers = None
                if self._run is not None:
                    await self._run.stop()
                    if self._run.job.journal is not None:
                        self._run.job.journal.close()
            except Exception as error:
                self.failure = self.failure or f"the run has not ended in order: {first_error(error)}"
                raise
            finally:  # on a full disk nothing can be written any more: the server ends all the same
                self.over.set()

    async def farewell(self) -> None:
        """Wait until clients that generated know that the run is over, as the answer to their next request says. One that makes no
        request any more is not waited for."""
        now = asyncio.get_running_loop().time
        while any(now() < last + FAREWELL_SECONDS for own_id, last in self._last_requests.items() if own_id not in self._know_end):
            await asyncio.sleep(0.02)

    def is_over_for(self, own_id: str) -> bool:
        """Whether the run is over, or about to be, which the client of this id is told now."""
        if self._is_stopping:
            self.end_is_known(own_id)
        return self._is_stopping

    def end_is_known(self, own_id: str) -> None:
        """Take note that a client that generated knows that the run is over."""
        self._know_end.add(own_id)

    # -- training from outside ----------------------------------------------------------------------------------------------

    async def publish(self, step: int, published: Published, timeout_seconds: float) -> int:
        """Weights that a step has made become the next version. Returns it when the step is committed.

        Where a checkpoint of it is due, that is when the checkpoint is whole: whatever happens then, no acknowledged row is lost.
        """
        run = self.run
        driver = run.driver
        self._check_trained_outside()
        if self.is_published(step):
            return step + 1
        await driver.desk.publish(step, published)
        every = run.config.checkpoint.every_steps
        is_kept = bool(run.config.checkpoint.keep) and every is not None and (step + 1) % every == 0

        def is_safe() -> bool:
            return step in run.job.rows and (not is_kept or driver.saves.settled > step)

        try:
            async with asyncio.timeout(timeout_seconds):
                if not await run.until_here(is_safe):
                    raise RunError(f"the run was interrupted in step {step}")
        except WorkerDied as death:  # another attempt is under way, and knows whether the step is committed
            if not self.is_published(step):
                raise RunError(f"step {step} was not committed: {death}; the run was resumed: train the step again") from death
        except TimeoutError as error:
            raise RunError(f"step {step} is not committed within {timeout_seconds:g} s: ask for the status") from error
        run.steps_done = max(run.steps_done, step + 1)
        return step + 1

    def is_published(self, step: int) -> bool:
        """Whether the step is committed: a client that publishes it again has not heard the answer."""
        return step < self.run.driver.ledger.ledger.committed

    def begin_training(self, *, is_fresh: bool) -> TrainerSession:
        """Take a client that trains; see `OutsideWorkers.begin_training`."""
        self._check_trained_outside()
        return self.workers.begin_training(is_fresh=is_fresh)

    def readable(self, path: Path) -> Path:
        """Path of weights on this machine that a client may name: below the folder of all runs, or below `weights_from`. Raises
        `UserError` for any other."""
        found, allowed = path.resolve(), [self.config.run.dir, *([self._weights_from] if self._weights_from else [])]
        if not any(found.is_relative_to(folder.resolve()) for folder in allowed):
            raise UserError(f"weights are read from below {' or '.join(map(str, allowed))} alone (asyncflow serve --weights-from)")
        if not found.exists():
            raise UserError(f"there is nothing at {path}")
        return found

    def upload_file(self, step: int) -> Path:
        """Name for weights that come over the wire, beside those that travel. Raises `RunError` where they are not wanted."""
        self._check_trained_outside()
        self.run.driver.desk.check(step)
        return self.run.job.weights_dir / f"upload-{uuid.uuid4().hex}.safetensors"

    @property
    def most_weight_bytes(self) -> int:
        """Bytes that weights may have: those of the model in float32, and a head that is tied, and names."""
        num_bytes = sum(file.stat().st_size for file in self.run.job.prepared.model.glob("*.safetensors"))
        return 4 * num_bytes + (1 << 20)

    def _check_trained_outside(self) -> None:
        if self.run.config.train.engine.name != OUTSIDE:
            raise UserError("this run trains by itself: set train.engine=outside, or init_engines(train='outside'), to train it")

    # -- inside -------------------------------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether the run has been started; it may be over."""
        return self._run is not None

    @property
    def run(self) -> StepwiseRun:
        """The run, once it has begun. Raises `RunError`."""
        if self._run is None:
            raise RunError("this run has not begun: call init_engines first")
        return self._run

    @property
    def workers(self) -> OutsideWorkers:
        """Clients that work for the run. Raises `RunError` where it is not under way."""
        if self._workers is None:
            raise RunError("this run is not under way: call init_engines first, or start the server again")
        return self._workers

    def _kept(self, rows: Batch, hashes: Array) -> None:
        """Record stored rows of an outside generator, with the hashes of their prompts."""
        job, driver = self.run.job, self.run.driver
        assert job.journal is not None
        if rows.indices[0] >> driver.shape.group_bits < EVALUATION_GROUPS:
            job.journal.add_rows(rows, hashes)
            job.journal.shorten(driver.saves.newest * driver.shape.numbers_per_step)


def _with_engines(config: Config, places: Mapping[str, EnginePlace]) -> Config:
    """The configuration with engines where a client has said."""
    rollout, train = config.rollout, config.train
    if places.get("rollout") == "outside":
        rollout = rollout.model_copy(update={"num_workers": 0})
    elif places.get("rollout") == "own" and not rollout.num_workers:
        raise UserError("init_engines(rollout='own'), and rollout.num_workers=0: set it to 1 or more")
    if places.get("train") == "outside":
        train = train.model_copy(update={"engine": Choice(name=OUTSIDE)})
    elif places.get("train") == "own" and train.engine.name == OUTSIDE:
        raise UserError("init_engines(train='own'), and train.engine=outside: name the engine that is to train")
    return config.model_copy(update={"rollout": rollout, "train": train})
