"""`asyncflow init` and `asyncflow quickstart`: what they leave runs as it is. That a wheel has all of it: `make wheel`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncflow.cli.init import NUM_EXAMPLES, NUM_HELD_OUT
from asyncflow.cli.quickstart import shipped_folder, shipped_model
from asyncflow.run_dir import CONFIG_FILE
from tests.conftest import MODEL, ROOT
from tests.e2e.commands import run_command


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    made = run_command("init", "work/my-project")
    assert made.returncode == 0, made.stderr
    assert "asyncflow train recipe.yaml" in made.stdout
    return tmp_path / "work" / "my-project"


def test_its_recipe_trains_over_all_of_its_data(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    checked = run_command("train", "recipe.yaml", "--dry-run")
    assert checked.returncode == 0, checked.stderr
    assert f"{NUM_EXAMPLES} prompts to train on, 128 held out" in checked.stdout
    assert len((project / "heldout.jsonl").read_text().splitlines()) == NUM_HELD_OUT
    trained = run_command("train", "recipe.yaml", "run.steps=1", "eval.path=null", "train.prompts_per_step=4")
    assert trained.returncode == 0, trained.stderr
    assert (project / "runs" / "first" / "model" / "config.json").is_file()


def test_its_reward_passes_its_test_and_a_reward_that_gives_all_of_them_1_does_not(project: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_reward.py"]
    assert subprocess.run(command, cwd=project, check=False, capture_output=True).returncode == 0
    (project / "reward.py").write_text("def score(sample):\n    return 1.0\n")
    assert subprocess.run(command, cwd=project, check=False, capture_output=True).returncode == 1


def test_what_is_there_already_is_left_alone(project: Path) -> None:
    before = (project / "recipe.yaml").read_bytes()
    again = run_command("init", project)
    assert again.returncode == 2 and "is there already" in again.stderr
    assert (project / "recipe.yaml").read_bytes() == before
    (project / "file").touch()
    assert run_command("init", project / "file").returncode == 2


def test_the_quickstart_is_the_recipe_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shipped_folder() == ROOT / "recipes" and shipped_model() == MODEL
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second one replaces the first one's run
        trained = run_command("quickstart", "run.steps=1", "eval.path=null", "train.prompts_per_step=4", "rollout.group_size=2")
        assert trained.returncode == 0, trained.stderr
        assert "step 1/1" in trained.stdout
    assert f"path: {MODEL}" in (tmp_path / "runs" / "quickstart" / CONFIG_FILE).read_text()
