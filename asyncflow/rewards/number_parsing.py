r"""Numbers as people, models and LaTeX write them, exactly.

    $1,234.50    \frac{3}{4}    1 1/2    75\%    3 \times 10^{4}    0.\overline{3}    twelve    2.5 million    18 dollars

`quantity` reads a text that is one number, perhaps with a sign of currency, a percent sign or a unit, and nothing else. No text is
executed: a recursive descent over a small grammar, in exact fractions, with bounds on every exponent and every value.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import Final, NamedTuple

MAX_CHARACTERS: Final = 200
MAX_EXPONENT: Final = 64
MAX_DIGITS: Final = 60
MAX_DEPTH: Final = 20
MAX_BITS: Final = 4096
"""Most bits of a value's numerator, and of its denominator."""
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
    found = _without_unit(plain(text)) if len(text) <= MAX_CHARACTERS else None
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
    if not words or any(word in _NO_NAMES or word in _WORDS for word in words):
        return False
    return sum(len(word) > 1 and word[0] != "\\" for word in words) <= MAX_WORDS


def plain(text: str) -> str:
    """A text without what LaTeX, Markdown and typography put around an answer, its fractions as (a)/(b)."""
    text = _SUPERSCRIPTS.sub(lambda found: f"^({unicodedata.normalize('NFKC', found[0])})", text)
    text = _VULGAR.sub(lambda found: f" {unicodedata.normalize('NFKC', found[0])}", text)
    text = unicodedata.normalize("NFKC", text)
    for pattern, replacement in _TYPOGRAPHY:
        text = pattern.sub(replacement, text)
    for _ in range(MAX_DEPTH):  # from the inside out
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
    text = _TIMES.sub("*", _PERCENT_SIGN.sub("/100", _CURRENCY.sub("", text)))
    value = _value(_ONE_UNIT.sub(lambda found: found[0] if _one_spelling(found[1]) is None else "", text))
    return None if value is None else Quantity(value)


def _number_in(text: str) -> Quantity | None:
    """The number that one side is, as it is written in digits or in words."""
    found = _without_unit(text.strip())
    if found is None:
        return None
    alone, unit, is_percent, written = found
    value = _spelled_out(alone) if alone[:1].isalpha() else _value(alone)
    return None if value is None else Quantity(value, unit, is_percent, written)


def _is_same_amount(found: Quantity, expected: Quantity, relative_tolerance: Fraction) -> bool:
    if _close(found.value, expected.value, relative_tolerance):
        return True
    if found.is_percent == expected.is_percent:
        return False
    percent, other = (found, expected) if found.is_percent else (expected, found)
    return _close(percent.value / 100, other.value, relative_tolerance)


# -- units ----------------------------------------------------------------------------------------------------------------------

