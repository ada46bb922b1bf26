r"""Numbers as people, models and LaTeX write them, exactly.

    $1,234.50    \frac{3}{4}    1 1/2    75\%    3 \times 10^{4}    0.\overline{3}    twelve    2.5 million    18 dollars

`quantity` reads a text that is one number, perhaps with a sign of currency, a percent sign or a unit, and nothing else:

    text --plain--> --sides of equations--> the last side --units.py--> its unit, and the number alone --numerals.py--> a fraction
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import Final, NamedTuple

from asyncflow.rewards.numerals import SCALES, WORDS, spelled_out, value_of
from asyncflow.rewards.units import drop_units, split_unit

MAX_CHARACTERS: Final = 200
MAX_NESTED: Final = 20
"""Most wrappings of LaTeX within one another."""
ROUGHLY: Final = Fraction(1, 20)
"""Largest relative difference of the two sides of an ≈."""


class Quantity(NamedTuple):
    """`unit`: what stands beside the number, in one spelling, "" if nothing does; `written`: as it stands there. A percentage is
    its number, not a hundredth."""

    value: Fraction
    unit: str = ""
    is_percent: bool = False
    written: str = ""


def quantity(text: str, *, is_reference: bool = False) -> Quantity | None:
    """The number that a text is. None: it is none, or more than one. Of a chain of equations it is the last side, if those before
    it are names, or the same number. `10, 100` is one number, carelessly grouped, but as a reference it is two."""
    if len(text) > MAX_CHARACTERS:
        return None
    text = plain(text)
    if not is_reference:
        text = _SPACED_GROUPS.sub(lambda found: found[0].replace(" ", ""), text)
    *before, (_, last) = _sides(text)
    number = None if is_range(last) else _number_in(last)
    if number is None or (before and _MORE_THAN_ONE.search(text)):
        return None
    is_rough = False
    for sign, side in reversed(before):
        is_rough = is_rough or sign == "≈"
        if not _may_come_before(side, number, is_rough=is_rough):
            return None
    return number


def are_equal(found: Quantity, expected: Quantity, *, relative_tolerance: float = 0.0) -> bool:
    """Whether two quantities are equal. A unit counts where both have one, and where it may be the name of a variable that was
    expected, a letter by itself; where one alone is a percentage, 50% is 50 and 0.5."""
    may_be_variable = len(expected.written) == 1 and expected.written.isalpha()
    if found.unit != expected.unit and ((found.unit and expected.unit) or may_be_variable):
        return False
    return _is_same_amount(found, expected, Fraction(relative_tolerance))


def is_range(text: str) -> bool:
    """Whether a text is two or more bare numbers with a dash between them, which is no subtraction: `20-30`, `20-30 minutes`."""
    found = split_unit(plain(text)) if len(text) <= MAX_CHARACTERS else None
    return found is not None and _RANGE.fullmatch(found[0]) is not None


def sides_of(text: str) -> list[str]:
    """The sides of a chain of equations without those that are names of what the others are: of `x = 5` it is `5`. One at least."""
    *before, (_, last) = _sides(text)
    return [*(side for _, side in before if side and not is_name(side)), last]


def is_name(text: str) -> bool:
    r"""Whether a side of an equation names what the other one is, and is no number and no sentence: `x`, `m + n`, `f(2)`, `(x, y)`,
    `\cos \theta`, `total cost`."""
    text = _BELONGS_TO_NAME.sub("", text).strip()
    if any(character.isdigit() for character in text) or ("," in text and (text[0], text[-1]) != ("(", ")")):
        return False
    words = [word.lower() for word in _WORD.findall(text)]
    if not words or any(word in _NO_NAMES or word in WORDS for word in words):
        return False
    return sum(len(word) > 1 and word[0] != "\\" for word in words) <= MAX_WORDS


def plain(text: str) -> str:
    """A text without what LaTeX, Markdown and typography put around an answer, its fractions as (a)/(b)."""
    text = _SUPERSCRIPTS.sub(lambda found: f"^({unicodedata.normalize('NFKC', found[0])})", text)
    text = _VULGAR.sub(lambda found: f" {unicodedata.normalize('NFKC', found[0])}", text)
    text = unicodedata.normalize("NFKC", text)
    for pattern, replacement in _TYPOGRAPHY:
        text = pattern.sub(replacement, text)
    for _ in range(MAX_NESTED):  # from the inside out
        text, count = _WRAPPED.subn(r"\1", text)
        text, others = _FRACTION.subn(_as_ratio, text)
        if not count + others:
            break
    text = " ".join(text.split())
    while len(text) > 1 and (text[0], text[-1]) in _AROUND:
        text = text[1:-1].strip()
    return text.rstrip(" .,;:?")  # an exclamation mark is a factorial


# -- sides of an equation -------------------------------------------------------------------------------------------------------

MAX_WORDS: Final = 5
"""Most words of a name."""
_SIGN = re.compile(r"(?<![<>!:=])=(?!=)|≈|[()]")
# An index, an argument, a prime.
_BELONGS_TO_NAME = re.compile(r"_\{?\w+\}?|(?<=[A-Za-z}])\([^()]*\)|'")
_WORD = re.compile(r"\\?[^\W\d_]+")
# What joins a sentence, and words for numbers, are in no name.
_NO_NAMES: Final = frozenset(
    ["and", "or", "nor", "not", "no", "never", "because", "since", "so", "but", "if", "unless", "than", "know", *SCALES]
)
_LONG_WORD = re.compile(r"(?<![\\A-Za-z])[^\W\d_]{2,}")
_RANGE = re.compile(r"\d[\d,.]*(?:\s*-\s*\d[\d,.]*)+")


def _sides(text: str) -> list[tuple[str, str]]:
    """The sides of a chain of equations, each with the sign behind it, "" at the end. A sign in brackets is none: P(X = 2)."""
    has_pairs = text.count("(") == text.count(")")
    sides, begin, depth = [], 0, 0
    for found in _SIGN.finditer(text):
        if found[0] in "()":
            depth += has_pairs * (1 if found[0] == "(" else -1)
        elif depth <= 0:
            sides.append((found[0], text[begin : found.start()].strip()))
            begin = found.end()
    return [*sides, ("", text[begin:].strip())]


def _may_come_before(side: str, number: Quantity, *, is_rough: bool) -> bool:
    """Whether a side of an equation leaves it at that number: a name, nothing, the same amount, or another unit's."""
    found = _number_in(side) or _sum_of_quantities(side)
    if found is None:
        return not side or is_name(side) or (is_rough and not _LONG_WORD.search(side))
    if found.unit and number.unit and found.unit != number.unit:  # 2 hours = 120 minutes
        return True
    return _is_same_amount(found, number, ROUGHLY if is_rough else Fraction(0))


