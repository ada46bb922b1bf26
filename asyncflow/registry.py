"""Choices by name, by `package.module:Name`, or by a user's own `file.py:Name`. A choice is imported when it is made, not before.

A name is a built-in one, or one that an installed package gives by an entry point: a train engine in the group
`asyncflow.train_engines`, and so for each kind. Its options are the parameters of its class, or the fields of the record that
this takes (`by_name`).
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, update_wrapper
from importlib.metadata import entry_points
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

from asyncflow.options import checked_options
from asyncflow.types import RunError, UserError
from asyncflow.user_file import CannotImport, is_of_user, is_shortage, named, traces_of, words_of

Made = TypeVar("Made")
RecordT = TypeVar("RecordT")
FieldsP = ParamSpec("FieldsP")


def resolve(kind: str, choice: str, known: Mapping[str, str]) -> str:
    """Resolve a choice to `module:Name` or `file.py:Name`. `known`: the built-in names.

    Raises `UserError` listing the known names, or saying which packages give the same one.
    """
    known = _with_installed(kind, known)
    if choice in known:
        return known[choice]
    if ":" in choice.strip(":"):
        return choice
    raise UserError(f"{kind} {choice!r} is not known; choose one of {', '.join(sorted(known))}, or give your own as 'file.py:Name'")


def load(kind: str, target: str) -> Any:
    """Import what `module:Name` or `file.py:Name` names. Raises `UserError` saying what is missing, or what the file raised;
    `RunError` where the machine was short of memory or of file handles."""
    try:
        return named(target)
    except CannotImport as error:
        kind_of_error = RunError if is_shortage(error.__cause__) else UserError
        raise kind_of_error(f"{kind} {target!r} cannot be imported: {error}") from error


def package_module(module: str, package: str, what: str) -> Any:
    """A module of another product's package. Raises `UserError` where that is not installed, saying `what` needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{what} needs the package {package}: pip install {package}") from error


def build(
    kind: str, choice: str, options: Mapping[str, Any], known: Mapping[str, str], given: Mapping[str, Any] | None = None
) -> Any:
    """Build a chosen class with its options. `given`: arguments of the run's, which an option may replace.

    Raises `UserError` when an option is not one of its parameters or of another kind, or when the user's own class raises.
    """
    made, given = _loaded(kind, choice, known), given or {}
    arguments = {**given, **checked_options(f"{kind} {choice!r}", made, options, given)}
    try:
        return made(**arguments)
    except (UserError, RunError):
        raise
    except (Exception, SystemExit) as error:
        if not any(is_of_user(trace) for trace in traces_of(error)):
            raise
        raise UserError(f"{kind} {choice!r} cannot be built: {words_of(error)}") from error


def check_options(
    kind: str, choice: str, options: Mapping[str, Any], known: Mapping[str, str], given: Collection[str] = ()
) -> None:
    """Check that a chosen class takes these options, without building it. `given`: names of its arguments that are the run's.

    Raises `UserError`, as `build` would.
    """
    checked_options(f"{kind} {choice!r}", _loaded(kind, choice, known), options, given)


def by_name(
    record: Callable[FieldsP, RecordT],
) -> Callable[[Callable[[Made, RecordT], None]], Callable[Concatenate[Made, FieldsP], None]]:
    """Decorator of a constructor that takes a record, such as a frozen dataclass: it is called with the record's fields by name."""

    def decorated(constructor: Callable[[Made, RecordT], None]) -> Callable[Concatenate[Made, FieldsP], None]:
        def by_fields(made: Made, /, *args: FieldsP.args, **kwargs: FieldsP.kwargs) -> None:
            constructor(made, record(*args, **kwargs))

        itself, _ = inspect.signature(constructor).parameters.values()
        kinds = get_type_hints(record, include_extras=True)  # the annotations are of the record's module
        fields = [each.replace(annotation=kinds[each.name]) for each in inspect.signature(record).parameters.values()]
        update_wrapper(by_fields, constructor).__signature__ = inspect.Signature([itself, *fields])  # type: ignore[attr-defined]
        return by_fields

    return decorated


def _loaded(kind: str, choice: str, known: Mapping[str, str]) -> Any:
    made = load(kind, resolve(kind, choice, known))
    if not callable(made):
        raise UserError(f"{kind} {choice!r} is a {type(made).__name__}: it must be a class, or a function that makes one")
    return made


def _with_installed(kind: str, known: Mapping[str, str]) -> dict[str, str]:
    """Built-in names, then the names that installed packages register."""
    names, origins = dict(known), dict.fromkeys(known, "AsyncFlow itself")
    for name, target, package in _installed(f"asyncflow.{kind.replace(' ', '_')}s", tuple(sys.path)):
        if name in names:
            raise UserError(
                f"{kind} {name!r} is given by {origins[name]} and by the installed package {package}: uninstall one of them, or "
                f"have its author change the name"
            )
        names[name], origins[name] = target, f"the installed package {package}"
    return names


@lru_cache
def _installed(group: str, path: tuple[str, ...]) -> tuple[tuple[str, str, str], ...]:
    """Entry points of a group: (name, `module:Name`, package)."""
    found = (
        (point.name, f"{point.module}:{point.attr}", point.dist.name if point.dist else "unknown")
        for point in _all_installed(path).select(group=group)
    )
    return tuple(sorted(set(found)))  # a package that is found twice on the path is one


@lru_cache(maxsize=1)
def _all_installed(_path: tuple[str, ...]) -> Any:
    """Entry points of all groups. Reading them takes milliseconds, and a configuration has choices of many kinds."""
    return entry_points()
