"""A worker's lane is in exactly one state at any moment."""

from __future__ import annotations

from asyncflow.telemetry.spans import Recorder, SharedLane, Span


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def recorder() -> tuple[Recorder, Clock, list[Span]]:
    clock, spans = Clock(), list[Span]()
    return Recorder("trainer/0", clock, spans.append, "cpu"), clock, spans


def test_states_follow_one_another_without_gap_or_overlap() -> None:
    lane, clock, spans = recorder()
    clock.now = 1.0
    lane.waiting("rows")
    clock.now = 3.0
    with lane.busy("forward_backward", step=2, rows=4):
        clock.now = 6.0
    clock.now = 7.0
    lane.flush()
    assert [(s.task, s.cause, s.start, s.end) for s in spans] == [
        ("wait", "start", 0.0, 1.0),
        ("wait", "rows", 1.0, 3.0),
        ("forward_backward", "", 3.0, 6.0),
        ("wait", "rows", 6.0, 7.0),
    ]
    assert spans[2].step == 2 and spans[2].rows == 4 and spans[2].device == "cpu"


def test_a_flush_cuts_a_state_but_counts_its_work_once() -> None:
    lane, clock, spans = recorder()
    lane.enter("generate", version=1)
    lane.add(rows=1, tokens=5)
    clock.now = 2.0
    lane.flush()
    assert lane.state == ("generate", "", 0.0)
    lane.add(tokens=7)
    clock.now = 3.0
    with lane.busy("forward_backward", rows=4):
        clock.now = 4.0
        lane.flush()
        clock.now = 5.0
    generated = [s for s in spans if s.task == "generate"]
    assert [s.tokens for s in generated] == [5, 7] and sum(s.rows for s in generated) == 1
    trained = [s for s in spans if s.task == "forward_backward"]
    assert len(trained) == 2 and sum(s.rows for s in trained) == 4


def test_entering_the_same_state_again_changes_nothing() -> None:
    lane, clock, spans = recorder()
    for moment in (1.0, 2.0, 3.0):
        lane.enter("generate", version=1)
        clock.now = moment
    lane.waiting("weights")
    assert [(s.task, s.start, s.end) for s in spans] == [("generate", 0.0, 3.0)]


def test_work_beside_the_lane_leaves_it_alone() -> None:
    lane, clock, spans = recorder()
    clock.now = 2.0
    lane.off_lane("fetch", 1.0, version=3, bytes=10)
    assert spans == [Span(worker="trainer/0", task="fetch", start=1.0, end=2.0, is_lane=False, version=3, bytes=10, device="cpu")]
    assert lane.state == ("wait", "start", 0.0)


def test_a_lane_that_two_loops_share_shows_what_was_begun_first() -> None:
    own, clock, spans = recorder()
    lane = SharedLane(own)
    lane.waiting("rows")
    clock.now = 1.0
    first = lane.busy("values", step=1, rows=4)
    first.__enter__()
    clock.now = 2.0
    with lane.busy("critic_update", step=0, rows=8):  # waits for its turn
        lane.waiting("batch")
        clock.now = 3.0
        first.__exit__(None, None, None)
        clock.now = 5.0
        with lane.busy("values", step=2, rows=2):  # over before the lane is free of the other: its rows are that one's
            clock.now = 6.0
        clock.now = 7.0
    clock.now = 8.0
    own.flush()
    assert [(s.task, s.cause, s.start, s.end, s.rows) for s in spans] == [
        ("wait", "rows", 0.0, 1.0, 0),
        ("values", "", 1.0, 3.0, 4),
        ("critic_update", "", 3.0, 7.0, 10),
        ("wait", "batch", 7.0, 8.0, 0),
    ]
    assert [s.rows for s in spans if s.task == "critic_update"] == [10]
    assert lane.state == own.state
