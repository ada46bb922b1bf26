"""Runs that are killed at ten random moments and resumed, against runs that nothing has disturbed.

    undisturbed run ----------------------------------------------> weights, evaluations, every row's hash
    run --kill -9--> --resume --kill -9--> ... (10 times) --------> the same, to the bit

Periodic and delayed (with an old policy one update behind), as the command line starts them: driver, rollout worker and trainer
are processes, and only the driver is killed: a random part of a step after a random number of steps, or when the attempt is
about to begin. Further: how long a trainer waits for a checkpoint.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from figures import Figure, finish, parser
from safetensors.numpy import load_file

from asyncflow.telemetry.certificate import read_certificate
from asyncflow.telemetry.trace import read_spans

ROOT = Path(__file__).parent.parent
STEPS, PROMPTS, GROUP, KILLS = 24, 8, 8, 10
MODES: dict[str, dict[str, Any]] = {"periodic": {}, "delayed": {"old": "previous"}}


def write_config(folder: Path, mode: str) -> Path:
    """A run of 24 steps with a checkpoint after each."""
    tree = {
        "run": {"name": "run", "dir": str(folder), "steps": STEPS},
        "model": {"path": str(ROOT / "recipes" / "models" / "tiny-arithmetic")},
        "data": {"path": "generated:arithmetic"},
        "schedule": mode,
        "rollout": {"num_slots": 64, "group_size": GROUP, "max_new_tokens": 64},
        "train": {"prompts_per_step": PROMPTS, "learning_rate": 1e-4, "accumulate": "exact", **MODES[mode]},
        "eval": {"path": "generated:arithmetic", "num_prompts": 8, "every_steps": 8},
        "telemetry": {"trackers": [], "fingerprints": True},
        "checkpoint": {"every_steps": 1},
    }
    folder.mkdir(parents=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def start(config: Path) -> subprocess.Popen[str]:
    """An attempt of the run, in a process."""
    command = [sys.executable, "-m", "asyncflow", "train", str(config), "--resume"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def to_the_end(config: Path) -> str:
    """Output of the attempt."""
    attempt = start(config)
    output, _ = attempt.communicate(timeout=900)
    if attempt.returncode:
        raise SystemExit(f"an attempt ended with status {attempt.returncode}: {output}")
    return output


def num_steps(run_dir: Path) -> int:
    """Number of steps whose metrics are written."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_steps(run_dir: Path, number: int, attempt: subprocess.Popen[str]) -> None:
    """Wait until so many are done, or the attempt is over."""
    deadline = time.monotonic() + 300.0
    while num_steps(run_dir) < number and attempt.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def prints(run_dir: Path) -> list[dict[str, Any]]:
    """The fingerprints, without the order in which groups came."""
    steps = [json.loads(line) for line in (run_dir / "fingerprints.jsonl").read_text().splitlines()]
    return [{**step, "groups": sorted(step["groups"], key=lambda group: group["group"])} for step in steps]


def different_bits(one: Path, other: Path) -> int:
    """Tensors of the final models that are not the same."""
    weights, expected = (load_file(run_dir / "model" / "model.safetensors") for run_dir in (one, other))
    return sum(weights[name].tobytes() != expected[name].tobytes() for name in expected)


def wrong_rows(run_dir: Path) -> int:
    """Rows that were skipped, or trained more than once."""
    trained = Counter(row["row"] for step in prints(run_dir) for group in step["groups"] for row in group["rows"])
    return sum(trained.get(row, 0) != 1 for row in range(STEPS * PROMPTS * GROUP)) + sum(
        row >= STEPS * PROMPTS * GROUP for row in trained
    )


def measure(mode: str, folder: Path, seed: int) -> list[Figure]:
    """The figures of one mode."""
    whole, killed = folder / f"{mode}-whole", folder / f"{mode}-killed"
    whole_config, config = write_config(whole, mode), write_config(killed, mode)
    to_the_end(whole_config)
    rng = random.Random(f"{seed}/{mode}")
    for _ in range(KILLS):
        before, attempt = num_steps(killed / "run"), start(config)
        time.sleep(rng.uniform(0.0, 4.0))
        if more := rng.randint(0, 3):
            wait_for_steps(killed / "run", before + more, attempt)
            time.sleep(rng.uniform(0.0, 1.0))
        attempt.kill()
        attempt.communicate(timeout=60)
        there = [path.name for path in (killed / "run" / "checkpoints").glob("step-??????")]
        print(f"{mode}: killed; {max(there, default='no checkpoint yet')}", flush=True)
    to_the_end(config)
    runs = killed / "run", whole / "run"
    certificate = read_certificate(runs[0])
    assert certificate is not None
    staged = [span.end - span.start for span in read_spans(runs[1] / "spans.jsonl") if span.task == "checkpoint" and span.is_lane]
    steps = [json.loads(line)["perf/step_seconds"] for line in (runs[1] / "metrics.jsonl").read_text().splitlines()][1:]
    is_same = prints(runs[0]) == prints(runs[1])
    evaluations = [(run_dir / "eval.jsonl").read_text() for run_dir in runs]
    return [
        Figure(f"{mode}: times killed", KILLS, ""),
        Figure(f"{mode}: resumes that the certificate names", len(certificate.resumed_at), ""),
        Figure(f"{mode}: tensors of the final model that differ", different_bits(*runs), "", "<= 0"),
        Figure(f"{mode}: rows skipped or doubled", wrong_rows(runs[0]), "", "<= 0"),
        Figure(f"{mode}: steps whose rows, log-probs or tensors differ", float(not is_same), "", "<= 0"),
        Figure(f"{mode}: evaluations that differ", float(evaluations[0] != evaluations[1]), "", "<= 0"),
        Figure(f"{mode}: certificate void", len(certificate.voided), "", "<= 0"),
        Figure(f"{mode}: trainer waits for a checkpoint, median", 1000 * statistics.median(staged), "ms"),
        Figure(f"{mode}: a step, median", 1000 * statistics.median(steps), "ms"),
    ]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    options = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="asyncflow-resume-"))
    try:
        return finish([figure for mode in options.modes for figure in measure(mode, folder, options.seed)], options.json)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