_SAME_UNITS: Final = {
    "$": ("dollar", "usd", "us$", "us dollar", "u s dollar", "buck"),
    "€": ("euro", "eur"),
    "£": ("pound sterling", "gbp"),
    "¥": ("yen", "jpy", "yuan", "cny"),
    "₹": ("rupee", "inr"),
    "¢": ("cent",),
    "°": ("degree", "deg"),
    "°c": ("degree celsius", "degrees celsius", "celsius"),
    "°f": ("degree fahrenheit", "degrees fahrenheit", "fahrenheit"),
    "mm": ("millimeter", "millimetre"),
    "cm": ("centimeter", "centimetre"),
    "m": ("meter", "metre"),
    "km": ("kilometer", "kilometre"),
    "in": ("inch", "inche"),
    "ft": ("foot", "feet"),
    "mi": ("mile",),
    "yd": ("yard",),
    "g": ("gram", "gramme"),
    "kg": ("kilogram", "kilo"),
    "lb": ("pound",),
    "oz": ("ounce",),
    "l": ("liter", "litre"),
    "s": ("second", "sec"),
    "min": ("minute",),
    "h": ("hour", "hr"),
    "mph": ("mile per hour", "miles per hour", "mi/h"),
    "km/h": ("kilometer per hour", "kilometers per hour", "kph", "kmh"),
}
_UNIT_OF: Final = {other: unit for unit, others in _SAME_UNITS.items() for other in others} | {unit: unit for unit in _SAME_UNITS}
_CURRENCY_FIRST = re.compile(r"([-+]?)\s*(US\$|[$€£¥₹]|(?:USD|EUR|GBP|JPY|CNY|INR)\b)\s*", re.IGNORECASE)
_CURRENCY = re.compile(r"(?:US)?[$€£¥₹]")
_PERCENT_SIGN = re.compile(r"(?<=\d)\s*%")
_TIMES = re.compile(r"(?<=\d)\s*(?:[xX]|of)\s*(?=\d)")
_ONE_UNIT = re.compile(r"(?<=\d)\s*([A-Za-z]+(?:\s+[A-Za-z]+){0,2})(?![A-Za-z(])")
# 25%, 25 percent, 25% of the class.
_PERCENT = re.compile(
    r"(?:%|\s*(?:percent|per cent|pct|percentage points?)\b\.?)(?:\s+(?P<of>[A-Z][A-Z.\-']*(?:\s+[A-Z][A-Z.\-']*){0,4}))?$",
    re.IGNORECASE,
)
# Words that follow a number, with quotients, a power and dots among them. An exponent (1e-3) is none.
_UNIT = re.compile(
    r"(?<=[\d).])\s*(?![eE][-+]?\d)"
    r"(?P<unit>(?:[°¢$€£¥₹][CF]?|[A-Za-z][A-Za-z.\-']*)(?:(?:\s+|\s*/\s*)[A-Za-z][A-Za-z.\-']*){0,4}(?:\^?\(?[23]\)?)?)$"
)
# What a number is multiplied by, or joined with, is no unit of it.
_NO_UNITS: Final = frozenset(
    ["pi", "sin", "cos", "tan", "log", "exp", "sqrt", "mod", "and", "or", "to", "not", "theta", "alpha", "beta", "lambda"]
)
# Nor is the rest of an expression (2 squared, 2 thirds of it, 5 less than x; but 20 third graders, 20 years older than Mary,
# 3 times a week), or a sentence that takes the number back.
_NO_UNIT = re.compile(
    r"(?:minus|plus|divided|squared|cubed|factorial|thirds)\b|(?:half|third)(?: of\b|$)"
    r"|.*\b(?:if|than [a-z]|times [b-z]|is (?:not|wrong|false|incorrect))\b"
)
_CURRENCIES: Final = frozenset("$€£¥₹¢")
_SCALE: Final = {"hundred": 10**2, "thousand": 10**3, "k": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}


# What joins a sentence, and words for numbers, are in no name.
_NO_NAMES: Final = frozenset(
    ["and", "or", "nor", "not", "no", "never", "because", "since", "so", "but", "if", "unless", "than", "know", *_SCALE]
)


def _without_unit(text: str) -> tuple[str, str, bool, str] | None:
    """A number's own text; then its unit in one spelling, whether it is a percentage, and the unit as it is written. Scales stay
    with the number, as a product. A currency is the unit, whatever else stands beside the number: $5 each, 5 dollars per hour.
    None: what stands there is more than a unit."""
    currency = written = ""
    if found := _CURRENCY_FIRST.match(text):
        currency = _one_spelling(found[2]) or ""
        text = found[1] + text[found.end() :]
    if found := _PERCENT.search(text):
        if found["of"] and _one_spelling(found["of"]) is None:
            return None
        return text[: found.start()].strip(), currency, True, ""
    text = text.strip()
    if (found := _UNIT.search(text)) is None:
        return text, currency, False, ""
    words, text = found["unit"].split(), text[: found.start()].strip()
    if words[0] == "M" and (currency or not found[0][0].isspace()):  # $5 M, 5M; but 5 M
        words[0] = "million"
    is_scaled = False
    while words and (scale := _SCALE.get(words[0].lower().removesuffix("s"))):
        text, words, is_scaled = f"({text})*{scale}", words[1:], True
    if is_scaled and words and words[0].lower() in _WORDS:  # 2 thousand five hundred
        return None
    written = " ".join(words)
    unit = _one_spelling(written) if words else currency
    if unit is None:
        return None
    named = _CURRENCIES & {currency, *unit.split()}
    if len(named) > 1:  # $18 euros
        return None
    return text, currency or (unit[0] if unit[0:1] in named else unit), False, written


