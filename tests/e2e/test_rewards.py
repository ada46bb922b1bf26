"""Rewards as a user configures them: several at once, functions from elsewhere, a reward model, failures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncflow.telemetry.trace import read_spans
from tests.depth import deep, in_gate
from tests.e2e.commands import rows, run_command, write_config
from tests.patience import patience

Small = Callable[..., dict[str, Any]]

# A TRL reward, a verl reward, and graders that fail for some responses.
GRADERS = """
import os

def trl_brief(prompts, completions, answer, **columns):
    return [1.0 if len(completion) < 3 else None for completion in completions]

async def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(len(solution_str)), "acc": 0}

def fails_for(sample, share):
    if hash_of(sample) < share: raise RuntimeError("no network")
    return 1.0

def says_nothing(sample):
    return None if hash_of(sample) < 0.3 else hash_of(sample)

def hash_of(sample):
    import hashlib
    return hashlib.sha256((sample.prompt + sample.response).encode()).digest()[0] / 256
"""


@pytest.fixture
def graders(tmp_path: Path) -> Path:
    file = tmp_path / "graders.py"
    file.write_text(GRADERS)
    return file


def train(tmp_path: Path, tree: dict[str, Any], *overrides: str) -> tuple[Any, Path]:
    command = run_command("train", write_config(tmp_path, tree), *overrides)
    return command, tmp_path / "runs" / tree["run"]["name"]


@pytest.mark.parametrize("place", in_gate("task", of=["rollout", "task"]))
def test_several_rewards_are_weighted_and_each_is_logged_by_its_name(
    small: Small, tmp_path: Path, graders: Path, place: str
) -> None:
    scorers = {
        "correct": {"scorer": "numeric"},
        "brief": {"scorer": {"path": f"{graders}:trl_brief"}, "weight": 0.5},
        "long": {"scorer": {"path": f"{graders}:compute_score"}, "weight": -0.25},
        "digits": {"scorer": {"name": "regex", "pattern": "[0-9]"}, "weight": 0.125},
    }
    tree = small(run={"name": "several", "steps": 2}, reward={"scorers": scorers, "place": place, "num_workers": 2})
    command, run_dir = train(tmp_path, tree)
    assert command.returncode == 0, command.stderr
    samples = rows(run_dir / "samples.jsonl")
    assert samples
    for sample in samples:
        response, parts = sample["response"], sample["reward_parts"]
        brief, has_digits = 1.0 if len(response) < 3 else None, any(character.isdigit() for character in response)
        expected = {"correct": parts["correct"], "brief": brief, "long": float(len(response)), "digits": float(has_digits)}
        assert parts == expected and parts["correct"] in (0.0, 1.0)
        given = [scorers[name].get("weight", 1.0) * part for name, part in parts.items() if part is not None]
        assert sample["reward"] == pytest.approx(sum(given))
    for row in rows(run_dir / "metrics.jsonl"):
        assert 0 <= row["reward/correct"] <= 1 and 0 <= row["reward/digits"] <= 1 and row["reward/long"] > 0
        assert row.get("reward/brief", 1.0) == 1.0
        assert row["rows/unscored"] == row["rows/skipped"] == 0


def test_the_place_changes_no_reward(small: Small, tmp_path: Path, graders: Path) -> None:
    scorers = {"a": {"scorer": "numeric"}, "b": {"scorer": {"path": f"{graders}:compute_score"}, "weight": 0.1}}
    found = {}
    for place in ("rollout", "task"):
        (tmp_path / place).mkdir()
        reward = {"scorers": scorers, "place": place, "num_workers": 1 if place == "rollout" else 3}
        tree = small(run={"name": place, "steps": 2}, reward=reward)
        command = run_command("train", write_config(tmp_path / place, tree))
        assert command.returncode == 0, command.stderr
        names = ("reward/mean", "reward/std", "reward/a", "reward/b")
        found[place] = [{name: row[name] for name in names} for row in rows(tmp_path / "runs" / place / "metrics.jsonl")]
    assert found["rollout"] == found["task"]


# A whole run in one process: driver, trainer and rollout worker. It says what was evaluated in it, and which parsers it imported.
IN_ONE_PROCESS = """
import json, sys
import asyncflow.run.workers, asyncflow.cli, asyncflow.run.job
from asyncflow.trainer import Trainer

