"""The check of import layers (`make layers`) sees the whole package."""

from tests.conftest import ROOT


def test_every_folder_of_modules_is_a_package() -> None:
    """One without `__init__.py` can be imported, and is left out of the check."""
    folders = {path.parent for path in (ROOT / "asyncflow").rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []
