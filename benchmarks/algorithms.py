"""The quickstart under every algorithm, several seeds each: the final accuracy of sampled answers, in one table.

    python benchmarks/algorithms.py [--algorithms NAME ...] [--seeds 0 1 2] [--steps 40] [--dir runs/algorithms] [--json FILE]

Each run is a whole command: `recipes/quickstart.yaml` with another `algorithm`, and no other change than those in `RUNS`. One that
has ended already is not run again, so all may be made in parts; to have them made anew, remove the folder. The accuracy is that of
sampled answers to 256 held-out problems.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

from figures import Figure, finish, parser

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
RUNS: dict[str, list[str]] = {
    "grpo": ["algorithm=grpo"],
    "grpo, a KL term in the loss": ["algorithm={name: grpo, kl_coefficient: 0.001}"],
    "grpo, an entropy bonus": ["algorithm={name: grpo, entropy_coefficient: 0.001}"],
    "dapo": ["algorithm={name: dapo, overlong_length: 64, overlong_buffer: 16}"],
    "dapo, dynamic sampling, 20 steps": [
        "algorithm={name: dapo, overlong_length: 64, overlong_buffer: 16, dynamic_sampling: true}",
        "train.oversampling=1.5",
        "train.max_candidates=1600",
    ],
    "dr_grpo": ["algorithm={name: dr_grpo, loss_constant: 64}"],
    "rloo": ["algorithm=rloo"],
    "rloo, a KL term in the reward": ["algorithm={name: rloo, kl_coefficient: 0.001}", "train.reference=task"],
    "reinforce_plus_plus": ["algorithm=reinforce_plus_plus"],
    "reinforce_plus_plus, baseline": ["algorithm={name: reinforce_plus_plus, baseline: group}"],
    "gspo": ["algorithm=gspo"],
    "cispo": ["algorithm=cispo"],
    "ppo": ["algorithm=ppo", "train.critic.learning_rate=1e-3", "train.critic.warmup_steps=5"],
}
"""Names for the table, and what is changed of the recipe."""
STEPS = {"dapo, dynamic sampling, 20 steps": 20}
"""Fewer, where the task would be solved before the end: hardly a prompt's rewards vary then, and the run would end by saying so."""


def run(folder: Path, name: str, seed: int, steps: int) -> tuple[float, float]:
    """The final accuracy and the seconds of one run, which is run if it has not been run to its end already."""
    run_dir = folder / f"{name.replace(', ', '-').replace(' ', '_')}-{seed}"
    if (found := read(run_dir, steps)) is None:
        settings = [f"run.seed={seed}", f"run.dir={folder}", f"run.name={run_dir.name}", f"run.steps={steps}", "run.overwrite=true"]
        command = [sys.executable, "-c", "from asyncflow.cli import main; main()", "train", str(RECIPE), *settings, *RUNS[name]]
        subprocess.run(command, cwd=RECIPE.parent.parent, stdout=subprocess.DEVNULL, check=True)
        found = read(run_dir, steps)
    assert found is not None, f"{run_dir} has no last evaluation"
    print(f"{name:30} seed {seed}: final accuracy {found[0]:.3f}, {found[1]:.1f} s of steps", flush=True)
    return found


def read(run_dir: Path, steps: int) -> tuple[float, float] | None:
    """Accuracy after the last step, and the seconds that all steps took; None if the run has not been run to its end."""
    try:
        evaluations = [json.loads(line) for line in (run_dir / "eval.jsonl").read_text().splitlines()]
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    except FileNotFoundError:
        return None
    if len(rows) != steps or evaluations[-1]["step"] != steps:
        return None
    return evaluations[-1]["accuracy/sampled"], sum(row["perf/step_seconds"] for row in rows)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--algorithms", nargs="+", choices=[*RUNS], default=[*RUNS], metavar="NAME")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--steps", type=int, default=40)
    arguments.add_argument("--dir", type=Path, default=Path("runs/algorithms"))
    given = arguments.parse_args()
    found = {
        name: [run(given.dir.resolve(), name, seed, min(given.steps, STEPS.get(name, given.steps))) for seed in given.seeds]
        for name in given.algorithms
    }
    print(f"\n| algorithm | {' | '.join(f'seed {seed}' for seed in given.seeds)} | mean |")
    print(f"|---|{'---|' * len(given.seeds)}---|")
    for name, results in found.items():
        accuracies = [accuracy for accuracy, _ in results]
        print(f"| {name} | {' | '.join(f'{accuracy:.3f}' for accuracy in accuracies)} | {statistics.fmean(accuracies):.3f} |")
    figures = [
        Figure(f"final sampled accuracy, {name}, seed {seed}", accuracy, "", ">= 0.80" if given.steps == 40 else None)
        for name, results in found.items()
        for seed, (accuracy, _) in zip(given.seeds, results, strict=True)
    ]
    return finish(figures, given.json)


if __name__ == "__main__":
    sys.exit(main())
