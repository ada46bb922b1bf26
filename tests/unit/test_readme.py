"""What the README tells people to type works."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from typer.main import get_command

from asyncflow.cli.verbs import app
from asyncflow.config import load
from asyncflow.registry import load as load_target
from asyncflow.rewards.base import Sample
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return [re.sub(r"(?m)^  ", "", text) for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)]


def test_the_reward_of_the_readme_scores(tmp_path: Path) -> None:
    source = next(block for block in blocks("python") if "def score" in block)
    (tmp_path / "my_reward.py").write_text(source)
    score = load_target("reward", f"{tmp_path / 'my_reward.py'}:score")
    assert [score(Sample("q", text, {"answer": "9"}, True)) for text in ("it is 9", "it is 8")] == [1.0, 0.0]


def test_the_trainer_of_the_readme_is_the_one_there_is() -> None:
    source = next(block for block in blocks("python") if "Trainer" in block)
    compile(source, "README.md", "exec")
    config, *overrides = re.findall(r'"([^"]+)"', source.split("from_config(")[1].split(")")[0])
    assert load(ROOT / config, overrides).run.steps == 5


def test_commands_options_and_targets_exist() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert set(re.findall(r"`asyncflow (\w+)", README)) == set(commands)
    options = {name for parameter in commands["train"].params for name in parameter.opts}
    assert set(re.findall(r"\[(--[\w-]+)\]", README)) <= options
    targets = set(re.findall(r"(?m)^(\w+):", (ROOT / "Makefile").read_text()))
    assert set(re.findall(r"(?m)^make (\w+)", README)) <= targets


def test_recipes_are_configurations() -> None:
    recipes = list((ROOT / "recipes").glob("*.yaml"))
    assert len(recipes) >= 2
    for recipe in recipes:
        assert load(recipe).run.name == yaml.safe_load(recipe.read_text())["run"]["name"]


def test_benchmarks_that_the_readme_names_exist() -> None:
    for name in set(re.findall(r"`(\w+\.py)`", README.split("## Figures")[1].split("## The map")[0])):
        assert (ROOT / "benchmarks" / name).is_file(), name
