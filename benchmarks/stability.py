"""AF's Fig. 12: the quickstart under every mode, several seeds each: what is learnt, by step and by wall time, and how well.

    python benchmarks/stability.py [--modes NAME ...] [--seeds 0 1 2] [--steps 40] [--dir runs/stability] [--keep] [--json FILE]

Each run is a whole command in a folder of its own. With `--keep` one that has ended already is not run again, so that all may be
made in parts, of one state of the code. Wall times compare only if nothing else ran. The picture, stability.svg in `--dir`, has
what there is: mean reward and mean response length of each training step, thin lines for seeds and thick ones for their mean.

The final accuracy is that of sampled answers to 256 held-out problems; the mean of each mode's seeds is held against synchronous.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from figures import Figure, finish, parser

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
MODES = {
    "synchronous": "synchronous",
    "periodic": "periodic",
    "delayed": "delayed",
    "sub_step": "sub_step",
    "bounded": "{name: bounded, max_staleness: 2}",
}
COLOURS = ("#5F6570", "#0072B2", "#E69F00", "#009E73", "#CC79A7")  # of what is compared, in its order
WIDTH, HEIGHT, MARGIN = 420, 250, 50  # of a panel, and left of and below its plot

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Learnt:
    """A run's curves, and its final accuracy. `seconds`: from its start of generation to each step's commit."""

    seconds: list[float]
    reward: list[float]
    length: list[float]
    accuracy: float


def run(folder: Path, mode: str, seed: int, steps: int, *, keeps: bool) -> Learnt:
    """Run it; or not, with `keeps`, if it has been run to its end already."""
    run_dir = folder / f"{mode}-{seed}"
    learnt = read(run_dir, steps) if keeps else None
    if learnt is None:
        settings = [f"run.seed={seed}", f"run.dir={folder}", f"run.name={run_dir.name}", f"run.steps={steps}", "run.overwrite=true"]
        command = [sys.executable, "-c", "from asyncflow.cli import main; main()", "train", str(RECIPE), *settings]
        subprocess.run([*command, f"schedule={MODES[mode]}"], cwd=RECIPE.parent.parent, stdout=subprocess.DEVNULL, check=True)
        learnt = read(run_dir, steps)
    assert learnt is not None, f"{run_dir} has no last evaluation"
    print(f"{mode:12} seed {seed}: final accuracy {learnt.accuracy:.3f}, {learnt.seconds[-1]:.1f} s of training", flush=True)
    return learnt


def read(run_dir: Path, steps: int) -> Learnt | None:
    """What a run has left; None if there is none that has ended after so many steps."""
    if not (run_dir / "eval.jsonl").exists():
        return None
    evaluations = [json.loads(line) for line in (run_dir / "eval.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in evaluations if row["step"] == steps]
    if not last or len(rows) != steps:
        return None
    return Learnt(
        seconds=list(accumulate(row["perf/step_seconds"] for row in rows)),
        reward=[row["reward/mean"] for row in rows],
        length=[row["response_length/mean"] for row in rows],
        accuracy=last[0]["accuracy/sampled"],
    )


# -- the picture ------------------------------------------------------------------------------------------------------------------


def picture(runs: dict[str, list[Learnt]]) -> str:
    """Four panels, as SVG."""
    columns: dict[str, Callable[[Learnt], list[float]]] = {
        "step": lambda learnt: [float(i) for i in range(len(learnt.seconds))],
        "seconds": lambda learnt: learnt.seconds,
    }
    rows: dict[str, Callable[[Learnt], list[float]]] = {
        "mean reward": lambda learnt: learnt.reward,
        "mean response length, tokens": lambda learnt: learnt.length,
    }
    panels = []
    for i, (title, value) in enumerate(rows.items()):
        for j, (label, at) in enumerate(columns.items()):
            lines = {mode: [list(zip(at(learnt), value(learnt), strict=True)) for learnt in seeds] for mode, seeds in runs.items()}
            panels.append(f'<g transform="translate({j * WIDTH},{30 + i * HEIGHT})">{panel(title, label, lines)}</g>')
    legend = "".join(
        f'<rect x="{MARGIN + 130 * i}" y="8" width="14" height="4" fill="{COLOURS[i]}"/>'
        f'<text x="{MARGIN + 130 * i + 20}" y="14">{mode} ({len(seeds)})</text>'
        for i, (mode, seeds) in enumerate(runs.items())
    )
    width, height = len(columns) * WIDTH, 30 + len(rows) * HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11" fill="#333"><rect width="100%" height="100%" fill="#fff"/>'
        f"{legend}{''.join(panels)}</svg>\n"
    )


def panel(title: str, label: str, lines: dict[str, list[Points]]) -> str:
    """Plot, as SVG. `lines`: by mode, the points of each seed."""
    every = [point for seeds in lines.values() for points in seeds for point in points]
    (x_low, x_high), (y_low, y_high) = ((min(values), max(values)) for values in zip(*every, strict=True))
    x_low, room = 0.0, 0.05 * (y_high - y_low or 1.0)
    y_low, y_high = y_low - room, y_high + room

    def place(point: tuple[float, float]) -> str:
        x = MARGIN + (point[0] - x_low) / (x_high - x_low or 1.0) * (WIDTH - MARGIN - 15)
        y = 20 + (y_high - point[1]) / (y_high - y_low) * (HEIGHT - MARGIN - 20)
        return f"{x:.1f},{y:.1f}"

    def line(points: Points, colour: str, style: str) -> str:
        return f'<polyline fill="none" stroke="{colour}" {style} points="{" ".join(map(place, points))}"/>'

    drawn = [f'<text x="{MARGIN}" y="12" font-weight="bold">{title}</text>']
    for tick in ticks(y_low, y_high):
        x, y = place((x_low, tick)).split(",")
        drawn.append(line([(x_low, tick), (x_high, tick)], "#ddd", 'stroke-width="1"'))
        drawn.append(f'<text x="{float(x) - 6:.1f}" y="{float(y) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in ticks(x_low, x_high):
        x, y = place((tick, y_low)).split(",")
        drawn.append(f'<text x="{x}" y="{float(y) + 15:.1f}" text-anchor="middle">{tick:g}</text>')
    drawn.append(f'<text x="{WIDTH - 15}" y="{HEIGHT - MARGIN + 32}" text-anchor="end">{label}</text>')
    for colour, seeds in zip(COLOURS, lines.values(), strict=False):
        drawn += [line(points, colour, 'stroke-width="0.7" opacity="0.35"') for points in seeds]
    drawn += [
        line(mean(seeds), colour, 'stroke-width="2"') for colour, seeds in zip(COLOURS, lines.values(), strict=False) if seeds
    ]
    return "".join(drawn)


def mean(seeds: Sequence[Points]) -> Points:
    """Step by step, of both coordinates."""
    return [tuple(map(statistics.fmean, zip(*points, strict=True))) for points in zip(*seeds, strict=True)]  # type: ignore[misc]


def ticks(low: float, high: float) -> list[float]:
    """Some four round numbers."""
    width = 10.0 ** math.floor(math.log10((high - low) / 4))
    width *= min(factor for factor in (1, 2, 5, 10) if factor * width >= (high - low) / 4)
    return [round(i * width, 10) for i in range(math.ceil(low / width), math.floor(high / width) + 1)]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--modes", nargs="+", default=[*MODES], choices=[*MODES], metavar="NAME")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--steps", type=int, default=40)
    arguments.add_argument("--keep", action="store_true")
    arguments.add_argument("--dir", type=Path, default=RECIPE.parent.parent / "runs" / "stability")
    given = arguments.parse_args()
    folder = given.dir.resolve()
    runs: dict[str, list[Learnt]] = {mode: [] for mode in given.modes}
    for seed in given.seeds:  # the modes of a seed one after another: what is on the machine meanwhile, all of them have
        for mode, learnt in runs.items():
            learnt.append(run(folder, mode, seed, given.steps, keeps=given.keep))
    (folder / "stability.svg").write_text(picture(runs))
    print(f"picture: {folder / 'stability.svg'}")
    accuracy = {mode: statistics.fmean(learnt.accuracy for learnt in seeds) for mode, seeds in runs.items()}
    figures = [Figure(f"{mode}: mean final accuracy", value, "") for mode, value in accuracy.items()]
    if "synchronous" in accuracy:
        differences = {mode: abs(value - accuracy["synchronous"]) for mode, value in accuracy.items() if mode != "synchronous"}
        figures += [Figure(f"{mode}: distance from synchronous", value, "", "<= 0.03") for mode, value in differences.items()]
    figures += [
        Figure(f"{mode}: mean seconds of training", statistics.fmean(learnt.seconds[-1] for learnt in seeds), "s")
        for mode, seeds in runs.items()
    ]
    return finish(figures, given.json)


if __name__ == "__main__":
    sys.exit(main())
