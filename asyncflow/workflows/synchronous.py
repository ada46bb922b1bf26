"""One task at a time: the same loops, each waiting for the whole batch of the one before it."""

from __future__ import annotations

from asyncflow.workflows.periodic import Periodic
from asyncflow.workflows.schedule import Progress


class Synchronous(Periodic):
    """As periodic, but a task starts on a step when the task before it has done all of the step's rows."""

    def may_start(self, task: str, step: int, progress: Progress) -> bool:
        return progress.is_done(progress.task_before(task), step)
