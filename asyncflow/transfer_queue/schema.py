"""Schema of a queue: its columns, its tasks, and the bit of each column in a row's mask. Pure.

A row's state is a mask of the columns that it has. Besides the declared columns there are marks, columns of the queue's own:

    done/<task>   written by a task that has no outputs of its own, when it is done with a row
    dead          the error of a row that has failed for good: it is dead for every task
    filtered      the reason why a row was taken out: it is out for every task
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import msgspec
import numpy as np

from asyncflow.types import ARRAY_DTYPES, Array, Batch, Column, GroupMeta, Ragged, group_bits_for

DEAD = "dead"
FILTERED = "filtered"
MAX_COLUMNS = 63


class TaskSpec(msgspec.Struct, frozen=True):
    """A task: the columns that it reads and writes. A task that writes none writes the mark `done/<name>` instead.

    `whole_groups`: a group is handed out only when every live row of it is ready. `topic` limits the task to groups of that
    topic; empty takes all. `sampler` says which ready rows a worker gets (see `sampler/`), `sampler_options` its options.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    whole_groups: bool = True
    topic: str = ""
    lease_seconds: float = 120.0
    max_failures: int = 3
    sampler: str = "oldest"
    sampler_options: dict[str, Any] = {}

    @property
    def outputs(self) -> tuple[str, ...]:
        """The columns whose presence means that the task is done for a row."""
        return self.writes or (f"done/{self.name}",)


def _refuse_unknown(name: str, entries: object, kind: type) -> None:
    known = [field.name for field in msgspec.inspect.type_info(kind).fields]  # type: ignore[attr-defined]
    for i, entry in enumerate(entries if isinstance(entries, list) else []):
        for key in entry if isinstance(entry, dict) else ():
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                raise ValueError(f"{name}[{i}] has no {key!r}: {f'did you mean {near[0]!r}?' if near else ', '.join(known)}")


class _Described(msgspec.Struct, forbid_unknown_fields=True):
    group_size: int
    columns: tuple[Column, ...]
    tasks: tuple[TaskSpec, ...]


