"""The laws of a run, held against every answer that its workers get: what is sent is what counts, not what the ledger believes.

Wire.on_reply --> Audit: leases handed out, responses stored, groups consumed, steps committed --> violations
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncflow.control.ledger import Consumed, Update
from asyncflow.control.schedule import Schedule
from asyncflow.data.order import SeededOrder
from asyncflow.loops.samples import EVALUATE_TASK, UPDATE_TASK, VALUES_TASK, Prompt, Shape
from asyncflow.telemetry.metrics import GroupFigures
from asyncflow.transfer_queue.batches import WireBatch
from asyncflow.transfer_queue.controller import Handed
from asyncflow.transfer_queue.leases import Want
from asyncflow.types import GroupMeta


class Audit:
    """Audit of one run. `violations`, in words; `counts`, of what has happened."""

    def __init__(self, schedule: Schedule, shape: Shape) -> None:
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.committed = 0
        self._schedule, self._shape = schedule, shape
        self._metas: dict[int, GroupMeta] = {}
        self.data: list[Prompt] = []  # which differ in their first token
        self._prompts: dict[int, int] = {}  # by group, the first token
        self._rewards: dict[int, float] = {}  # by row
        self._versions: dict[int, set[int]] = {}  # by row, of its stored response
        self._step_of: dict[int, int] = {}  # by row, the step that it was trained in
        self._again: dict[tuple[str, int], dict[int, int]] = {}  # likewise, by another model than the policy, or in a later epoch
        self._others: Counter[str] = Counter()  # steps that other models have committed, by task
        self._critics: dict[str, int] = {}  # by worker of a pool, the critic's version that it was told last

    def violated(self, what: str) -> None:
        """Note a violation."""
        self.violations.append(what)

    def go_back(self, version: int, rows: set[int]) -> None:
        """Resume from where so many steps are committed and, of what is not trained, these rows are complete."""
        self.committed = version
        self._step_of = {row: step for row, step in self._step_of.items() if step < version}
        self._versions = {row: made for row, made in self._versions.items() if row in self._step_of or row in rows}
        self._rewards = {row: reward for row, reward in self._rewards.items() if self._step_at(row) < version or row in rows}
        self._again = {key: {row: step for row, step in of.items() if step < version} for key, of in self._again.items()}
        self._others = Counter(dict.fromkeys(self._others, version))
        self.counts["attempts"] += 1
        self.counts["rows taken over"] += len(rows)

    def reply(self, worker: str, service: str, method: str, arguments: tuple[Any, ...], result: Any) -> None:
        """See `Wire`."""
        match service, method:
            case "controller/rollout" | "controller/evaluate", "lease" if result is not None:
                self._leased(worker, arguments[0], result)
            case _, "read" if service.startswith("unit/") and "prompt_ids" in arguments[1]:
                self._seen(result)
            case _, "complete" if service.startswith("unit/") and arguments[0].task in ("rollout", EVALUATE_TASK):
                self._stored(worker, arguments[1], result)
                self._scored(arguments[1], result)
            case _, "complete" if service.startswith("unit/") and arguments[0].task == "reward":
                self._scored(arguments[1], result)
            case _, "complete" if service.startswith("unit/") and arguments[0].task == VALUES_TASK:
                self._valued(worker, arguments[1].batch().indices[result].tolist())
            case "versions/critic", "reaches" if result is not None:
                self._critics[worker] = result.version
            case "ledger", "next_round":
                step, _, _, trained, task, update = arguments
                for each in trained:
                    self._consumed(step, each.consumed, each.figures, task, update)
            case "ledger", "commit":
                self._committed(*arguments)
            case "versions", "installed":
                self.counts["installations"] += 1
            case "versions", "failed":
                self.counts["failed fetches"] += 1

    def _leased(self, worker: str, want: Want, handed: Handed) -> None:
        for meta, deliveries in zip(handed.lease.groups, handed.lease.deliveries, strict=True):
            self._metas[meta.group] = meta
            self.counts["groups delivered again"] += max(deliveries) > 0
            if want.installed is None or want.installed not in meta.interval:
                self.violated(f"{worker} serves version {want.installed} and was given group {meta.group} for {meta.interval}")

        if handed.batch is not None:
            self._seen(handed.batch)

    def _seen(self, wire: WireBatch) -> None:
        batch = wire.batch()
        self._prompts |= {g: int(ids[0]) for g, ids in zip(batch.groups.tolist(), batch.ragged("prompt_ids"), strict=True)}

    def _stored(self, worker: str, wire: WireBatch, stored: np.ndarray) -> None:
        batch = wire.batch()
        for row, spans, is_stored in zip(batch.indices.tolist(), batch.ragged("version_spans"), stored.tolist(), strict=True):
            if not is_stored:
                self.counts["responses that came second"] += 1
                continue
            meta = self._metas[row >> self._shape.group_bits]
            if row in self._versions:
                self.violated(f"row {row} was stored twice, the second time by {worker}")
            self._versions[row] = set(spans[1::2].tolist())
            self.counts["responses"] += 1
            self.counts["responses of several versions"] += len(self._versions[row]) > 1
            if not all(version in meta.interval for version in self._versions[row]):
                self.violated(f"row {row}, of {meta.interval}, was made by versions {sorted(self._versions[row])}")

    def _scored(self, wire: WireBatch, stored: np.ndarray) -> None:
        batch = wire.batch()
        if "reward" in batch.columns:
            kept = zip(batch.indices[stored].tolist(), batch.dense("reward")[stored].tolist(), strict=True)
            self._rewards |= {row: reward for row, reward in kept if self._metas[row >> self._shape.group_bits].topic == "train"}

    def _step_at(self, row: int) -> int:
        """The step that a row was admitted for last, by its number."""
        return (row >> self._shape.group_bits) // self._shape.numbers_per_step

    def _valued(self, worker: str, rows: list[int]) -> None:
        """Values of a step are those of the critic after so many updates (where steps train their own prompts), and of the version
        that a worker of a pool has been told."""
        for row in rows:
            step, version = self._metas[row >> self._shape.group_bits].partition, self._others[UPDATE_TASK]
            self.counts["values"] += 1
            if not step == version == self._critics.get(worker, version):
                self.violated(f"row {row} of step {step} was given values by the critic's version {version}")

    def _consumed(self, step: int, group: Consumed, figures: GroupFigures, task: str, update: int) -> None:
        epoch = update // self._shape.mini_batches
        if task != "train" or epoch:
            trained = self._again.setdefault((task, epoch), {})
            for row in group.rows:
                if row in trained:
                    self.violated(f"row {row} was trained by {task} in step {trained[row]}, and again in step {step}")
                trained[row] = step
            return
        interval, oldest = self._schedule.interval(step), step - self._schedule.max_staleness
        for row, staleness in zip(group.rows, figures.staleness.tolist(), strict=True):
            if row in self._step_of:
                self.violated(f"row {row} was trained in step {self._step_of[row]}, and again in step {step}")
            self._step_of[row] = step
            versions = self._versions.get(row)
            if versions is None:
                self.violated(f"row {row} was trained in step {step}, and has no response")
            elif not all(version in interval and oldest <= version <= step for version in versions):
                self.violated(f"row {row} was trained in step {step}, which takes {interval}, and made by {sorted(versions)}")
            elif staleness != step - min(versions):
                self.violated(f"row {row} was trained in step {step} as {staleness} old, and made by {sorted(versions)}")
            if self._schedule.membership == "strict" and (at := self._step_at(row)) != step:
                self.violated(f"row {row} of step {at} was trained in step {step}")

    def _committed(self, step: int, updates: list[Update], task: str) -> None:
        if len(updates) != self._shape.num_updates:
            self.violated(f"step {step} of {task} had {len(updates)} updates, and is to have {self._shape.num_updates}")
        if task != "train":
            if step != self._others[task]:
                self.violated(f"step {step} of {task} was committed after {self._others[task]} steps")
            self._others[task] += 1
            return
        if step != self.committed:
            self.violated(f"step {step} was committed after {self.committed} steps")
        self.committed += 1

    def finished(self, steps: int, dead: int) -> None:
        """Check the end of the run, which should have had so many steps, and so many rows that failed."""
        if self.committed != steps:
            self.violated(f"{self.committed} of {steps} steps were committed")
            return
        for (task, epoch), trained in self._again.items():
            if trained != self._step_of:
                self.violated(f"epoch {epoch} of {task} trained other rows, or in other steps, than the policy's first one")
        self.counts["rows trained"] += len(self._step_of)
        self.counts["rows failed"] += dead
        if self._shape.max_candidates:
            self._check_members(steps)
            return
        admitted = steps * self._shape.prompts_per_step * self._shape.group_size
        if len(self._step_of) + dead != admitted:
            self.violated(f"of {admitted} rows in {steps} steps {len(self._step_of)} were trained and {dead} failed")
        size = self._shape.prompts_per_step
        groups = (step * self._shape.numbers_per_step + place for step in range(steps) for place in range(size))
        self._check_order([self._prompts.get(group) for group in groups])

    def _check_members(self, steps: int) -> None:
        """Each step has trained the first groups, in the order of their numbers, whose rewards vary, and all rows of those that
        have a reward. The prompts up to the last member of each are those of the data, in order, none left out and none twice."""
        by_group: dict[int, dict[int, float]] = {}
        for row, reward in self._rewards.items():
            by_group.setdefault(row >> self._shape.group_bits, {})[row] = reward
        trained: dict[int, set[int]] = {step: set() for step in range(steps)}
        for row, step in self._step_of.items():
            trained[step].add(row)
        taken: list[int] = []
        for step in range(steps):
            first = step * self._shape.numbers_per_step
            of_step = sorted(group for group in self._prompts if group // self._shape.numbers_per_step == step)
            varied = [group for group in of_step if len(set(by_group.get(group, {}).values())) > 1]
            members = varied[: self._shape.prompts_per_step]
            if trained[step] != (expected := {row for group in members for row in by_group[group]}):
                self.violated(f"step {step} trained rows {sorted(trained[step])}, and its members are {sorted(expected)}")
                return
            taken += [self._prompts[group] for group in range(first, members[-1] + 1)]
            self.counts["degenerate groups"] += members[-1] + 1 - first - len(members)
            self.counts["surplus groups"] += sum(group > members[-1] for group in of_step if group in by_group)
        self._check_order(taken)

    def _check_order(self, taken: Sequence[int | None]) -> None:
        """`taken`: the prompts of the steps' groups, in order, as far as anybody has seen them."""
        if [*taken] != (due := [int(prompt.ids[0]) for prompt in SeededOrder(self.data, self._shape.seed).take(len(taken))]):
            self.violated(f"steps have gone through prompts {taken}, and the data's order is {due}")
