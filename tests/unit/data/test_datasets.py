"""Rows from files and generators, and what is said about those that are wrong."""

from __future__ import annotations

import gzip
import itertools
import json
import sys
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from asyncflow.data import arithmetic, hub
from asyncflow.data.datasets import GENERATED_ROWS, as_json, load_rows
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
        (b'{"a": 1}\n{"a": "\xe9"}\n', "is not UTF-8 text: line 2 has the byte 0xe9; save the file as UTF-8"),
        ('{"a": 1}\n'.encode("utf-16"), "is UTF-16 text: save it as UTF-8"),
        (gzip.compress(b'{"a": 1}\n', mtime=0), "is compressed by gzip: unpack it first"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=sentence) as caught:
        load_rows(str(path), seed=0, split="train")
    assert str(path) in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.json", "rows.ndjson"):
        (tmp_path / name).write_bytes(b'\xef\xbb\xbf{"a": 1}\n')
        assert load_rows(str(tmp_path / name), seed=0, split="train") == [{"a": 1}]


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("data/train", "data/train.jsonl"),
        ("data/trian.jsonl", "data/train.jsonl"),
        ("data/tset", "data/test.CSV"),
        ("own", "own.csv"),
    ],
)
def test_a_path_with_a_slip_is_not_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, near: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "read_data_set", lambda *_: pytest.fail("the Hub is asked"))
    (tmp_path / "data").mkdir()
    for name in ("data/train.jsonl", "data/test.CSV", "own.csv"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=rf"the data file {asked} is not there: did you mean {near}\?"):
        load_rows(asked, seed=0, split="train")


def test_what_is_neither_json_lines_nor_called_so_is_told_what_it_is_read_as(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("question,answer\na,1\n")
    with pytest.raises(
        UserError, match=r"line 1 is not JSON: .*read as JSON Lines: call one with commas \.csv, one with tabs \.tsv"
    ):
        load_rows(str(tmp_path / "rows.txt"), seed=0, split="train")


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the path of a data set is empty text: name a file"):
        load_rows("", seed=0, split="train")
    with pytest.raises(UserError, match=r"absent\.jsonl cannot be read: No such file"):
        load_rows(f"{tmp_path}/absent.jsonl", seed=0, split="train")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match=r"folder\.jsonl (cannot be read|is a data set for the package datasets)"):
        load_rows(f"{tmp_path}/folder.jsonl", seed=0, split="train")


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
    with pytest.raises(UserError, match="'generated:algebra' is not known; there is generated:arithmetic, generated:sums"):
        load_rows("generated:algebra", seed=0, split="train")


