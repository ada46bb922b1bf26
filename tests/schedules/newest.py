"""A sampler that turns the order around: of what a request may have, it gets what became ready last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asyncflow.transfer_queue.leases import Pick, Want
from asyncflow.transfer_queue.sampler.base import is_enough
from asyncflow.transfer_queue.schema import TaskSpec
from asyncflow.transfer_queue.table import Table

EVERYTHING = 1 << 20


class Newest:
    def check(self, spec: TaskSpec, want: Want) -> None:
        """Serves requests for groups, as all of a run's are."""
        assert want.groups

    def assign(self, table: Table, wants: Sequence[tuple[str, Want]]) -> Iterator[tuple[int, Pick]]:
        for position, (_, want) in enumerate(wants):
            if is_enough(table, want):
                ready = table.ready.peek(want, EVERYTHING)[-want.groups :]
                yield position, table.ready.take_exactly([group.group for group in reversed(ready)])
