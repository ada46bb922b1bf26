import json
from pathlib import Path

import pytest

from asyncflow.telemetry import trace
from asyncflow.telemetry.idle import busy_and_idle, idle_ratios, tokens_within
from asyncflow.telemetry.spans import Span
from asyncflow.telemetry.trace import SpanLog, join_pieces, read_spans, trace_events, worker_order, write_trace
from asyncflow.types import UserError

SPANS = [
    Span(worker="rollout/0", task="wait", start=10.0, end=11.0, cause="start"),
    Span(worker="rollout/0", task="generate", start=11.0, end=13.5, step=2, version=1, rows=4, tokens=90),
    Span(worker="rollout/0", task="generate_group", start=11.0, end=13.0, is_lane=False, step=2, rows=4),
    Span(worker="rollout/0", task="generate_group", start=12.0, end=13.5, is_lane=False, step=2, rows=4),
    Span(worker="trainer/0", task="forward_backward", start=13.0, end=14.25, step=2),
]


def test_spans_survive_the_file_and_a_half_written_last_line(tmp_path):
    path = tmp_path / "spans.jsonl"
    log = SpanLog(path)
    for span in SPANS[:3]:
        log.append(span)
    log.flush()
    assert read_spans(path) == SPANS[:3]
    log.close()
    again = SpanLog(path)
    for span in SPANS[3:]:
        again.append(span)
    again.close()
    assert read_spans(path) == SPANS
    with path.open("a") as file:
        file.write('{"worker":"tra')
    assert read_spans(path) == SPANS
    assert read_spans(tmp_path / "none.jsonl") == []


def test_a_line_that_is_no_span_is_named(tmp_path):
    (tmp_path / "spans.jsonl").write_text('{"worker": "trainer/0"}\n{"worker": "trainer/0"}\n')
    with pytest.raises(UserError, match="line 1 is not a span"):
        read_spans(tmp_path / "spans.jsonl")


def test_a_window_holds_overlapping_spans_and_forgets_older_ones_but_groups_of_later_steps(tmp_path):
    log = SpanLog(tmp_path / "spans.jsonl")
    for span in SPANS:
        log.append(span)
    assert log.window(10.5, 13.0, 1) == SPANS[:4]
    assert log.window(11.0, 20.0, 1) == SPANS[1:]
    assert log.window(10.0, 20.0, 1) == SPANS[1:]
    assert log.window(13.5, 20.0, 2) == SPANS[2:]
    assert log.window(13.5, 20.0, 3) == [SPANS[4]]
    log.close()


def test_a_window_is_whole_however_many_pieces_a_long_step_has_and_memory_has_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "_MAX_RECENT", 20)
    log = SpanLog(tmp_path / "spans.jsonl")
    trained = Span(worker="trainer/0", task="train_group", start=0.0, end=0.5, is_lane=False, step=0, group=3)
    drafted = Span(worker="rollout/0", task="decode_step", start=0.5, end=1.0, is_lane=False, drafts=4, accepted=2)
    for span in (trained, drafted):
        log.append(span)
    for i in range(200):
        log.append(Span(worker="rollout/0", task="generate", start=i, end=i + 1, tokens=10))
        log.append(Span(worker="rollout/0", task="decode_step", start=i, end=i + 1, is_lane=False))
        log.append(Span(worker="trainer/0", task="wait", start=i, end=i + 1, cause="rows"))
    found = log.window(0.0, 200.0, 0)
    assert len(found) <= 20 and {trained, drafted} <= set(found)
    assert tokens_within(found, "generate", 0.0, 200.0) == 2000
    assert idle_ratios(found, 0.0, 200.0) == {"rollout/0": 0.0, "trainer/0": 1.0}
    assert busy_and_idle(found, "trainer/0").wall == busy_and_idle(found, "rollout/0").wall == 200.0
    for i in range(100):  # which do not meet
        log.append(Span(worker="rollout/0", task="install", start=300 + 2 * i, end=301 + 2 * i))
    assert len(log.window(200.0, 600.0, 1)) <= 20
    log.close()
    assert len(read_spans(tmp_path / "spans.jsonl")) == 702


def test_pieces_of_one_long_state_become_one_span():
    def piece(worker: str, start: float, end: float, **more) -> Span:
        return Span(worker=worker, task="generate", start=start, end=end, step=1, **more)

    beside = Span(worker="a", task="fetch", start=0.5, end=2.5, is_lane=False)
    spans = [piece("a", 0, 1, tokens=5), piece("b", 0, 1), piece("a", 1, 2, tokens=7, rows=1), beside, piece("a", 2, 3)]
    other = [piece("a", 3, 4, version=1), piece("a", 4.001, 5, version=1)]
    assert join_pieces(spans + other) == [piece("a", 0, 3, tokens=12, rows=1), piece("b", 0, 1), beside, *other]


def test_workers_are_ordered_by_pool_and_number():
    names = ["driver", "trainer/10", "rollout/10", "trainer/2", "rollout/2", "reward", "rollout/2"]
    assert worker_order(names) == ["rollout/2", "rollout/10", "reward", "trainer/2", "trainer/10", "driver"]


def test_the_trace_is_a_valid_chrome_trace(tmp_path):
    log = SpanLog(tmp_path / "spans.jsonl")
    for span in SPANS:
        log.append(span)
    log.close()
    assert write_trace(tmp_path) == tmp_path / "trace.json"
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    check_events(events)
    (generate,) = [event for event in events if event["name"] == "generate"]
    assert (generate["ph"], generate["ts"], generate["dur"]) == ("X", 1e6, 2.5e6)
    assert generate["args"] == {"step": 2, "version": 1, "rows": 4, "tokens": 90}
    (wait,) = [event for event in events if event["name"] == "wait: start"]
    assert (wait["ts"], wait["dur"], wait["args"]) == (0, 1e6, {"cause": "start"})
    counts = [(event["ts"], event["args"]["groups"]) for event in events if event["ph"] == "C"]
    assert counts == [(1e6, 1), (2e6, 2), (3e6, 1), (3.5e6, 0)]
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {"rollout/0 lane", "trainer/0 lane"}
    pids = {event["pid"] for event in events if event["ph"] == "X"}
    assert len(pids) == 2


def check_events(events: list[dict]) -> None:
    """The Trace Event Format: the fields of each phase, and every asynchronous begin with its own end."""
    needed = {
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "b": {"name", "cat", "pid", "tid", "ts", "id", "args"},
        "e": {"name", "cat", "pid", "tid", "ts", "id"},
        "M": {"name", "pid", "tid", "args"},
        "C": {"name", "pid", "ts", "args"},
    }
    open_pairs: dict[tuple, float] = {}
    for event in events:
        assert set(event) == needed[event["ph"]] | {"ph"}
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        if event["ph"] in "be":
            key = (event["cat"], event["id"], event["name"], event["pid"])
            if event["ph"] == "b":
                assert key not in open_pairs
                open_pairs[key] = event["ts"]
            else:
                assert open_pairs.pop(key) <= event["ts"]
    assert not open_pairs


def test_an_empty_run_has_an_empty_trace(tmp_path: Path):
    assert json.loads(write_trace(tmp_path).read_text())["traceEvents"] == []
    assert trace_events([]) == []
