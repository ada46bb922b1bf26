"""The check of import layers (`make layers`) sees the whole package; classes have names of their own; constructors have few
arguments; the loops know of no algorithm, by import or by name; what evaluates text is imported by reward processes alone."""

import ast
import re
from collections.abc import Iterator

from asyncflow.algorithms import ALGORITHMS
from asyncflow.rewards import REWARDS
from tests.conftest import ROOT

EVALUATING = r"(?:sympy|math_verify|latex2sympy2?)(?:[._]|$)"
"""Packages that read a text by evaluating it."""
OF_REWARD_PROCESSES = r"asyncflow\.rewards\.(?:maths|worker)"
"""Modules that run in reward processes alone."""


def test_every_folder_of_modules_is_a_package() -> None:
    """One without `__init__.py` can be imported, and is left out of the check."""
    folders = {path.parent for path in (ROOT / "asyncflow").rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def type_names(tree: ast.Module) -> Iterator[str]:
    """Names of a file's classes, and of the aliases and type variables at its top (`Name = ...`), without leading underscores."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_")
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        named = [each.id.lstrip("_") for each in targets if isinstance(each, ast.Name)]
        yield from (name for name in named if name[:1].isupper() and not name.isupper())


def test_every_type_has_a_name_of_its_own() -> None:
    """In the whole package: who searches for a class or for an alias finds one. An underscore in front makes no other name."""
    planted = "class _Span: ...\nSpan = int | str\n_Row: TypeAlias = dict\nLIMIT = 3\nspan = Span()\nT = TypeVar('T')"
    assert [*type_names(ast.parse(planted))] == ["Span", "Span", "Row"]
    files: dict[str, list[str]] = {}
    for file in sorted((ROOT / "asyncflow").rglob("*.py")):
        for name in type_names(ast.parse(file.read_text())):
            files.setdefault(name, []).append(file.name)
    assert len(files) > 400 and {name: where for name, where in files.items() if len(where) > 1} == {}


def test_what_a_text_names_to_be_imported_is_there() -> None:
    """`"asyncflow.module:Name"`, as a registry has it: no import says that one has moved, nor do types."""
    named = re.compile(r"""["'](asyncflow(?:\.\w+)+):(\w+)["']""")
    found = {match for file in (ROOT / "asyncflow").rglob("*.py") for match in named.findall(file.read_text())}
    assert len(found) > 70 and [name for name in sorted(found) if name[1] not in at_top(name[0])] == []


def at_top(module: str) -> set[str]:
    """Names at the top of a module; none where there is no such module."""
    place = ROOT.joinpath(*module.split("."))
    file = place.with_suffix(".py") if place.with_suffix(".py").exists() else place / "__init__.py"
    found = set[str]()
    for node in ast.parse(file.read_text()).body if file.exists() else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    return found


def changes_itself(made: ast.ClassDef) -> bool:
    """Whether a method of a class sets one of its attributes, or what one of them holds."""
    set_in_methods = [
        node.value
        for each in made.body
        if isinstance(each, ast.FunctionDef)
        for node in ast.walk(each)
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
    ]
    return any("self" in {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} for node in set_in_methods)


def test_no_constructor_has_many_arguments() -> None:
    """Of those that are written out, and of dataclasses whose methods change them. A record has the fields that it needs."""
    counts: dict[str, int] = {}
    changing = []
    for file in sorted((ROOT / "asyncflow").rglob("*.py")):
        for made in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)):
            for each in made.body:
                if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                    named = [*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs]
                    counts[made.name] = len(named) - 1  # itself
            if any("dataclass" in ast.unparse(each) for each in made.decorator_list) and changes_itself(made):
                changing.append(made.name)
                fields = [each for each in made.body if isinstance(each, ast.AnnAssign)]
                counts[made.name] = sum("init=False" not in ast.unparse(each) for each in fields)
    assert {"StepState", "UpdateProgress", "Computation"} < {*changing}
    assert len(counts) > 300 and {name: count for name, count in counts.items() if count > 7} == {}


def test_no_file_of_the_loops_names_an_algorithm() -> None:
    """What one asks of the dataflow it says itself, by the contract in `algorithms/base.py`: not even a comment is about one."""
    names = "|".join([*ALGORITHMS, *(target.rpartition(":")[2] for target in ALGORITHMS.values())])
    named = re.compile(rf"(?<![a-z])(?:{names})(?![a-z])|asyncflow\.algorithms(?!\.base import)", re.IGNORECASE)
    assert all(
        named.search(text) for text in ("if name == 'ppo':", "isinstance(it, DrGRPO)", "import asyncflow.algorithms.surrogate")
    )
    assert not named.search("from asyncflow.algorithms.base import Algorithm  # which all support")
    files = sorted(file for room in ("control", "loops") for file in (ROOT / "asyncflow" / room).rglob("*.py"))
    assert files and [(file.name, found[0]) for file in files if (found := named.search(file.read_text()))] == []


def said(tree: ast.Module) -> Iterator[str]:
    """What a file imports, by its whole name; and its texts, which may be names of modules, but for its documentation."""
    documentation = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


def test_no_text_is_evaluated_outside_of_reward_processes() -> None:
    """What a model wrote reaches no parser that evaluates, neither in the trainer nor in a rollout worker nor in the driver, except
    for the tool that runs programs, in a process of its own: see docs/rewards.md. Here is who could; that a run's process has not
    done so is seen in tests/e2e/test_rewards.py."""
    evaluating, of_processes, calls = set(), set(), []
    files = sorted((ROOT / "asyncflow").rglob("*.py"))
    for file in files:
        name, tree = file.relative_to(ROOT / "asyncflow").as_posix(), ast.parse(file.read_text())
        texts = [*said(tree)]
        evaluating |= {name for text in texts if re.match(EVALUATING, text)}
        of_processes |= {(name, text) for text in texts if re.match(OF_REWARD_PROCESSES, text)}
        called = [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        calls += [(name, function) for function in called if function in ("eval", "exec")]
    assert {name for name, _ in calls} == {"environments/python_tool.py"}
    assert evaluating and all(re.fullmatch(r"rewards/maths\w*\.py", name) for name in evaluating)
    elsewhere = {(name, text) for name, text in of_processes if not re.fullmatch(r"rewards/maths\w*\.py", name)}
    assert elsewhere == {("rewards/__init__.py", REWARDS["maths"]), ("rewards/pool.py", "asyncflow.rewards.worker")}
    assert [*said(ast.parse("import sympy as s\nfrom asyncflow.rewards import maths\n'not this'\nf('math_verify')"))] == [
        "sympy", "asyncflow.rewards.maths", "math_verify",
    ]  # fmt: skip
