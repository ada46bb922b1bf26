import importlib.util
import json
from pathlib import Path

import msgspec
import pytest
import yaml

from asyncflow.telemetry.advice import advice
from asyncflow.telemetry.idle import WAIT
from asyncflow.telemetry.run_reader import RunReader
from asyncflow.telemetry.spans import Span
from asyncflow.telemetry.trace import SpanLog

_spec = importlib.util.spec_from_file_location("synthetic_run", Path(__file__).with_name("synthetic_run.py"))
synthetic_run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(synthetic_run)

CONFIG = {"schedule": {"name": "periodic"}, "train": {"prompts_per_step": 32}, "rollout": {"max_new_tokens": 64, "num_workers": 1}}


STEP = 2.0
"""Seconds of a step of a run whose lanes are given."""
Lane = list[tuple[str, float, int]]
"""States of a lane in one step: a task, or `wait: CAUSE`; until which share of the step; its group's number in the step, or -1."""


def lane_spans(lanes: dict[str, Lane], num_steps: int = 6) -> list[Span]:
    """Spans of a run whose steps are all alike."""
    spans: list[Span] = []
    for step in range(num_steps):
        for worker, lane in lanes.items():
            last = start = 100.0 + step * STEP
            for state, until, group in lane:
                begin, last = last, start + until * STEP
                task, _, cause = state.partition(": ")
                number = 10 * step + group if group >= 0 else -1
                span = Span(
                    worker=worker, task=task, cause=cause, start=begin, end=last, step=-1 if task == WAIT else step, group=number
                )
                spans.append(span)
                if task == "generate" and group >= 0:
                    spans.append(msgspec.structs.replace(span, task="generate_group", is_lane=False, version=step))
    return sorted(spans, key=lambda span: span.end)


