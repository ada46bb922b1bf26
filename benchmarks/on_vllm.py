"""What the quickstart's task learns with rollouts on vLLM, periodic and bounded, beside the embedded engine.

    python benchmarks/on_vllm.py --python VLLM_ENVIRONMENT/bin/python [--steps 15] [--instances 1] [--dir FOLDER] [--json FILE]

Three whole commands, in turn: `slots` with the periodic schedule, `vllm` with it, and `vllm` with the bounded one (staleness
up to 2, keys and values of responses under way computed again at each installation). Accuracies are those of greedy responses to
held-out prompts after the last step; both engines' tokens are scored alike. An attestation's part of a step is by medians.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from figures import Figure, finish, parser, run_name, runs_folder

from asyncflow.telemetry.trace import SPANS_FILE, read_spans

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
BOUNDED = {"name": "bounded", "max_staleness": 2}


def run(name: str, folder: Path, settings: dict[str, Any]) -> tuple[float, list[dict[str, float]], float, list[float]]:
    """Run of a command: its greedy accuracy at the end, its steps' metrics, and the seconds that it and each attestation took."""
    began = time.monotonic()
    given = {"run.dir": str(folder), "run.name": name, "run.overwrite": True, "telemetry.trackers": [], **settings}
    command = [sys.executable, "-m", "asyncflow", "train", str(RECIPE)]
    command += [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in given.items()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=RECIPE.parent.parent)
    seconds = time.monotonic() - began
    accuracy, steps = ((folder / name / file).read_text().splitlines() for file in ("eval.jsonl", "metrics.jsonl"))
    attested = [span.end - span.start for span in read_spans(folder / name / SPANS_FILE) if span.task == "attest"]
    return json.loads(accuracy[-1])["accuracy/greedy"], [json.loads(line) for line in steps], seconds, attested


def main() -> int:
    arguments = parser(__doc__, has_runs=True)
    arguments.add_argument("--python", required=True, help="interpreter of an environment that has vLLM")
    arguments.add_argument("--steps", type=int, default=15)
    arguments.add_argument("--held-out", type=int, default=128, help="prompts of the evaluations")
    arguments.add_argument("--instances", type=int, default=1)
    given = arguments.parse_args()
    vllm = {"name": "vllm", "python": str(Path(given.python).absolute()), "instances": given.instances}
    common = {"run.steps": given.steps, "eval.num_prompts": given.held_out, "run.stall_timeout_seconds": 900}
    runs: dict[str, dict[str, Any]] = {
        "slots, periodic": {},
        "vllm, periodic": {"rollout.engine": vllm},
        "vllm, bounded": {"rollout.engine": vllm, "rollout.kv_on_install": "recompute", "schedule": BOUNDED},
    }
    figures, accuracies = [], {}
    with runs_folder(given.dir) as folder:
        for name, settings in runs.items():
            accuracies[name], steps, seconds, attested = run(run_name(name), folder, {**common, **settings})
            largest = {key: max(s[key] for s in steps if key in s) for key in ("mismatch/kl", "staleness/max")}
            of_step = median(attested) / median(step["perf/step_seconds"] for step in steps)
            least = min(step["weights/attested"] for step in steps[1:])
            print(f"{name:16} greedy accuracy {accuracies[name]:.3f}, {seconds:.0f} s", flush=True)
            figures += [
                Figure(f"greedy accuracy, {name}", accuracies[name], ""),
                Figure(f"largest mismatch/kl of a step, {name}", largest["mismatch/kl"], "nats", "<= 1e-06"),
                Figure(f"largest staleness, {name}", largest["staleness/max"], "versions", "<= 2" if "bounded" in name else "<= 0"),
                Figure(f"an attestation's part of a step, {name}", of_step, "", "<= 0.01"),
                Figure(f"least share of workers attested, {name}", least, "", ">= 1"),
                Figure(f"whole command, {name}", seconds, "s"),
            ]
    for name in ("vllm, periodic", "vllm, bounded"):
        behind = accuracies["slots, periodic"] - accuracies[name]
        figures.append(Figure(f"accuracy of slots above that of {name}", behind, "", "<= 0.05"))
    return finish(figures, given.json)


if __name__ == "__main__":
    sys.exit(main())
