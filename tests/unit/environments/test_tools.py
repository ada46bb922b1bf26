"""Tools: specifications as transformers makes them, calls in every family's form, results, errors, and the walls of `python`."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from transformers.utils import get_json_schema

from asyncflow.environments import python_tool
from asyncflow.environments.base import Action, TurnResult
from asyncflow.environments.python_tool import python
from asyncflow.environments.tool_calls import Malformed, ToolCall, calls_in, explained, without_calls
from asyncflow.environments.tool_schema import specification
from asyncflow.environments.tools import Tools
from asyncflow.environments.trl import TRLEnvironment
from asyncflow.types import UserError
from tests.patience import patience


class Unit(enum.Enum):
    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


def weather(city: str, unit: Literal["c", "f"] = "c", days: int | None = None) -> str:
    """Weather of a city.

    More about it:
    another line.

    Args:
        city: The city of which
            one wants: the weather.
        unit: Its unit (choices: ["c", "f"])
        days: How many days

    Returns:
        The weather, in words.
    """
    return f"{city}: rain"


def much(a: list[int], b: dict[str, float], c: int | str, d: list[int] | str, e: Unit, f: tuple[int, str], g: Any, h: bool) -> list:
    """Take much.

    Args:
        a: A
        b: B
        c: C
        d: D
        e: E
        f: F
        g: G
        h: H
    """
    return []


def nothing() -> None:
    """Do nothing."""


class Counter:
    """With a method."""

    def add(self, n: int) -> Counter:
        """Count on.

        Args:
            n: how far
        """
        return self


@pytest.mark.parametrize("function", [weather, much, nothing, Counter().add, python], ids=lambda f: f.__name__)
def test_a_specification_is_the_one_that_transformers_makes(function: Callable[..., Any]) -> None:
    assert specification(function) == get_json_schema(function)


def no_words(a: int) -> int:
    return a


def no_hint(a):  # type: ignore[no-untyped-def]
    """Do.

    Args:
        a: A
    """


def not_described(a: int) -> None:
    """Do."""


def no_json(a: complex) -> None:
    """Do.

    Args:
        a: A
    """


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (no_words, "has no docstring"),
        (no_hint, "its parameter a has no type hint"),
        (not_described, "no description of a under 'Args:'"),
        (no_json, "has no JSON schema"),
    ],
)
def test_a_function_that_a_model_cannot_be_told_of_is_refused(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        specification(function)


ADD = ToolCall("add", {"a": 1})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('Let me.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', [ADD]),
        (
            '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "b"}</tool_call>',
            [ADD, ToolCall("b", {})],
        ),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}', [ADD]),
        ('<think>\nPerhaps <tool_call>{"name": "b"}</tool_call>\n</think>\n\nThe answer is 4.', []),
        ('{"name": "add", "parameters": {"a": 1}}', [ADD]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}', [ADD, ADD]),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]', [ADD]),
        ('I call it.\n```tool_call\n{"name": "add", "arguments": {"a": 1}}\n```\n', [ADD]),
        ('<tool_call>{"function": {"name": "add", "arguments": "{\\"a\\": 1}"}}</tool_call>', [ADD]),
        ('<tool_call>{"name": "say", "arguments": {"text": "</think>"}}</tool_call>', [ToolCall("say", {"text": "</think>"})]),
        ('```tool_call\n{"name": "say", "arguments": {"text": "</think>"}}\n```', [ToolCall("say", {"text": "</think>"})]),
        ('[TOOL_CALLS] [{"name": "say", "arguments": {"text": "</think>"}}]', [ToolCall("say", {"text": "</think>"})]),
        ('{"name": "say", "parameters": {"text": "</think>"}}', [ToolCall("say", {"text": "</think>"})]),
        (
            '<think>a</think><tool_call>{"name": "say", "arguments": {"text": "</think>"}}</tool_call>',
            [ToolCall("say", {"text": "</think>"})],
        ),
        ('<think>\nPerhaps <tool_call>{"name": "b"}</tool_call>', []),
        ("Format: <tool_call>{...}.\n</think>\n\nThe answer is 4.", []),
        (
            'I could write <tool_call>{"name": "b", "arguments": {}} first.\n</think>\n<tool_call>{"name": "g"}</tool_call>',
            [ToolCall("g", {})],
        ),
        ('Perhaps <tool_call>{"name": "b"}</tool_call>\n</think>\n\nThe answer is 4.', []),
        (
            'A <tool_call> perhaps.\n</think>\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
            [ADD],
        ),
        ("The answer is {4}.", []),
        ('```json\n{"name": "add"}\n```', []),
    ],
)
def test_calls_are_read_in_the_form_of_each_family(text: str, calls: list[ToolCall]) -> None:
    assert calls_in(text) == calls


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('<tool_call>{"name": "add", </tool_call>', "is not JSON"),
        ("<tool_call></tool_call>", "is empty"),
        ("<tool_call>[3]</tool_call>", 'an object with a "name"'),
        ('<tool_call>{"name": "add", "arguments": 3}</tool_call>', "no object"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "are not JSON"),
        ("[TOOL_CALLS] [{]", "is not JSON"),
        ("<tool_call>" + "[" * 2000, "is not JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "is not JSON"),
        ('<tool_call>{"name": "add", "arguments": "' + "[" * 2000 + '"}</tool_call>', "are not JSON"),
        ('<tool_call>{"name": "add", "arguments": "[' + "9" * 5000 + ']"}</tool_call>', "are not JSON"),
    ],
)
def test_a_call_that_cannot_be_read_is_one_all_the_same(text: str, why: str) -> None:
    (call,) = calls_in(text)
    assert isinstance(call, Malformed) and why in call.why


def test_what_is_said_beside_calls() -> None:
    assert without_calls('Let me.\n<tool_call>{"name": "add"}</tool_call>') == "Let me."
    assert without_calls('{"name": "add", "parameters": {}}') == ""
    assert without_calls("Done.") == "Done."
    assert calls_in(explained([specification(weather)])) == [ToolCall("the tool", {"a parameter": "its value"})]


SOURCE = '''
import asyncio

def divide(a: int, b: int) -> float:
    """Divide.

    Args:
        a: what is divided
        b: by what
    """
    return a / b

async def slowly(text: str) -> dict:
    """Say.

    Args:
        text: what
    """
    await asyncio.sleep(0)
    return {"said": text}

def shifted(bits: int) -> int:
    """Shift.

    Args:
        bits: how far
    """
    return 1 << bits

class Shop:
    """Of TRL's kind."""

    def __init__(self):
        self.sold = 0

    def reset(self, **row):
        self.sold = 0
        return f"There are {row['stock']} apples."

    def sell(self, n: int) -> str:
        """Sell apples.

        Args:
            n: how many
        """
        self.sold += n
        return f"{self.sold} sold"

    def get_reward(self):
        return self.sold / 10
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some_tools.py"
    path.write_text(SOURCE)
    return path


