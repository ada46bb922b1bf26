"""The suite bites: each patch beside this file plants one bug in a copy of the package, and the test that `killed_by.toml` names
for it has to fail there: a file of the suite, or a seed of the simulation.

`patch -p1 < tests/mutants/<name>.patch` in a clean tree shows what one does. A patch that no longer applies is to be made anew.

The deep suite plants all of them, `make test` five, drawn by the commit: the same ones at every run of it, others at the next one.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.depth import IS_DEEP
from tests.patience import patience
from tests.sim.test_simulation import IN_GATE

ROOT = Path(__file__).parents[2]
PATCHES = sorted(Path(__file__).parent.glob("*.patch"))
KILLED_BY = tomllib.loads(Path(__file__).with_name("killed_by.toml").read_text())
SEEDS: dict[str, int] = KILLED_BY["seeds"]
FILES: dict[str, str] = KILLED_BY["files"]
GATE = ",".join(map(str, IN_GATE))
"""The seeds that `make test` runs."""
COPIED = ("asyncflow", "tests", "pyproject.toml")
LINKED = ("recipes", "benchmarks", "docs")
"""What tests read beside the package and themselves: nothing of it is spoilt."""
FAILED = 1
"""The status of pytest and of `tests.sim.run` where tests fail. Another one is no answer: a file that cannot be imported, say."""


def commit() -> str:
    """That of the tree; where there is no git, a hash of the package."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        done = None
    if done is not None and done.returncode == 0:
        return done.stdout.strip()
    files = sorted((ROOT / "asyncflow").rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def drawn() -> list[Path]:
    """The patches that are planted."""
    return PATCHES if IS_DEEP else sorted(random.Random(commit()).sample(PATCHES, 5))


DRAWN = drawn()


def run(where: Path, *arguments: str, writes_bytecode: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(where), "PYTHONDONTWRITEBYTECODE": "" if writes_bytecode else "1"}
    environment.pop("ASYNCFLOW_TESTS", None)  # what `make test` runs has to notice each
    return subprocess.run(
        [sys.executable, *arguments], cwd=where, env=environment, capture_output=True, text=True, timeout=patience(600), check=False
    )


def simulation(seeds: str) -> list[str]:
    return ["-m", "tests.sim.run", "--first", "--seeds", seeds]


def unit_test(*files: str) -> list[str]:
    return ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]


def is_caught(where: Path, patch: Path) -> bool:
    """Whether a test fails there. Raises `AssertionError` for one that cannot be run."""
    if patch.stem in FILES:
        done = run(where, *unit_test(FILES[patch.stem]))
        told = "FAILED " in done.stdout
    else:
        seed = SEEDS[patch.stem]
        done = run(where, *simulation(f"{seed}:{seed + 1}"))
        if done.returncode == 0:  # the simulation has changed, and another seed meets the bug now
            done = run(where, *simulation(GATE))
        told = "replay: " in done.stdout
    assert done.returncode == 0 or (done.returncode == FAILED and told), f"{done.stdout}\n{done.stderr}"
    return done.returncode == FAILED


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The package and its tests."""
    where = tmp_path_factory.mktemp("clean")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, where / name, ignore=shutil.ignore_patterns("mutants"))
        else:
            shutil.copy2(ROOT / name, where / name)
    for name in LINKED:
        (where / name).symlink_to(ROOT / name)
    yield where
    shutil.rmtree(where)


@pytest.fixture
def copy(clean: Path, tmp_path: Path) -> Iterator[Path]:
    """To be spoilt. The bytecode comes along: that of a patched file is not taken, since the file is younger."""
    where = tmp_path / "copy"
    shutil.copytree(clean, where, symlinks=True)
    yield where
    shutil.rmtree(where)


def test_the_package_itself_passes(clean: Path) -> None:
    imported = run(clean, "-c", "import asyncflow, tests.sim; print(asyncflow.__file__, tests.sim.__file__)")
    assert imported.stdout.split() == [str(clean / "asyncflow" / "__init__.py"), str(clean / "tests" / "sim" / "__init__.py")]
    files = sorted({FILES[patch.stem] for patch in DRAWN if patch.stem in FILES})
    seeds = sorted({SEEDS[patch.stem] for patch in DRAWN if patch.stem in SEEDS})
    tests = [unit_test(*files)] if files and IS_DEEP else []  # `make test` runs them as they are
    tests += [simulation(GATE)] if DRAWN == PATCHES else [simulation(f"{seed}:{seed + 1}") for seed in seeds]
    for test in tests:
        done = run(clean, *test, writes_bytecode=True)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("patch", DRAWN, ids=lambda patch: patch.stem)
def test_a_planted_bug_is_caught(patch: Path, copy: Path) -> None:
    done = subprocess.run(["patch", "-p1", "--fuzz=2", "-i", str(patch)], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert is_caught(copy, patch), f"nothing notices {patch.name}"


def test_every_patch_applies() -> None:
    """All of them, whichever are drawn: it costs next to nothing."""
    for patch in PATCHES:
        apply = ["patch", "-p1", "--dry-run", "--fuzz=2", "-i", str(patch)]
        done = subprocess.run(apply, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{patch.name} does not apply any more: plant its bug anew.\n{done.stdout}"


def test_there_are_enough_and_each_is_killed_by_something() -> None:
    assert len(PATCHES) >= 76
    assert not SEEDS.keys() & FILES.keys()
    assert SEEDS.keys() | FILES.keys() == {patch.stem for patch in PATCHES}
    assert set(SEEDS.values()) <= set(IN_GATE)
    assert [file for file in FILES.values() if not (ROOT / file.partition("::")[0]).is_file()] == []
