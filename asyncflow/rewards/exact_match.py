"""1 where the answer is the reference, letter by letter, 0 otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncflow.rewards.answers import AnswerScorer, text_of


class ExactMatch(AnswerScorer):
    """Compares what is marked as the response's answer, or all of it, with the reference; spaces at the ends never count."""

    is_stateless = True

    def __init__(
        self,
        *,
        answer_column: str | None = None,
        marks: Sequence[str] = (),
        ignore_case: bool = False,
        ignore_spaces: bool = False,
        require_end: bool = True,
    ) -> None:
        """`marks`: where the answer is (see answers.py); none: it is the whole response. A reference that is a list holds several
        right answers. `ignore_spaces`: a run of them is one. `require_end`: a response that was cut off gets 0."""
        super().__init__(answer_column, marks, require_end)
        self._ignore_case, self._ignore_spaces = ignore_case, ignore_spaces

    def _right(self, reference: Any) -> set[str]:
        return {self._one_form(text_of(each)) for each in (reference if isinstance(reference, list) else [reference])}

    def _answer(self, response: str) -> str | None:
        return super()._answer(response) if self._marks else response

    def _is_right(self, answer: str, right: set[str]) -> bool:
        return self._one_form(answer) in right

    def _one_form(self, text: str) -> str:
        text = " ".join(text.split()) if self._ignore_spaces else text.strip()
        return text.casefold() if self._ignore_case else text
