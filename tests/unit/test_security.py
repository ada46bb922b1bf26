"""Doors of a run: what docs/security.md says of all of them, and the doors that no other room tries."""

from __future__ import annotations

import ast
import os
import re
import socket
import stat
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.requests import Request

from asyncflow.environments.capture import endpoint as capture
from asyncflow.environments.capture.wire import RefusedCall
from asyncflow.run_dir import RunDir
from tests.conftest import ROOT

UNSAFE = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
PICKLES = {"multiprocessing", "ProcessPoolExecutor"}
"""What pickles whatever it sends between its processes."""
AMONG_ITS_OWN = {"transfer_queue/loader/prefetch.py"}
"""Modules that send so all the same, between a process and its own children: the page of doors has them."""
EVALUATES = {"sandbox", "environments", "rewards"}
"""Rooms whose processes run what a user, or a model, has written."""


def test_every_test_that_the_page_of_doors_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", (ROOT / "docs" / "security.md").read_text())
    assert len(named) > 40
    for file, test in named:
        source = (ROOT / file).read_text()
        assert not test or re.search(rf"def {test}\b", source), f"{file}::{test}"


def test_no_module_reads_pickles_or_evaluates_text() -> None:
    send_pickles = set()
    for path in sorted((ROOT / "asyncflow").rglob("*.py")):
        room = path.relative_to(ROOT / "asyncflow").parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                names = [part for alias in node.names for part in alias.name.split(".")]
            elif isinstance(node, ast.ImportFrom):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            assert not UNSAFE & set(names), where
            if PICKLES & set(names):
                send_pickles.add(path.relative_to(ROOT / "asyncflow").as_posix())
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called != "torch.load", where
                assert called not in ("eval", "exec") or room in EVALUATES, where
    assert send_pickles == AMONG_ITS_OWN


def test_a_runs_folder_is_its_owners_alone(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        new, open_to_all = tmp_path / "new", tmp_path / "open"
        RunDir(new).claim("{}\n")
        open_to_all.mkdir(mode=0o777)
        RunDir(open_to_all).claim("{}\n")
        weights = RunDir(new).make_weights_dir()
        modes = [stat.S_IMODE(folder.stat().st_mode) for folder in (new, open_to_all, weights)]
        weights.rmdir()
    finally:
        os.umask(mask)
    assert modes == [0o700] * 3


def test_ranks_of_one_machine_stay_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = pytest.importorskip("asyncflow.engines.train.parallel.ranks")
    for name in ranks.RANKS_INTERFACES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    ranks.stay_on_loopback()
    for name in ranks.RANKS_INTERFACES:
        assert os.environ[name] in {interface for _, interface in socket.if_nameindex() if interface.startswith("lo")}
    monkeypatch.setenv(ranks.RANKS_INTERFACES[0], "eth7")  # the user's own word counts
    ranks.stay_on_loopback()
    assert os.environ[ranks.RANKS_INTERFACES[0]] == "eth7"


async def test_a_body_without_a_length_is_bounded_at_the_capture_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its length it is refused at once; in chunks it says none, and is read no further than the bound."""
    monkeypatch.setattr(capture, "MAX_REQUEST_BYTES", 100_000)
    endpoint, read = capture.CaptureEndpoint(), 0
    endpoint._episodes["key"] = cast(Any, object())  # it is not asked

    async def receive() -> dict[str, Any]:
        nonlocal read
        read += 10_000
        return {"type": "http.request", "body": b" " * 10_000, "more_body": True}

    for length, bound in (([], 110_000), ([(b"content-length", b"200000")], 0)):
        read = 0
        headers = [(b"authorization", b"Bearer key"), *length]
        request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)
        with pytest.raises(RefusedCall) as refused:
            await endpoint._serve(request, is_chat=True)
        assert refused.value.status == 413 and read == bound
