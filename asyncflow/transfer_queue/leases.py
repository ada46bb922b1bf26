"""The words of leasing: what is asked for, what is handed out, and what has ended."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import msgspec

from asyncflow.types import GroupMeta, RunError, crosses

Pick = list[tuple[int, list[int]]]
"""Choice of a sampler for a request: group numbers and, for each, its rows. It is to be handed out."""


class Want(msgspec.Struct, frozen=True):
    """Rows that a request asks for: limits (0: none), of which a table needs one at least, and what may be in it."""

    groups: int = 0
    """Groups touched."""
    rows: int = 0
    tokens: int = 0
    at_least: int = 1
    """Rows that must be available before the request is served, unless it can never get more."""
    installed: int | None = None
    """Only groups whose interval contains it."""
    partition: int | None = None
    """Only that partition."""
    rank: int = 0
    """The data-parallel rank that asks, for samplers that serve all ranks together."""

    def allows(self, meta: GroupMeta) -> bool:
        """Whether a group may be in what it gets."""
        return (self.partition is None or meta.partition == self.partition) and (
            self.installed is None or self.installed in meta.interval
        )


class Token(msgspec.Struct, frozen=True, array_like=True):
    """Names a lease, and the incarnation of the controller that gave it."""

    task: str
    incarnation: str
    lease: int


class Lease(msgspec.Struct, frozen=True):
    """Rows handed out together. For each group: its rows, how often each had been delivered before, the unit it lives on."""

    token: Token
    groups: list[GroupMeta]
    rows: list[list[int]]
    deliveries: list[list[int]]
    units: list[int]

    @property
    def indices(self) -> list[int]:
        """Rows of the lease."""
        return [row for rows in self.rows for row in rows]

    @property
    def most_deliveries(self) -> int:
        """Number of earlier deliveries of its most delivered row."""
        return max((number for numbers in self.deliveries for number in numbers), default=0)

    def by_unit(self) -> dict[int, list[int]]:
        """Rows of the lease, by the unit they live on."""
        found: dict[int, list[int]] = {}
        for unit, rows in zip(self.units, self.rows, strict=True):
            found.setdefault(unit, []).extend(rows)
        return found

    def part(self, rows: Container[int]) -> Lease | None:
        """Lease of those of its rows that are among these; None if there are none."""
        kept = [[i for i, row in enumerate(of_group) if row in rows] for of_group in self.rows]
        groups = [g for g, places in enumerate(kept) if places]
        if not groups:
            return None
        return Lease(
            self.token,
            [self.groups[g] for g in groups],
            [[self.rows[g][i] for i in kept[g]] for g in groups],
            [[self.deliveries[g][i] for i in kept[g]] for g in groups],
            [self.units[g] for g in groups],
        )


class DeadRow(msgspec.Struct, frozen=True):
    """Row that failed for good, and why."""

    group: int
    row: int
    error: str


class ReadyGroup(NamedTuple):
    """A group that could be handed out: its ready rows, and the tokens of each."""

    group: int
    rows: list[int]
    tokens: list[int]


@crosses
class StaleToken(RunError):
    """The lease is over, or was given by an earlier incarnation of the controller."""
