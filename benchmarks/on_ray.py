"""What Ray costs: the same recipe with workers of `cluster: local` and of `cluster: ray`, in turn, on this machine.

    python benchmarks/on_ray.py [--steps 30] [--rounds 3] [--dir FOLDER] [--json FILE]

The quickstart recipe. Both place the same processes, so what differs is what Ray's own processes take of the cores. A step counts
after the first five, which load and warm up. Of each round, the two medians are compared; the figure is the median over rounds. The
weights of all runs must be the same to the bit.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from figures import Figure, finish, parser, runs_folder

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
WARM_UP_STEPS = 5
CLUSTERS = ("local", "ray")


def run(cluster: str, run_dir: Path, steps: int) -> tuple[float, float, str]:
    """One run: the median of its steps, all that it took, in seconds, and the hash of its model."""
    began = time.monotonic()
    overrides = [
        f"cluster={cluster}",
        f"run.dir={run_dir.parent}",
        f"run.name={run_dir.name}",
        f"run.steps={steps}",
        "run.overwrite=true",
    ]
    command = [sys.executable, "-m", "asyncflow", "train", str(RECIPE), *overrides, "eval.path=null", "telemetry.trackers=[]"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=RECIPE.parent.parent)
    seconds = time.monotonic() - began
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    digest = hashlib.sha256((run_dir / "model" / "model.safetensors").read_bytes()).hexdigest()
    return statistics.median(row["perf/step_seconds"] for row in rows[WARM_UP_STEPS:]), seconds, digest


def main() -> int:
    arguments = parser(__doc__, has_runs=True)
    arguments.add_argument("--steps", type=int, default=30)
    arguments.add_argument("--rounds", type=int, default=3)
    given = arguments.parse_args()
    steps: dict[str, list[float]] = {cluster: [] for cluster in CLUSTERS}
    totals: dict[str, list[float]] = {cluster: [] for cluster in CLUSTERS}
    models = set()
    with runs_folder(given.dir) as folder:
        for number in range(given.rounds):
            for cluster in CLUSTERS if number % 2 == 0 else reversed(CLUSTERS):
                median, seconds, digest = run(cluster, folder / f"{cluster}-{number}", given.steps)
                print(f"round {number}, {cluster:5}  {median:.3f} s a step, {seconds:.1f} s in all", flush=True)
                steps[cluster].append(median)
                totals[cluster].append(seconds)
                models.add(digest)
    ratios = [ray / local for local, ray in zip(steps["local"], steps["ray"], strict=True)]
    more = [ray - local for local, ray in zip(totals["local"], totals["ray"], strict=True)]
    figures = [
        Figure("median step, local", statistics.median(steps["local"]), "s"),
        Figure("median step, ray", statistics.median(steps["ray"]), "s"),
        Figure("median step, ray / local", statistics.median(ratios), "", "<= 1.05"),
        Figure("different models", len(models), "", "<= 1"),
        Figure("start and end, ray - local", statistics.median(more), "s"),
    ]
    return finish(figures, given.json)


if __name__ == "__main__":
    sys.exit(main())
