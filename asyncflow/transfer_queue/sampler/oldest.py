"""First come, first served: requests in the order of their arrival, rows in the order of their readiness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asyncflow.transfer_queue.leases import Pick, Want
from asyncflow.transfer_queue.sampler.base import is_enough
from asyncflow.transfer_queue.schema import TaskSpec
from asyncflow.transfer_queue.table import Table


class Oldest:
    """Sampler that serves the oldest request first, with the rows that have been ready longest."""

    def check(self, spec: TaskSpec, want: Want) -> None:
        """Serves every one."""

    def assign(self, table: Table, wants: Sequence[tuple[str, Want]]) -> Iterator[tuple[int, Pick]]:
        for position, (_, want) in enumerate(wants):
            if is_enough(table, want) and (pick := table.ready.take(want)) is not None:
                yield position, pick
