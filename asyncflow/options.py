"""Options of a class or a function, checked against its signature: which there are, of which kind, and whether a number is finite.

    max_staleness: int = 1     two, 1.5, true, .inf and "2" are refused: it must be a whole number

An annotation that says nothing about plain values (a class, `Any`) takes everything, as does a parameter without one. It imports
little, since processes that run the user's code start with it.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, Unpack, get_args, get_origin, get_type_hints, is_typeddict

import msgspec

from asyncflow.errors import UserError

_ANYTHING: Final = ""
_WORDS: Final = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null"}
_LISTS: Final = (list, tuple, set, frozenset, Sequence, Iterable, Collection)
_MAPPINGS: Final = (dict, Mapping)
_BITS: Final = 63
"""Bits of whole numbers, without the sign: larger ones cannot be sent between processes."""
_LEFT_OUT: Final = object()
"""Default of an option that may be left out, and does not say what it is then."""


class _Option(NamedTuple):
    kind: Any
    default: Any


class _Misfit(Exception):
    """A value is not of a kind."""


def checked_options(
    what: str, target: Callable[..., Any], options: Mapping[str, Any], given: Collection[str] = (), *, needs_all: bool = True
) -> dict[str, Any]:
    """Options as `target` takes them: a float without a fraction is an `int` where one is wanted.

    `what` begins a message. `given`: names of arguments that are not the user's. Without `needs_all` a parameter may be missing:
    `target` is called with more later. Raises `UserError`.
    """
    known, is_open = _of_class(target) if isinstance(target, type) else _options_of(target)
    if alien := [name for name in given if name not in known and not is_open]:
        raise UserError(f"{what} does not take {alien[0]!r}, which a run gives it: add it to its parameters")
    for name in options:
        if name not in known and not is_open:
            of_user = [each for each, option in known.items() if each not in given and (option.kind is Any or words(option.kind))]
            raise UserError(f"{what} has no option {name!r}: {_hint(name, of_user)}")
    made = {name: _checked(what, name, value, known.get(name)) for name, value in options.items()}
    missing = [name for name, each in known.items() if each.default is inspect.Parameter.empty and name not in {*options, *given}]
    if missing and needs_all:
        kind = words(known[missing[0]].kind)
        raise UserError(f"{what} needs the option {missing[0]!r}{f', {kind}' if kind else ''}: set it beside the name")
    return made


def misfit(value: Any, kind: Any) -> str:
    """Description of what a value must be, and is not; "" for one that is of this kind."""
    try:
        _as(value, kind)
    except _Misfit:
        return f"must be {words(kind)}, not {_shown(value)}"
    return ""


def words(kind: Any) -> str:
    """Description of the values that an annotation stands for; "" for any."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return words(arguments[0])
    if origin is Literal:
        return _one_of([str(each) for each in arguments])
    if origin in (Union, UnionType):
        return _one_of([*dict.fromkeys(words(each) for each in arguments)])
    if (origin or kind) in _LISTS:
        of = words(arguments[0]) if arguments else _ANYTHING
        return f"a list, each {of}" if of else "a list"
    if (origin or kind) in _MAPPINGS:
        return "a mapping"
    return _WORDS.get(kind, _ANYTHING)


