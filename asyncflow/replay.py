"""Training a step of a run again from its kept batch, with the run's own loops and without generation.

    RUN/batches/step-s      --+
    RUN/checkpoints/step-c  --+--> a run of the steps c to s in a scratch folder --> metrics, fingerprints --> beside the run's own
    (or the model it began with)

Rows enter the queue complete, as those do that an earlier attempt of a run has left, so ledger, schedule, rounds and engines are
what they were. Where engines that sample are not deterministic, this is how a step can be looked at again.

consumes: a run's folder, which it leaves as it is
waits for: the trainers
is unblocked by: their last commit
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncflow.checkpoint.folder import Checkpoints
from asyncflow.cluster.base import WorkerSpec
from asyncflow.config import Config, dump, load, parse
from asyncflow.loops.samples import Prompt
from asyncflow.run.fleet import workers
from asyncflow.run.in_worker.connection import JobFile, model_begun_with
from asyncflow.run.job import Job, Listener
from asyncflow.run.preparation.prepare import Prepared
from asyncflow.run.records.record import RecordState
from asyncflow.run.records.step_rows import StepRows
from asyncflow.run.state.driver_state import DriverState, Resumed, SavedPrompt
from asyncflow.run.state.resume import CRITIC_FINGERPRINTS, metrics_of
from asyncflow.run.state.run_folder import Prepare, RunFolder
from asyncflow.run_dir import CONFIG_FILE, RunDir
from asyncflow.settings import apply_override, refuse_overrides
from asyncflow.telemetry.batches import joined, kept_steps, read_batch
from asyncflow.telemetry.fingerprints import FINGERPRINTS_FILE, StepPrint, read_fingerprints
from asyncflow.transfer_queue.leases import DeadRow
from asyncflow.types import Batch, RunError, UserError

TRAINING = (
    "policy/",
    "critic/",
    "importance_weight/",
    "mismatch/",
    "reward/",
    "response_length/",
    "staleness/",
    "rows/trained",
    "rows/empty",
)
"""Metrics that follow from a batch and the weights before it."""
_NOT_NEEDED = ("rollout/", "reward/", "reference/")  # workers whose columns are in the batch


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Steps to be trained again. `first`: the step whose weights are loaded, from `checkpoint`, or from the model that the run
    began with; `batches`: kept batches by step, up to the step asked for. `is_exact`: the weights are those from before the first
    of them."""

    step: int
    first: int
    checkpoint: Path | None
    model: Path
    batches: Mapping[int, Batch]
    is_exact: bool
    weights_of: int

    def line(self) -> str:
        """Description of the plan in one line."""
        weights = (
            f"the checkpoint {self.checkpoint}"
            if self.checkpoint is not None
            else f"the model that the run began with, {self.model}"
        )
        between = [str(step) for step in self.batches if step < self.step]
        before = f", and trains step{'s' * (len(between) > 1)} {', '.join(between)} before it" if between else ""
        return f"replay of step {self.step}: begins with {weights}{before}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of the replay beside those of the run, for the policy and, where there is one, the critic.

    `metrics`: by name, the run's and the replay's, None for one that has none; `has_metrics`: whether the run has written the
    step's at all. `tensors`: those whose bits differ after the step, None where the run kept no fingerprints; `losses`:
    (micro-batches with the same loss, all), or None.
    """

    metrics: Mapping[str, tuple[float | None, float | None]]
    has_metrics: bool
    tensors: tuple[str, ...] | None
    losses: tuple[int, int] | None

    @property
    def compared(self) -> str:
        """Description of what was compared, in words; "" if there was nothing to compare."""
        parts = ["metrics"] if self.has_metrics else []
        return ", ".join([*parts, "losses, weights and optimiser state"] if self.tensors is not None else parts)

    @property
    def is_equal(self) -> bool:
        """Whether everything compared is equal to the bit, and anything was compared."""
        same = not self.has_metrics or all(same_number(theirs, mine) for theirs, mine in self.metrics.values())
        return bool(self.compared) and same and not self.tensors and (self.losses is None or self.losses[0] == self.losses[1])


def same_number(a: float | None, b: float | None) -> bool:
    """Whether two metrics are equal to the bit, as far as their file tells. A metric that one side lacks is not equal."""
    return a is not None and b is not None and (a == b or (a != a and b != b))


def plan_replay(run_dir: Path, step: int) -> ReplayPlan:
    """Plan how a step is trained again from a run's folder. Raises `UserError` if its batch was not kept."""
    if not RunDir(run_dir).is_run():
        raise UserError(f"{run_dir} holds no run")
    kept = kept_steps(run_dir)
    if step not in kept:
        there = f"kept are steps {', '.join(map(str, kept))}" if kept else "none is kept: set telemetry.keep_batches before the run"
        raise UserError(f"{run_dir} has no batch of step {step}; {there}")
    checkpoints, model = Checkpoints(RunDir(run_dir).checkpoints, 1), model_begun_with(run_dir)
    first, checkpoint = 0, None
    for version in reversed([version for version in checkpoints.versions() if version <= step]):
        try:
            checkpoints.check(version)
        except RunError:
            continue
        first, checkpoint = version, checkpoints.path(version)
        break
    is_exact = all(between in kept for between in range(first, step))
    steps = range(first, step + 1) if is_exact else [step]
    return ReplayPlan(step, steps[0], checkpoint, model, {s: read_batch(run_dir, s) for s in steps}, is_exact, first)


