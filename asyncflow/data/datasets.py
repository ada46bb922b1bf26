"""Data sets: rows of named columns, read from files or generated."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from string import Formatter
from typing import Any, Literal

from asyncflow.data import arithmetic
from asyncflow.types import UserError

Row = dict[str, Any]
Split = Literal["train", "heldout"]
GENERATED_ROWS = 20_000


def load_rows(path: str, *, seed: int, split: Split, limit: int | None = None) -> list[Row]:
    """The rows of a data set. Raises `UserError` naming the file and line of what is wrong.

    A generated set has `GENERATED_ROWS` rows unless limited; its `split` decides which problems can occur.
    """
    if path.startswith("generated:"):
        return _generated(path, seed, split, limit or GENERATED_ROWS)
    rows = list(itertools.islice(_read_jsonl(Path(path)), limit))
    if not rows:
        raise UserError(f"the data file {path} has no rows")
    return rows


def check_columns(rows: Sequence[Row], columns: Sequence[str], path: str) -> None:
    """Raises `UserError` when a row lacks one of the columns, naming those that it has."""
    for number, row in enumerate(rows, 1):
        for column in columns:
            if column not in row:
                raise UserError(f"row {number} of {path} has no column {column!r}; it has {', '.join(sorted(row)) or 'none'}")


def template_columns(template: str) -> list[str]:
    """The columns that a prompt template names. Raises `UserError` if it is no template."""
    try:
        return [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise UserError(f"data.prompt_template {template!r} cannot be parsed: {error}; write {{{{ for a literal brace") from error


def _generated(path: str, seed: int, split: Split, count: int) -> list[Row]:
    sources: dict[str, Callable[[int, Split, int], list[Row]]] = {"generated:arithmetic": arithmetic.as_examples}
    if path not in sources:
        raise UserError(f"data set {path!r} is not known; there is {', '.join(sources)}")
    return sources[path](seed, split, count)


def _read_jsonl(path: Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _parse_line(path, number, line)
    except OSError as error:
        raise UserError(f"the data file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"the data file {path} is not UTF-8 text: {error.reason}") from error


def _parse_line(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {number} is not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(row, dict):
        raise UserError(f"{path}, line {number} is not an object with columns but a {type(row).__name__}")
    return row
