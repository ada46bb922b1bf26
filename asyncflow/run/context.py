"""Objects that the parts of a run's driver share: made once, alive as long as the driver.

Driver --makes--> RunContext --given to--> RunRecord, MetricRows, TrainingChecks, Evaluating, Health, CheckpointCoordinator
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from asyncflow.config import Config
from asyncflow.control.ledger import LedgerService
from asyncflow.control.policy_versions import PolicyVersions
from asyncflow.control.schedule import Schedule
from asyncflow.control.signal import Signal
from asyncflow.loops.evaluation import EvaluationRow
from asyncflow.loops.samples import Shape
from asyncflow.run.background import BackgroundTasks
from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.queue import TransferQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Shared objects of one attempt of a run.

    `queue`: the driver's own client of the queue. `versions`: policy versions of the rollout workers, on which the trainer
    publishes. `signal`: notified by the transfer queue, the ledger and all versions. `clock()`: seconds of the event loop, virtual
    in a simulation. `log(text)`: a message to the user. `progress()`: something has moved, so the run is not stalled.
    """

    config: Config
    shape: Shape
    schedule: Schedule
    transfer_queue: TransferQueue
    queue: TransferQueueClient
    ledger: LedgerService
    versions: PolicyVersions
    background: BackgroundTasks
    signal: Signal
    clock: Callable[[], float]
    log: Callable[[str], None]
    progress: Callable[[], None]


class Listener:
    """Listener to a run: it is called with what happens; the command line draws it. All methods may be left as they are."""

    def log(self, text: str) -> None:
        """Take note of something worth a line."""

    def group(self, step: int) -> None:
        """Event: a group of the step has been trained."""

    def step(self, step: int, row: Mapping[str, float]) -> None:
        """Event: a step is committed; its metrics."""

    def evaluation(self, row: EvaluationRow) -> None:
        """Event: an evaluation is finished; its figures."""
