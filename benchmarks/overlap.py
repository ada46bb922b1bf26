"""What generating and training side by side gains: synchronous and periodic runs, real engines, two processes of one thread.

    python benchmarks/overlap.py [--slots 8 16 32 64 128 256] [--steps 5] [--json FILE]

Both schedules run the same seed and workload: 48 prompts x 8 responses a step, a random Qwen2 whose end is one of several tokens,
so that lengths are geometric, as real ones nearly are. From the synchronous run's spans come, for every step, the moments done_i
at which its groups were complete (from the start of generation, in order) and the time train_i that each took to train. With
nothing but those, a step that trains each group as soon as it is there lasts

    x = max(x, done_i) + train_i   for every i in order, from x = 0            (papers: PA 6-7, for continuous batching)

which the periodic run's steps, measured from commit to commit, are held against. The first step, which loads, is left out.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from figures import Figure, finish, parser

from asyncflow.config import parse
from asyncflow.data import arithmetic
from asyncflow.engines.train.random_model import make_random_model
from asyncflow.job import Job
from asyncflow.telemetry.spans import Span
from asyncflow.telemetry.trace import read_spans

END_TOKENS = 0.009  # share of the vocabulary that ends a response
MAX_NEW_TOKENS = 256


def make_model(folder: Path) -> Path:
    """A random model that ends its responses after a geometric number of tokens."""
    stream = arithmetic.problems(0, "train")
    make_random_model("random:qwen2-tiny", folder, [next(stream).question for _ in range(2000)], seed=0)
    config = json.loads((folder / "generation_config.json").read_text())
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    ends = np.random.default_rng(0).choice(vocabulary, max(1, round(END_TOKENS * vocabulary)), replace=False)
    (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": sorted(map(int, ends))}))
    return folder


def run(folder: Path, model: Path, schedule: str, slots: int, steps: int) -> tuple[list[float], list[Span]]:
    """The seconds of every step after the first, and the run's spans."""
    config = parse(
        {
            "run": {"name": f"{schedule}-{slots}", "dir": str(folder), "steps": steps},
            "model": {"path": str(model)},
            "data": {"path": "generated:arithmetic", "limit": 2000},
            "schedule": schedule,
            "rollout": {"num_slots": slots, "group_size": 8, "max_new_tokens": MAX_NEW_TOKENS},
            "train": {"prompts_per_step": 48, "learning_rate": 1e-6},
            "telemetry": {"trackers": [], "samples_per_step": 0},
        }
    )

    async def main() -> Job:
        job = Job(config)
        assert await job.run()
        return job

    job = asyncio.run(main())
    return [job.rows[step]["perf/step_seconds"] for step in range(1, steps)], read_spans(config.run_dir / "spans.jsonl")


def recurrence(spans: list[Span], step: int) -> float:
    """x of the module's head, for one step of a synchronous run."""
    groups = [s for s in spans if s.task == "generate_group" and s.step == step]
    began = min(s.start for s in groups)
    done = {s.group: s.end - began for s in groups}
    train = dict.fromkeys(done, 0.0)
    for span in spans:
        if span.task == "forward_backward" and span.step == step:
            train[span.group] += span.end - span.start
    x = 0.0
    for group in sorted(done, key=done.__getitem__):
        x = max(x, done[group]) + train[group]
    return x


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--slots", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    arguments.add_argument("--steps", type=int, default=5)
    given = arguments.parse_args()
    figures, walls = [], {"synchronous": [], "periodic": []}
    print("seconds a step, medians\nslots  synchronous  generate   train  recurrence  periodic  per/rec  syn/per")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_model(folder / "model")
        for slots in given.slots:
            synchronous, spans = run(folder, model, "synchronous", slots, given.steps)
            periodic, _ = run(folder, model, "periodic", slots, given.steps)
            steps = range(1, given.steps)
            x = statistics.median(recurrence(spans, step) for step in steps)
            made = sum(s.end - s.start for s in spans if s.task == "generate" and s.version in steps) / len(steps)
            trained = sum(s.end - s.start for s in spans if s.task == "forward_backward" and s.step in steps) / len(steps)
            wall = {"synchronous": statistics.median(synchronous), "periodic": statistics.median(periodic)}
            for schedule, seconds in wall.items():
                walls[schedule].append(seconds)
            print(
                f"{slots:5}  {wall['synchronous']:11.3f}  {made:8.3f}  {trained:6.3f}  {x:10.3f}  {wall['periodic']:8.3f}  "
                f"{wall['periodic'] / x:7.3f}  {wall['synchronous'] / wall['periodic']:7.3f}",
                flush=True,
            )
            figures.append(Figure(f"periodic step / recurrence, {slots} slots", wall["periodic"] / x, "", "<= 1.15"))
    gain = min(walls["synchronous"]) / min(walls["periodic"])
    figures.append(Figure("best synchronous step / best periodic step", gain, "", ">= 1.3"))
    return finish(figures, given.json)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
