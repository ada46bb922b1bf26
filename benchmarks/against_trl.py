"""AsyncFlow and TRL's GRPOTrainer on the same model, prompts, batch, loss, optimiser, dtype and two cores, one after the other.

    python benchmarks/against_trl.py [--recipe recipes/quickstart.yaml] [--model FOLDER] [--steps 40] [--seeds 0]
        [--generates-by generate] [--venv .venv-trl] [--dir FOLDER] [--json FILE]

The quickstart: 32 prompts x 8 responses a step, float32, GRPO with token-mean loss, no KL term; or another recipe with data that is
generated, such as recipes/smollm2.yaml with a folder of its model. TRL gets the prompts in the order in which AsyncFlow trains on
them, AsyncFlow's scorer, and its learning rate; it runs in an environment of its own, which the first call makes. Which of its ways
to generate, and which size of micro-batch, is the fastest here is tried first, and that one is taken.

A step lasts from commit to commit; the first three of each (of short runs the first) are left out. AsyncFlow is the whole
`asyncflow train` command, once with every row computed (`train.skip_zero_advantages=false`), as TRL does; and once without the rows
of groups whose rewards are all equal (their gradient is exactly 0), which is the default. Both have the two cores. Accuracy by step
is the mean reward of the step's own responses; held-out accuracy is that of the saved models, by `asyncflow eval`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from figures import Figure, finish, parser, runs_folder

from asyncflow.config import Config, load
from asyncflow.data.datasets import load_rows
from asyncflow.data.order import SeededOrder

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
TRL = "trl==1.16.0"
GENERATES_BY = ("generate", "continuous batching")
MICRO_BATCHES = (1, 4)  # of a step
TRIAL_STEPS, WARM_UP_STEPS = 4, 3
ALL_ROWS, SKIPPING = "AsyncFlow", "skipping"
WAYS = {ALL_ROWS: ["train.skip_zero_advantages=false"], SKIPPING: []}
AIMS, AIMS_ELSEWHERE = (">= 2.5", ">= 4"), (">= 2", ">= 2")  # all rows, skipping

Seen = tuple[list[float], list[float]]
"""Seconds and mean reward of each step."""


@dataclass(frozen=True)
class World:
    """The recipe that both train, and the folder of its model."""

    recipe: Path
    model: Path

    def config(self, *overrides: str) -> Config:
        """The configuration, without evaluations."""
        return load(self.recipe, [f"model.path={self.model}", "eval.path=null", *overrides])


def interpreter(venv: Path) -> Path:
    """One that has TRL; made where there is none."""
    python = venv / "bin" / "python"
    if not (venv / "installed").exists():
        print(f"making {venv} with {TRL}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "-c", str(ROOT / "constraints.txt"), TRL, "torch", "transformers", "msgspec"], check=True)
        (venv / "installed").touch()
    return python


def of_trl(python: Path, folder: Path, settings: dict[str, Any]) -> Seen:
    """One run of trl_run.py."""
    folder.mkdir(parents=True)
    given, result = folder / "settings.json", folder / "result.json"
    given.write_text(json.dumps({**settings, "target": str(folder / "model")}))
    threads = {"OMP_NUM_THREADS": str(settings["num_threads"]), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            [str(python), str(Path(__file__).with_name("trl_run.py")), str(given), str(result)],
            env={**os.environ, **threads},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        raise RuntimeError(f"TRL failed:\n{(folder / 'log').read_text()[-2000:]}")
    seen = json.loads(result.read_text())
    return seen["seconds"], seen["rewards"]


def of_asyncflow(world: World, folder: Path, seed: int, steps: int, way: Sequence[str]) -> Seen:
    """Run of the command."""
    settings = [
        f"run.dir={folder.parent}",
        f"run.name={folder.name}",
        f"run.seed={seed}",
        f"run.steps={steps}",
        f"model.path={world.model}",
        "eval.path=null",
        "run.overwrite=true",
    ]
    command = [sys.executable, "-m", "asyncflow", "train", str(world.recipe), *settings, *way]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["perf/step_seconds"] for row in rows], [row["reward/mean"] for row in rows]


def settings_of(world: World, seed: int, steps: int) -> dict[str, Any]:
    """Settings of the recipe, for trl_run.py."""
    config = world.config(f"run.seed={seed}")
    train, algorithm, data = config.train, config.algorithm.options, config.data
    assert data.path is not None and config.reward.scorer is not None
    rows = load_rows(data.path, seed=seed, split="train")
    rows = SeededOrder(rows, seed).take(train.prompts_per_step * steps)

    def prompt_of(row: Mapping[str, Any]) -> Any:
        text = data.prompt_template.format_map(row) if data.prompt_template is not None else row["prompt"]
        return [{"role": "user", "content": text}] if data.chat_template else text

    return {
        "model": str(world.model),
        "scorer": config.reward.scorer.name,
        "rows": [{"prompt": prompt_of(row), "answer": str(row["answer"])} for row in rows],
        "prompts_per_step": train.prompts_per_step,
        "group_size": config.rollout.group_size,
        "max_new_tokens": config.rollout.max_new_tokens,
        "learning_rate": train.learning_rate,
        "warmup_steps": train.warmup_steps,
        "betas": train.betas,
        "max_grad_norm": train.max_grad_norm,
        "clip_low": algorithm["clip_low"],
        "clip_high": algorithm["clip_high"],
        "seed": seed,
        "steps": steps,
        "num_threads": os.cpu_count(),
    }


def fastest(world: World, python: Path, folder: Path, steps: int, ways: Sequence[str]) -> dict[str, Any]:
    """How TRL is fastest here, of these ways to generate."""
    settings = settings_of(world, 0, min(TRIAL_STEPS, max(2, steps // 3)))
    trials: list[tuple[float, dict[str, Any]]] = []
    for generates_by in ways:
        for share in MICRO_BATCHES:
            micro_batch = settings["prompts_per_step"] * settings["group_size"] // share
            way = {"generates_by": generates_by, "micro_batch": micro_batch}
            seconds, _ = of_trl(python, folder / f"trial-{len(trials)}", {**settings, **way})
            trials.append((min(seconds), way))
            print(f"TRL by {generates_by}, {micro_batch} rows at once: {trials[-1][0]:.2f} s a step", flush=True)
    return min(trials, key=lambda trial: trial[0])[1]


def held_out(world: World, model: Path, folder: Path) -> float:
    """Accuracy of a saved model on problems that no run trains on, sampled, or greedy where the recipe evaluates so."""
    out, data = folder / "evaluation", world.config().data.path
    command = [sys.executable, "-m", "asyncflow", "eval", str(model), str(data), "--config", str(world.recipe), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    figures = json.loads((out / "evaluation.json").read_text())["figures"]
    return float(figures.get("accuracy/sampled", figures.get("accuracy/greedy")))


def table(seen: dict[str, Seen]) -> None:
    """Accuracy by step and by wall time."""
    print("\nsteps      " + "".join(f"{name:>12} accuracy   after s" for name in seen))
    steps = len(next(iter(seen.values()))[1])
    for begin in range(0, steps, 5):
        end = min(begin + 5, steps)
        cells = [
            f"{statistics.fmean(rewards[begin:end]):21.3f} {list(accumulate(seconds))[end - 1]:9.1f}"
            for seconds, rewards in seen.values()
        ]
        print(f"{begin:3} to {end - 1:3} " + "".join(cells), flush=True)


def figures_of(seed: int, seen: dict[str, Seen], accuracies: dict[str, float], aims: tuple[str, str]) -> list[Figure]:
    steps = len(seen["TRL"][0])
    medians = {name: statistics.median(seconds[min(WARM_UP_STEPS, steps // 4) :]) for name, (seconds, _) in seen.items()}
    leads = {name: _lead(seen[name][1], seen["TRL"][1]) for name in WAYS}
    return [
        *(Figure(f"seed {seed}: median step, {name}", median, "s") for name, median in medians.items()),
        Figure(f"seed {seed}: TRL's step / AsyncFlow's, all rows", medians["TRL"] / medians[ALL_ROWS], "", aims[0]),
        Figure(f"seed {seed}: TRL's step / AsyncFlow's, skipping", medians["TRL"] / medians[SKIPPING], "", aims[1]),
        *(Figure(f"seed {seed}: accuracy by step, {name} - TRL, mean", lead, "", ">= -0.02") for name, lead in leads.items()),
        *(Figure(f"seed {seed}: held-out accuracy, {name}", accuracy, "") for name, accuracy in accuracies.items()),
    ]


def _lead(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Of the means over the steps: the noise of one step's 256 responses is about 0.03."""
    return statistics.fmean(ours) - statistics.fmean(theirs)


