"""The run's spans on disk, and as a trace that Perfetto opens.

workers' spans --> SpanLog --> spans.jsonl --> trace.json      (ui.perfetto.dev, chrome://tracing)
                      |                   +--> report.html     (report.py)
                      +--> window(start, end): what the metrics of a step are made of
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from asyncflow.telemetry.idle import WAIT
from asyncflow.telemetry.spans import Span
from asyncflow.types import UserError

SPANS_FILE: Final = "spans.jsonl"
TRACE_FILE: Final = "trace.json"

_MAX_RECENT: Final = 200_000
_NOT_READ: Final = ("decode_step", "prefill", "score")
"""Tasks beside a lane, of many short spans, that no step's metrics are made of, but for their drafts."""
_LANE_THREAD: Final = 1


class SpanLog:
    """Appends spans to a JSON Lines file, buffered: call `flush` once per step. A resumed run appends to the same file,
    which has been cut back (`run/state/resume.py`).

    Finished spans are also kept in memory until `window` has moved past them, 200,000 at most. A long step of many workers has more
    pieces than that: then those of one state become one span, what no metric reads is forgotten, and after that the oldest.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=1 << 16)
        self._encoder = msgspec.json.Encoder()
        self._recent: list[Span] = []

    def append(self, span: Span) -> None:
        """Write a span."""
        self._file.write(self._encoder.encode(span) + b"\n")
        self._recent.append(span)
        if len(self._recent) > _MAX_RECENT:
            read = (each for each in self._recent if each.is_lane or each.drafts or each.task not in _NOT_READ)
            joined = sorted(join_pieces(read), key=lambda each: each.end)  # a long state goes on to the newest moment
            self._recent = joined[-_MAX_RECENT * 3 // 4 :]  # with room, so that this is seldom

    def window(self, start: float, end: float, step: int) -> list[Span]:
        """The spans that overlap [start, end], and earlier ones beside a lane, of groups that are trained in `step` or later.

        Others that ended by `start` are forgotten: windows must not move back.
        """
        self._recent = [span for span in self._recent if span.end > start or (not span.is_lane and span.step >= step)]
        return [span for span in self._recent if span.start < end]

    def flush(self) -> None:
        """Hand what is buffered to the operating system, so that a killed run keeps it."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_spans(path: Path) -> list[Span]:
    """Spans of a file, as `spans_in` has them."""
    return [*spans_in(path)]


def spans_in(path: Path) -> Iterator[Span]:
    """Spans of a file in the order written; none when it is missing. A half-written last line is left out.

    A `UserError` names a line that is no span.
    """
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(Span)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                span = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise UserError(f"{path} line {number} is not a span ({error}).") from error
            yield span


def join_pieces(spans: Iterable[Span]) -> list[Span]:
    """Long states as one span each: a recorder cuts the state that goes on whenever it reports.

    Lane spans of a worker that meet exactly and say the same become one, with their rows, tokens and bytes added up. A real clock
    moves between two tasks, so two of a kind in a row do not meet; under a virtual clock they may, and become one too.
    """
    joined: list[Span] = []
    last: dict[str, int] = {}
    for span in spans:
        position = last.get(span.worker)
        if span.is_lane and position is not None and _continues(joined[position], span):
            before = joined[position]
            counts = {name: getattr(before, name) + getattr(span, name) for name in ("rows", "tokens", "bytes")}
            joined[position] = msgspec.structs.replace(before, end=span.end, **counts)
            continue
        if span.is_lane:
            last[span.worker] = len(joined)
        joined.append(span)
    return joined


def _continues(before: Span, span: Span) -> bool:
    same = ("task", "cause", "step", "version", "group", "layout", "device")
    return before.end == span.start and all(getattr(before, name) == getattr(span, name) for name in same)


def worker_order(workers: Iterable[str]) -> list[str]:
    """Workers in the order in which they are drawn: rollout, then others, trainers, the driver last; 2 before 10."""
    pools = {"rollout": 0, "trainer": 2, "driver": 3}

    def key(worker: str) -> tuple[int, list[tuple[int, str]]]:
        parts = re.findall(r"\d+|\D+", worker)
        return pools.get(worker.split("/")[0], 1), [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]

    return sorted(set(workers), key=key)


def write_trace(run_dir: Path) -> Path:
    """Write `trace.json` from the run's `spans.jsonl` (no events when that is missing) and return its path."""
    path = run_dir / TRACE_FILE
    events = trace_events(read_spans(run_dir / SPANS_FILE))
    path.write_bytes(msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events}))
    return path


def trace_events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Chrome Trace Events; `ts` and `dur` in microseconds from the first span's start.

    One process per worker, so that its lane (`X` events), its overlapping work (`b`/`e` pairs) and the counter of groups in
    flight stay together on the page.
    """
    spans = join_pieces(spans)
    origin = min((span.start for span in spans), default=0.0)
    pids = {worker: pid for pid, worker in enumerate(worker_order(span.worker for span in spans), 1)}
    events = [event for worker, pid in pids.items() for event in _names(worker, pid)]
    for number, span in enumerate(spans):
        place = {"pid": pids[span.worker], "tid": _LANE_THREAD}
        start, end = round((span.start - origin) * 1e6, 3), round((span.end - origin) * 1e6, 3)
        if span.is_lane:
            name = f"wait: {span.cause}" if span.task == WAIT else span.task
            category = "wait" if span.task == WAIT else "busy"
            duration = round(end - start, 3)
            events.append({"ph": "X", "name": name, "cat": category, **place, "ts": start, "dur": duration, "args": _args(span)})
        else:
            pair = {"name": span.task, "cat": span.worker, "id": str(number), **place}
            events.append({"ph": "b", **pair, "ts": start, "args": _args(span)})
            events.append({"ph": "e", **pair, "ts": end})
    return events + _in_flight(spans, pids, origin)


def _names(worker: str, pid: int) -> list[dict[str, Any]]:
    place = {"ph": "M", "pid": pid, "tid": _LANE_THREAD}
    return [
        {"name": "process_name", **place, "args": {"name": worker}},
        {"name": "process_sort_index", **place, "args": {"sort_index": pid}},
        {"name": "thread_name", **place, "args": {"name": f"{worker} lane"}},
    ]


def _args(span: Span) -> dict[str, Any]:
    known = {"step": span.step, "version": span.version}
    named = {
        "cause": span.cause,
        "rows": span.rows,
        "tokens": span.tokens,
        "bytes": span.bytes,
        "layout": span.layout,
        "device": span.device,
    }
    return {name: value for name, value in known.items() if value >= 0} | {name: value for name, value in named.items() if value}


def _in_flight(spans: Sequence[Span], pids: dict[str, int], origin: float) -> list[dict[str, Any]]:
    """A counter per worker: how many groups it generates at once."""
    changes = sorted(
        (time, change, span.worker)
        for span in spans
        if not span.is_lane and span.task == "generate_group"
        for time, change in ((span.start, 1), (span.end, -1))
    )
    counts: dict[str, int] = {}
    events = []
    for time, change, worker in changes:
        counts[worker] = counts.get(worker, 0) + change
        stamp = round((time - origin) * 1e6, 3)
        events.append({"ph": "C", "name": "groups in flight", "pid": pids[worker], "ts": stamp, "args": {"groups": counts[worker]}})
    return events
