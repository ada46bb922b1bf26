"""Progress of the samples as schedules see it: the ledger's answers, and those of the queue's tables. Implements `Progress`."""

from __future__ import annotations

from collections.abc import Mapping

from asyncflow.control.ledger import Ledger
from asyncflow.transfer_queue.controller import Controller


class ProgressView:
    """The ledger's answers, and those of the controllers of the same process. `task`: the one that makes responses."""

    def __init__(self, ledger: Ledger, controllers: Mapping[str, Controller], task: str = "rollout") -> None:
        self._ledger, self._controllers, self._task = ledger, controllers, task
        self.is_done, self.task_before = ledger.is_done, ledger.tasks.task_before

    @property
    def committed(self) -> int:
        """See `Progress.committed`."""
        return self._ledger.committed

    def unfinished(self, version: int) -> int:
        """See `Progress.unfinished`."""
        return self._ledger.unfinished(version)

    def unleased(self, version: int) -> int:
        """See `Progress.unleased`."""
        return self._controllers[self._task].table.ready.for_none_after(version) + self._ledger.to_come(version)

    def oldest_unleased(self, at_least: int) -> int | None:
        """See `Progress.oldest_unleased`."""
        return self._controllers[self._task].table.ready.last_version(at_least)

    def ready(self, task: str) -> int:
        """See `Progress.ready`."""
        return self._controllers[task].table.counts()["ready"] + self._ledger.offered(task)
