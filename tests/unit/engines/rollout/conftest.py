"""What is looked up in processes begins with everything imported."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from asyncflow.engines.rollout.vllm import look_up
from tests.forked import Command
from tests.patience import patience


def run_forked(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """Of `python -m MODULE ARGUMENTS` the same, but for the seconds of its imports."""
    _python, _m, module, *given = command
    process = Command(*given, main=f"{module}:main")
    output, errors = process.communicate(patience(60))
    return subprocess.CompletedProcess(command, process.wait(), output, errors)


@pytest.fixture(autouse=True)
def forked_look_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    forked = SimpleNamespace(run=run_forked, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(look_up, "subprocess", forked)
