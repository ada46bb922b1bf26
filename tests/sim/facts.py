"""What the simulation knows for certain, and the laws that it holds the queue to."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from asyncflow.transfer_queue.schema import DEAD, FILTERED
from asyncflow.types import GroupMeta


class Violation(AssertionError):
    """A law was broken."""


class Facts:
    """Rows are told apart by their index over the whole simulation: none is ever put again after its end."""

    def __init__(self, group_bits: int, max_failures: int) -> None:
        self.group_bits, self.max_failures = group_bits, max_failures
        self.metas: dict[int, GroupMeta] = {}
        self.acknowledged: set[int] = set()  # groups whose put has returned
        self.present: dict[int, set[int]] = defaultdict(set)  # unit -> rows stored there, by the storage's own account
        self.ever_present: dict[int, set[int]] = defaultdict(set)
        self.being_stored: set[tuple[int, int, str]] = set()  # unit, row or group, column
        self.values: dict[tuple[int, str], Any] = {}  # (row or group, column) -> what was stored first
        self.kept: dict[int, tuple[int, ...]] = {}  # row -> the outputs whose writer was told that they are kept
        self.failures: Counter[int] = Counter()
        self.errors: dict[int, set[str]] = defaultdict(set)
        self.dead: dict[int, str] = {}
        self.filtered: dict[int, str] = {}
        self.to_filter: set[int] = set()
        self.trained: Counter[int] = Counter()
        self.done: set[int] = set()  # rows with the mark of the train task
        self.dropped: set[int] = set()  # rows that somebody asked to drop
        self.freed_rows: set[int] = set()
        self.lost: set[int] = set()  # gone with the memory of a unit
        self.ever_lost: set[int] = set()
        self.named: dict[str, set[int]] = defaultdict(set)  # task -> rows that its controllers have named as lost
        self.violations: list[str] = []

    def violated(self, law: str) -> None:
        self.violations.append(law)

    def rows(self, group: int) -> list[int]:
        first = group << self.group_bits
        return list(range(first, first + self.metas[group].size))

    # -- what the storages tell ---------------------------------------------------------------------------------------------

    def about_to_store(self, unit: int, key: int, name: str, value: Any) -> None:
        group = key if name == "prompt" else key >> self.group_bits
        if (unit, key, name) in self.being_stored:
            self.violated(f"column {name!r} of {key} is written twice at once")
        self.being_stored.add((unit, key, name))
        if (key, name) in self.values and name not in ("prompt",) and key in self.present[unit]:
            self.violated(f"column {name!r} of row {key} is written again: {self.values[key, name]}, then {value}")
        if all(row in self.freed_rows for row in self.rows(group)):
            self.violated(f"group {group}, whose rows have all been dropped, is stored again ({name!r})")

    def admitted(self, unit: int, meta: GroupMeta) -> None:
        rows = set(self.rows(meta.group))
        self.present[unit] |= rows
        self.ever_present[unit] |= rows
        self.lost -= rows

    def stored(self, unit: int, key: int, name: str, value: Any) -> None:
        self.values[key, name] = value
        if name == DEAD:
            self.dead[key] = value
            if value not in self.errors[key]:
                self.violated(f"row {key} is dead for {value!r}, which nobody said")
            if self.failures[key] < self.max_failures:
                self.violated(f"row {key} is dead after {self.failures[key]} of {self.max_failures} failures")
        elif name == FILTERED:
            self.filtered[key] = value
            if key not in self.to_filter:
                self.violated(f"row {key} is filtered, and nobody has asked for that")
        elif name == "done/train":
            self.done.add(key)

    def freed(self, unit: int, rows: Iterable[int], groups: Iterable[int]) -> None:
        for row in rows:
            if row not in self.dropped:
                self.violated(f"row {row} is freed, and nobody has asked for that")
            self.present[unit].discard(row)
            self.freed_rows.add(row)

    def recovered(self, unit: int, rows: list[int], found: dict[tuple[str, int, str], Any]) -> None:
        """A durable storage was opened again: all that it had acknowledged is there, as it was."""
        if missing := sorted(self.present[unit] - set(rows) - self.dropped):
            self.violated(f"unit {unit} was restarted and its durable storage has lost rows {missing}")
        there = {(key, name): value for (_, key, name), value in found.items()}
        for (key, name), value in self.values.items():
            row = key << self.group_bits if name == "prompt" else key
            if row in self.present[unit] and row in rows and there.get((key, name)) != value:
                self.violated(f"{name!r} of {key} was {value} and is {there.get((key, name))} after a restart of unit {unit}")
        for key, name in there:
            if (key, name) not in self.values:  # written and never acknowledged
                self.stored(unit, key, name, there[key, name])
        self.present[unit] = set(rows) - self.freed_rows

    def died(self, unit: int) -> None:
        """Whatever a unit's process was writing, it writes no more."""
        self.being_stored = {entry for entry in self.being_stored if entry[0] != unit}

    def memory_died(self, unit: int) -> set[int]:
        """All that a unit had is gone, and all that it knew of what it had once. Rows whose put was not acknowledged will be put
        again, and nobody can know that they are not new: these are returned."""
        again = {row for row in self.ever_present[unit] if row >> self.group_bits not in self.acknowledged}
        self.lost |= self.present[unit]
        self.ever_lost |= self.present[unit] | again
        self.freed_rows -= again
        for row in again:
            self.trained.pop(row, None)
        for row in self.present[unit] | again:
            for name in [name for key, name in self.values if key == row and name != "prompt"]:
                del self.values[row, name]
            self.done.discard(row)
            self.dead.pop(row, None)
            self.filtered.pop(row, None)
            self.kept.pop(row, None)
        self.present[unit] = set()
        return again

    # -- what the clients tell ----------------------------------------------------------------------------------------------

    def told_kept(self, row: int, value: tuple[int, ...]) -> None:
        """A writer was told that its outputs of a row are the ones."""
        if row in self.kept and self.kept[row] != value:
            self.violated(f"two writers of row {row} were told that their outputs are kept: {self.kept[row]} and {value}")
        self.kept[row] = value
        if (row, "ids") in self.values and self.values[row, "ids"] != value:
            self.violated(f"the writer of {value} for row {row} was told that it is kept, and {self.values[row, 'ids']} is")

    def train(self, rows: Iterable[int]) -> None:
        """The effect of rows, once and for all."""
        for row in rows:
            self.trained[row] += 1
            if self.trained[row] > 1:
                self.violated(f"row {row} has been trained {self.trained[row]} times")

    def has_ended(self, row: int) -> bool:
        return row in self.trained or row in self.done or row in self.dead or row in self.filtered or row in self.lost

    # -- the end ------------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Every acknowledged row has ended, or is there."""
        there = set().union(*self.present.values())
        for group in sorted(self.acknowledged):
            for row in self.rows(group):
                if not self.has_ended(row) and row not in there:
                    self.violated(f"row {row} was acknowledged, has come to no end, and is nowhere")
