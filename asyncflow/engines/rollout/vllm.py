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
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from asyncflow.engines.base import Response, SampleKey, Sampling
from asyncflow.engines.rollout.decoder import load_tensors
from asyncflow.engines.rollout.noise import stream_keys
from asyncflow.engines.rollout.vllm_client import Aborted, PauseMode, Refused, ServerLost, VllmClient
from asyncflow.engines.rollout.vllm_devices import check_addresses
from asyncflow.engines.rollout.vllm_instance import Host, Instance, OwnServer, RunningServer
from asyncflow.engines.rollout.vllm_server import ServerOptions
from asyncflow.engines.rollout.vllm_transfer import NcclTransfer, SharedMemoryTransfer, Transfer, TransferName
from asyncflow.engines.rollout.vllm_weights import WeightsFile, check_tensors, shapes_of
from asyncflow.model_folder import end_token_ids
from asyncflow.threads import ComputeThread
from asyncflow.types import Array, RunError, UserError

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
    why_not_deterministic = "vLLM's sums depend on what else is in its batch, so a response that is made again may be another"

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
        sender_device: str = "cuda:0",
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

        `transfer`: how they get weights (vllm_transfer.py), with `nccl` from this process's `sender_device`, which no server uses.
        `pause_mode`: what becomes of responses under way while weights are installed: they are kept and go on, are waited for, or
        begin anew. `seeded`: each request has a seed from its sample's key. A server may be lost `max_restarts` times, and takes at
        most `start_seconds` to come, `generation_seconds` for a response and `deadline_seconds` for anything else.

        Raises `UserError` if vLLM is not there, or does not take the model or an argument, `RunError` if a server does not start
        for another reason.
        """
        if instances < 1 or tensor_parallel < 1 or (devices is not None and len(devices) != instances):
            raise UserError(
                f"rollout.engine: instances={instances}, tensor_parallel={tensor_parallel} and devices={devices} do not go "
                f"together: both numbers are at least 1, and devices has a list for each instance"
            )
        check_addresses(addresses)
        hosts: Sequence[Host] = [RunningServer(address, _key(key_variable)) for address in addresses]
        self.num_slots, self.max_context = num_slots, max_context
        fields = json.loads((model_path / "config.json").read_text())
        self._vocab_size, self._ties_head = fields["vocab_size"], bool(fields.get("tie_word_embeddings"))
        self._shapes = shapes_of(model_path)
        self._stop_ids = sorted(end_token_ids(model_path) if stop_ids is None else stop_ids)
        self._recomputes, self._pause_mode, self._seeded = kv_on_install == "recompute", pause_mode, seeded
        self._generation_seconds = generation_seconds
        self._version = version
        self._files = WeightsFile(dtype), WeightsFile(dtype)  # what is installed, and what is prepared
        self._has_file = False  # whether the installed version is in its file; else it is the one of the model's files
        self._prepared: int | None = None
        self._thread = ComputeThread("vllm weights")
        self._transfer: Transfer = SharedMemoryTransfer()
        if transfer == "nccl":
            self._transfer = NcclTransfer(sender_device, tensor_parallel, deadline_seconds)
        self._are_others = bool(addresses)
        self._is_paused = self._is_closed = self._is_begun = False
        self._gate = asyncio.Event()
        self._gate.set()
        self._changed = asyncio.Event()
        self._one_by_one = asyncio.Lock()  # calls that change what the servers do
        self._open: set[asyncio.Queue[Response | Exception]] = set()
        per_instance = -(-num_slots // (len(hosts) or instances))
        if not hosts:
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
            hosts = [
                OwnServer(
                    options(devices=devices[i] if devices else _consecutive(device, i, tensor_parallel, instances)), f"vLLM {i}"
                )
                for i in range(instances)
            ]
        else:  # nobody knows what weights they have
            self._files[0].write(version, check_tensors(load_tensors(model_path), self._shapes, ties_head=self._ties_head))
            self._has_file = True
        connect = partial(VllmClient, generation_seconds=generation_seconds, deadline_seconds=deadline_seconds)
        self.instances = [
            Instance(
                host,
                connect,
                num_slots=per_instance,
                max_restarts=max_restarts,
                start_seconds=start_seconds,
                changed=self._wake,
            )
            for host in hosts
        ]
        self._start_all()

    @property
    def installed_version(self) -> int:
        return self._version

    def generate(
        self, prompt_ids: Array, *, samples: Sequence[int], sampling: Sampling, key: SampleKey
    ) -> AsyncGenerator[Response, None]:
        """See `RolloutEngine`; also a `ValueError` for an empty prompt, an unknown token or impossible sampling.

        Raises `RunError` when all servers have been lost too often.
        """
        prompt_ids = np.asarray(prompt_ids, np.int64)
        if not len(prompt_ids) or prompt_ids.min() < 0 or prompt_ids.max() >= self._vocab_size:
            raise ValueError(f"the prompt of {len(prompt_ids)} tokens is empty or has a token outside 0..{self._vocab_size - 1}")
        if sampling.max_new_tokens < 1 or not 0 <= sampling.temperature < np.inf:
            raise ValueError(f"impossible sampling: {sampling}")
        if len(prompt_ids) + sampling.max_new_tokens > self.max_context:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} and a response of {sampling.max_new_tokens} tokens exceed"
                f" the engine's context of {self.max_context}"
            )
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
        instance, tokens, ids = await self._least_loaded(), len(prompt_ids) + sampling.max_new_tokens, prompt_ids.tolist()
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
                    sample.move(await self._least_loaded())
            arrived.put_nowait(response)
        except Exception as error:  # whatever it is, who waits must hear of it
            arrived.put_nowait(error)

    async def _ask(self, sample: _Sample) -> Response | None:
        """None if it has to be asked for again."""
        instance = sample.instance
        async with instance.slot():
            await self._gate.wait()
            if not instance.is_up:
                return None
            life, version = instance.life, self._version
            try:
                made = await instance.client.generate(sample.prompt_ids, sample.sampling, f"version {version}")
            except Aborted:
                return None
            except ServerLost as error:
                instance.lost(life, error, self._bring_up)
                return None
            except Refused as error:
                raise RunError(f"a vLLM server does not generate what this run asks for (docs/vllm.md): {error}") from error
            first = made.version_spans[0, 1] if len(made.version_spans) else version
            if first != version and self._version == version:
                why = ServerLost(f"it generates by version {first} and was given {version}: has somebody else changed its weights?")
                instance.lost(life, why, self._bring_up)
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
            await self._prepare(version, tensors)

    async def _prepare(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        def write() -> None:
            self._files[1].write(version, check_tensors(tensors, self._shapes, ties_head=self._ties_head))

        self._prepared = None
        await self._thread.run(write)
        self._prepared = version

    async def install(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """See `RolloutEngine`. An instance on which it fails is started again; the others go on."""
        await self._begin()
        async with self._one_by_one:
            self._check_open()
            if self._prepared != version:
                await self._prepare(version, tensors)
            self._gate.clear()
            try:
                # From here on a server that comes back is given this version.
                self._prepared, self._has_file, self._version = None, True, version
                self._files = self._files[1], self._files[0]
                await self._everywhere(self._update)
            finally:
                if not self._is_paused:
                    self._gate.set()

    async def pause(self) -> None:
        """See `RolloutEngine`. With `pause_mode` wait, responses under way end first; with abort, they begin anew afterwards."""
        await self._begin()
        async with self._one_by_one:
            self._check_open()
            self._is_paused = True
            self._gate.clear()
            await self._everywhere(lambda instance, client: self._pause(client, self._pause_mode, clear_cache=False))

    async def resume(self) -> None:
        """See `RolloutEngine`."""
        async with self._one_by_one:
            self._check_open()
            if self._is_paused:
                await self._everywhere(lambda instance, client: client.resume())
                self._is_paused = False
                self._gate.set()

    async def close(self) -> None:
        """See `RolloutEngine`. Ends the servers that it has started; others go on with the weights they have."""
        if self._is_closed:
            return
        self._is_closed = True
        self._thread.close()
        for arrived in self._open:
            arrived.put_nowait(RuntimeError("the rollout engine is closed"))
        self._wake()
        await asyncio.gather(*(instance.close() for instance in self.instances))
        for file in self._files:
            file.close()

    # -- the servers --------------------------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        """Start what is the engine's to start, all at once; end all if one does not come."""
        try:
            for instance in self.instances:
                instance.host.start()
            for instance in self.instances:
                instance.host.wait_until_ready()
        except BaseException:
            for instance in self.instances:
                instance.host.stop()
            raise

    async def _begin(self) -> None:
        """Connect, once there is an event loop to do it on."""
        self._check_open()
        if self._is_begun:
            return
        async with self._one_by_one:
            if not self._is_begun:
                try:
                    await asyncio.gather(*(instance.come_up(self._bring_up) for instance in self.instances))
                except (ServerLost, Refused) as error:
                    raise RunError(f"a vLLM server does not do what AsyncFlow needs of it (docs/vllm.md): {error}") from error
                self._is_begun = True

    async def _bring_up(self, client: VllmClient) -> None:
        """Bring a server that has just come to the current version."""
        if self._are_others:
            await self._check_settings(client)
        if self._has_file:
            await client.pause("abort", clear_cache=True)
            await self._transfer.send(client, self._files[0])
            await client.resume()
        else:
            await client.set_weight_version(self._version)

    async def _check_settings(self, client: VllmClient) -> None:
        """That a server which somebody else has started was started as docs/vllm.md says. Raises `UserError`."""
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

    async def _update(self, instance: Instance, client: VllmClient) -> None:
        """Bring a server that generates to the current version."""
        mode: PauseMode = "keep" if self._is_paused else self._pause_mode
        clear = self._recomputes or self._pause_mode != "keep" or not instance.num_outstanding
        await self._pause(client, mode, clear_cache=clear)
        await self._transfer.send(client, self._files[0])
        if not self._is_paused:
            await client.resume()

    async def _pause(self, client: VllmClient, mode: PauseMode, *, clear_cache: bool) -> None:
        await client.pause(mode, clear_cache=clear_cache, may_wait_seconds=self._generation_seconds if mode == "wait" else None)

    async def _everywhere(self, call: Callable[[Instance, VllmClient], Awaitable[None]]) -> None:
        await asyncio.gather(*(instance.change(partial(call, instance), self._bring_up) for instance in self.instances))

    async def _least_loaded(self) -> Instance:
        """The instance with the fewest outstanding tokens, as soon as there is one. Raises `RunError` when all are given up."""
        while True:
            self._check_open()
            up = [instance for instance in self.instances if instance.is_up]
            if up:
                return min(up, key=lambda instance: instance.outstanding_tokens)
            errors = [instance.error for instance in self.instances if instance.error is not None]
            if len(errors) == len(self.instances):
                raise errors[-1]
            await self._changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the rollout engine is closed")


def _key(variable: str) -> str:
    key = os.environ.get(variable)
    if not key:
        raise UserError(f"rollout.engine.addresses needs the servers' key in the environment variable {variable}: set it")
    return key


def _consecutive(device: str, number: int, tensor_parallel: int, instances: int) -> list[int] | None:
    """The devices of one of several instances: one after another. A single instance takes those that it sees."""
    kind, _, first = device.partition(":")
    if kind == "cpu" or (instances == 1 and not first):
        return None
    begin = int(first or 0) + number * tensor_parallel
    return list(range(begin, begin + tensor_parallel))
