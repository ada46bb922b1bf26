"""Data sets: rows of named columns, read from files, from the Hugging Face Hub, or generated.

    generated:arithmetic, ---+
    generated:sums ----------+
    reasoning_gym:TASK ------+   (reasoning_gym.py)
    rows.jsonl, .json -------+--> rows: JSON values by column name, in the data's own order
    rows.csv, .tsv, .tab ----+
    rows.parquet ------------+
    a folder, owner/name ----+   (hub.py: through `datasets`)

Which columns make the prompt, and which one is the answer, is columns.py's to say.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import difflib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from asyncflow.data import arithmetic, reasoning_gym, sums
from asyncflow.rows import QUESTIONS, READY_PROMPT, found_in
from asyncflow.types import UserError

DataRow = dict[str, Any]
Split = Literal["train", "heldout"]
GENERATED_ROWS = 20_000
GENERATED: Final = "generated:"
_HUB_NAME: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_SEPARATED: Final = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
_JSON: Final = (".jsonl", ".ndjson", ".json")
_FILES: Final = (*_JSON, ".parquet", *_SEPARATED)
_NO_TEXT: Final = {
    codecs.BOM_UTF16_LE: "UTF-16 text: save it as UTF-8",
    codecs.BOM_UTF16_BE: "UTF-16 text: save it as UTF-8",
    b"\x1f\x8b": "compressed by gzip: unpack it first",
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it first",
}
"""Kinds of files that are no data set, by the bytes that they begin with, and what to do with each."""


def load_rows(
    path: str, *, seed: int, split: Split, limit: int | None = None, named: str = "train", subset: str | None = None
) -> list[DataRow]:
    """The rows of a data set, the first `limit` of them. Raises `UserError` naming the file and line of what is wrong.

    A generated set has `GENERATED_ROWS` rows unless limited; its `split` decides which problems can occur. `named` and `subset` are
    a data set's own names of its parts, where it has any.
    """
    if not path.strip():
        raise UserError("the path of a data set is empty text: name a file, a folder or a data set of the Hugging Face Hub")
    if path.startswith(GENERATED):
        return _generated(path, seed, split, limit or GENERATED_ROWS)
    if path.startswith(reasoning_gym.PREFIX):
        return reasoning_gym.rows(path, seed, is_held_out=split == "heldout", count=limit or reasoning_gym.ROWS)
    rows = list(itertools.islice(as_json(_read(path, named, subset, limit), path), limit))
    if not rows:
        raise UserError(f"the data {'file' if Path(path).is_file() else 'set'} {path} has no rows")
    return rows


def has_parts(path: str) -> bool:
    """Whether a data set may have subsets and splits: a folder, or one of the Hub; not a file, and nothing generated."""
    file = Path(path)
    return file.is_dir() or not (file.exists() or file.suffix in _FILES or path.startswith((GENERATED, reasoning_gym.PREFIX)))


def as_json(rows: Iterable[DataRow], path: str) -> Iterator[DataRow]:
    """Rows with JSON values alone, as they travel: dates as text, tuples as lists, numbers that are not finite as null.

    Raises `UserError` naming the row and the column of what cannot travel.
    """
    for number, row in enumerate(rows, 1):
        try:
            yield _as_json(row)
        except _NO_JSON as whole:
            column, error = next(_odd_columns(row), ("?", whole))
            raise UserError(
                f"row {number} of {path} holds what is no JSON value in column {column!r} ({error}): leave that column out, or "
                f"write it as text"
            ) from error


_NO_JSON: Final = (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError)


def _as_json(row: DataRow) -> DataRow:
    plain: DataRow = msgspec.json.decode(msgspec.json.encode(row))
    msgspec.msgpack.encode(plain)  # between processes, and in checkpoints: integers of 64 bits at most
    return plain


def _odd_columns(row: DataRow) -> Iterator[tuple[str, Exception]]:
    for column, value in row.items():
        try:
            _as_json({column: value})
        except _NO_JSON as error:
            yield column, error


def _read(path: str, named: str, subset: str | None, limit: int | None) -> Iterator[DataRow]:
    file = Path(path)
    suffix = file.suffix.lower()
    if near := _near(file):
        raise UserError(f"the data file {path} is not there: did you mean {near}?")
    if file.is_dir() or not (file.exists() or suffix in _FILES or not _HUB_NAME.fullmatch(path)):
        from asyncflow.data.hub import read_data_set

        return iter(read_data_set(path, named, subset, limit))
    if suffix == ".parquet":
        return _read_parquet(file)
    if suffix in _SEPARATED:
        return _read_separated(file, _SEPARATED[suffix])
    return _read_json(file) if suffix == ".json" else read_json_lines(file)


def _near(file: Path) -> Path | None:
    """The data file beside one that is not there whose name differs by a slip, or by its ending."""
    if file.exists() or not file.parent.is_dir():
        return None
    is_file = file.suffix.lower() in _FILES
    may_be_name = file.parent == Path() and not is_file  # of a data set of the Hub, which other names are not near to
    by_stem = {each.stem: each for each in sorted(file.parent.iterdir()) if each.suffix.lower() in _FILES}
    found = difflib.get_close_matches(file.stem if is_file else file.name, by_stem, 1, 1.0 if may_be_name else 0.75)
    return by_stem[found[0]] if found else None


def _generated(path: str, seed: int, split: Split, count: int) -> list[DataRow]:
    sources: dict[str, Callable[[int, Split, int], list[DataRow]]] = {
        "generated:arithmetic": arithmetic.as_examples,
        "generated:sums": sums.as_examples,
    }
    if path not in sources:
        raise UserError(f"data set {path!r} is not known; there is {', '.join(sources)}")
    return sources[path](seed, split, count)


def read_json_lines(path: Path) -> Iterator[DataRow]:
    """The objects of a JSON Lines file. Raises `UserError` naming the line that is none."""
    with _reading(path), path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parse_line(path, number, line)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Context in which a text file is read. Raises `UserError` where that cannot be done."""
    try:
        yield
    except OSError as error:
        raise UserError(f"the data file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"the data file {path} is {_other_than_text(path)}") from error


def _other_than_text(path: Path) -> str:
    """Kind of a file that is not UTF-8 text, and what to do about it."""
    with path.open("rb") as file:
        head = file.read(4)
        for begins, what in _NO_TEXT.items():
            if head.startswith(begins):
                return what
        file.seek(0)
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"not UTF-8 text: line {number} has the byte {line[error.start]:#04x}; save the file as UTF-8"
    return "not UTF-8 text: save it as UTF-8"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, whose keys are all different. Raises `ValueError`."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is given twice in one object")
    return tree


