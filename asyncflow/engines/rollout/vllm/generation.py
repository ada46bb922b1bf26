"""Responses from vLLM's servers.

    a sample -> the instance with the fewest outstanding tokens -> a free slot of it -> HTTP -> its response
       ^                                                                  |
       +---- asked again: its server was lost, or had other weights <-----+

One HTTP request is one sample, so each response is there as soon as it ends; vLLM's prefix cache has the prompt computed once. A
request carries the version it begins under as the cache's salt: no prompt's keys of older weights are ever taken for a new request,
cleared or not. What a lost server was generating begins anew, on whichever instance is there.

consumes: prompts, with how many samples of each, and how they are drawn
waits for: a server; a free slot of it; its gate; its answer
is unblocked by: these; the loss of the server; the caller, when it leaves; the engine's end
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from asyncflow.engines.base import NO_TOKENS, Response, SampleKey, Sampling
from asyncflow.engines.rollout.sampling import later_keys, stream_keys
from asyncflow.engines.rollout.vllm.client import Aborted, RequestRefused, ServerLost
from asyncflow.engines.rollout.vllm.lora_versions import LoraVersions
from asyncflow.engines.rollout.vllm.servers import ServerHandle, ServerPool
from asyncflow.engines.rollout.vllm.weights import ServerWeights
from asyncflow.types import Array, RunError

MAX_HOMES = 10_000  # prompts whose instance is remembered


@dataclass(slots=True, eq=False)
class _ServerRequest:
    """Request to a server, and the instance that has its tokens, those of its prompt and the most it may get, on its account.

    All samples of a prompt begin on one instance.
    """

    number: int
    prompt_ids: list[int]
    sampling: dict[str, Any]
    tokens: int
    handle: ServerHandle

    def move(self, handle: ServerHandle) -> None:
        """Move a sample to another instance."""
        self.handle.outstanding_tokens -= self.tokens
        self.handle = handle
        handle.outstanding_tokens += self.tokens

    def ended(self, _: object) -> None:
        """Take its tokens off the account: it has its response, or is not waited for any more."""
        self.handle.outstanding_tokens -= self.tokens


class Generation:
    """Responses from one worker's vLLM servers: see the module's head."""

    def __init__(
        self,
        servers: ServerPool,
        weights: ServerWeights,
        begin: Callable[[], Awaitable[None]],
        *,
        stop_ids: Sequence[int],
        seeded: bool,
        recomputes: bool,
        lora: LoraVersions | None,
    ) -> None:
        """`begin()` connects to the servers, which have `weights` then. `seeded`: each request has a seed from its sample's key.
        `recomputes`: the keys that a server has of a sequence are computed again when it gets other weights. `lora`: versions are
        adapters, which requests name."""
        self._servers, self._weights, self._begin, self._lora = servers, weights, begin, lora
        self._stop_ids, self._seeded, self._recomputes = stop_ids, seeded, recomputes
        self._open: set[asyncio.Queue[Response | Exception]] = set()
        self._homes: dict[SampleKey, ServerHandle] = {}  # the instance that a prompt's episodes are on

    async def responses(
        self, prompt_ids: Array, samples: Sequence[int], sampling: Sampling, key: SampleKey, after: Array = NO_TOKENS
    ) -> AsyncGenerator[Response, None]:
        """Responses to one prompt, int64 [P], in the order in which they end. Leaving the iteration early has the servers drop the
        others.

        `after`: see `RolloutEngine.generate`. A later turn goes, with all token ids, to the instance of the first one, whose prefix
        cache has what stands before it.

        Raises `RunError` when all servers have been lost too often, or do not generate what is asked for, and `RuntimeError` for
        any other error that ends a sample.
        """
        await self._begin()
        arrived: asyncio.Queue[Response | Exception] = asyncio.Queue()
        asked: dict[str, Any] = {
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "logprobs": 0,  # of the token that was drawn, and of no other
            "stop_token_ids": self._stop_ids if sampling.stop_ids is None else list(sampling.stop_ids),
            "ignore_eos": True,  # the end tokens are those above, and no others
            "detokenize": bool(sampling.stop),
        }
        if sampling.is_truncated:
            asked |= {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
        if sampling.stop:
            asked |= {"stop": sampling.stop, "include_stop_str_in_output": True}
        ids = [*prompt_ids.tolist(), *after.tolist()]
        tokens, handle = len(ids) + sampling.max_new_tokens, self._homes.get(key)
        if handle is None or not handle.is_up:
            handle = await self._servers.least_loaded()
        if sampling.keeps:
            self._homes[key] = handle
            while len(self._homes) > MAX_HOMES:
                del self._homes[next(iter(self._homes))]
        seeds = later_keys(stream_keys(key.seed, key.prompt_index, np.array(samples, np.int64)), len(after)) >> np.uint64(1)
        tasks = []
        for number, seed in zip(samples, seeds.tolist(), strict=True):
            sample = _ServerRequest(number, ids, {**asked, "seed": seed} if self._seeded else asked, tokens, handle)
            handle.outstanding_tokens += tokens
            tasks.append(asyncio.create_task(self._respond(sample, arrived)))
            tasks[-1].add_done_callback(sample.ended)  # also of one that is cancelled before it has begun
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

    async def _respond(self, sample: _ServerRequest, arrived: asyncio.Queue[Response | Exception]) -> None:
        """Response of one sample, or the error that ended it."""
        try:
            while (response := await self._ask(sample)) is None:
                if not sample.handle.is_up:
                    sample.move(await self._servers.least_loaded())
            arrived.put_nowait(response)
        except Exception as error:  # whatever it is, the caller waits for it
            arrived.put_nowait(error)

    async def _ask(self, sample: _ServerRequest) -> Response | None:
        """Send the request to its server and wait for the response. None: there is none, and it has to be sent again."""
        handle = sample.handle
        async with handle.slot():
            await handle.gate.wait()
            if not handle.is_up:
                return None
            start, lora = handle.num_starts, self._lora
            try:
                made = await (self._made_by_weights(sample) if lora is None else self._made_by_adapter(sample, lora))
            except Aborted:
                return None
            except ServerLost as error:
                handle.lost(start, error)
                return None
            except RequestRefused as error:
                raise RunError(f"a vLLM server does not generate what this run asks for (docs/vllm.md): {error}") from error
            handle.num_served += made is not None
            return made

    async def _made_by_weights(self, sample: _ServerRequest) -> Response | None:
        version = self._weights.version
        async with sample.handle.until_lost(generates=True) as client:
            made = await client.generate(sample.number, sample.prompt_ids, sample.sampling, f"version {version}")
        first = made.version_spans[0, 1] if len(made.version_spans) else version
        if first != version and self._weights.version == version:
            raise ServerLost(f"it generates by version {first} and was given {version}: has another program changed its weights?")
        # Of another version it waited there while weights were installed, and began under the new ones with the salt of the old:
        # the keys of its prompt may be those of the old weights, which its spans do not say.
        return made if first == version or self._recomputes else None

    async def _made_by_adapter(self, sample: _ServerRequest, lora: LoraVersions) -> Response:
        """A response that one adapter makes from its first token to its last."""
        with lora.request() as version:
            salt = version.name or f"version {version.version}"
            async with sample.handle.until_lost(generates=True) as client:
                made = await client.generate(sample.number, sample.prompt_ids, sample.sampling, salt, version.name)
        return replace(made, version_spans=np.array([[0, version.version]], np.int64))

    def end(self, why: str) -> None:
        """Tell those that wait for responses that there will be none."""
        for arrived in self._open:
            arrived.put_nowait(RuntimeError(why))
