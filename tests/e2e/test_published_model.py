"""A trainer that is killed while it writes the newest weights: the version before is whole, and becomes the run's model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.depth import in_gate
from tests.e2e.commands import run_command, write_config

Small = Callable[..., dict[str, Any]]

DYING_ENGINE = """
import os
import signal
from asyncflow.engines.train.torch_engine import TorchEngine

class Dying(TorchEngine):
    versions = 0

    async def export_weights(self):
        source = await super().export_weights()
        self.versions += 1
        return source if self.versions < 2 else HalfOf(source)

class HalfOf:
    are_lasting = are_gathered = False

    def __init__(self, source):
        self.specs, self._source = source.specs, source

    async def tensors(self):
        number = 0
        async for named in self._source.tensors():
            number += 1
            if 2 * number > len(self.specs):
                os.kill(os.getpid(), signal.SIGKILL)
            yield named

    async def gathered(self):
        await self._source.gathered()
"""


@pytest.mark.parametrize("weight_sync", in_gate("shared_memory", of=["shared_memory", "network", "collective"]))
def test_the_newest_whole_version_is_the_runs_model(small: Small, tmp_path: Path, weight_sync: str) -> None:
    common = {"weight_sync": {"name": weight_sync}, "rollout": {"num_workers": 2}}
    whole = small(**common, run={"name": "whole", "steps": 1}, train={"accumulate": "exact"})
    run_dir = tmp_path / "runs"
    assert run_command("train", write_config(tmp_path, whole)).returncode == 0
    (tmp_path / "engine.py").write_text(DYING_ENGINE)
    engine = {"path": f"{tmp_path / 'engine.py'}:Dying"}
    dying = small(**common, run={"name": "dying", "steps": 3}, train={"accumulate": "exact", "engine": engine, "max_restarts": 0})
    done = run_command("train", write_config(tmp_path, dying))
    assert done.returncode == 1
    output = done.stdout + done.stderr
    assert "worker trainer/0" in output and "SIGKILL" in output, output
    assert "holds the last published weights" in output, output
    ours, theirs = (load_file(run_dir / name / "model" / "model.safetensors") for name in ("dying", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
