"""A plan's settings are what a run takes, below what the command line says; mistakes are one sentence."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncflow.cli import plan as verb
from asyncflow.cli.plan import load_planned
from asyncflow.cli.verbs import app
from asyncflow.config import Config, load
from asyncflow.planner.plan import described, find_plan, request, settings, tree, why
from asyncflow.planner.search import Found
from asyncflow.settings import from_yaml, to_yaml
from asyncflow.types import UserError
from tests.conftest import ROOT

RECIPE = ROOT / "recipes/papers/qwen2.5-7b-gsm8k.yaml"
SMALL = ["train.prompts_per_step=8", "rollout.group_size=4", "train.responses_per_micro_batch=4"]


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the recipe names its shapes from there


def test_a_run_takes_the_plans_settings_and_the_command_line_goes_first(tmp_path: Path) -> None:
    async def planned() -> tuple[Found, dict]:
        asked = await request(load(RECIPE, SMALL), devices=4, device="h100-80gb")
        found = await find_plan(asked, processes=1, rows=200)
        return found, tree(found, asked)

    found, content = asyncio.run(planned())
    best = found.plans[0]
    (file := tmp_path / "plan.yaml").write_text(to_yaml(content))
    taken = load(RECIPE, [*SMALL, f"plan={file}"])
    assert settings(best) == content["settings"]
    assert taken.layout == best.config.layout
    assert taken.rollout == best.config.rollout
    assert taken.schedule == best.config.schedule
    assert taken.weight_sync == best.config.weight_sync
    assert taken.plan.predicted.step_seconds == pytest.approx(best.step_seconds, abs=1e-4)
    assert taken.plan.predicted.busy == pytest.approx(best.busy, abs=1e-3)
    assert load(RECIPE, ["rollout.num_slots=7", f"plan={file}", *SMALL]).rollout.num_slots == 7
    assert described(best) == content["plan"]
    assert why(found).count(". ") == 1 and best.bound.binds in why(found)  # two sentences
    assert all(value.rpartition(", ")[2] in ("analytic", "assumed") for value in content["costs"].values())


def test_the_verb_writes_a_plan_a_page_and_the_report_of_a_simulated_run(tmp_path: Path) -> None:
    given = [*SMALL, f"run.dir={tmp_path}", "schedule=synchronous"]
    result = CliRunner().invoke(app, ["plan", str(RECIPE), *given, "--devices", "4", "--hardware", "h100-80gb", "--top", "2"])
    assert result.exit_code == 0, result.output
    folder = tmp_path / "qwen2.5-7b-gsm8k-plan"
    assert "beaten in every cost" in result.output and "assumed:" in result.output
    assert from_yaml((folder / "plan.yaml").read_text())["predicted"]["step_seconds"] > 0
    page = (folder / "plan.html").read_text()
    assert "Pareto front" in page and 'href="predicted/report.html"' in page
    assert (folder / "predicted" / "report.html").is_file()
    assert load_planned(RECIPE, [*given, f"plan={folder / 'plan.yaml'}"]).layout.size < 4


@pytest.mark.parametrize("is_tried", [True, False])
def test_a_plan_that_is_tried_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_tried: bool) -> None:
    async def planned(config: Config, *asked: object) -> tuple[None, None]:
        folder = asked[-1]
        assert isinstance(folder, Path)
        folder.mkdir(exist_ok=True)
        (folder / "plan.yaml").write_text("settings: {rollout: {num_slots: 7}}")
        return None, None

    monkeypatch.setattr(verb, "_plan", planned)
    monkeypatch.setattr(verb, "_print", lambda *shown: None)
    config = load_planned(RECIPE, ["plan=auto", f"run.dir={tmp_path}"], is_tried=is_tried)
    assert config.rollout.num_slots == 7
    assert [path.name for path in tmp_path.iterdir()] == ([] if is_tried else ["qwen2.5-7b-gsm8k-plan"])


def test_a_plan_without_settings_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "other.yaml").write_text("run: {steps: 1}\n")
    with pytest.raises(UserError, match="has no settings, so it is no plan"):
        load(RECIPE, [f"plan={file}"])


def test_a_plan_given_as_keys_is_still_an_override() -> None:
    assert load(RECIPE, ["plan={train: {dp: 4, tp: 1}}"]).layout.dp == 4


def test_lengths_that_a_recipe_expects_are_no_assumption_of_ours() -> None:
    given = "plan.lengths={prompt: 104, response_median: 200, response_sigma: 0.5}"
    asked = asyncio.run(request(load(RECIPE, [given]), device="h100-80gb"))
    assert asked.model.lengths.prompt == 104
    assert "(plan.lengths)" in asked.assumptions[0]


def test_devices_without_a_name_are_asked_for() -> None:
    with pytest.raises(UserError, match="say what the devices are: --hardware NAME"):
        asyncio.run(request(load(RECIPE)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], "name the run's YAML file"), (["--from", "nowhere", "schedule=delayed"], "nowhere has no config.yaml")],
)
def test_the_verb_says_what_is_missing(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert isinstance(result.exception, UserError)
    assert said in str(result.exception)
