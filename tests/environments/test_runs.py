"""Whole runs over other people's environments by their recipes: each row's reward is what the package gives the same transcript."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.environments.base import seed_of
from asyncflow.environments.tool_calls import calls_in
from tests.chat_families import FAMILIES, save_model
from tests.conftest import ROOT
from tests.e2e.commands import rows, run_command
from tests.environments.servers import echo_server
from tests.environments.test_agents import TASKSET

SMALL = (
    "run.steps=1", "rollout.group_size=2", "rollout.num_slots=4", "rollout.max_new_tokens=700", "train.prompts_per_step=2",
    "cluster=inline", "episodes.max_turn_tokens=12", "telemetry.samples_per_step=64", "train.learning_rate=1e-4",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(FAMILIES[0], tmp_path_factory.mktemp("model"))


def run(recipe: str, model: Path, folder: Path, *overrides: str, **environment: str) -> list[dict[str, Any]]:
    """Episodes of a run of one step."""
    done = run_command(
        "train", ROOT / "recipes" / "environments" / f"{recipe}.yaml", f"model.path={model}", f"run.dir={folder}", *SMALL,
        *overrides, **environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    kept = [row for row in rows(next(folder.glob("*/samples.jsonl"))) if row["purpose"] == "train"]
    first = {row["group"]: row for row in kept}
    assert len(first) == 2, done.stdout + done.stderr  # one response of each prompt, and all of the first
    return [*first.values()]


def said_in(row: dict[str, Any], tokenizer: CheckpointTokenizer) -> Iterator[str]:
    """The policy's turns, as its environment was told of them."""
    for turn in row["turns"]:
        if turn["by"] == "policy":
            ids = turn["tokens"][:-1] if turn["tokens"][-1] in tokenizer.end_token_ids else turn["tokens"]
            yield tokenizer.decode_all(np.array(ids, np.int64))


def by_package(rows: list[dict[str, Any]], model: Path, evaluate: Callable[[dict[str, Any], list[str]], float]) -> None:
    """Compare rewards with the package's own evaluation of the transcripts."""
    tokenizer = CheckpointTokenizer(model)
    for row in rows:
        assert row["reward"] == pytest.approx(evaluate(row, [*said_in(row, tokenizer)])), row


def test_skyrl_gym(model: Path, tmp_path: Path) -> None:
    skyrl_gym = pytest.importorskip("skyrl_gym")
    data = {row["prompt"][0]["content"]: row for row in rows(ROOT / "recipes" / "environments" / "skyrl_gym.jsonl")}

    def evaluate(row: dict[str, Any], turns: list[str]) -> float:
        example = next(each for question, each in data.items() if question in row["prompt"])
        extras = {name: value for name, value in example.items() if name != "prompt"}
        environment = skyrl_gym.make("gsm8k_multi_turn", env_config={}, extras=extras)
        environment.init(example["prompt"])
        return sum(environment.step(turn)["reward"] for turn in turns)

    by_package(run("skyrl_gym", model, tmp_path), model, evaluate)


def test_textarena(model: Path, tmp_path: Path) -> None:
    textarena = pytest.importorskip("textarena")

    def evaluate(row: dict[str, Any], turns: list[str]) -> float:
        game = textarena.make("GuessTheNumber-v0-raw")
        game.reset(num_players=1, seed=seed_of(0, row["row"] >> 1))
        for turn in turns:
            done, _ = game.step(turn)
        return float(game.close()[0][0]) if done else 0.0

    episodes = run("textarena", model, tmp_path)
    by_package(episodes, model, evaluate)
    assert all("between 1 and 20" in row["turns"][0]["text"] for row in episodes)


def test_openenv(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("openenv")
    with echo_server() as url:
        episodes = run("openenv", model, tmp_path, f"environment.url={url}")
    by_package(episodes, model, lambda row, turns: sum(len(turn) / 10 for turn in turns))


def test_trl(model: Path, tmp_path: Path) -> None:
    data = {row["prompt"]: row for row in rows(ROOT / "recipes" / "environments" / "trl.jsonl")}
    names: dict[str, Any] = {}
    exec((ROOT / "recipes" / "environments" / "trl_shop.py").read_text(), names)

    def evaluate(row: dict[str, Any], turns: list[str]) -> float:
        shop = names["Shop"]()
        shop.reset(**next(each for question, each in data.items() if question in row["prompt"]))
        return shop.get_reward() if not calls_in(turns[-1]) else 0.0

    episodes = run("trl", model, tmp_path)
    by_package(episodes, model, evaluate)
    assert all('"name": "sell"' in row["prompt"] for row in episodes)  # the template tells of the tool


def test_reasoning_gym(model: Path, tmp_path: Path) -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    done = run_command(
        "train", ROOT / "recipes" / "environments" / "reasoning_gym.yaml", f"model.path={model}", f"run.dir={tmp_path}",
        *(each for each in SMALL if "episodes" not in each), "eval.path=null", "data.limit=8",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    sets = {
        "chain_sum": reasoning_gym.create_dataset("chain_sum", seed=0, size=8, min_terms=2, max_terms=3),
        "leg_counting": reasoning_gym.create_dataset("leg_counting", seed=0, size=8),
    }
    kept = rows(tmp_path / "reasoning-gym" / "samples.jsonl")
    assert kept
    for row in kept:
        entry, own = next((entry, own) for own in sets.values() for entry in own if entry["question"] in row["prompt"])
        answer = reasoning_gym.utils.extract_answer(row["response"])
        expected = own.score_answer(answer=row["response"].strip() if answer is None else answer, entry=entry)
        assert row["reward"] == pytest.approx(expected)


@pytest.mark.smoke
def test_an_agent_with_the_openai_sdk(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    episodes = run("agent", model, tmp_path)
    assert all(row["reward"] in (0.0, 1.0) and row["turns"] for row in episodes)


def test_verifiers(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("verifiers")
    (tmp_path / "sums_for_run.py").write_text(TASKSET)
    paths = {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    episodes = run("verifiers", model, tmp_path, "environment.taskset=sums_for_run", **paths)
    by_package(episodes, model, lambda row, turns: 0.5 * ("4" in turns[-1]) + 1 / len(turns[-1].strip() or " "))
