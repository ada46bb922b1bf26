"""Rows of metrics, one for each step, in the order of the steps.

a step that is final for all models --> what its workers did (telemetry/hub.py) --> a row --> metrics.jsonl, trackers, the terminal
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping

from asyncflow.control.signal import Signal
from asyncflow.run.context import Listener, RunContext
from asyncflow.run.device_shares import shared_cores
from asyncflow.run.records.training_checks import TrainingChecks
from asyncflow.run.services.cores import FreeCores
from asyncflow.telemetry.attribution import attributed
from asyncflow.telemetry.hub import Hub
from asyncflow.telemetry.metrics import StepMetrics, StepTimes
from asyncflow.telemetry.trackers import OWN_TRACKER, Tracker, make_trackers
from asyncflow.transfer_queue.metrics import run_metrics
from asyncflow.types import RunError
from asyncflow.waits import METRICS


class MetricRows:
    """Rows of a run's metrics."""

    def __init__(
        self,
        context: RunContext,
        hub: Hub,
        checks: TrainingChecks,
        listener: Listener,
        *,
        num_devices: Callable[[float, float], float],
        cores: FreeCores,
        num_resumes: int,
    ) -> None:
        """Open the trackers. `num_devices`: between two moments, on average. `num_resumes`: of the run, so far."""
        self._context, self._config, self._hub, self._checks, self._listener = context, context.config, hub, checks, listener
        self._num_devices, self._cores, self._num_resumes = num_devices, cores, num_resumes
        config = context.config
        names = [OWN_TRACKER, *config.telemetry.trackers]
        self._trackers = make_trackers(names, config.run_dir, config.model_dump(mode="json"), config.run.name)
        self._finishing = asyncio.Lock()
        self._first = self._num_finished = context.ledger.ledger.committed
        self._unwritten = ""  # why a row could not be written
        self._finished = Signal()

    async def finished(self, version: int) -> None:
        """Wait until the metrics of so many steps are written. Raises `RunError` once those of a step could not be."""
        await self._finished.until(lambda: bool(self._unwritten) or self._num_finished >= version, METRICS, version=version)
        if self._num_finished < version:
            raise RunError(self._unwritten)

    async def finish(self, step: int, metrics: StepMetrics, of_critic: StepMetrics | None, times: StepTimes) -> None:
        """Write the row of a step that is final for all models, after those of the steps before. Where one could not be written, no
        later one is."""
        try:
            async with self._finishing:
                if self._unwritten:
                    return
                row = await self._write(step, metrics, of_critic, times)
                self._num_finished = step + 1
                self._listener.step(step, row)
        except BaseException as error:  # a checkpoint may wait for the row
            self._unwritten = self._unwritten or f"the metrics of step {step + 1} could not be written: {str(error) or repr(error)}"
            raise
        finally:
            self._finished.notify()

    def close(self) -> None:
        """Close the trackers."""
        for tracker in self._trackers.values():
            tracker.close()

    async def _write(self, step: int, metrics: StepMetrics, of_critic: StepMetrics | None, times: StepTimes) -> dict[str, float]:
        """The step's row of metrics, once every worker has told what it did until the commit."""
        await self._hub.settle(times.committed)
        window = self._hub.log.window(times.started, times.committed, step)
        spans = attributed(window, begins=step == self._first)
        began = min((s.start for s in spans if s.task == "forward_backward" and s.step == step), default=None)
        devices = self._num_devices(times.started, times.committed)
        own = self._hub.own_metrics
        metrics.add_scorers(own.pop(step, {}))
        row = metrics.row(dataclasses.replace(times, train_began=began), devices, spans)
        if of_critic is not None:
            row |= of_critic.critic_row()
        for before in [each for each in own if each < step]:  # of rows that came too late for it
            del own[before]
        row |= run_metrics(*await self._context.queue.status())
        row |= {f"memory/rss_bytes/{name}": state.rss_bytes for name, state in self._hub.states.items()}
        if (newest := self._context.versions.newest) is not None:
            row["weights/version_bytes"] = newest.num_bytes
        if (attested := self._context.versions.share_attested) is not None:
            row["weights/attested"] = attested
        seconds = self._cores.seconds(spans, times.started, times.committed)
        if (cores := shared_cores(self._config)) is not None and row["perf/step_seconds"]:
            row["perf/cores_busy"] = sum(seconds.values()) / (row["perf/step_seconds"] * cores)
        if (most := self._cores.most_given()) is not None:
            row["perf/threads"] = most
        self._cores.deal(seconds)
        if self._num_resumes:
            row["run/num_resumes"] = self._num_resumes
        self._checks.look_at_metrics(row)
        self._hub.log.flush()
        for name, tracker in list(self._trackers.items()):
            self._log_to(name, tracker, step, row)
        return row

    def _log_to(self, name: str, tracker: Tracker, step: int, row: Mapping[str, float]) -> None:
        """Give the row to a tracker. One that fails gets nothing more, and the run goes on, but for the run's own file."""
        try:
            tracker.log(step, row)
        except Exception as error:
            if name == OWN_TRACKER:
                raise
            del self._trackers[name]
            self._listener.log(f"the tracker {name} failed at step {step + 1} and gets nothing more: {error}")