evaluated = []
def hear(event, arguments):
    if event == "compile" and isinstance(arguments[0], (bytes, str)):
        evaluated.append(arguments[0].decode(errors="replace") if isinstance(arguments[0], bytes) else arguments[0])
sys.addaudithook(hear)
eval("40 + 2")

with Trainer.from_config(json.loads(sys.argv[1])) as trainer:
    while trainer.step() is not None:
        pass
parsers = [name for name in sys.modules if name.partition(".")[0] in ("math_verify", "latex2sympy2", "latex2sympy2_extended")]
print(json.dumps([sorted({text.strip() for text in evaluated if len(text) < 1000}), parsers]))
"""


@deep
def test_the_process_of_a_run_evaluates_nothing_that_the_model_wrote_and_has_no_parser_that_would(small: Small) -> None:
    """torch imports sympy itself, here and there: what reads a formula with it is math-verify, over latex2sympy2."""
    tree = small(
        cluster="inline",
        reward={"scorer": "maths", "deadline_seconds": 30},
        eval={"path": "generated:arithmetic", "num_prompts": 4, "num_workers": 0},
        telemetry={"samples_per_step": 16},
    )
    command = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS, json.dumps(tree)], capture_output=True, text=True, timeout=patience(120), check=False
    )
    assert command.returncode == 0, command.stderr
    run_dir = Path(tree["run"]["dir"]) / "test"
    assert [row["rows/unscored"] for row in rows(run_dir / "metrics.jsonl")] == [0, 0]
    samples = [sample for sample in rows(run_dir / "samples.jsonl") if sample["purpose"] == "train"]
    assert len(samples) >= 8 and {sample["reward"] for sample in samples} == {0.0, 1.0}

    evaluated, parsers = json.loads(command.stdout.splitlines()[-1])
    assert parsers == []
    assert "40 + 2" in evaluated  # so it is heard
    written = {part.strip() for sample in samples for part in (sample["response"], sample["response"].rpartition("#")[2])}
    assert written.isdisjoint(evaluated)


def test_a_reward_model_scores_as_a_task_of_its_own(small: Small, tmp_path: Path, reward_model: Path) -> None:
    """Beside a scorer; by its own tokenizer, which is the policy's: so by the very token ids."""
    first, policy = train(tmp_path, small(run={"name": "policy", "steps": 1}))
    assert first.returncode == 0, first.stderr
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (policy / "model" / name).is_file():
            shutil.copyfile(policy / "model" / name, reward_model / name)
    reward = {
        "scorers": {"correct": {"scorer": "numeric", "weight": 2.0}}, "model": {"path": str(reward_model), "weight": 0.5},
        "place": "task",
    }  # fmt: skip
    tree = small(run={"name": "judged", "steps": 2}, reward=reward)
    command, run_dir = train(tmp_path, tree)
    assert command.returncode == 0, command.stderr
    samples = rows(run_dir / "samples.jsonl")
    judged = [sample["reward_parts"]["model"] for sample in samples]
    assert len({round(value, 6) for value in judged}) > 1, "the model looks at what it scores"
    for sample in samples:
        parts = sample["reward_parts"]
        assert sample["reward"] == pytest.approx(2.0 * parts["correct"] + 0.5 * parts["model"])
    assert all("reward/model" in row and "reward/correct" in row for row in rows(run_dir / "metrics.jsonl"))
    assert {span.worker for span in read_spans(run_dir / "spans.jsonl") if span.task == "reward"} == {"reward/0"}

    alone = small(run={"name": "alone", "steps": 1}, reward={"model": {"path": str(reward_model)}, "place": "task"})
    command, run_dir = train(tmp_path, alone, "reward.model.template='{prompt} {response}'")
    assert command.returncode == 0, command.stderr
    assert len({sample["reward"] for sample in rows(run_dir / "samples.jsonl")}) > 1


