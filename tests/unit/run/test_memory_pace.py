"""When a checkpoint in shared memory is due."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncflow.run.state import memory_pace
from asyncflow.run.state.memory_pace import MemoryPace


def room(monkeypatch: pytest.MonkeyPatch, *, free: int, available: int) -> None:
    monkeypatch.setattr(memory_pace.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr(memory_pace.psutil, "virtual_memory", lambda: SimpleNamespace(available=available))


@pytest.mark.parametrize(("is_unbounded", "expected"), [(False, [True, False, False, True]), (True, [True] * 4)])
def test_checkpoints_take_a_hundredth_of_the_trainer_s_time_unless_each_step_is_to_have_one(
    tmp_path: Path, is_unbounded: bool, expected: list[bool]
) -> None:
    now, said = 0.0, list[str]()
    pace = MemoryPace(tmp_path, 0, lambda: now, said.append, is_unbounded=is_unbounded)
    found = [pace.is_due()]
    pace.begun()
    now = 1.0
    pace.written(0.05)  # of the trainer's time: the next one is due after five seconds
    for moment in (1.0, 4.99, 5.0):
        now = moment
        found.append(pace.is_due())
    assert found == expected and not said


@pytest.mark.parametrize(("free", "available", "expected"), [(20, 40, True), (19, 1000, False), (1000, 39, False)])
def test_there_are_none_without_room_for_two_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, available: int, expected: bool
) -> None:
    """In shared memory, and in half of the memory that is available."""
    said: list[str] = []
    pace = MemoryPace(tmp_path, 10, lambda: 0.0, said.append, is_unbounded=True)
    room(monkeypatch, free=free, available=available)
    assert pace.is_due() == expected
    room(monkeypatch, free=1000, available=1000)
    assert pace.is_due() == expected  # and it says so once
    assert len(said) == (not expected) and all("no more checkpoints in shared memory" in line for line in said)
