"""Hosts of vLLM servers: those that the run starts, and starts again, and those that somebody else has started."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from asyncflow.engines.rollout.vllm.options import VllmOptions, devices_of, is_cpu
from asyncflow.engines.rollout.vllm.process import ServerOptions, ServerProcess
from asyncflow.types import RunError, UserError


class ServerHost:
    """Host of a server that somebody else has started, and starts again.

    `key_from`: where its key comes from, for a sentence. Its methods may be called from several threads.
    """

    def __init__(self, name: str, address: str, key: str, key_from: str) -> None:
        self.name, self.key_from = name, key_from
        self._address, self._key = address, key

    def start(self) -> None:
        """Have a server, without waiting for it. Raises `UserError` if there can be none."""

    def wait_until_ready(self) -> tuple[str, str]:
        """Block until the server is there, and return its address and key. Raises `RunError` if it does not come; whether it
        answers is asked by its handle."""
        return self._address, self._key

    def stop(self) -> None:
        """End the server, if this run has started it."""

    def close(self) -> None:
        """End it for good: it is not started again."""


class OwnServer(ServerHost):
    """Host of a server that the run starts."""

    def __init__(self, options: ServerOptions, name: str) -> None:
        super().__init__(name, "", "", "that was made for it")
        self.server: ServerProcess | None = None
        self._options = options
        self._is_closed = False
        self._changing = threading.Lock()

    def start(self) -> None:
        self.stop()
        with self._changing:
            if self._is_closed:
                raise RunError(f"{self.name} is not wanted any more")
            self.server = ServerProcess(self._options, self.name)
            self.server.spawn()

    def wait_until_ready(self) -> tuple[str, str]:
        assert self.server is not None, "`start` first"
        self.server.wait_until_ready()
        return self.server.address, self.server.key

    def stop(self) -> None:
        with self._changing:
            if self.server is not None:
                self.server.stop()
                self.server = None

    def close(self) -> None:
        self._is_closed = True
        self.stop()


def hosts_of(options: VllmOptions, transfer: str) -> list[ServerHost]:
    """Servers of an engine: those that are there, or those to start. `transfer`: its name in vLLM's factory. Raises as
    `given_hosts`."""
    if options.addresses:
        return given_hosts(options.addresses, options.key_variable)
    chosen: Sequence[Sequence[int] | None] = devices_of(options.device, options.instances, options.tensor_parallel, options.devices)
    if options.devices is None and (is_cpu(options.device) or (options.instances == 1 and ":" not in options.device)):
        chosen = [None] * options.instances  # a single instance takes the first of those that it sees
    return [OwnServer(ServerOptions(options, transfer, these), f"vLLM {number}") for number, these in enumerate(chosen)]


def given_hosts(addresses: Sequence[str], key_variable: str) -> list[ServerHost]:
    """Servers that were started elsewhere, whose key is in that environment variable. Raises `UserError` if not."""
    key = os.environ.get(key_variable)
    if not key:
        raise UserError(f"rollout.engine.addresses needs the servers' key in the environment variable {key_variable}: set it")
    where = f"in the environment variable {key_variable}"
    return [ServerHost(f"the vLLM server at {address}", address, key, where) for address in addresses]