def _sum_of_quantities(text: str) -> Quantity | None:
    """`$5 + $3`, `5 apples + 3 apples`, `5 x 3`, `20% of 50`: the number alone."""
    value = value_of(drop_units(text))
    return None if value is None else Quantity(value)


def _number_in(text: str) -> Quantity | None:
    """The number that one side is, as it is written in digits or in words."""
    found = split_unit(text.strip())
    if found is None:
        return None
    alone, unit, is_percent, written = found
    value = spelled_out(alone) if alone[:1].isalpha() else value_of(alone)
    return None if value is None else Quantity(value, unit, is_percent, written)


def _is_same_amount(found: Quantity, expected: Quantity, relative_tolerance: Fraction) -> bool:
    if _close(found.value, expected.value, relative_tolerance):
        return True
    if found.is_percent == expected.is_percent:
        return False
    percent, other = (found, expected) if found.is_percent else (expected, found)
    return _close(percent.value / 100, other.value, relative_tolerance)


def _close(found: Fraction, expected: Fraction, relative_tolerance: Fraction) -> bool:
    return found == expected or abs(found - expected) <= relative_tolerance * abs(expected)


# -- typography -----------------------------------------------------------------------------------------------------------------

_VULGAR = re.compile("[¼-¾⅐-⅞]")
_SUPERSCRIPTS = re.compile("[⁺⁻]?[⁰¹²³⁴-⁹]+")
_TYPOGRAPHY: Final = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=[\w)}])(\s?)\*\*\1(?=[\d({+-]|[a-zA-Z]\b)", "^"),  # 2**3: a power, and nothing bold
        (r"[\u2212\u2010-\u2015\uFE63]", "-"),
        (r"[\u2044\u2215]", "/"),
        (r"\u00d7|\\times|\\cdot|\\ast|·", "*"),
        (r"\u00f7|\\div(?![a-z])", "/"),
        (r"(?<=\d),\s*\\[,;:! ]\s*(?=\d{3}(?!\d))", ","),
        (r"\\!", ""),
        (r"\\[,;:> ]|\\q?quad|~|\\(?:left|right|displaystyle|bigl|bigr|big)(?![a-z])", " "),
        (r"\\\$|\\text(?:dollar|sterling)", "$"),
        (r"\\%", "%"),
        (r"\\#", "#"),
        (r"\{,\}", ","),
        (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", "*"),
        (r"\^\s*+(?:\{\s*+)?\\circ(?:\s*+\})?|\\degree|\u00ba", "°"),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\\[()\[\]]", ""),
        (r"\$\$", ""),
        (r"\$(?=[-+.(\\\d])([^$]*[\d.)}%])\$(?!\d)(?![^$]*\$)", r"\1"),  # $72$ apples; but $5 + $13, and $1$ $234$
        (r"\*\*+|__+|`", ""),
        (r"\\(?:approx|sim)(?![a-z])", "≈"),
        (r"\\pi|π", " pi"),
    )
]
_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox|boxed|fbox|mathit|textit|rm|bf|operatorname|emph)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"(?P<whole>\d\s*)?\\frac\s*\{(?P<above>[^{}]*)\}\s*\{(?P<below>[^{}]*)\}")
_AROUND: Final = (("$", "$"), ('"', '"'), ("'", "'"), ("*", "*"))
_MORE_THAN_ONE = re.compile(r"[<>!≤≥≠;]|,\s*[A-Za-z]")
# Thousands with a space behind each comma.
_SPACED_GROUPS = re.compile(r"(?<![\d,.])\d{1,3}(?:,[ ]\d{3})+(?![\d,])")


def _as_ratio(found: re.Match[str]) -> str:
    ratio = f"(({found['above']})/({found['below']}))"
    return f"{found['whole'].strip()} {ratio}" if found["whole"] else ratio
