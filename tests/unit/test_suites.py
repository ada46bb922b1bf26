"""The gate: which tests it runs, and that it fails when one of them does."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal, cast

import pytest

from tests import suites
from tests.apart import apart
from tests.conftest import ROOT, pytest_terminal_summary
from tests.depth import in_gate
from tests.suites import EVERYTHING, SUITES, Result, Suite

PACKAGES = ("deepspeed", "megatron", "ray")


@functools.cache
def imported(file: Path) -> set[str]:
    """Top packages that a module imports, wherever in it, by a statement or by `import_module`."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            found |= set(re.findall(r"^f?'(\w+)", ast.unparse(node.args[0])))
    return found


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_rooms_and_tests_are_there(suite: Suite) -> None:
    assert [path for path in (*suite.rooms, *suite.tests) if not (ROOT / path).exists()] == []
    assert suite.rooms


@pytest.mark.parametrize("name", PACKAGES)
def test_whatever_imports_another_ones_package_is_a_room_of_its_suite(name: str) -> None:
    rooms = [ROOT / room for suite in SUITES if suite.name == name for room in suite.rooms]
    users = [file for file in (ROOT / "asyncflow").rglob("*.py") if name in imported(file)]
    assert users and [file for file in users if not any(file.is_relative_to(room) for room in rooms)] == []


