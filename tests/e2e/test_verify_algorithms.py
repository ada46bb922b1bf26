"""`asyncflow verify` under each algorithm of docs/algorithms.md; grpo and dynamic sampling are in files of their own."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from asyncflow.cli.verbs import app
from asyncflow.config import Config
from asyncflow.telemetry.certificate import CERTIFICATE_FILE, Certificate
from asyncflow.telemetry.equivalence import Equivalence, Kill
from tests.conftest import merged
from tests.depth import deep
from tests.e2e.commands import rows, run_command, verified, write_config

Small = Callable[..., dict[str, Any]]


def equal(config: Path, steps: int, names: tuple[str, str] = ("synchronous", "periodic")) -> Path:
    """Verifies, with verdict equal: the folder of both runs."""
    verified(config, names=names, steps=steps)
    folder = config.parent / "runs" / "test-verify"
    given = json.loads((folder / "certificate.json").read_text())
    assert given["verdict"] == "equal" and given["kill"]["rows"] > 0 and given["overlapped_steps"] > 0
    check_same_tensors(folder, names)
    return folder


def check_same_tensors(folder: Path, names: tuple[str, str] = ("synchronous", "periodic")) -> None:
    """Of the policy and of the critic, if there is one, after every step; and that they learned something."""
    for file in ("fingerprints.jsonl", "fingerprints.critic.jsonl"):
        if file == "fingerprints.jsonl" or (folder / names[0] / file).exists():
            printed = [rows(folder / name / file) for name in names]
            assert [line["tensors"] for line in printed[0]] == [line["tensors"] for line in printed[1]]
            assert printed[0][0]["tensors"] != printed[0][-1]["tensors"]


def config_of(small: Small, tmp_path: Path, changes: dict[str, Any]) -> Path:
    tree = small(
        run={"steps": 500}, rollout={"num_slots": 16}, train={"prompts_per_step": 8, "warmup_steps": 0, "accumulate": "exact"}
    )
    return write_config(tmp_path, merged(tree, changes))


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param({"name": "dr_grpo", "loss_constant": 48}, marks=deep),
        pytest.param({"name": "dapo", "overlong_length": 48, "overlong_buffer": 40}, marks=deep),
        pytest.param("rloo", marks=deep),
        pytest.param("gspo", marks=deep),
        pytest.param("cispo", marks=deep),
    ],
    ids=["dr_grpo", "dapo", "rloo", "gspo", "cispo"],
)
def test_periodic_equals_synchronous(small: Small, tmp_path: Path, algorithm: str | dict[str, Any]) -> None:
    equal(config_of(small, tmp_path, {"algorithm": algorithm}), 3)


@deep
def test_with_the_kl_term_in_the_reward_periodic_equals_synchronous(small: Small, tmp_path: Path) -> None:
    changes = {
        "algorithm": {"name": "rloo", "kl_coefficient": 0.05, "kl_place": "reward"},
        "train": {"reference": "task"},
    }
    folder = equal(config_of(small, tmp_path, changes), 3)
    kl = [row["policy/kl"] for row in rows(folder / "periodic" / "metrics.jsonl")]
    assert kl[0] == 0.0 < min(kl[1:])


@deep
def test_reinforce_plus_plus_delayed_equals_itself(small: Small, tmp_path: Path) -> None:
    changes = {"algorithm": "reinforce_plus_plus", "schedule": "delayed"}
    equal(config_of(small, tmp_path, changes), 4, ("delayed-1", "delayed-2"))


NO_OVERLAP = "periodic never trained while responses were made or scored"


@deep
def test_reinforce_plus_plus_s_periodic_equals_synchronous_and_that_is_no_proof(small: Small, tmp_path: Path) -> None:
    """Its training waits for the last group of a step, so that nobody has rows in hand when a worker is to be killed."""
    command = run_command("verify", config_of(small, tmp_path, {"algorithm": "reinforce_plus_plus"}), "--steps", "2", seconds=240.0)
    assert command.returncode == 2, command.stdout + command.stderr
    assert f"VOID, no proof: {NO_OVERLAP}; periodic lost no row with a killed worker\n" in command.stdout, command.stdout
    folder = tmp_path / "runs" / "test-verify"
    given = json.loads((folder / "certificate.json").read_text())
    assert given["verdict"] == "void" and given["difference"] is None
    assert given["overlapped_steps"] == 0 < given["reordered_steps"]
    check_same_tensors(folder)


BASELINE: dict[str, Any] = {"algorithm": {"name": "reinforce_plus_plus", "baseline": "group"}}
NORMALISING_PPO: dict[str, Any] = {
    "algorithm": {"name": "ppo", "normalise_advantages": True},
    "train": {"critic": {"learning_rate": 1e-3}},
}


@pytest.mark.parametrize(
    ("changes", "schedule"),
    [
        pytest.param(BASELINE, "periodic", id="baseline-periodic", marks=deep),
        pytest.param(BASELINE, "delayed", id="baseline-delayed", marks=deep),
        pytest.param(NORMALISING_PPO, "periodic", id="ppo-periodic", marks=deep),
        pytest.param(NORMALISING_PPO, "delayed", id="ppo-delayed", marks=deep),
    ],
)
def test_with_a_statistic_of_the_step_bits_are_equal_and_periodic_overlaps_nothing(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], schedule: str
) -> None:
    """Within this process, where nobody can be killed: delayed with itself is no proof for that reason alone.

    Delayed, responses are made two at a time: the training of a step waits for the last value of a critic that goes group by group,
    and the responses of the next step, beside it, are still to take longer than that.
    """
    is_delayed = schedule == "delayed"
    command = importlib.import_module("asyncflow.cli.verify")
    run = command._run
    monkeypatch.setitem(command.SETTINGS, "cluster", "inline")
    monkeypatch.setattr(command, "_run", lambda given, kill_in_step: run(given, None))
    config = config_of(small, tmp_path, merged(changes, {"schedule": schedule, "rollout": {"num_slots": 2 if is_delayed else 16}}))
    result = CliRunner().invoke(app, ["verify", str(config), "--steps", "3"])
    assert result.exit_code == 2, (result.output, result.exception)
    folder = tmp_path / "runs" / "test-verify"
    given = json.loads((folder / "certificate.json").read_text())
    names = ("delayed-1", "delayed-2") if is_delayed else ("synchronous", "periodic")
    assert given["verdict"] == "void" and given["difference"] is None and given["reordered_steps"] > 0
    assert given["reasons"] == [*([] if is_delayed else [NO_OVERLAP]), f"{names[1]} lost no row with a killed worker"]
    assert (given["overlapped_steps"] > 0) is is_delayed
    check_same_tensors(folder, names)


@deep
def test_ppo_s_periodic_equals_synchronous_and_its_critic_is_compared(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(small, tmp_path, {"algorithm": "ppo", "train": {"critic": {"learning_rate": 1e-3}}})
    folder = equal(config, 3)
    earlier = msgspec.json.decode((folder / "certificate.json").read_bytes(), type=Equivalence)

    # The same two runs, but that the second one's critic has another bit after its last update.
    path = folder / "periodic" / "fingerprints.critic.jsonl"
    critic = rows(path)
    tensor = next(name for name in critic[-1]["tensors"] if name.startswith("weights/"))
    critic[-1]["tensors"][tensor] = "00"
    path.write_text("".join(json.dumps(line) + "\n" for line in critic))

    async def again(given: Config, kill_in_step: int | None) -> tuple[Certificate, Kill | None]:
        certificate = msgspec.json.decode((given.run_dir / CERTIFICATE_FILE).read_bytes(), type=Certificate)
        return certificate, None if kill_in_step is None else earlier.kill

    monkeypatch.setattr(importlib.import_module("asyncflow.cli.verify"), "_run", again)
    result = CliRunner().invoke(app, ["verify", str(config), "--steps", "3"])
    assert result.exit_code == 1, result.output
    assert f"step 2, tensor of critic/{tensor}: " in result.output and " against 00" in result.output
    path.unlink()
    result = CliRunner().invoke(app, ["verify", str(config), "--steps", "3"])
    assert "fingerprints.critic.jsonl holds no fingerprints" in str(result.exception)
