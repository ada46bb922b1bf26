"""Adapters of other people's environments over stand-ins of their packages. With the packages: tests/environments."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest

from asyncflow.data.datasets import load_rows
from asyncflow.environments import ENVIRONMENTS
from asyncflow.environments.base import Action
from asyncflow.registry import build
from asyncflow.rewards import REWARDS
from asyncflow.rewards.base import Sample
from asyncflow.types import UserError
from tests.patience import patience

Install = Callable[..., ModuleType]
Config = TypeVar("Config")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a module where imports find it, and those that it is in."""

    def put(name: str, **names: Any) -> ModuleType:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            path = ".".join(parts[:count])
            monkeypatch.setitem(sys.modules, path, sys.modules.get(path) or ModuleType(path))
        module = sys.modules[name]
        for key, value in names.items():
            monkeypatch.setattr(module, key, value, raising=False)
        return module

    return put


def environment(name: str, **options: Any) -> Any:
    return build("environment", name, options, ENVIRONMENTS)


def said(words: Any) -> list[str]:
    return [str(message["content"]) for message in words]


@pytest.mark.parametrize(
    ("module", "make", "package"),
    [
        ("gymnasium", lambda: environment("gymnasium", env="Taxi-v3"), "gymnasium"),
        ("openenv.core", lambda: environment("openenv", url="http://127.0.0.1:1"), "openenv-core"),
        ("skyrl_gym", lambda: environment("skyrl_gym", env_class="gsm8k"), "skyrl-gym"),
        ("textarena", lambda: environment("textarena", game="Chess-v0"), "textarena"),
        ("verifiers.v1.utils.loaders", lambda: environment("verifiers", taskset="gsm8k"), "verifiers"),
        ("mcp", lambda: environment("tools", mcp={"files": {"url": "http://127.0.0.1:1/mcp"}}), r"'asyncflow-rl\[mcp\]'"),
        ("reasoning_gym", lambda: build("reward", "reasoning_gym", {}, REWARDS), "reasoning-gym"),
        ("reasoning_gym", lambda: load_rows("reasoning_gym:chain_sum", seed=1, split="train", limit=1), "reasoning-gym"),
    ],
)
def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, module: str, make: Callable[[], Any], package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"pip install {package}$"):
        make()


# Gymnasium's interface


COUNTER = """
class Space:
    n = 3


class Counter:
    action_space = Space()

    def __init__(self, most=2):
        self.most = most

    def reset(self, *, seed, options):
        self.count, self.is_open = 0, True
        return [seed, options["id"]], {}

    def step(self, action):
        self.count += 1
        return {"took": action}, action / 2, action == 2, self.count == self.most, {}

    def close(self):
        self.is_open = False


class Echo(Counter):
    action_space = None

    def step(self, action):
        return "I hear " + action, 1, False, False, {}
"""


def test_a_class_with_gymnasiums_interface_is_played(tmp_path: Path) -> None:
    (tmp_path / "counter.py").write_text(COUNTER)
    ours = environment("gymnasium", env=f"{tmp_path / 'counter.py'}:Counter", most=3)
    assert said(ours.reset({"id": "a"}, (1 << 31) + 5)) == ['[5, "a"]']
    for turn in ("Left!", "I take 7", "-1"):  # none of them is a move
        outcome = ours.step(Action(turn))
        assert said(outcome.words) == ["An action is a number from 0 to 2."] and outcome[1:] == (0.0, False, {})
    first = ours.step(Action("Not 2, I take 1"))
    assert said(first.words) == ['{"took": 1}'] and first[1:] == (0.5, False, {"truncated": False})
    assert ours.step(Action("2")) == (None, 1.0, True, {"truncated": False})
    ours.reset({"id": "b"}, 0)
    assert [ours.step(Action("0"))[2:] for _ in range(3)] == [(done, {"truncated": done}) for done in (False, False, True)]
    ours.close()
    assert not ours._env.is_open
    echo = environment("gymnasium", env=f"{tmp_path / 'counter.py'}:Echo")
    echo.reset({"id": "c"}, 0)
    assert said(echo.step(Action("what you say")).words) == ["I hear what you say"]


def test_an_environment_that_gymnasium_does_not_have_is_said_to_be_none(install: Install) -> None:
    class Error(Exception):
        pass

    def make(name: str, **options: Any) -> Any:
        if name != "Taxi-v3":
            raise Error(f"Environment `{name}` doesn't exist.")
        return SimpleNamespace(action_space=None, options=options)

    install("gymnasium", make=make, error=SimpleNamespace(Error=Error))
    assert environment("gymnasium", env="Taxi-v3", is_raining=True)._env.options == {"is_raining": True}
    with pytest.raises(UserError, match=r"gymnasium has no environment 'Taxi-v9': .* doesn't exist"):
        environment("gymnasium", env="Taxi-v9")


