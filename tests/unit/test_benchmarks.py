"""Benchmarks: what their figures are made of, without a measurement."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from asyncflow.config import load
from asyncflow.engines.base import SampleKey, Sampling
from asyncflow.telemetry.spans import Span
from tests.conftest import MODEL, ROOT

Benchmark = Callable[[str], ModuleType]

FAKE_CLI = """
import json, pathlib, sys, time

def main():
    settings = dict(argument.split("=", 1) for argument in sys.argv[3:])
    folder = pathlib.Path(settings["run.dir"], settings["run.name"])
    folder.mkdir(parents=True)
    (folder / "arguments.json").write_text(json.dumps(sys.argv[2:]))
    time.sleep({start_up})
    for step in range(int(settings["run.steps"])):
        print("held-out accuracy" if step == 0 else "", f"step {{step}}", sep="\\n", flush=True)
    rows = [{{"perf/step_seconds": seconds}} for seconds in (9.0, 8.0, 0.5, 0.25, 0.25)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Benchmark]:
    """A program of `benchmarks/` as a module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module


def spans_of(step: int, began: float, done: dict[int, float], train: dict[int, float]) -> list[Span]:
    """Of a step whose groups were complete so many seconds after `began`, and took so long to train."""
    made = [
        Span(worker="rollout/0", task="generate_group", start=began, end=began + s, is_lane=False, step=step, group=g)
        for g, s in done.items()
    ]
    return made + [
        Span(worker="trainer/0", task="forward_backward", start=began, end=began + s, step=step, group=g) for g, s in train.items()
    ]


def test_recurrence_trains_each_group_when_it_is_complete_and_the_trainer_is_free(benchmark_module: Benchmark) -> None:
    overlap = benchmark_module("overlap")
    spans = spans_of(4, 100.0, {1: 5.0, 2: 2.0, 3: 6.0}, {1: 1.0, 2: 4.0, 3: 3.0}) + spans_of(5, 120.0, {9: 50.0}, {9: 50.0})
    done = overlap.Run([4], {}, spans)
    assert overlap.recurrence(done, 4) == 2.0 + 4.0 + 1.0 + 3.0  # group 2, then 1 and 3, which wait for the trainer
    late = overlap.Run([4], {}, spans_of(4, 100.0, {1: 2.0, 2: 9.0}, {1: 1.0, 2: 3.0}))
    assert overlap.recurrence(late, 4) == 9.0 + 3.0


def test_periodic_steps_are_held_against_their_own_times_and_contention_has_no_target(benchmark_module: Benchmark) -> None:
    overlap = benchmark_module("overlap")
    # Alone 4 s of generation and 2 s of training; beside each other 6 s and 3 s, and a recurrence of 7 s.
    alone = overlap.Run([2], {2: {"perf/step_seconds": 10.5}}, spans_of(2, 0.0, {1: 2.0, 2: 4.0}, {1: 1.0, 2: 1.0}))
    beside = overlap.Run([3], {3: {"perf/step_seconds": 7.14}}, spans_of(3, 50.0, {1: 3.0, 2: 6.0}, {1: 2.0, 2: 1.0}))
    runs = {("synchronous", 16): overlap.Runs([alone]), ("periodic", 16): overlap.Runs([beside])}
    seen = {figure.name: (round(figure.value, 3), figure.target) for figure in overlap.periodic_figures(runs, [16])}
    assert seen == {
        "periodic step / recurrence of its own times, 16 slots": (1.02, "<= 1.05"),
        "  generation beside training / alone, 16 slots": (1.5, None),
        "  training beside generation / alone, 16 slots": (1.5, None),
        "best synchronous step / best periodic step": (1.471, ">= 1.3"),
    }


def new_checkout(folder: Path, start_up: float) -> Path:
    """Whose quickstart sleeps."""
    (folder / "asyncflow").mkdir(parents=True)
    (folder / "asyncflow" / "__init__.py").touch()
    (folder / "asyncflow" / "cli.py").write_text(FAKE_CLI.format(start_up=start_up))
    return folder


def test_start_up_is_measured_in_two_checkouts_in_turn(
    benchmark_module: Benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start_up = benchmark_module("start_up")
    monkeypatch.setattr(start_up, "floor", lambda: (1.0, 2.0))
    trees = {name: start_up.check_tree(new_checkout(tmp_path / name, s)) for name, s in (("this", 0.0), ("other", 1.0))}
    rounds = start_up.measure(trees, 2, 5, tmp_path / "runs")
    order = [line.split(":")[0].strip() for line in capsys.readouterr().out.splitlines()]
    assert order == ["this-uncounted", "other-uncounted", "this-0", "other-0", "other-1", "this-1"]
    for one in rounds:
        assert one.floor == (1.0, 2.0) and one.other.start_up - one.this.start_up > 0.5 and one.other.start_up >= 1.0
        assert one.this.step == 0.25 and 0 <= one.this.memory <= one.this.peak and one.this.cpu >= 0  # it may have ended already
    assert min(start_up.used(os.getpid())) > 0
    recipe, *settings = json.loads((tmp_path / "runs" / "this-0" / "arguments.json").read_text())
    config = load(ROOT / Path(recipe).relative_to(trees["this"]), settings)
    assert (config.run.name, config.run.steps, config.eval.path) == ("this-0", 5, None)


def test_start_up_is_to_take_half_of_the_other_s(benchmark_module: Benchmark) -> None:
    start_up = benchmark_module("start_up")
    runs = [start_up.Run(seconds, seconds, 1.0, 100, 200) for seconds in (4.0, 10.0, 5.0, 10.0, 60.0, 10.0)]
    figures = {f.name: (f.value, f.target, f.met) for f in start_up.against(list(zip(runs[::2], runs[1::2], strict=True)))}
    assert figures["  start-up / the other's"] == (0.5, "<= 0.5", True)  # the median of 0.4, 0.5 and 6
    assert [name for name, (_, target, _) in figures.items() if target] == ["  start-up / the other's"]


def test_a_folder_that_is_no_checkout_is_refused(benchmark_module: Benchmark, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        benchmark_module("start_up").check_tree(tmp_path)


def test_what_a_command_uses_holds_the_processes_below_it(benchmark_module: Benchmark) -> None:
    below = "import sys; block = b'1' * 200_000_000; print('ready', flush=True); sys.stdin.read()"
    above = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {below!r}])"
    with subprocess.Popen([sys.executable, "-c", above], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as command:
        assert command.stdout is not None and command.stdout.readline() == b"ready\n"
        seconds, num_bytes = benchmark_module("start_up").used(command.pid)
        command.communicate()
    assert 200_000_000 < num_bytes < 400_000_000 and seconds > 0


async def test_responses_of_the_lognormal_engine_are_as_long_as_drawn(benchmark_module: Benchmark) -> None:
    module = benchmark_module("lognormal")
    engine = module.LognormalSlots(MODEL, median=20.0, sigma=0.5, num_slots=4, max_context=128)
    try:
        key, sampling = SampleKey(seed=0, prompt_index=1), Sampling(max_new_tokens=60)
        made = [r async for r in engine.generate(np.arange(8), samples=tuple(range(6)), sampling=sampling, key=key)]
    finally:
        await engine.close()
    drawn = module.DrawnLengths(response_median=20.0, response_sigma=0.5)
    assert {r.sample: len(r.token_ids) for r in made} == {sample: drawn.draw(key, sample, 60)[0] for sample in range(6)}


def test_processor_and_instruction_set_are_printed_with_each_figure(
    benchmark_module: Benchmark, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = benchmark_module("figures")
    assert figures.finish([figures.Figure("share", 0.5, "", "<= 0.4")], None) == 1
    printed = capsys.readouterr().out
    assert f"{figures.processor()}, {os.cpu_count()} cores, instruction set {torch.backends.cpu.get_cpu_capability()};" in printed
    assert "0.5    to reach: <= 0.4   MISSED" in printed


@pytest.mark.parametrize(("target", "met"), [("<= 1", True), ("< 1", False), ("< 1.01", True), (">= 1", True), (None, True)])
def test_a_target_below_a_bound_is_not_met_at_it(benchmark_module: Benchmark, target: str | None, met: bool) -> None:
    assert benchmark_module("figures").Figure("a ratio", 1.0, "", target).met is met


@pytest.mark.parametrize(("lines", "status", "wrong"), [(1, 0, 0), (1, -11, 1), (2, 1, 1)])
def test_families_that_a_crash_leaves_out_are_something_wrong(
    lines: int, status: int, wrong: int, benchmark_module: Benchmark, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = "".join(["llama: as it should be Findings()\n", "opt: ValueError: no\n"][:lines])
    done = subprocess.CompletedProcess([], status, told)
    models = benchmark_module("models")
    monkeypatch.setattr(models.subprocess, "run", lambda *_, **__: done)
    assert [figure.value for figure in models.of_families(tmp_path)] == [1, wrong]
