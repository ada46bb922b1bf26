"""`asyncflow verify` under each algorithm that docs/algorithms.md says it finds equal; grpo and dapo are in files of their own."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from asyncflow.cli import app
from asyncflow.config import Config
from asyncflow.telemetry.certificate import CERTIFICATE_FILE, Certificate
from asyncflow.telemetry.equivalence import Equivalence, Kill
from tests.conftest import merged
from tests.e2e.commands import rows, run_command, write_config

Small = Callable[..., dict[str, Any]]


def equal(config: Path, steps: int, names: tuple[str, str] = ("synchronous", "periodic")) -> Path:
    """Verifies, with verdict equal: the folder of both runs."""
    command = run_command("verify", config, "--steps", str(steps), timeout=240.0)
    assert command.returncode == 0, command.stdout + command.stderr
    assert f"EQUAL: {names[0]} and {names[1]} gave the same bits in {steps} steps" in command.stdout
    folder = config.parent / "runs" / "test-verify"
    given = json.loads((folder / "certificate.json").read_text())
    assert given["verdict"] == "equal" and given["kill"]["rows"] > 0 and given["overlapped_steps"] > 0
    printed = [rows(folder / name / "fingerprints.jsonl") for name in names]
    assert [line["tensors"] for line in printed[0]] == [line["tensors"] for line in printed[1]]
    assert printed[0][0]["tensors"] != printed[0][-1]["tensors"]  # something was learned
    return folder


def config_of(small: Small, tmp_path: Path, changes: dict[str, Any]) -> Path:
    tree = small(
        run={"steps": 500}, rollout={"num_slots": 16}, train={"prompts_per_step": 8, "warmup_steps": 0, "accumulate": "exact"}
    )
    return write_config(tmp_path, merged(tree, changes))


@pytest.mark.parametrize(
    "algorithm", [{"name": "dr_grpo", "loss_constant": 48}, "rloo", "gspo", "cispo"], ids=["dr_grpo", "rloo", "gspo", "cispo"]
)
def test_periodic_equals_synchronous(small: Small, tmp_path: Path, algorithm: str | dict[str, Any]) -> None:
    equal(config_of(small, tmp_path, {"algorithm": algorithm}), 3)


def test_with_the_kl_term_in_the_reward_periodic_equals_synchronous(small: Small, tmp_path: Path) -> None:
    changes = {
        "algorithm": {"name": "rloo", "kl_coefficient": 0.05, "kl_place": "reward"},
        "train": {"reference": "task"},
    }
    folder = equal(config_of(small, tmp_path, changes), 3)
    kl = [row["policy/kl"] for row in rows(folder / "periodic" / "metrics.jsonl")]
    assert kl[0] == 0.0 < min(kl[1:])


def test_reinforce_plus_plus_delayed_equals_itself(small: Small, tmp_path: Path) -> None:
    changes = {"algorithm": "reinforce_plus_plus", "schedule": "delayed"}
    equal(config_of(small, tmp_path, changes), 4, ("delayed-1", "delayed-2"))


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
