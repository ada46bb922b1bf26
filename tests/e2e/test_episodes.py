"""Runs whose rows are episodes, by real processes: what is kept and shown of them, and equal bits whatever the timing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.depth import deep
from tests.e2e.commands import rows, run_command, write_config

Small = Callable[..., dict[str, Any]]

# One to three turns, by the seed; answers and rewards depend on what was said.
GAME = """
class Game:
    def reset(self, example, seed):
        self.left = 1 + seed % 3
        return "Go.\\n"

    def step(self, action):
        self.left -= 1
        answer = f" {len(action)}\\n" if self.left else None
        return answer, float(len(action) % 2), not self.left, {"tool_calls": 1, "tool_failures": int(len(action) < 3)}

class Fragile(Game):
    def step(self, action):
        if len(action) % 3 == 0:
            raise RuntimeError("the board fell over")
        return super().step(action)
"""


def config_of(small: Small, tmp_path: Path, name: str = "Game", **changes: Any) -> Path:
    (tmp_path / "game.py").write_text(GAME)
    tree = small(
        environment=f"{tmp_path / 'game.py'}:{name}",
        episodes={"max_turns": 3, "max_turn_tokens": 24, "num_workers": 2},
        rollout={"num_slots": 8, "max_new_tokens": 96, "stop": ["a", "e", "i", "o", "."]},  # an untrained model ends few turns
        train={"prompts_per_step": 4, "accumulate": "exact", "warmup_steps": 0},
        **changes,
    )
    tree.pop("reward", None)
    return write_config(tmp_path, tree)


def test_a_run_of_episodes_keeps_and_shows_conversations(small: Small, tmp_path: Path) -> None:
    command = run_command(
        "train", config_of(small, tmp_path, run={"steps": 2}), "eval.path=null", "algorithm={name: grpo, credit: turn}"
    )
    assert command.returncode == 0, command.stdout + command.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    for row in rows(folder / "metrics.jsonl"):
        assert 1 < row["episode/turns/mean"] <= 3 and row["episode/turns/largest"] <= 3
        assert row["episode/tool_calls"] > row["episode/tool_failures"] >= 0 and row["episode/timeouts"] == 0
        assert row["episode/observed_tokens"] > 0 and row["episode/sampled_tokens"] > 0 and row["episode/environment_seconds"] > 0
    kept = rows(folder / "samples.jsonl")
    assert kept and all(line["turns"][0]["by"] == "environment" and line["turns"][0]["text"] == "Go.\n" for line in kept)
    assert all(len(turn["logprobs"]) == len(turn["tokens"]) for line in kept for turn in line["turns"] if turn["by"] == "policy")
    assert 'class="text turn environment"' in (folder / "report.html").read_text()


@deep
def test_an_environment_that_breaks_fails_its_rows_with_its_words(small: Small, tmp_path: Path) -> None:
    config = config_of(small, tmp_path, "Fragile", run={"steps": 1})
    command = run_command("train", config, "eval.path=null", "reward.max_failed_fraction=1.0")
    assert command.returncode == 0, command.stdout + command.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    (row,) = rows(folder / "metrics.jsonl")
    assert row["rows/dead"] > 0


@deep
@pytest.mark.parametrize("options", [(), ("episodes.num_parked=0",)], ids=["kept", "computed-again"])
def test_periodic_equals_synchronous(small: Small, tmp_path: Path, options: tuple[str, ...]) -> None:
    command = run_command("verify", config_of(small, tmp_path), "--steps", "3", *options)
    assert command.returncode == 0, command.stdout + command.stderr
    assert "EQUAL: synchronous and periodic gave the same bits in 3 steps" in command.stdout


# Two calls that begin anew: two sequences of a row, the second one a branch.
AGENT = """
import json, urllib.request

def run(example, base_url, api_key):
    reward = 0.0
    for prompt in ("7 + 5 = ", "9 - 1 = "):
        body = json.dumps({"model": "policy", "prompt": prompt, "max_tokens": 6}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{base_url}/completions", body, headers)) as answer:
            reward += len(json.load(answer)["choices"][0]["text"]) % 3
    return reward
"""


@deep
def test_rows_with_branches_are_trained_by_two_groups_of_ranks_to_the_bits_of_one(small: Small, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    weights = []
    for dp in (1, 2):
        folder = tmp_path / str(dp)
        folder.mkdir()
        config = config_of(small, folder, run={"steps": 2, "dir": str(folder / "runs")})
        environment = f"environment={{name: agent, run: '{tmp_path / 'agent.py'}:run', is_deterministic: true}}"
        command = run_command("train", config, "eval.path=null", environment, f"plan.train.dp={dp}")
        assert command.returncode == 0, command.stdout + command.stderr
        (run,) = (folder / "runs").iterdir()
        assert all(sum(turn["by"] == "policy" for turn in line["turns"]) == 2 for line in rows(run / "samples.jsonl"))
        weights.append((run / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
