"""1 where the letter that is chosen is the right one, 0 otherwise."""

from __future__ import annotations

import re
from collections.abc import Sequence

from asyncflow.rewards.answers import MARKS, answer_in, check_marks, reference, text_of
from asyncflow.rewards.base import Sample


class MultipleChoice:
    """The choice is what is marked as the answer: `C`, `(C)`, `C.`, `C) the third one`, `option C`, `\\text{C}`.

    A response of nothing but the choice needs no mark.
    """

    is_stateless = True

    def __init__(
        self,
        *,
        choices: str = "ABCDE",
        answer_column: str | None = None,
        marks: Sequence[str] = MARKS,
        require_end: bool = True,
    ) -> None:
        """`choices`: the letters that there are. A reference is one of them, or a number: the position, from 0 on. `marks`: where
        the answer is (see answers.py). `require_end`: a response that was cut off gets 0."""
        if len(choices) < 2 or not choices.isalpha() or len(set(choices.upper())) < len(choices):
            raise ValueError(f"choices={choices!r} must be two or more different letters, such as ABCD")
        self._choices, letters = choices.upper(), re.escape(choices)
        self._marks = check_marks(marks)
        self._answer_column, self._require_end = answer_column, require_end
        # Possessive: a run of spaces must not be divided in all ways.
        around = r"[\s*_($\[\"'{]*+(?:\\text(?:bf)?\s*+\{)?+\s*+(?:(?:option|choice|answer)\s++)?+[(\[]?+"
        self._letter = re.compile(rf"{around}([{letters}])(?=\s*$|\s*[).:,;\]}}*$\"'-])", re.IGNORECASE)

    def __call__(self, sample: Sample) -> float:
        """1.0 or 0.0. Raises `ValueError` for a reference that is no choice."""
        right = self._right(reference(sample, self._answer_column))
        if self._require_end and not sample.is_finished:
            return 0.0
        answer = answer_in(sample.response, self._marks) if self._marks else None
        if answer is None and len(sample.response.split()) == 1:
            answer = sample.response
        return float(answer is not None and self._chosen(answer) == right)

    def _chosen(self, text: str) -> str | None:
        found = self._letter.match(text)
        return found[1].upper() if found else None

    def _right(self, right: object) -> str:
        if isinstance(right, int) and not isinstance(right, bool) and 0 <= right < len(self._choices):
            return self._choices[right]
        chosen = self._chosen(text_of(right)) if isinstance(right, str) else None
        if chosen is None:
            raise ValueError(f"the reference is none of the choices {', '.join(self._choices)}: {right!r:.400}")
        return chosen
