"""Tests of their own for pytest to run apart, with the conftest of these."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def apart(folder: Path, text: str, *arguments: str, more_conftest: str = "") -> list[str]:
    """Write a folder with one file of tests, `tests/test_it.py`. Returns the command that runs it, with these arguments."""
    tests = folder / "tests"
    tests.mkdir()
    for name in ("depth.py", "conftest.py", "forked.py", "patience.py"):
        (tests / name).write_text((ROOT / "tests" / name).read_text() + (more_conftest if name == "conftest.py" else ""))
    (tests / "__init__.py").touch()
    (tests / "test_it.py").write_text(text)
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    return [sys.executable, "-m", "pytest", *arguments, "-p", "no:cacheprovider", "--rootdir", str(folder), "tests"]
