"""Rows of a data set: which column holds what, by a name given or one of those that are known."""

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
    """The first of the names that the row has, spelled as it spells it."""
    spelled = {column.lower(): column for column in reversed(list(row))}
    return next((name if name in row else spelled[name] for name in names if name in spelled), None)


def value_in(row: Mapping[str, Any], column: str) -> Any:
    """What a column holds; `a.b` is the field b of the column a, where no column is called that. Raises `LookupError`."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise LookupError(column)
        value = value[part]
    return value
