"""Import of what the user names: an object of a module, or of a Python file of their own. It is in a file of its own because reward
processes must start quickly and need only this."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Final

from asyncflow.errors import UserError

PREFIX: Final = "asyncflow_user_"
"""Beginning of the names that such modules have."""
MAX_TEXT: Final = 2000
"""Characters of an error's own words that are told."""


class CannotImport(ImportError):
    """Error that says why an object cannot be imported, in one line, with the place in the user's file."""


def named(target: str) -> Any:
    """Object that `package.module:Name` or `file.py:Name` names. Raises `CannotImport`, whatever the file itself raises."""
    place, _, name = target.rpartition(":")
    try:
        module = import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except SystemExit as error:
        raise CannotImport(
            f"it ends the program ({place_of(error)}): what is to run only as a script goes below if __name__ == '__main__'"
        ) from error
    except CannotImport:
        raise
    except Exception as error:  # a file may raise anything
        is_complete = isinstance(error, ImportError | SyntaxError)
        raise CannotImport(words_of(error).removeprefix(f"{type(error).__name__}: " if is_complete else "")) from error
    if not hasattr(module, name):
        raise CannotImport(f"{place} has no {name!r}")
    return getattr(module, name)


def import_file(path: Path) -> ModuleType:
    """Import a file, which may import its neighbours. Raises `CannotImport`, and whatever the file itself raises."""
    if not path.is_file():
        raise CannotImport(f"there is no file {path}")
    name = f"{PREFIX}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CannotImport(f"{path} is not Python")
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
    """File and line of an error: the last ones in a user's own file, if it went through one, or else where it was raised; of a
    file that is no Python, where it is none; "" if it was raised nowhere."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    traces = [*traces_of(error)]
    of_user = [trace for trace in traces if is_of_user(trace)]
    others = [trace for trace in traces if trace.tb_frame.f_code.co_filename not in _IMPORTERS]
    last = of_user[-1] if of_user else others[-1] if others else None
    return "" if last is None else f"{last.tb_frame.f_code.co_filename}:{last.tb_lineno}"


_IMPORTERS: Final = {__file__, importlib.__file__, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>"}
"""Files that an import passes through."""


def words_of(error: BaseException) -> str:
    """An error's type, text and place (`place_of`), in one line."""
    try:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
    except Exception:  # a broken __str__ must not hide the error itself
        text = "(its text cannot be shown)"
    place, text = place_of(error), " ".join(text.split())
    return f"{type(error).__name__}: {text[:MAX_TEXT]}{f' ({place})' if place else ''}".encode(errors="replace").decode()


_SHORT: Final = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_WORDS_OF_SHORT: Final = ("failed to map segment", "annot allocate memory", "oo many open files")


def is_shortage(error: BaseException | None) -> bool:
    """Whether the machine was short of memory or of file handles just then: no mistake of the user's, and it may pass.

    Of a library that could not be mapped there are only words.
    """
    if isinstance(error, ImportError):
        return any(words in str(error) for words in _WORDS_OF_SHORT)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _SHORT)


def came_of_shortage(error: BaseException | None) -> bool:
    """Whether this error, or one that it came of, is such a one."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(came_of_shortage, error.exceptions))
    return error is not None and (is_shortage(error) or came_of_shortage(error.__cause__ or error.__context__))


def status_of(error: BaseException) -> int:
    """Exit status of a process that ends with this error: 2 for a mistake that the user can mend, else 1, after which a script
    that resumes runs tries again."""
    is_mistake = isinstance(error, UserError) or (isinstance(error, BaseExceptionGroup) and error.subgroup(UserError) is not None)
    return 2 if is_mistake and not came_of_shortage(error) else 1


def tells_of_shortage(text: str) -> bool:
    """Whether another process's words are of such an error."""
    return any(words in text for words in (*_WORDS_OF_SHORT, "MemoryError"))
