"""A transfer queue as a dictionary: what the real one has to do, without leases in time, units, messages or storage."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

MAX_FAILURES = 2


@dataclass
class Row:
    """`done`: by the tasks that are. `value`: the output of rollout."""

    value: int | None = None
    end: str = ""  # dead, or filtered
    done: set[str] = field(default_factory=set)


class Model:
    """One task makes rows' values, another one trains on whole groups. Controllers forget failures and leases, never rows."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.gone: set[int] = set()  # groups that were dropped whole
        self.leased: dict[tuple[str, int], set[int]] = {}  # (task, lease) -> rows
        self.deliveries: dict[tuple[str, int], int] = {}
        self.forget("rollout")
        self.forget("train")

    def forget(self, task: str) -> None:
        """The controller of a task is another one now."""
        if task == "rollout":
            self.failures: dict[int, int] = {}
        self.deliveries = {of: n for of, n in self.deliveries.items() if of[0] != task}
        self.leased = {lease: rows for lease, rows in self.leased.items() if lease[0] != task}

    def put(self, group: int, size: int) -> None:
        if group not in self.gone and not any(row >> 2 == group for row in self.rows):
            self.rows |= {(group << 2) + i: Row() for i in range(size)}

    def state(self, task: str, row: int) -> str:
        it = self.rows[row]
        if it.end or task in it.done:
            return it.end or "done"
        if task == "train" and it.value is None:
            return "waiting"
        return "leased" if any(row in rows for (of, _), rows in self.leased.items() if of == task) else "ready"

    def may_be_leased(self, task: str) -> set[int]:
        ready = {row for row in self.rows if self.state(task, row) == "ready"}
        if task == "rollout":
            return ready
        held_up = {row >> 2 for row in self.rows if self.state(task, row) in ("waiting", "leased")}
        return {row for row in ready if row >> 2 not in held_up}

    def lease(self, task: str, lease: int, rows: list[int]) -> list[int]:
        """How often each of the rows had been delivered before."""
        self.leased[task, lease] = set(rows)
        before = [self.deliveries.get((task, row), 0) for row in rows]
        self.deliveries |= {(task, row): n + 1 for row, n in zip(rows, before, strict=True)}
        return before

    def holds(self, task: str, lease: int) -> list[int]:
        held = self.leased.get((task, lease), set())
        return [row for row in held if row in self.rows and self.state(task, row) == "leased"]

    def complete(self, task: str, rows: list[int], value: int) -> list[bool]:
        kept = [row in self.rows and task not in self.rows[row].done for row in rows]
        for row in (row for row, is_kept in zip(rows, kept, strict=True) if is_kept):
            self.rows[row].done.add(task)
            if task == "rollout":
                self.rows[row].value = value
        self.give_back(task, rows)
        return kept

    def fail(self, rows: list[int]) -> None:
        for row in rows:
            self.failures[row] = self.failures.get(row, 0) + 1
            if self.failures[row] >= MAX_FAILURES:
                self.rows[row].end = "dead"
        self.give_back("rollout", rows)

    def filter(self, rows: list[int]) -> None:
        for row in rows:
            if row in self.rows:
                self.rows[row].end = "dead" if self.rows[row].end == "dead" else "filtered"

    def drop(self, rows: list[int]) -> None:
        groups = {row >> 2 for row in rows if self.rows.pop(row, None)}
        self.gone |= groups - {row >> 2 for row in self.rows}

    def give_back(self, task: str, rows: list[int]) -> None:
        self.leased = {lease: held - set(rows) if lease[0] == task else held for lease, held in self.leased.items()}

    def snapshot(self) -> dict[int, Row]:
        return copy.deepcopy(self.rows)

    def restore(self, rows: dict[int, Row]) -> None:
        """Into a new queue."""
        self.rows, self.gone = copy.deepcopy(rows), set()
        self.forget("rollout")
        self.forget("train")
