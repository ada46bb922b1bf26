"""1 where the answer is the reference's number, however either is written, 0 otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.rewards.answers import MARKS, answer_in, check_marks, reference, reference_answer
from asyncflow.rewards.base import Sample
from asyncflow.rewards.number_parsing import Quantity, are_equal, quantity


class Numeric:
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
        self._marks = check_marks(marks, at_least_one=True)
        self._answer_column, self._require_end, self._tolerance = answer_column, require_end, relative_tolerance

    def __call__(self, sample: Sample) -> float:
        """1.0 or 0.0. Raises `ValueError` for a reference without a number: a broken row must never look like a wrong response."""
        expected = self._expected(sample)
        if self._require_end and not sample.is_finished:
            return 0.0
        answer = answer_in(sample.response, self._marks)
        found = quantity(answer) if answer is not None else None
        return float(found is not None and are_equal(found, expected, relative_tolerance=self._tolerance))

    def _expected(self, sample: Sample) -> Quantity:
        right = reference(sample, self._answer_column)
        expected = quantity(reference_answer(right), is_reference=True)
        if expected is None:
            raise ValueError(f"no number to compare with: {right!r:.400}")
        return expected
