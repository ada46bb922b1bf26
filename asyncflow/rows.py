"""Rows of a data set: the column for each purpose, by a given name or by one of those that are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

READY_PROMPT: Final = "prompt"
"""A column of this name is a prompt as it stands: text, or a conversation."""
QUESTIONS: Final = ("question", "problem")
"""A column of these is a question, which becomes a prompt by a line end behind it."""
ANSWER: Final = "answer"
"""The column that a scorer finds the answer in, whatever the data set calls it."""
ANSWERS: Final = (ANSWER, "solution", "label", "ground_truth")
"""A column of these is the answer."""


def found_in(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """First of these names that the row has, spelled as in the row."""
    spelled = {column.lower(): column for column in reversed(list(row))}
    return next((name if name in row else spelled[name] for name in names if name in spelled), None)


def value_in(row: Mapping[str, Any], column: str) -> Any:
    """Value of a column; `a.b` is the field b of the column a, unless a column has that name. Raises `LookupError`."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise LookupError(column)
        value = value[part]
    return value
