"""Other people's environments, each by its real package: what the policy reads, and rewards as the package itself gives them."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncflow.data.datasets import load_rows
from asyncflow.environments import ENVIRONMENTS
from asyncflow.environments.base import Action, TurnResult
from asyncflow.registry import build
from asyncflow.rewards import REWARDS
from asyncflow.rewards.base import Sample
from asyncflow.types import UserError
from tests.depth import few
from tests.environments.servers import echo_server

pytestmark = pytest.mark.smoke


def environment(name: str, **options: Any) -> Any:
    return build("environment", name, options, ENVIRONMENTS)


def text_of(words: Any) -> str:
    return "\n".join(str(message["content"]) for message in words)


# reasoning-gym


def test_reasoning_gym_rows_are_scored_by_their_task() -> None:
    """Over every task that the package has (in the gate: some): right answers, wrong ones, and what is partly right."""
    reasoning_gym = pytest.importorskip("reasoning_gym")
    scorer = build("reward", "reasoning_gym", {}, REWARDS)
    tasks = sorted(reasoning_gym.factory.DATASETS)
    assert len(tasks) > 90
    tasks = [task for task in tasks if task != "composite"]  # its options name others
    skipped = 0
    for task in random.Random(0).sample(tasks, few(12, len(tasks))):
        try:
            rows = load_rows(f"reasoning_gym:{task}", seed=5, split="train", limit=2)
        except UserError as error:  # a task with a package of its own
            skipped += 1
            assert task in str(error)
            continue
        own = reasoning_gym.create_dataset(task, seed=5, size=2)
        for index, row in enumerate(rows):
            assert row["question"] == own[index]["question"], task
            right = own[index]["answer"]
            for answer in ([] if right is None else [right]) + ["no answer", "", "12"]:  # None: a task knows no single one
                try:
                    expected = own.score_answer(answer=answer, entry=own[index])
                except Exception:
                    expected = 0.0  # a task that cannot read an answer: it is wrong
                sample = Sample(row["question"], f"I think <answer>{answer}</answer>", row, True)
                assert scorer(sample) == pytest.approx(expected), (task, answer)
    assert skipped <= 2


def test_reasoning_gym_tasks_take_turns_and_options_and_held_out_rows_are_others() -> None:
    pytest.importorskip("reasoning_gym")
    path = "reasoning_gym:chain_sum?min_terms=2&max_terms=2,leg_counting"
    rows = load_rows(path, seed=1, split="train", limit=6)
    assert [row["reasoning_gym"]["task"] for row in rows] == ["chain_sum", "leg_counting"] * 3
    assert all(row["question"].count("+") + row["question"].count("-") == 1 for row in rows[::2])
    assert load_rows(path, seed=1, split="train", limit=6) == rows
    held_out = load_rows(path, seed=1, split="heldout", limit=6)
    assert not {row["question"] for row in rows} & {row["question"] for row in held_out}
    for wrong, why in (("reasoning_gym:no_such", "no_such"), ("reasoning_gym:chain_sum?x=1", "'chain_sum' with")):
        with pytest.raises(UserError, match=why):
            load_rows(wrong, seed=1, split="train", limit=1)


# skyrl-gym


def test_skyrl_gym_rewards_are_the_environments_own() -> None:
    skyrl_gym = pytest.importorskip("skyrl_gym")
    row = {
        "prompt": [{"role": "user", "content": "1 + 1?"}],
        "reward_spec": {"ground_truth": "2"},
        "extra_info": {"max_turns": 3},
        "max_turns": 3,
    }
    turns = ["Let me see.", "It is #### 3", "It is #### 2"]
    ours = environment("skyrl_gym", env_class="gsm8k_multi_turn")
    extras = {name: value for name, value in row.items() if name != "prompt"}
    theirs = skyrl_gym.make("gsm8k_multi_turn", env_config={}, extras=extras)
    assert ours.reset(row, 0) is None
    theirs.init(row["prompt"])
    for turn in turns:
        outcome, out = ours.step(Action(turn)), theirs.step(turn)
        assert outcome.reward == out["reward"] and outcome.done == out["done"]
        assert (outcome.words or []) == out["observations"]
    assert outcome.done and outcome.reward == 1.0
    with pytest.raises(UserError, match="it has aime"):
        environment("skyrl_gym", env_class="no_such")


# textarena, and Gymnasium's interface


@pytest.mark.parametrize("seed", [0, 7])
def test_a_textarena_game_is_played_to_its_end(seed: int) -> None:
    """By halving: what the policy reads is enough, its own words do not come back, and the reward is the game's."""
    textarena = pytest.importorskip("textarena")
    ours = environment("textarena", game="GuessTheNumber-v0")
    theirs = textarena.make("GuessTheNumber-v0")
    theirs.reset(num_players=1, seed=seed)
    first = text_of(ours.reset({}, seed))
    assert "between 1 and 20" in first and first in theirs.get_observation()[1]
    low, high, outcome = 1, 20, TurnResult(None, None, False, {})
    while not outcome.done:
        guess = (low + high) // 2
        outcome = ours.step(Action(f"I say [{guess}]"))
        theirs_done, _ = theirs.step(f"I say [{guess}]")
        assert outcome.done == theirs_done
        if not outcome.done:
            said = text_of(outcome.words)
            assert "I say" not in said
            low, high = (guess + 1, high) if "higher" in said else (low, guess - 1)
    rewards, _ = theirs.close()
    assert outcome.reward == rewards[0] == 1.0
    with pytest.raises(UserError, match="no game"):
        environment("textarena", game="NoSuch-v0")


