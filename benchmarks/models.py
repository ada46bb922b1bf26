"""A real language model that learns: the recipe over SmolLM2-135M-Instruct, as a user runs it.

    python benchmarks/models.py [--model PATH] [--seeds 0] [--steps 30] [--dir runs/models] [--keep] [--json FILE]

Each seed is one whole command. It prints the mean reward of the first and last five steps, and of held-out prompts before and
after, and minutes. With `--keep` a run that has ended already is not made again. The picture of reward and response length is
smollm2.svg in `--dir`. `--model` where the Hugging Face Hub cannot be reached: the folder of recipes/models/make_smollm2.py.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

from figures import Figure, finish, parser
from stability import Learnt, picture, read

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "smollm2.yaml"
FEW = 5  # steps at each end
MINUTES = 15


def run(folder: Path, model: str | None, seed: int, steps: int, *, keeps: bool) -> Learnt:
    """Run a seed; or not, with `keeps`, if it has been run to its end already."""
    name = f"smollm2-{seed}"
    learnt = read(folder / name, steps) if keeps else None
    if learnt is None:
        settings = [f"run.seed={seed}", f"run.dir={folder}", f"run.name={name}", f"run.steps={steps}", "run.overwrite=true"]
        settings += [f"model.path={model}"] if model else []
        command = [sys.executable, "-c", "from asyncflow.cli import main; main()", "train", str(RECIPE), *settings]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        learnt = read(folder / name, steps)
    assert learnt is not None, f"{folder / name} has no last evaluation"
    return learnt


def first_accuracy(run_dir: Path) -> float:
    """Held-out accuracy, sampled, before the first step."""
    rows = [json.loads(line) for line in (run_dir / "eval.jsonl").read_text().splitlines()]
    return float(next(row for row in rows if row["step"] == 0)["accuracy/sampled"])


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--model", metavar="PATH")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--steps", type=int, default=30)
    arguments.add_argument("--keep", action="store_true")
    arguments.add_argument("--dir", type=Path, default=ROOT / "runs" / "models")
    given = arguments.parse_args()
    folder, figures, runs = given.dir.resolve(), [], []
    for seed in given.seeds:
        learnt = run(folder, given.model, seed, given.steps, keeps=given.keep)
        runs.append(learnt)
        first, last = statistics.fmean(learnt.reward[:FEW]), statistics.fmean(learnt.reward[-FEW:])
        before, minutes = first_accuracy(folder / f"smollm2-{seed}"), learnt.seconds[-1] / 60
        figures += [
            Figure(f"seed {seed}: mean reward of the first {FEW} steps", first, ""),
            Figure(f"seed {seed}: of the last {FEW}", last, "", f">= {max(2 * first, 0.2):.3f}"),
            Figure(f"seed {seed}: held-out prompts, sampled, before", before, ""),
            Figure(f"seed {seed}: after {given.steps} steps", learnt.accuracy, "", f">= {before + 0.3:.3f}"),
            Figure(f"seed {seed}: training", minutes, "min", f"<= {MINUTES}"),
        ]
    (folder / "smollm2.svg").write_text(picture({"periodic": runs}))
    print(f"picture: {folder / 'smollm2.svg'}")
    return finish(figures, given.json)


if __name__ == "__main__":
    sys.exit(main())
