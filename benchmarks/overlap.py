"""What generating and training side by side gains: every mode, real engines, two processes of one thread, slots swept.

    python benchmarks/overlap.py [--slots 16 24 64] [--rounds 2] [--steps 9] [--modes NAME ...] [--dir FOLDER] [--json FILE]
                                 [--median 64] [--sigma 0.85] [--longest 460]

All modes run the same seed and workload: 40 prompts x 8 responses a step, of lognormal length, made by a random model. The first
two steps and the last two of a run are left out (see whole_runs.py). A machine may be a third slower than it was a minute ago: the
runs that figures with a target are made of come in their order and then in the reverse of it, and a figure is the mean of its
rounds' medians, so that a steady drift is in both sides of a ratio. The other modes have one run, of as many measured steps.

periodic. From the synchronous runs' spans come, for every step, the moments done_i at which its groups were complete (from when
generation began, in order) and the time train_i that each took to train. With nothing but those, a step that trains each group as
soon as it is there lasts

    x = max(x, done_i) + train_i   for every i in order, from x = 0            (papers: PA 6-7, for continuous batching)

which the periodic runs' steps, measured from commit to commit, are held against. On two cores each half is slower beside the other
than alone: the driver, the workers' event loops and the reward worker compute on the same cores, about 1.3 ms for each response.
Where responses are half as long (--median 36 --longest 260) that is more of a step: up to 1.25 times was seen, in single runs.
So it is told, too, how much slower, and what the steps are to the recurrence with the periodic runs' own moments and times.

delayed. Neither side waits for the other but for what the slower one takes, so the busier side is idle for hardly any time. That is
told where it matters: at the fewest slots with which a step takes at most 5% longer than with the best number of them; more
slots than that stand empty, since each batch must drain: of its 320 responses 64 slots hold a fifth at once. Occupancy: share of
the slots that hold a response, mean over the time in which the worker generates.
Exposed weight time: what a step's weights cost the rollout worker, installing them and waiting for them once they are made.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from figures import Figure, finish, parser, runs_folder
from lognormal import make_model
from whole_runs import FIRST, LAST, Run, run_real

from asyncflow.workflows import SCHEDULES

ENGINE = {"path": f"{Path(__file__).with_name('lognormal.py')}:LognormalSlots"}
WORKER = "rollout/0"
WITH_TARGETS = ("synchronous", "periodic", "delayed")


class Rounds(list[Run]):
    """The runs of one mode with one number of slots."""

    @property
    def seconds(self) -> float:
        """Of a step: the mean of the rounds' medians."""
        return self.mean(lambda done: statistics.median(done.rows[step]["perf/step_seconds"] for step in done.measured))

    @property
    def recurrence(self) -> float:
        """Seconds: x of the module's head, the mean of the rounds' medians."""
        return self.mean(lambda done: statistics.median(recurrence(done, step) for step in done.measured))

    def mean(self, figure: Callable[[Run], float]) -> float:
        return statistics.fmean(map(figure, self))


def run(
    name: str, folder: Path, model: Path, schedule: str, slots: int, steps: int, lengths: Mapping[str, float], longest: int
) -> Run:
    return run_real(
        {
            "run": {"name": name, "dir": str(folder), "steps": steps, "overwrite": True},
            "model": {"path": str(model)},
            "data": {"path": "generated:arithmetic", "limit": 2000},
            "schedule": schedule,
            "rollout": {"engine": {**ENGINE, **lengths}, "num_slots": slots, "group_size": 8, "max_new_tokens": longest},
            "train": {"prompts_per_step": 40, "learning_rate": 1e-6},
            "telemetry": {"trackers": [], "samples_per_step": 0, "flush_seconds": 0.1},
        }
    )


def recurrence(done: Run, step: int) -> float:
    """x of the module's head, with this run's moments and times."""
    groups = [span for span in done.spans if span.task == "generate_group" and span.step == step]
    began = min(span.start for span in groups)
    train, x = done.seconds("forward_backward", step), 0.0
    for span in sorted(groups, key=lambda span: span.end):
        x = max(x, span.end - began) + train[span.group]
    return x


