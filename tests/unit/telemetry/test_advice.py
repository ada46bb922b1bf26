import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from asyncflow.telemetry.advice import advice
from asyncflow.telemetry.run_reader import RunReader

_spec = importlib.util.spec_from_file_location("synthetic_run", Path(__file__).with_name("synthetic_run.py"))
synthetic_run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(synthetic_run)

CONFIG = {"schedule": {"name": "periodic"}, "train": {"prompts_per_step": 32}, "rollout": {"max_new_tokens": 64, "num_workers": 1}}


def told(run_dir: Path, **metrics: float) -> str:
    """Advice about the made-up run, with some metrics of its own."""
    synthetic_run.write_run(run_dir)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    rows = [json.loads(line) | metrics for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = RunReader(run_dir)
    run.read_all()
    return "\n".join(f"{each.words} {each.change}" for each in advice(run))


def test_a_run_that_waits_for_its_updates_is_told_of_delayed(tmp_path):
    text = told(tmp_path)
    assert "Rollout workers wait 3" in text and "instead of 2.57 s. schedule=delayed" in text


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"reward/zero_std_groups": 26.0}, "26 of 32 groups a step have no signal"),
        ({"response_length/clipped_ratio": 0.5}, "50% of the responses are cut off at 64 tokens"),
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


def test_the_first_step_alone_is_no_ground_for_advice(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "response_length/clipped_ratio": 1.0}\n')
    run = RunReader(tmp_path)
    run.read_all()
    assert advice(run) == []
