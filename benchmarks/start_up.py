"""From Enter to the line of the quickstart's first step: the time, and the processes' memory and CPU time until then.

    python benchmarks/start_up.py [--rounds 3] [--steps 6] [--against FOLDER] [--dir FOLDER] [--json FILE]

Each run is the quickstart without evaluations and with fewer steps, in processes that are started as a user starts them. Start-up
ends when the line of the first step is printed, so it holds that step. It is told in two measures of the same rounds:

    floor   a bare interpreter imports torch, and the class of the quickstart's model from transformers
    step    the median of the run's steps after the second

Memory is the sum over the run's processes, read at the line of each step: proportional set size, which counts a page that n
processes share as 1/n in each of them, or resident set size where the system has no other. CPU time, read at the first step's line,
tells how much of the start-up is work; a busy machine disturbs it less than the time by the clock.

`--against FOLDER` runs another checkout of the project in the same rounds, before this one and after it in turn. Ratios are the
medians of the rounds' ratios. One run of each checkout comes first and is not counted: it compiles the checkout's modules, and the
files are in the system's cache after it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from figures import Figure, finish, parser, runs_folder

ROOT = Path(__file__).parent.parent
QUICKSTART_STEPS = 40
FLOOR = """
import torch
print("torch", flush=True)
from transformers import Qwen2ForCausalLM
print(Qwen2ForCausalLM.__name__, flush=True)
"""
MEMORY = "proportional" if hasattr(psutil.Process().memory_full_info(), "pss") else "resident"


@dataclass(frozen=True)
class Run:
    """Seconds to the line of the first step, by the clock and of CPU time, and of a later step by the clock; bytes at the first
    step's line and at the line with most."""

    start_up: float
    cpu: float
    step: float
    memory: int
    peak: int


@dataclass(frozen=True)
class Round:
    """`floor`: seconds to torch, and to torch and the model's class."""

    this: Run
    floor: tuple[float, float]
    other: Run | None


