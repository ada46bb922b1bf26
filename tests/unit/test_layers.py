"""The check of import layers (`make layers`) sees the whole package; the loops know of no algorithm, by import or by name."""

import re

from asyncflow.algorithms import ALGORITHMS
from tests.conftest import ROOT


def test_every_folder_of_modules_is_a_package() -> None:
    """One without `__init__.py` can be imported, and is left out of the check."""
    folders = {path.parent for path in (ROOT / "asyncflow").rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_no_file_of_the_workflows_names_an_algorithm() -> None:
    """What one asks of the dataflow it says itself, by the contract in `algorithms/base.py`: not even a comment is about one."""
    names = "|".join([*ALGORITHMS, *(target.rpartition(":")[2] for target in ALGORITHMS.values())])
    named = re.compile(rf"(?<![a-z])(?:{names})(?![a-z])|asyncflow\.algorithms(?!\.base import)", re.IGNORECASE)
    assert all(
        named.search(text) for text in ("if name == 'ppo':", "isinstance(it, DrGRPO)", "import asyncflow.algorithms.surrogate")
    )
    assert not named.search("from asyncflow.algorithms.base import Algorithm  # which all support")
    files = sorted((ROOT / "asyncflow" / "workflows").rglob("*.py"))
    assert files and [(file.name, found[0]) for file in files if (found := named.search(file.read_text()))] == []
