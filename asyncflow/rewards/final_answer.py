"""1 for the right number after the last `####` of a response, 0 otherwise (the answer format of GSM8K, arXiv 2110.14168).

Left out: units, fractions, exponents and other spellings of a number. They make a response wrong, and a reference an error.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from asyncflow.rewards.answers import AnswerScorer

MARK = "####"

# One number as people write it: a sign before or after a currency sign, commas only where thousands end, a full stop behind it.
_NUMBER = re.compile(
    r"""\s*
    (?P<outer_sign>[-+]?) (?:[$€£¥]\s?)? (?P<inner_sign>[-+]?)
    (?P<digits> (?: [0-9]{1,3}(?:,[0-9]{3})+ | [0-9]+ ) (?:\.[0-9]+)? | \.[0-9]+ )
    \.?
    (?!\S)""",
    re.VERBOSE,
)


class FinalAnswer(AnswerScorer):
    """Compares the number directly after the last `####` of the response with the reference, exactly.

    Text after that number is ignored. The reference is `example[answer_column]`: a number, or a solution that ends in `#### n`.
    """

    is_stateless = True

    def __init__(self, *, answer_column: str = "answer", require_end: bool = True) -> None:
        """`require_end`: a response that was cut off before its end token gets 0, whatever it says."""
        super().__init__(answer_column, (), require_end)

    def _answer(self, response: str) -> str | None:
        _, mark, tail = response.rpartition(MARK)
        return tail if mark else None

    def _right(self, reference: Any) -> Decimal:
        # A JSON number is as good as its text; a bool is a number only to Python.
        text = reference if isinstance(reference, str) else "" if isinstance(reference, bool) else str(reference)
        found = _NUMBER.match(text.rpartition(MARK)[2])
        if found is None or found.string[found.end() :].strip():
            raise ValueError(f"no number to compare with in column {self._answer_column!r}: {reference!r:.400}")
        return _value(found)

    def _is_right(self, answer: str, right: Decimal) -> bool:
        found = _NUMBER.match(answer)
        return found is not None and _value(found) == right


def _value(found: re.Match[str]) -> Decimal:
    sign = "-" if "-" in (found["outer_sign"], found["inner_sign"]) else ""
    return Decimal(sign + found["digits"].replace(",", ""))
