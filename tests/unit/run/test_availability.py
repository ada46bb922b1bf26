"""What a configuration names is looked for before a run: what is not there is the user's mistake, a short machine is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncflow.cluster.forking import ForkServer
from asyncflow.config import parse
from asyncflow.run import availability
from asyncflow.types import RunError, UserError


async def checked(file: Path, text: str) -> None:
    file.write_text(text)
    tree = {"model": {"path": "none"}, "data": {"path": "none"}, "rollout": {"engine": {"name": f"{file}:Engine"}}}
    await availability.check_engines(parse(tree))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise ImportError('no such thing')", UserError),
        ("class Other: pass", UserError),
        ("raise MemoryError", RunError),
        ("raise OSError(24, 'Too many open files')", RunError),
        ("raise ImportError('libc.so.6: failed to map segment from shared object')", RunError),
        ("import os; os._exit(1)", RunError),
    ],
)
async def test_an_engine_that_cannot_be_had_is_a_mistake_unless_the_machine_was_short(
    tmp_path: Path, text: str, error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        await checked(tmp_path / "engine.py", text)
    assert type(caught.value) is error


@pytest.mark.parametrize("limit", ["-n 3", "-v 10240"])
async def test_an_interpreter_that_cannot_start_refuses_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    starved = tmp_path / "python"
    starved.write_text(f'#!/bin/sh\nulimit {limit}; exec {sys.executable} "$@"\n')
    starved.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(starved))
    ForkServer.keep([])  # one that is there has started
    with pytest.raises(RunError):
        await checked(tmp_path / "engine.py", "class Engine: pass")
