"""Choices by name, by `package.module:Name`, or by a user's own `file.py:Name`. Nothing is imported until it is chosen."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncflow.types import UserError


def resolve(kind: str, choice: str, known: Mapping[str, str]) -> str:
    """The `module:Name` or `file.py:Name` behind a choice. Raises `UserError` listing the known names."""
    if choice in known:
        return known[choice]
    if ":" in choice.strip(":"):
        return choice
    raise UserError(f"{kind} {choice!r} is not known; choose one of {', '.join(sorted(known))}, or give your own as 'file.py:Name'")


def load(kind: str, target: str) -> Any:
    """Import what `module:Name` or `file.py:Name` names. Raises `UserError` saying what is missing."""
    module_name, _, name = target.rpartition(":")
    try:
        module = _load_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
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
        raise UserError(f"{kind} {choice!r} does not take these options: {error}") from error


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise ImportError(f"there is no file {path}")
    name = f"asyncflow_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
