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

from asyncflow.config import parse
from tests.soak.faults import FAULTS, Impossible
from tests.soak.laws import Round, check_disk, check_end, check_prompts, check_status
from tests.soak.modes import GROUP, MODES, PROMPTS, STEPS, configuration
from tests.soak.record import Sitting, read, write
from tests.soak.run import role_of, told

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


def out_of_order(metrics: list[dict[str, Any]], prints: list[dict[str, Any]]) -> None:
    for step, other in ((3, 4), (4, 3)):
        prints[step]["groups"][0] = {**printed(other, step)["groups"][0]}


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
        (out_of_order, "groups [16] were trained in step 3"),
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
    assert f"{len(done.violations)} violations" in told(done)


def test_a_part_of_a_certificate_breaks_a_law(tmp_path: Path) -> None:
    (tmp_path / "certificate.json").write_text('{"steps": 5, "sche')
    done = Round(7, "periodic")
    check_end("bounded", tmp_path, done, {})
    assert any("certificate.json is no certificate" in why for why in done.violations)


@pytest.mark.parametrize("rank", ["-1", ".critic"])
def test_what_other_trainers_have_written_is_looked_at(tmp_path: Path, rank: str) -> None:
    (tmp_path / f"fingerprints{rank}.jsonl").write_text("".join(json.dumps(printed(step, step)) + "\n" for step in (0, 2, 1)))
    done = Round(7, "periodic")
    check_disk("periodic", tmp_path, done)
    assert done.violations == ["fingerprints are of steps [0, 2, 1]"]


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ([0, 2, 3], ""),  # prompt 1 was never acknowledged
        ([0, 3, 4], "were lost: [2]"),
        ([0, 3, 2], "in another order, or twice"),
        ([0, 2, 2], "in another order, or twice"),
    ],
)
def test_a_prompt_that_was_put_and_not_trained_is_found(tmp_path: Path, first: list[int], words: str) -> None:
    numbers = [*first, *range(max(first) + 1, max(first) + 1 + STEPS * PROMPTS - len(first))]
    steps = [[step, {group: numbers[group] for group in range(step * PROMPTS, (step + 1) * PROMPTS)}] for step in range(STEPS)]
    (tmp_path / "trained.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ([0, {"0": 99}], *steps)))
    (tmp_path / "put.jsonl").write_text("".join(f"[{n}, false]\n" + f"[{n}, true]\n" * (n != 1) for n in range(300)))
    done = Round(7, "synchronous, trained outside")
    check_prompts(tmp_path, done)
    assert (done.violations == []) if not words else any(words in why for why in done.violations), done.violations


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_a_configuration(tmp_path: Path, mode: str) -> None:
    parse(configuration(mode, tmp_path))


@pytest.mark.parametrize(
    ("mode", "status", "faults", "is_explained"),
    [
        ("periodic", 0, [], True),
        ("periodic", 1, [], False),
        ("periodic", 1, [("kill trainer", 0.0), ("kill driver", 0.0), ("slow rollout", 4.0)], False),
        ("periodic", -9, [("kill driver", 0.0)], True),
        ("periodic", -9, [("kill trainer", 0.0)], False),
        ("periodic", 1, [("fill disk", 1.0)], True),
        ("periodic", 1, [("handles scorer", 1.0)], True),
        ("periodic", 1, [("stop trainer", 8.0)], False),
        ("periodic", 1, [("stop trainer", 8.0), ("stop fork server", 29.0)], True),
        ("delayed, units", 1, [("kill storage", 0.0)], True),
        ("periodic, Redis", 1, [("kill storage", 0.0)] * 3, False),
        ("periodic, Redis", 1, [("kill storage", 0.0)] * 4, True),
        ("periodic, Redis", 1, [("slow redis", 2.0)], True),
        ("periodic, served", 1, [("kill trainer", 0.0)], False),
        ("periodic, served", 1, [("kill generator", 0.0)], False),
    ],
)
def test_an_attempt_fails_only_where_a_fault_explains_it(
    mode: str, status: int, faults: list[tuple[str, float]], is_explained: bool
) -> None:
    done = Round(7, mode)
    check_status(status, faults, "going on\nasyncflow: nothing has moved for 60 s\n", done)
    assert is_explained == (not done.violations)
    if not is_explained:
        assert f"exit {status}, which none of its faults explains" in done.violations[0]
        assert done.violations[0].endswith(": asyncflow: nothing has moved for 60 s")


def test_roles_are_told_by_command_lines() -> None:
    child = ["python", "-m", "asyncflow.cluster.child", "asyncflow.run.workers:train_worker"]
    assert [role_of([*child, name, "/tmp/run"]) for name in ("trainer/1", "critic")] == ["trainer", "critic"]
    assert role_of(["python", "-u", "-m", "asyncflow.environments.worker", "3"]) == "environment"
    assert role_of(["sh"]) == ""


def test_sittings_are_kept_and_shown(tmp_path: Path) -> None:
    first, second = (Sitting("2026-01-02", "abc", 0.2) for _ in range(2))
    first.count(
        [Round(0, "periodic", 1800.0, 2, {"kill driver": 2, "fill disk": 1}, {}, [("kill driver", 2.0), ("fill disk", 0.5)])]
    )
    second.count([Round(1, "delayed", 36.0, 1, {"kill fork server": 1}, {"cut driver: Impossible": 1}, [], ["it is\nwrong"])])
    write(tmp_path / "soak.jsonl", [first])
    write(tmp_path / "soak.jsonl", [*read(tmp_path / "soak.jsonl"), second])
    text = (tmp_path / "soak.md").read_text()
    assert "| 2026-01-02 | abc | 0.2 | 0 to 0 | 0.50 | 1 | 2 | 3 | 0 | 1.25, " in text
    assert "In all 4 faults in 0.51 hours, 1 violations:\n\n* 2026-01-02, abc, seed 1 (delayed): it is wrong" in text
    assert "| fork server |  | 1 |" in text and "| role | fill | kill |" in text


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
