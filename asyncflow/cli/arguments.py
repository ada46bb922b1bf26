"""Arguments of the command line: sentences about wrong ones, and options that do not go together."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import typer
from pydantic import ValidationError

from asyncflow.settings import wanted
from asyncflow.types import UserError

UsageError: Any = typer.BadParameter.__mro__[1]
"""Base class of the errors about wrong arguments. Typer gives no name to it."""


def refuse(options: Mapping[str, Any], why: str) -> None:
    """Check that none of these options, by its name on the command line, is given. Raises `UserError`: the option, and `why`."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise UserError(f"{name} {why}")


def need_service(verb: str, *modules: str) -> None:
    """Check that these modules of the extra `service` are there. Raises `UserError`."""
    try:
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"asyncflow {verb} needs the extra `service` ({error}): pip install 'asyncflow-rl[service]'") from error


def sentence_of(error: Any) -> str:
    """Sentence about a wrong argument."""
    command = error.ctx.command_path if error.ctx else "asyncflow"
    name = max(error.param.opts, key=len) if getattr(error, "param", None) is not None else ""
    shown = name if name.startswith("-") else name.upper()
    if type(error).__name__ == "MissingParameter":  # as above
        return f"{command} needs {shown}: `{command} --help` says what it is"
    if isinstance(error.__cause__, ValidationError):
        mistake = dict(error.__cause__.errors()[0])
        return f"{shown}: must be {wanted(mistake)}, not {mistake['input']}"
    words = str(error).rstrip(".")
    return f"{shown}{': ' * bool(shown)}{words[:1].lower()}{words[1:]}; `{command} --help` says what it takes"