def _parse_line(path: Path, number: int, line: str) -> DataRow:
    try:
        row = json.loads(line, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        message = f"{path}, line {number} is not JSON: {error.msg} at column {error.colno}"
        if path.suffix.lower() not in _JSON:
            message += "; a file of this name is read as JSON Lines: call one with commas .csv, one with tabs .tsv"
        raise UserError(message) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists as deep
        raise UserError(f"{path}, line {number} cannot be read: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{path}, line {number} is not an object with columns but a {type(row).__name__}")
    return row


def _read_json(path: Path) -> Iterator[DataRow]:
    """A list of objects, or an object with one such list in it. Many a `.json` file holds an object a line: those are read, too,
    also one alone, which has a prompt, or no list of objects."""
    with _reading(path):
        text = path.read_text(encoding="utf-8-sig")
    try:
        tree = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from read_json_lines(path)
            return
        raise UserError(f"{path}, line {error.lineno} is not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"the data file {path} cannot be read: {error}") from error
    rows = tree
    if isinstance(tree, dict):
        lists = [value for value in tree.values() if isinstance(value, list)]
        if not lists or found_in(tree, (READY_PROMPT, *QUESTIONS)) is not None:
            rows = [tree]
        elif len(lists) == 1:
            rows = lists[0] if all(isinstance(row, dict) for row in lists[0]) else [tree]
    if not isinstance(rows, list):
        raise UserError(f"{path} holds no list of rows: it must be [{{...}}, ...], an object with one such list, or JSON Lines")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{path}, row {number} is not an object with columns but a {type(row).__name__}")
        yield row


def _read_separated(path: Path, separator: str) -> Iterator[DataRow]:
    """Rows of text with the columns that the first line names. A quoted value may have line breaks."""
    with _reading(path), path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter=separator, strict=True)
        names = reader.fieldnames or []
        if len(set(names)) < len(names) or not all(names):
            raise UserError(f"{path}, line 1 must name each column once; it has {', '.join(map(repr, names))}")
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise UserError(f"{path}, line {reader.line_num} has another number of values than the {len(names)} columns")
                yield row
        except csv.Error as error:
            raise UserError(f"{path} cannot be read behind line {reader.line_num}: {error}") from error


def _read_parquet(path: Path) -> Iterator[DataRow]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UserError(f"reading {path} takes pyarrow: pip install 'asyncflow-rl[data]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except OSError as error:
        raise UserError(f"the data file {path} cannot be read: {error.strerror or error}") from error
    except ArrowException as error:
        raise UserError(f"the data file {path} is no Parquet file: {error}") from error
