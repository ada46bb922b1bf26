"""How busy a run keeps the machine's cores, and what full passes and helpers make of its steps. CPU.

    python benchmarks/idle.py [--recipe smollm2 or quickstart] [--model PATH] [--steps 4] [--repeats 1] [--ways ...] [--set K=V ...]

before     a micro-batch a pass, every row computed, no helpers
passes     full passes, rows without a gradient left out, no helpers
helpers    the same with helpers
threads    the same, and the rollout worker computes with all cores that nobody else uses (rollout.num_threads=auto)
workers    as helpers, with two rollout workers, whose cores helpers use while neither has anything to generate: the defaults

Each way is one whole command, without evaluations; the ways take turns. Seconds of a step, and how busy cores are in it, are those
behind the first step, which begins while workers load; medians over steps. A core is busy while a lane works on it (generate,
install, forward_backward, optim_step), and during a helper's pass (`perf/cores_busy`).
`--model`: for smollm2 where the Hugging Face Hub cannot be reached, the folder of recipes/models/make_smollm2.py.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from figures import Figure, finish, parser, run_name, runs_folder

from asyncflow.telemetry.idle import WAIT, lane_seconds
from asyncflow.telemetry.spans import Span
from asyncflow.telemetry.trace import SPANS_FILE, read_spans

ROOT = Path(__file__).parent.parent
BEFORE = ("train.tokens_per_micro_batch=null", "train.skip_zero_advantages=false")
ONE_WORKER = "rollout.num_workers=1"
WAYS: Mapping[str, Sequence[str]] = {
    "before": (*BEFORE, "train.helpers=0", ONE_WORKER),
    "passes": ("train.helpers=0", ONE_WORKER),
    "helpers": (ONE_WORKER,),
    "threads": ("rollout.num_threads=auto", ONE_WORKER),
    "workers": ("rollout.num_workers=2",),
}
NOT_COMPUTING = (WAIT, "load", "save")
FIRST = 1
"""Steps before it are left out."""


@dataclass(frozen=True)
class Steps:
    """Seconds of each step, share of the cores that were busy in it, and of the trainer's and the rollout workers' lanes."""

    seconds: list[float]
    busy: list[float]
    training: list[float]
    generating: list[float]


def run(folder: Path, recipe: str, name: str, steps: int, settings: Sequence[str]) -> Steps:
    """Run one way to its end, and read what it has written."""
    own = [
        f"run.dir={folder}",
        f"run.name={name}",
        f"run.steps={steps}",
        "run.overwrite=true",
        "eval.path=null",
        "checkpoint.keep=0",
    ]
    command = [sys.executable, "-c", "from asyncflow.cli import main; main()", "train", f"recipes/{recipe}.yaml"]
    subprocess.run([*command, *own, *settings], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    spans = read_spans(folder / name / SPANS_FILE)
    ends = commits(spans)
    found = Steps([], [], [], [])
    for row, begin, end in zip(rows[FIRST:], ends[FIRST - 1 :], ends[FIRST:], strict=False):
        of_lanes = {pool: lane(spans, pool, begin, end) for pool in ("trainer/", "rollout/")}
        found.seconds.append(row["perf/step_seconds"])
        found.busy.append(row["perf/cores_busy"])
        found.training.append(of_lanes["trainer/"])
        found.generating.append(of_lanes["rollout/"])
    return found


def commits(spans: Sequence[Span]) -> list[float]:
    """Ends of the last updates of steps, in order."""
    ends: dict[int, float] = {}
    for span in spans:
        if span.task == "optim_step" and span.is_lane:
            ends[span.step] = max(ends.get(span.step, 0.0), span.end)
    return [ends[step] for step in sorted(ends)]


def lane(spans: Sequence[Span], pool: str, begin: float, end: float) -> float:
    """Seconds in which the lanes of a pool compute."""
    return sum(
        seconds
        for span, seconds in lane_seconds(spans, begin, end)
        if span.worker.startswith(pool) and span.task not in NOT_COMPUTING
    )


def main() -> int:
    arguments = parser(__doc__, has_runs=True)
    arguments.add_argument("--recipe", choices=("smollm2", "quickstart"), default="smollm2")
    arguments.add_argument("--model", metavar="PATH")
    arguments.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    arguments.add_argument("--steps", type=int, default=4)
    arguments.add_argument("--repeats", type=int, default=1)
    arguments.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of all ways")
    given = arguments.parse_args()
    settings = [*given.set, *([f"model.path={given.model}"] if given.model else [])]
    found: dict[str, list[Steps]] = {way: [] for way in given.ways}
    with runs_folder(given.dir) as folder:
        for number in range(given.repeats):
            for way in given.ways:
                name = run_name("idle", given.recipe, way, str(number))
                found[way].append(run(folder, given.recipe, name, given.steps, [*settings, *WAYS[way]]))
                print(f"{name}: {[round(seconds, 2) for seconds in found[way][-1].seconds]}", flush=True)
    figures: list[Figure] = []
    medians: dict[str, float] = {}
    for way, runs in found.items():
        medians[way] = statistics.median(seconds for each in runs for seconds in each.seconds)
        busy = statistics.median(share for each in runs for share in each.busy)
        figures += [
            Figure(f"{way}: a step", medians[way], "s"),
            Figure(f"{way}: the trainer's lane computes", statistics.median(s for each in runs for s in each.training), "s"),
            Figure(f"{way}: lanes of rollout workers compute", statistics.median(s for each in runs for s in each.generating), "s"),
            Figure(f"{way}: share of the cores that is busy", busy, "", ">= 0.9" if way == "workers" else None),
        ]
    for slower, faster in product(("before", "passes"), ("helpers", "threads", "workers")):
        if {slower, faster} <= medians.keys():
            target = ">= 2" if (slower, given.recipe) == ("before", "smollm2") else None
            figures.append(Figure(f"{slower} / {faster}, a step", medians[slower] / medians[faster], "x", target))
    return finish(figures, given.json)


if __name__ == "__main__":
    sys.exit(main())
