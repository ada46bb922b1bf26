"""1 where the answer is the reference, letter by letter, 0 otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.rewards.answers import answer_in, check_marks, reference, text_of
from asyncflow.rewards.base import Sample


class ExactMatch:
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
        self._marks = check_marks(marks)
        self._answer_column, self._require_end = answer_column, require_end
        self._ignore_case, self._ignore_spaces = ignore_case, ignore_spaces

    def __call__(self, sample: Sample) -> float:
        """1.0 or 0.0. Raises `ValueError` for a reference that is no text and no number."""
        found = reference(sample, self._answer_column)
        right = {self._one_form(text_of(each)) for each in (found if isinstance(found, list) else [found])}
        if self._require_end and not sample.is_finished:
            return 0.0
        answer = answer_in(sample.response, self._marks) if self._marks else sample.response
        return float(answer is not None and self._one_form(answer) in right)

    def _one_form(self, text: str) -> str:
        text = " ".join(text.split()) if self._ignore_spaces else text.strip()
        return text.casefold() if self._ignore_case else text
