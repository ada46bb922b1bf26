"""Every block of Python on a page is run by a test: here, or where `ELSEWHERE` says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock, create_autospec

import numpy as np
import pytest

from asyncflow.client import Client, ExperienceData, GeneratorWorker, GroupData, PromptsData, PromptToAnswer, TrainerWorker
from asyncflow.trainer import Trainer
from tests.conftest import ROOT

HERE = {"README.md": 1, "docs/agents.md": 2, "docs/service.md": 3}
ELSEWHERE = {
    "README.md": {"def score": "tests/unit/test_readme.py"},
    "docs/extending.md": {
        "class SAPO": "tests/e2e/test_algorithms.py",
        "class A2C": "tests/e2e/test_algorithms.py",
        "class SgdEngine": "tests/contract/test_entry_points.py",
        "class Longest": "tests/e2e/test_own_parts.py",
        "class Keeping": "tests/e2e/test_own_parts.py",
        "class Guess": "tests/unit/environments/test_extending.py",
    },
    "docs/python.md": {"class Printed": "tests/e2e/test_trainer.py"},
    "docs/transfer_queue.md": {"TransferQueue": "tests/unit/test_docs.py"},
}
"""Blocks by a part of them, and the tests that run them."""


def blocks(page: str) -> list[str]:
    found = re.findall(r"(?m)^( *)```python\n((?:.*\n)*?)\1```", (ROOT / page).read_text())
    return [re.sub(rf"(?m)^{indent}", "", text) for indent, text in found]


def block(page: str, part: str) -> str:
    return next(each for each in blocks(page) if part in each)


def test_no_block_of_any_page_is_left_out() -> None:
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        page = str(path.relative_to(ROOT))
        parts = ELSEWHERE.get(page, {})
        assert len(blocks(page)) == path.read_text().count("```python") == HERE.get(page, 0) + len(parts), page
        for part, test in parts.items():
            word = part.rpartition(" ")[2]
            source = (ROOT / test).read_text()
            assert block(page, part) and Path(page).name in source and word in source, test


def stepped(kind: type, maker: str, page: str, start: str, rewards: float, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a page's block with a stand-in for this class, made by its method `maker`, which makes one step with these rewards."""
    made = create_autospec(kind, instance=True)
    made.__enter__.return_value = made
    made.step.side_effect = [{"reward/mean": rewards}, None]
    monkeypatch.setattr(kind, maker, create_autospec(getattr(kind, maker), return_value=made))
    exec(block(page, start), {})
    return made


def test_the_trainer_of_the_readme_trains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stepped(Trainer, "from_config", "README.md", "Trainer", 0.25, monkeypatch)
    assert capsys.readouterr().out == "0.25\n"


def test_the_client_of_the_service_s_page_drives_a_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    client = stepped(Client, "connect", "docs/service.md", "Client.connect", 0.5, monkeypatch)
    assert capsys.readouterr().out == "0.5\n" and client.init_engines.called and client.stop.called


def test_the_generator_of_the_service_s_page_answers_and_changes_weights() -> None:
    client, worker = create_autospec(Client, instance=True), create_autospec(GeneratorWorker, instance=True)
    client.join_generators.return_value = worker
    sampling = {"temperature": 1.0, "max_new_tokens": 2, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "stop": []}
    asked = PromptToAnswer(rows=[4, 5], prompt_ids=[1], prompt="a", **sampling)
    worker.get_prompts_data.side_effect = [
        PromptsData(version=0, prompts=[asked], install=None, is_over=False),
        PromptsData(version=0, prompts=[], install=1, is_over=False),
        PromptsData(version=1, prompts=[], install=None, is_over=True),
    ]
    load, answers = Mock(), Mock(return_value=["an answer"])
    exec(block("docs/service.md", "join_generators"), {"client": client, "load": load, "answers": answers})
    answers.assert_called_once_with([asked])
    worker.put_experience_data.assert_called_once_with(["an answer"])
    worker.installed.assert_called_once_with(1)
    load.assert_called_once_with(worker.fetch_weights.return_value)


def test_the_trainer_of_the_service_s_page_publishes_what_it_made() -> None:
    client, worker = create_autospec(Client, instance=True), create_autospec(TrainerWorker, instance=True)
    client.join_trainers.return_value = worker
    none = np.zeros(0)
    group = GroupData(3, none, none, [], [], [], [], none, none)
    worker.get_experience_data.side_effect = [ExperienceData(0, [group], None), ExperienceData(0, [group], 7)]
    worker.publish.return_value = 1
    names: dict[str, Any] = {name: Mock() for name in ("client", "model", "loss_of", "update", "weights")} | {"client": client}
    exec(block("docs/service.md", "join_trainers"), {**names, "done": 0, "steps": 1})
    assert names["loss_of"].call_count == 2 and names["loss_of"].return_value.backward.call_count == 2
    names["update"].assert_called_once_with(names["model"], 7)
    worker.publish.assert_called_once_with(0, names["weights"])


def test_the_game_of_the_agents_page_is_played() -> None:
    names: dict[str, Any] = {}
    exec(block("docs/agents.md", "class Game"), names)
    game = names["Game"]()
    assert game.reset({}, 7) == "Guess a number below 100.\n" and 0 <= game.number < 100
    assert game.step(str(game.number - 1)) == (" higher\n", None, False, {})
    assert game.step(str(game.number)) == (None, 1.0, True, {})


async def test_the_program_of_the_agents_page_asks_and_is_rewarded(monkeypatch: pytest.MonkeyPatch) -> None:
    said = SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="It is 12."))])
    openai = Mock()
    create = openai.AsyncOpenAI.return_value.chat.completions.create = AsyncMock(return_value=said)
    monkeypatch.setitem(sys.modules, "openai", openai)
    names: dict[str, Any] = {}
    exec(block("docs/agents.md", "AsyncOpenAI"), names)
    assert await names["run"]({"question": "7 and 5?", "answer": "12"}, "http://127.0.0.1:1", "key") == 1.0
    openai.AsyncOpenAI.assert_called_once_with(base_url="http://127.0.0.1:1", api_key="key")
    assert create.await_args is not None and create.await_args.kwargs["messages"][0]["content"] == "7 and 5?"
