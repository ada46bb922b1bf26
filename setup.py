"""Step of the build that pyproject.toml cannot say: a wheel has the quickstart recipe and its model in asyncflow/recipes
(asyncflow/cli/quickstart.py)."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ["quickstart.yaml", "models/tiny-arithmetic"]


class WithRecipes(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for shipped in SHIPPED:
                source, target = Path("recipes") / shipped, Path(self.build_lib) / "asyncflow" / "recipes" / shipped
                self.mkpath(str(target.parent))
                if source.is_dir():
                    self.copy_tree(str(source), str(target))
                else:
                    self.copy_file(str(source), str(target))


setup(cmdclass={"build_py": WithRecipes})
