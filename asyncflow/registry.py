"""Choices by name, by `package.module:Name`, or by a user's own `file.py:Name`. A choice is imported when it is made, not before.

A name is a built-in one, or one that an installed package gives by an entry point: a train engine in the group
`asyncflow.train_engines`, and so for each kind.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from asyncflow.types import UserError
from asyncflow.user_file import import_file


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
    """Import what `module:Name` or `file.py:Name` names. Raises `UserError` saying what is missing."""
    module_name, _, name = target.rpartition(":")
    try:
        module = import_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except (ImportError, OSError, SyntaxError) as error:
        raise UserError(f"{kind} {target!r} cannot be imported: {error}") from error
    if not hasattr(module, name):
        raise UserError(f"{kind} {target!r}: {module_name} has no {name!r}")
    return getattr(module, name)


def build(kind: str, choice: str, options: Mapping[str, Any], known: Mapping[str, str]) -> Any:
    """Build a chosen class with its options. Raises `UserError` when an option is not one of its parameters."""
    target = resolve(kind, choice, known)
    try:
        return load(kind, target)(**options)
    except TypeError as error:
        raise _refused(kind, choice, error) from error


def check_options(kind: str, choice: str, options: Mapping[str, Any], known: Mapping[str, str]) -> None:
    """Check that a chosen class takes these options, without building it. Raises `UserError`, as `build` would."""
    try:
        inspect.signature(load(kind, resolve(kind, choice, known))).bind(**options)
    except TypeError as error:
        raise _refused(kind, choice, error) from error


def _refused(kind: str, choice: str, error: TypeError) -> UserError:
    return UserError(f"{kind} {choice!r} does not take these options: {error}")


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
def _installed(group: str, _path: tuple[str, ...]) -> tuple[tuple[str, str, str], ...]:
    """Entry points of a group: (name, `module:Name`, package). Reading them takes milliseconds."""
    found = (
        (point.name, f"{point.module}:{point.attr}", point.dist.name if point.dist else "unknown")
        for point in entry_points(group=group)
    )
    return tuple(sorted(set(found)))  # a package that is found twice on the path is one
