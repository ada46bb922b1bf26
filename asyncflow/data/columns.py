"""Columns of a data set that make the prompt, and the one that is the answer: named in the configuration, or found.

| layout | prompt | answer |
|---|---|---|
| GSM8K | `question` | `answer` |
| DeepScaleR, AIME | `problem` | `answer`, else `solution` |
| TRL | `prompt`, text or messages | `answer`, `solution`, `label` or `ground_truth` |
| verl | `prompt`, messages | `reward_model.ground_truth` |

Names are found in any case (`Problem`). Whatever else a row has stays in it, for the scorer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, Final

from asyncflow.data.datasets import DataRow
from asyncflow.rows import ANSWER, ANSWERS, QUESTIONS, READY_PROMPT, found_in, value_in
from asyncflow.types import UserError

ChatMessage = dict[str, Any]
MOST_WIDTH: Final = 1000
"""Characters to which a template may fill a column up, as `{price:>10}` does."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a data set that have prompts and answers. A prompt is `template` filled in, or else the value of column `prompt`;
    `answer` is None where no column was found."""

    template: str | None
    prompt: str | None
    answer: str | None

    def prompt_of(self, row: DataRow) -> str | list[ChatMessage]:
        """A row's prompt: text, or a conversation as messages. Raises `LookupError` naming a column that is not there."""
        if self.template is not None:
            return self.template.format_map(row)
        assert self.prompt is not None
        value = value_in(row, self.prompt)
        if _is_conversation(value):
            return [dict(message) for message in value]
        if not isinstance(value, str):
            raise TypeError(f"column {self.prompt!r} is neither text nor a list of messages with role and content")
        return value if self.prompt.rpartition(".")[2].lower() == READY_PROMPT else f"{value}\n"

    def example_of(self, row: DataRow) -> DataRow:
        """Row as a scorer sees it: all of its columns, and the answer in `ANSWER`."""
        return dict(row) if self.answer in (None, ANSWER) else {**row, ANSWER: value_in(row, self.answer or "")}


def find_columns(
    rows: Sequence[DataRow], path: str, *, template: str | None = None, prompt: str | None = None, answer: str | None = None
) -> Columns:
    """The columns of a data set, with what the configuration says of them. Every row has them, and none of them is null.

    Raises `UserError` where a row lacks a column, or none is found for the prompt, naming those that there are.
    """
    first = rows[0]
    if template is None and prompt is None:
        prompt = found_in(first, (READY_PROMPT, *QUESTIONS))
        if prompt is None:
            raise UserError(
                f"{path}: none of the columns {', '.join((READY_PROMPT, *QUESTIONS))}, but {_named(first)}: say by "
                f"data.prompt_column, or by data.prompt_template, which make the prompt"
            )
    if answer is None:
        is_verl = isinstance(first.get("reward_model"), Mapping) and "ground_truth" in first["reward_model"]
        answer = "reward_model.ground_truth" if is_verl else found_in(first, ANSWERS)
    columns = Columns(template, prompt, answer)
    needed = template_columns(template) if template is not None else [prompt or ""]
    for number, row in enumerate(rows, 1):
        for column in [*needed, *([answer] if answer is not None else [])]:
            try:
                value = value_in(row, column)
            except LookupError as error:
                raise UserError(f"row {number} of {path} has no column {column!r}; it has {_named(row)}") from error
            if value is None:
                of_prompt = "data.prompt_column" if template is None else "data.prompt_template"
                raise UserError(
                    f"row {number} of {path} has null (or a number that is not finite) in column {column!r}: leave such rows out, "
                    f"or name another column by {of_prompt if column in needed else 'data.answer_column'}"
                )
        try:
            columns.prompt_of(row)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise UserError(f"row {number} of {path} makes no prompt: {error}") from error
    return columns


def template_columns(template: str) -> list[str]:
    """The columns that a prompt template names. Raises `UserError` if it is no template."""
    try:
        found = [(name, form or "") for _, name, form, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise UserError(f"data.prompt_template {template!r} cannot be parsed: {error}; write {{{{ for a literal brace") from error
    fields = [name for name, _ in found]
    odd = [name for name in fields if not name or any(mark in name for mark in ".[")]
    if odd:  # an attribute of Python's, or a position
        raise UserError(f"data.prompt_template {template!r} names {odd[0]!r}, which is no column; write {{{{ for a literal brace")
    for name, form in found:
        if "{" in form or any(int(width) > MOST_WIDTH for width in re.findall(r"\d+", form)):
            raise UserError(
                f"data.prompt_template {template!r} makes column {name!r} wider than {MOST_WIDTH:,} characters: write {{{name}}}"
            )
    return fields


def _is_conversation(value: Any) -> bool:
    has_messages = isinstance(value, list) and bool(value)
    return has_messages and all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in value)


def _named(row: DataRow) -> str:
    return ", ".join(sorted(row)) or "none"
