r"""1 where the answer means what the reference means, 0 otherwise: numbers exactly, expressions by math-verify (over sympy).

    response --marks--> answer --+--> the same text                                        -> 1
    reference ----------> answer +--> both are numbers (number_parsing.py): compared as fractions -> 1 or 0
                                 +--> else math-verify parses both, and compares            -> 1 or 0

math-verify has sympy's parser read the response, which is code that evaluates text; and it bounds its own work by a signal, which
no thread but the main one can have. Here it runs in a process that ends with the sample, under the deadline of the reward, and
its own time limits are off: what takes too long is a failure and never a quiet 0. Nor is what it has no memory or no stack for:
it catches such errors and says "not equal", so that here it is asked what it has caught (exception_probe.py).
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Sequence
from typing import Any, Final

from asyncflow.rewards.answers import MARKS, AnswerScorer, reference_answer
from asyncflow.rewards.exception_probe import first_caught, forget_caught, import_probed
from asyncflow.rewards.number_parsing import Quantity, are_equal, is_range, plain, quantity, sides_of
from asyncflow.sandbox.limits import memory_share

# Parsed once when the scorer is built: what a process learns at its first formula, each sample's would have to learn again.
_WARM_UP: Final = (r"\frac{1}{2}", r"x^2+\sqrt{3}", r"(1, 2]", r"\{1, 2\}", r"\begin{pmatrix}1\\2\end{pmatrix}", "x=5", "2*x/3")
MAX_CHARACTERS: Final = 1000
# A reference of which equations may be the parts: (1, 2), x = 2 or x = 3.
_SEVERAL = re.compile(r"[=,]|\b(?:or|and)\b|\\pm|±")
_INCOMPARABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError)
"""Errors that sympy raises for things that it cannot compare, beside errors of its own. Any other one is the sample's failure."""
MUCH_MEMORY: Final = 0.25
"""A `MemoryError` may also be caught below math-verify, where nobody tells. So "not equal" is no answer after a comparison that
took more than this share of what there is: what asked for too much had at least that before, since things grow by doubling."""


class Maths(AnswerScorer):
    """Numeric and symbolic. Needs the package math-verify, an extra: `pip install 'asyncflow-rl[maths]'`."""

    def __init__(
        self,
        *,
        answer_column: str | None = None,
        marks: Sequence[str] = MARKS,
        relative_tolerance: float = 0.0,
        decimals: int = 6,
        require_end: bool = True,
    ) -> None:
        """`marks`: where the answer is (see answers.py). `relative_tolerance`: of numbers. `decimals`: to which sympy's values are
        rounded before they are compared. `require_end`: a response that was cut off gets 0. Raises `ImportError` without the
        package."""
        super().__init__(answer_column, marks, require_end, needs_mark=True)
        self._tolerance, self._decimals = relative_tolerance, decimals
        try:
            self._verifier: Any = import_probed(
                "math_verify", ("math_verify", "latex2sympy2_extended"), without=["latex2sympy2_extended.gen"]
            )
        except ImportError as error:
            raise ImportError("the scorer maths needs math-verify: pip install 'asyncflow-rl[maths]'") from error
        polynomials, matrices = (importlib.import_module(f"sympy.{name}") for name in ("polys.polyerrors", "matrices.exceptions"))
        self._incomparable = (*_INCOMPARABLE, polynomials.BasePolynomialError, matrices.MatrixError)
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
        for text in _WARM_UP:
            self._is_same(text, text)

    def _right(self, reference: Any) -> str:
        expected = reference_answer(reference)
        if not expected:
            raise ValueError(f"nothing to compare with: {reference!r:.400}")
        return expected

    def _answer(self, response: str) -> str | None:
        return super()._answer(response) or None  # a mark with nothing in it is no answer

    def _is_right(self, answer: str, expected: str) -> bool:
        if answer == expected:
            return True
        if len(answer) > MAX_CHARACTERS:
            return False
        if plain(answer) == plain(expected):
            return True
        number, number_expected = quantity(answer), quantity(expected, is_reference=True)
        if isinstance(number, Quantity) and isinstance(number_expected, Quantity):
            return are_equal(number, number_expected, relative_tolerance=self._tolerance)
        if is_range(answer) or is_range(expected):  # math-verify would subtract
            return False
        sides = [answer] if number_expected is None and _SEVERAL.search(expected) else sides_of(answer)
        if sides != [answer]:  # math-verify would look at the last one alone
            return all(self._is_right(side, expected) for side in dict.fromkeys(sides))
        forget_caught()
        if self._is_same(answer, expected):
            return True
        if memory_share() > MUCH_MEMORY:
            raise MemoryError
        if (kind := first_caught()) is not None:
            raise kind("inside math-verify, which went on to 'not equal'")
        return False

    def _is_same(self, answer: str, expected: str) -> bool:
        found, right = self._parsed(answer), self._parsed(expected)
        try:
            return bool(
                self._verifier.verify(
                    right, found, float_rounding=self._decimals, timeout_seconds=None, raise_on_error=True, strict=True
                )
            )
        except self._incomparable:  # so they are not known to be equal
            return False

    def _parsed(self, text: str) -> list[Any]:
        """Expressions that may be meant, as sympy has them, or the text itself."""
        text = text.strip().strip("$").strip()
        try:
            parsed: list[Any] = self._verifier.parse(f"${text}$", parsing_timeout=None, raise_on_error=True)
        except (MemoryError, RecursionError):
            raise
        except Exception:  # no formula
            parsed = []
        return parsed or [text]
