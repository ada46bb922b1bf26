"""Generate, then train: the same loops with training waiting for the whole batch."""

from __future__ import annotations

from asyncflow.workflows.periodic import Periodic
from asyncflow.workflows.schedule import Progress


class Synchronous(Periodic):
    """As periodic, but training starts when the step's last response is there."""

    def may_train(self, step: int, progress: Progress) -> bool:
        return progress.is_generated(step)
