"""The documentation says what the code says."""

from __future__ import annotations

import ast
import functools
import inspect
import pkgutil
import re
import runpy
import subprocess
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from asyncflow.cli.verbs import app
from asyncflow.config import Config
from asyncflow.run.job import Listener
from asyncflow.settings import Section
from asyncflow.telemetry.metrics import definitions_table
from asyncflow.trainer import Trainer
from tests.conftest import ROOT
from tests.patience import patience

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OWN = {
    "my_reward.py",
    "my_rewards.py",
    "my_loss.py",
    "my_engine.py",
    "my_file.py",
    "my_sync.py",
    "keeping.py",
    "longest.py",
    "sapo.py",
    "file.py",
    "guess.py",
    "my_agent.py",
    "my_env.py",
    "my_tools.py",
    "NAME.py",
}
"""What pages call files of a reader's own."""
EARLIER = {"build.py": "0001-run-is-a-room.md"}
"""What a decision was made about, and is not there any more."""
SECTIONS = "|".join(Config.model_fields)


def test_metrics_page_is_the_definitions() -> None:
    assert definitions_table() in (ROOT / "docs" / "metrics.md").read_text()


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_queue_of_its_page_runs() -> None:
    source = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "transfer_queue.md").read_text(), re.DOTALL)[0]
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=patience(60))
    assert done.stdout == "[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]\n", done.stderr


def test_every_room_of_the_package_is_on_the_map() -> None:
    rooms = {path.name for path in (ROOT / "asyncflow").iterdir() if not path.name.startswith("_")}
    for page in ("README.md", "docs/architecture.md"):
        text = (ROOT / page).read_text()
        assert not [room for room in rooms if room not in text], page


def test_the_map_has_every_module_with_the_head_of_its_docstring() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "site" / "pages.py"))["modules_page"]()
    assert (ROOT / "docs" / "modules.md").read_text() == page, "python docs/site/pages.py modules"
    modules = [path for path in (ROOT / "asyncflow").rglob("*.py") if path.name != "__init__.py" and "project" not in path.parts]
    assert page.count("\n* `") == len(modules) and not re.findall(r"(?m)^\* `[^`]+`: *$", page)


def test_the_life_of_a_sample_names_calls_that_exist() -> None:
    import asyncflow.loops
    from asyncflow.algorithms.base import Algorithm
    from asyncflow.control.ledger import LedgerService
    from asyncflow.control.policy_versions import PolicyVersions
    from asyncflow.engines.base import RolloutEngine, TrainEngine
    from asyncflow.loops import algorithm1, rollout, rounds, taking
    from asyncflow.loops.admissions import Admissions
    from asyncflow.loops.context import ResponseScoring
    from asyncflow.transfer_queue.client import TransferQueueClient
    from asyncflow.transfer_queue.client_leases import ClientLeases
    from asyncflow.weight_sync.base import WeightReceiver, WeightSender

    called = [
        Admissions, Algorithm, ClientLeases, LedgerService, PolicyVersions, ResponseScoring, RolloutEngine, TrainEngine,
        TransferQueueClient, WeightReceiver, WeightSender,
    ]  # fmt: skip
    figure = str(asyncflow.loops.__doc__).split("call by call:")[1]
    calls = re.findall(r"\b([A-Z]\w+)\.(\w+)", figure)
    assert len(calls) > 20 and {name for name, _ in calls} == {each.__name__ for each in called}
    assert not [
        f"{each.__name__}.{call}" for each in called for name, call in calls if name == each.__name__ and not hasattr(each, call)
    ]
    loops = re.findall(r"(?m)^ {4,6}([A-Za-z]\w+) ", figure)
    assert len(loops) == 12 and all(
        any(hasattr(module, name) for module in (algorithm1, rollout, rounds, taking)) for name in loops
    )


def classes_of(room: Path) -> dict[str, bool]:
    """Classes of a room by name: whether they are more than a record, a message or a contract."""
    found = {}
    for file in room.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                kind = " ".join(map(ast.unparse, [*node.bases, *node.decorator_list]))
                found[node.name] = not re.search("Struct|Protocol|dataclass|Exception", kind)
    return found


