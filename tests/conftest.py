"""What the tests share: the shipped model, and configurations small enough to run in seconds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "recipes" / "models" / "tiny-arithmetic"


def gsm8k_folder() -> Path | None:
    """The real data set, where it is to be found."""
    places = [os.environ.get("ASYNCFLOW_GSM8K"), str(ROOT.parent / "shared" / "data" / "gsm8k")]
    return next((Path(p) for p in places if p and (Path(p) / "train.jsonl").is_file()), None)


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Nested mappings, the second over the first."""
    return base | {
        key: merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        for key, value in changes.items()
    }


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A configuration of 2 steps of 4 prompts x 4 responses; keyword arguments change sections of it."""
    base = {
        "run": {"name": "test", "dir": str(tmp_path / "runs"), "steps": 2, "stall_timeout_seconds": 60},
        "model": {"path": str(MODEL)},
        "data": {"path": "generated:arithmetic", "limit": 64},
        "rollout": {"num_slots": 16, "group_size": 4, "max_new_tokens": 48},
        "train": {"prompts_per_step": 4, "learning_rate": 1e-4},
        "telemetry": {"trackers": []},
    }

    def build(**changes: Any) -> dict[str, Any]:
        return merged(base, changes)

    return build