# OpenEnv


async def test_turns_reach_an_openenv_server_as_its_fields(install: Install) -> None:
    class GenericEnvClient:
        def __init__(self, base_url: str) -> None:
            self.asked: list[Any] = [base_url]

        async def reset(self, **options: Any) -> Any:
            self.asked.append(options)
            return SimpleNamespace(observation={"text": "Go.", "left": 2})

        async def step(self, action: Any) -> Any:
            self.asked.append(action)
            is_over = "stop" in action.values()
            return SimpleNamespace(observation={"text": "On."}, reward=3 if is_over else None, done=is_over)

        async def close(self) -> None:
            self.asked.append("closed")

    install("openenv.core", GenericEnvClient=GenericEnvClient)
    ours = environment("openenv", url="http://there", observation_field="text", reset_columns=["level"])
    assert said(await ours.reset({"level": 4, "other": 5}, (1 << 31) + 7)) == ["Go."]
    outcome = await ours.step(Action("hello"))
    assert said(outcome.words) == ["On."] and outcome[1:] == (None, False, {})
    assert await ours.step(Action("stop")) == (None, 3.0, True, {})
    await ours.close()
    assert ours._client.asked == ["http://there", {"seed": 7, "level": 4}, {"message": "hello"}, {"message": "stop"}, "closed"]
    whole = environment("openenv", url="http://there", action_field=None)
    assert said(await whole.reset({}, 0)) == ['{"text": "Go.", "left": 2}']
    refused = await whole.step(Action("hello"))
    assert "An action is a JSON object" in said(refused.words)[0] and refused[1:] == (0.0, False, {})
    await whole.step(Action('{"say": "stop"}'))
    assert whole._client.asked[2:] == [{"say": "stop"}]  # what was no action has not reached the server


# skyrl-gym


def test_a_skyrl_environment_has_its_settings_and_the_rows_columns(install: Install) -> None:
    class Search:
        def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
            self.config, self.extras, self.is_open = env_config, extras, True

        def init(self, prompt: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
            return [*prompt, {"role": "user", "content": self.config.hint}] if "hint" in self.config else prompt, {}

        def step(self, action: str) -> dict[str, Any]:
            done = action == self.extras["reward_spec"]["ground_truth"]
            words = [] if done else [{"role": "user", "content": "no"}]
            return {"observations": words, "reward": int(done), "done": done, "metadata": {"n": 1, "trace": object()}}

        def close(self) -> None:
            self.is_open = False

    registry: dict[str, str] = {"search": ""}
    install(
        "skyrl_gym",
        registry=registry,
        register=lambda id, entry_point: registry.update({id: entry_point}),
        make=lambda name, env_config, extras: Search(env_config, extras),
    )
    row = {"prompt": "1 + 1?", "reward_spec": {"ground_truth": "2"}}
    ours = environment("skyrl_gym", env_class="search")
    assert ours.reset(row, 0) is None  # the prompt stays as it is
    first = ours.step(Action("3"))
    assert said(first.words) == ["no"] and first[1:] == (0.0, False, {"n": 1})
    assert ours.step(Action("2")) == (None, 1.0, True, {"n": 1})
    with pytest.raises(AttributeError, match="depth"):
        _ = ours._env.config.depth
    ours.close()
    assert not ours._env.is_open
    hinted = environment("skyrl_gym", env_class="my.envs:Search", hint="Think.")
    assert registry["my.envs:Search"] == "my.envs:Search"
    assert said(hinted.reset(row, 0)) == ["1 + 1?", "Think."]
    with pytest.raises(UserError, match=r"no environment 'chess'; it has my\.envs:Search, search"):
        environment("skyrl_gym", env_class="chess")


# textarena


def test_a_game_tells_the_policy_what_is_new_to_it_and_not_its_own_words(install: Install) -> None:
    own, of_game = object(), object()

    class Game:
        def reset(self, num_players: int, seed: int) -> None:
            self.news = [(-1, f"Game {seed} for {num_players}.", of_game), (-1, "Begin.", of_game)]

        def step(self, action: str) -> tuple[bool, dict[str, Any]]:
            self.news = [(0, action, own), (-1, "Higher.", of_game)]
            return action == "[9]", {}

        def get_observation(self) -> tuple[int, list[Any]]:
            return 0, self.news

        def close(self) -> tuple[dict[int, int], dict[int, Any]]:
            return {0: 1}, {0: {"invalid_move": True, "turn_count": 2}}

    install("textarena.envs.registration", ENV_REGISTRY={"Guess-v0-raw": None})
    made: list[Any] = []
    make = lambda name, **options: made.append((name, options)) or Game()  # noqa: E731
    install("textarena", make=make, ObservationType=SimpleNamespace(PLAYER_ACTION=own))
    ours = environment("textarena", game="Guess-v0", max_turns=4)
    assert made == [("Guess-v0-raw", {"max_turns": 4})]
    assert said(ours.reset({}, 3)) == ["Game 3 for 1.\nBegin."]
    outcome = ours.step(Action("[5]"))
    assert said(outcome.words) == ["Higher."] and outcome[1:] == (None, False, {})
    assert ours.step(Action("[9]")) == (None, 1.0, True, {"invalid_move": True, "turns": 2})
    with pytest.raises(UserError, match="textarena has no game 'Poker-v0'"):
        environment("textarena", game="Poker-v0")


# reasoning-gym


class Sums:
    """A task: entry `i` asks for `seed + i`, or for `scale` times that. Half of the score is for an answer that is one off."""

    def __init__(self, seed: int, size: int, scale: int = 1) -> None:
        assert scale > 0, "scale must be positive"
        self._answers = [scale * (seed + index) for index in range(size)]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"question": f"Which number is {index}?", "answer": str(self._answers[index])}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        return {0: 1.0, 1: 0.5}.get(abs(int(answer) - int(entry["answer"])), 0.0)