def test_four_objects_hold_a_run_and_each_makes_the_parts_that_it_is_said_to_have() -> None:
    import asyncflow.run

    holding, beside = str(asyncflow.run.__doc__).split("Four objects hold a run.")[1].split("Beside them:")
    holders, parts = dict[str, list[str]](), list[str]()
    for indent, name in re.findall(r"(?m)^( {4}| {8})(\w+) {2,}\S", holding):
        if len(indent) == 4:
            holders[name] = parts = []
        else:
            parts.append(name)
    assert list(holders) == ["Job", "Attempt", "Running", "Driver"] and sum(map(len, holders.values())) > 14
    for holder, parts in holders.items():
        text = (ROOT / "asyncflow" / "run" / f"{holder.lower()}.py").read_text()
        assert not [part for part in parts if not re.search(rf"\b{part}\(", text)], f"{holder} does not make these"
    others = {name for names in re.findall(r"(?m)^ {4}(\w+(?:, \w+)*) ", beside) for name in names.split(", ")}
    named = {*holders, *(part for parts in holders.values() for part in parts), *others}
    assert not named - classes_of(ROOT / "asyncflow").keys()
    objects = {name for name, is_one in classes_of(ROOT / "asyncflow" / "run").items() if is_one and not name.startswith("_")}
    assert not objects - named, "asyncflow/run/__init__.py does not say how long these live"


def strangers(text: str) -> list[str]:
    """What stands in backticks and is neither a key of the configuration, a value after it or not, nor a file or a room."""
    named = re.findall(r"`([^`\n]+)`", text)
    assert named, "nothing is named: what is there to check?"
    there = list((ROOT / "asyncflow").rglob("*"))
    return [name for name in named if not is_key(name.partition(": ")[0]) and not any(path.match(name) for path in there)]


def test_what_is_not_there_yet_is_told_by_names_that_are_there() -> None:
    missing = (ROOT / "docs" / "architecture.md").read_text().split("## 6. Not there yet")[1].split("\n## ")[0]
    assert len(re.findall(r"(?m)^\* ", missing)) > 5 and strangers(missing) == []


def test_what_looks_for_strangers_finds_them() -> None:
    text = "`train.engine: outside`, `plan.train.tp`, `control/`, `control/modes.py`, `environment`"
    assert strangers(text) == [] and strangers("`train.lr: 1`, `sampler2/`, `winter.py`, `model.lora`") == [
        "train.lr: 1",
        "sampler2/",
        "winter.py",
    ]
    with pytest.raises(AssertionError, match="nothing is named"):
        strangers("Images.")


