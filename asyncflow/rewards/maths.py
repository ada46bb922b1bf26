r"""1 where the answer means what the reference means, 0 otherwise: numbers exactly, expressions by math-verify (over sympy).

    response --marks--> answer --+--> the same text                                        -> 1
    reference ----------> answer +--> both are numbers (spelling.py): compared as fractions -> 1 or 0
                                 +--> else math-verify parses both, and compares            -> 1 or 0

math-verify has sympy's parser read the response, which is code that evaluates text; and it bounds its own work by a signal, which
no thread but the main one can have. Here it runs in a process that ends with the sample, under the deadline of the reward, and
its own time limits are off: what takes too long is a failure and never a quiet 0.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import Any, Final

from asyncflow.rewards.answers import answer_in, check_marks, reference, reference_answer
from asyncflow.rewards.base import Sample
from asyncflow.rewards.numeric import ANSWER_MARKS
from asyncflow.rewards.processes import memory_share
from asyncflow.rewards.spelling import Quantity, are_equal, plain, quantity

# Parsed once when the scorer is built: what a process learns at its first formula, each sample's would have to learn again.
_WARM_UP: Final = (r"\frac{1}{2}", r"x^2+\sqrt{3}", r"(1, 2]", r"\{1, 2\}", r"\begin{pmatrix}1\\2\end{pmatrix}", "x=5", "2*x/3")
MAX_CHARACTERS: Final = 1000
MUCH_MEMORY: Final = 0.25
"""math-verify catches a `MemoryError` in many places, and goes on to "not equal". So this is no answer after a comparison that took
more than this share of what there is: what asked for too much had at least that before, since things grow by doubling."""


class Maths:
    """Numeric and symbolic. Needs the package math-verify, an extra: `pip install 'asyncflow-rl[maths]'`."""

    def __init__(
        self,
        *,
        answer_column: str | None = None,
        marks: Sequence[str] = ANSWER_MARKS,
        relative_tolerance: float = 0.0,
        decimals: int = 6,
        require_end: bool = True,
    ) -> None:
        """`marks`: where the answer is (see answers.py). `relative_tolerance`: of numbers. `decimals`: to which sympy's values are
        rounded before they are compared. `require_end`: a response that was cut off gets 0. Raises `ImportError` without the
        package."""
        self._marks = check_marks(marks, at_least_one=True)
        self._answer_column, self._require_end = answer_column, require_end
        self._tolerance, self._decimals = relative_tolerance, decimals
        try:
            self._verifier: Any = importlib.import_module("math_verify")
        except ImportError as error:
            raise ImportError("the scorer maths needs math-verify: pip install 'asyncflow-rl[maths]'") from error
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
        for text in _WARM_UP:
            self._is_same(text, text)

    def __call__(self, sample: Sample) -> float:
        """1.0 or 0.0. Raises `ValueError` for a reference that is no text and no number, or an empty one."""
        right = reference(sample, self._answer_column)
        expected = reference_answer(right)
        if not expected:
            raise ValueError(f"nothing to compare with: {right!r:.400}")
        if self._require_end and not sample.is_finished:
            return 0.0
        answer = answer_in(sample.response, self._marks)
        return float(bool(answer) and self._is_right(str(answer), expected))

    def _is_right(self, answer: str, expected: str) -> bool:
        if plain(answer) == plain(expected):
            return True
        number, number_expected = quantity(answer), quantity(expected)
        if isinstance(number, Quantity) and isinstance(number_expected, Quantity):
            return are_equal(number, number_expected, relative_tolerance=self._tolerance)
        if len(answer) > MAX_CHARACTERS:
            return False
        is_same = self._is_same(answer, expected)
        if not is_same and memory_share() > MUCH_MEMORY:
            raise MemoryError
        return is_same

    def _is_same(self, answer: str, expected: str) -> bool:
        found, right = self._parsed(answer), self._parsed(expected)
        try:
            return bool(
                self._verifier.verify(
                    right, found, float_rounding=self._decimals, timeout_seconds=None, raise_on_error=True, strict=True
                )
            )
        except (MemoryError, RecursionError):
            raise
        except Exception:  # sympy raises whatever it likes about things that it cannot compare: they are not known to be equal
            return False

    def _parsed(self, text: str) -> list[Any]:
        """What may be meant, as sympy has it, or the text itself."""
        text = text.strip().strip("$").strip()
        try:
            parsed: list[Any] = self._verifier.parse(f"${text}$", parsing_timeout=None, raise_on_error=True)
        except (MemoryError, RecursionError):
            raise
        except Exception:  # no formula
            parsed = []
        return parsed or [text]
