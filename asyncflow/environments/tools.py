"""Tools: Python functions, and tools of MCP servers, that a model calls until it answers.

    step(turn): calls in it ----> each is called ----> results, errors among them, are observed as messages of the role `tool`
                no call   ----> the episode is done; scorers see the answer

`environment: {name: tools, tools: [calculator.py:add, python]}`. A function is written as for TRL: with type hints, and a docstring
in Google's style that describes each parameter. `python` is the tool of python_tool.py.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncflow.environments.base import TOOL_CALLS, TOOL_FAILURES, Action, TurnResult
from asyncflow.environments.mcp_tools import McpTools
from asyncflow.environments.tool_calls import Malformed, ToolCall, calls_in, explained, writable
from asyncflow.environments.tool_schema import specification
from asyncflow.registry import load, resolve
from asyncflow.types import UserError

TOOLS = {"python": "asyncflow.environments.python_tool:python"}
"""Tools that are built in."""


class ToolBox:
    """Tools by name, and the calls of them."""

    def __init__(self, functions: Sequence[Callable[..., Any]], mcp: McpTools | None = None) -> None:
        """Raises `UserError` if two tools have one name, or a function has no specification."""
        self._functions = {function.__name__: function for function in functions}
        self._mcp = mcp
        self.specifications = [specification(function) for function in functions] + (mcp.specifications if mcp else [])
        names = [each["function"]["name"] for each in self.specifications]
        if len(set(names)) < len(names):
            raise UserError(f"two tools are called {max(names, key=names.count)}: give one another name")

    async def result_of(self, call: ToolCall | Malformed) -> tuple[str, bool]:
        """Text that the model reads, and whether the call has failed."""
        if isinstance(call, Malformed):
            return f"Error: {call.why}", True
        if self._mcp is not None and call.name in self._mcp.names:
            return await self._mcp.call(call)
        if (function := self._functions.get(call.name)) is None:
            known = ", ".join(each["function"]["name"] for each in self.specifications)
            return f"Error: there is no tool {call.name!r}; there are {known}", True
        try:
            bound = inspect.signature(function).bind(**call.arguments)
        except TypeError as error:
            return f"Error: {call.name} does not take these arguments: {error}", True
        try:
            result = function(*bound.args, **bound.kwargs)
            result = await result if inspect.isawaitable(result) else result
            return (result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)), False
        except Exception as error:  # a tool's failure is the model's to see
            return f"Error: {type(error).__name__}: {error}", True

    async def answer_to(self, action: Action, calls: Sequence[ToolCall | Malformed], max_characters: int) -> TurnResult:
        """Answer to a turn with calls: messages with their results, in their order."""
        messages, failures, is_fenced = [], 0, "```tool_call" in action
        for number, call in enumerate(calls):
            text, has_failed = await self.result_of(call)
            text = writable(text)
            failures += has_failed
            if len(text) > max_characters:
                text = f"{text[:max_characters]}... ({len(text) - max_characters} more characters)"
            content = f"\n```tool_result\n{text}\n```\n" if is_fenced else text
            name = writable(call.name) if isinstance(call, ToolCall) else "unknown"
            messages.append({"role": "tool", "name": name, "tool_call_id": f"call{number:05}", "content": content})
        return TurnResult(messages, None, False, {TOOL_CALLS: len(calls), TOOL_FAILURES: failures})


class Tools:
    """Environment of one question, which the policy answers with the help of tools."""

    def __init__(
        self,
        tools: Sequence[str] = (),
        *,
        mcp: Mapping[str, Mapping[str, Any]] | None = None,
        explain: bool = False,
        max_result_characters: int = 4000,
        is_deterministic: bool = True,
    ) -> None:
        """`tools`: `python`, `file.py:function` or `package.module:function`. `mcp`: servers by name (mcp_tools.py). `explain`: say
        behind the prompt what tools there are and how they are called (fenced), for a model whose template has none.
        `is_deterministic`: False where a tool depends on more than its arguments.

        Raises `UserError` for a tool that cannot be had.
        """
        if not tools and not mcp:
            raise UserError("environment tools has no tools: name some in environment.tools, or servers in environment.mcp")
        self._mcp = McpTools(mcp) if mcp else None
        self._box = ToolBox([load("tool", resolve("tool", name, TOOLS)) for name in tools], self._mcp)
        self._explain, self._max_characters = explain, max_result_characters
        self.tools = self._box.specifications
        self.is_deterministic = is_deterministic and self._mcp is None

    async def reset(self, example: Mapping[str, Any], seed: int) -> str | None:
        """See `Environment`."""
        if self._mcp is not None:
            await self._mcp.open()
        return explained(self.tools) if self._explain else None

    async def step(self, action: Action) -> TurnResult:
        """See `Environment`."""
        calls = calls_in(action)
        return await self._box.answer_to(action, calls, self._max_characters) if calls else TurnResult(None, None, True, {})

    async def close(self) -> None:
        """See `Environment`."""
        if self._mcp is not None:
            await self._mcp.close()
