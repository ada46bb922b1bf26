"""Whole runs whose engines compute on a device that is not the CPU: the stand-in (tests/stand_in.py), which every process of a run
finds as it would find the driver of an NPU, by PyTorch's entry point for such drivers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import MODEL, ROOT, merged
from tests.depth import deep
from tests.e2e.commands import command_line, rows, write_config
from tests.patience import patience
from tests.stand_in import KIND

STEPS: Final = 4
DRIVER: Final = {
    "torch_npu/__init__.py": "from tests import stand_in\n\n\ndef autoload() -> None:\n    stand_in.install()\n",
    "torch_npu-0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch_npu\nVersion: 0\n",
    "torch_npu-0.dist-info/entry_points.txt": "[torch.backends]\ntorch_npu = torch_npu:autoload\n",
}
RUNS: Final[dict[str, dict[str, Any]]] = {
    "old policy and reference": {
        "schedule": "delayed",
        "algorithm": {"name": "grpo", "kl_coefficient": 0.1},
        "train": {"old": "previous"},
    },
    "reference of its own": {
        "schedule": "periodic",
        "algorithm": {"name": "grpo", "kl_coefficient": 0.1},
        "train": {"reference": "task"},
    },
    "critic": {"schedule": "periodic", "algorithm": {"name": "ppo"}, "train": {"critic": {"learning_rate": 1e-3}}},
    "adapter": {
        "schedule": "periodic",
        "algorithm": {"name": "grpo", "kl_coefficient": 0.1},
        "model": {"lora": {"rank": 4, "alpha": 8}},
    },
    "reward model": {"schedule": "periodic", "reward": {"place": "task", "model": {"weight": 0.1}}},
    "general rollout engine": {"schedule": "bounded", "rollout": {"engine": "transformers"}},
}


def on(device: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Changes of a run whose engines are all on a device."""
    places: dict[str, Any] = {"rollout": {"device": device}, "train": {"device": device}}
    if "critic" in changes.get("train", {}):
        places["train"]["critic"] = {"device": device}
    if "model" in changes.get("reward", {}):
        places["reward"] = {"model": {"device": device}}
    return merged(changes, places)


@pytest.fixture
def train(small: Callable[..., dict[str, Any]], reward_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """`train(name, changes, *arguments)`: a run in interpreters of its own, which find the driver. Returns its folder."""
    for name, text in DRIVER.items():
        (file := tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    reward = tmp_path / "reward.py"
    reward.write_text("def score(sample):\n    return len(set(sample.response)) / 100\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)])}

    def train(name: str, changes: dict[str, Any], *arguments: str, says: str = "certificate holds") -> Path:
        own: dict[str, Any] = {
            "run": {"name": name, "steps": STEPS},
            "model": {"path": str(MODEL)},
            "reward": {"scorer": {"path": f"{reward}:score"}},
            "rollout": {"num_workers": 1, "max_new_tokens": 8},
            "train": {"learning_rate": 1e-4, "accumulate": "exact"},
            "checkpoint": {"every_steps": 2},
        }
        if "model" in changes.get("reward", {}):
            own["reward"]["model"] = {"path": str(reward_model)}
            shutil.copyfile(MODEL / "tokenizer.json", reward_model / "tokenizer.json")
        config = write_config(tmp_path, small(**merged(own, changes)))
        done = subprocess.run(
            command_line("train", config, *arguments),
            env=environment,
            capture_output=True,
            text=True,
            timeout=patience(300),
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        assert says in done.stdout and "certificate holds" in done.stdout and "(process" not in done.stdout, done.stdout
        return tmp_path / "runs" / name

    return train


@deep
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_on_a_device_is_that_of_the_cpu(kind: str, train: Callable[..., Path]) -> None:
    there, here = train("there", on(KIND, RUNS[kind])), train("here", on("cpu", RUNS[kind]))
    found, expected = (rows(folder / "metrics.jsonl") for folder in (there, here))
    assert len(found) == STEPS and all(row["policy/grad_norm"] > 0 for row in found)
    assert all(row["weights/attested"] == 1.0 for row in found[1:])
    tokens = [
        sorted((row["row"], row["response"]) for row in rows(folder / "samples.jsonl") if row["step"] == 0)
        for folder in (there, here)
    ]
    assert tokens[0] == tokens[1] and tokens[0]
    for name in ("policy/grad_norm", "policy/loss", "reward/mean"):
        np.testing.assert_allclose(found[0][name], expected[0][name], rtol=1e-3, atol=1e-5, err_msg=name)
    names = [sorted(load_file(next((folder / "model").glob("*.safetensors")))) for folder in (there, here)]
    assert names[0] == names[1]


@deep
def test_a_run_on_a_device_goes_on_from_its_checkpoint(train: Callable[..., Path]) -> None:
    """To the bits of the run that was not interrupted, since it is the CPU that computes."""
    changes = on(KIND, RUNS["reference of its own"])
    whole = train("whole", changes)
    train("halves", merged(changes, {"run": {"steps": 2}}))
    halves = train("halves", changes, "--resume", says="2 of 4 steps are done")
    weights, expected = (load_file(folder / "model" / "model.safetensors") for folder in (halves, whole))
    assert all(np.array_equal(weights[name], expected[name]) for name in expected)