def hints_of(annotated: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """Annotations by name, those that cannot be found as `Any`. `names`: what they may be written with."""
    found = {}
    for name, annotation in annotated.items():
        try:
            found.update(get_type_hints(SimpleNamespace(__annotations__={name: annotation}), dict(names), include_extras=True))
        except Exception:  # a name that is imported for type checkers alone, or no type at all
            found[name] = Any
    return found


def _options_of(target: Callable[..., Any]) -> tuple[Mapping[str, _Option], bool]:
    """Options by name, and whether there may be others."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # a callable of C code that does not say
        return {}, True
    annotated = {each.name: each.annotation for each in signature.parameters.values() if each.annotation is not each.empty}
    hints, is_open = hints_of(annotated, _globals_of(target)), False
    known: dict[str, _Option] = {}
    for each in signature.parameters.values():
        kind = hints.get(each.name, Any)
        if each.kind is each.VAR_KEYWORD:
            others = get_args(kind)[0] if get_origin(kind) is Unpack else None
            if is_typeddict(others):
                known |= {name: _Option(of, _LEFT_OUT) for name, of in get_type_hints(others).items()}
            else:
                is_open = True
                known = {**_passed_on(target), **known}
        elif each.kind is not each.VAR_POSITIONAL:
            known[each.name] = _Option(kind, each.default)
    return known, is_open


_of_class = lru_cache(64)(_options_of)
"""The planner asks about the same classes thousands of times."""


def _passed_on(target: Callable[..., Any]) -> dict[str, _Option]:
    """Optional parameters of the classes above, to which a constructor with **options passes them on, as a rule."""
    above = target.__mro__[1:] if isinstance(target, type) else ()
    for base in above:
        if "__init__" in vars(base) and base is not object:
            known, _ = _options_of(base)
            return {name: each for name, each in known.items() if each.default is not inspect.Parameter.empty}
    return {}


def _globals_of(target: Callable[..., Any]) -> Mapping[str, Any]:
    """Names that the annotations of a function, or of a constructor, are written with."""
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    of_module = vars(sys.modules.get(target.__module__, object)) if isinstance(target, type) else {}
    found: Mapping[str, Any] = getattr(inspect.unwrap(function), "__globals__", of_module)
    return found


def _checked(what: str, name: str, value: Any, option: _Option | None) -> Any:
    if option is None or value is option.default or (type(value) is type(option.default) and value == option.default):
        return value
    try:
        return _as(value, option.kind)
    except _Misfit:
        raise UserError(f"{what}: {name} must be {words(option.kind)}, not {_shown(value)}") from None


def _as(value: Any, kind: Any) -> Any:
    """The value as one of this kind. Raises `_Misfit`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _as(value, arguments[0])
    if origin in (Union, UnionType):
        return _as_one_of(value, arguments)
    if origin is Literal:
        fits = any(value == each and type(value) is type(each) for each in arguments)
    elif (origin or kind) in _LISTS:
        return _as_list(value, origin or kind, arguments)
    elif (origin or kind) in _MAPPINGS:
        fits = isinstance(value, Mapping)
    elif kind is int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        fits = isinstance(value, int) and not isinstance(value, bool) and -(1 << _BITS) <= value < 1 << _BITS
    elif kind is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
    else:
        fits = isinstance(value, kind) if kind in _WORDS else True
    if not fits:
        raise _Misfit
    return value


def _as_one_of(value: Any, kinds: Sequence[Any]) -> Any:
    made = []
    for kind in kinds:
        try:
            made.append(_as(value, kind))
        except _Misfit:
            continue
    if not made:
        raise _Misfit
    return value if any(each is value for each in made) else made[0]


def _as_list(value: Any, kind: Any, arguments: Sequence[Any]) -> Any:
    if not isinstance(value, list | tuple):
        if kind is Iterable and isinstance(value, set | frozenset):
            return value
        raise _Misfit
    if kind is tuple and arguments and arguments[-1] is not ...:
        if len(value) != len(arguments):
            raise _Misfit
        return [_as(each, of) for each, of in zip(value, arguments, strict=True)]
    return [_as(each, arguments[0]) for each in value] if arguments else value


def _hint(name: str, known: Sequence[str]) -> str:
    import difflib  # late: processes that start often need it in few cases

    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.5):
        return f"did you mean {near[0]!r}?"
    return f"it has {', '.join(known)}" if known else "it has none"


def _one_of(each: Sequence[str]) -> str:
    if not all(each):
        return _ANYTHING
    return " or ".join([", ".join(each[:-1]), each[-1]] if len(each) > 1 else each)


def _shown(value: Any) -> str:
    """A value as YAML has it, in one line."""
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    try:
        return f"{msgspec.json.encode(value).decode():.100}"
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError):
        return f"{value!r:.100}"
