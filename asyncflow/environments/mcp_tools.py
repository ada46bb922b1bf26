"""Tools of MCP servers, by the public SDK (`pip install 'asyncflow-rl[mcp]'`).

    mcp: {files: {command: [npx, a-server], env: {...}}, search: {url: "http://127.0.0.1:8000/mcp"}}

A server's tools are listed once, when the environment is built; an episode has connections of its own, kept by a task of its own,
since a connection ends in the task that it began in.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asyncflow.environments.tool_calls import ToolCall
from asyncflow.types import UserError

START_SECONDS = 30.0


class McpTools:
    """Tools of some servers."""

    def __init__(self, servers: Mapping[str, Mapping[str, Any]]) -> None:
        """Raises `UserError` if the SDK is not installed, or a server does not answer."""
        self._servers = servers
        self._clients: dict[str, Any] = {}
        self._keeping: asyncio.Task[None] | None = None
        self._end = asyncio.Event()
        self._server_of: dict[str, str] = {}
        self.specifications: list[dict[str, Any]] = []
        with ThreadPoolExecutor(1, thread_name_prefix="MCP servers") as apart:  # this thread may have an event loop that runs
            apart.submit(asyncio.run, self._list()).result()

    @property
    def names(self) -> Sequence[str]:
        """Names of the tools."""
        return list(self._server_of)

    async def open(self) -> None:
        """Connect. Raises `UserError` if a server does not answer."""
        self._end = asyncio.Event()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeping = asyncio.create_task(self._keep(ready), name="MCP servers")
        await ready

    async def close(self) -> None:
        """End the connections, and the servers that were started for them."""
        if self._keeping is not None:
            self._end.set()
            await self._keeping
            self._keeping = None

    async def call(self, call: ToolCall) -> tuple[str, bool]:
        """Text of a tool's result, and whether the call has failed."""
        try:
            result = await self._clients[self._server_of[call.name]].call_tool(call.name, dict(call.arguments))
        except Exception as error:  # the server's refusal is the model's to see
            return f"Error: {error}", True
        text = "\n".join(part.text if part.type == "text" else f"({part.type})" for part in result.content)
        return text, bool(result.is_error)

    async def _list(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for name, server in self._servers.items():
                client = await _connected(stack, name, server)
                for tool in (await client.list_tools()).tools:
                    self._server_of[tool.name] = name
                    function = {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.input_schema)}
                    self.specifications.append({"type": "function", "function": function})

    async def _keep(self, ready: asyncio.Future[None]) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                self._clients = {name: await _connected(stack, name, server) for name, server in self._servers.items()}
                ready.set_result(None)
                await self._end.wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)


async def _connected(stack: contextlib.AsyncExitStack, name: str, server: Mapping[str, Any]) -> Any:
    try:
        from mcp import Client, StdioServerParameters, stdio_client
    except ImportError as error:
        raise UserError("MCP servers need the package mcp: pip install 'asyncflow-rl[mcp]'") from error
    if ("url" in server) == ("command" in server):
        raise UserError(f"environment.mcp.{name}: give either url or command")
    if "url" in server:
        target: Any = server["url"]
    else:
        command, *arguments = server["command"]
        target = stdio_client(StdioServerParameters(command=command, args=arguments, env=server.get("env")))
    try:
        async with asyncio.timeout(START_SECONDS):
            return await stack.enter_async_context(Client(target))
    except (OSError, TimeoutError) as error:
        raise UserError(f"MCP server {name} does not answer: {type(error).__name__} {error}") from error
