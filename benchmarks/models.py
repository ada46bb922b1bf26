"""Models as people have them: a real one that learns, whole and by an adapter; what an adapter costs; families; attestation.

    python benchmarks/models.py [--parts whole adapter costs families faults] [--model PATH] [--seeds 0] [--steps 30]
                                [--dir runs/models] [--keep] [--json FILE]

`whole`, `adapter`: the recipe over SmolLM2-135M-Instruct, as a user runs it, each seed one whole command: mean reward of the first
and last five steps, and of held-out prompts before and after, and minutes (an absolute aim: what a user of two cores is to wait for
a model that has learned, 15); of both parts, what they have gained, over all seeds.
With `--keep` a run that has ended already is not made again. The picture of reward and response length is smollm2.svg in `--dir`.
`--model` where the Hugging Face Hub cannot be reached: the folder of recipes/models/make_smollm2.py.
`costs`: lora.py, which needs a quiet machine: bytes, memory, step time, log-probs, attesting. `families`: how many kinds of model
train and generate as transformers does (the table of docs/models.md). `faults`: planted faults that are found at the first install.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from figures import Figure, finish, parser
from lora import TARGETS
from stability import Learnt, picture, read

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "smollm2.yaml"
FEW = 5  # steps at each end
MINUTES = 15
KINDS = {
    "whole": [],
    "adapter": [f"model.lora={{rank: 16, alpha: 32, targets: [{', '.join(TARGETS)}]}}", "train.learning_rate=2e-4"],
}


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


def of_recipe(kinds: Sequence[str], given: Namespace) -> list[Figure]:
    """Figures of the recipe, for each kind and seed, and of the gain of an adapter; and the picture."""
    folder, figures = given.dir.resolve(), []
    runs: dict[str, list[Run]] = {}
    for kind in kinds:
        for seed in given.seeds:
            own = [f"run.seed={seed}", *([f"model.path={given.model}"] if given.model else []), *KINDS[kind]]
            done = run(folder, f"smollm2-{kind}-{seed}", own, given.steps, keeps=given.keep)
            runs.setdefault(kind, []).append(done)
            figures += of_run(f"{kind}, seed {seed}", done)
    if len(runs) == len(KINDS):
        for name in Gains._fields:
            whole, adapter = (statistics.fmean(getattr(each.gains, name) for each in runs[kind]) for kind in KINDS)
            figures.append(Figure(f"gain of {name}, adapter / whole weights", adapter / whole, "", ">= 0.9"))
    (folder / "smollm2.svg").write_text(picture({kind: [each.curves for each in done] for kind, done in runs.items()}))
    print(f"picture: {folder / 'smollm2.svg'}")
    return figures


def of_costs(scratch: Path) -> list[Figure]:
    """Figures of lora.py, which says by its exit code whether its targets are met."""
    found = scratch / "lora.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "lora.py"), "--json", str(found)]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    return [Figure(each["name"], each["value"], each["unit"], each["target"]) for each in json.loads(found.read_text())]


def of_families(scratch: Path) -> list[Figure]:
    """Number of kinds of model that train and generate, by the lines of `tests.families`."""
    made = subprocess.run([sys.executable, "-m", "tests.families"], cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    lines = made.stdout.splitlines()
    right = {line.split(":")[0].split(",")[0] for line in lines if ": as it should be" in line}
    print("\n".join(line for line in lines if ": as it should be" not in line))
    wrong = len(lines) - sum(": as it should be" in line for line in lines)
    wrong = max(wrong, int(made.returncode != 0))  # it may have ended before the last family
    return [
        Figure("kinds of model (`model_type`) that train and generate", len(right), "", ">= 14"),
        Figure("  with something wrong", wrong, "", "<= 0"),
    ]


def of_faults(scratch: Path) -> list[Figure]:
    """Number of planted faults, and of those that are not found by name, by the tests that plant them."""
    report = scratch / "faults.xml"
    tests = ["tests/unit/test_attestation.py", "-k", "planted_fault", f"--junitxml={report}"]
    subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
    suites = ElementTree.parse(report).getroot().findall("testsuite")
    planted, missed = (sum(int(suite.get(name, 0)) for suite in suites for name in names) for names in (("tests",), BAD))
    return [
        Figure("planted faults of an installation", planted, "", ">= 6"),
        Figure("  not found by name at the first install", missed, "", "<= 0"),
    ]


BAD = ("failures", "errors", "skipped")
PARTS: dict[str, Callable[[Path], list[Figure]]] = {"costs": of_costs, "families": of_families, "faults": of_faults}


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--parts", nargs="+", choices=[*KINDS, *PARTS], default=[*KINDS, *PARTS])
    arguments.add_argument("--model", metavar="PATH")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--steps", type=int, default=30)
    arguments.add_argument("--keep", action="store_true")
    arguments.add_argument("--dir", type=Path, default=ROOT / "runs" / "models")
    given = arguments.parse_args()
    kinds = [kind for kind in KINDS if kind in given.parts]
    figures = of_recipe(kinds, given) if kinds else []
    with tempfile.TemporaryDirectory(prefix="asyncflow-models-") as scratch:
        for name in PARTS:
            if name in given.parts:
                figures += PARTS[name](Path(scratch))
    return finish(figures, given.json)


if __name__ == "__main__":
    sys.exit(main())