def configuration_keys(section: type[Section] = Config, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each key with its field; a part of the configuration is looked into."""
    for key, field in section.model_fields.items():
        inner = [kind for kind in (field.annotation, *typing.get_args(field.annotation)) if isinstance(kind, type)]
        below = [kind for kind in inner if issubclass(kind, Section)]
        if below:
            names = ".NAME" if typing.get_origin(field.annotation) is dict else ""
            yield from configuration_keys(below[0], f"{name}{key}{names}.")
        else:
            yield name + key, field


def test_every_key_of_the_configuration_says_what_it_means() -> None:
    assert not [key for key, field in configuration_keys() if not field.description]


def test_the_configurations_page_has_every_key_with_its_default() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "site" / "pages.py"))["configuration_page"]()
    for key, _ in configuration_keys():
        section, _, last = key.rpartition(".")
        part = page.split(f"## `{section}`\n" if section else "## Choices\n")[1].split("\n## ")[0]
        assert re.search(rf"(?m)^\| `{last}` \| .+ \| (required|`.*`) \| \S", part), key
    assert "| `group_size` | int >= 2 | `8` | Responses per prompt. |" in page


def pages() -> Any:
    return pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


@pages()
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    rooms = ("asyncflow", "benchmarks", "docs", "recipes", "tests")
    there = {path.name for room in rooms for path in (ROOT / room).rglob("*.py")}
    named = set(re.findall(r"\b\w+\.py\b", text)) - OWN - {name for name, of in EARLIER.items() if page.name == of}
    assert named <= there
    for path in set(re.findall(rf"(?<![\w/.-])(?:{'|'.join(rooms)})(?:/[\w.-]*\w)+", text)):
        assert Path(path).name in OWN or (ROOT / path).exists(), path


def mappings(text: str) -> Iterator[tuple[str, Any]]:
    """Sections of configurations that a page has in YAML: their names, and what is in them."""
    blocks = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
    for block in blocks.findall(text):
        yield from (item for tree in yaml.safe_load_all(block) for item in tree.items())
    text = blocks.sub("", text)
    for found in re.finditer(rf"(?:^ *|`|  )({SECTIONS}): (?=\{{)", text, re.MULTILINE):
        depth = 0
        for end in range(found.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if not depth:
                yield found[1], yaml.safe_load(text[found.end() : end + 1])
                break


def flat(prefix: str, tree: Any) -> Iterator[str]:
    """Keys of nested mappings, with dots."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from flat(f"{prefix}.{key}", value)
    else:
        yield prefix


def is_key(path: str) -> bool:
    """Whether a configuration has such a key. Below what is chosen by name, and in mappings of a user's own, any is one."""
    section: type[Section] | None = Config
    for part in path.split("."):
        fields = section.model_fields if section is not None else {}
        field = fields.get(part) or (fields.get("name") if part == "path" else None)  # a choice by name is one by path, too
        if field is None:
            return False
        kinds = {field.annotation, *typing.get_args(field.annotation)}
        if any("Choice" in str(kind) or str(kind).startswith("dict") for kind in kinds):
            return True
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
    return True


@pages()
def test_keys_of_a_configuration_that_are_named_exist(page: Path) -> None:
    blocks = r"```(\w*)\n(.*?)```"
    text = re.sub(blocks, lambda found: "" if found[1] == "python" else found[0], page.read_text(), flags=re.DOTALL)
    if page.name == "coming_from.md":  # its first columns have other projects' names
        text = re.sub(r"(?m)^\|.*\|([^|]*)\|$", r"\1", text)
    named = set(re.findall(rf"(?<![\w./`-])`?((?:{SECTIONS})(?:\.[a-z_]+)+)\b(?!\()", text))
    named -= {path for path in named if path.endswith((".py", ".md", ".pem", ".json", ".yaml", ".safetensors", ".html", ".jsonl"))}
    named |= {path for name, tree in mappings(text) for path in flat(name, tree)}
    assert not [path for path in sorted(named) if not is_key(path)]


def test_what_looks_for_keys_finds_them() -> None:
    text = "`rollout.engine` and\n    plan: {train: {dp: 2}}\n```yaml\neval: {every_step: 3}\n```"
    assert [path for name, tree in mappings(text) for path in flat(name, tree)] == ["eval.every_step", "plan.train.dp"]
    known = ("plan.train.dp", "rollout.engine.instances", "train.critic.learning_rate", "reward.scorers.mine.weight", "eval.path")
    assert all(map(is_key, known)) and not any(map(is_key, ("eval.every_step", "train.lr", "plan.train.dp.size", "plan.rollout")))


@functools.cache
def members() -> dict[str, set[str]]:
    """What each class of the package has, its bases' included: methods, fields, and attributes that a method sets."""
    own: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for file in (ROOT / "asyncflow").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            names = own.setdefault(node.name, set())
            bases.setdefault(node.name, set()).update(ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases)
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(inner.name)
                elif isinstance(inner, ast.Name | ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    names.add(inner.id if isinstance(inner, ast.Name) else inner.attr)

    def all_of(name: str) -> set[str]:
        return own[name].union(*(all_of(base) for base in bases[name] if base in own and base != name))

    return {name: all_of(name) for name in own}


CALLED = {
    "client": ["AsyncClient", "TransferQueueClient"],
    "worker": ["AsyncGeneratorWorker", "AsyncTrainerWorker"],
    "work": ["PromptsData"],
    "experience": ["ExperienceData"],
    "trainer": ["Trainer"],
    "sample": ["Sample"],
    "group": ["ScoredGroup", "GroupData", "ReadyGroup"],
}
"""Classes that variables of these names have on the pages."""
FOREIGN = {
    *("auth_token", "big_memory", "dashboard", "RAY_USE_TLS"),  # Ray's
    *("gpu_memory_utilization", "max_num_batched_tokens"),  # vLLM's
    *("from_pretrained", "AutoModelForCausalLM", "PeftModel", "pipelining", "Q4_K_M", "UV_DEFAULT_INDEX", "chat", "py"),
    *("get_checkpoint_archive_url", "inflight", "stable_reinforce"),  # the tinker SDK's
    *("MySync", "my_loss", "my_sync", "gb", "critic_", "value_", "reference_"),  # a reader's own, units, prefixes
}
"""Names of other projects, and of a reader's own."""


def unknown_names(text: str) -> list[str]:
    """`Class.name` and `variable.name` of a page that the package does not have."""
    pairs = re.findall(rf"(?<![\w./-])([A-Z]\w*[a-z]\w*|{'|'.join(CALLED)})\.([a-z_]\w*)", text)
    return [
        f"{name}.{member}"
        for name, member in pairs
        if not {name, member} & FOREIGN and not any(member in members().get(each, ()) for each in CALLED.get(name, [name]))
    ]


@functools.cache
def words_of_the_source() -> set[str]:
    """All identifiers of the repository's code, and the names of its files."""
    files = [path for room in ("asyncflow", "benchmarks", "recipes", "tests") for path in (ROOT / room).rglob("*")]
    files = [path for path in [*files, ROOT / "pyproject.toml", ROOT / "Makefile"] if path.is_file() and path != Path(__file__)]
    texts = [path.read_text(errors="ignore") for path in files if path.suffix not in (".pyc", ".safetensors")]
    return {path.stem for path in files}.union(*(re.findall(r"\w+", text) for text in texts))


@pages()
def test_names_of_the_code_exist(page: Path) -> None:
    text = page.read_text()
    if page.name == "coming_from.md":  # its first columns have other projects' names
        text = re.sub(r"(?m)^\|.*\|([^|]*)\|$", r"\1", text)
    assert not unknown_names(text)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    named = {word for span in spans for word in re.findall(r"[A-Za-z_]\w*", span) if not re.fullmatch(r"[A-Z_]+", word)}
    assert not named - words_of_the_source() - entry_points() - FOREIGN


def test_what_looks_for_names_finds_them() -> None:
    text = "`Trainer.push`, client.create_key(), worker.ack(rows), `ScoredGroup.value`; Trainer.step, group.rewards, trainer.py"
    assert unknown_names(text) == ["Trainer.push", "client.create_key", "worker.ack", "ScoredGroup.value"]
    assert "create_key" not in words_of_the_source() and "group_size" in words_of_the_source()


@functools.cache
def entry_points() -> set[str]:
    """Last parts of the groups in which packages may give parts: one for each kind of choice that the code builds."""
    kinds = r"\b(?:build|resolve|check_options|load|load_target)\(\s*f?\"([a-z ]+)\""
    found = {kind for path in (ROOT / "asyncflow").rglob("*.py") for kind in re.findall(kinds, path.read_text())}
    return {f"{kind.replace(' ', '_')}s" for kind in found}


def test_groups_of_entry_points_that_are_named_are_those_of_choices() -> None:
    named = set(re.findall(r"`asyncflow\.(\w+)`", (ROOT / "docs" / "extending.md").read_text()))
    assert len(named) == 12 and named <= entry_points()


def test_a_class_has_the_arrays_that_its_page_says() -> None:
    import asyncflow.engines.base
    import asyncflow.environments.base
    import asyncflow.rewards.base
    import asyncflow.types

    rooms = (asyncflow.types, asyncflow.engines.base, asyncflow.rewards.base, asyncflow.environments.base)
    table = (ROOT / "docs" / "extending.md").read_text().split("## Numpy or torch")[1].split("\n## ")[0]
    rows = re.findall(r"(?m)^\| (`.+?) \| (\w+)(, `Ragged`)? \|", table)
    assert len(rows) == 8
    for names, kind, ragged in rows:
        for name in re.findall(r"`(\w+)`", names):
            source = inspect.getsource(next(getattr(room, name) for room in rooms if hasattr(room, name)))
            code = re.sub(r'""".*?"""', "", source, flags=re.DOTALL)
            has = {
                "numpy": "Array" in code or "Values" in code,
                "torch": "Tensor" in code,
                "none": not re.search("Array|Tensor", code),
            }
            assert has[kind] and not (kind == "numpy" and has["torch"]), name
            assert bool(ragged) == ("Ragged" in code or "Values" in code), name


def test_pages_of_the_python_api_are_of_what_there_is() -> None:
    api = runpy.run_path(str(ROOT / "docs" / "site" / "pages.py"))["API"]
    assert all(pkgutil.resolve_name(name) for _, names in api.values() for name in names)
    page = (ROOT / "docs" / "python.md").read_text()
    public = {name for name, of in vars(Trainer).items() if callable(getattr(of, "__func__", of)) and not name.startswith("_")}
    assert not [name for name in public if f"`{name}" not in page and f"`Trainer.{name}" not in page and f"{name}()" not in page]
    assert not [name for name in vars(Listener) if not name.startswith("_") and f".{name}`" not in page]


@pages()
def test_options_of_commands_that_are_named_exist(page: Path) -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for line in re.findall(rf"asyncflow (?:{'|'.join(commands)})\b[^`\n]*", page.read_text()):
        _, *names = line.split()
        command = commands[names[0]]
        command = getattr(command, "commands", {}).get([*names, ""][1], command)
        options = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", line)) <= options, line
