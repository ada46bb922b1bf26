"""Every algorithm trains, and so does one from outside: the page's example, by its file and by an installed package's name."""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from asyncflow.algorithms import ALGORITHMS
from asyncflow.telemetry.trace import read_spans
from asyncflow.trainer import Trainer
from asyncflow.user_file import import_file
from tests.conftest import MODEL, ROOT
from tests.depth import deep, in_gate
from tests.e2e.commands import command_line, rows, run_command, write_config
from tests.patience import patience
from tests.unit.algorithms.batches import random_batch, scored_group

Small = Callable[..., dict[str, Any]]

RUNS: list[dict[str, Any]] = [
    {"name": "cispo"},
    {"name": "dapo", "overlong_length": 48, "overlong_buffer": 16, "overlong_filter": True},
    {"name": "dapo", "dynamic_sampling": True},
    {"name": "dr_grpo", "loss_constant": 48},
    {"name": "grpo", "entropy_coefficient": 0.01, "kl_coefficient": 0.05, "kl_estimator": "k2"},
    {"name": "gspo"},
    {"name": "reinforce_plus_plus", "kl_coefficient": 0.05},
    {"name": "reinforce_plus_plus", "baseline": "group", "kl_coefficient": 0.05},
    {"name": "rloo", "kl_coefficient": 0.05},
]
METRICS = ("policy/kl", "policy/entropy", "policy/clip_ratio", "policy/rollout_kl", "policy/loss", "policy/grad_norm")


def test_each_algorithm_is_run() -> None:
    assert {run["name"] for run in RUNS} == ALGORITHMS.keys() - {"ppo"}


@pytest.mark.parametrize(
    "algorithm", in_gate(RUNS[1], RUNS[7], of=RUNS), ids=lambda run: "-".join(str(value) for value in run.values())
)
def test_an_algorithm_trains(small: Small, tmp_path: Path, algorithm: dict[str, Any]) -> None:
    is_ahead = "kl_coefficient" in algorithm and (algorithm["name"] == "rloo" or algorithm.get("baseline") is None)
    reference = "task" if is_ahead and algorithm["name"] != "grpo" else "fused"
    tree = small(cluster="inline", algorithm=algorithm, train={"reference": reference})
    with Trainer.from_config(tree) as trainer:
        while trainer.step() is not None:
            pass
    check_learned(tmp_path / "runs" / "test", has_reference="kl_coefficient" in algorithm)


def check_learned(run: Path, *, has_reference: bool = False) -> None:
    """Two updates, with all metrics, of a policy that moves away from its reference, if it has one."""
    steps = rows(run / "metrics.jsonl")
    assert len(steps) == 2 and not any(step["train/skipped"] for step in steps if "train/skipped" in step)
    for step in steps:
        assert all(math.isfinite(step[name]) for name in METRICS) and step["policy/grad_norm"] > 0
    assert steps[0]["policy/entropy"] > 0 and steps[0]["policy/kl"] == pytest.approx(0, abs=1e-6)
    assert (steps[1]["policy/kl"] > 1e-8) is has_reference
    before, after = (load_file(folder / "model.safetensors") for folder in (MODEL, run / "model"))
    assert any((before[name] != after[name]).any() for name in before)


def example(name: str = "SAPO") -> str:
    """The page's algorithm of that name."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)
    (source,) = (block for block in blocks if f"class {name}" in block)
    return str(source)


def test_the_example_says_what_the_paper_says(tmp_path: Path) -> None:
    (tmp_path / "sapo.py").write_text(example())
    algorithm = import_file(tmp_path / "sapo.py").SAPO(negative=1.5)
    batch = random_batch(1)
    sums = algorithm.loss(batch)
    (gradient_T,) = torch.autograd.grad(sums.loss, batch.logprobs_T)
    for t, (advantage, mask) in enumerate(zip(batch.advantages_T.tolist(), batch.mask_T.tolist(), strict=True)):
        ratio = math.exp(batch.logprobs_T[t].item() - batch.old_logprobs_T[t].item())
        tau = 1.0 if advantage > 0 else 1.5
        p = 1 / (1 + math.exp(-tau * (ratio - 1)))
        assert gradient_T[t].item() == pytest.approx(-mask * 4 * p * (1 - p) * ratio * advantage)
    assert sums.metrics["policy/clip_ratio"] == 0
    assert algorithm.advantages(scored_group([1.0, 0.0])).tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-5)


def test_an_algorithm_from_a_file_trains(small: Small, tmp_path: Path) -> None:
    (tmp_path / "sapo.py").write_text(example())
    own = {"path": f"{tmp_path / 'sapo.py'}:SAPO", "negative": 1.5, "entropy_coefficient": 0.01}
    with Trainer.from_config(small(cluster="inline", algorithm=own)) as trainer:
        assert [trainer.step() is not None for _ in range(3)] == [True, True, False]
    check_learned(tmp_path / "runs" / "test")


@pytest.mark.parametrize("schedule", in_gate("delayed", of=["periodic", "delayed"]))
@deep
def test_an_algorithm_with_a_critic_from_a_file_is_six_tasks_of_the_queue_too(small: Small, tmp_path: Path, schedule: str) -> None:
    """No room of the package knows it: what PPO asks of the dataflow, any file may ask."""
    (tmp_path / "a2c.py").write_text(example("A2C"))
    own = {"path": f"{tmp_path / 'a2c.py'}:A2C", "kl_coefficient": 0.05}
    train = {"reference": "task", "critic": {"learning_rate": 1e-3}}
    tree = small(schedule=schedule, algorithm={**own, "correction": "decoupled"}, reward={"place": "task"}, train=train)
    command = run_command("train", write_config(tmp_path, tree))
    assert command.returncode == 0, command.stdout + command.stderr
    run = tmp_path / "runs" / "test"
    check_learned(run, has_reference=True)
    spans = read_spans(run / "spans.jsonl")
    assert {span.task for span in spans} >= {"generate", "reward", "reference", "values", "forward_backward", "critic_update"}
    assert {(span.step, span.version) for span in spans if span.task == "values" and span.rows} == {(0, 0), (1, 1)}
    steps = rows(run / "metrics.jsonl")
    assert all(step["critic/grad_norm"] > 0 for step in steps) and steps[0]["critic/loss"] != steps[1]["critic/loss"]
    before, after = (load_file(folder / "model.safetensors") for folder in (run / "model", run / "critic"))
    assert any((before[name] != after[name]).any() for name in before.keys() & after.keys())


@deep
def test_an_algorithm_of_an_installed_package_trains(small: Small, tmp_path: Path) -> None:
    """As a user does it, with a process for each worker."""
    information = tmp_path / "site" / "sapo_package-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: sapo_package\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[asyncflow.algorithms]\nsapo = sapo_package:SAPO\n")
    (information.parent / "sapo_package.py").write_text(example())
    config = write_config(tmp_path, small(algorithm={"name": "sapo", "negative": 1.5}))
    path = os.pathsep.join(filter(None, [str(information.parent), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        command_line("train", config),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    check_learned(tmp_path / "runs" / "test")
    without = run_command("train", config)
    assert without.returncode == 2 and "'sapo' is not known; choose one of cispo, dapo" in without.stderr + without.stdout
