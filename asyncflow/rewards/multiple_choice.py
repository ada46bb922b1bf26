"""1 where the letter that is chosen is the right one, 0 otherwise."""

from __future__ import annotations

import re
from collections.abc import Sequence

from asyncflow.rewards.answers import MARKS, AnswerScorer


class MultipleChoice(AnswerScorer):
    """The choice is what is marked as the answer: `C`, `(C)`, `C.`, `C) the third one`, `option C`, `\\text{C}`. `C, D` is none.

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
        super().__init__(answer_column, marks, require_end)
        # Possessive: a run of spaces must not be divided in all ways.
        around = r"[\s*_($\[\"'{]*+(?:\\(?:text|math)(?:[a-z]{2})?+\s*+\{)?+\s*+(?:(?:option|choice|answer)\s++)?+[(\[]?+"
        behind = r"[\s)\]}*_$\"'.]*+"
        more = rf"{behind}(?:[,;/&]\s*+(?:(?:and|or)\b)?+|(?:and|or)\b){around}[{letters}]"
        another = rf"(?:{more})++{behind}$"  # C, D and E; but E - B & C, or C, a cat
        self._letter = re.compile(rf"{around}([{letters}])(?!{another})(?=\s*$|\s*[).:,;\]}}*$\"'-])", re.IGNORECASE)

    def _answer(self, response: str) -> str | None:
        answer = super()._answer(response)
        return response if answer is None and len(response.split()) == 1 else answer

    def _is_right(self, answer: str, right: str) -> bool:
        return self._chosen(answer) == right

    def _chosen(self, text: str) -> str | None:
        found = self._letter.match(text)
        return found[1].upper() if found else None

    def _right(self, reference: object) -> str:
        if isinstance(reference, int) and not isinstance(reference, bool) and 0 <= reference < len(self._choices):
            return self._choices[reference]
        chosen = self._chosen(reference) if isinstance(reference, str) else None
        if chosen is None:
            raise ValueError(f"the reference is none of the choices {', '.join(self._choices)}: {reference!r:.400}")
        return chosen