def test_rows_of_reasoning_gym_are_scored_by_the_task_that_they_are_of(install: Install) -> None:
    def create(name: str, **options: Any) -> Sums:
        if name not in ("sums", "other"):
            raise ValueError(f"no task {name}")
        return Sums(**options)

    def extract(response: str) -> str | None:
        return response.split("<answer>")[1].split("</answer>")[0] if "<answer>" in response else None

    install("reasoning_gym", create_dataset=create, utils=SimpleNamespace(extract_answer=extract))
    rows = load_rows("reasoning_gym:sums?scale=10,other", seed=5, split="train", limit=4)
    assert [row["answer"] for row in rows] == ["50", "5", "60", "6"]  # tasks take turns
    held_out = load_rows("reasoning_gym:sums", seed=5, split="heldout", limit=4)
    assert not {row["answer"] for row in rows} & {row["answer"] for row in held_out}
    scorer = build("reward", "reasoning_gym", {}, REWARDS)
    tagged = build("reward", "reasoning_gym", {"needs_tag": True}, REWARDS)
    for response, by_any, by_tag in (
        ("I say <answer>60</answer>", 1.0, 1.0),
        ("<answer>61</answer>", 0.5, 0.5),
        (" 60 ", 1.0, 0.0),
        ("<answer>sixty</answer>", 0.0, 0.0),  # the task cannot read it
    ):
        sample = Sample("", response, rows[2], True)
        assert (scorer(sample), tagged(sample)) == (by_any, by_tag), response
    with pytest.raises(ValueError, match=r"not of data.path=reasoning_gym:"):
        scorer(Sample("", "60", {"answer": "60"}, True))
    for path, why in (
        ("none", "task 'none' with no options: no task none"),
        ("sums?scale=-1", "scale must be positive"),
        ("sums?scale", "task 'sums' with scale: bad query field: 'scale'"),
        ("sums?scale=[", "task 'sums' with scale=[[]: while parsing"),
    ):
        with pytest.raises(UserError, match=why):
            load_rows(f"reasoning_gym:{path}", seed=1, split="train", limit=1)


# MCP


class McpClient:
    """As the SDK's: its connection ends in the task that it began in."""

    def __init__(self, target: Any) -> None:
        self._target, self._task = target, None

    async def __aenter__(self) -> McpClient:
        if self._target == "http://dead":
            raise ConnectionRefusedError("refused")
        self._task = asyncio.current_task()
        OPEN.append(self._target)
        return self

    async def __aexit__(self, *error: object) -> None:
        assert asyncio.current_task() is self._task
        OPEN.remove(self._target)

    async def list_tools(self) -> Any:
        names = ["double", "draw"] if isinstance(self._target, tuple) else ["fail"]
        return SimpleNamespace(tools=[SimpleNamespace(name=name, description=None, input_schema={"of": name}) for name in names])

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        if name == "fail":
            raise RuntimeError("no such file")
        parts = [SimpleNamespace(type="text", text=str(2 * arguments["n"])), SimpleNamespace(type="image")]
        return SimpleNamespace(content=parts[: 1 + (name == "draw")], is_error=arguments["n"] < 0)


OPEN: list[Any] = []
"""Targets of the connections that are open."""


