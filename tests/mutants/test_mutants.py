"""The suite bites: each patch beside this file plants one bug in a copy of the package, and a seed of the simulation has to fail,
or, for a bug that takes a rare accident, the unit test of what it breaks.

`patch -p1 < tests/mutants/<name>.patch` in a clean tree shows what one does. A patch that no longer applies is to be made anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = sorted(Path(__file__).parent.glob("*.patch"))
SEEDS = "0:300"
SIMULATION = ["-m", "tests.sim.run", "--first", "--seeds", SEEDS]
UNIT_TESTS = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"]
RARE = {
    "19-repeated-put-comes-again": "test_holdings.py",
    "23-dropped-rows-come-back": "test_holdings.py",
    "25-row-dropped-twice-counts-twice": "test_holdings.py",
    "26-put-again-taken-for-the-old-one": "test_holdings.py",
    "27-asked-again-after-a-withdrawal": "test_client.py",
    "28-late-word-in-the-directory": "test_directory.py",
    "29-deleted-with-the-change-that-fails": "test_holdings.py",
}
"""Bugs that none of the seeds meets, and the unit tests that do."""


def copied(to: Path) -> Path:
    """The package and its tests, to be spoilt."""
    leave_out = shutil.ignore_patterns("__pycache__", "*.patch")
    for name in ("asyncflow", "tests/sim", "tests/unit/transfer_queue"):
        shutil.copytree(ROOT / name, to / name, ignore=leave_out)
    return to


def run(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(where), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=where, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def failing(where: Path, tests: Sequence[str] = SIMULATION) -> str:
    """What fails there, and how; empty if nothing does."""
    done = run(where, *tests)
    return f"{done.stdout}\n{done.stderr}" if done.returncode else ""


def unit_tests(*files: str) -> list[str]:
    return [*UNIT_TESTS, *(f"tests/unit/transfer_queue/{file}" for file in files)]


def test_the_package_itself_passes(tmp_path: Path) -> None:
    where = copied(tmp_path)
    imported = run(where, "-c", "import asyncflow, tests.sim; print(asyncflow.__file__, tests.sim.__file__)")
    assert imported.stdout.split() == [str(where / "asyncflow" / "__init__.py"), str(where / "tests" / "sim" / "__init__.py")]
    assert failing(where) == ""
    assert failing(where, unit_tests(*sorted(set(RARE.values())))) == ""


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_planted_bug_is_caught(patch: Path, tmp_path: Path) -> None:
    where = copied(tmp_path)
    done = subprocess.run(["patch", "-p1", "--fuzz=2", "-i", str(patch)], cwd=where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{patch.name} does not apply any more: plant its bug anew.\n{done.stdout}"
    tests = unit_tests(RARE[patch.stem]) if patch.stem in RARE else SIMULATION
    assert failing(where, tests), f"nothing notices {patch.name}"


def test_there_are_enough() -> None:
    assert len(PATCHES) >= 30
    assert RARE.keys() <= {patch.stem for patch in PATCHES}
