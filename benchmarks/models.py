"""A real language model that learns: the recipe over SmolLM2-135M-Instruct, as a user runs it.

    python benchmarks/models.py [--lora] [--model PATH] [--seeds 0] [--steps 30] [--dir runs/models] [--keep] [--json FILE]

Each seed is one whole command. It prints the mean reward of the first and last five steps, and of held-out prompts before and
after, and minutes. `--lora`: the same with a low-rank adapter (docs/lora.md), too, and what both have gained, over all seeds. With
`--keep` a run that has ended already is not made again. The picture of reward and response length is smollm2.svg in `--dir`.
`--model` where the Hugging Face Hub cannot be reached: the folder of recipes/models/make_smollm2.py.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from figures import Figure, finish, parser
from stability import Learnt, picture, read

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "smollm2.yaml"
FEW = 5  # steps at each end
MINUTES = 15
KINDS = {"whole": [], "adapter": ["model.lora={rank: 16, alpha: 32}", "train.learning_rate=2e-4"]}


@dataclass(frozen=True)
class Run:
    """Run of a seed to its end."""

    curves: Learnt
    before: float
    """Accuracy of held-out prompts, sampled, before the first step."""

    @property
    def rewards(self) -> tuple[float, float]:
        """Mean reward of the first and of the last steps."""
        return statistics.fmean(self.curves.reward[:FEW]), statistics.fmean(self.curves.reward[-FEW:])

    @property
    def gains(self) -> Gains:
        first, last = self.rewards
        return Gains(last - first, self.curves.accuracy - self.before)


class Gains(NamedTuple):
    """Gains of a run: of mean reward, and of held-out accuracy."""

    reward: float
    accuracy: float


def run(folder: Path, name: str, settings: Sequence[str], steps: int, *, keeps: bool) -> Run:
    """Run the recipe with these settings; or not, with `keeps`, if it has been run to its end already."""
    learnt = read(folder / name, steps) if keeps else None
    if learnt is None:
        own = [f"run.dir={folder}", f"run.name={name}", f"run.steps={steps}", "run.overwrite=true"]
        command = [sys.executable, "-c", "from asyncflow.cli import main; main()", "train", str(RECIPE), *own, *settings]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        learnt = read(folder / name, steps)
    assert learnt is not None, f"{folder / name} has no last evaluation"
    rows = [json.loads(line) for line in (folder / name / "eval.jsonl").read_text().splitlines()]
    return Run(learnt, float(next(row for row in rows if row["step"] == 0)["accuracy/sampled"]))


def of_run(name: str, done: Run) -> list[Figure]:
    """Figures of a run. `name`: its seed, and what is trained."""
    (first, last), minutes = done.rewards, done.curves.seconds[-1] / 60
    return [
        Figure(f"{name}: mean reward of the first {FEW} steps", first, ""),
        Figure(f"{name}: of the last {FEW}", last, "", f">= {max(2 * first, 0.2):.3f}"),
        Figure(f"{name}: held-out prompts, sampled, before", done.before, ""),
        Figure(f"{name}: after {len(done.curves.reward)} steps", done.curves.accuracy, "", f">= {done.before + 0.3:.3f}"),
        Figure(f"{name}: training", minutes, "min", f"<= {MINUTES}"),
    ]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--lora", action="store_true")
    arguments.add_argument("--model", metavar="PATH")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--steps", type=int, default=30)
    arguments.add_argument("--keep", action="store_true")
    arguments.add_argument("--dir", type=Path, default=ROOT / "runs" / "models")
    given = arguments.parse_args()
    folder, figures = given.dir.resolve(), []
    runs: dict[str, list[Run]] = {}
    for kind, settings in KINDS.items() if given.lora else [*KINDS.items()][:1]:
        for seed in given.seeds:
            own = [f"run.seed={seed}", *([f"model.path={given.model}"] if given.model else []), *settings]
            done = run(folder, f"smollm2-{kind}-{seed}", own, given.steps, keeps=given.keep)
            runs.setdefault(kind, []).append(done)
            figures += of_run(f"{kind}, seed {seed}", done)
    if given.lora:
        for name in Gains._fields:
            whole, adapter = (statistics.fmean(getattr(each.gains, name) for each in runs[kind]) for kind in KINDS)
            figures.append(Figure(f"gain of {name}, adapter / whole weights", adapter / whole, "", ">= 0.9"))
    (folder / "smollm2.svg").write_text(picture({kind: [each.curves for each in done] for kind, done in runs.items()}))
    print(f"picture: {folder / 'smollm2.svg'}")
    return finish(figures, given.json)


if __name__ == "__main__":
    sys.exit(main())
