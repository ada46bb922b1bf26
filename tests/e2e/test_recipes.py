"""Recipes over a real model, with a small random one in its place: they run as they are written, and score what they say."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncflow.trainer import Trainer

ROOT = Path(__file__).parents[2]
SMALL = [
    *("cluster=inline", "model.path=random:qwen2-tiny", "data.chat_template=false", "data.limit=16", "telemetry.trackers=[]"),
    *("rollout.num_workers=1", "rollout.num_slots=8", "rollout.group_size=4", "train.prompts_per_step=2", "eval.num_prompts=4"),
]


@pytest.mark.parametrize("recipe", ["smollm2", "lora"])
def test_a_recipe_over_a_real_model_runs_with_a_small_one_in_its_place(recipe: str, tmp_path: Path) -> None:
    with Trainer.from_config(ROOT / "recipes" / f"{recipe}.yaml", *SMALL, "run.steps=1", f"run.dir={tmp_path}") as trainer:
        metrics = trainer.step()
        assert metrics is not None and metrics["reward/mean"] >= 0 and "reward/failed" not in metrics
        assert trainer.step() is None
    assert [*(tmp_path / recipe / "model").glob("*model.safetensors")]


@pytest.mark.parametrize(
    ("response", "is_finished", "reward"),
    [
        ("22", True, 1.0),
        (" 22 ", True, 1.0),
        ("17 + 5 = 22", True, 0.5 + 1 / 11),
        ("22", False, 0.0),
        ("23", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_a_short_answer_is_worth_more_and_the_number_alone_all(response: str, is_finished: bool, reward: float) -> None:
    score = runpy.run_path(str(ROOT / "recipes" / "short_answer.py"))["score"]
    assert score(SimpleNamespace(response=response, example={"answer": "22"}, is_finished=is_finished)) == pytest.approx(reward)
