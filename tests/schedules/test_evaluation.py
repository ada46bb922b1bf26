"""Evaluations in every mode: by rollout workers they come after the training rows of their version, so no gradient is computed
later for them; by evaluators they cost training no moment."""

from __future__ import annotations

from typing import Any

import pytest

from asyncflow.cluster import clock
from asyncflow.cluster.faults import Faults, Resize
from asyncflow.cluster.wire import Wire
from asyncflow.config import parse
from asyncflow.control import SCHEDULES
from asyncflow.registry import build
from asyncflow.run.job import Listener
from asyncflow.simulation.run import Simulated, simulate
from asyncflow.weight_sync.sleeping import SleepingSender
from tests.depth import deep, in_gate

MODES: dict[str, Any] = {
    "synchronous": "synchronous",
    "periodic": "periodic",
    "delayed": "delayed",
    "sub_step": "sub_step",
    "bounded": {"name": "bounded", "max_staleness": 2},
}


def tree_of(mode: str, **evaluation: Any) -> dict[str, Any]:
    return {
        "run": {"steps": 4},
        "model": {"path": "m"},
        "data": {"path": "generated:arithmetic"},
        "schedule": MODES[mode],
        "rollout": {"num_workers": 2, "num_slots": 16, "group_size": 4, "max_new_tokens": 64},
        "train": {"prompts_per_step": 8},
        "eval": {"path": None, "num_prompts": 64, "samples_per_prompt": 2, **evaluation},
    }


def run_of(mode: str, **evaluation: Any) -> Simulated:
    return simulate(parse(tree_of(mode, **evaluation)))


def gradients_end(run: Simulated, step: int) -> float:
    """When the last gradient of a step was computed."""
    return max(span.end for span in run.spans if span.task == "forward_backward" and span.step == step)


def generation(run: Simulated, step: int, *, evaluation: bool) -> tuple[float, float]:
    """When the first of its groups was begun, and the last one was there."""
    groups = [s for s in run.spans if s.task == "generate_group" and s.step == step and (s.group >= 1 << 40) is evaluation]
    return min(span.start for span in groups), max(span.end for span in groups)


@pytest.mark.parametrize("mode", in_gate("periodic", of=MODES))
def test_the_trainer_computes_while_the_version_is_evaluated(mode: str) -> None:
    without, evaluated = run_of(mode), run_of(mode, path="generated:arithmetic", every_steps=1)
    assert not without.violations and not evaluated.violations
    assert [row["step"] for row in evaluated.evaluations] == [0, 1, 2, 3, 4]
    assert all(row["num_responses/sampled"] == 128 and row["num_responses/greedy"] == 64 for row in evaluated.evaluations)
    # Three times as many rows are evaluated as the step has: had they come first, this would be thrice as late.
    assert gradients_end(evaluated, 0) <= 1.1 * gradients_end(without, 0)
    # A step that version 0 may make as well is not held up by version 0's evaluation.
    chosen = parse(tree_of(mode)).schedule
    schedule = build("schedule", chosen.name, chosen.options, SCHEDULES)
    made_by_0 = [step for step in range(4) if 0 in schedule.interval(step)]
    assert len(made_by_0) == 1 + schedule.max_staleness
    for step in made_by_0[1:]:
        assert gradients_end(evaluated, step) <= 1.1 * gradients_end(without, step), step
    # The trainer is at work on a step before the evaluation of the version that made it has ended.
    assert (
        min(s.start for s in evaluated.spans if s.task == "forward_backward" and s.step == 1)
        < generation(evaluated, 1, evaluation=True)[1]
    )
    # What the evaluation costs: the first step that its version may not make is generated behind it.
    assert generation(evaluated, made_by_0[-1] + 1, evaluation=False)[0] > generation(evaluated, 0, evaluation=True)[0]


@deep
def test_under_delayed_a_step_of_the_evaluated_version_is_trained_as_early_as_without_every_time() -> None:
    """Step v + 1 is made by version v, whose evaluation is behind it."""
    evaluated = run_of("delayed", path="generated:arithmetic", every_steps=1)
    for version in range(1, 3):
        begins, ends = generation(evaluated, version, evaluation=True)
        last_rows = generation(evaluated, version + 1, evaluation=False)[1]
        assert generation(evaluated, version + 1, evaluation=False)[0] < begins
        assert gradients_end(evaluated, version + 1) <= last_rows + 0.5 < ends


# -- by workers of their own --------------------------------------------------------------------------------------------------


SLOW = Faults(slow={"rollout/1": 1.01})  # of two workers that are alike, who is first is decided by nothing
LATENCIES = {"rollout/0": 1.0e-4, "rollout/1": 1.1e-4, "trainer/0": 1.2e-4}