def replay_config(run_dir: Path, plan: ReplayPlan, scratch: Path, overrides: Sequence[str] = ()) -> Config:
    """Configuration in which the run's steps are trained again on this machine. Raises `UserError` for an override of where, or on
    what, that is done."""
    settings: dict[str, Any] = {
        "run": {"name": "replay", "dir": str(scratch), "steps": plan.step + 1, "overwrite": False},
        "model": {"path": str(plan.model)},
        "rollout": {"num_workers": 1, "engine": "slots"},
        "telemetry": {"trackers": [], "samples_per_step": 0, "fingerprints": True, "keep_batches": 0},
        "eval": {"path": None, "num_workers": 0},
    }
    others = {"queue": {}, "weight_sync": {}, "checkpoint": {"keep": 0, "in_memory": False}, "cluster": "local"}
    given = [f"{section}.{key}" for section, keys in settings.items() for key in keys]
    refuse_overrides(overrides, [*given, *others], "replay sets {key} itself")
    tree = load(run_dir / CONFIG_FILE).model_dump(mode="json")
    for override in overrides:
        apply_override(tree, override)
    for section, keys in settings.items():  # behind them: one may have taken the place of a whole section
        tree[section] = {**(tree[section] or {}), **keys}
    return parse({**tree, **others})


class ReplayJob(Job):
    """Job whose rows are all there from the start."""

    def __init__(self, config: Config, plan: ReplayPlan, listener: Listener | None = None) -> None:
        super().__init__(config, listener)
        self._plan = plan
        self._folder = ReplayFolder(config, self.listener.log, plan)

    def _fleet(self, weights_dir: Path) -> list[WorkerSpec]:
        specs = workers(self.config, weights_dir, is_training=True, are_trainers_there=False)
        return [spec for spec in specs if not spec.name.startswith(_NOT_NEEDED)]

    async def start(self, steps: int = 0) -> None:
        """See `Job.start`. Rows that failed in the run fail again as soon as their groups are admitted."""
        await super().start(steps)
        assert self.driver is not None
        for step, batch in self._plan.batches.items():
            self.driver.background.start(self._fail_missing(step, batch))

    async def _fail_missing(self, step: int, batch: Batch) -> None:
        driver, there = self.driver, set(batch.indices.tolist())
        assert driver is not None
        first_rows = [group << driver.shape.group_bits for group in batch.groups.tolist()]
        missing = [row for first in first_rows for row in range(first, first + driver.shape.group_size) if row not in there]
        if missing:
            while not driver.ledger.ledger.is_open(step):
                if driver.ledger.is_stopping:
                    return
                await asyncio.sleep(0.05)
            why = "it failed in the run"
            driver.ledger.fail([DeadRow(row >> driver.shape.group_bits, row, why) for row in missing])
            await driver.queue.filter(missing, why)

    def _save_published_model(self, driver: Any) -> None:
        """Save nothing: the model is not needed."""

    def _write_report(self) -> None:
        """Write nothing: a replay has no report."""


