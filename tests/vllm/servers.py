"""How tests come by vLLM servers: the real one's, where there is one, and its stand-in's."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncflow.engines.rollout.vllm.options import VllmOptions
from asyncflow.engines.rollout.vllm.process import ServerOptions

CONTEXT = 224
"""Tokens of a row, of the one server that tests share."""
VLLM_PYTHON = os.environ.get("ASYNCFLOW_VLLM_PYTHON")


def fake_python(folder: Path) -> Path:
    """An interpreter whose vLLM is the stand-in."""
    path, stand_in = folder / "python", Path(__file__).with_name("fake_vllm.py")
    has_vllm = '[ "$1" = -c ] && exit'  # what is asked before a server is started
    path.write_text(f'#!/bin/sh\n{has_vllm}\nexec "{sys.executable}" "{stand_in}" "$@"\n')
    path.chmod(0o700)
    return path


def server_options(python: str, model: Path, devices: Sequence[int] | None = None, **changes: Any) -> ServerOptions:
    """Those of a small server on the CPU."""
    options: dict[str, Any] = {"num_slots": 16, "max_context": 256, "python": python, **changes}
    return ServerOptions(VllmOptions(model, **options), "asyncflow", devices)
