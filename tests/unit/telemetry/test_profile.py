"""What a profile's spans are summed up to."""

from __future__ import annotations

from itertools import count

import pytest

from asyncflow.telemetry.profile import Cost, costs, table
from asyncflow.telemetry.spans import Recorder, Span

starts = count(0.0, 10.0)


def span(worker: str, task: str, seconds: float, **counts: int) -> Span:
    start = next(starts)
    return Span(worker=worker, task=task, start=start, end=start + seconds, **counts)


def test_a_task_takes_the_median_of_its_repetitions_on_the_slowest_rank() -> None:
    spans = [
        span("trainer/0", "warm_up", 9.0, tokens=8),
        *(span("trainer/0", "layer_forward", seconds, tokens=8) for seconds in (1.0, 5.0, 2.0)),
        *(span("trainer/1", "layer_forward", seconds, tokens=8) for seconds in (3.0, 3.0, 8.0)),
        span("trainer/0", "between", 99.0),
        span("trainer/0", "wait", 99.0),
        *(span("trainer/0", "layer_forward", seconds, tokens=4) for seconds in (0.5, 0.25, 0.75)),
        span("trainer/0", "optim_step", 0.125, bytes=4),
    ]
    assert costs(spans) == [
        Cost("layer_forward", 4, 0, 0.5, 3),
        Cost("layer_forward", 8, 0, 3.0, 3),
        Cost("optim_step", 0, 4, 0.125, 1),
    ]


def test_decode_steps_are_summed_up_by_about_their_number_of_slots() -> None:
    steps = [span("rollout/0", "decode_step", 0.001 * rows, rows=rows, tokens=50 * rows) for rows in (1, 2, 5, 6, 8, 9)]
    found = costs(steps)
    assert [cost.slots for cost in found] == [1, 2, 8, 16]
    assert [cost.seconds for cost in found] == pytest.approx([0.001, 0.002, 0.006, 0.009])
    assert table(found)[2] == ("decode step", "5 to 8 slots", "6 ms", "750 us a slot")
    together = span("rollout/0", "decode_step", 0.03, rows=30, tokens=900, calls=5)  # of 6 slots each
    assert costs([*steps, together])[2].seconds == pytest.approx(0.006)
    assert table([Cost("score", 0, 0, 0.5, 3)]) == [("score", "", "500 ms", "")]


def test_rates_are_by_token_by_parameter_and_by_second() -> None:
    found = [
        Cost("layer_forward", 1000, 0, 0.25, 3),
        Cost("optim_step", 0, 4_000_000, 0.003, 3),
        Cost("dp/all_gather", 0, 16_000_000, 0.002, 3),
        Cost("pp/send", 0, 512, 1.0, 3),
    ]
    assert table(found) == [
        ("layer forward", "1,000 tokens", "250 ms", "250 us a token"),
        ("optim step", "1,000,000 parameters", "3 ms", "3 ns a parameter"),
        ("dp/all gather", "16 MB", "2 ms", "8 GB/s"),
        ("pp/send", "512 B", "1 s", "512 B/s"),
    ]


def test_what_a_recorder_writes_is_understood() -> None:
    spans: list[Span] = []
    clock = iter([0.0, 1.0, 1.5, 2.0, 4.0, 5.0])
    recorder = Recorder("trainer/0", lambda: next(clock), spans.append)
    recorder.enter("between")
    for _ in range(2):
        with recorder.busy("head_loss", tokens=10):
            pass
    assert costs(spans) == [Cost("head_loss", 10, 0, 0.75, 2)]
