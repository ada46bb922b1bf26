"""The contract of a sampler. Pure, like the table that it chooses from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from asyncflow.transfer_queue.leases import Pick, Want
from asyncflow.transfer_queue.schema import TaskSpec
from asyncflow.transfer_queue.table import Table


class Sampler(Protocol):
    """Chooses what parked requests get. It may not keep anything that the table would have to hear of.

    What it chooses among is `table.ready`, which answers a want with what this may have and nothing else: a group of another
    partition, or of an interval without the installed version, is an error. It decides the order, and never what is trained. In a
    run it must give something to somebody as long as something is ready that a parked request may have.
    """

    def check(self, spec: TaskSpec, want: Want) -> None:
        """Raises `ValueError` for a task, or a request, that this sampler cannot serve. Called before the request is parked."""

    def assign(self, table: Table, wants: Sequence[tuple[str, Want]]) -> Iterator[tuple[int, Pick]]:
        """Picks for parked requests (worker name, want; oldest first) that can be served now: (position, pick).

        Called after every change, so it is to be cheap when nothing can be served. Each pick is out of the ready rows when it is
        yielded: the caller hands it out. No position comes twice, no pick is empty.
        """


def is_enough(table: Table, want: Want) -> bool:
    """Whether as many rows are ready as a request waits for: `at_least`, or one if there will be no more of its partition."""
    needed = 1 if table.is_over(want) else max(1, want.at_least)
    return table.ready.available(want, needed) >= needed
