"""Admissions: the groups of each step, their prompts, and rows that an earlier attempt of the run has completed.

    data order --take--> Admissions --step(s)--> feed
                  <--push--   ^         surplus candidates
       a checkpoint ----------+    groups that were admitted and not committed, with rows of theirs perhaps

Where a step chooses its members among candidates, more may be taken for it; prompts of those that it had no use for come first in
the next step, with other numbers, and so with other noise. A candidate's number is that of its place in its step.

Prompts of steps that are not committed are kept, so that a checkpoint can hold them: a step that was admitted is admitted again
with the same groups, whatever was pushed or has changed places meanwhile.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from asyncflow.control.ledger import Candidates, num_to_admit
from asyncflow.control.schedule import Schedule
from asyncflow.loops.samples import Prompt, Shape, admission, priority_of, prompt_hash
from asyncflow.transfer_queue.batches import taken
from asyncflow.types import Batch, GroupMeta, Interval, RunError


class PromptSource(Protocol):
    def has(self, count: int) -> bool:
        """Whether there are so many prompts at the moment: a source that is filled from outside may have to be waited for."""

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts of the run's order."""

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """Put prompts back: they come before all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedBefore:
    """Groups that earlier attempts of a run have admitted and not committed; `first`: the first step that is not committed."""

    first: int = 0
    steps: Mapping[int, Mapping[int, Prompt]] = field(default_factory=dict)
    """Steps that were admitted, each with the prompts of its groups."""
    rows: Batch | None = None
    """Completed rows of these groups, or of later ones."""
    prompt_hashes: Mapping[int, int] = field(default_factory=dict)
    """By group, of the prompt (`prompt_hash`) that its rows answer: where the group gets another one, they are not used."""


class Admissions:
    """Groups that enter the queue, step by step, in a run that begins at step `first`."""

    def __init__(
        self,
        source: PromptSource,
        schedule: Schedule,
        shape: Shape,
        before: AdmittedBefore | None = None,
        columns: Container[str] | None = None,
    ) -> None:
        """`columns`: columns of completed rows that the queue of this attempt has; None: all."""
        before = before or AdmittedBefore()
        self.first = before.first
        self.prompts: dict[int, Prompt] = {}  # by group, of steps that are not committed
        self._source, self._schedule, self._shape = source, schedule, shape
        self._next = 0  # the number that the next candidate of the step that was admitted last would have
        self._steps = {step: dict(groups) for step, groups in before.steps.items()}
        rows = before.rows
        if rows is not None and columns is not None:
            known = {name: values for name, values in rows.columns.items() if name in columns}
            rows = Batch(rows.indices, rows.groups, known)
        self._rows, self._prompt_hashes = rows, before.prompt_hashes
        self._begun = set() if rows is None else set((rows.indices >> shape.group_bits).tolist())

    @property
    def waiting(self) -> dict[int, dict[int, Prompt]]:
        """The prompts of steps of an earlier attempt that are not admitted again yet."""
        return dict(self._steps)

    def has_prompts(self, step: int, candidates: Candidates | None = None) -> bool:
        """Whether the prompts that `step` takes are there, or `more` for these candidates."""
        if candidates is not None:
            return self._source.has(self._num_more(step, candidates))
        return step in self._steps or self._source.has(self._shape.prompts_at_first)

    def step(self, step: int, num_newest: int = 0) -> tuple[list[GroupMeta], Batch]:
        """The groups of a step, and the columns that they come with. The last `num_newest`, as far as they have no rows, are for
        version `step` alone."""
        first, size = step * self._shape.numbers_per_step, self._shape.prompts_at_first
        groups = self._steps.pop(step, None) or dict(zip(range(first, first + size), self._source.take(size), strict=True))
        return self._admitted(step, groups, num_newest)

    def more(self, step: int, candidates: Candidates) -> tuple[list[GroupMeta], Batch]:
        """Admit more groups for a step that lacks some. Raises `RunError` when it may have no more."""
        first, count = step * self._shape.numbers_per_step, self._num_more(step, candidates)
        if count < candidates.num_missing:
            raise RunError(
                f"step {step} has gone through {self._next - first} prompts, of which {candidates.num_varied} had responses with "
                f"different rewards, and it needs {self._shape.prompts_per_step} of them: take prompts that are neither too easy "
                f"nor too hard for this model, a larger rollout.group_size, or train.max_candidates above "
                f"{self._shape.max_candidates}"
            )
        return self._admitted(step, dict(zip(range(self._next, self._next + count), self._source.take(count), strict=True)))

    def _num_more(self, step: int, candidates: Candidates) -> int:
        left = step * self._shape.numbers_per_step + (self._shape.max_candidates or 0) - self._next
        return min(num_to_admit(candidates.num_missing, self._shape.oversampling), left)

    def put_back(self, surplus: Sequence[int]) -> None:
        """Put back the prompts of these groups: they are the next ones to be taken."""
        self._source.put_back([self.prompts.pop(group) for group in sorted(surplus)])

    def _admitted(self, step: int, groups: Mapping[int, Prompt], num_newest: int = 0) -> tuple[list[GroupMeta], Batch]:
        self.prompts |= groups
        self._next = max(groups) + 1
        hashes = self._prompt_hashes
        self._begun -= {group for group in groups.keys() & hashes.keys() if prompt_hash(groups[group].ids) != hashes[group]}
        allowed = self._schedule.interval(step)
        newest = {*sorted(groups)[max(0, len(groups) - num_newest) :]} - self._begun
        intervals = {group: Interval(step, allowed.high) if group in newest else allowed for group in groups}
        metas = [
            GroupMeta(group, self._shape.group_size, step, interval, priority=priority_of(interval))
            for group, interval in intervals.items()
        ]
        batch = admission(metas, [*groups.values()], [self._shape.temperature] * len(groups))
        return metas, batch if self._rows is None else self._with_rows(batch, self._rows)

    def begun(self, batch: Batch) -> dict[int, int]:
        """Oldest version that has made a finished row of each group in the batch; the keys are groups."""
        oldest: dict[int, int] = {}
        if len(batch):
            for row, spans in zip(batch.indices.tolist(), batch.ragged("version_spans"), strict=True):
                group, version = row >> self._shape.group_bits, int(spans[1::2].min())
                oldest[group] = min(version, oldest.get(group, version))
        return oldest

    def forget(self, groups: set[int]) -> None:
        """Forget these groups: they are committed."""
        for group in groups:
            self.prompts.pop(group, None)

    def _with_rows(self, batch: Batch, rows: Batch) -> Batch:
        """The groups' columns, and those of their rows that are there."""
        begun = [group for group in batch.groups.tolist() if group in self._begun]
        chosen = np.flatnonzero(np.isin(rows.indices >> self._shape.group_bits, begun))
        columns = {name: taken(values, chosen) for name, values in rows.columns.items()}
        return Batch(rows.indices[chosen], batch.groups, {**batch.columns, **columns} if len(chosen) else batch.columns)
