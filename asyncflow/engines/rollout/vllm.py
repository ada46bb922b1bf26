"""Rollouts on vLLM: one engine over one or several vLLM servers (instances), which it starts, or which are there already.

    generate -> the instance with the fewest outstanding tokens -> a free slot of it -> HTTP -> responses
    prepare  -> the weights, copied into memory that vLLM's processes can map (vllm_weights.py)
    install  -> every instance: pause, load from that memory, name the version, resume

consumes: requests (one prompt, several samples), versions, pauses
waits for: the servers; a lost one's return
is unblocked by: their answers; their being started again

One HTTP request is one sample, so each response is there as soon as it ends; vLLM's prefix cache has the prompt computed once. A
request carries the version it begins under as the cache's salt: no prompt's keys of older weights are ever taken for a new request,
cleared or not. A server that is lost in the middle of anything (vllm_instance.py) is started again and given the current weights;
what it was generating begins anew, on whichever instance is there.

Not here: responses as they grow (streaming), more than one machine for one instance.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from asyncflow.engines.base import Response, SampleKey, Sampling
from asyncflow.engines.rollout.checks import check_request
from asyncflow.engines.rollout.decoder import load_tensors
from asyncflow.engines.rollout.noise import stream_keys
from asyncflow.engines.rollout.vllm_client import Aborted, PauseMode, Refused, ServerLost, VllmClient
from asyncflow.engines.rollout.vllm_devices import check_addresses, check_arguments, check_numbers, sender
from asyncflow.engines.rollout.vllm_devices import why_not_deterministic as _why
from asyncflow.engines.rollout.vllm_instance import Instance
from asyncflow.engines.rollout.vllm_server import ServerOptions
from asyncflow.engines.rollout.vllm_servers import Servers, given_hosts, own_hosts
from asyncflow.engines.rollout.vllm_transfer import NcclTransfer, SharedMemoryTransfer, Transfer, TransferName
from asyncflow.engines.rollout.vllm_weights import ServerWeights
from asyncflow.model_folder import end_token_ids
from asyncflow.types import Array, HeldWeights, RunError, UserError, WeightSource

if TYPE_CHECKING:
    from torch import Tensor

NO_NUMBER = -9999.0  # what vLLM writes for a log-prob that is infinite, or no number


@dataclass(slots=True, eq=False)
class _Sample:
    """What is asked of a server, and the instance that has its tokens, those of its prompt and the most it may get, on its account.

    All samples of a prompt begin on one instance.
    """

    number: int
    prompt_ids: list[int]
    sampling: dict[str, Any]
    tokens: int
    instance: Instance

    def move(self, instance: Instance) -> None:
        """To another instance."""
        self.instance.outstanding_tokens -= self.tokens
        self.instance = instance
        instance.outstanding_tokens += self.tokens

    def ended(self, _: object) -> None:
        """It has its response, or nobody waits for one any more."""
        self.instance.outstanding_tokens -= self.tokens


class VllmEngine:
    """`RolloutEngine` over vLLM. Leaving a `generate` early has the servers drop its responses."""

    is_deterministic = False
    why_not_deterministic = _why()

    def __init__(
        self,
        model_path: Path,
        *,
        num_slots: int,
        max_context: int,
        dtype: Literal["float32", "bfloat16"] = "float32",
        device: str = "cpu",
        num_threads: int = 1,
        version: int = 0,
        stop_ids: Iterable[int] | None = None,
        kv_on_install: Literal["keep", "recompute"] = "keep",
        instances: int = 1,
        tensor_parallel: int = 1,
        devices: Sequence[Sequence[int]] | None = None,
        python: str | None = None,
        addresses: Sequence[str] = (),
        key_variable: str = "VLLM_API_KEY",
        transfer: TransferName = "shared_memory",
        sender_device: str | None = None,
        pause_mode: PauseMode = "keep",
        seeded: bool = True,
        arguments: Mapping[str, Any] | None = None,
        max_restarts: int = 3,
        start_seconds: float = 600.0,
        generation_seconds: float = 1800.0,
        deadline_seconds: float = 120.0,
    ) -> None:
        """Start the servers, and wait until they are ready (some 40 s). The first arguments are those of `SlotEngine`.

        `instances` servers are started, each over `tensor_parallel` devices (`devices`: which ones, a list for each instance), by
        the interpreter `python` of an environment that has vLLM; `arguments`: vLLM's own, by name. Or they are there already, at
        `addresses` (`http://HOST:PORT`, or `unix:PATH`), with the key in the environment variable `key_variable`.

        `transfer`: how they get weights (vllm_transfer.py), with `nccl` from this process's `sender_device`, which no server uses;
        None: the first after those of the servers that are started.
        `pause_mode`: what becomes of responses under way while weights are installed: they are kept and go on, are waited for, or
        begin anew. `seeded`: each request has a seed from its sample's key. A server may be lost `max_restarts` times, and takes at
        most `start_seconds` to come, `generation_seconds` for a response and `deadline_seconds` for anything else.

        Raises `UserError` if vLLM is not there, or does not take the model or an argument, `RunError` if a server does not start
        for another reason.
        """
        check_numbers(instances, tensor_parallel, devices)
        check_addresses(addresses)
        check_arguments(arguments or {}, device)
        self.num_slots, self.max_context = num_slots, max_context
        self._vocab_size = json.loads((model_path / "config.json").read_text())["vocab_size"]
        self._stop_ids = sorted(end_token_ids(model_path) if stop_ids is None else stop_ids)
        self._recomputes, self._pause_mode, self._seeded = kv_on_install == "recompute", pause_mode, seeded
        self._generation_seconds = generation_seconds
        self._is_paused = self._is_closed = self._is_begun = False
        self._one_by_one = asyncio.Lock()  # calls that change what the servers do
        self._open: set[asyncio.Queue[Response | Exception]] = set()
        self._transfer: Transfer = SharedMemoryTransfer()
        if transfer == "nccl":
            sends_from = sender(device, instances, tensor_parallel, devices, addresses, sender_device)
            self._transfer = NcclTransfer(sends_from, tensor_parallel, deadline_seconds)
        per_instance = -(-num_slots // (len(addresses) or instances))
        if addresses:
            hosts = given_hosts(addresses, key_variable)
        else:
            options = partial(
                ServerOptions,
                python=python or sys.executable,
                model_path=model_path,
                dtype=dtype,
                device=device,
                num_threads=num_threads,
                tensor_parallel=tensor_parallel,
                max_num_seqs=per_instance,
                max_context=max_context,
                transfer=self._transfer.backend,
                arguments=arguments or {},
                start_seconds=start_seconds,
            )
            hosts = own_hosts(options, instances, devices, device, tensor_parallel)
        self._weights = ServerWeights(model_path, dtype, version)
        if addresses:  # nobody knows what weights they have
            self._weights.hold(load_tensors(model_path))
        connect = partial(VllmClient, generation_seconds=generation_seconds, deadline_seconds=deadline_seconds)
        self._servers = Servers(
            hosts, connect, self._bring_up, num_slots=per_instance, max_restarts=max_restarts, start_seconds=start_seconds
        )
        self._servers.start()

    @property
    def instances(self) -> Sequence[Instance]:
        """The servers."""
        return self._servers.instances

    @property
    def installed_version(self) -> int:
        return self._weights.version

    def generate(
        self, prompt_ids: Array, *, samples: Sequence[int], sampling: Sampling, key: SampleKey
    ) -> AsyncGenerator[Response, None]:
        """See `RolloutEngine`; also a `ValueError` for an empty prompt, an unknown token or impossible sampling.

        Raises `RunError` when all servers have been lost too often.
        """
        prompt_ids = np.asarray(prompt_ids, np.int64)
        check_request(prompt_ids, sampling, vocab_size=self._vocab_size, max_context=self.max_context)
        return self._generate(prompt_ids, samples, sampling, key)

    async def _generate(
        self, prompt_ids: Array, samples: Sequence[int], sampling: Sampling, key: SampleKey
    ) -> AsyncGenerator[Response, None]:
        await self._begin()
        arrived: asyncio.Queue[Response | Exception] = asyncio.Queue()
        asked = {
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "logprobs": 0,  # of the token that was drawn, and of no other
            "stop_token_ids": self._stop_ids,
            "ignore_eos": True,  # the end tokens are those above, and no others
            "detokenize": False,
        }
        instance, tokens, ids = await self._servers.least_loaded(), len(prompt_ids) + sampling.max_new_tokens, prompt_ids.tolist()
        seeds = stream_keys(key.seed, key.prompt_index, np.array(samples, np.int64)) >> np.uint64(1)
        tasks = []
        for number, seed in zip(samples, seeds.tolist(), strict=True):
            sample = _Sample(number, ids, {**asked, "seed": seed} if self._seeded else asked, tokens, instance)
            instance.outstanding_tokens += tokens
            tasks.append(asyncio.create_task(self._respond(sample, arrived)))
            tasks[-1].add_done_callback(sample.ended)  # also of one that is given up before it has begun
        self._open.add(arrived)
        try:
            for _ in samples:
                item = await arrived.get()
                if isinstance(item, RunError):  # a sentence already
                    raise item
                if isinstance(item, Exception):
                    raise RuntimeError(f"generation ended: {item}") from item
                yield item
        finally:
            self._open.discard(arrived)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _respond(self, sample: _Sample, arrived: asyncio.Queue[Response | Exception]) -> None:
        """One sample's response, or what ended it."""
        try:
            while (response := await self._ask(sample)) is None:
                if not sample.instance.is_up:
                    sample.move(await self._servers.least_loaded())
            arrived.put_nowait(response)
        except Exception as error:  # whatever it is, who waits must hear of it
            arrived.put_nowait(error)

    async def _ask(self, sample: _Sample) -> Response | None:
        """None if it has to be asked for again."""
        instance = sample.instance
        async with instance.slot():
            await instance.gate.wait()
            if not instance.is_up:
                return None
            life, version = instance.life, self._weights.version
            try:
                async with instance.until_lost() as client:
                    made = await client.generate(sample.prompt_ids, sample.sampling, f"version {version}")
            except Aborted:
                return None
            except ServerLost as error:
                self._servers.lost(instance, life, error)
                return None
            except Refused as error:
                raise RunError(f"a vLLM server does not generate what this run asks for (docs/vllm.md): {error}") from error
            first = made.version_spans[0, 1] if len(made.version_spans) else version
            if first != version and self._weights.version == version:
                why = ServerLost(f"it generates by version {first} and was given {version}: has somebody else changed its weights?")
                self._servers.lost(instance, life, why)
                return None
            if first != version and not self._recomputes:
                # It waited there while weights were installed, and began under the new ones with the salt of the old: the keys of
                # its prompt may be those of the old weights, which its spans do not say.
                return None
            instance.num_served += 1
        logprobs = np.where(made.logprobs <= NO_NUMBER, np.float32(np.nan), made.logprobs)
        return Response(sample.number, made.token_ids, logprobs, made.version_spans, made.finish_reason)

    async def prepare(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """See `RolloutEngine`. Copies the tensors to where vLLM's processes can read them, in a thread of its own."""
        async with self._one_by_one:
            self._check_open()
            await self._weights.prepare(version, tensors)

    async def install(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """See `RolloutEngine`. An instance on which it fails is started again; the others go on."""
        await self._begin()
        async with self._one_by_one:
            self._check_open()
            self._servers.close_gates()
            try:  # from here on a server that comes back is given this version
                if self._weights.prepared == version:
                    self._weights.take_prepared()
                else:
                    async with self._servers.unchanged():
                        await self._weights.write_over(version, tensors)
                await self._servers.everywhere(self._update, opens=not self._is_paused)
            finally:
                if not self._is_paused:
                    self._servers.open_gates()

    async def export_weights(self) -> WeightSource | None:
        """See `RolloutEngine`: what servers are given that come back; None for the version of the model's own files."""
        return None if self._weights.file is None else HeldWeights(self._weights.file.tensors())

    async def pause(self) -> None:
        """See `RolloutEngine`. With `pause_mode` wait, responses under way end first; with abort, they begin anew afterwards."""
        await self._begin()
        async with self._one_by_one:
            self._check_open()
            self._is_paused = True
            self._servers.close_gates()
            await self._servers.everywhere(lambda instance, client: self._pause(client, self._pause_mode, clear_cache=False))

    async def resume(self) -> None:
        """See `RolloutEngine`."""
        async with self._one_by_one:
            self._check_open()
            if self._is_paused:
                await self._servers.everywhere(lambda instance, client: client.resume(), opens=True)
                self._is_paused = False

    async def close(self) -> None:
        """See `RolloutEngine`. Ends the servers that it has started; others go on with the weights they have."""
        if self._is_closed:
            return
        self._is_closed = True
        self._weights.close_thread()
        for arrived in self._open:
            arrived.put_nowait(RuntimeError("the rollout engine is closed"))
        await self._servers.close()
        self._weights.close()

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
                except (ServerLost, Refused) as error:
                    raise RunError(f"a vLLM server does not do what AsyncFlow needs of it (docs/vllm.md): {error}") from error
                self._is_begun = True

    async def _bring_up(self, client: VllmClient) -> None:
        """Bring a server that has just come to the current version."""
        await self._check_settings(client)
        if self._weights.file is not None:
            await client.pause("abort", clear_cache=True)
            await self._transfer.send(client, self._weights.file)
            await client.resume()
        else:
            await client.set_weight_version(self._weights.version)

    async def _check_settings(self, client: VllmClient) -> None:
        """That a server was started as docs/vllm.md says, whoever has started it. Raises `UserError`."""
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
        if settings.max_model_len < self.max_context:
            raise UserError(
                f"{client.address} has --max-model-len {settings.max_model_len}, and this run's prompts and responses have up to "
                f"{self.max_context} tokens: start it with so many (docs/vllm.md)"
            )
        if self._seeded and settings.device_type == "cpu" and settings.enable_chunked_prefill:
            raise UserError(
                f"{client.address} is on a CPU and cuts long prompts, of which vLLM dies where a request has a seed: start it with "
                f"--no-enable-chunked-prefill, or set rollout.engine.seeded=false (docs/vllm.md)"
            )

    async def _update(self, instance: Instance, client: VllmClient) -> None:
        """Bring a server that generates to the current version."""
        mode: PauseMode = "keep" if self._is_paused else self._pause_mode
        clear = self._recomputes or self._pause_mode != "keep" or not instance.num_outstanding
        await self._pause(client, mode, clear_cache=clear)
        assert self._weights.file is not None, "a version has been taken"
        await self._transfer.send(client, self._weights.file)
        if not self._is_paused:
            await client.resume()

    async def _pause(self, client: VllmClient, mode: PauseMode, *, clear_cache: bool) -> None:
        await client.pause(mode, clear_cache=clear_cache, may_wait_seconds=self._generation_seconds if mode == "wait" else None)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the rollout engine is closed")