def main() -> int:
    arguments = parser(__doc__, has_runs=True)
    arguments.add_argument("--recipe", type=Path, default=QUICKSTART)
    arguments.add_argument("--model", type=Path, help="folder of the model; by default the recipe's")
    arguments.add_argument("--steps", type=int, default=40)
    arguments.add_argument("--generates-by", nargs="+", choices=GENERATES_BY, default=GENERATES_BY, help="TRL's ways to try")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--venv", type=Path, default=ROOT / ".venv-trl")
    given = arguments.parse_args()
    python, figures = interpreter(given.venv.absolute()), []
    recipe = given.recipe.absolute()
    world = World(recipe, given.model.absolute() if given.model else ROOT / load(recipe, ["eval.path=null"]).model.path)
    with runs_folder(given.dir) as runs, tempfile.TemporaryDirectory(prefix="asyncflow-") as scratch:
        way = fastest(world, python, Path(scratch), given.steps, given.generates_by)
        for seed in given.seeds:
            folders = {name: runs / f"{name}-{seed}" for name in WAYS} | {"TRL": Path(scratch) / f"TRL-{seed}"}
            seen = {name: of_asyncflow(world, folders[name], seed, given.steps, own) for name, own in WAYS.items()}
            seen["TRL"] = of_trl(python, folders["TRL"], {**settings_of(world, seed, given.steps), **way})
            table(seen)
            accuracies = {name: held_out(world, folder / "model", folder) for name, folder in folders.items()}
            figures += figures_of(seed, seen, accuracies, AIMS if recipe == QUICKSTART else AIMS_ELSEWHERE)
    return finish(figures, given.json)


if __name__ == "__main__":
    sys.exit(main())
