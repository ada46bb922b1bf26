"""What is left of a model whose trainer could not save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncflow.config import parse
from asyncflow.run.attempt import Attempt
from asyncflow.weight_sync.base import Manifest
from tests.conftest import MODEL


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
