"""Every mode in simulated runs of three attempts: the power fails twice, and the run is resumed from what is on the disk.

No law is broken in what is left of the run: no prompt is skipped, none is trained twice, no row is made by a version outside its
interval, whatever else dies or stalls on the way.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from unittest import mock

import pytest

from asyncflow.cluster.faults import Faults
from asyncflow.config import Config
from asyncflow.loops.admissions import Admissions
from asyncflow.run.factories import make_algorithm
from asyncflow.run.job import Listener
from asyncflow.run.state import saving
from asyncflow.simulation.audit import Audit
from asyncflow.simulation.run import NO_FAULTS, Simulated, drawn_faults, simulate
from asyncflow.types import Batch, GroupMeta
from tests.depth import few, in_gate
from tests.schedules.configurations import MODES, drawn

SEEDS = few((1,), (0, 1, 4))
COUNTED: dict[str, Counter[str]] = {}


def attempts(mode: str, seed: int) -> Simulated:
    """A drawn run whose first two attempts end at random moments; every second seed with faults besides."""
    config, costs = drawn(mode, seed)
    faults = drawn_faults(config, costs, seed) if seed % 2 else NO_FAULTS
    whole, rng = simulate(config, costs=costs, faults=faults, seed=seed), random.Random(seed)
    ends = [rng.uniform(0.2, 0.9) * whole.seconds for _ in range(2)]
    run = simulate(config, ends=ends, costs=costs, faults=faults, seed=seed)
    assert len(run.rows) == config.run.steps or run.violations
    assert {row["step"] for row in run.evaluations} <= {row["step"] for row in whole.evaluations}
    return run


@pytest.mark.parametrize("mode", in_gate("delayed", "bounded", of=MODES))
def test_no_law_is_broken_by_a_resumed_run(mode: str) -> None:
    found = {seed: attempts(mode, seed) for seed in SEEDS}
    assert {seed: run.violations for seed, run in found.items() if run.violations} == {}
    COUNTED[mode] = sum((run.counts for run in found.values()), Counter())


def test_rows_are_taken_over_where_timing_decides_versions_and_nowhere_else() -> None:
    if len(COUNTED) < len(MODES):
        pytest.skip("only some of the modes have run")
    taken = {mode: counts["rows taken over"] for mode, counts in COUNTED.items()}
    assert taken["synchronous"] == taken["periodic"] == taken["delayed"] == 0
    assert sum(taken.values()) >= few(0, 1) and all(counts["attempts"] == 2 * len(SEEDS) for counts in COUNTED.values())


@pytest.mark.parametrize("mode", in_gate("periodic", of=["periodic", "delayed", "bounded"]))
def test_checkpoints_by_the_virtual_clock_are_of_one_step_for_the_policy_and_its_critic(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that were of another step would keep a checkpoint from being whole, and the run from being resumed there."""
    config, costs = next(one for seed in range(40) if has_critic((one := drawn(mode, seed))[0]))
    checkpoint = config.checkpoint.model_copy(update={"every_minutes": 1e-6})
    config = config.model_copy(update={"checkpoint": checkpoint})
    whole, resumed_at = simulate(config, costs=costs), list[int]()
    monkeypatch.setattr(saving, "MAX_SHARE", 1e9)  # each of them may take as long as it will
    monkeypatch.setattr(Audit, "go_back", noted := mock.Mock(side_effect=lambda version, rows: resumed_at.append(version)))
    run = simulate(config, ends=[0.6 * whole.seconds], costs=costs)
    assert noted.called and resumed_at[0] > 0 and run.rows.keys() == whole.rows.keys()
    monkeypatch.setattr(saving, "MAX_SHARE", 1e-9)
    run = simulate(config, ends=[0.6 * whole.seconds], costs=costs)
    assert resumed_at[1] in (0, 1)  # after the first there was none for ever


class Steps(Listener):
    """Notes the steps that are committed, as they are."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def step(self, step: int, row: Mapping[str, float]) -> None:
        self.steps.append(step)


@pytest.mark.parametrize("mode", in_gate("delayed", "bounded", of=MODES))
def test_a_trainer_that_dies_costs_the_step_that_is_open_and_no_more_than_one_that_was_just_committed(mode: str) -> None:
    """There is no checkpoint on the disk, and one in memory after every step: whole once the metrics of the step are written."""
    for seed in SEEDS:
        config, costs = drawn(mode, seed)
        checkpoint = config.checkpoint.model_copy(update={"in_memory": True})
        config = config.model_copy(update={"checkpoint": checkpoint})
        whole, rng, told = simulate(config, costs=costs, seed=seed), random.Random(seed), Steps()
        first, second = sorted(rng.uniform(0.2, 0.8) * whole.seconds for _ in range(2))
        faults = Faults(deaths=((first, "trainer/0"), (second, "trainer/0")))
        run = simulate(config, costs=costs, faults=faults, seed=seed, listener=told)
        assert run.violations == [] and run.rows.keys() == whole.rows.keys() == set(told.steps)
        attempts = run.counts["attempts"]  # the second one may find the trainer of the first not started again yet
        assert attempts in (1, 2) and len(told.steps) <= len(whole.rows) + attempts, told.steps


def has_critic(config: Config) -> bool:
    return make_algorithm(config).critic is not None


@pytest.mark.parametrize("mode", in_gate("periodic", of=["periodic", "bounded"]))
def test_a_prompt_that_is_left_out_is_found(mode: str) -> None:
    """An attempt takes another prompt for one that an earlier attempt had taken from the data and not trained."""
    original, forgotten = Admissions.step, list[int]()

    def forgetful(self: Admissions, step: int, num_newest: int = 0) -> tuple[list[GroupMeta], Batch]:
        if step == self.first and (groups := self._steps.get(step)):
            (groups[min(groups)],) = self._source.take(1)
            forgotten.append(step)
        return original(self, step, num_newest)

    with mock.patch.object(Admissions, "step", forgetful):
        for seed in (0, 1, 4):
            forgotten.clear()
            violations = attempts(mode, seed).violations
            assert bool(violations) == bool(forgotten), (seed, violations)
            assert all("steps have gone through prompts" in violation for violation in violations), violations
            if violations:
                return
    raise AssertionError("nothing was forgotten")
