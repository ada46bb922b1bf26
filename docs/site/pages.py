"""Pages of the documentation's site, which `make docs` builds from them.

    python docs/site/pages.py FOLDER      all pages of the site
    python docs/site/pages.py modules     docs/modules.md

The pages of docs/ as they are, and pages that are made: the front page and the figures from the README, the configuration from
`config.py`, the recipes from their files, the Python API from docstrings.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from asyncflow.config import Config
from asyncflow.settings import Choice, Section

ROOT = Path(__file__).parents[2]
API = {
    "trainer": ("A run from Python", ["asyncflow.trainer", "asyncflow.run.job.Listener", "asyncflow.client"]),
    "algorithms": (
        "Algorithms",
        ["asyncflow.algorithms.base", "asyncflow.algorithms.policy_loss", "asyncflow.algorithms.functional"],
    ),
    "rewards": ("Rewards", ["asyncflow.rewards.base", "asyncflow.own_metrics"]),
    "environments": ("Environments", ["asyncflow.environments.base"]),
    "engines": ("Engines", ["asyncflow.engines.base"]),
    "schedules": ("Schedules", ["asyncflow.control.schedule", "asyncflow.control.modes"]),
    "transfer_queue": ("Transfer queue", ["asyncflow.transfer_queue.client", "asyncflow.transfer_queue.loader.dataloader"]),
    "weight_sync": ("Weight sync", ["asyncflow.weight_sync.base"]),
    "storages": ("Storages and samplers", ["asyncflow.transfer_queue.storage.base", "asyncflow.transfer_queue.sampler.base"]),
}
"""Modules, or classes of them, that a user's own code imports: contracts first."""
_AT_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def write(folder: Path) -> None:
    """Make the folder anew, with all pages of the site in it. Raises `SystemExit` naming those that are in no menu."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("site"))
    pages = {str(path.relative_to(folder)): (f"docs/{path.relative_to(folder)}", path.read_text()) for path in folder.rglob("*.md")}
    pages |= {page: (name, (ROOT / name).read_text()) for name, page in _AT_ROOT.items()}
    pages |= {"configuration.md": ("", configuration_page()), "recipes.md": ("", recipes_page())}
    pages["figures.md"] = ("README.md", figures_page())
    pages |= {f"api/{name}.md": ("", api_page(*of)) for name, of in API.items()}
    for page, (origin, text) in pages.items():
        (folder / page).parent.mkdir(exist_ok=True)
        (folder / page).write_text(linked(text, origin, page))
    menu = (ROOT / "zensical.toml").read_text()
    if left_out := sorted(page for page in pages if f'"{page}"' not in menu):
        raise SystemExit(f"in no menu of zensical.toml: {', '.join(left_out)}")


def linked(text: str, origin: str, page: str) -> str:
    """The text with its links leading to pages of the site. One to a file that is no page becomes the file's name.

    `origin` and `page`: where it is in the repository, and on the site.
    """

    def led(found: re.Match[str]) -> str:
        shown, target, anchor = found[1], found[2], found[3] or ""
        if target.startswith("http"):
            return found[0]
        name = os.path.normpath(Path(origin).parent / target)
        if name in _AT_ROOT:
            name = _AT_ROOT[name]
        elif name.startswith("docs/"):
            name = name.removeprefix("docs/")
        else:
            return shown if shown.startswith("`") else f"{shown} (`{name}`)"
        return f"[{shown}]({os.path.relpath(name, Path(page).parent)}{anchor})"

    return _LINK.sub(led, text)


def configuration_page() -> str:
    """Each section with its keys: type, default, meaning."""
    lines = [
        "# Configuration",
        "",
        "A configuration is YAML; any key can be set from the command line (`asyncflow train CONFIG key.path=value`).",
        "`--print-config` prints all of it, as it is used. A key that does not exist, or that contradicts another, is an error of",
        "one sentence. A part that is chosen by name (`algorithm`, `schedule`, `cluster`, `train.engine`, ...) is a name, or",
        "`{name: ..., option: value}`, or `{path: file.py:Name, option: value}`.",
    ]
    top = {name: field for name, field in Config.model_fields.items() if _section(field) is None}
    lines += ["", "## Choices", *_table(top, Config)]
    for name, field in Config.model_fields.items():
        if (section := _section(field)) is not None:
            lines += _section_lines(name, section)
    return "\n".join(lines) + "\n"


def _section_lines(name: str, section: type[Section], meaning: str | None = None) -> list[str]:
    keys = {key: field for key, field in section.model_fields.items() if _section(field) is None}
    about = " ".join((meaning or section.__doc__ or "").split())
    lines = ["", f"## `{name}`", *(["", about] if about else []), *_table(keys, section)]
    for key, field in section.model_fields.items():
        if (below := _section(field)) is not None:
            is_named = get_origin(field.annotation) is dict
            lines += _section_lines(f"{name}.{key}{'.NAME' * is_named}", below, field.description)
    return lines


def _table(fields: dict[str, FieldInfo], of: type[Section]) -> list[str]:
    lines = ["", "| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        default = "required" if field.is_required() else f"`{_shown(field.get_default(call_default_factory=True))}`"
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        lines.append(f"| `{name}` | {_type(field.annotation, field.metadata)} | {default} | {meaning} |")
    return lines


def _section(field: FieldInfo) -> type[Section] | None:
    """The section that a key stands for, or each of its names does."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def _shown(value: Any) -> str:
    """A default as YAML has it."""
    if isinstance(value, Choice):
        return value.name or ""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(list(value) if isinstance(value, tuple) else value)