def main() -> int:
    arguments = parser(__doc__, has_runs=True)
    arguments.add_argument("--slots", type=int, nargs="+", default=[16, 24, 64])
    arguments.add_argument("--rounds", type=int, default=2, help="of the runs with targets, every second one in reverse order")
    arguments.add_argument("--steps", type=int, default=9, help="of each run")
    arguments.add_argument("--modes", nargs="+", default=[*SCHEDULES], choices=[*SCHEDULES], metavar="NAME")
    arguments.add_argument("--median", type=float, default=64.0, help="of the responses' lengths, in tokens")
    arguments.add_argument("--sigma", type=float, default=0.85, help="of their logarithms")
    arguments.add_argument("--longest", type=int, default=460, help="tokens at which a response is cut off")
    given = arguments.parse_args()
    lengths = {"median": given.median, "sigma": given.sigma}
    runs: dict[tuple[str, int], Rounds] = {}
    print("slots  mode          s a step  recurrence  rollout idle  trainer idle  occupancy  exposed weights  staleness")
    with runs_folder(given.dir) as folder:
        model = make_model(folder / "model")
        order = [(mode, slots) for slots in given.slots for mode in given.modes]
        for turn in range(given.rounds):
            for mode, slots in order[:: -1 if turn % 2 else 1]:
                if turn and mode not in WITH_TARGETS:
                    continue
                measured = (given.steps - FIRST - LAST) * (1 if mode in WITH_TARGETS else given.rounds)
                steps = FIRST + measured + LAST
                done = run(f"{mode}-{slots}-{turn}", folder, model, mode, slots, steps, lengths, given.longest)
                runs.setdefault((mode, slots), Rounds()).append(done)
                show(mode, slots, done)
    return finish([*periodic_figures(runs, given.slots), *delayed_figures(runs, given.slots)], given.json)


def show(mode: str, slots: int, done: Run) -> None:
    alone = Rounds([done])
    x = format(alone.recurrence, ".3f") if mode == "synchronous" else ""
    print(
        f"{slots:5}  {mode:12}  {alone.seconds:8.3f}  {x:>10}  {done.idle(WORKER):12.1%}  {done.idle('trainer/0'):12.1%}  "
        f"{done.occupancy(WORKER, slots):9.1%}  {exposed(done):15.2%}  {done.mean('staleness/mean'):9.2f}",
        flush=True,
    )


def training(done: Run) -> float:
    """Seconds of a step in which gradients are computed, the median: the same work in both modes."""
    return statistics.median(sum(done.seconds("forward_backward", step).values()) for step in done.measured)


def exposed(done: Run) -> float:
    """Share of the window that the rollout worker installs weights, or waits for them once they are made."""
    return done.share(WORKER, "install") + done.share(WORKER, "weights")


def periodic_figures(runs: Mapping[tuple[str, int], Rounds], slots: list[int]) -> list[Figure]:
    if ("synchronous", slots[0]) not in runs or ("periodic", slots[0]) not in runs:
        return []
    ratios = {n: runs["periodic", n].seconds / runs["synchronous", n].recurrence for n in slots}
    gain = best(runs, "synchronous", slots) / best(runs, "periodic", slots)
    own = {n: runs["periodic", n].seconds / runs["periodic", n].recurrence for n in slots}
    slower = {n: runs["periodic", n].mean(training) / runs["synchronous", n].mean(training) for n in slots}
    return [
        *(Figure(f"periodic step / recurrence, {n} slots", ratio, "", "<= 1.15") for n, ratio in ratios.items()),
        *(Figure(f"periodic step / recurrence of its own times, {n} slots", ratio, "") for n, ratio in own.items()),
        *(Figure(f"training beside generation / alone, {n} slots", ratio, "") for n, ratio in slower.items()),
        Figure("best synchronous step / best periodic step", gain, "", ">= 1.3"),
    ]


def delayed_figures(runs: Mapping[tuple[str, int], Rounds], slots: list[int]) -> list[Figure]:
    if ("delayed", slots[0]) not in runs:
        return []
    fastest = best(runs, "delayed", slots)
    chosen = min(n for n in slots if runs["delayed", n].seconds <= 1.05 * fastest)
    done = runs["delayed", chosen]
    idle = min(done.mean(lambda one: one.idle(WORKER)), done.mean(lambda one: one.idle("trainer/0")))
    occupancy = done.mean(lambda one: one.occupancy(WORKER, chosen))
    over_all = done.mean(lambda one: one.occupancy(WORKER, chosen) * one.share(WORKER, "generate"))
    figures = [
        Figure(f"delayed, {chosen} slots: idle share of the busier side", idle, "", "<= 0.05"),
        Figure(f"delayed, {chosen} slots: mean slot occupancy", occupancy, "", ">= 0.85"),
        Figure(f"delayed, {chosen} slots: the same over all of the time", over_all, ""),
        Figure(f"delayed, {chosen} slots: exposed weight time / step", done.mean(exposed), "", "<= 0.01"),
        Figure(
            f"delayed, {chosen} slots: publishing / step, on the trainer",
            done.mean(lambda one: one.share("trainer/0", "publish")),
            "",
        ),
    ]
    others = dict.fromkeys(mode for mode, _ in runs if mode != "delayed")
    return figures + [Figure(f"best {mode} step / best delayed step", best(runs, mode, slots) / fastest, "") for mode in others]


def best(runs: Mapping[tuple[str, int], Rounds], mode: str, slots: list[int]) -> float:
    """Seconds of a step, with the best number of slots."""
    return min(runs[mode, n].seconds for n in slots)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
