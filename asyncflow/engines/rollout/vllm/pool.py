"""The vLLM servers of one engine: where they come from, what they are to be, which is to generate next, what all are told at once.

    own_hosts / given_hosts --> Servers --> one Instance (handle.py) for each

consumes: samples that want a server; calls that change what the servers do
waits for: a server that is up
is unblocked by: one that has come back, and the loss of the last one
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from asyncflow.engines.rollout.vllm.client import VllmClient
from asyncflow.engines.rollout.vllm.handle import Call, OwnServer, RunningServer, ServerHandle, ServerHost
from asyncflow.engines.rollout.vllm.options import devices_of, is_cpu
from asyncflow.engines.rollout.vllm.process import ServerOptions
from asyncflow.types import UserError


def own_hosts(options: ServerOptions, instances: int, devices: Sequence[Sequence[int]] | None) -> list[ServerHost]:
    """Servers that the run starts with these options, but for `devices`: which ones, a list for each; None: one after another."""
    chosen: Sequence[Sequence[int] | None] = devices_of(options.device, instances, options.tensor_parallel, devices)
    if devices is None and (is_cpu(options.device) or (instances == 1 and ":" not in options.device)):
        chosen = [None] * instances  # a single instance takes the first of those that it sees
    return [OwnServer(replace(options, devices=these), f"vLLM {number}") for number, these in enumerate(chosen)]


def given_hosts(addresses: Sequence[str], key_variable: str) -> list[ServerHost]:
    """Servers that somebody else has started, who has put their key in that environment variable. Raises `UserError` if not."""
    key = os.environ.get(key_variable)
    if not key:
        raise UserError(f"rollout.engine.addresses needs the servers' key in the environment variable {key_variable}: set it")
    return [RunningServer(address, key, key_variable) for address in addresses]


async def check_settings(client: VllmClient, *, max_context: int, seeded: bool) -> None:
    """Check that a server was started as docs/vllm.md asks, by AsyncFlow or another. Raises `UserError`.

    `max_context`: tokens of the longest prompt and response. `seeded`: requests have a seed.
    """
    if not await client.wants_a_key():
        raise UserError(
            f"{client.address} answers without a key, so anybody on its machine can change its weights: start it with "
            f"--middleware asyncflow_vllm.RequireKey (docs/vllm.md)"
        )
    settings = await client.settings()
    if settings.logprobs_mode != "processed_logprobs":
        raise UserError(
            f"{client.address} has --logprobs-mode {settings.logprobs_mode}, whose log-probs are not those of the distribution "
            f"that it samples from: start it with processed_logprobs (docs/vllm.md)"
        )
    if settings.max_model_len < max_context:
        raise UserError(
            f"{client.address} has --max-model-len {settings.max_model_len}, and this run's prompts and responses have up to "
            f"{max_context} tokens: start it with so many (docs/vllm.md)"
        )
    if seeded and settings.device_type == "cpu" and settings.enable_chunked_prefill:
        raise UserError(
            f"{client.address} is on a CPU and cuts long prompts, of which vLLM dies where a request has a seed: start it with "
            f"--no-enable-chunked-prefill, or set rollout.engine.seeded=false (docs/vllm.md)"
        )


class ServerPool:
    """See the module's head. `bring_up(client)` brings a server that has just come to the current version."""

    def __init__(
        self,
        hosts: Sequence[ServerHost],
        connect: Callable[[str, str], VllmClient],
        bring_up: Call,
        *,
        num_slots: int,
        max_restarts: int,
        start_seconds: float,
    ) -> None:
        """`num_slots`: of each. See `ServerHandle`."""
        self._bring_up = bring_up
        self._changed = asyncio.Event()
        self._is_closed = False
        self.instances = [
            ServerHandle(
                host, connect, num_slots=num_slots, max_restarts=max_restarts, start_seconds=start_seconds, changed=self._wake
            )
            for host in hosts
        ]

    def start(self) -> None:
        """Start what is the run's to start, all at once, and wait for it; end all if one does not come."""
        try:
            for instance in self.instances:
                instance.host.start()
            for instance in self.instances:
                instance.host.wait_until_ready()
        except BaseException:
            for instance in self.instances:
                instance.host.stop()
            raise

    async def come_up(self) -> None:
        """Connect to each, and bring it to the current version. Raises what doing so raises."""
        await asyncio.gather(*(instance.come_up(self._bring_up) for instance in self.instances))

    def lost(self, instance: ServerHandle, life: int, why: Exception) -> None:
        """Note that an instance was lost, as seen in its start number `life`; it is brought back in the background."""
        instance.lost(life, why, self._bring_up)

    async def everywhere(self, call: Callable[[ServerHandle, VllmClient], Awaitable[None]], *, opens: bool = False) -> None:
        """`call(instance, client)` on each that is up, all at once. One on which it fails is lost, and the others go on.

        `opens`: each has its gate opened as soon as it is done, whatever the others do.
        """

        async def one(instance: ServerHandle) -> None:
            await instance.change(partial(call, instance), self._bring_up)
            if opens:
                instance.gate.set()

        await asyncio.gather(*(one(instance) for instance in self.instances))

    @contextlib.asynccontextmanager
    async def unchanged(self) -> AsyncIterator[None]:
        """No server's state is changed meanwhile, and none is brought up."""
        async with contextlib.AsyncExitStack() as stack:
            for instance in self.instances:
                await stack.enter_async_context(instance.unchanged())
            yield

    def close_gates(self) -> None:
        """No sample begins, until each gate is opened."""
        for instance in self.instances:
            instance.gate.clear()

    def open_gates(self) -> None:
        """Samples begin."""
        for instance in self.instances:
            instance.gate.set()

    async def least_loaded(self) -> ServerHandle:
        """The instance with the fewest outstanding tokens, as soon as there is one.

        Raises `RunError` when all are lost for good, and `RuntimeError` once they are closed.
        """
        while True:
            if self._is_closed:
                raise RuntimeError("the rollout engine is closed")
            up = [instance for instance in self.instances if instance.is_up]
            if up:
                return min(up, key=lambda instance: instance.outstanding_tokens)
            errors = [instance.error for instance in self.instances if instance.error is not None]
            if len(errors) == len(self.instances):
                raise errors[-1]
            await self._changed.wait()

    async def close(self) -> None:
        """End those that the run has started, and hang up on the others."""
        self._is_closed = True
        self._wake()
        await asyncio.gather(*(instance.close() for instance in self.instances))

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
