"""Import of a user's own Python file. It is in a file of its own because reward processes must start quickly and need only this."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def import_file(path: Path) -> ModuleType:
    """Import a file, which may import its neighbours. Raises `ImportError`, `SyntaxError`, and whatever the file itself raises."""
    if not path.is_file():
        raise ImportError(f"there is no file {path}")
    name = f"asyncflow_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and msgspec look a class's module up by name
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)  # last, so that a neighbour called json.py replaces nothing
    spec.loader.exec_module(module)
    return module