class ReplayFolder(RunFolder):
    """Scratch folder of a replay: without a data set, and with complete rows."""

    def __init__(self, config: Config, log: Callable[[str], None], plan: ReplayPlan) -> None:
        super().__init__(config, log, resume=False)
        self._plan = plan

    async def begin(self, prepare: Prepare) -> tuple[Prepared, Resumed]:
        """See `RunFolder.begin`."""
        config, plan = self._config, self._plan
        self._folder.claim(dump(config))
        self.weights_dir = self._folder.make_weights_dir()
        self.rows = StepRows(config.run_dir, ({"step": step} for step in range(plan.first)))  # what a run counts its steps by
        steps = {step: _prompts_of(batch) for step, batch in plan.batches.items()}
        prompts = [prompt for groups in steps.values() for prompt in groups.values()]
        longest = max(len(prompt.ids) for prompt in prompts) + config.rollout.max_new_tokens
        prepared = Prepared(plan.model, prompts, [], config.model.max_context_tokens or longest)
        state = DriverState(
            version=plan.first,
            config="",
            data="",
            position=0,
            pushed=[],
            steps={s: {group: SavedPrompt(p.ids.tolist(), {}) for group, p in groups.items()} for s, groups in steps.items()},
            record=RecordState(),
        )
        checkpoint = str(plan.checkpoint.resolve()) if plan.checkpoint is not None else ""
        self.write_job(
            JobFile(str(plan.model.resolve()), prepared.max_context, str(self.weights_dir), first=plan.first, checkpoint=checkpoint)
        )
        folder = plan.checkpoint or self._folder.path
        rows = joined([_rows_alone(batch) for batch in plan.batches.values()])
        return prepared, Resumed(folder, state, rows, is_whole=True)


def _prompts_of(batch: Batch) -> dict[int, Prompt]:
    """Prompts by group, in the order in which the groups were trained."""
    ids = batch.ragged("prompt_ids")
    return {group: Prompt(ids[i], {}) for i, group in enumerate(batch.groups.tolist())}


def _rows_alone(batch: Batch) -> Batch:
    """Rows without the columns of groups. Where a step chooses its members they become candidates, which it chooses from again."""
    columns = {name: values for name, values in batch.columns.items() if name not in ("prompt_ids", "member")}
    return Batch(batch.indices, np.empty(0, np.int64), columns)


def compare(run_dir: Path, replayed: Path, plan: ReplayPlan, row: Mapping[str, float]) -> Comparison:
    """Compare what the step gave in the run with what it gives now. `row`: metrics of the replay."""
    of_run = next((other for other in metrics_of(run_dir) if other["step"] == plan.step), {})
    names = [name for name in {**row, **of_run} if name.startswith(TRAINING)]
    metrics = {name: (of_run.get(name), row.get(name)) for name in names}
    different: tuple[str, ...] = ()
    num_same, num_losses, are_printed = 0, 0, False
    for file, whose in ((FINGERPRINTS_FILE, ""), (CRITIC_FINGERPRINTS, "critic/")):
        theirs, mine = (_print_of(folder / file, plan.step) for folder in (run_dir, replayed))
        if theirs is None:
            continue
        are_printed, now = True, StepPrint(plan.step, [], {}, 0, 0, "") if mine is None else mine
        tensors = sorted(theirs.tensors.keys() | now.tensors.keys())
        different += tuple(whose + name for name in tensors if theirs.tensors.get(name) != now.tensors.get(name))
        before, after = _losses(theirs), _losses(now)
        num_same, num_losses = num_same + len(before & after), num_losses + max(len(before), len(after))
    return Comparison(metrics, bool(of_run), different if are_printed else None, (num_same, num_losses) if are_printed else None)


def _losses(line: StepPrint) -> set[tuple[int, int, str]]:
    return {(group.group, i, loss) for group in line.groups for i, loss in enumerate(group.losses)}


def _print_of(path: Path, step: int) -> StepPrint | None:
    return next((line for line in read_fingerprints(path) if line.step == step), None) if path.exists() else None
