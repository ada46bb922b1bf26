"""`oldest`, for algorithms whose advantages compare the rows of a group: it refuses a task that would split one.

Which rows make a group is told by their group number, never by where they lie: rows may come, fail and be dropped in any order.
"""

from __future__ import annotations

from asyncflow.transfer_queue.leases import Want
from asyncflow.transfer_queue.sampler.oldest import Oldest
from asyncflow.transfer_queue.schema import TaskSpec


class WholeGroups(Oldest):
    """Sampler of tasks that take whole groups alone, the oldest first."""

    def check(self, spec: TaskSpec, want: Want) -> None:
        """Raises `ValueError` for a task that is not of whole groups."""
        if not spec.whole_groups:
            raise ValueError(f"the sampler whole_groups is chosen for task {spec.name!r}, which may split groups")
