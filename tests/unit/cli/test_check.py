"""`asyncflow check` says of each extra what it is for: what pyproject.toml declares, and what the package imports."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator

import pytest
from typer.main import get_command

from asyncflow.cli.check import EXTRAS, _extras, _machine
from asyncflow.cli.verbs import app
from asyncflow.cluster import CLUSTERS
from asyncflow.engines.rollout import ROLLOUT_ENGINES
from asyncflow.engines.rollout.vllm.process import IN_VLLM
from asyncflow.engines.train import TRAIN_ENGINES
from asyncflow.rewards import REWARDS
from asyncflow.transfer_queue import STORAGES
from asyncflow.weight_sync import network
from tests.conftest import ROOT
from tests.unit.test_docs import is_key

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {
    "pyyaml": "yaml",
    "huggingface-hub": "huggingface_hub",
    "prometheus-client": "prometheus_client",
    "math-verify": "math_verify",
    "mooncake-transfer-engine": "mooncake",
    "megatron-core": "megatron",
    "openenv-core": "openenv",
    "protobuf": "google",
    "reasoning-gym": "reasoning_gym",
    "skyrl-gym": "skyrl_gym",
}
"""What packages are imported as, where it is another name."""
OF_OTHERS = {
    "vllm": "where vLLM is, which may be another environment",
    "torch_npu": "where NPUs are",
    "mindspeed": "where NPUs are, for Megatron-Core",
    "pyarrow": "required by datasets",
    "sympy": "required by math-verify",
    "starlette": "required by fastapi",
}
"""What is imported, and is asked of nobody in pyproject.toml."""


LISTENERS = {
    "engines/rollout/vllm/transfer.py": "nccl",
    "engines/train/adapters/gathered.py": "ranks",
    "engines/train/parallel/ranks.py": "ranks",
    "environments/capture/endpoint.py": "agents",
    "transport/server.py": "network",  # by TLS; also where a key `listen` asks for it
    "weight_sync/group.py": "collective",
}
"""Files that listen on an address, and the word by which `asyncflow check` tells of it."""
LOADED_BY_NAME = {"httptools"}
"""What another package is told to use."""


def modules_of(requirements: list[str]) -> set[str]:
    names = [re.split(r"[<>=!~\[; ]", requirement)[0] for requirement in requirements]
    return {MODULES.get(name, name) for name in names}


def imported(tree: ast.Module) -> Iterator[str]:
    """The outermost modules that a file imports, by a statement or by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and re.search(r"(import_(module|probed)|package_module)$", ast.unparse(node.func)):
            name = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            if isinstance(name, ast.Constant):
                yield name.value.partition(".")[0]


def third_party() -> set[str]:
    files = (ROOT / "asyncflow").rglob("*.py")
    found = {name for file in files for name in imported(ast.parse(file.read_text()))}
    return found - set(sys.stdlib_module_names) - {"asyncflow", *(file.stem for file in IN_VLLM.glob("asyncflow_*.py"))}


def test_every_extra_is_listed_by_the_package_that_is_imported() -> None:
    extras = {name: modules_of(needed) for name, needed in PROJECT["optional-dependencies"].items() if name != "dev"}
    assert {name: modules_of([*packages]) for name, (packages, _) in EXTRAS.items()} == extras
    used = third_party()
    for name, modules in extras.items():
        assert modules <= used | LOADED_BY_NAME, name


KNOWN = {
    "cluster": CLUSTERS,
    "rollout.engine": ROLLOUT_ENGINES,
    "train.engine": TRAIN_ENGINES,
    "queue.storage": STORAGES,
    "reward.scorer": REWARDS,
}
VERBS = set(get_command(app).commands)  # type: ignore[attr-defined]


def strangers(purpose: str) -> list[str]:
    """What a purpose names by `(verb)`, `(key)` or `(key=choice)` and is not there."""
    named = re.findall(r"\((?:asyncflow )?([\w.]+(?:=\w+)?)\)", purpose)
    assert len(named) == 1, f"{purpose}: which key or verb is it for?"
    key, _, choice = named[0].partition("=")
    found = key in VERBS if "(asyncflow " in purpose else is_key(key) and (not choice or choice in KNOWN[key])
    return [] if found else named


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_for_a_key_that_is_there(extra: str) -> None:
    _, purpose = EXTRAS[extra]
    assert strangers(purpose) == [] and "nothing" not in purpose


def test_what_looks_for_strangers_finds_them() -> None:
    assert strangers("a run (asyncflow served)") == ["served"] and strangers("data (data.folder)") == ["data.folder"]
    assert strangers("rewards (reward.scorer=math)") == ["reward.scorer=math"]
    with pytest.raises(AssertionError, match="which key"):
        strangers("workers placed by Ray; nothing in this version uses it")


def test_what_is_imported_is_declared() -> None:
    extras = [needed for name, needed in PROJECT["optional-dependencies"].items() if name != "dev"]
    declared = modules_of([*PROJECT["dependencies"], *(one for needed in extras for one in needed)])
    assert third_party() - declared == OF_OTHERS.keys()


def test_a_missing_extra_is_told_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package != "ray":
            raise importlib.metadata.PackageNotFoundError
        return "2.60"

    monkeypatch.setattr("importlib.metadata.version", version)
    rows = dict(_extras())
    assert rows.keys() == EXTRAS.keys()
    assert rows["ray"].startswith("ray 2.60, for workers placed by Ray")
    assert rows["maths"].startswith("missing: pip install 'asyncflow-rl[maths]', for rewards")
    assert rows["service"].startswith("missing: pip install 'asyncflow-rl[service]', for a run")


def test_the_ports_of_a_run_are_told_truly() -> None:
    """A file of the package that listens is told of, or listens for a command of its own."""
    told = dict(_machine())["ports"]
    assert network.LISTEN.startswith("tls:127.0.0.1:")
    listens = re.compile(r"create_server\(|create_device\(|stay_on_loopback\(\)")
    files = {
        path.relative_to(ROOT / "asyncflow").as_posix()
        for path in (ROOT / "asyncflow").rglob("*.py")
        if listens.search(path.read_text())
    }
    assert files == LISTENERS.keys() and all(word in told for word in LISTENERS.values())