def call(name: str, **arguments: Any) -> Action:
    return Action(f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>")


async def test_results_and_errors_are_observed_and_an_answer_ends_the_episode(file: Path) -> None:
    environment = Tools([f"{file}:divide", f"{file}:slowly"])
    assert [each["function"]["name"] for each in environment.tools] == ["divide", "slowly"]
    assert await environment.reset({}, 0) is None

    async def said(action: Action) -> tuple[list[str], dict[str, Any]]:
        outcome = await environment.step(action)
        assert not outcome.done and outcome.words is not None and not isinstance(outcome.words, str)
        assert all(message["role"] == "tool" and len(message["tool_call_id"]) == 9 for message in outcome.words)
        return [str(message["content"]) for message in outcome.words], dict(outcome.info)

    assert await said(call("divide", a=1, b=2)) == (["0.5"], {"tool_calls": 1, "tool_failures": 0})
    assert await said(call("slowly", text="é")) == (['{"said": "é"}'], {"tool_calls": 1, "tool_failures": 0})
    assert await said(Action(call("divide", a=1, b=0) + call("divide", a=4, b=2))) == (
        ["Error: ZeroDivisionError: division by zero", "2.0"],
        {"tool_calls": 2, "tool_failures": 1},
    )
    (text,), info = await said(call("divide", a=1))
    assert text == "Error: divide does not take these arguments: missing a required argument: 'b'" and info["tool_failures"] == 1
    (text,), _ = await said(call("multiply", a=1))
    assert text == "Error: there is no tool 'multiply'; there are divide, slowly"
    (text,), _ = await said(Action("<tool_call>{</tool_call>"))
    assert text.startswith("Error: the call is not JSON")
    assert await environment.step(Action("It is 0.5.")) == TurnResult(None, None, True, {})


async def test_what_no_message_can_hold_is_the_models_to_see(file: Path) -> None:
    environment = Tools([f"{file}:slowly", f"{file}:shifted"])
    for action, text in (
        (call("slowly", text="\ud800"), '{"said": "?"}'),
        (call("\ud800"), r"Error: there is no tool '\ud800'; there are slowly, shifted"),
        (call("slowly", **{"\ud800": 1}), "Error: slowly does not take these arguments: "),
        (call("shifted", bits=20_000), "Error: ValueError: Exceeds the limit"),
    ):
        outcome = await environment.step(action)
        ((message,),) = msgspec.msgpack.decode(msgspec.msgpack.encode([outcome.words]))
        assert message["content"].startswith(text)


async def test_the_fenced_form_is_explained_and_answered_in_fences(file: Path) -> None:
    environment = Tools([f"{file}:divide"], explain=True, max_result_characters=2)
    assert "```tool_call" in str(await environment.reset({}, 0))
    outcome = await environment.step(Action('```tool_call\n{"name": "divide", "arguments": {"a": 1, "b": 8}}\n```'))
    assert outcome.words is not None and not isinstance(outcome.words, str)
    assert outcome.words[0]["content"] == "\n```tool_result\n0.... (3 more characters)\n```\n"


def test_tools_that_cannot_be_had_are_refused(file: Path) -> None:
    with pytest.raises(UserError, match=r"name some in environment\.tools"):
        Tools()
    with pytest.raises(UserError, match="has no 'subtract'"):
        Tools([f"{file}:subtract"])
    with pytest.raises(UserError, match="two tools are called divide"):
        Tools([f"{file}:divide", f"{file}:divide"])


async def test_an_environment_of_trls_kind_gives_tools_a_beginning_and_a_reward(file: Path) -> None:
    environment = TRLEnvironment(f"{file}:Shop", tools=[f"{file}:divide"])
    assert [each["function"]["name"] for each in environment.tools] == ["divide", "sell"]
    assert await environment.reset({"stock": 3}, 0) == "There are 3 apples."
    for n, sold in ((1, 1), (2, 3)):
        outcome = await environment.step(call("sell", n=n))
        assert outcome.words is not None and not isinstance(outcome.words, str) and outcome.words[0]["content"] == f"{sold} sold"
        assert outcome.reward is None
    assert await environment.step(Action("Done.")) == TurnResult(None, 0.3, True, {})
    limited = TRLEnvironment(f"{file}:Shop", max_calls=1)
    await limited.reset({"stock": 3}, 0)
    assert not (await limited.step(call("sell", n=5))).done
    assert await limited.step(call("sell", n=5)) == TurnResult(None, 0.5, True, {})
    with pytest.raises(UserError, match="has no method reset"):
        TRLEnvironment("collections:Counter")


def test_the_python_tool_prints_what_an_interpreter_would() -> None:
    assert python("x = 2\nprint(x)\nx + 40") == "2\n42\n"
    assert python("1 / 0") == "ZeroDivisionError: division by zero\n"
    assert "SyntaxError" in python("def f(:")
    assert python("None") == ""
    assert python("import sys\nprint(1)\nsys.exit(2)") == python("print(1)\nexit()") == "1\n"
    assert python("print(1)\nraise SystemExit('no more')") == "1\nno more\n"
    assert python("b = bytearray(4 << 30)") == "MemoryError\n"
    assert python("'x' in dir()") == "False\n"  # nothing of the first program


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("while True: pass", "was killed"),
        ("import os; os._exit(3)", "exited with status 3"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import os\nwhile True: os.write(2, b'x' * 1000)", "printed more than"),
    ],
)
def test_the_python_tool_has_walls(code: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_tool, "DEADLINE_SECONDS", 1.0 if why == "was killed" else patience(10))
    with pytest.raises(RuntimeError, match=why):
        python(code)
