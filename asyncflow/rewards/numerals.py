"""Numbers as they stand in digits or in words, exactly: 1,234.5   3 * 10^4   1 1/2   two hundred and five.

No text is executed: a recursive descent over a small grammar, in exact fractions, with bounds on every exponent and every value.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

MAX_EXPONENT: Final = 64
MAX_DIGITS: Final = 60
MAX_DEPTH: Final = 20
MAX_BITS: Final = 4096
"""Most bits of a value's numerator, and of its denominator."""
_SMALL: Final = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"),
    *("fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS: Final = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
WORDS: Final = {word: i for i, word in enumerate(_SMALL)} | {word: 10 * i for i, word in enumerate(_TENS, 2)}
SCALES: Final = {"hundred": 10**2, "thousand": 10**3, "k": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

# Thousands end where commas, or thin or plain spaces, say so; or full stops, of which there are two or more.
_NUMBER = re.compile(
    r"""(?P<grouped>\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?:[ ]\d{3})+(?![\d/])|\d{1,3}(?:_\d{3})+(?!\d)) (?P<more>\.\d+)?
    | (?P<stops>\d{1,3}(?:\.\d{3}){2,}(?!\d))
    | (?P<repeating>\d*\.\d*)\\overline\{(?P<again>\d+)\}
    | (?P<simple>\d+\.?\d*|\.\d+) (?:[eE](?P<exponent>[-+]?\d{1,3}))?""",
    re.VERBOSE,
)


class _NoNumber(Exception):
    pass


def value_of(text: str) -> Fraction | None:
    """Value of an expression in digits: 1,234.5, 3 * 10^4, 1 1/2, 0.\\overline{3}. None: it is no expression, or out of bounds."""
    if sum(character.isdigit() for character in text) > MAX_DIGITS:
        return None
    try:
        return _Expression(text).whole()
    except (_NoNumber, ZeroDivisionError, RecursionError):
        return None


class _Expression:
    """sum: product, then + or - and another; product: power, then * or / and another; power: signed atom, then ^ and a whole
    number; atom: a number, a mixed number (1 1/2), or a sum in brackets."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text.replace("{", "(").replace("}", ")").replace("\\overline(", "\\overline{"), 0, 0
        if "\\overline{" in self._text:
            self._text = re.sub(r"(\\overline\{\d+)\)", r"\1}", self._text)

    def whole(self) -> Fraction:
        value = self._sum()
        self._space()
        if self._at < len(self._text):
            raise _NoNumber
        return value

    def _sum(self) -> Fraction:
        value = self._product()
        while sign := self._one_of("+-"):
            value = _bounded(value + self._product() * (1 if sign == "+" else -1))
        return value

    def _product(self) -> Fraction:
        value = self._power()
        while operator := self._one_of("*/"):
            other = self._power()
            value = _bounded(value * other if operator == "*" else value / other)
        return value

    def _power(self) -> Fraction:
        sign = -1 if self._one_of("+-") == "-" else 1
        base = self._atom()
        if not self._one_of("^"):
            return sign * base
        exponent = self._power()
        if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT or abs(exponent) * _bits(base) > MAX_BITS:
            raise _NoNumber
        return sign * Fraction(base ** int(exponent))

    def _atom(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _NoNumber
        if self._one_of("("):
            value = self._sum()
            if not self._one_of(")"):
                raise _NoNumber
        else:
            value = self._number()
            value += self._mixed(value)
        self._depth -= 1
        return value

    def _number(self) -> Fraction:
        self._space()
        found = _NUMBER.match(self._text, self._at)
        if found is None:
            raise _NoNumber
        self._at = found.end()
        if found["grouped"]:
            return Fraction(re.sub(r"[,_ ]", "", found["grouped"]) + (found["more"] or ""))
        if found["stops"]:
            return Fraction(found["stops"].replace(".", ""))
        if found["again"]:
            once, again = found["repeating"], found["again"]
            shift = 10 ** len(once.partition(".")[2])
            return Fraction(once + "0") + Fraction(int(again), (10 ** len(again) - 1) * shift)
        exponent = int(found["exponent"] or 0)
        if abs(exponent) > MAX_EXPONENT:
            raise _NoNumber
        return Fraction(found["simple"].rstrip(".") or "0") * Fraction(10) ** exponent

    def _mixed(self, whole: Fraction) -> Fraction:
        """The fraction behind a whole number: 1 1/2."""
        found = re.compile(r"[ ]+(?:and )?\(*([1-9]\d*)\)*/\(*(\d+)\)*").match(self._text, self._at)
        if found is None or whole.denominator != 1:
            return Fraction(0)
        part = Fraction(int(found[1]), int(found[2]))
        if part >= 1:
            raise _NoNumber
        self._at = found.end()
        return part

    def _one_of(self, characters: str) -> str:
        self._space()
        if self._at < len(self._text) and self._text[self._at] in characters:
            self._at += 1
            return self._text[self._at - 1]
        return ""

    def _space(self) -> None:
        while self._at < len(self._text) and self._text[self._at] == " ":
            self._at += 1


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise _NoNumber
    return value


def spelled_out(text: str) -> Fraction | None:
    """`twenty-one`, `a hundred and five`, `three thousand two hundred`. None of numbers in a row: `two three`, `four and three`."""
    words = re.split(r"[\s-]+", text.lower())
    if words == ["zero"]:
        return Fraction(0)
    total = group = 0
    before, scale = "", max(SCALES.values()) + 1  # the kind of the word before, and what the next scale is below
    for word in words:
        if word == "a" and before in ("", "scale", "and"):
            before = "a"
        elif word == "and" and before in ("hundred", "scale"):
            before = "and"
        elif word in _TENS and before in ("", "hundred", "scale", "and"):
            group, before = group + WORDS[word], "ten"
        elif 0 < WORDS.get(word, 0) < (10 if before == "ten" else 20) and before in ("", "ten", "hundred", "scale", "and"):
            group, before = group + WORDS[word], "small"
        elif word == "hundred" and before in ("", "a", "small", "ten") and group < 100:
            group, before = max(group, 1) * 100, "hundred"
        elif 1000 <= SCALES.get(word, 0) < scale and word != "k" and before in ("", "a", "small", "ten", "hundred"):
            total, group, before, scale = total + max(group, 1) * SCALES[word], 0, "scale", SCALES[word]
        else:
            return None
    return None if before in ("a", "and") else Fraction(total + group)