class Schema(msgspec.Struct, frozen=True, dict=True):
    """The columns and tasks of a queue. `group_bits`: how many bits of a row's index number it within its group.

    Raises `ValueError` when a task reads or writes a column that is not declared, when two tasks would write one column of the
    same rows, or when there are too many columns.
    """

    declared: tuple[Column, ...]
    tasks: tuple[TaskSpec, ...]
    group_bits: int

    @classmethod
    def of(cls, plain: object) -> Schema:
        """Read a schema from plain data, as YAML or JSON has it: `group_size` (the largest), `columns` and `tasks`, lists of
        mappings.

        Raises `ValueError` saying where it is wrong.
        """
        for name, kind in (("columns", Column), ("tasks", TaskSpec)):
            _refuse_unknown(name, plain.get(name) if isinstance(plain, dict) else None, kind)
        described = msgspec.convert(plain, _Described)
        return cls(described.columns, described.tasks, group_bits_for(described.group_size))

    def __post_init__(self) -> None:
        known = [column.name for column in self.columns]
        twice = sorted({name for name in known if known.count(name) > 1})
        if twice:
            raise ValueError(f"columns declared twice: {', '.join(twice)}")
        if len(known) > MAX_COLUMNS:
            raise ValueError(f"{len(known)} columns, marks included, are more than {MAX_COLUMNS}")
        writers: dict[str, list[TaskSpec]] = {}
        for column in self.declared:
            if column.dtype not in ARRAY_DTYPES:
                raise ValueError(f"column {column.name!r}: {column.dtype!r} is not one of {', '.join(ARRAY_DTYPES)}")
        for task in self.tasks:
            if task.lease_seconds <= 0 or task.max_failures < 1:
                raise ValueError(f"task {task.name!r}: lease_seconds is to be above 0, and max_failures at least 1")
            for name in (*task.reads, *task.writes):
                self.column(name)
            for name in task.writes:
                for other in writers.setdefault(name, []):
                    if not other.topic or not task.topic or other.topic == task.topic:
                        raise ValueError(f"column {name!r} is written by two tasks, {other.name!r} and {task.name!r}")
                writers[name].append(task)

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The declared columns, then the marks. A column's position is its bit."""
        done = (Column(f"done/{task.name}", "uint8") for task in self.tasks)
        return (*self.declared, *done, Column(DEAD, "uint8", ragged=True), Column(FILTERED, "uint8", ragged=True))

    @cached_property
    def _bits(self) -> dict[str, int]:
        return {column.name: 1 << i for i, column in enumerate(self.columns)}

    @cached_property
    def group_mask(self) -> int:
        """The bits of the columns that are stored per group."""
        return self.mask(column.name for column in self.columns if column.per == "group")

    def column(self, name: str) -> Column:
        """Raises `ValueError` listing the columns when `name` is not one."""
        if name not in self._bits:
            raise ValueError(f"column {name!r} is not declared; declared are {', '.join(sorted(c.name for c in self.declared))}")
        return self.columns[self._bits[name].bit_length() - 1]

    def mask(self, names: Iterable[str]) -> int:
        """The bits of columns, together. Raises `ValueError` for one that is not declared."""
        mask = 0
        for name in names:
            self.column(name)
            mask |= self._bits[name]
        return mask

    @cached_property
    def masks_of(self) -> Callable[[tuple[str, ...]], tuple[int, int]]:
        """The bits of the columns among some names that are stored per row, and of those per group; remembered."""

        @lru_cache(1024)
        def masks_of(names: tuple[str, ...]) -> tuple[int, int]:
            mask = self.mask(names)
            return mask & ~self.group_mask, mask & self.group_mask

        return masks_of

    def task(self, name: str) -> TaskSpec:
        """Raises `ValueError` listing the tasks when `name` is not one."""
        found = next((task for task in self.tasks if task.name == name), None)
        if found is None:
            raise ValueError(f"there is no task {name!r}; there are {', '.join(task.name for task in self.tasks)}")
        return found

    def rows_of(self, metas: Iterable[GroupMeta]) -> Array:
        """int64: the rows of groups, in order."""
        parts = [np.arange(m.size, dtype=np.int64) + (m.group << self.group_bits) for m in metas]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def check_metas(self, metas: Sequence[GroupMeta]) -> None:
        """Raises `ValueError` naming the group whose size or number cannot be."""
        for meta in metas:
            if not 1 <= meta.size <= 1 << self.group_bits:
                raise ValueError(f"group {meta.group} has {meta.size} rows: 1 to {1 << self.group_bits} fit")
            if not 0 <= meta.group < 1 << (62 - self.group_bits):
                raise ValueError(f"group number {meta.group} is out of range")

    def check_outputs(self, task: str, batch: Batch) -> None:
        """Check that a completion has all of the task's outputs and nothing else. Raises `ValueError`."""
        outputs = self.task(task).outputs
        if set(batch.columns) != set(outputs):
            raise ValueError(f"task {task!r} completes with {', '.join(outputs)}, not with {', '.join(batch.columns) or 'nothing'}")

    def check_rows(self, metas: Sequence[GroupMeta], batch: Batch) -> None:
        """Check that the rows of a batch are rows of these groups. Raises `ValueError` naming the first that is none."""
        sizes = {meta.group: meta.size for meta in metas}
        first = (1 << self.group_bits) - 1
        for row in batch.indices.tolist():
            if row & first >= sizes.get(row >> self.group_bits, 0):
                raise ValueError(f"row {row} is none: group {row >> self.group_bits} is not put with it, or has fewer rows")

    def check(self, batch: Batch) -> None:
        """Check that a batch fits what is declared. Raises `ValueError` naming the row (or group) and the column that does not."""
        if batch.indices.dtype != np.int64 or batch.indices.ndim != 1 or batch.groups.dtype != np.int64 or batch.groups.ndim != 1:
            raise ValueError("indices and groups of a batch are to be int64 [n]")
        for kind, keys in (("row", batch.indices), ("group", batch.groups)):
            if len(keys) > 1 and not (keys[1:] > keys[:-1]).all():  # as a rule they rise
                numbers, counts = np.unique(keys, return_counts=True)
                if len(numbers) < len(keys):
                    raise ValueError(f"{kind} {numbers[counts > 1][0]} is in the batch twice")
        if len(batch.indices):
            of_rows = (batch.indices >> self.group_bits).tolist()
            if strangers := set(of_rows).difference(batch.groups.tolist()):
                raise ValueError(f"the batch has rows of group {min(strangers)}, which is not one of its groups")
        for name, values in batch.columns.items():
            column = self.column(name)
            keys = batch.indices if column.per == "row" else batch.groups
            try:
                problem, where = _misfit(column, values, len(keys))
            except (AttributeError, TypeError) as error:
                problem, where = f"written something that is no column: {error}", 0
            if problem:
                key = keys[where] if where < len(keys) else "?"
                raise ValueError(f"{column.per} {key}, column {name!r}: {problem}")


def _misfit(column: Column, values: Array | Ragged, num_entries: int) -> tuple[str, int]:
    """(what is wrong, the position of the first entry concerned); ("", 0) when nothing is."""
    if isinstance(values, Ragged) != column.ragged:
        return f"declared {'ragged' if column.ragged else 'dense'}, written {'dense' if column.ragged else 'ragged'}", 0
    array = values.values if isinstance(values, Ragged) else values
    if array.dtype != column.dtype:
        return f"declared {column.dtype}, written {array.dtype.name}", 0
    if array.ndim != 1 + len(column.shape) or array.shape[1:] != column.shape:
        what = "entries of length n x" if column.ragged else "entries of"
        return f"declared {what} shape {column.shape}, written an array of shape {array.shape}", 0
    if isinstance(values, Ragged):
        offsets = values.offsets
        if offsets.dtype != np.int64 or offsets.ndim != 1 or not len(offsets):
            return "offsets are to be int64 [n + 1]", 0
        if (offsets[1:] < offsets[:-1]).any():
            falling = np.flatnonzero(offsets[1:] < offsets[:-1])
            return f"its offsets fall from {offsets[falling[0]]} to {offsets[falling[0] + 1]}", int(falling[0])
        if offsets[0] != 0 or offsets[-1] != len(array):
            return f"its offsets run from {offsets[0]} to {offsets[-1]}, and there are {len(array)} values", 0
    if len(values) != num_entries:
        return f"{len(values)} entries for {num_entries} {column.per}s", min(len(values), num_entries)
    return "", 0
