"""All of GSM8K's 7,473 training questions, tokenised, generated, scored and trained on for two steps, with a random model.

    python benchmarks/gsm8k.py [--json FILE] [--data FOLDER] [--questions N] [--group 2] [--new-tokens 16] [--dir FOLDER]

A step takes every question once: an epoch. The model is made at random (`random:qwen2-tiny`, its vocabulary from the questions), so
it learns nothing; what is shown is that the whole data set goes through every part, and how fast on this machine. One command of
`asyncflow train` with recipes/gsm8k.yaml does all the work; the figures come from the files that it leaves.

FOLDER holds train.jsonl: by default $ASYNCFLOW_GSM8K, else ../shared/data/gsm8k.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from figures import Figure, finish, parser, runs_folder

ROOT = Path(__file__).parent.parent
STEPS = 2


def main() -> int:
    arguments = parser(__doc__, has_runs=True)
    arguments.add_argument("--data", type=Path, default=Path(os.environ.get("ASYNCFLOW_GSM8K", ROOT.parent / "shared/data/gsm8k")))
    arguments.add_argument("--questions", type=int, default=None, metavar="N", help="only the first N")
    arguments.add_argument("--group", type=int, default=2)
    arguments.add_argument("--new-tokens", type=int, default=16)
    given = arguments.parse_args()
    source = given.data / "train.jsonl"
    if not source.is_file():
        sys.exit(f"there is no {source}: --data FOLDER, or ASYNCFLOW_GSM8K, says where GSM8K is")
    with runs_folder(given.dir) as folder, tempfile.TemporaryDirectory(prefix="asyncflow-gsm8k-") as scratch:
        data, run_dir = Path(scratch) / "train.jsonl", folder / "gsm8k"
        with source.open(encoding="utf-8") as lines:
            data.write_text("".join(islice(lines, given.questions)), encoding="utf-8")
        count = sum(1 for _ in data.open(encoding="utf-8"))
        tokens, seconds = tokenised(data, Path(scratch) / "tokens")
        command = [
            sys.executable, "-m", "asyncflow", "train", str(ROOT / "recipes/gsm8k.yaml"), f"data.path={data}", f"run.dir={folder}",
            "run.overwrite=true", f"run.steps={STEPS}", f"train.prompts_per_step={count}", f"rollout.group_size={given.group}",
            f"rollout.max_new_tokens={given.new_tokens}", "rollout.num_slots=128", "run.stall_timeout_seconds=600",
            "telemetry.trackers=[]", "checkpoint.keep=0",
        ]  # fmt: skip
        began = time.monotonic()
        subprocess.run(command, check=True, cwd=ROOT)
        whole = time.monotonic() - began
        steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        certificate = json.loads((run_dir / "certificate.json").read_text())
    rows = count * given.group
    print(f"\ncertificate: {certificate['schedule']}, voided by: {certificate.get('voided') or 'nothing'}")
    figures = [
        Figure("questions tokenised", count, "questions"),
        Figure("tokenised", tokens / seconds, "prompt tokens a second"),
        *(
            Figure(f"step {i}: responses generated, scored and trained", s["rows/trained"], "rows", f">= {rows}")
            for i, s in enumerate(steps)
        ),
        *(Figure(f"step {i}: failed", s["rows/dead"], "rows", "<= 0") for i, s in enumerate(steps)),
        *(Figure(f"step {i}: reward, mean", s["reward/mean"], "") for i, s in enumerate(steps)),
        *(Figure(f"step {i}", s["perf/step_seconds"], "seconds") for i, s in enumerate(steps)),
        Figure("rollout", steps[-1]["perf/rollout_tokens_per_second"], "response tokens a second"),
        Figure("training", steps[-1]["perf/train_tokens_per_second"], "logical tokens a second"),
        Figure("the whole command", whole, "seconds"),
    ]
    return finish(figures, given.json)


def tokenised(data: Path, folder: Path) -> tuple[int, float]:
    """Prompt tokens of all questions, and the seconds that they took: reading, filling the template in, encoding."""
    from asyncflow.config import load
    from asyncflow.data.tokenizer import CheckpointTokenizer
    from asyncflow.engines.train.random_model import make_random_model
    from asyncflow.run.preparation.prompts import read_source, tokenize

    config = load(ROOT / "recipes/gsm8k.yaml", [f"data.path={data}"])
    make_random_model("random:qwen2-tiny", folder, read_source(config, "train").texts(), 0)
    tokenizer = CheckpointTokenizer(folder)
    began = time.monotonic()
    prompts = tokenize(config, tokenizer, read_source(config, "train"))
    return sum(len(prompt.ids) for prompt in prompts), time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
