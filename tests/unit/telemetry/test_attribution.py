"""Idle time by reason: hand-made timelines, in which each second's reason is plain to see."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from asyncflow.engines.costs import Costs
from asyncflow.simulation.run import simulate
from asyncflow.telemetry.attribution import REASONS, attributed, exposed_weights
from asyncflow.telemetry.gantt import step_ends
from asyncflow.telemetry.idle import busy_and_idle
from asyncflow.telemetry.spans import Span
from tests.builders import every_task_apart
from tests.depth import in_gate

MODES = ["synchronous", "periodic", "delayed", "sub_step", "bounded"]

_spec = importlib.util.spec_from_file_location("synthetic_run", Path(__file__).with_name("synthetic_run.py"))
synthetic_run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(synthetic_run)


def lane(worker: str, *states: tuple[float, str, dict[str, int]], start: float = 0.0) -> list[Span]:
    """States end to end, each given as (end, task or `wait: cause`, fields)."""
    spans = []
    for end, state, fields in states:
        task, _, cause = state.partition(": ")
        spans.append(Span(worker=worker, task=task, cause=cause, start=start, end=end, **fields))
        start = end
    return spans


def group(worker: str, start: float, end: float, number: int, version: int = 0) -> Span:
    return Span(worker=worker, task="generate_group", start=start, end=end, group=number, version=version, is_lane=False)


def waits(spans: Sequence[Span], worker: str) -> list[tuple[float, float, str]]:
    return [(s.start, s.end, s.cause) for s in attributed(spans) if s.worker == worker and s.task == "wait"]


def periodic() -> list[Span]:
    """Two workers, two groups a step; worker 1 is slow. The trainer updates from 7 to 8 and gathers until 9."""
    trained = [
        (3, "forward_backward", {"step": 0, "group": 0}),
        (6, "wait: rows", {}),
        (7, "forward_backward", {"step": 0, "group": 1}),
    ]
    update = [(8, "optim_step", {"step": 0}), (9, "wait: publish", {}), (13, "wait: rows", {})]
    again = [(14, "forward_backward", {"step": 1, "group": 2}), (15, "forward_backward", {"step": 1, "group": 3})]
    return [
        *lane("rollout/0", (2, "generate", {}), (10, "wait: weights", {}), (11, "install", {"version": 1}), (13, "generate", {})),
        *lane("rollout/1", (6, "generate", {}), (10, "wait: weights", {}), (11, "install", {"version": 1}), (12, "generate", {})),
        *lane("trainer/0", (2, "wait: rows", {}), *trained, *update, *again, (16, "optim_step", {"step": 1})),
        *[
            group("rollout/0", 0, 2, 0),
            group("rollout/1", 0, 6, 1),
            group("rollout/0", 11, 13, 2, 1),
            group("rollout/1", 11, 12, 3, 1),
        ],
    ]


def test_a_periodic_step_second_by_second():
    spans = periodic()
    assert waits(spans, "rollout/0") == [(2, 6, "slowest group"), (6, 8, "interval"), (8, 10, "weights")]
    assert waits(spans, "rollout/1") == [(6, 8, "interval"), (8, 10, "weights")]
    assert waits(spans, "trainer/0") == [
        (0, 2, "data"),
        (3, 6, "slowest group"),
        (8, 9, "weights"),  # it gathers them
        (9, 11, "weights"),  # on their way to the workers
        (11, 12, "data"),
        (12, 13, "slowest group"),
    ]


def test_the_whole_batch_is_waited_for_because_the_schedule_says_so():
    spans = [
        *lane("rollout/0", (9, "generate", {})),
        *lane("trainer/0", (9, "wait: batch", {}), *((10 + g, "forward_backward", {"step": 0, "group": g}) for g in range(3))),
        *(group("rollout/0", 0, end, number) for number, end in enumerate((2, 5, 9))),
    ]
    assert waits(spans, "trainer/0") == [(0, 2, "data"), (2, 5, "interval"), (5, 9, "slowest group")]


def test_a_worker_that_is_ahead_waits_for_the_update_and_not_for_groups_of_others():
    """Delayed: its share of step 1 is done, while step 0, whose groups are all there, is trained until 5."""
    spans = [
        *lane("rollout/0", (3, "generate", {}), (6, "wait: weights", {}), (7, "install", {"version": 1}), (9, "generate", {})),
        *lane("trainer/0", (1, "wait: rows", {}), (4, "forward_backward", {"step": 0, "group": 0}), (5, "optim_step", {"step": 0})),
        *[group("rollout/0", 0, 1, 0), group("rollout/0", 1, 3, 1)],
    ]
    assert waits(spans, "rollout/0") == [(3, 5, "interval"), (5, 6, "weights")]


def test_a_wait_without_an_install_after_it_is_for_prompts_and_the_last_one_for_the_end():
    spans = lane("rollout/0", (1, "wait: start", {}), (2, "wait: prompts", {}), (3, "generate", {}), (5, "wait: weights", {}))
    assert waits(spans, "rollout/0") == [(0, 1, "start"), (1, 2, "data"), (3, 5, "stop")]


def test_a_part_of_a_lane_is_cut_where_it_begins_and_ends():
    activity = busy_and_idle(attributed(periodic()), "trainer/0", 5.0, 12.5)
    assert activity.wall == 7.5
    assert activity.busy == {"forward_backward": 1, "optim_step": 1}
    assert activity.idle == {"slowest group": 1.5, "weights": 3, "data": 1}


def test_exposed_weights_are_installed_or_waited_for_by_workers_and_trainers() -> None:
    spans = attributed(periodic())
    # From update to update: each worker waits for 2 s and installs for 1, the trainer gathers for 1 and waits for 2.
    assert exposed_weights(spans, 8.0, 16.0) == (3 + 3 + 3) / (5 + 4 + 8)
    assert exposed_weights(spans, 8.5, 9.0) == 1.0 and exposed_weights(spans, 14.0, 16.0) == 0.0
    assert exposed_weights(spans, 20.0, 21.0) is None
    evaluator = lane("evaluator/0", (8, "generate", {}), (16, "install", {}))
    assert exposed_weights([*spans, *attributed(evaluator)], 8.0, 16.0) == 9 / 17


def test_publishing_beside_training_exposes_nothing() -> None:
    spans = [
        *lane("trainer/0", (4, "forward_backward", {"step": 1}), (5, "wait: publish", {}), (6, "optim_step", {"step": 1})),
        Span(worker="trainer/0", task="publish", start=0.0, end=5.0, step=0, is_lane=False),
    ]
    assert exposed_weights(attributed(spans), 0.0, 6.0) == 1 / 6


@pytest.mark.parametrize("mode", in_gate("periodic", "sub_step", of=MODES))
def test_a_steps_row_says_of_exposed_weights_what_the_whole_run_does(mode: str) -> None:
    run = simulate(every_task_apart(mode, steps=6), costs=Costs(publish_seconds=0.2, fetch_seconds=0.4))
    spans, rows = attributed(run.spans), [run.rows[step]["perf/exposed_weights"] for step in range(6)]
    ends = [end for _, end in step_ends(spans, 0.0)]
    assert rows[0] == 0.0, "of the first step, nobody has to wait for its weights"
    assert rows[1:] == pytest.approx([exposed_weights(spans, start, end) for start, end in pairwise(ends)], abs=1e-3)
    assert sum(rows) > 0.0


def test_no_second_is_lost_or_counted_twice():
    spans = synthetic_run.make_spans(10)
    shuffled = random.Random(0).sample(spans, len(spans))
    cut = attributed(shuffled)
    for worker in ("rollout/0", "rollout/1", "trainer/0"):
        before, after = busy_and_idle(spans, worker), busy_and_idle(cut, worker)
        assert after.busy == pytest.approx(before.busy)
        assert after.idle_seconds == pytest.approx(before.idle_seconds)
        assert set(after.idle) <= set(REASONS)
        own = [span for span in cut if span.worker == worker and span.is_lane]
        assert all(a.end <= b.start for a, b in pairwise(own))
        assert all(span.end > span.start for span in own)


@pytest.mark.parametrize("mode", MODES)
def test_busy_time_and_idle_time_by_reason_are_the_step_in_every_mode(mode):
    config = every_task_apart(mode, steps=5)
    run = simulate(config, costs=Costs())
    spans = attributed(run.spans)
    ends = [end for _, end in step_ends(spans, 0.0)]
    seen = set()
    for start, end in pairwise(ends[:-1]):
        for worker in ("rollout/0", "rollout/1", "reward/0", "reference/0", "trainer/0"):
            activity = busy_and_idle(spans, worker, start, end)
            seen |= set(activity.idle)
            assert set(activity.idle) <= {"data", "slowest group", "interval", "weights"}
            assert activity.busy_seconds + activity.idle_seconds == pytest.approx(end - start)
    held_back = {"interval", "weights"} if mode in ("synchronous", "periodic") else set()
    assert {"data", "slowest group"} | held_back <= seen
