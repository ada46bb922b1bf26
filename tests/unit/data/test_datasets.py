"""Rows from files and generators, and what is said about those that are wrong."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from asyncflow.data import arithmetic
from asyncflow.data.datasets import GENERATED_ROWS, check_columns, load_rows, template_columns
from asyncflow.types import UserError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = ['{"question": "größer?", "answer": 1}', "", "  ", '{"question": "b", "answer": [2]}', '{"question": "c"}']
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_file_has_one_object_a_line_and_empty_lines_do_not_count(file: Path) -> None:
    rows = load_rows(str(file), seed=0, split="train")
    assert rows == [{"question": "größer?", "answer": 1}, {"question": "b", "answer": [2]}, {"question": "c"}]
    assert load_rows(str(file), seed=1, split="heldout", limit=2) == rows[:2]


def test_what_lies_beyond_the_limit_is_not_looked_at(file: Path) -> None:
    file.write_text('{"a": 1}\nnot JSON\n')
    assert load_rows(str(file), seed=0, split="train", limit=1) == [{"a": 1}]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"a": 1}\n\n{"a": }\n', "line 3 is not JSON: Expecting value at column 7"),
        (b'{"a": 1}\n[1]\n', "line 2 is not an object with columns but a list"),
        (b"\n\n", "has no rows"),
        (b'{"a": "\xff"}\n', "is not UTF-8 text"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=sentence) as caught:
        load_rows(str(path), seed=0, split="train")
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.jsonl cannot be read: No such file"):
        load_rows(f"{tmp_path}/absent.jsonl", seed=0, split="train")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        load_rows(str(tmp_path), seed=0, split="train")


def test_generated_rows_are_those_of_the_seed_and_the_split() -> None:
    rows = load_rows("generated:arithmetic", seed=3, split="train", limit=50)
    problems = itertools.islice(arithmetic.problems(3, "train"), 50)
    assert rows == [{"question": p.question, "answer": p.answer} for p in problems]
    assert rows != load_rows("generated:arithmetic", seed=4, split="train", limit=50)
    held_out = load_rows("generated:arithmetic", seed=3, split="heldout", limit=50)
    assert not {row["question"] for row in rows} & {row["question"] for row in held_out}


def test_a_generated_set_has_an_end() -> None:
    assert len(load_rows("generated:arithmetic", seed=0, split="train")) == GENERATED_ROWS


def test_a_generator_that_is_not_there_is_said_with_those_that_are() -> None:
    with pytest.raises(UserError, match="'generated:algebra' is not known; there is generated:arithmetic"):
        load_rows("generated:algebra", seed=0, split="train")


def test_a_row_without_a_column_is_named_with_the_columns_that_it_has() -> None:
    rows = [{"question": "a", "answer": 1}, {"answer": 1, "id": 2}, {}]
    check_columns(rows[:1], ["question", "answer"], "d")
    with pytest.raises(UserError, match="row 2 of d has no column 'question'; it has answer, id"):
        check_columns(rows, ["question"], "d")
    with pytest.raises(UserError, match="row 3 of d has no column 'answer'; it has none"):
        check_columns(rows, ["answer"], "d")


@pytest.mark.parametrize(
    ("template", "columns"),
    [("{question}\n", ["question"]), ("{a} and {b!r} {{c}}", ["a", "b"]), ("fixed", []), ("{a:>5}", ["a"])],
)
def test_a_template_names_its_columns(template: str, columns: list[str]) -> None:
    assert template_columns(template) == columns


def test_what_is_no_template_is_refused_with_the_way_out() -> None:
    with pytest.raises(UserError, match=r"cannot be parsed: .*; write \{\{ for a literal brace"):
        template_columns("{question")