def told(
    run_dir: Path, lanes: dict[str, Lane] | None = None, schedule: str = "periodic", prompts: int = 32, **metrics: float
) -> str:
    """Advice about the made-up run, with some metrics of its own, or with spans of its own."""
    synthetic_run.write_run(run_dir)
    (run_dir / "config.yaml").write_text(
        yaml.safe_dump(CONFIG | {"schedule": {"name": schedule}, "train": {"prompts_per_step": prompts}})
    )
    if lanes is not None:
        (run_dir / "spans.jsonl").unlink()
        log = SpanLog(run_dir / "spans.jsonl")
        for span in lane_spans(lanes):
            log.append(span)
        log.close()
    rows = [json.loads(line) | metrics for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = RunReader(run_dir)
    run.read_all()
    return "\n".join(f"{each.words} {each.change}" for each in advice(run))


def test_a_run_that_waits_for_its_updates_is_told_of_delayed(tmp_path):
    text = told(tmp_path)
    assert "Rollout workers wait 3" in text and "instead of 2.57 s. schedule=delayed" in text


GENERATES: Lane = [("generate", 0.45, -1), ("wait: weights", 1.0, -1)]
BUSY_TRAINER: dict[str, Lane] = {
    **{f"rollout/{worker}": GENERATES for worker in range(3)},
    "trainer/0": [("forward_backward", 0.9, -1), ("optim_step", 0.95, -1), ("wait: rows", 1.0, -1)],
}


def test_a_trainer_that_is_the_slower_half_is_told_of_with_the_split_that_helps(tmp_path):
    text = told(tmp_path, BUSY_TRAINER, schedule="delayed")
    # 1.9 s of the trainer's work and 2.7 s of rollout's: 4 workers, 2 of them for each.
    assert (
        "The trainer is the slower half by 2.1: it is busy 95% of the time, rollout 45%. 2 of the 4 workers for it instead of 1"
        in text
    )
    assert "would make a step of at best 1.35 s instead of 2 s." in text


def test_a_half_that_no_other_split_helps_is_told_of_with_another_worker(tmp_path):
    rollout: Lane = [("generate", 0.9, -1), ("wait: weights", 1.0, -1)]
    trainer: Lane = [("wait: rows", 0.5, -1), ("forward_backward", 0.8, -1), ("optim_step", 0.85, -1), ("wait: rows", 1.0, -1)]
    text = told(tmp_path, {"rollout/0": rollout, "trainer/0": trainer}, schedule="delayed")
    assert "The rollout is the slower half by 2.6: it is busy 90% of the time, a trainer 35%." in text
    assert "Another worker for it brings at best 0.9 s of its work a step. rollout.num_workers=2" in text
    text = told(tmp_path / "few", {"rollout/0": rollout, "trainer/0": trainer}, schedule="delayed", prompts=1)
    assert "Another worker for it would have no prompt of a step" in text and "rollout.num_workers=2" not in text


STRAGGLES: dict[str, Lane] = {  # the second group comes half a step after the first
    "rollout/0": [("generate", 0.3, 0), ("wait: weights", 1.0, -1)],
    "rollout/1": [("generate", 0.8, 1), ("wait: weights", 1.0, -1)],
    "trainer/0": [
        ("wait: rows", 0.3, -1),
        ("forward_backward", 0.4, 0),
        ("wait: rows", 0.8, -1),
        ("forward_backward", 0.9, 1),
        ("optim_step", 0.95, -1),
        ("wait: rows", 1.0, -1),
    ],
}
ON_TIME: dict[str, Lane] = {
    "rollout/0": [("generate", 0.78, 0), ("wait: weights", 1.0, -1)],
    "rollout/1": STRAGGLES["rollout/1"],
    "trainer/0": [("wait: rows", 0.8, -1), ("forward_backward", 0.85, 0), *STRAGGLES["trainer/0"][3:]],
}


def test_the_last_group_of_a_step_is_told_of_with_what_hiding_it_brings(tmp_path):
    # The trainer's 40%, and a half of a rollout worker's 50%, without those of the last step, which nothing follows.
    words = "The last group of a step keeps others waiting for 60% of a worker's time: shorter responses"
    text = told(tmp_path / "straggles", STRAGGLES)
    assert f"{words} (rollout.max_new_tokens), more prompts a step, or schedule=bounded hide such stragglers" in text
    # Rollout workers are busy 55% of the time: nothing hides that.
    assert "stragglers, for at best 1.1 s a step instead of 2 s. schedule=bounded" in text
    streams = told(tmp_path / "streams", STRAGGLES, schedule="bounded")
    assert words in streams and "schedule=bounded" not in streams
    assert "The last group" not in told(tmp_path / "on time", ON_TIME)


def test_environments_that_are_waited_for_are_told_of_with_what_filling_it_brings(tmp_path):
    trainer = STRAGGLES["trainer/0"]
    waits: Lane = [("generate", 0.3, 0), ("wait: environment", 0.7, -1), ("generate", 0.9, 1), ("wait: weights", 1.0, -1)]
    text = told(tmp_path / "waits", {"rollout/0": waits, "trainer/0": trainer})
    assert "Rollout workers wait 40% of their time for environments: more episodes at once (episodes.at_once)" in text
    assert "for at best 0.8 s less of a step's 2 s." in text
    assert "environments" not in told(
        tmp_path / "none", {"rollout/0": [("generate", 0.9, 0), ("wait: weights", 1.0, -1)], "trainer/0": trainer}
    )


def test_entropy_that_has_gone_is_told_of(tmp_path):
    def with_last(entropy: float) -> str:
        synthetic_run.write_run(folder := tmp_path / str(entropy))
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows = [row | {"policy/entropy": 1.5 if number < 5 else entropy} for number, row in enumerate(rows)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        run = RunReader(folder)
        run.read_all()
        return "\n".join(each.words for each in advice(run))

    assert "The policy's entropy has fallen from 1.5 to 0.1 nats" in with_last(0.1)
    assert "entropy" not in with_last(0.2)


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"reward/zero_std_groups": 26.0}, "26 of 32 groups a step have no signal"),
        (
            {"reward/zero_std_groups": 16.0},
            "train.skip_zero_advantages=auto spares up to 50% of the training, if the loss has no KL term and no entropy bonus;",
        ),
        ({"response_length/clipped_ratio": 0.5}, "50% of the responses are cut off at 64 tokens"),
        (
            {"response_length/clipped_ratio": 0.5, "response_length/mean": 40.0},
            "cut off at 64 tokens, 80% of all tokens among them: raise rollout.max_new_tokens, or reward short ones, and at best "
            "all of them come to an end of their own, instead of 50%. rollout.max_new_tokens=128",
        ),
        (
            {"perf/exposed_weights": 0.08, "perf/step_seconds": 2.5},
            "Weights take 8.0% of the workers' time, on average 0.2 s of a step of 2.5 s: another way (weight_sync.name), or "
            "training an adapter, saves so much at most.",
        ),
        ({"policy/clip_ratio": 0.6}, "60% of the tokens are clipped"),
        ({"mismatch/kl": 0.5}, "disagree on one and the same version"),
        ({"rows/unscored": 2.0}, "18 responses of the last 9 steps could not be scored"),
    ],
)
def test_numbers_that_are_out_of_the_ordinary_are_named(metrics, words, tmp_path):
    assert words in told(tmp_path / "odd", **metrics)
    assert words not in told(tmp_path / "usual", **dict.fromkeys(metrics, 0.0))


def test_cores_that_nobody_uses_are_told_of(tmp_path):
    text = told(tmp_path / "idle", **{"perf/cores_busy": 0.45})
    assert "busy 45% of the time: with rollout.num_workers=2" in text and "(train.helpers). rollout.num_workers=2" in text
    assert "cores are busy" not in told(tmp_path / "busy", **{"perf/cores_busy": 0.95})
    assert "cores are busy" not in told(tmp_path / "few", prompts=1, **{"perf/cores_busy": 0.45})  # one more is refused


def test_the_first_step_alone_is_no_ground_for_advice(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "response_length/clipped_ratio": 1.0}\n')
    run = RunReader(tmp_path)
    run.read_all()
    assert advice(run) == []