def _one_spelling(unit: str) -> str | None:
    """The name of a unit, however it is written. None: it is no unit, but perhaps a variable."""
    unit = re.sub(r"[\s.()]+", " ", unit.lower()).strip().removeprefix("of ")
    unit = unit.replace("square ", "sq ").replace("cubic ", "cu ")
    unit = re.sub(r"(?<=.) squared$", "^2", re.sub(r"(?<=.) cubed$", "^3", unit))  # 5 metres squared
    if found := re.fullmatch(r"(.+?)\s?\^?\s?([23])", unit):  # m^2, cm2
        unit = f"{'sq' if found[2] == '2' else 'cu'} {found[1].strip()}"
    if not unit or _NO_UNIT.match(unit) or _NO_UNITS & set(unit.split()):
        return None
    if (whole := _singular(unit)) in _SAME_UNITS:
        return whole
    words = [_singular(word) for word in unit.split()]
    is_short = all(len(word) < 3 and word not in _UNIT_OF for word in words if word not in ("sq", "cu"))
    return None if is_short else " ".join(words)


def _singular(unit: str) -> str:
    """A unit in the spelling of `_SAME_UNITS`; another word without its plural's s."""
    shorter = re.sub(r"(?<=[a-rt-z][a-rt-z])s$", "", unit)
    return _UNIT_OF.get(unit) or _UNIT_OF.get(shorter) or shorter


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


# -- numbers --------------------------------------------------------------------------------------------------------------------

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


def _value(text: str) -> Fraction | None:
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


def _close(found: Fraction, expected: Fraction, relative_tolerance: Fraction) -> bool:
    return found == expected or abs(found - expected) <= relative_tolerance * abs(expected)


# -- words ----------------------------------------------------------------------------------------------------------------------

_SMALL: Final = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"),
    *("fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS: Final = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_WORDS: Final = {word: i for i, word in enumerate(_SMALL)} | {word: 10 * i for i, word in enumerate(_TENS, 2)}


def _spelled_out(text: str) -> Fraction | None:
    """`twenty-one`, `a hundred and five`, `three thousand two hundred`. None of numbers in a row: `two three`, `four and three`."""
    words = re.split(r"[\s-]+", text.lower())
    if words == ["zero"]:
        return Fraction(0)
    total = group = 0
    before, scale = "", max(_SCALE.values()) + 1  # the kind of the word before, and what the next scale is below
    for word in words:
        if word == "a" and before in ("", "scale", "and"):
            before = "a"
        elif word == "and" and before in ("hundred", "scale"):
            before = "and"
        elif word in _TENS and before in ("", "hundred", "scale", "and"):
            group, before = group + _WORDS[word], "ten"
        elif 0 < _WORDS.get(word, 0) < (10 if before == "ten" else 20) and before in ("", "ten", "hundred", "scale", "and"):
            group, before = group + _WORDS[word], "small"
        elif word == "hundred" and before in ("", "a", "small", "ten") and group < 100:
            group, before = max(group, 1) * 100, "hundred"
        elif 1000 <= _SCALE.get(word, 0) < scale and word != "k" and before in ("", "a", "small", "ten", "hundred"):
            total, group, before, scale = total + max(group, 1) * _SCALE[word], 0, "scale", _SCALE[word]
        else:
            return None
    return None if before in ("a", "and") else Fraction(total + group)
