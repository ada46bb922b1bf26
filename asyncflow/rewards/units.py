"""Units that stand beside a number: currencies, percentages and words, each in one spelling."""

from __future__ import annotations

import re
from typing import Final

from asyncflow.rewards.numerals import SCALES, WORDS

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


def split_unit(text: str) -> tuple[str, str, bool, str] | None:
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
    while words and (scale := SCALES.get(words[0].lower().removesuffix("s"))):
        text, words, is_scaled = f"({text})*{scale}", words[1:], True
    if is_scaled and words and words[0].lower() in WORDS:  # 2 thousand five hundred
        return None
    written = " ".join(words)
    unit = _one_spelling(written) if words else currency
    if unit is None:
        return None
    named = _CURRENCIES & {currency, *unit.split()}
    if len(named) > 1:  # $18 euros
        return None
    return text, currency or (unit[0] if unit[0:1] in named else unit), False, written


def drop_units(text: str) -> str:
    """An expression of quantities without their units: of `$5 + $3` it is `5 + 3`, of `20% of 50` it is `20/100*50`."""
    text = _TIMES.sub("*", _PERCENT_SIGN.sub("/100", _CURRENCY.sub("", text)))
    return _ONE_UNIT.sub(lambda found: found[0] if _one_spelling(found[1]) is None else "", text)


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
