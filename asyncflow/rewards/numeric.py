"""1 where the answer is the reference's number, however either is written, 0 otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncflow.rewards.answers import MARKS, AnswerScorer, reference_answer
from asyncflow.rewards.number_parsing import Quantity, are_equal, quantity


class Numeric(AnswerScorer):
    """Compares the number that is marked as the response's answer with the reference's: in exact fractions, unless told otherwise.

    number_parsing.py says which spellings of a number are known: separators, currency signs, units, fractions, LaTeX, percentages.
    """

    is_stateless = True

    def __init__(
        self,
        *,
        answer_column: str | None = None,
        marks: Sequence[str] = MARKS,
        relative_tolerance: float = 0.0,
        require_end: bool = True,
    ) -> None:
        """`marks`: where the answer is (see answers.py). `relative_tolerance`: how far off it may be, as a share of the reference.
        `require_end`: a response that was cut off before its end token gets 0."""
        if relative_tolerance < 0:
            raise ValueError(f"relative_tolerance={relative_tolerance:g} is below 0")
        super().__init__(answer_column, marks, require_end, needs_mark=True)
        self._tolerance = relative_tolerance

    def _right(self, reference: Any) -> Quantity:
        expected = quantity(reference_answer(reference), is_reference=True)
        if expected is None:
            raise ValueError(f"no number to compare with: {reference!r:.400}")
        return expected

    def _is_right(self, answer: str, right: Quantity) -> bool:
        found = quantity(answer)
        return found is not None and are_equal(found, right, relative_tolerance=self._tolerance)
