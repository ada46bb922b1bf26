"""1 for the right number after the last `####` of a response, 0 otherwise (the answer format of GSM8K, arXiv 2110.14168).

Left out: units, fractions, exponents and other spellings of a number. They make a response wrong, and a reference an error.
"""

from __future__ import annotations

import re
from decimal import Decimal

from asyncflow.rewards.base import Sample

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


class FinalAnswer:
    """Compares the number directly after the last `####` of the response with the reference, exactly.

    Text after that number is ignored. The reference is `example[answer_column]`: a number, or a solution that ends in `#### n`.
    """

    is_stateless = True

    def __init__(self, *, answer_column: str = "answer", require_end: bool = True) -> None:
        """`require_end`: a response that was cut off before its end token gets 0, whatever it says."""
        self.answer_column = answer_column
        self.require_end = require_end

    def __call__(self, sample: Sample) -> float:
        """1.0 or 0.0. Raises `ValueError` for a reference without a number: a broken row must never look like a wrong response."""
        expected = self._expected(sample)
        if self.require_end and not sample.is_finished:
            return 0.0
        _, mark, tail = sample.response.rpartition(MARK)
        found = _NUMBER.match(tail) if mark else None
        return float(found is not None and _value(found) == expected)

    def _expected(self, sample: Sample) -> Decimal:
        if self.answer_column not in sample.example:
            raise ValueError(f"no column {self.answer_column!r} in the row {dict(sample.example)!r:.400}")
        reference = sample.example[self.answer_column]
        # A JSON number is as good as its text; a bool is a number only to Python.
        text = reference if isinstance(reference, str) else "" if isinstance(reference, bool) else str(reference)
        found = _NUMBER.match(text.rpartition(MARK)[2])
        if found is None or found.string[found.end() :].strip():
            raise ValueError(f"no number to compare with in column {self.answer_column!r}: {reference!r:.400}")
        return _value(found)


def _value(found: re.Match[str]) -> Decimal:
    sign = "-" if "-" in (found["outer_sign"], found["inner_sign"]) else ""
    return Decimal(sign + found["digits"].replace(",", ""))
