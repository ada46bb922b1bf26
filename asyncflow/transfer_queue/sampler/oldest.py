"""First come, first served: requests in the order of their arrival, rows in the order of their readiness.

`whole_groups` is the same, for algorithms whose advantages compare the rows of a group: it refuses a task that would split one. The
rows of a group are told by their group number, never by where they lie: rows may come, fail and be dropped in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asyncflow.transfer_queue.leases import Pick, Want
from asyncflow.transfer_queue.sampler.base import is_enough
from asyncflow.transfer_queue.schema import TaskSpec
from asyncflow.transfer_queue.table import Table


class Oldest:
    """Sampler that serves the oldest request first, with the rows that have been ready longest."""

    def check(self, spec: TaskSpec, want: Want) -> None:
        """Accept every request."""

    def assign(self, table: Table, wants: Sequence[tuple[str, Want]]) -> Iterator[tuple[int, Pick]]:
        """See `Sampler.assign`."""
        for position, (_, want) in enumerate(wants):
            if is_enough(table, want) and (pick := table.ready.take(want)) is not None:
                yield position, pick


class WholeGroups(Oldest):
    """Sampler of tasks that take whole groups alone, the oldest first."""

    def check(self, spec: TaskSpec, want: Want) -> None:
        """Raises `ValueError` for a task that is not of whole groups."""
        if not spec.whole_groups:
            raise ValueError(f"the sampler whole_groups is chosen for task {spec.name!r}, which may split groups")