def test_a_row_that_cannot_be_scored_has_the_value_that_was_configured_and_is_counted(
    small: Small, tmp_path: Path, graders: Path
) -> None:
    scorer = {"path": f"{graders}:fails_for", "share": 0.2}
    reward = {"scorer": scorer, "value_on_failure": -1.0, "max_attempts": 2, "max_failed_fraction": 1.0}
    command, run_dir = train(tmp_path, small(run={"name": "valued", "steps": 2}, reward=reward))
    assert command.returncode == 0, command.stderr
    metrics = rows(run_dir / "metrics.jsonl")
    failed, trained = (sum(row[f"rows/{how}"] for row in metrics) for how in ("unscored", "trained"))
    assert 0 < failed < trained and not any(row["rows/dead"] for row in metrics)
    mean = sum(row["reward/mean"] * row["rows/trained"] for row in metrics) / trained
    assert mean == pytest.approx(1.0 - 2.0 * failed / trained, abs=1e-6)


@pytest.mark.parametrize("value", in_gate(None, of=[None, 0.0]))
def test_too_many_that_cannot_be_scored_stop_the_run(small: Small, tmp_path: Path, graders: Path, value: float | None) -> None:
    scorer = {"path": f"{graders}:fails_for", "share": 2.0}
    reward = {"scorer": scorer, "max_attempts": 1, "max_failed_fraction": 0.1, "value_on_failure": value}
    command, _ = train(tmp_path, small(run={"name": "stopped", "steps": 2}, reward=reward))
    assert command.returncode == 1
    if value is None:
        assert "could not be scored, more than reward.max_failed_fraction=0.1" in command.stderr
        assert "no network" in command.stderr
    else:  # a row with a value is no dead one: that none of the first could be scored is seen first
        assert "none of the first 8 responses could be scored" in command.stderr


def test_what_no_scorer_has_anything_to_say_about_is_left_out(small: Small, tmp_path: Path, graders: Path) -> None:
    reward = {"scorer": {"path": f"{graders}:says_nothing"}, "max_failed_fraction": 0.0}
    command, run_dir = train(tmp_path, small(run={"name": "skipped", "steps": 2}, reward=reward))
    assert command.returncode == 0, command.stderr
    metrics = rows(run_dir / "metrics.jsonl")
    assert sum(row["rows/skipped"] for row in metrics) == sum(row["rows/dead"] for row in metrics) > 0
    assert not any(row["rows/unscored"] or row["rows/redelivered"] for row in metrics)
    assert all(row["reward/mean"] > 0.3 for row in metrics), "and not a 0"


def test_a_reward_model_that_is_none_is_one_sentence(small: Small, tmp_path: Path, reward_model: Path) -> None:
    assert reward_model.parent == tmp_path
    reward_model.rename(tmp_path / "wordless")
    for name, fields in (("judge", '{"architectures": ["Qwen2ForCausalLM"]}'), ("nameless", '{"num_labels": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(fields)
    for path, place, words in (
        ("judge", "task", "is a Qwen2ForCausalLM; it takes one for sequence classification"),
        ("nowhere", "task", "it has no config.json"),
        ("nameless", "task", "names no class: set architectures"),
        ("wordless", "task", "has no tokenizer.json"),
        ("judge", "rollout", "set reward.place=task"),
    ):
        reward = {"model": {"path": str(tmp_path / path)}, "place": place}
        command, _ = train(tmp_path, small(run={"name": "none"}, reward=reward))
        assert command.returncode == 2 and words in command.stderr, command.stderr
