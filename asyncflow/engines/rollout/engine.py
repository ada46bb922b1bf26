"""The embedded rollout engine: continuous batching over slots (`slots.py`), in one thread of its own (`threaded.py`).

    [ admit; a token for all active slots, and a piece of new prompts beside them; calls from the inbox; ... ]

Responses are handed over some together (deliveries.py), at once where a request has its last or a slot stands empty.
Calls run between decode steps, so an install changes the weights of whole steps only; a response under way goes on with the keys
and values that it already has, or has them computed again (`kv_on_install`). While the engine is paused, calls run and steps do
not. At start-up probe.py looks whether this machine keeps the promise that a response's bits depend on nothing but itself.

Between the turns of an episode its slot is parked (slots.py), and others generate.

The slots of a group have their prompt's keys in common (key_cache.py). Few slots have draft tokens verified together (drafts.py).

Requests may name low-rank adapters that were loaded beside what is installed (loaded_adapters.py): one step has rows of several of
them, and of none (low_rank.py). Loading and unloading stops nobody.

Not here: preemption (a slot is big enough for prompt and response from the start).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asyncflow.attestation import Attestation, sum_of_all
from asyncflow.engines.base import NO_TOKENS, Response, SampleKey, Sampling, Timing
from asyncflow.engines.decoder_config import DecoderConfig
from asyncflow.engines.devices import check_device, use_device
from asyncflow.engines.lora import read_lora
from asyncflow.engines.rollout.adapter_bank import INSTALLED, Adapter
from asyncflow.engines.rollout.checks import check_tokens
from asyncflow.engines.rollout.decoder import Decoder
from asyncflow.engines.rollout.decoder_weights import load_tensors
from asyncflow.engines.rollout.loaded_adapters import LoadedAdapters
from asyncflow.engines.rollout.probe import find_dependence
from asyncflow.engines.rollout.slot_options import SlotOptions
from asyncflow.engines.rollout.slot_options import check as check_options
from asyncflow.engines.rollout.slots import Slots
from asyncflow.engines.rollout.threaded import ThreadedEngine, noise_keys
from asyncflow.model_folder import end_token_ids
from asyncflow.registry import by_name
from asyncflow.threads import ComputeThread
from asyncflow.types import Array, LoraSpec, TensorSpec, WeightSource

TRIED_RANK = 16
"""Largest rank of the adapter that the start-up probe tries, where adapters of several ranks may come."""


class SlotEngine(ThreadedEngine):
    """`RolloutEngine` over `num_slots` slots. Leaving a `generate` early frees its slots."""

    _slots: Slots

    @by_name(SlotOptions)
    def __init__(self, options: SlotOptions) -> None:
        """Load the model. Raises `ValueError` when it is not one that the decoder implements."""
        check_device(options.device, "rollout.device")
        check_options(speculation=options.speculation, prefill_chunk=options.prefill_chunk, adapter_room=options.adapter_room)
        path, lora = options.model_path, options.lora
        fields = json.loads((path / "config.json").read_text())
        super().__init__(options, vocab_size=fields["vocab_size"])
        self._decoder = decoder = Decoder(
            DecoderConfig.from_fields(fields),
            num_slots=options.num_slots + options.num_parked,
            max_context=options.max_context,
            dtype=getattr(torch, options.dtype),
            device=torch.device(options.device),
            lora=lora,
        )
        decoder.install(load_tensors(path))
        stop_ids = end_token_ids(path) if options.stop_ids is None else options.stop_ids
        slots = Slots(decoder, options, stop_ids=stop_ids, stop_strings=self._stop_strings)
        self._adapters = LoadedAdapters(options.adapter_room, INSTALLED)
        self._prepared: tuple[int | None, list[Tensor] | None] = (None, None)
        self._preparing = ComputeThread("rollout weights", setup=lambda: torch.set_num_threads(options.num_threads))
        self._start(slots, options.num_threads)
        self._hand_in(partial(use_device, decoder.device)).result()
        self.why_not_deterministic = self._why_not_deterministic(options)
        self.is_deterministic = not self.why_not_deterministic
        self._base = None if lora is None else sum_of_all(dict(decoder.sums()).values())
        if lora is not None and lora.path is not None:
            self._hand_in(partial(decoder.install, read_lora(Path(lora.path), lora))).result()

    def _why_not_deterministic(self, options: SlotOptions) -> str:
        """Reason why no bits are promised, as far as it is known or the probe has found one; "" where they are."""
        if options.device != "cpu":
            return f"no bits are promised on {options.device}"
        if options.num_threads != 1:
            return f"{options.num_threads} threads divide a sum between them: bits are promised for one"
        tried, room = options.lora, options.adapter_room
        if tried is None and room.number:
            tried = LoraSpec(min(room.rank, TRIED_RANK), 1.0)
        probe = partial(find_dependence, self._decoder, num_slots=options.num_slots, max_context=options.max_context, lora=tried)
        return self._hand_in(probe).result()

    def forget(self, key: SampleKey, sample: int) -> None:
        """See `RolloutEngine.forget`."""
        self._inbox.put(partial(self._slots.forget, noise_keys(key, [sample])[0]))

    @property
    def num_computed(self) -> int:
        """Tokens that went through the model so far: of prompts, observations, responses, and what was computed again."""
        return self._slots.num_computed

    async def prepare(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Runs in a thread of its own, beside the one that generates, see `RolloutEngine.prepare`."""
        self._prepared = (None, None)  # another version, which is not needed any more
        self._prepared = (version, await self._preparing.run(self._decoder.prepare, tensors))

    async def reset(self) -> None:
        """See `ThreadedEngine.reset`: parked slots are forgotten, too, and weights that were prepared."""
        self._prepared = (None, None)
        await super().reset()

    def _take_prepared(self, version: int) -> list[Tensor] | None:
        prepared_version, prepared = self._prepared
        self._prepared = (None, None)
        return prepared if prepared_version == version else None

    def generate(
        self,
        prompt_ids: Array,
        *,
        samples: Sequence[int],
        sampling: Sampling,
        key: SampleKey,
        after: Array = NO_TOKENS,
        adapter: str | None = None,
    ) -> AsyncGenerator[Response, None]:
        """See `ThreadedEngine.generate`. `adapter`: name of one that is loaded, or else a `ValueError`; None: what is installed."""
        return self._generate(self._request(prompt_ids, samples, sampling, key, after), self._adapters.named(adapter).request())

    async def load_adapter(self, name: str, lora: LoraSpec, tensors: Mapping[str, Tensor]) -> None:
        """Load a low-rank adapter over the model's weights, which requests may name from then on; others go on meanwhile.

        `tensors`: as `lora_shapes` names them. Raises `ValueError`, changing nothing, where there is no room, the rank is too
        large, the name is taken, or the tensors do not fit.
        """

        def make() -> Adapter:
            made = self._decoder.lora.new(lora)
            made.copy(tensors)
            return made

        self._check_open()
        adapter = self._adapters.begin(name, lora.rank)
        try:
            made = await self._preparing.run(make)
            self._check_open()
            await asyncio.wrap_future(self._hand_in(partial(self._decoder.lora.put, adapter.number, made)))
        except BaseException:
            self._hand_in(partial(self._decoder.lora.remove, adapter.number))
            self._adapters.forget(adapter)
            raise
        adapter.is_there = True

    async def unload_adapter(self, name: str) -> None:
        """Let an adapter go: no request may name it from now on, and it goes when those that do have ended. Cancelled before that,
        it stays. Raises `ValueError` if it is not there."""
        adapter = self._adapters.named(name)
        await adapter.unused()
        self._check_open()
        gone = self._hand_in(partial(self._slots.remove_adapter, adapter.number))
        self._adapters.forget(adapter)  # whatever has its number next is handed in behind this
        await asyncio.wrap_future(gone)

    async def log_probs(self, token_ids: Array, adapter: str | None = None) -> Array:
        """Log-probs (float32 [L - 1]) of the tokens of a sequence (int64 [L]) after its first, under the installed weights, or
        with an adapter of this name.

        Computed between two decode steps. Raises `ValueError` for an unknown token, more tokens than the context
        has, or an adapter that is not there.
        """
        token_ids = np.asarray(token_ids, np.int64)
        check_tokens(token_ids, vocab_size=self._vocab_size)
        if len(token_ids) > self.max_context:
            raise ValueError(f"{len(token_ids)} tokens exceed the engine's context of {self.max_context}")
        self._check_open()
        with self._adapters.named(adapter).request() as number:
            return await asyncio.wrap_future(self._hand_in(partial(self._decoder.log_probs, token_ids, number)))

    async def attest(self, adapter: str | None = None) -> Attestation:
        """Happens between two decode steps, see `RolloutEngine.attest`; of an adapter of this name, if one is given. The sum of a
        base under adapters is taken once, at the start."""
        self._check_open()
        with self._adapters.named(adapter).request() as number:
            return await asyncio.wrap_future(self._hand_in(partial(self._attest, number)))

    def _attest(self, number: int) -> Attestation:
        sums = self._decoder.sums() if number == INSTALLED and self._base is None else self._decoder.lora.sums(number)
        return Attestation([(list(names), found) for names, found in sums], self._base)

    async def export_weights(self) -> WeightSource:
        return InstalledWeights(self._decoder)

    def timings(self) -> Sequence[Timing]:
        """See `RolloutEngine`: all prefills, and all decode steps, `pass_timings.TIMED_TOGETHER` of them at a time."""
        return self._slots.take_timings()

    async def close(self) -> None:
        if not self._is_closed:
            self._preparing.close()
        await super().close()


class InstalledWeights(WeightSource):
    """`WeightSource` of what installs write in a decoder: its weights, or its adapter."""

    are_lasting = are_gathered = False

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        dtype = str(decoder.dtype).removeprefix("torch.")
        shapes = {name: tuple(piece.shape) for name, piece in decoder.lora.slices.items()} or decoder.shapes
        self.specs: Mapping[str, TensorSpec] = {name: TensorSpec(shape, dtype) for name, shape in sorted(shapes.items())}

    async def tensors(self) -> AsyncIterator[tuple[str, Tensor]]:
        for name in self.specs:
            tensor = await asyncio.to_thread(self._decoder.installed, name)
            yield name, tensor.cpu().contiguous()

    async def gathered(self) -> None:
        """Return at once: nothing is gathered."""
