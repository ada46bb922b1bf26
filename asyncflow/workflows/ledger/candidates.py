"""Which of a step's candidates become its members, where a step wants groups whose rewards vary. Pure.

Candidates are consecutive prompts. The members are the first B of them, in the order of their numbers, that vary: so it depends on
rewards alone, and not on who was fast. A candidate is a member as soon as that is certain, which is when fewer than B of those
before it vary or are undecided; so training streams. Candidates behind the last member are surplus, whatever they are worth: how
many there are is timing, and their prompts come again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sifted:
    """What has become certain of a step. `members`: groups, with their places among the members (where those matter, else 0);
    `degenerate`: groups that never train. Of a step that `is_settled` by this: its `surplus`, and how many rows that were not given
    up its degenerate groups had, and its surplus. `left`: the rows that nobody needs any more."""

    members: dict[int, int] = field(default_factory=dict)
    degenerate: list[int] = field(default_factory=list)
    surplus: list[int] = field(default_factory=list)
    is_settled: bool = False
    degenerate_rows: int = 0
    surplus_rows: int = 0
    left: list[int] = field(default_factory=list)


class Candidates:
    """Of a step that is to have `wanted` members. `has_places`: a member's place must be known (it decides its mini-batch), so it
    is one only when all candidates before it are decided."""

    def __init__(self, wanted: int, *, has_places: bool = False) -> None:
        self._wanted, self._has_places = wanted, has_places
        self.rows: dict[int, set[int]] = {}  # by group: those that are not given up
        self.members: dict[int, int] = {}
        self._verdicts: dict[int, bool | None] = {}  # None: undecided
        self._is_out: set[int] = set()  # what is known to be degenerate, and has been told

    def add(self, group: int, rows: Iterable[int]) -> None:
        """One more. Their numbers rise."""
        self.rows[group], self._verdicts[group] = set(rows), None

    def judge(self, group: int, *, is_varied: bool) -> None:
        """Its rewards are known. What is decided stays so."""
        if self._verdicts.get(group, False) is None:
            self._verdicts[group] = is_varied

    def give_up(self, group: int, row: int) -> bool:
        """A row will never have a reward; with the last of them the group is degenerate. False: it is none of an open candidate."""
        rows = self.rows.get(group, set())
        if row not in rows:
            return False
        rows.remove(row)
        if not rows:
            self.judge(group, is_varied=False)
        return True

    @property
    def num_left(self) -> int:
        """Members that are not known yet."""
        return self._wanted - len(self.members)

    @property
    def is_settled(self) -> bool:
        return not self.num_left

    @property
    def num_varied(self) -> int:
        """Candidates that may be members, as far as is known."""
        return sum(verdict is True for verdict in self._verdicts.values())

    @property
    def num_missing(self) -> int:
        """So many candidates are too few, even if all that are undecided vary."""
        return max(0, self._wanted - sum(verdict is not False for verdict in self._verdicts.values()))

    def sift(self) -> Sifted:
        """What has become certain since the last time."""
        if self.is_settled:
            return Sifted()
        place, is_exact, members = 0, True, dict[int, int]()
        for group, verdict in sorted(self._verdicts.items()):
            if place == self._wanted:
                break
            if verdict is False:
                continue
            if verdict and group not in self.members and (is_exact or not self._has_places):
                members[group] = place if self._has_places else 0
            place, is_exact = place + 1, is_exact and verdict is not None
        self.members |= members
        if self.is_settled:
            return self._settled(members)
        degenerate = [g for g, verdict in self._verdicts.items() if verdict is False and g not in self._is_out]
        self._is_out.update(degenerate)
        return Sifted(members, degenerate, left=self._rows_of(degenerate))

    def _settled(self, members: dict[int, int]) -> Sifted:
        last = max(self.members)
        before = [g for g in self._verdicts if g < last and g not in self.members]
        surplus = [g for g in self._verdicts if g > last]
        degenerate = [g for g in before if g not in self._is_out]
        return Sifted(
            members,
            degenerate,
            surplus,
            is_settled=True,
            degenerate_rows=len(self._rows_of(before)),
            surplus_rows=len(self._rows_of(surplus)),
            left=self._rows_of([*degenerate, *surplus]),
        )

    def _rows_of(self, groups: Iterable[int]) -> list[int]:
        return [row for group in groups for row in sorted(self.rows[group])]


def num_to_admit(num_missing: int, oversampling: float) -> int:
    """How many candidates to take for so many that are missing."""
    return math.ceil(num_missing * oversampling)
