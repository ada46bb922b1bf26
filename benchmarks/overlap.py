"""What generating and training side by side gains: every mode, real engines, two processes of one thread, slots swept.

    python benchmarks/overlap.py [--slots 16 24 64] [--steps 12] [--modes NAME ...] [--dir FOLDER] [--json FILE]
                                 [--median 64] [--sigma 0.85] [--longest 460]

All modes run the same seed and workload: 40 prompts x 8 responses a step, of lognormal length, made by a random model. The first
two steps and the last two of a run are left out (see whole_runs.py); each mode is measured over the same --steps steps after them.
Those of the synchronous and the periodic mode are every other one of two runs (see every_other.py), of which the second has in one
mode what the first has in the other. Seconds are the means of the runs' medians.

periodic. From a periodic step's spans come the moments done_i at which its groups were complete (from when generation began, in
order) and the time train_i that each took to train. With nothing but those, a step that trains each group as soon as it is there
lasts

    x = max(x, done_i) + train_i   for every i in order, from x = 0            (papers: PA 6-7, for continuous batching)

The step itself, measured from commit to commit, is compared with that. So both are of the same times: those which generation and
training take beside each other. What a step lasts longer than x is the update, the weights' way to the rollout worker, and waits
that the data do not ask for.

On two cores each half is slower beside the other than alone: the driver, the workers' event loops and the reward worker compute on
the same cores, about 1.3 ms for each response, which is more of a step where responses are shorter. This contention is a figure of
its own, without a target: the time of each half in the periodic steps against its time in the synchronous ones.

delayed. Neither side waits for the other but for what the slower one takes, so the busier side is idle for hardly any time. That is
told where it matters: at the fewest slots with which the trainer is idle for at most 5% of the time, since all that more slots can
take from a step is what it waits for. (Steps of several runs cannot say which number is enough: what the trainer computes takes 5%
more or less from one run to the next.) More slots than that stand empty, since each batch must drain: of its 320 responses 64 slots
hold a fifth at once. Occupancy: share of the slots that hold a response, mean over the time in which the worker generates.
Exposed weight time: what a step's weights cost the two sides, mean of both. The rollout worker installs them, or waits for them
once they are made; the trainer waits until they may be changed again (`perf/exposed_weights`).
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import every_other
from figures import Figure, finish, parser, runs_folder
from lognormal import make_model
from whole_runs import FIRST, LAST, Run, run_real

from asyncflow.control import SCHEDULES

ENGINE = {"path": f"{Path(__file__).with_name('lognormal.py')}:LognormalSlots"}
WORKER = "rollout/0"
TRAINER = "trainer/0"
EVERY_OTHER = f"{Path(every_other.__file__)}:EveryOther"
MODES_IN_TURN: tuple[every_other.Mode, ...] = ("synchronous", "periodic")


class Runs(list[Run]):
    """Runs in which one mode is measured with one number of slots."""

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.mean(lambda done: median(done, lambda step: done.rows[step]["perf/step_seconds"]))

    @property
    def recurrence(self) -> float:
        """Seconds: x of the module's head."""
        return self.mean(lambda done: median(done, lambda step: recurrence(done, step)))

    @property
    def generation(self) -> float:
        """Seconds of a step from the start of its first group to the end of its last."""
        return self.mean(lambda done: median(done, lambda step: completions(done, step)[-1][0]))

    @property
    def training(self) -> float:
        """Seconds of a step in which gradients are computed."""
        return self.mean(lambda done: median(done, lambda step: sum(done.seconds("forward_backward", step).values())))

    def mean(self, figure: Callable[[Run], float]) -> float:
        return statistics.fmean(map(figure, self))


def median(done: Run, figure: Callable[[int], float]) -> float:
    """Of the measured steps."""
    return statistics.median(map(figure, done.measured))


def in_turn(of_workload: Callable[[str, Any], Run]) -> Iterator[tuple[every_other.Mode, Run]]:
    """What the synchronous and the periodic steps of two runs say."""
    for first in MODES_IN_TURN:
        name, schedule = f"{first}-and-{every_other.other(first)}", {"name": EVERY_OTHER, "first": first}
        both = of_workload(name, schedule)
        for mode in MODES_IN_TURN:
            yield mode, replace(both, measured=[step for step in both.measured if every_other.mode_of(step, first) == mode])


def run(
    folder: Path, model: Path, slots: int, steps: int, lengths: Mapping[str, float], longest: int, name: str, schedule: Any
) -> Run:
    """Run of so many measured steps."""
    return run_real(
        {
            "run": {"name": f"{name}-{slots}", "dir": str(folder), "steps": FIRST + steps + LAST, "overwrite": True},
            "model": {"path": str(model)},
            "data": {"path": "generated:arithmetic", "limit": 2000},
            "schedule": schedule,
            "rollout": {"engine": {**ENGINE, **lengths}, "num_slots": slots, "group_size": 8, "max_new_tokens": longest},
            # The recurrence is that of groups which are trained one by one, all of them, on one core.
            "train": {
                "prompts_per_step": 40,
                "learning_rate": 1e-6,
                "skip_zero_advantages": False,
                "tokens_per_micro_batch": 1,
                "helpers": 0,
            },
            # A slot is known to be free to half a flush, see `Run.occupancy`.
            "telemetry": {"trackers": [], "samples_per_step": 0, "flush_seconds": 0.1},
        }
    )


def completions(done: Run, step: int) -> list[tuple[float, int]]:
    """(seconds from the start of the step's generation, group), in the order in which groups were complete."""
    groups = [span for span in done.spans if span.task == "generate_group" and span.step == step]
    began = min(span.start for span in groups)
    return sorted((span.end - began, span.group) for span in groups)


