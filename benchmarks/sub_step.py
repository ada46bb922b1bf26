"""Sub-step asynchrony against the delayed update: how much younger its samples are, and what that costs.

    python benchmarks/sub_step.py [--workers 4] [--steps 16] [--dir FOLDER] [--json FILE]

Both modes train step s on samples of version s - 1; sub_step also on those of s, made by workers that have changed over by then,
one after another. Told are the share of samples that the newest version made (a group is as old as its oldest token), and the
throughput.

A worker that changes over empties its slots first, for which it takes its longest response. In the cases with a target a worker
makes 8 responses a slot and step, so that it takes a fifth of the step; training takes 0.3, 0.9 or 1.5 of what rollout takes. In
the last of them rollout is a step ahead, and keeps part of each step for the newest version (`schedule.newest_share`). One more
case tells where the gain ends, `few, wide`: 4 responses a slot and step, and wider lengths: changing over takes half a step, and
the turn seldom comes to the last worker before the next version.

Sleeping engines in virtual time: four workers and a trainer, each of them busy, are more than a small machine can run at once.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from figures import Figure, finish, parser, run_name, runs_folder
from whole_runs import Run, run_sleeping

from asyncflow.engines.costs import Costs, Lengths


@dataclass(frozen=True, slots=True)
class Case:
    """`token_seconds` of training; `num_slots` of a worker; `sigma` of the lengths; whether the targets hold for it."""

    name: str
    token_seconds: float
    num_slots: int
    sigma: float
    has_target: bool = True


CASES = (
    Case("fast training", 1e-4, num_slots=16, sigma=0.4),
    Case("balanced", 3e-4, num_slots=16, sigma=0.4),
    Case("slow training", 5e-4, num_slots=16, sigma=0.4),
    Case("few, wide", 1e-4, num_slots=32, sigma=0.6, has_target=False),
)


def run(folder: Path, schedule: str, case: Case, workers: int, steps: int) -> Run:
    costs = Costs(
        decode_step_seconds=0.02,
        train_token_seconds=case.token_seconds,
        optim_step_seconds=0.5,
        publish_seconds=0.3,
        fetch_seconds=0.6,
        install_seconds=0.1,
        lengths=Lengths(prompt=64, response_median=128, response_sigma=case.sigma),
    )
    tree = {
        "run": {"steps": steps, "dir": str(folder), "name": run_name(case.name, schedule)},
        "model": {"path": "none"},
        "data": {"path": "generated:arithmetic"},
        "schedule": schedule,
        "rollout": {"num_workers": workers, "num_slots": case.num_slots, "group_size": 4, "max_new_tokens": 1024},
        "train": {"prompts_per_step": 32 * workers},
        "telemetry": {"samples_per_step": 0},
    }
    return run_sleeping(tree, costs)


def newest(done: Run) -> float:
    """Share of the trained rows whose group has no token of an older version; none is more than one version old."""
    return 1.0 - done.mean("staleness/mean")


def main() -> int:
    arguments = parser(__doc__, has_runs=True)
    arguments.add_argument("--workers", type=int, default=4)
    arguments.add_argument("--steps", type=int, default=16)
    given = arguments.parse_args()
    figures = []
    print(f"{'':14}  mode      s a step  rollout idle  trainer idle  by the newest version")
    with runs_folder(given.dir) as folder:
        for case in CASES:
            runs = {mode: run(folder, mode, case, given.workers, given.steps) for mode in ("delayed", "sub_step")}
            for mode, done in runs.items():
                idle = sum(done.idle(worker) for worker in done.workers("rollout")) / given.workers
                print(
                    f"{case.name:14}  {mode:8}  {done.mean('perf/step_seconds'):8.3f}  {idle:12.1%}  "
                    f"{done.idle('trainer/0'):12.1%}  {newest(done):21.1%}",
                    flush=True,
                )
            throughput = runs["delayed"].mean("perf/step_seconds") / runs["sub_step"].mean("perf/step_seconds")
            share, speed = (">= 0.3333", ">= 0.98") if case.has_target else (None, None)
            figures += [
                Figure(f"{case.name}: samples by the newest version, sub_step", newest(runs["sub_step"]), "", share),
                Figure(f"{case.name}: throughput, sub_step / delayed", throughput, "", speed),
            ]
    return finish(figures, given.json)


if __name__ == "__main__":
    sys.exit(main())