async def test_tools_of_mcp_servers_are_called_and_their_connections_end_where_they_began(install: Install) -> None:
    def parameters(command: str, args: list[str], env: dict[str, str] | None) -> tuple[Any, ...]:
        return command, *args, env

    install("mcp", Client=McpClient, StdioServerParameters=parameters, stdio_client=lambda given: given)
    servers = {"numbers": {"command": ["serve", "-n"], "env": {"A": "1"}}, "files": {"url": "http://there"}}
    ours = environment("tools", mcp=servers)
    assert [(each["function"]["name"], each["function"]["parameters"]) for each in ours.tools] == [
        (name, {"of": name}) for name in ("double", "draw", "fail")
    ]
    assert not OPEN and not ours.is_deterministic  # they were listed, and nothing of that is left
    await asyncio.create_task(ours.reset({}, 0))
    assert OPEN == [("serve", "-n", {"A": "1"}), "http://there"]
    for call, text, failures in (
        ('{"name": "double", "arguments": {"n": 21}}', "42", 0),
        ('{"name": "draw", "arguments": {"n": 1}}', "2\n(image)", 0),
        ('{"name": "double", "arguments": {"n": -1}}', "-2", 1),
        ('{"name": "fail", "arguments": {}}', "Error: no such file", 1),
    ):
        outcome = await asyncio.create_task(ours.step(Action(f"<tool_call>{call}</tool_call>")))
        assert said(outcome.words) == [text] and outcome.info.get("tool_failures", 0) == failures
    await asyncio.create_task(ours.close())
    assert not OPEN
    for server, why in (
        ({}, "environment.mcp.numbers: give either url or command"),
        ({"url": "http://a", "command": ["b"]}, "either url or command"),
        ({"url": "http://dead"}, "MCP server numbers does not answer: ConnectionRefusedError refused"),
    ):
        with pytest.raises(UserError, match=why):
            environment("tools", mcp={"numbers": server})
    ours._mcp._servers = {"numbers": {"url": "http://dead"}}  # it has gone since the environment was built
    with pytest.raises(UserError, match="does not answer"):
        await ours.reset({}, 0)


# verifiers


async def test_an_episode_of_verifiers_reaches_the_policy_by_a_key_of_its_own(install: Install) -> None:
    class TaskConfig:
        @staticmethod
        def model_validate(known: dict[str, Any]) -> dict[str, Any]:
            if known["taskset"].get("level") == 0:
                raise ValueError("level must be positive")
            return known

    class Base(Generic[Config]):
        pass

    class Env(Base[TaskConfig]):
        num_served = 0
        is_served = False

        def __init__(self, config: dict[str, Any]) -> None:
            self.config, self.taskset = config, ["a", "b", "c"]

        @contextlib.asynccontextmanager
        async def serving(self) -> Any:
            Env.num_served += 1
            Env.is_served = True
            try:
                yield
            finally:
                Env.is_served = False

        async def run_episode(self, task: str, context: Any) -> Any:
            assert os.environ[context.client.api_key_var] == f"key of {task}"
            for _ in range(5):  # the loop closes a generator that nobody holds
                await asyncio.sleep(0)
            assert Env.is_served
            error = SimpleNamespace(type="ToolError", message=f"{task} broke")
            traces = [SimpleNamespace(reward=reward, errors=[error]) for reward in (1.0, 0.5)]
            return SimpleNamespace(ok=task != "c", errors=[], traces=traces)

    install("verifiers.v1.utils.loaders", environment_class=lambda taskset, env: Env)
    install("verifiers.v1", EvalClientConfig=SimpleNamespace, ModelContext=SimpleNamespace)

    async def play(index: int, task: str) -> Any:
        ours = environment("verifiers", taskset="words", options={"level": 3})
        ours.reset({"idx": index}, 0)
        return await ours.step(Action(f'{{"base_url": "http://policy", "api_key": "key of {task}"}}'))

    before = set(os.environ)
    for outcome in await asyncio.gather(play(1, "b"), play(0, "a")):
        assert outcome == (None, 0.75, True, {})
    with pytest.raises(RuntimeError, match="ToolError: c broke"):
        await play(2, "c")
    assert Env.num_served == 1 and set(os.environ) == before
    with pytest.raises(UserError, match="taskset 'words' with harness 'null': level must be positive"):
        environment("verifiers", taskset="words", options={"level": 0})
    for ends in (asyncio.CancelledError("no servers"), OSError("no room")):  # while its servers begin

        class Broken(Env):
            @contextlib.asynccontextmanager
            async def serving(self, ends: BaseException = ends) -> Any:
                Env.num_served += 1
                if Env.num_served < 3:
                    raise ends
                yield

        install("verifiers.v1.utils.loaders", environment_class=lambda taskset, env, Broken=Broken: Broken)
        ours = environment("verifiers", taskset=f"words without servers: {ends}")
        ours.reset({"idx": 0}, 0)
        Env.num_served, Env.is_served = 0, True
        for _ in range(2):
            with pytest.raises((RuntimeError, OSError), match=r"its servers: CancelledError|no room"):
                await asyncio.wait_for(ours.step(Action('{"base_url": "http://policy", "api_key": "key of a"}')), patience(5))
        assert (await ours.step(Action('{"base_url": "http://policy", "api_key": "key of a"}'))).reward == 0.75
