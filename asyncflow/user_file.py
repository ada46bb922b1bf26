"""Import of a user's own Python file. It is in a file of its own because reward processes must start quickly and need only this."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Final

PREFIX: Final = "asyncflow_user_"
"""Of the names that such modules have."""


def import_file(path: Path) -> ModuleType:
    """Import a file, which may import its neighbours. Raises `ImportError`, `SyntaxError`, and whatever the file itself raises."""
    if not path.is_file():
        raise ImportError(f"there is no file {path}")
    name = f"{PREFIX}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and msgspec look a class's module up by name
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)  # last, so that a neighbour called json.py replaces nothing
    spec.loader.exec_module(module)
    return module


def traces_of(error: BaseException) -> Iterator[TracebackType]:
    """The traceback's entries, from the outermost to the one that raised."""
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def is_of_user(trace: TracebackType) -> bool:
    """Whether an entry of a traceback lies in a user's own file."""
    return str(trace.tb_frame.f_globals.get("__name__", "")).startswith(PREFIX)


def place_of(error: BaseException) -> str:
    """File and line of an error: the last ones in a user's own file, if it went through one, or else where it was raised; "" if it
    was raised nowhere."""
    traces = [*traces_of(error)]
    of_user = [trace for trace in traces if is_of_user(trace)]
    last = (of_user or traces)[-1] if traces else None
    return "" if last is None else f"{last.tb_frame.f_code.co_filename}:{last.tb_lineno}"
