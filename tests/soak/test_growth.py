"""What grows is found, and noise is not."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.soak.growth import MODES, OfSimulation, Taken, all_grown, grown, simulate, slopes, windows

STEPS = 2_000
Change = Callable[[int, dict[str, Any]], None]


def samples(change: Change = lambda step, taken: None, sitting: int = 0) -> list[Taken]:
    """What a steady run takes, every fourth step: a driver and a trainer, whose memory goes up and down by some MiB."""
    rng, found = random.Random(3), []
    for step in range(0, STEPS, 4):
        noise = rng.randrange(-(3 << 20), 3 << 20)
        processes = {"driver": (90 << 20, 60, 5), "trainer/0": ((300 << 20) + noise, 40 + rng.randrange(2), 9)}
        taken: dict[str, Any] = {"sitting": sitting, "step": step, "processes": processes, "shared": rng.randrange(2, 5)}
        change(step, taken)
        found.append(msgspec.convert(taken, Taken))
    return found


def seconds(later: float = 1.0) -> dict[int, float]:
    rng = random.Random(4)
    return {step: (0.1 + 0.05 * rng.random()) * (later if step > STEPS / 2 else 1.0) for step in range(STEPS)}


def leaks(step: int, taken: dict[str, Any]) -> None:
    """20 KiB a step, of which nothing is given back."""
    memory, *others = taken["processes"]["driver"]
    taken["processes"]["driver"] = (memory + 20_480 * step, *others)


def keeps_handles(step: int, taken: dict[str, Any]) -> None:
    memory, handles, threads = taken["processes"]["trainer/0"]
    taken["processes"]["trainer/0"] = (memory, handles + step // 300, threads)


def keeps_threads(step: int, taken: dict[str, Any]) -> None:
    memory, handles, threads = taken["processes"]["trainer/0"]
    taken["processes"]["trainer/0"] = (memory, handles, threads + step // 300)


def keeps_files(step: int, taken: dict[str, Any]) -> None:
    taken["shared"] = min(taken["shared"] + (step > STEPS / 2), 4)


def has_more_at_once(step: int, taken: dict[str, Any]) -> None:
    taken["shared"] += step > STEPS / 2 and step % 40 == 0 and taken["shared"] == 4


def test_noise_is_no_growth() -> None:
    assert all_grown([*samples(), *samples(sitting=1)], seconds()) == []
    found = slopes(samples(), seconds(), windows(0, STEPS))
    assert len(found) == 9 and not any(slope.is_growth for slope in found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (leaks, "driver: resident bytes"),
        (keeps_handles, "trainer/0: file handles 41 -> 4"),
        (keeps_threads, "trainer/0: threads 9.5 -> 15"),
        (keeps_files, "files in shared memory, at any time 2 -> 3"),
        (has_more_at_once, "files in shared memory, at most 4 -> 5"),
    ],
)
def test_what_grows_is_named(change: Change, words: str) -> None:
    found = grown(samples(change), seconds(), windows(0, STEPS))
    assert len(found) == 1 and found[0].startswith(words), found
    assert [line.removeprefix("sitting 0: ")[: len(words)] for line in all_grown(samples(change), seconds())] == [words] * 2


def test_a_moment_that_few_windows_see_is_no_growth() -> None:
    def meets(step: int, taken: dict[str, Any]) -> None:
        taken["shared"] += step in (20, STEPS - 20) and 4

    assert all_grown(samples(meets), seconds()) == []


def test_a_leak_is_told_by_the_step_with_the_noise_that_is_allowed() -> None:
    leak = next(slope for slope in slopes(samples(leaks), seconds(), windows(0, STEPS)) if slope.is_growth)
    assert (leak.after - leak.before) / leak.steps == pytest.approx(20_480, rel=0.01)
    assert "+2.05e+04 a step (noise: 1.49e+04)" in str(leak)


def test_slower_steps_are_growth() -> None:
    (found,) = grown(samples(), seconds(later=1.8), windows(0, STEPS))
    assert found.startswith("seconds a step 0.1")


def test_windows_are_those_that_are_asked_for() -> None:
    assert windows(0, 5_000) == (range(500, 1_000), range(4_500, 5_000))
    assert windows(0, 400) == (range(40, 80), range(360, 400))  # of a short run a tenth
    assert windows(2_000, 2_600) == (range(2_060, 2_120), range(2_540, 2_600))


def test_a_process_that_was_not_there_at_first_is_not_compared() -> None:
    def joins(step: int, taken: dict[str, Any]) -> None:
        if step > STEPS / 2:
            taken["processes"]["rollout/7"] = (1 << 40, 1, 1)

    assert grown(samples(joins), seconds(), windows(0, STEPS)) == []


class Sizes(OfSimulation):
    """Observer that notes how much the driver's parts hold after some steps."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, int]] = {}

    def step(self, step: int, row: Mapping[str, float]) -> None:
        if step in (60, 180):
            assert self.job is not None and self.job.driver is not None
            driver = self.job.driver
            parts = (driver.record, driver.ledger, driver.ledger.ledger, driver.versions, driver.evaluating, driver._admissions)
            self.seen[step] = {
                f"{type(part).__name__}.{name}": len(value)
                for part in parts
                for name, value in vars(part).items()
                if isinstance(value, dict | list | set | deque)
            }


@pytest.mark.parametrize("mode", MODES)
def test_what_the_driver_remembers_does_not_grow(mode: str, tmp_path: Path) -> None:
    sizes = Sizes()
    simulate(mode, tmp_path, 200, sizes)
    early, late = sizes.seen[60], sizes.seen[180]
    assert len(early) > 20 and {name: (early[name], size) for name, size in late.items() if size > early[name] + 4} == {}