def test_gymnasiums_interface() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    ours = environment("gymnasium", env="FrozenLake-v1", is_slippery=False)
    theirs = gymnasium.make("FrozenLake-v1", is_slippery=False)
    observation, _ = theirs.reset(seed=3, options={})
    assert text_of(ours.reset({}, 3)) == str(observation)
    assert text_of(ours.step(Action("Left or right?")).words) == "An action is a number from 0 to 3."
    for move in (1, 1, 2, 2, 1, 2):
        outcome = ours.step(Action(f"Not 9, I go {move}"))
        observation, reward, terminated, truncated, _ = theirs.step(move)
        assert outcome.reward == reward and outcome.done == (terminated or truncated)
        assert outcome.done or text_of(outcome.words) == str(observation)
    assert outcome.done and outcome.reward == 1.0
    with pytest.raises(UserError, match="has no environment"):
        environment("gymnasium", env="NoSuch-v0")


# OpenEnv


@pytest.fixture
def echo_url() -> Iterator[str]:
    pytest.importorskip("openenv")
    with echo_server() as url:
        yield url


async def test_openenv_over_its_websocket(echo_url: str) -> None:
    from openenv.core import GenericEnvClient

    ours = environment("openenv", url=echo_url, observation_field="text")
    whole = environment("openenv", url=echo_url, action_field=None)
    theirs: Any = GenericEnvClient(base_url=echo_url)
    try:
        expected = await theirs.reset(seed=4)
        assert text_of(await ours.reset({}, 4)) == expected.observation["text"] == "Say something. Seed 4."
        for message in ("hello", "stop"):
            outcome, result = await ours.step(Action(message)), await theirs.step({"message": message})
            assert outcome.reward == result.reward and outcome.done == result.done
            assert outcome.done or text_of(outcome.words) == result.observation["text"]
        assert outcome.done
        assert '"text": "Say something. Seed 0."' in text_of(await whole.reset({}, 0))
        assert "An action is a JSON object" in text_of((await whole.step(Action("hello"))).words)
        assert (await whole.step(Action('{"message": "hello"}'))).reward == 0.5
    finally:
        await asyncio.gather(ours.close(), whole.close(), theirs.close())


# TRL


SHOP = '''
class Shop:
    """Apples are sold."""

    def reset(self, **row):
        self.sold = 0
        return "There are 5 apples."

    def sell(self, n: int) -> str:
        """Sell apples.

        Args:
            n: How many.
        """
        if n > 5 - self.sold:
            raise ValueError("not so many")
        self.sold += n
        return f"{self.sold} sold"

    def get_reward(self) -> float:
        return self.sold / 5
'''


async def test_an_environment_factory_gives_what_it_gives_trl(tmp_path: Path) -> None:
    """Its tools are the methods that TRL finds, with transformers' schema; its reward is the one that TRL reads."""
    pytest.importorskip("trl")
    from transformers.utils import get_json_schema

    (tmp_path / "shop.py").write_text(SHOP)
    ours = environment("trl", factory=f"{tmp_path / 'shop.py'}:Shop")
    names: dict[str, Any] = {}
    exec(SHOP, names)
    theirs = names["Shop"]()
    assert ours.tools == [get_json_schema(theirs.sell)]
    assert await ours.reset({}, 0) == theirs.reset()
    for n, is_sold in ((2, True), (9, False), (1, True)):
        outcome = await ours.step(Action(f'<tool_call>{{"name": "sell", "arguments": {{"n": {n}}}}}</tool_call>'))
        said = theirs.sell(n) if is_sold else "Error: ValueError: not so many"
        assert text_of(outcome.words) == said
    assert (await ours.step(Action("Done."))).reward == theirs.get_reward() == 0.6


# MCP


MCP_SERVER = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("numbers")

@server.tool()
def double(n: int) -> int:
    "Double a number."
    return 2 * n

@server.tool()
def fail() -> str:
    "Fail."
    raise ValueError("broken")

server.run("stdio")
"""


async def test_tools_of_an_mcp_server(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    script = tmp_path / "server.py"
    script.write_text(MCP_SERVER)
    ours = environment("tools", tools=["python"], mcp={"numbers": {"command": [sys.executable, str(script)]}})
    assert [each["function"]["name"] for each in ours.tools] == ["python", "double", "fail"]
    assert ours.tools[1]["function"]["parameters"]["properties"]["n"]["type"] == "integer"
    assert not ours.is_deterministic
    await ours.reset({}, 0)
    try:
        outcome = await asyncio.create_task(ours.step(Action('<tool_call>{"name": "double", "arguments": {"n": 21}}</tool_call>')))
        assert text_of(outcome.words) == "42"
        outcome = await ours.step(Action('<tool_call>{"name": "fail"}</tool_call>'))
        assert "broken" in text_of(outcome.words) and outcome.info["tool_failures"] == 1
        outcome = await ours.step(Action('<tool_call>{"name": "python", "arguments": {"code": "6 * 7"}}</tool_call>'))
        assert text_of(outcome.words) == "42\n"
        outcome = await ours.step(Action('<tool_call>{"name": "double", "arguments": {"n": 4}}</tool_call>'))
        assert text_of(outcome.words) == "8"  # the server outlives the program's walls
    finally:
        await asyncio.create_task(ours.close())
    with pytest.raises(UserError, match="either url or command"):
        environment("tools", mcp={"numbers": {}})
