"""Choice of a step's members among its candidates, where a step wants groups whose rewards vary. Pure.

Candidates are consecutive prompts. The members are the first B of them, in the order of their numbers, that vary: so it depends on
rewards alone, and not on which worker was fast. A candidate is a member as soon as that is certain, which is when fewer than B of
those before it vary or are undecided; so training streams. Candidates behind the last member are surplus, whatever they are
worth: how many there are is timing, and their prompts come again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Decided:
    """Decisions on a step's candidates that have become certain. `members`: groups, with their places among the members where
    mini-batches are cut by them (else 0); `degenerate`: groups that never train; `left`: rows that nobody needs any more. When
    the last member is known (`is_settled`): the `surplus` behind it, and how many rows its degenerate groups and its surplus had
    in all."""

    members: dict[int, int]
    degenerate: list[int]
    left: list[int]
    is_settled: bool = False
    surplus: list[int] = field(default_factory=list)
    num_degenerate_rows: int = 0
    num_surplus_rows: int = 0


class Candidates:
    """Candidates of a step that is to have `wanted` members. `has_places`: a member's place must be known (it decides its
    mini-batch), so it is one only when all candidates before it are decided."""

    def __init__(self, wanted: int, *, has_places: bool = False) -> None:
        self._wanted, self._has_places = wanted, has_places
        self.rows: dict[int, set[int]] = {}  # by group, in order: those that have not failed
        self.members: set[int] = set()
        self._is_varied: dict[int, bool | None] = {}  # None: undecided
        self._dropped: set[int] = set()  # what has been told to be degenerate

    def add(self, group: int, rows: Iterable[int]) -> None:
        """Add a candidate, with its rows. Groups are added in the order of their numbers."""
        self.rows[group], self._is_varied[group] = set(rows), None

    def decide(self, group: int, *, is_varied: bool) -> None:
        """Decide on a group whose rewards are known. A decision stays."""
        if self._is_varied[group] is None:
            self._is_varied[group] = is_varied

    def fail(self, group: int, row: int) -> bool:
        """Take note that a row will never have a reward; with the last of them the group is degenerate. False: it had failed
        already."""
        rows = self.rows[group]
        if row not in rows:
            return False
        rows.remove(row)
        if not rows:
            self.decide(group, is_varied=False)
        return True

    @property
    def num_left(self) -> int:
        """Members that are not known yet."""
        return self._wanted - len(self.members)

    @property
    def num_varied(self) -> int:
        """Candidates whose rewards vary, as far as is known."""
        return sum(is_varied is True for is_varied in self._is_varied.values())

    @property
    def num_missing(self) -> int:
        """Number of candidates that the step lacks, even if all undecided ones vary."""
        return max(0, self._wanted - sum(is_varied is not False for is_varied in self._is_varied.values()))

    def newly_decided(self) -> Decided | None:
        """Decisions that have become certain since the last call; None if there are none."""
        if not self.num_left:
            return None
        members = self._new_members()
        self.members.update(members)
        degenerate = [g for g, is_varied in self._is_varied.items() if is_varied is False and g not in self._dropped]
        self._dropped.update(degenerate)
        if not self.num_left:
            return self._settled(members, degenerate)
        return Decided(members, degenerate, self._rows_of(degenerate)) if members or degenerate else None

    def _new_members(self) -> dict[int, int]:
        """Groups that are certain to be members by now, and were not before, with their places."""
        place, is_exact, members = 0, True, dict[int, int]()  # the place if all undecided ones vary, and whether there are none
        for group, is_varied in self._is_varied.items():
            if is_varied and group not in self.members and (is_exact or not self._has_places):
                members[group] = place if self._has_places else 0
            place, is_exact = place + (is_varied is not False), is_exact and is_varied is not None
            if place == self._wanted:
                break
        return members

    def _settled(self, members: dict[int, int], degenerate: list[int]) -> Decided:
        last = max(self.members)
        surplus = [group for group in self.rows if group > last]
        before = [group for group in self.rows if group < last and group not in self.members]
        return Decided(
            members,
            [group for group in degenerate if group < last],
            self._rows_of([*degenerate, *(group for group in surplus if group not in self._dropped)]),
            is_settled=True,
            surplus=surplus,
            num_degenerate_rows=len(self._rows_of(before)),
            num_surplus_rows=len(self._rows_of(surplus)),
        )

    def _rows_of(self, groups: Iterable[int]) -> list[int]:
        return [row for group in groups for row in sorted(self.rows[group])]


def num_to_admit(num_missing: int, oversampling: float) -> int:
    """Number of candidates to admit when `num_missing` are missing: `oversampling` times as many, rounded up."""
    return math.ceil(num_missing * oversampling)