@pytest.mark.parametrize(
    "content",
    [
        '[{"question": "a", "answer": 1}, {"question": "b", "answer": 2}]',
        '{"version": 1, "rows": [{"question": "a", "answer": 1}, {"question": "b", "answer": 2}]}',
        '{"question": "a", "answer": 1}\n{"question": "b", "answer": 2}\n',
    ],
)
def test_a_json_file_is_a_list_of_rows_in_one_of_its_spellings(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content)
    rows = [{"question": "a", "answer": 1}, {"question": "b", "answer": 2}]
    assert load_rows(str(path), seed=0, split="train") == rows
    assert load_rows(str(path), seed=0, split="train", limit=1) == rows[:1]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "a"},
        {"question": "a", "choices": ["b", "c"]},
        {"task": "a", "choices": ["b", "c"]},
        {"Problem": "a", "examples": [{"question": "b"}]},
        {"prompt": [{"role": "user", "content": "a"}], "choices": ["b", "c"]},
    ],
)
def test_a_json_file_of_one_row_is_a_row(tmp_path: Path, row: dict[str, object]) -> None:
    path = tmp_path / "row.json"
    path.write_text(json.dumps(row))
    assert load_rows(str(path), seed=0, split="train") == [row]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"a": [1], "b": [2]}', "holds no list of rows"),
        ("3", "holds no list of rows"),
        ("[1]", "row 1 is not an object with columns but a int"),
        ("[]", "has no rows"),
        ('[{"a": 1},\n {"b" 2}]', "line 2 is not JSON: Expecting ':' delimiter"),
        ('{"a": 1}\n{"a": }\n', "line 2 is not JSON"),
    ],
)
def test_what_is_wrong_with_a_json_file_is_said(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(UserError, match=sentence):
        load_rows(str(path), seed=0, split="train")


def test_a_name_that_could_be_of_the_hub_is_no_file_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def read(path: str, named: str, subset: str | None, limit: int | None) -> list[dict[str, object]]:
        asked.append((path, named, subset, limit))
        return [{"question": "a", "when": datetime(2024, 2, 1), "pair": (1, 2)}, {"question": "b"}]

    monkeypatch.setattr(hub, "read_data_set", read)
    rows = load_rows("openai/gsm8k", seed=0, split="heldout", limit=2, named="test", subset="main")
    assert rows == [{"question": "a", "when": "2024-02-01T00:00:00", "pair": [1, 2]}, {"question": "b"}]
    assert asked == [("openai/gsm8k", "test", "main", 2)]
    for missing in ("data/train.jsonl", "./gsm8k", "/nowhere/gsm8k", "a/b/c"):
        with pytest.raises(UserError, match="cannot be read: No such file"):
            load_rows(missing, seed=0, split="train")
    assert len(asked) == 1


def test_a_value_that_is_no_json_is_said_with_its_row() -> None:
    with pytest.raises(
        UserError, match=r"row 2 of d holds what is no JSON value in column 'b' \(.*type object.*: leave that column"
    ):
        list(as_json([{"a": 1}, {"a": 1, "b": object()}], "d"))


ODD = {
    "an integer that no message between processes can hold": (str(2**64), "serialize ints"),
    "one below": (str(-(2**63) - 1), "serialize ints"),
    "half a character": ('"\\ud800"', "surrogates not allowed"),
    "half a character, deep": ('{"a": ["\\udc80"]}', "surrogates not allowed"),
}


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
@pytest.mark.parametrize("name", ODD)
def test_what_cannot_travel_to_a_worker_is_refused_whatever_it_comes_from(tmp_path: Path, name: str, suffix: str) -> None:
    value, why = ODD[name]
    row = f'{{"question": "a", "id": {value}}}'
    path = tmp_path / f"odd.{suffix}"
    path.write_text(f'{{"question": "a"}}\n{row}\n' if suffix == "jsonl" else f'[{{"question": "a"}}, {row}]')
    with pytest.raises(UserError, match=rf"row 2 of .* in column 'id' \(.*{why}"):
        load_rows(str(path), seed=0, split="train")


def test_what_can_just_travel_does(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        f'{{"most": {2**64 - 1}, "least": {-(2**63)}, "not": NaN, "far": [1e999, -Infinity], "text": "\\ud83d\\ude00"}}\n'
    )
    (row,) = load_rows(str(path), seed=0, split="train")
    assert row == {"most": 2**64 - 1, "least": -(2**63), "not": None, "far": [None, None], "text": "\U0001f600"}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(row)) == row


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
@pytest.mark.parametrize("value", ["1" * 5000, "[" * 100_000])
def test_json_that_python_does_not_read_is_a_mistake_of_the_file(tmp_path: Path, value: str, suffix: str) -> None:
    path = tmp_path / f"odd.{suffix}"
    path.write_text(f'{{"a": {value}}}\n')
    with pytest.raises(UserError, match=r"odd\.jsonl?(, line 1)? cannot be read"):
        load_rows(str(path), seed=0, split="train")


def test_without_the_package_it_is_said_how_to_have_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for path in ("openai/gsm8k", str(tmp_path), str(tmp_path / "a.parquet")):
        with pytest.raises(UserError, match=r"pip install 'asyncflow-rl\[data\]'"):
            load_rows(path, seed=0, split="train")


def test_separated_values_are_rows_of_text_with_the_columns_of_the_first_line(tmp_path: Path) -> None:
    for suffix, mark in (("csv", ","), ("CSV", ","), ("tsv", "\t"), ("tab", "\t")):
        file = tmp_path / f"rows.{suffix}"
        file.write_text(f'\ufeffquestion{mark}answer\n"How many{mark} in\nall?"{mark}3\nWhy?{mark}\n', encoding="utf-8")
        assert load_rows(str(file), seed=0, split="train") == [
            {"question": f"How many{mark} in\nall?", "answer": "3"},
            {"question": "Why?", "answer": ""},
        ]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("question,answer\nHow many?\n", "line 2 has another number of values than the 2 columns"),
        ("question,answer\nHow, many?,3\n", "line 2 has another number of values than the 2 columns"),
        ("question,question\na,b\n", "line 1 must name each column once; it has 'question', 'question'"),
        ('question,answer\n"How"many?,3\n', "cannot be read behind line 1"),
    ],
)
def test_what_is_wrong_with_separated_values_is_said_with_its_line(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(content)
    with pytest.raises(UserError, match=sentence):
        load_rows(str(file), seed=0, split="train")


def test_a_key_that_is_given_twice_is_a_mistake(tmp_path: Path) -> None:
    for name, content in (
        ("rows.jsonl", '{"question": "a", "question": "b"}\n'),
        ("rows.json", '[{"question": "a", "question": "b"}]'),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match="the key 'question' is given twice in one object"):
            load_rows(str(tmp_path / name), seed=0, split="train")
