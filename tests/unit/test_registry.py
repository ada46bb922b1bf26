"""Choices by name, by module, and by a user's own file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncflow.registry import build, load, resolve
from asyncflow.types import RunError, UserError

KNOWN = {"counter": "collections:Counter", "absent": "no_such_package.module:Name", "fraction": "fractions:Fraction"}


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\n\nfrom dataclasses import dataclass\n\n"
        "@dataclass\nclass Mine:\n    limit: int = 3\n\n"
        "def picky(*, limit: int) -> int:\n    return limit\n"
    )
    return path


def test_a_known_name_a_module_and_a_file_are_targets() -> None:
    assert resolve("thing", "counter", KNOWN) == "collections:Counter"
    assert resolve("thing", "a.b:C", KNOWN) == "a.b:C"
    assert resolve("thing", "my/file.py:C", KNOWN) == "my/file.py:C"


@pytest.mark.parametrize("choice", ["couter", "", "file.py", "file.py:", ":Name", ":"])
def test_anything_else_is_refused_with_the_known_names(choice: str) -> None:
    with pytest.raises(UserError, match=r"thing .* is not known; choose one of absent, counter, fraction, or give your own as"):
        resolve("thing", choice, KNOWN)


def test_nothing_is_imported_until_it_is_loaded() -> None:
    sys.modules.pop("this", None)
    assert resolve("thing", "poem", {"poem": "this:d"}) == "this:d"
    assert "this" not in sys.modules


def test_a_users_class_is_built_from_their_file_with_its_options(user_file: Path) -> None:
    assert build("thing", f"{user_file}:Mine", {"limit": 5}, KNOWN).limit == 5
    assert load("thing", f"{user_file}:picky")(limit=2) == 2


def test_a_path_is_taken_from_where_the_program_was_started(user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(user_file.parent)
    assert build("thing", "mine.py:Mine", {}, KNOWN).limit == 3


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("no_such_package.module:Name", "thing 'no_such_package.module:Name' cannot be imported: No module named"),
        ("/no/such/file.py:Name", "cannot be imported: there is no file /no/such/file.py"),
        ("collections:Conter", "collections has no 'Conter'"),
    ],
)
def test_what_cannot_be_loaded_says_why(target: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load("thing", target)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("class :\n", r"invalid syntax \(.*broken.py:1\)"),
        ("\nraise RuntimeError('two\\nlines')", r"RuntimeError: two lines \(.*broken.py:2\)"),
        (
            "import sys\nsys.exit(0)",
            r"it ends the program \(.*broken.py:2\): what is to run only as a script goes below if __name__",
        ),
        ("import no_such_package", r"No module named 'no_such_package' \(.*broken.py:1\)"),
        ("class Other: pass", "has no 'Name'"),
    ],
)
def test_whatever_a_file_does_is_one_sentence(tmp_path: Path, source: str, words: str) -> None:
    (tmp_path / "broken.py").write_text(source)
    with pytest.raises(UserError, match=f"^thing '.*broken.py:Name' cannot be imported: .*{words}") as caught:
        load("thing", f"{tmp_path}/broken.py:Name")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "class Name:\n    def __init__(self):\n        raise KeyError('key')",
            r"cannot be built: KeyError: 'key' \(.*mistaken.py:3\)",
        ),
        ("import sys\ndef Name():\n    sys.exit(0)", r"cannot be built: SystemExit: 0 \(.*mistaken.py:3\)"),
        ("class Name:\n    def __init__(self, *, rate: float): pass", "needs the option 'rate', a number"),
        ("Name = 3", "is a int: it must be a class"),
    ],
)
def test_a_class_that_cannot_be_built_is_one_sentence(tmp_path: Path, source: str, words: str) -> None:
    (tmp_path / "mistaken.py").write_text(source)
    with pytest.raises(UserError, match=f"^thing '.*mistaken.py:Name' {words}"):
        build("thing", f"{tmp_path}/mistaken.py:Name", {}, KNOWN)


def test_a_mistake_of_our_own_is_no_mistake_of_the_users() -> None:
    with pytest.raises(ZeroDivisionError):
        build("thing", "fraction", {"numerator": 1, "denominator": 0}, KNOWN)


def test_an_option_that_the_choice_does_not_take_is_refused(user_file: Path) -> None:
    with pytest.raises(UserError, match=r"thing '.*mine.py:Mine' has no option 'limits': did you mean 'limit'\?"):
        build("thing", f"{user_file}:Mine", {"limits": 5}, KNOWN)


def test_a_users_file_may_import_its_neighbour(user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (user_file.parent / "beside_mine.py").write_text("LIMIT = 7\n")
    (user_file.parent / "other.py").write_text("from beside_mine import LIMIT\n")
    assert load("thing", f"{user_file.parent / 'other.py'}:LIMIT") == 7
    assert sys.path[-1] == str(user_file.parent)


@pytest.mark.parametrize(
    "source",
    [
        "raise MemoryError",
        "raise OSError(24, 'Too many open files', 'snapshot.py')",
        "raise ImportError('libtorch.so: failed to map segment from shared object')",
        "raise ImportError('libtorch.so: cannot open shared object file: Too many open files')",
    ],
)
def test_a_shortage_is_no_mistake_of_the_users(tmp_path: Path, source: str) -> None:
    """A worker that meets one is started again; one that finds a mistake of the user's is not."""
    (path := tmp_path / "short.py").write_text(source)
    with pytest.raises(RunError, match=r"worker .* cannot be imported: "):
        load("worker", f"{path}:main")
