"""The quickstart as a user runs it: what it learns, how long it takes, and whether its memory grows.

    python benchmarks/quickstart.py [--seeds 0 1 2] [--dir FOLDER] [--json FILE]

Each seed is one whole command (start-up, both evaluations, model and report included). Its seconds are compared with those that it
cannot do without, of the same run: a bare interpreter's import of torch and of the model's class (see start_up.py), and the time in
which the busier worker computes. The rest is the start beyond imports, waits, and the end.

Memory is the resident set of all the run's processes together, read twice a second; its slope per step is a least-squares line
through what was read after step 5.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
from figures import Figure, finish, parser, runs_folder
from start_up import floor

from asyncflow.telemetry.idle import busy_and_idle
from asyncflow.telemetry.trace import SPANS_FILE, read_spans

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
FIRST_STEP = 5


def resident_bytes(process: psutil.Process) -> int:
    """Of a process and all below it; one that ends while it is looked at counts as nothing."""
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            total += member.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def run(seed: int, folder: Path) -> tuple[float, float, float, float, float]:
    """(seconds, seconds in which the busier worker computes, accuracy before, accuracy after, bytes per step) of one run."""
    settings = [f"run.seed={seed}", f"run.dir={folder}", f"run.name=seed-{seed}", "run.overwrite=true"]
    began = time.monotonic()
    command = subprocess.Popen(
        [sys.executable, "-c", "from asyncflow.cli import main; main()", "train", str(RECIPE), *settings],
        cwd=RECIPE.parent.parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    committed: list[int] = []
    reader = threading.Thread(target=_count_steps, args=(command, committed), daemon=True)
    reader.start()
    seen: list[tuple[int, int]] = []
    process = psutil.Process(command.pid)
    while command.poll() is None:
        time.sleep(0.5)
        if len(committed) > FIRST_STEP and command.poll() is None:
            seen.append((len(committed), resident_bytes(process)))
    seconds = time.monotonic() - began
    reader.join()
    evaluations = [json.loads(line) for line in (folder / f"seed-{seed}" / "eval.jsonl").read_text().splitlines()]
    steps, sizes = zip(*seen[:-4], strict=True)  # the last two seconds are the end of the run: processes come and go
    slope = float(np.polyfit(steps, sizes, 1)[0])
    spans = read_spans(folder / f"seed-{seed}" / SPANS_FILE)
    busy = max(busy_and_idle(spans, worker).busy_seconds for worker in {span.worker for span in spans})
    return seconds, busy, evaluations[0]["accuracy/sampled"], evaluations[-1]["accuracy/sampled"], slope


def _count_steps(command: subprocess.Popen[str], committed: list[int]) -> None:
    assert command.stdout is not None
    for line in command.stdout:
        if line.startswith("step "):
            committed.append(1)
        elif "held-out" in line or "finished" in line:
            print(f"  {line.rstrip()}", flush=True)


def main() -> int:
    arguments = parser(__doc__, has_runs=True)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = arguments.parse_args()
    figures = []
    with runs_folder(given.dir) as folder:
        for seed in given.seeds:
            print(f"seed {seed}", flush=True)
            imports = floor()[1]
            seconds, busy, before, after, slope = run(seed, folder)
            figures += [
                Figure(f"held-out sampled accuracy before, seed {seed}", before, "", "<= 0.45"),
                Figure(f"held-out sampled accuracy after, seed {seed}", after, "", ">= 0.90"),
                Figure(f"whole command, seed {seed}", seconds, "s"),
                Figure(f"  imports of a bare interpreter, seed {seed}", imports, "s"),
                Figure(f"  the busier worker computes, seed {seed}", busy, "s"),
                Figure(f"  whole command / both, seed {seed}", seconds / (imports + busy), "times", "<= 1.5"),
                Figure(f"resident memory per step after step {FIRST_STEP}, seed {seed}", slope / 1e6, "MB", "<= 0.5"),
            ]
    return finish(figures, given.json)


if __name__ == "__main__":
    sys.exit(main())
