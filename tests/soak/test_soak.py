"""The soak finds what breaks a law, and its faults happen."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.soak.faults import FAULTS, Impossible
from tests.soak.run import GROUP, PROMPTS, STEPS, Round, check_disk, check_end, told

Change = Callable[[list[dict[str, Any]], list[dict[str, Any]]], None]


def printed(step: int, version: int) -> dict[str, Any]:
    """Fingerprint of a step whose groups one version has made."""
    groups = range(step * PROMPTS, (step + 1) * PROMPTS)
    return {
        "step": step,
        "groups": [{"group": g, "rows": [{"row": g * GROUP + i, "spans": [0, version]} for i in range(GROUP)]} for g in groups],
    }


def twice(metrics: list[dict[str, Any]], prints: list[dict[str, Any]]) -> None:
    prints[3]["groups"][0] = prints[2]["groups"][0]


def skipped(metrics: list[dict[str, Any]], prints: list[dict[str, Any]]) -> None:
    del prints[3]["groups"][0]


def too_old(metrics: list[dict[str, Any]], prints: list[dict[str, Any]]) -> None:
    prints[3]["groups"][0]["rows"][1]["spans"] = [0, 2, 4, 3]


def again(metrics: list[dict[str, Any]], prints: list[dict[str, Any]]) -> None:
    metrics.insert(4, metrics[3])


def nothing(metrics: list[dict[str, Any]], prints: list[dict[str, Any]]) -> None:
    """The run as it should be."""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (nothing, ""),
        (twice, "rows are trained twice: [32"),
        (skipped, "groups were skipped or added: [12]"),
        (too_old, "row 49 of step 3 was made by [0, 2, 4, 3]"),
        (again, "metrics are of steps [0, 1, 2, 3, 3"),
    ],
)
def test_what_breaks_a_law_is_found_on_the_disk(tmp_path: Path, change: Change, words: str) -> None:
    metrics = [{"step": step, "perf/step_seconds": 1.0} for step in range(STEPS)]
    prints = [printed(step, step) for step in range(STEPS)]
    change(metrics, prints)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (tmp_path / "fingerprints.jsonl").write_text("".join(json.dumps(step) + "\n" for step in prints) + '{"half')
    done = Round(7, "periodic")
    check_disk("periodic", tmp_path, done)
    check_end("bounded", tmp_path, done, {})  # whose bits are not compared: there is no model here
    found = [why for why in done.violations if why != "there is no certificate of the whole run"]
    assert (not found) if not words else any(words in why for why in found), found
    assert f"{len(done.violations)} violations" in told([vars(done)])


@pytest.fixture
def victim() -> Iterator[tuple[psutil.Process, socket.socket]]:
    """A process that sends back what it is sent, and this end of its connection."""
    own, theirs = socket.socketpair()
    code = "import socket\nwith socket.socket(fileno=0) as s:\n while data := s.recv(100): s.sendall(data)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=theirs)
    theirs.close()
    own.settimeout(20.0)
    yield psutil.Process(process.pid), own
    own.close()
    process.kill()
    process.wait()


@pytest.mark.parametrize("kind", ["kill", "stop", "slow", "cut"])
def test_faults_happen_to_another_process(victim: tuple[psutil.Process, socket.socket], kind: str) -> None:
    process, own = victim
    own.sendall(b"there?")
    assert own.recv(100) == b"there?"
    try:
        lasted = FAULTS[kind](process, random.Random(3))
    except Impossible as error:
        pytest.skip(str(error))
    if kind in ("kill", "cut"):
        assert lasted == 0.0 and own.recv(100) == b""  # its end is gone
    else:
        own.sendall(b"again?")
        assert lasted > 0.0 and own.recv(100) == b"again?"