@pytest.fixture
def even_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's messages all take as long, and no two workers' do: an evaluator's draw nothing that others' would have drawn, and
    who is first is decided by something."""

    def delay(self: Wire) -> float:
        process = clock._process.get()  # none: it is an answer
        return LATENCIES.get(process.name, 1.3e-4) if process is not None else 1e-4

    monkeypatch.setattr(Wire, "delay", delay)


def own_run(mode: str, faults: Faults = SLOW, listener: Listener | None = None, **evaluation: Any) -> Simulated:
    tree = tree_of(mode, **{"path": "generated:arithmetic", "num_workers": 1, **evaluation})
    return simulate(parse(tree), faults=faults, listener=listener)


def moments(run: Simulated) -> list[tuple[float, str, str, int]]:
    """When each piece of the training was computed, and when each step was committed and published."""
    tasks = ("forward_backward", "optim_step", "publish")
    return sorted((span.end, span.worker, span.task, span.step) for span in run.spans if span.task in tasks)


def evaluated_by(run: Simulated) -> set[tuple[str, int, int]]:
    """(worker, version, step) of all groups of evaluations."""
    groups = [span for span in run.spans if span.task == "generate_group" and span.group >= 1 << 40]
    return {(span.worker, span.version, span.step) for span in groups}


@pytest.mark.parametrize("mode", in_gate("delayed", of=MODES))
def test_evaluators_do_not_hold_training_up_by_a_moment(mode: str, even_wire: None) -> None:
    without = simulate(parse(tree_of(mode)), faults=SLOW)
    generating = sum(s.end - s.start for s in without.spans if s.task == "generate" and s.worker == "rollout/0")
    training = sum(s.end - s.start for s in without.spans if s.task in ("forward_backward", "optim_step"))
    assert generating > 2 * training
    evaluated = own_run(mode, every_steps=1, num_prompts=4)
    assert not without.violations and not evaluated.violations
    assert moments(evaluated) == moments(without) and len(moments(without)) >= 4 * 3
    assert [row["step"] for row in evaluated.evaluations] == [0, 1, 2, 3, 4]
    assert all(row["num_responses/sampled"] == 8 and row["num_responses/greedy"] == 4 for row in evaluated.evaluations)
    assert evaluated_by(evaluated) == {("evaluator/0", version, version) for version in range(5)}
    lane = {span.task for span in evaluated.spans if span.worker == "evaluator/0" and span.is_lane}
    assert {"evaluate", "install"} <= lane and "generate" not in lane


@pytest.mark.parametrize("mode", in_gate("periodic", of=MODES))
def test_an_evaluation_that_is_too_slow_costs_another_one_and_training_nothing(
    mode: str, even_wire: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, publish, said = list[int](), SleepingSender.publish, list[str]()

    async def counting(self: SleepingSender, version: int, source: Any) -> Any:
        manifest = await publish(self, version, source)
        kept.append(len(self._sync.kept))
        return manifest

    listener = Listener()
    monkeypatch.setattr(listener, "log", said.append)
    monkeypatch.setattr(SleepingSender, "publish", counting)
    evaluated = own_run(mode, every_steps=1, listener=listener)
    without = simulate(parse(tree_of(mode)), faults=SLOW)
    assert not evaluated.violations and moments(evaluated) == moments(without)
    # The first one lasts longer than all of the training: of those that come due meanwhile the last one is evaluated.
    assert [(row["step"], row.get("left_out", 0)) for row in evaluated.evaluations] == [(0, 3), (4, 0)]
    assert all(row["num_responses/sampled"] == 128 for row in evaluated.evaluations)
    assert evaluated_by(evaluated) == {("evaluator/0", 0, 0), ("evaluator/0", 4, 4)}
    left_out = [line for line in said if "is not evaluated" in line]
    assert [line.partition(" is not")[0] for line in left_out] == ["version 1", "version 2", "version 3"]
    chosen = parse(tree_of(mode)).schedule
    staleness = build("schedule", chosen.name, chosen.options, SCHEDULES).max_staleness
    assert max(kept) <= staleness + 1 + 2


@pytest.mark.parametrize("mode", in_gate("sub_step", of=MODES))
def test_an_evaluator_that_dies_evaluates_the_same_version_again(mode: str, even_wire: None) -> None:
    calm = own_run(mode, every_steps=2, num_prompts=16)
    assert [row["step"] for row in calm.evaluations] == [0, 2, 4]
    begins, ends = generation(calm, 2, evaluation=True)
    faults = Faults(slow=SLOW.slow, deaths=((begins + 0.6 * (ends - begins), "evaluator/0"),))
    shaken = own_run(mode, faults, every_steps=2, num_prompts=16)
    assert not shaken.violations and shaken.counts["deaths"] == 1 and shaken.counts["groups delivered again"] > 0
    assert shaken.evaluations == calm.evaluations
    assert moments(shaken) == moments(calm)
    assert not any(row["rows/redelivered"] for row in shaken.rows.values()), "nothing that is trained"


def test_evaluators_share_an_evaluation() -> None:
    alone, together = (own_run("delayed", num_workers=count) for count in (1, 3))
    assert not together.violations and together.evaluations == alone.evaluations
    assert {worker for worker, _, _ in evaluated_by(together)} == {f"evaluator/{i}" for i in range(3)}
    assert together.seconds < 0.6 * alone.seconds


def test_without_any_evaluator_left_the_run_says_so() -> None:
    tree = tree_of("periodic", path="generated:arithmetic", num_workers=1)
    tree["rollout"]["max_restarts"] = 1
    run = simulate(parse(tree), faults=Faults(deaths=((1.5, "evaluator/0"), (3.5, "evaluator/0"))))
    assert run.violations[0].endswith("0 of 1 evaluators are left, and evaluations need 1")


def test_a_rollout_worker_that_joins_or_leaves_is_no_evaluators_business() -> None:
    resized = own_run("delayed", Faults(resizes=(Resize(1.5, 4, 60.0), Resize(3.0, 1, 60.0))), num_prompts=4, every_steps=1)
    assert not resized.violations and resized.counts["joined"] == 2 and resized.counts["left"] == 3
    assert {worker for worker, _, _ in evaluated_by(resized)} == {"evaluator/0"}
    assert [row["step"] for row in resized.evaluations] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("mode", in_gate("delayed", of=MODES))
def test_a_version_under_way_is_evaluated_by_the_run_that_goes_on(mode: str) -> None:
    """Whose checkpoint, of a later version, has the weights."""
    tree = tree_of(mode, path="generated:arithmetic", num_workers=1, every_steps=2, num_prompts=20)
    tree["run"]["steps"] = 8
    whole = simulate(parse(tree))
    begins, ends = generation(whole, 2, evaluation=True)
    killed = begins + 0.5 * (ends - begins)
    assert max(span.end for span in whole.spans if span.task == "publish" and span.step == 2) < killed - 0.5
    again = simulate(parse(tree), ends=[killed])
    assert not again.violations and again.counts["attempts"] == 1
    steps = [row["step"] for row in again.evaluations]
    assert steps[0] == 2 and steps[-1] == 8  # 0 was evaluated in the attempt before
    figures = {row["step"]: {**row, "left_out": 0} for row in whole.evaluations}
    assert {**again.evaluations[0], "left_out": 0} == figures[2]
    assert min(span.start for span in again.spans if span.task == "forward_backward") < generation(again, 2, evaluation=True)[1]


@pytest.mark.parametrize("mode", in_gate("periodic", of=["periodic", "delayed"]))
def test_what_was_left_out_is_told_by_the_run_that_goes_on(mode: str) -> None:
    """The first evaluation lasts longer than the first attempt."""
    tree = tree_of(mode, path="generated:arithmetic", num_workers=1, every_steps=1)
    tree["run"]["steps"] = 6
    whole = simulate(parse(tree))
    killed = max(span.end for span in whole.spans if span.task == "publish" and span.step == 4) + 0.1
    assert killed < generation(whole, 0, evaluation=True)[1]
    again = simulate(parse(tree), ends=[killed])
    assert not again.violations and again.counts["attempts"] == 1
    steps = [row["step"] for row in again.evaluations]
    assert steps[0] == 0 and steps[-1] == 6
    assert sum(row.get("left_out", 0) for row in again.evaluations) == 7 - len(steps)


def test_a_version_that_waits_is_left_out_when_another_is_due() -> None:
    said, listener = list[str](), Listener()
    listener.log = said.append  # type: ignore[method-assign]
    tree = tree_of("periodic", path="generated:arithmetic", num_workers=1, every_steps=3, num_prompts=40)
    tree["run"]["steps"] = 12
    run = simulate(parse(tree), listener=listener)
    assert not run.violations
    assert [(row["step"], row.get("left_out", 0)) for row in run.evaluations] == [(0, 0), (3, 1), (9, 0), (12, 0)]
    left_out = [line for line in said if "is not evaluated" in line]
    assert len(left_out) == 1 and left_out[0].startswith("version 6 is not evaluated: version 9 is due by now")
