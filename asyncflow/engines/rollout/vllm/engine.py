"""Rollouts on vLLM: one engine over one or several vLLM servers (instances), which it starts, or which are there already.

    generate -> one of the instances (generation.py) -> responses
    prepare  -> the weights, copied into memory that vLLM's processes can map (weights.py)
    install  -> every instance: pause, load from that memory, name the version, resume
    attest   -> every instance: what its workers compute with (attesting.py)

consumes: requests (one prompt, several samples), versions, pauses
waits for: the servers; a lost one's return
is unblocked by: their answers; their being started again

A server that is lost in the middle of anything (servers.py) is started again and given the current weights.

Not here: responses as they grow (streaming), more than one machine for one instance.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from asyncflow.attestation import Attestation
from asyncflow.engines.base import NO_TOKENS, Response, RolloutEngine, SampleKey, Sampling, Timing
from asyncflow.engines.rollout.checks import check_request
from asyncflow.engines.rollout.decoder_weights import load_tensors
from asyncflow.engines.rollout.vllm.attesting import ServerAttestations
from asyncflow.engines.rollout.vllm.client import RequestRefused, ServerLost, VllmClient, check_settings
from asyncflow.engines.rollout.vllm.generation import Generation
from asyncflow.engines.rollout.vllm.hosts import hosts_of
from asyncflow.engines.rollout.vllm.lora_versions import LoraVersion, LoraVersions
from asyncflow.engines.rollout.vllm.options import PauseMode, VllmOptions
from asyncflow.engines.rollout.vllm.options import why_not_deterministic as _why
from asyncflow.engines.rollout.vllm.servers import ServerHandle, ServerLimits, ServerPool
from asyncflow.engines.rollout.vllm.transfer import transfer_of
from asyncflow.engines.rollout.vllm.weights import ServerWeights
from asyncflow.model_folder import end_token_ids
from asyncflow.registry import by_name
from asyncflow.types import Array, HeldWeights, RunError, WeightSource

if TYPE_CHECKING:
    from torch import Tensor


class VllmEngine(RolloutEngine):
    """`RolloutEngine` over vLLM. Leaving a `generate` early has the servers drop its responses."""

    is_deterministic = False
    why_not_deterministic = _why()

    @by_name(VllmOptions)
    def __init__(self, options: VllmOptions) -> None:
        """Start the servers, and wait until they are ready (some 40 s).

        Raises `UserError` if vLLM is not there, or does not take the model or an argument, `RunError` if a server does not start
        for another reason.
        """
        options.check()
        path, lora = options.model_path, options.lora
        self.num_slots, self.max_context = options.num_slots, options.max_context
        self._vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
        self._recomputes, self._pause_mode, self._seeded = options.kv_on_install == "recompute", options.pause_mode, options.seeded
        self._is_paused = self._is_closed = self._is_begun = False
        self._one_by_one = asyncio.Lock()  # calls that change what the servers do
        self._transfer = transfer_of(options)
        hosts = hosts_of(options, self._transfer.backend)
        self._weights = ServerWeights(path, options.dtype, options.version)
        self._lora = None if lora is None else LoraVersions(path, lora, options.version, self._unload_in_background)
        self._probes = itertools.count(1)
        self._attestations = ServerAttestations(self._weights, self._lora)
        self._unloading: set[asyncio.Task[None]] = set()
        if options.addresses:  # nobody knows what weights they have
            self._weights.hold(load_tensors(path))
        connect = partial(VllmClient, generation_seconds=options.generation_seconds, deadline_seconds=options.deadline_seconds)
        limits = ServerLimits(options.slots_each, options.max_restarts, options.start_seconds, options.generation_seconds)
        self._servers = ServerPool(hosts, connect, self._bring_up, limits)
        self.instances = self._servers.handles
        self._generation = Generation(
            self._servers,
            self._weights,
            self._begin,
            stop_ids=sorted(end_token_ids(path) if options.stop_ids is None else options.stop_ids),
            seeded=self._seeded,
            recomputes=self._recomputes,
            lora=self._lora,
        )
        self._servers.start()

    def generate(
        self, prompt_ids: Array, *, samples: Sequence[int], sampling: Sampling, key: SampleKey, after: Array = NO_TOKENS
    ) -> AsyncGenerator[Response, None]:
        """See `RolloutEngine`; also a `ValueError` for an empty prompt, an unknown token or impossible sampling.

        Raises `RunError` when all servers have been lost too often.
        """
        prompt_ids, after = np.asarray(prompt_ids, np.int64), np.asarray(after, np.int64)
        check_request(prompt_ids, sampling, after, vocab_size=self._vocab_size, max_context=self.max_context)
        return self._generation.responses(prompt_ids, samples, sampling, key, after)

    def forget(self, key: SampleKey, sample: int) -> None:
        """See `RolloutEngine`: vLLM's prefix cache lets go by itself."""

    async def prepare(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """See `RolloutEngine`. Copies the tensors to where vLLM's processes can read them, in a thread of its own."""
        async with self._one_by_one:
            self._check_open()
            if self._lora is None:  # an adapter's files are made in no time
                await self._weights.prepare(version, tensors)

    async def install(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """See `RolloutEngine`. An instance on which it fails is started again; the others go on."""
        await self._begin()
        if self._lora is not None:
            await self._install_lora(self._lora, version, tensors)
            return
        async with self._one_by_one:
            self._check_open()
            with self._servers.gates_closed(opens=not self._is_paused):
                # From here on a server that comes back is given this version.
                if self._weights.prepared == version:
                    self._weights.take_prepared()
                else:
                    async with self._servers.unchanged():
                        await self._weights.write_over(version, tensors)
                await self._servers.everywhere(self._update, opens=not self._is_paused)

    async def _install_lora(self, lora: LoraVersions, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Have every server load an adapter, and requests that begin from now on name it. Those under way go on with their own."""
        async with self._one_by_one:
            self._check_open()
            written = await asyncio.to_thread(lora.write, version, tensors)
            with self._servers.gates_closed(opens=not self._is_paused):
                lora.use(written)  # from here on a server that comes back is given this version
                await self._servers.everywhere(lambda handle, client: _load(client, written), opens=not self._is_paused)
        self._unload_in_background()

    def _unload_in_background(self) -> None:
        """Unload adapters that no request names any more."""
        if self._lora is None or self._is_closed:
            return
        for version in self._lora.take_unused():
            task = asyncio.create_task(self._unload(self._lora, version))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    async def _unload(self, lora: LoraVersions, version: LoraVersion) -> None:
        async def unload(_: ServerHandle, client: VllmClient) -> None:
            assert version.name is not None, "the base stays"
            with contextlib.suppress(RequestRefused):  # a server that has come back meanwhile has it not
                await client.unload_lora(version.name)

        await self._servers.everywhere(unload)
        await asyncio.to_thread(lora.remove, version)

    async def attest(self) -> Attestation | None:
        """See `RolloutEngine`. Of all servers that are up; one that comes back is checked before it generates."""
        await self._begin()
        async with self._one_by_one:
            self._check_open()
            return await self._attestations.of_all(self._servers)

    async def log_probs(self, token_ids: Array) -> Array | None:
        """See `RolloutEngine`. Of all servers that are up. Paused ones answer nothing: while the engine is paused, None if sums
        tell of all its weights; else what is under way is ended for this, and begins anew when the engine is resumed."""
        await self._begin()
        found: list[Array | None] = []
        async with self._one_by_one:
            self._check_open()
            if self._is_paused and self._attestations.are_whole:
                return None
            name = None if self._lora is None else self._lora.current.name
            salt = f"probe {next(self._probes)}"  # by the keys of other weights it would answer what these make of it

            async def ask(_: ServerHandle, client: VllmClient) -> None:
                with contextlib.suppress(RequestRefused):
                    found.append(await client.prompt_log_probs(token_ids.tolist(), salt, name))

            if self._is_paused:  # and requests wait at the gates
                await self._servers.everywhere(_abort)
                await self._servers.everywhere(lambda handle, client: client.resume())
            await self._servers.everywhere(ask)
            if self._is_paused:
                await self._servers.everywhere(_abort)
        given = [each for each in found if each is not None]
        return np.concatenate(given) if given else None

    async def export_weights(self) -> WeightSource | None:
        """See `RolloutEngine`: what servers are given that come back; None for the version of the model's own files."""
        return None if self._weights.file is None else HeldWeights(self._weights.file.tensors())

    def timings(self) -> Sequence[Timing]:
        """See `RolloutEngine`: vLLM's servers do not say what a step takes."""
        return ()

    async def pause(self) -> None:
        """See `RolloutEngine`. With `pause_mode` wait, responses under way end first; with abort, they begin anew afterwards."""
        await self._begin()
        async with self._one_by_one:
            self._check_open()
            self._is_paused = True
            with self._servers.gates_closed(opens=False):
                await self._servers.everywhere(lambda handle, client: client.pause(self._pause_mode, clear_cache=False))

    async def resume(self) -> None:
        async with self._one_by_one:
            self._check_open()
            if self._is_paused:
                await self._servers.everywhere(lambda handle, client: client.resume(), opens=True)
                self._is_paused = False

    async def reset(self) -> None:
        """See `ThreadedEngine.reset`: the servers drop what is under way and the keys that they keep, and have their weights still.
        A version that was prepared is forgotten."""
        self._check_open()
        self._generation.end("the rollout engine was reset")
        if not self._is_begun:
            return
        async with self._one_by_one:
            self._weights.prepared, self._is_paused = None, False
            with self._servers.gates_closed(opens=True):
                await self._servers.everywhere(lambda handle, client: _clear(client), opens=True)

    async def close(self) -> None:
        """See `RolloutEngine`. Ends the servers that it has started; others go on with the weights they have."""
        if self._is_closed:
            return
        self._is_closed = True
        self._weights.close_thread()
        self._generation.end("the rollout engine is closed")
        for task in self._unloading:
            task.cancel()
        await self._servers.close()
        self._weights.close()
        if self._lora is not None:
            self._lora.close()

    # -- the servers --------------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Connect, once there is an event loop to do it on."""
        self._check_open()
        if self._is_begun:
            return
        async with self._one_by_one:
            if not self._is_begun:
                try:
                    await self._servers.come_up()
                except (ServerLost, RequestRefused) as error:
                    raise RunError(f"a vLLM server does not do what AsyncFlow needs of it (docs/vllm.md): {error}") from error
                self._is_begun = True

    async def _bring_up(self, client: VllmClient) -> None:
        """Bring a server that has just come to the current version."""
        await check_settings(client, max_context=self.max_context, seeded=self._seeded)
        if (file := self._weights.file) is not None:
            promised = self._attestations.whole()
            await client.pause("abort", clear_cache=True)
            await self._transfer.send(client, file)
            await self._attestations.check(client, promised)
            await client.resume()
        else:
            await client.set_weight_version(self._weights.version)
        if self._lora is not None and (current := self._lora.current).name is not None:
            await _load(client, current)
            await self._attestations.check(client, await asyncio.to_thread(self._attestations.adapter, self._lora, current))

    async def _update(self, handle: ServerHandle, client: VllmClient) -> None:
        """Bring a server that generates to the current version."""
        mode: PauseMode = "keep" if self._is_paused else self._pause_mode
        clear = self._recomputes or self._pause_mode != "keep" or not handle.num_outstanding
        await client.pause(mode, clear_cache=clear)
        assert self._weights.file is not None, "a version has been taken"
        await self._transfer.send(client, self._weights.file)
        if not self._is_paused:
            await client.resume()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the rollout engine is closed")


async def _clear(client: VllmClient) -> None:
    """Have a server drop its requests and its cache."""
    await client.pause("abort", clear_cache=True)
    await client.resume()


async def _abort(_: ServerHandle, client: VllmClient) -> None:
    await client.pause("abort", clear_cache=False)


async def _load(client: VllmClient, version: LoraVersion) -> None:
    """Have a server load an adapter; nothing for the base alone."""
    if version.name is not None:
        await client.load_lora(version.name, str(version.folder))
