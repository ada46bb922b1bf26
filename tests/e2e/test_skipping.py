"""Micro-batches without a gradient are left out, by real engines: the same weights come of it, and the figures say what was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from asyncflow.telemetry.trace import read_spans
from asyncflow.trainer import Trainer
from tests.conftest import merged
from tests.depth import deep, in_gate
from tests.e2e.commands import rows, run_command, write_config
from tests.e2e.test_parallel import of_metric, prints, trained

Small = Callable[..., dict[str, Any]]
SKIPS = {"skip_zero_advantages": "auto"}
WHOLE = {"skip_zero_advantages": False}


def in_this_process(small: Small, tmp_path: Path, name: str, **changes: Any) -> Path:
    sections = {
        "run": {"steps": 3, "name": name},
        "train": {"accumulate": "exact", "weight_decay": 0.1, "responses_per_micro_batch": 2, **WHOLE},
    }
    config = small(cluster="inline", telemetry={"fingerprints": True}, **merged(sections, changes))
    with Trainer.from_config(config) as trainer:
        while trainer.step() is not None:
            pass
    return tmp_path / "runs" / name


@pytest.mark.parametrize("schedule", in_gate("periodic", of=["periodic", "delayed"]))
def test_the_weights_have_the_same_bits_and_the_figures_tell_what_was_left_out(small: Small, tmp_path: Path, schedule: str) -> None:
    whole = in_this_process(small, tmp_path, "whole", schedule=schedule)
    thrifty = in_this_process(small, tmp_path, "thrifty", schedule=schedule, train=SKIPS)
    assert [step.tensors for step in prints(whole)] == [step.tensors for step in prints(thrifty)]

    left_out = of_metric(thrifty, "rows/zero_advantage")
    assert left_out == [4 * groups for groups in of_metric(whole, "reward/zero_std_groups")] and 0 < sum(left_out) < 48
    assert not any(of_metric(whole, "rows/zero_advantage"))
    for name in ("reward/mean", "response_length/mean", "rows/trained", "policy/grad_norm", "policy/loss"):
        assert of_metric(whole, name) == of_metric(thrifty, name), name
    # What was not computed is no throughput: the tokens of the one, less those of rows without advantages, are those of the other.
    for step, (all_rows, computed) in enumerate(zip(rows(whole / "metrics.jsonl"), rows(thrifty / "metrics.jsonl"), strict=True)):
        tokens, fewer = (row["perf/tpspd"] * row["perf/step_seconds"] for row in (all_rows, computed))
        assert fewer < tokens if left_out[step] else fewer == pytest.approx(tokens)
    spans = ([s for s in read_spans(run / "spans.jsonl") if s.task == "forward_backward"] for run in (whole, thrifty))
    tokens, fewer = (sum(span.tokens for span in of_run) for of_run in spans)
    assert 0 < fewer < tokens


@deep
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"train": {"epochs": 2, "mini_batches": 2, "old": "step_start", "learning_rate": 1e-3}}, marks=deep),
        pytest.param({"algorithm": "ppo", "reward": {"scorer": {"name": "regex", "pattern": "="}}}, marks=deep),
        pytest.param({"algorithm": "reinforce_plus_plus"}, marks=deep),
        {"algorithm": {"name": "cispo", "loss_normaliser": "sequences"}, "train": {"dtype": "bfloat16"}},
    ],
    ids=["epochs and mini-batches", "ppo", "a statistic of the batch", "bfloat16"],
)
def test_so_it_is_with_other_updates_and_algorithms(small: Small, tmp_path: Path, changes: dict[str, Any]) -> None:
    whole = in_this_process(small, tmp_path, "whole", **changes)
    thrifty = in_this_process(small, tmp_path, "thrifty", **merged(changes, {"train": SKIPS}))
    assert [step.tensors for step in prints(whole)] == [step.tensors for step in prints(thrifty)]
    assert of_metric(whole, "policy/loss") == of_metric(thrifty, "policy/loss")


@deep
def test_an_update_without_any_gradient_is_made_all_the_same(small: Small, tmp_path: Path) -> None:
    never = {"scorer": {"name": "regex", "pattern": "no answer has this"}}
    runs = [
        in_this_process(small, tmp_path, name, reward=never, train=train) for name, train in (("whole", {}), ("thrifty", SKIPS))
    ]
    first, second = (prints(run) for run in runs)
    assert [step.tensors for step in first] == [step.tensors for step in second]
    assert first[0].tensors != first[1].tensors  # weights decay
    for run in runs:
        assert of_metric(run, "policy/grad_norm") == [0.0] * 3 and not any(of_metric(run, "policy/skipped_updates"))
    assert of_metric(runs[1], "rows/zero_advantage") == [16.0] * 3


@deep
def test_data_parallel_ranks_leave_out_the_same(small: Small, tmp_path: Path) -> None:
    one, two = (trained(small, tmp_path, f"dp{dp}", plan={"train": {"dp": dp}}, train=SKIPS) for dp in (1, 2))
    assert [step.tensors for step in prints(one)] == [step.tensors for step in prints(two)]
    assert of_metric(one, "rows/zero_advantage") == of_metric(two, "rows/zero_advantage")
    assert sum(of_metric(two, "rows/zero_advantage")) > 0


@deep
def test_so_do_tensor_and_pipeline_parallel_ones(small: Small, tmp_path: Path) -> None:
    layout = {"plan": {"train": {"tp": 2, "pp": 2}}, "train": {"pipeline_micro_batches": 1}}
    one, four = trained(small, tmp_path, "one", train=WHOLE), trained(small, tmp_path, "four", **merged(layout, {"train": SKIPS}))
    assert sum(of_metric(four, "rows/zero_advantage")) > 0
    weights, others = (load_file(run / "model" / "model.safetensors") for run in (one, four))
    assert max(abs(weights[name] - others[name]).max() for name in weights) < 1e-4


@deep
def test_periodic_equals_synchronous(small: Small, tmp_path: Path) -> None:
    config = write_config(tmp_path, small(run={"steps": 100}, train=SKIPS))
    command = run_command("verify", config, "--steps", "4", "train.accumulate=exact")
    assert command.returncode == 0, command.stdout + command.stderr
    assert "EQUAL: synchronous and periodic gave the same bits in 4 steps" in command.stdout


@pytest.mark.parametrize("algorithm", [{"entropy_coefficient": 0.01}, {"kl_coefficient": 0.1}])
def test_a_loss_with_a_gradient_of_its_own_is_refused(small: Small, tmp_path: Path, algorithm: dict[str, float]) -> None:
    with_own = {"algorithm": {"name": "grpo", **algorithm}}
    config = write_config(tmp_path, small(train={"skip_zero_advantages": True}, **with_own))
    command = run_command("train", config)
    assert command.returncode == 2 and "train.skip_zero_advantages is for losses" in command.stderr, command.stderr
