"""A made-up periodic run, written through the same recorder and files as a real one: 2 rollout workers, 1 trainer.

Each step the workers generate groups, the trainer takes each as it ends, steps, publishes; then all install, and so on.
"""

import heapq
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

from asyncflow.telemetry.attribution import attributed
from asyncflow.telemetry.metrics import GroupFigures, StepMetrics, StepTimes
from asyncflow.telemetry.spans import Recorder, Span
from asyncflow.telemetry.tokens import TrainedTokens
from asyncflow.telemetry.trace import SpanLog
from asyncflow.telemetry.trackers import make_trackers

HOSTILE = "<script>window.hacked = true</script></td></script><img src=x onerror=\"window.hacked = true\"> & 1 < 2 'quotes'"


class Clock:
    """Moved by hand."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def make_spans(num_steps: int, groups: int = 8, seed: int = 0) -> list[Span]:
    """Spans of the whole run in the order in which they ended."""
    draw = random.Random(seed)
    spans: list[Span] = []
    clocks = {name: Clock() for name in ("rollout/0", "rollout/1", "trainer/0", "driver")}
    lanes = {name: Recorder(name, clock, spans.append, device="cpu") for name, clock in clocks.items()}

    def advance(worker: str, to: float) -> None:
        clocks[worker].now = max(clocks[worker].now, to)

    for worker in ("rollout/0", "rollout/1", "trainer/0"):
        advance(worker, 100.5 + 0.1 * draw.random())
        with lanes[worker].busy("load"):
            advance(worker, 102 + draw.random())
        lanes[worker].waiting("prompts" if worker != "trainer/0" else "rows")
    start = 103.2
    for step in range(num_steps):
        done: list[float] = []
        for worker in ("rollout/0", "rollout/1"):
            advance(worker, start + 0.02)
            began = clocks[worker].now
            with lanes[worker].busy("generate", step=step, version=step):
                for _ in range(groups // 2):
                    heapq.heappush(done, began + 0.4 + 1.6 * draw.random())
                last = max(done)
                advance(worker, last - 0.3 * draw.random())
                lanes[worker].add(rows=4 * groups // 2, tokens=4 * groups // 2 * 40)
                lanes[worker].off_lane("generate_group", began, step=step, version=step, rows=4)
            lanes[worker].waiting("weights")
        trainer = lanes["trainer/0"]
        while done:
            # As with a real clock, a moment passes between two micro-batches.
            advance("trainer/0", max(heapq.heappop(done), clocks["trainer/0"].now + 2e-5))
            with trainer.busy("forward_backward", step=step, version=step):
                trainer.add(rows=4, tokens=240)
                advance("trainer/0", clocks["trainer/0"].now + 0.12 + 0.08 * draw.random())
        with trainer.busy("optim_step", step=step, version=step + 1):
            advance("trainer/0", clocks["trainer/0"].now + 0.15)
        with trainer.held("publish"):
            advance("trainer/0", clocks["trainer/0"].now + 0.1)
        start = clocks["trainer/0"].now
        for worker in ("rollout/0", "rollout/1"):
            advance(worker, start + 0.05)
            lanes[worker].off_lane("fetch", start - 0.1, version=step + 1)
            with lanes[worker].busy("install", version=step + 1):
                advance(worker, clocks[worker].now + 0.12)
            lanes[worker].waiting("prompts")
    for worker, lane in lanes.items():
        lane.waiting("stop")
        advance(worker, start + 0.6)
        lane.flush()
    return sorted(spans, key=lambda span: span.end)


def write_run(run_dir: Path, num_steps: int = 10) -> list[Span]:
    """Every file of a run directory that the report reads. Prompts and responses are hostile."""
    run_dir.mkdir(parents=True, exist_ok=True)
    config = {
        "run": {"name": "tiny arithmetic <b>run</b>", "seed": 7},
        "schedule": "periodic",
        "algorithm": {"name": "grpo", "group_size": 4},
        "model": {"path": "models/tiny-arithmetic"},
        "data": "arithmetic",
    }
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    spans = make_spans(num_steps)
    log = SpanLog(run_dir / "spans.jsonl")
    for span in spans:
        log.append(span)
    write_metrics(run_dir, spans, log, num_steps)
    log.close()
    accuracies = "".join(f'{{"step": {step}, "accuracy": {0.31 + 0.03 * step}}}\n' for step in range(0, num_steps + 1, 2))
    (run_dir / "eval.jsonl").write_text(accuracies)
    samples: list[dict[str, Any]] = [
        {
            "step": step,
            "purpose": "train",
            "row": 4 * (8 * step + i),
            "prompt": HOSTILE,
            "response": f"{HOSTILE} {i}",
            "reward": i % 2,
        }
        for step in (0, 9)
        for i in range(3)
    ]
    figures = {"log-prob of the trainer": [-0.5, -1.25], "ratio": [1.0, 1.2840], "clipped": [0.0, 1.0], "entropy": [0.25, 0.5]}
    trained = [TrainedTokens(each["row"], each["step"], 0, 2, [7, 8], [-0.5, -1.5], [1, 1], [3, 4], figures) for each in samples]
    (run_dir / "tokens.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in trained))
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return spans


def figures(**known: Any) -> GroupFigures:
    """Figures of a group of which only these are known."""
    arrays = ("rewards", "response_lengths", "truncated", "staleness", "num_spans")
    numbers = ("prompt_length", "loss_sum", "computed_tokens", "logical_tokens", "physical_tokens")
    unknown = {**dict.fromkeys(arrays, np.empty(0)), **dict.fromkeys(numbers, 0), "metrics": {}}
    return GroupFigures(**{**unknown, **known})


def write_metrics(run_dir: Path, spans: list[Span], log: SpanLog, num_steps: int) -> None:
    draw = random.Random(1)
    trackers = make_trackers(["jsonl", "tensorboard"], run_dir, {}, "run")
    started = 103.2
    for step in range(num_steps):
        metrics = StepMetrics()
        for _ in range(8):
            rewards = np.array([draw.random() < 0.4 + 0.04 * step for _ in range(4)], np.float32)
            lengths = np.array([draw.randint(20, 60) for _ in range(4)])
            truncated = lengths > 57
            group = figures(
                rewards=rewards,
                response_lengths=lengths,
                truncated=truncated,
                staleness=np.zeros(4, int),
                logical_tokens=4 * 20 + int(lengths.sum()),
            )
            metrics.add_group(group)
            sums = {"policy/kl": 0.02 * step * 160, "policy/entropy": (1.5 - 0.05 * step) * 160, "policy/clip_ratio": 0.01 * 160}
            loss = draw.gauss(0, 1)
            metrics.add_losses(figures(loss_sum=loss, computed_tokens=160, logical_tokens=240, physical_tokens=180, metrics=sums))
        metrics.add_update(grad_norm=1 + draw.random(), learning_rate=1e-4, normaliser=8 * 160)
        committed = next(span.end for span in spans if span.task == "optim_step" and span.step == step)
        begun = min(span.start for span in spans if span.task == "forward_backward" and span.step == step)
        times = StepTimes(started=started, committed=committed, could_generate=started, train_began=begun)
        row = metrics.row(times, 3, attributed(log.window(started, committed, step), begins=step == 0))
        row |= {f"memory/rss_bytes/{worker}": 5e8 + 1e7 * step * draw.random() for worker in ("rollout/0", "trainer/0")}
        for tracker in trackers.values():
            tracker.log(step, row)
        started = committed
    for tracker in trackers.values():
        tracker.close()