def recurrence(done: Run, step: int) -> float:
    """x of the module's head, with this run's moments and times."""
    train, x = done.seconds("forward_backward", step), 0.0
    for moment, group in completions(done, step):
        x = max(x, moment) + train[group]
    return x


def main() -> int:
    arguments = parser(__doc__, has_runs=True)
    arguments.add_argument("--slots", type=int, nargs="+", default=[16, 24, 64])
    arguments.add_argument("--steps", type=int, default=12, help="that are measured, of each mode")
    modes = [mode for mode in SCHEDULES if mode != "synchronous"]
    arguments.add_argument(
        "--modes", nargs="+", default=modes, choices=modes, metavar="NAME", help="periodic: beside it synchronous"
    )
    arguments.add_argument("--median", type=float, default=64.0, help="of the responses' lengths, in tokens")
    arguments.add_argument("--sigma", type=float, default=0.85, help="of their logarithms")
    arguments.add_argument("--longest", type=int, default=460, help="tokens at which a response is cut off")
    given = arguments.parse_args()
    lengths = {"median": given.median, "sigma": given.sigma}
    runs: dict[tuple[str, int], Runs] = {}
    print("slots  mode          s a step  recurrence  rollout idle  trainer idle  occupancy  exposed weights  staleness")
    with runs_folder(given.dir) as folder:
        model = make_model(folder / "model")
        for slots, mode in itertools.product(given.slots, given.modes):
            of_workload = partial(run, folder, model, slots, given.steps, lengths, given.longest)
            for name, done in in_turn(of_workload) if mode == "periodic" else [(mode, of_workload(mode, mode))]:
                runs.setdefault((name, slots), Runs()).append(done)
                show(name, slots, done)
    return finish([*periodic_figures(runs, given.slots), *delayed_figures(runs, given.slots)], given.json)


def show(mode: str, slots: int, done: Run) -> None:
    alone = Runs([done])
    x = format(alone.recurrence, ".3f") if mode in MODES_IN_TURN else ""
    print(
        f"{slots:5}  {mode:12}  {alone.seconds:8.3f}  {x:>10}  {done.idle(WORKER):12.1%}  {done.idle(TRAINER):12.1%}  "
        f"{done.occupancy(WORKER, slots):9.1%}  {exposed(done):15.2%}  {done.mean('staleness/mean'):9.2f}",
        flush=True,
    )


def exposed(done: Run) -> float:
    """Share of the time of both sides that weights take."""
    return statistics.fmean(weight_time(done, worker) for worker in (WORKER, TRAINER))


def weight_time(done: Run, worker: str) -> float:
    """Share of the time that a worker installs weights, or waits for them."""
    return done.share(worker, "install", "weights")


def periodic_figures(runs: Mapping[tuple[str, int], Runs], slots: list[int]) -> list[Figure]:
    if ("periodic", slots[0]) not in runs:
        return []
    figures = []
    for n in slots:
        alone, beside = runs["synchronous", n], runs["periodic", n]
        figures += [
            Figure(f"periodic step / recurrence of its own times, {n} slots", beside.seconds / beside.recurrence, "", "<= 1.05"),
            Figure(f"  generation beside training / alone, {n} slots", beside.generation / alone.generation, ""),
            Figure(f"  training beside generation / alone, {n} slots", beside.training / alone.training, ""),
        ]
    gain = best(runs, "synchronous", slots) / best(runs, "periodic", slots)
    return [*figures, Figure("best synchronous step / best periodic step", gain, "", ">= 1.3")]


def delayed_figures(runs: Mapping[tuple[str, int], Runs], slots: list[int]) -> list[Figure]:
    if ("delayed", slots[0]) not in runs:
        return []
    waiting = {n: runs["delayed", n].mean(lambda one: one.idle(TRAINER)) for n in slots}
    chosen = min((n for n in slots if waiting[n] <= 0.05), default=min(slots, key=lambda n: waiting[n]))
    done = runs["delayed", chosen]
    idle = min(done.mean(lambda one: one.idle(WORKER)), waiting[chosen])
    occupancy = done.mean(lambda one: one.occupancy(WORKER, chosen))
    over_all = done.mean(lambda one: one.occupancy(WORKER, chosen) * one.share(WORKER, "generate"))
    figures = [
        Figure(f"delayed, {chosen} slots: idle share of the busier side", idle, "", "<= 0.05"),
        Figure(f"delayed, {chosen} slots: mean slot occupancy", occupancy, "", ">= 0.85"),
        Figure(f"delayed, {chosen} slots: the same over all of the time", over_all, ""),
        Figure(f"delayed, {chosen} slots: exposed weight time / step", done.mean(exposed), "", "<= 0.01"),
        Figure(f"delayed, {chosen} slots: the same of the rollout worker", done.mean(lambda one: weight_time(one, WORKER)), ""),
        Figure(f"delayed, {chosen} slots: the same of the trainer", done.mean(lambda one: weight_time(one, TRAINER)), ""),
    ]
    others = dict.fromkeys(mode for mode, _ in runs if mode != "delayed")
    fastest = best(runs, "delayed", slots)
    return figures + [Figure(f"best {mode} step / best delayed step", best(runs, mode, slots) / fastest, "") for mode in others]


def best(runs: Mapping[tuple[str, int], Runs], mode: str, slots: list[int]) -> float:
    """Seconds of a step, with the best number of slots."""
    return min(runs[mode, n].seconds for n in slots)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
