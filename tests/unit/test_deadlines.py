"""No test gives up after a number of seconds of the real clock: `patience` says how many those are on this machine, now."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.apart import apart
from tests.conftest import ROOT
from tests.patience import patience

TESTS = ROOT / "tests"
OF_THE_LOOP = {"wait_for": 1, "timeout": 0}
"""Calls whose seconds are the event loop's, virtual ones perhaps, and the argument that they are."""
REAL = {"join": 0, "wait": 0, "result": 0, "exception": 0, "communicate": 0}
"""Methods of threads, processes, events and futures."""
ON_VIRTUAL_TIME = {
    "contract/test_queue_model.py": "a loop of its own, on virtual time",
    "unit/cluster/test_clock.py": "tests of virtual time itself",
    "unit/cluster/test_simulated.py": "a loop of its own, on virtual time",
    "unit/run/test_health.py": "a loop of its own, on virtual time",
    "unit/test_unhurried.py": "tests of virtual time itself",
}
"""Files whose seconds are no real ones, beside those whose folder says so (`loop_of` in a conftest.py)."""
MEANT = {
    "hub.py": ("Event().wait(60)",),  # the test ends whoever asks: only where it fails is this waited for
    "unit/run/test_training_checks.py": ("Counter(",),  # a count of timeouts
}
"""Calls, by file, whose literal is no deadline of a test."""


@functools.cache
def hook_of(folder: Path) -> object:
    """What says on which loops a folder's tests run."""
    if (folder / "conftest.py").is_file():
        conftest = importlib.import_module(".".join((folder / "conftest").relative_to(ROOT).parts))
        if hook := getattr(conftest, "pytest_asyncio_loop_factories", None):
            return hook
    return hook_of(folder.parent) if folder != TESTS else None


def is_on_virtual_time(file: Path) -> bool:
    if str(file.relative_to(TESTS)) in ON_VIRTUAL_TIME:
        return True
    hook = hook_of(file.parent)
    if not callable(hook) or not file.stem.startswith("test_"):
        return False
    item = SimpleNamespace(path=file, fixturenames=["redis_storage"])  # one that has a process at the other end, if any has
    return "unhurried" in hook(*[item][: len(inspect.signature(hook).parameters)])


def is_number(node: ast.expr, numbers: dict[str, ast.expr]) -> bool:
    """Whether it is a literal, a constant of the module that is one, or a `timedelta` of one."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) == "timedelta" and any(is_number(each.value, numbers) for each in node.keywords)
    if isinstance(node, ast.Name):
        return node.id in numbers
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)


def literals(source: str, *, is_virtual: bool) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Calls with a deadline in seconds that is written there, and the deadline. Where a `TimeoutError` is expected, it is none."""
    tree = ast.parse(source)
    numbers = {
        target.id: each.value
        for each in tree.body
        if isinstance(each, ast.Assign) and is_number(each.value, {})
        for target in each.targets
        if isinstance(target, ast.Name)
    }
    positions = REAL if is_virtual else REAL | OF_THE_LOOP

    def visit(node: ast.AST) -> Iterator[tuple[ast.Call, ast.expr]]:
        if isinstance(node, ast.With | ast.AsyncWith) and any("TimeoutError" in ast.unparse(each) for each in node.items):
            return
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = [each.value for each in node.keywords if each.arg == "timeout"]
            given += node.args[positions[name] :][:1] if name in positions else []
            yield from ((node, value) for value in given if is_number(value, numbers))
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    return visit(tree)


def test_no_deadline_is_a_number_of_real_seconds() -> None:
    found, used = [], set()
    for file in sorted(TESTS.rglob("*.py")):
        name = str(file.relative_to(TESTS))
        for call, _ in literals(file.read_text(), is_virtual=is_on_virtual_time(file)):
            if any(words in ast.unparse(call) for words in MEANT.get(name, ())):
                used.add(name)
            else:
                found.append(f"{name}:{call.lineno}: {ast.unparse(call)}: say patience(...)")
    assert found == []
    assert used == MEANT.keys(), "an exception that nothing needs any more"


@pytest.mark.parametrize(
    ("source", "real", "virtual"),
    [
        ("await asyncio.wait_for(answer, 5)", 1, 0),
        ("async def f():\n    async with asyncio.timeout(0.5): pass", 1, 0),
        ("subprocess.run(command, timeout=60)", 1, 1),
        ("SECONDS = 60\nsubprocess.run(command, timeout=SECONDS)", 1, 1),
        ("begin(timeout=timedelta(seconds=1))", 1, 1),
        ("thread.join(30)", 1, 1),
        ("', '.join(names), thread.join(patience(30)), asyncio.wait_for(answer, patience(5)), wait_for(is_there, command)", 0, 0),
        ("with pytest.raises(TimeoutError):\n    asyncio.wait_for(answer, 0.01)", 0, 0),
    ],
)
def test_what_looks_for_numbers_finds_them(source: str, real: int, virtual: int) -> None:
    assert len([*literals(source, is_virtual=False)]) == real and len([*literals(source, is_virtual=True)]) == virtual


def test_files_on_virtual_time_are_known() -> None:
    virtual = ("unit/loops/test_rollout.py", "unit/transfer_queue/test_capacity.py", "unit/cluster/test_inline.py")
    real = ("unit/transfer_queue/loader/test_dataloader.py", "unit/cluster/test_local.py", "contract/queue/test_atomicity.py")
    assert all(is_on_virtual_time(TESTS / name) for name in virtual)
    assert not any(is_on_virtual_time(TESTS / name) for name in (*real, "unit/transfer_queue/served.py", "unit/test_threads.py"))


def test_a_test_that_hangs_is_named_and_shown_and_the_others_go_on(tmp_path: Path) -> None:
    hangs = "import threading\n\ndef test_hangs():\n    threading.Event().wait()\n\ndef test_goes_on():\n    pass\n"
    command = apart(tmp_path, hangs, "-n", "1", more_conftest="\nLONGEST = 2\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=patience(60))
    assert "crashed while running 'tests/test_it.py::test_hangs'" in done.stdout and "1 failed, 1 passed" in done.stdout
    assert "in test_hangs" in done.stderr, done.stdout + done.stderr