def timed_lines(tree: Path, *arguments: str) -> Iterator[tuple[float, str, int]]:
    """(seconds since the start, line, process id) for each line that an interpreter prints which imports from this checkout."""
    environment, began = {**os.environ, "PYTHONPATH": str(tree)}, time.perf_counter()
    with subprocess.Popen([sys.executable, *arguments], cwd=tree, env=environment, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        for line in command.stdout:
            yield time.perf_counter() - began, line, command.pid
    if command.returncode:
        raise SystemExit(f"{tree}: exit code {command.returncode}")


def used(pid: int) -> tuple[float, int]:
    """(CPU seconds, bytes) of a process and all below it; one that ends while it is looked at counts as nothing."""
    seconds, num_bytes, command = 0.0, 0, psutil.Process(pid)
    for process in [command, *command.children(recursive=True)]:
        try:
            memory, times = process.memory_full_info(), process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        num_bytes += getattr(memory, "pss", memory.rss)
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds, num_bytes


def run(tree: Path, steps: int, folder: Path, name: str) -> Run:
    recipe = tree / "recipes" / "quickstart.yaml"
    settings = ["eval.path=null", f"run.steps={steps}", f"run.dir={folder}", f"run.name={name}", "run.overwrite=true"]
    moments, uses = [], []
    for moment, line, pid in timed_lines(tree, "-c", "from asyncflow.cli import main; main()", "train", str(recipe), *settings):
        if line.startswith("step "):
            moments.append(moment)
            uses.append(used(pid))
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    cpu, memory = uses[0]
    print(f"  {name}: {moments[0]:.2f} s, {cpu:.2f} s of CPU time, {memory / 1e6:.0f} MB", flush=True)
    step = statistics.median(row["perf/step_seconds"] for row in rows[2:])
    return Run(moments[0], cpu, step, memory, max(num_bytes for _, num_bytes in uses))


def floor() -> tuple[float, float]:
    torch, both = [moment for moment, _, _ in timed_lines(ROOT, "-c", FLOOR)]
    print(f"  torch {torch:.2f} s, with the model's class {both:.2f} s", flush=True)
    return torch, both


def check_tree(tree: Path) -> Path:
    """Refuses a folder that `asyncflow` is not imported from."""
    tree = tree.resolve()
    found = [line.strip() for _, line, _ in timed_lines(tree, "-c", "import asyncflow; print(asyncflow.__file__)")]
    if found != [str(tree / "asyncflow" / "__init__.py")]:
        raise SystemExit(f"{tree}: a run there would import {found[0]}")
    return tree


def measure(trees: dict[str, Path], rounds: int, steps: int, folder: Path) -> list[Round]:
    """`trees`: `this` checkout and perhaps the `other`."""
    for name, tree in trees.items():
        run(tree, steps, folder, f"{name}-uncounted")
    seen = []
    for number in range(rounds):
        names = sorted(trees, reverse=number % 2 == 0)
        runs = {name: run(trees[name], steps, folder, f"{name}-{number}") for name in names}
        seen.append(Round(runs["this"], floor(), runs.get("other")))
    return seen


def main() -> int:
    arguments = parser(__doc__, has_runs=True)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=6, help="of each run, 3 or more")
    arguments.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout, which start-up is to take half of")
    given = arguments.parse_args()
    if given.steps < 3:
        arguments.error("--steps: 3 or more, since a step's seconds are those after the second")
    trees = {"this": check_tree(ROOT)} | ({"other": check_tree(given.against)} if given.against else {})
    with runs_folder(given.dir) as folder:
        rounds = measure(trees, given.rounds, given.steps, folder)

    def median(figure: Callable[[Round], float]) -> float:
        return statistics.median(map(figure, rounds))

    figures = [
        Figure("start-up", median(lambda one: one.this.start_up), "s"),
        Figure("  floor: a bare interpreter imports torch", median(lambda one: one.floor[0]), "s"),
        Figure("  floor: and the model's class", median(lambda one: one.floor[1]), "s"),
        Figure("  start-up / floor", median(lambda one: one.this.start_up / one.floor[1]), "times"),
        Figure("  a step", median(lambda one: one.this.step), "s"),
        Figure("  start-up / a step", median(lambda one: one.this.start_up / one.this.step), "times"),
        Figure(
            f"  start-up / {QUICKSTART_STEPS} steps",
            median(lambda one: one.this.start_up / one.this.step / QUICKSTART_STEPS),
            "times",
        ),
        Figure("  CPU time until then", median(lambda one: one.this.cpu), "s"),
        Figure(f"memory at the first step ({MEMORY} set size)", median(lambda one: one.this.memory) / 1e6, "MB"),
        Figure(f"  at the step with most of {given.steps}", median(lambda one: one.this.peak) / 1e6, "MB"),
    ]
    if given.against:
        figures += against([(one.this, one.other) for one in rounds if one.other])
    return finish(figures, given.json)


def against(pairs: list[tuple[Run, Run]]) -> list[Figure]:
    def ratio(figure: Callable[[Run], float]) -> float:
        return statistics.median(figure(this) / figure(other) for this, other in pairs)

    others = [other for _, other in pairs]
    return [
        Figure("the other's start-up", statistics.median(other.start_up for other in others), "s"),
        Figure("  start-up / the other's", ratio(lambda one: one.start_up), "times", "<= 0.5"),
        Figure("  CPU time until then / the other's", ratio(lambda one: one.cpu), "times"),
        Figure("the other's memory at the first step", statistics.median(other.memory for other in others) / 1e6, "MB"),
        Figure("  memory at the first step / the other's", ratio(lambda one: one.memory), "times"),
        Figure("  memory at the step with most / the other's", ratio(lambda one: one.peak), "times"),
        Figure("  a step / the other's", ratio(lambda one: one.step), "times"),
    ]


if __name__ == "__main__":
    sys.exit(main())
