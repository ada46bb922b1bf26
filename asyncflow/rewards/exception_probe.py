"""Other people's modules, imported so that one can ask what their `except` clauses have caught.

A library that tries one way after another says `except Exception: pass`, and so makes a `MemoryError` or a `RecursionError` into
"it is not so". Here each clause of its modules first notes what it caught; then the modules do what they did anyway.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Collection, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Final

KINDS: Final = (MemoryError, RecursionError)
"""Errors that are noted: they say nothing of the question, but that the machine had no room to answer it."""

_NOTE: Final = "__note_what_is_caught__"
_caught: list[type[MemoryError] | type[RecursionError]] = []


def import_probed(name: str, packages: Collection[str], *, without: Sequence[str] = ()) -> ModuleType:
    """A module. All modules of these packages are imported so, but for those whose names begin as in `without`; one that was there
    in the usual way is imported anew. Raises `ImportError`."""

    def is_meant(module: str) -> bool:
        return module.partition(".")[0] in packages and not module.startswith(tuple(without))

    for known in [module for module in sys.modules if is_meant(module)]:
        if not isinstance(getattr(sys.modules[known].__spec__, "loader", None), _NotingLoader):
            del sys.modules[known]

    class Finder(MetaPathFinder):
        def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
            spec = PathFinder.find_spec(fullname, path, target) if is_meant(fullname) else None
            if spec is not None and isinstance(spec.loader, SourceFileLoader):
                spec.loader = _NotingLoader(fullname, spec.loader.path)
            return spec

    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module(name)
    finally:
        sys.meta_path.remove(finder)


def forget_caught() -> None:
    """Forget what was caught before the code that is to be asked about."""
    _caught.clear()


def first_caught() -> type[MemoryError] | type[RecursionError] | None:
    """The first of `KINDS` that a clause has caught since `forget_caught`."""
    return _caught[0] if _caught else None


class _NotingLoader(SourceFileLoader):
    """Loader that always compiles the source: compiled files lack the notes."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                node.body.insert(0, ast.Expr(ast.Call(ast.Name(_NOTE, ast.Load()), [], [])))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)[_NOTE] = _note
        super().exec_module(module)


def _note() -> None:
    error = sys.exc_info()[1]
    for kind in KINDS:
        if isinstance(error, kind):
            _caught.append(kind)
