"""What is left of a model whose trainer could not save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncflow.config import parse
from asyncflow.run.attempt import Attempt
from asyncflow.run.prepare import Prepared
from asyncflow.run_dir import RunDir
from asyncflow.types import UserError
from asyncflow.weight_sync.base import Manifest
from tests.conftest import MODEL


async def test_a_run_that_failed_before_its_first_step_makes_room_and_says_so(
    small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    async def mistaken(scratch: Path, resumed: object) -> Prepared:
        raise UserError("a mistake")

    said: list[str] = []
    config = parse(small())
    RunDir(config.run_dir).claim("run: {}")
    with pytest.raises(UserError, match="a mistake"):
        await Attempt(config, said.append, resume=False).begin(mistaken)
    assert said == [f"{config.run_dir} holds a run that ended before its first step: this one begins in its place"]
    (config.run_dir / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="holds an earlier run"):
        await Attempt(config, said.append, resume=False).begin(mistaken)


def test_the_last_published_weights_are_the_model_unless_they_are_on_another_machine(
    small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    said: list[str] = []
    config = parse(small())
    config.run_dir.mkdir(parents=True)
    attempt = Attempt(config, said.append, resume=False)
    published = tmp_path / "weights-2.safetensors"
    manifest = Manifest("first", 2, str(published), "", 7, {})
    attempt.save_published_model(manifest, MODEL, 2)
    assert not (config.run_dir / "model").exists()
    assert said == [
        "the trainer could not save in time, and its last published weights are not on this machine: the newest checkpoint "
        "has the model, if there is one"
    ]
    published.write_bytes(b"weights")
    attempt.save_published_model(manifest, MODEL, 2)
    assert (config.run_dir / "model" / "model.safetensors").read_bytes() == b"weights"
    assert "holds the last published weights" in said[1]
