"""What generating and training side by side gains: every mode, real engines, two processes of one thread, slots swept.

    python benchmarks/overlap.py [--slots 16 24 32 64 128] [--steps 14] [--modes NAME ...] [--dir FOLDER] [--json FILE]
                                 [--median 36] [--sigma 0.85] [--longest 260]

All modes run the same seed and workload: 40 prompts x 8 responses a step, of lognormal length, made by a random model. The first
two steps and the last two are left out (see whole_runs.py).

periodic. From the synchronous run's spans come, for every step, the moments done_i at which its groups were complete (from when
generation began, in order) and the time train_i that each took to train. With nothing but those, a step that trains each group as
soon as it is there lasts

    x = max(x, done_i) + train_i   for every i in order, from x = 0            (papers: PA 6-7, for continuous batching)

which the periodic run's steps, measured from commit to commit, are held against.

delayed. Neither side waits for the other but for what the slower one takes, so the busier side is idle for hardly any time. That is
told where it matters: at the fewest slots with which a step takes at most 5% longer than with the best number of them; more
slots than that stand empty. Occupancy: share of the slots that hold a response, mean over the time in which the worker generates.
Exposed weight time: what a step's weights cost the rollout worker, installing them and waiting for them once they are made.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

from figures import Figure, finish, parser, runs_folder
from lognormal import make_model
from whole_runs import Run, run_real

from asyncflow.workflows import SCHEDULES

ENGINE = {"path": f"{Path(__file__).with_name('lognormal.py')}:LognormalSlots"}
WORKER = "rollout/0"


def run(folder: Path, model: Path, schedule: str, slots: int, steps: int, lengths: Mapping[str, float], longest: int) -> Run:
    return run_real(
        {
            "run": {"name": f"{schedule}-{slots}", "dir": str(folder), "steps": steps, "overwrite": True},
            "model": {"path": str(model)},
            "data": {"path": "generated:arithmetic", "limit": 2000},
            "schedule": schedule,
            "rollout": {"engine": {**ENGINE, **lengths}, "num_slots": slots, "group_size": 8, "max_new_tokens": longest},
            "train": {"prompts_per_step": 40, "learning_rate": 1e-6},
            "telemetry": {"trackers": [], "samples_per_step": 0, "flush_seconds": 0.05},
        }
    )


def recurrence(synchronous: Run, step: int) -> float:
    """x of the module's head."""
    groups = [span for span in synchronous.spans if span.task == "generate_group" and span.step == step]
    began = min(span.start for span in groups)
    train, x = synchronous.seconds("forward_backward", step), 0.0
    for span in sorted(groups, key=lambda span: span.end):
        x = max(x, span.end - began) + train[span.group]
    return x


def main() -> int:
    arguments = parser(__doc__, has_runs=True)
    arguments.add_argument("--slots", type=int, nargs="+", default=[16, 24, 32, 64, 128])
    arguments.add_argument("--steps", type=int, default=14)
    arguments.add_argument("--modes", nargs="+", default=[*SCHEDULES], choices=[*SCHEDULES], metavar="NAME")
    arguments.add_argument("--median", type=float, default=36.0, help="of the responses' lengths, in tokens")
    arguments.add_argument("--sigma", type=float, default=0.85, help="of their logarithms")
    arguments.add_argument("--longest", type=int, default=260, help="tokens at which a response is cut off")
    given = arguments.parse_args()
    lengths = {"median": given.median, "sigma": given.sigma}
    runs: dict[tuple[str, int], Run] = {}
    seconds: dict[tuple[str, int], float] = {}  # of a step, the median
    print("slots  mode          s a step  recurrence  rollout idle  trainer idle  occupancy  exposed weights  staleness")
    with runs_folder(given.dir) as folder:
        model = make_model(folder / "model")
        for slots in given.slots:
            for mode in given.modes:
                runs[mode, slots] = done = run(folder, model, mode, slots, given.steps, lengths, given.longest)
                seconds[mode, slots] = statistics.median(done.rows[step]["perf/step_seconds"] for step in done.measured)
                x = bound(runs["synchronous", slots]) if mode == "periodic" and ("synchronous", slots) in runs else None
                print(
                    f"{slots:5}  {mode:12}  {seconds[mode, slots]:8.3f}  {'' if x is None else format(x, '.3f'):>10}  "
                    f"{done.idle(WORKER):12.1%}  {done.idle('trainer/0'):12.1%}  {done.occupancy(WORKER, slots):9.1%}  "
                    f"{exposed(done):15.2%}  {done.mean('staleness/mean'):9.2f}",
                    flush=True,
                )
    return finish([*periodic_figures(runs, seconds, given.slots), *delayed_figures(runs, seconds, given.slots)], given.json)


def bound(synchronous: Run) -> float:
    return statistics.median(recurrence(synchronous, step) for step in synchronous.measured)


def exposed(done: Run) -> float:
    """Share of the window that the rollout worker installs weights, or waits for them once they are made."""
    return done.share(WORKER, "install") + done.share(WORKER, "weights")


def periodic_figures(runs: dict[tuple[str, int], Run], seconds: dict[tuple[str, int], float], slots: list[int]) -> list[Figure]:
    if ("synchronous", slots[0]) not in runs or ("periodic", slots[0]) not in runs:
        return []
    ratios = {n: seconds["periodic", n] / bound(runs["synchronous", n]) for n in slots}
    gain = min(seconds["synchronous", n] for n in slots) / min(seconds["periodic", n] for n in slots)
    return [
        *(Figure(f"periodic step / recurrence, {n} slots", ratio, "", "<= 1.15") for n, ratio in ratios.items()),
        Figure("best synchronous step / best periodic step", gain, "", ">= 1.3"),
    ]


def delayed_figures(runs: dict[tuple[str, int], Run], seconds: dict[tuple[str, int], float], slots: list[int]) -> list[Figure]:
    if ("delayed", slots[0]) not in runs:
        return []
    best = min(seconds["delayed", n] for n in slots)
    chosen = min(n for n in slots if seconds["delayed", n] <= 1.05 * best)
    done = runs["delayed", chosen]
    figures = [
        Figure(
            f"delayed, {chosen} slots: idle share of the busier side", min(done.idle(WORKER), done.idle("trainer/0")), "", "<= 0.05"
        ),
        Figure(f"delayed, {chosen} slots: mean slot occupancy", done.occupancy(WORKER, chosen), "", ">= 0.85"),
        Figure(
            f"delayed, {chosen} slots: the same over all of the time",
            done.occupancy(WORKER, chosen) * done.share(WORKER, "generate"),
            "",
        ),
        Figure(f"delayed, {chosen} slots: exposed weight time / step", exposed(done), "", "<= 0.01"),
        Figure(f"delayed, {chosen} slots: publishing / step, on the trainer", done.share("trainer/0", "publish"), ""),
    ]
    others = dict.fromkeys(mode for mode, _ in runs if mode != "delayed")
    return figures + [
        Figure(f"best {mode} step / best delayed step", min(seconds[mode, n] for n in slots) / best, "") for mode in others
    ]


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
