"""What schedules look at: the ledger, and the queue's own tables where these know it better. Implements `Progress`."""

from __future__ import annotations

from collections.abc import Mapping

from asyncflow.transfer_queue.controller import Controller
from asyncflow.workflows.ledger import Ledger


class Books:
    """The ledger's answers, and those of the controllers of the same process."""

    def __init__(self, ledger: Ledger, controllers: Mapping[str, Controller]) -> None:
        self._ledger, self._controllers = ledger, controllers
        self.is_done, self.task_before, self.unfinished = ledger.is_done, ledger.task_before, ledger.unfinished

    @property
    def committed(self) -> int:
        return self._ledger.committed

    def unleased(self, version: int) -> int:
        return self._controllers["rollout"].table.ready.for_none_after(version) + self._ledger.to_come(version)

    def oldest_unleased(self, at_least: int) -> int | None:
        return self._controllers["rollout"].table.ready.last_version(at_least)

    def ready(self, task: str) -> int:
        return self._controllers[task].table.counts()["ready"]