def test_all_of_the_vllm_adapter_is_a_room_of_its_suite() -> None:
    rooms = next(suite.rooms for suite in SUITES if suite.name == "vllm")
    adapter = (ROOT / "asyncflow" / "engines" / "rollout").glob("*vllm*")
    assert {str(path.relative_to(ROOT)) for path in adapter} == set(rooms)


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_each_suite_has_smoke_tests(suite: Suite) -> None:
    marked = [path for test in suite.tests for path in ([ROOT / test] if test.endswith(".py") else (ROOT / test).glob("test_*.py"))]
    assert any("smoke" in path.read_text() for path in marked)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A history of one commit, in the place of this one's."""
    monkeypatch.setattr(suites, "ROOT", tmp_path)
    for name in ("room.py", "other.py"):
        (tmp_path / name).write_text("before\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "a change")
    return git(folder, "rev-parse", "--short=12", "HEAD")


def test_all_of_a_suite_runs_where_a_room_has_changed_since_it_passed(repository: Path) -> None:
    suite, passed = Suite("ray", (), rooms=("room.py",)), {"ray": commit(repository)}
    assert suites.why_deep(suite, passed) == ""
    (repository / "other.py").write_text("after\n")
    commit(repository)
    assert suites.why_deep(suite, passed) == ""
    (repository / "room.py").write_text("after\n")
    commit(repository)
    assert suites.why_deep(suite, passed) == f"room.py has changed since {passed['ray']}"
    assert suites.why_deep(Suite("ray", ("room.py",)), passed) == f"room.py has changed since {passed['ray']}"  # a test of its own
    assert suites.why_deep(suite, {}) == "it has never passed"
    assert suites.why_deep(suite, {"ray": "0123456789ab"}).endswith("is not known here")


def test_the_page_begins_as_it_would_now_and_names_every_suite() -> None:
    page = (ROOT / "docs" / "tested.md").read_text()
    assert page.startswith(suites.HEAD) and {row[0] for row in suites.ROW.findall(page)} == {s.name for s in (EVERYTHING, *SUITES)}
    for text in (suites.HEAD, (ROOT / "CONTRIBUTING.md").read_text()):
        assert all(suite.name in text.lower().replace("other people's", "others'") for suite in SUITES), text


def test_the_page_says_when_each_suite_passed_and_keeps_the_rows_of_others(repository: Path) -> None:
    first = suites.page("", [Result("ray", True, 37, 0, 2, 91.4), Result("vllm", True, 80, 3, 0, 300.0)], suites.commit())
    assert suites.read_page(first) == {"ray": git(repository, "rev-parse", "--short=12", "HEAD")}  # one that failed did not pass
    (repository / "docs").mkdir()
    (repository / "docs" / "tested.md").write_text(first)
    assert not suites.commit().endswith("+"), "the page is no change of what is tested"
    (repository / "room.py").write_text("after\n")
    unclean = suites.commit()
    assert unclean.endswith("+")
    second = suites.page(first, [Result("ray", True, 38, 0, 2, 90.0)], unclean)
    assert "| vllm |" in second and "| 80 | 3 | 0 | 300 |" in second
    assert suites.read_page(second) == suites.read_page(first)  # nobody else has what was tested
    assert second.index("| 38 |") < second.index("| 37 |")  # the last one, and the last one that passed


def test_a_run_that_fails_leaves_the_row_of_the_last_one_that_passed() -> None:
    def rows(text: str) -> list[tuple[str, ...]]:
        return [(row[1], row[3], row[4]) for row in suites.ROW.findall(text)]

    text = suites.page("", [Result("ray", True, 40, 0, 0, 1.0)], "first")
    text = suites.page(text, [Result("ray", True, 39, 1, 0, 1.0)], "second")
    assert rows(text) == [("second", "39", "1"), ("first", "40", "0")]
    text = suites.page(text, [Result("ray", True, 0, 0, 40, 1.0)], "third")  # nothing ran: nothing passed
    assert rows(text) == [("third", "0", "0"), ("first", "40", "0")] and suites.read_page(text) == {"ray": "first"}
    assert rows(suites.page(text, [Result("vllm", True, 1, 0, 0, 1.0)], "other")) == [*rows(text), ("other", "1", "0")]
    assert rows(suites.page(text, [Result("ray", True, 41, 0, 0, 1.0)], "fourth")) == [("fourth", "41", "0")]


@pytest.mark.parametrize(("depth", "ran", "examples"), [("", 1, 12), ("smoke", 2, 12), ("deep", 2, 100)])
def test_smoke_tests_are_all_that_are_marked_so_with_the_gate_s_examples(
    tmp_path: Path, depth: str, ran: int, examples: int
) -> None:
    text = (
        "import pytest\nfrom tests.depth import deep, few\n\n"
        "@pytest.mark.smoke\n@pytest.mark.parametrize('one', [1, pytest.param(2, marks=deep)])\n"
        f"def test_it(one):\n    assert few(12, 100) == {examples}\n"
    )
    command = apart(tmp_path, text, "-m", "smoke")
    environment = {**os.environ, "ASYNCFLOW_TESTS": depth, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert f"{ran} passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("depth", ["", "deep"])
def test_of_a_product_of_three_parameters_the_gate_takes_what_has_every_pair(tmp_path: Path, depth: str) -> None:
    text = (
        "import pytest\n\nBOTH = [('x', []), ('y', []), ('z', [])]\n\n"
        "@pytest.fixture(params=['one', 'two'])\ndef made(request):\n    return request.param\n\n"
        "def note(*values):\n    open('seen.txt', 'a').write(' '.join(map(str, values)) + '\\n')\n\n"
        "@pytest.mark.parametrize('first', range(3))\n@pytest.mark.parametrize(('second', 'more'), BOTH)\n"
        "def test_it(first, second, more, made):\n    note(first, second, made)\n\n"
        "@pytest.mark.parametrize('first', range(3))\n@pytest.mark.parametrize('second', range(4))\n"
        "def test_of_two(first, second):\n    note(first, second)\n\ndef test_of_none():\n    note('none')\n"
    )
    environment = {**os.environ, "ASYNCFLOW_TESTS": depth, "PYTHONPATH": str(ROOT)}
    subprocess.run(apart(tmp_path, text), cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    seen = [line.split() for line in (tmp_path / "seen.txt").read_text().splitlines()]
    of_three = [values for values in seen if len(values) == 3]
    assert len(of_three) == len(set(map(tuple, of_three))) == (3 * 3 * 2 if depth else 3 * 3)
    assert [len(values) for values in seen].count(2) == 3 * 4 and ["none"] in seen
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert len({(values[one], values[other]) for values in of_three}) == (9 if (one, other) == (0, 1) else 6)


@pytest.mark.parametrize(("body", "failed"), [("assert True", False), ("assert False", True), ("import no_such_module", True)])
def test_the_gate_fails_when_a_test_does(repository: Path, monkeypatch: pytest.MonkeyPatch, body: str, failed: bool) -> None:
    (repository / "test_one.py").write_text(f"import pytest\n\n@pytest.mark.smoke\ndef test_it():\n    {body}\n")
    (repository / ".venv").symlink_to(sys.prefix)
    (repository / "docs").mkdir()
    monkeypatch.setattr(suites, "PAGE", repository / "docs" / "tested.md")
    monkeypatch.setattr(suites, "make", lambda environment: True)
    suite = Suite("ray", ("test_one.py", "-p", "no:cacheprovider"), rooms=("room.py",))
    monkeypatch.setattr(suites, "SUITES", (suite,))
    for what in ("gate", "smoke"):
        assert suites.main([what]) == int(failed)


def test_a_suite_that_finds_no_test_has_not_passed(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / ".venv").symlink_to(sys.prefix)
    (repository / "test_one.py").write_text("def test_it():\n    pass\n")
    monkeypatch.setattr(suites, "make", lambda environment: True)
    monkeypatch.setattr(suites, "SUITES", (Suite("ray", ("test_one.py",), rooms=("room.py",)),))
    assert suites.main(["smoke"]) == 1


def test_smoke_tests_that_take_too_long_fail_the_gate(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "test_one.py").write_text("import pytest\n\n@pytest.mark.smoke\ndef test_it():\n    pass\n")
    (repository / ".venv").symlink_to(sys.prefix)
    monkeypatch.setattr(suites, "make", lambda environment: True)
    suite = Suite("ray", ("test_one.py", "-p", "no:cacheprovider"), rooms=("room.py",))
    monkeypatch.setattr(suites, "SUITES", (suite,))
    assert suites.main(["smoke"]) == 0 and "TOO SLOW" not in capsys.readouterr().out
    monkeypatch.setattr(suites, "SMOKE_SECONDS", 0.001)
    assert suites.main(["smoke"]) == 1 and "TOO SLOW" in capsys.readouterr().out
    assert suites.run(suite, is_deep=True).is_right


def test_an_environment_that_cannot_be_made_is_said(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suites, "PAGE", repository / "tested.md")
    monkeypatch.setattr(suites, "make", lambda environment: False)
    assert suites.main(["gate"]) == 0
    said = capsys.readouterr().out
    assert all(f"NOTE: {suite.name}'s environment cannot be made here" in said for suite in SUITES)


def test_everything_is_all_there_is() -> None:
    assert EVERYTHING.tests == ("tests",) and not EVERYTHING.keyword


def test_parameters_that_are_not_chosen_are_deep() -> None:
    assert in_gate("b", of=["a", "b"])[1] == "b" and in_gate("b", of=["a", "b"])[0].marks[0].name == "deep"  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="are none of"):
        in_gate("c", of=["a", "b"])


def test_the_tests_end_with_their_slowest_files_and_the_total(capsys: pytest.CaptureFixture[str]) -> None:
    def report(file: int, when: Literal["setup", "call"], seconds: float) -> pytest.TestReport:
        return pytest.TestReport(f"tests/test_{file}.py::test_it", ("", 0, ""), {}, "passed", None, when, duration=seconds)

    class Reporter:
        stats = {  # noqa: RUF012
            "": [report(file, "setup", 1.0) for file in range(22)],
            "passed": [report(file, "call", float(file)) for file in range(22)],
            "warnings": ["something else"],
        }
        section = write_line = print

    pytest_terminal_summary(cast(pytest.TerminalReporter, Reporter))
    first, *slowest, total = capsys.readouterr().out.splitlines()
    assert first == "slowest 20 files"
    assert [line.split() for line in slowest] == [[f"{file + 1:.1f}", "s", f"tests/test_{file}.py"] for file in range(21, 1, -1)]
    assert total.split()[:5] == [f"{sum(range(23)):.1f}", "s", "all", "22", "files,"]


def test_the_gate_says_what_ran_and_what_it_has_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(suites, "commit", lambda: "0123456789ab")
    monkeypatch.setattr(suites, "why_deep", lambda suite, tested: "a room has changed" if suite.name == "ray" else "")
    monkeypatch.setattr(suites, "make", lambda environment: environment != ".venv-adapters")
    monkeypatch.setattr(suites, "run", lambda suite, is_deep: Result(suite.name, is_deep, 5, 0, 1, 12.0))
    assert suites.main(["gate"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"(?m)^ray +all +5 passed 0 failed +12 s", said) and re.search(
        r"(?m)^vllm +smoke +5 passed 0 failed +12 s", said
    )
    left = said.splitlines()[-1]
    assert left.startswith("left for `make test-deep`: seeds, parameters and tests marked deep, most mutants; of ")
    assert all(name in left for name in ("tinker", "environments", "vllm", "deepspeed", "megatron")) and "ray" not in left