def _type(annotation: Any, metadata: list[Any]) -> str:
    """A type in words: `int > 0`, `one of "a", "b"`, `float or null`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return _type(inner[0], [*annotation.__metadata__, *metadata])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(one, metadata if one is not type(None) else []) for one in inner)
    if origin is Literal:
        return "one of " + ", ".join(f"`{one}`" for one in inner)
    if annotation is type(None):
        return "null"
    if origin is not None:
        parts = ", ".join(_type(one, []) for one in inner if one is not Ellipsis)
        return f"{_WORDS.get(origin.__name__, origin.__name__)} of {parts}"
    name = getattr(annotation, "__name__", str(annotation))
    return _WORDS.get(name, name) + _bounds(metadata)


_WORDS = {"Choice": "part", "str": "text", "bool": "true or false", "Path": "path", "tuple": "list"}


def _bounds(metadata: list[Any]) -> str:
    bounds = []
    for one in metadata:
        inner = one.metadata if isinstance(one, FieldInfo) else [one]
        for each in inner:
            match each:
                case annotated_types.Gt(gt=value) if value != float("-inf"):
                    bounds.append(f" > {value}")
                case annotated_types.Ge(ge=value):
                    bounds.append(f" >= {value}")
                case annotated_types.Lt(lt=value) if value < 1 << 60:
                    bounds.append(f" < {value}")
                case annotated_types.Le(le=value):
                    bounds.append(f" <= {value}")
    return ",".join(bounds)


def recipes_page() -> str:
    """Each recipe as it is."""
    lines = ["# Recipes", "", "Configurations that run as they are; their first lines say how."]
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        lines += ["", f"## {path.relative_to(ROOT / 'recipes')}", "", "```yaml", path.read_text().rstrip(), "```"]
    return "\n".join(lines) + "\n"


def figures_page() -> str:
    """The README's table of figures as a page of its own."""
    _, head, rest = (ROOT / "README.md").read_text().partition("## Figures\n")
    if not head:
        raise SystemExit("README.md has no section Figures")
    return f"# Figures\n{rest.partition(chr(10) + '## ')[0]}\n"


def modules_page() -> str:
    """Every module of the package by room, with the first paragraph of its docstring. docs/modules.md is this text."""
    package = ROOT / "asyncflow"
    lines = [
        "# Modules",
        "",
        "Each file in a line, by room: the head of the file. `python docs/site/pages.py modules` writes this page again.",
    ]
    for folder in [package, *sorted(path.parent for path in package.rglob("*/__init__.py"))]:
        about = _head(folder / "__init__.py")
        lines += ["", f"## {folder.relative_to(ROOT)}/", *(["", about] if about else []), ""]
        files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
        lines += [f"* `{path.name}`: {_head(path)}" for path in files]
    return "\n".join(lines) + "\n"


def _head(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def api_page(title: str, modules: list[str]) -> str:
    """What mkdocstrings fills from the docstrings of these modules."""
    return "\n".join([f"# {title}", *(f"\n::: {module}" for module in modules)]) + "\n"


if __name__ == "__main__":
    if sys.argv[1] == "modules":
        (ROOT / "docs" / "modules.md").write_text(modules_page())
    else:
        write(Path(sys.argv[1]))
