"""Generation from outside: the engine of a rollout worker whose responses a client makes.

    Rollout loop --generate--> OutsideEngine <--take-- client       prompts, under the version that the worker serves
                 <--responses--              <--put---
                 --install---->              ...installed by the client

The worker is the run's own rollout loop (`loops/rollout.py`), in the server's process: leases, shares, version intervals and the
weights' schedule are as for any other worker. If the client goes, so does the worker, as one that has died.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from asyncflow.attestation import Attestation
from asyncflow.engines.base import NO_TOKENS, Response, SampleKey, Sampling, Timing
from asyncflow.loops.samples import prompt_hash
from asyncflow.transfer_queue.batches import take
from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.directory import Places
from asyncflow.transfer_queue.leases import Lease
from asyncflow.types import Array, Batch, RunError, UserError, WeightSource, row_index
from asyncflow.weight_sync.base import Manifest, WeightSyncError
from asyncflow.weight_sync.files import held

if TYPE_CHECKING:
    from torch import Tensor

STORED = ""
"""Outcome of a response that counts; any other outcome is a sentence that says why it does not."""
OVER = "this worker is not asked for that row, or not any more: its lease is over, or another response was first"


@dataclass(slots=True)
class OutsidePrompt:
    """Prompt whose `samples` are wanted. `version`: the one under which it was taken."""

    prompt_ids: Array
    samples: list[int]
    sampling: Sampling
    group: int
    arrived: asyncio.Queue[Response]
    version: int = -1


@dataclass(frozen=True, slots=True)
class Work:
    """Work for a client: prompts to generate under `version`, or, with `install`, weights to load first. `is_over`: there will be
    no more."""

    version: int
    prompts: list[OutsidePrompt] = field(default_factory=list)
    install: int | None = None
    is_over: bool = False


class OutsideEngine:
    """Implements `RolloutEngine`. What a client may say is checked here: nothing else of it reaches the loop."""

    is_deterministic = False
    why_not_deterministic = "a process outside the run generates"

    def __init__(self, num_slots: int, group_bits: int, vocabulary: int) -> None:
        """`vocabulary`: token ids are below it."""
        self.num_slots, self._group_bits, self._vocabulary = num_slots, group_bits, vocabulary
        self.version = 0
        self._install: int | None = None
        self._attested: Attestation | None = None
        self._waiting: list[OutsidePrompt] = []
        self._wanted: dict[int, OutsidePrompt] = {}  # by row, those that a client has
        self._outcomes: dict[int, asyncio.Future[str]] = {}  # by row, those that are being scored and stored
        self._hashes: dict[int, int] = {}  # by row, of their prompts
        self._is_over = self._is_paused = False
        self._why_over = ""
        self._changed, self._installed = asyncio.Event(), asyncio.Event()

    # -- the loop's ---------------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids: Array, *, samples: Sequence[int], sampling: Sampling, key: SampleKey, after: Array = NO_TOKENS
    ) -> AsyncIterator[Response]:
        """See `RolloutEngine`; single turns only, which a run with environments is told when a client joins (`after` is empty)."""
        prompt = OutsidePrompt(prompt_ids, list(samples), sampling, key.prompt_index, asyncio.Queue())
        self._waiting.append(prompt)
        self._changed.set()
        try:
            for _ in samples:
                yield await prompt.arrived.get()
        finally:
            self._waiting = [other for other in self._waiting if other is not prompt]
            self._wanted = {row: other for row, other in self._wanted.items() if other is not prompt}

    def forget(self, key: SampleKey, sample: int) -> None:
        """See `RolloutEngine`. Nothing is kept of a sample."""

    async def attest(self) -> Attestation | None:
        """See `RolloutEngine`: what the client has said of its weights, if anything. It checks the hash of the file in any case."""
        return self._attested

    async def log_probs(self, token_ids: Array) -> Array | None:
        """See `RolloutEngine.log_probs`: those of a probe are in what the client has said of its weights."""
        return None

    async def prepare(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """See `RolloutEngine`. There is nothing to be prepared here."""

    async def install(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Wait until the client has loaded this version."""
        self._install = version
        self._changed.set()
        while self._install is not None:
            if self._is_over:
                raise RunError("the client has gone")
            self._installed.clear()
            await self._installed.wait()

    async def export_weights(self) -> WeightSource | None:
        """See `RolloutEngine`. They are the client's."""
        return None

    def timings(self) -> Sequence[Timing]:
        """See `RolloutEngine`."""
        return ()

    async def pause(self) -> None:
        """See `RolloutEngine`: the client gets no prompts. What it has it may end; each response says which version it is of."""
        self._is_paused = True

    async def resume(self) -> None:
        """See `RolloutEngine`."""
        self._is_paused = False
        self._changed.set()

    async def close(self) -> None:
        """See `RolloutEngine`."""
        self.stop()

    # -- the client's -------------------------------------------------------------------------------------------------------

    async def take(self, num_prompts: int, timeout_seconds: float) -> Work:
        """Prompts to generate, so many at most, or a version to install. Waits for either, so long. Raises `RunError` where the
        client is to join anew."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while (not self._waiting or self._is_paused) and self._install is None and not self._is_over:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return Work(self.version)
        if self._why_over:
            raise RunError(f"this worker has no session any more: {self._why_over}")
        if self._is_over or self._install is not None:
            return Work(self.version, install=self._install, is_over=self._is_over)
        taken, self._waiting = self._waiting[:num_prompts], self._waiting[num_prompts:]
        for prompt in taken:
            prompt.version = self.version
            self._wanted |= {row_index(prompt.group, sample, self._group_bits): prompt for sample in prompt.samples}
        return Work(self.version, taken)

    async def put(self, rows: Sequence[tuple[int, Response]]) -> list[str]:
        """Responses by row. Returns an outcome for each, when it is scored and stored.

        Raises `UserError`, before anything is taken, for a response that cannot be.
        """
        for row, response in rows:
            if (prompt := self._wanted.get(row)) is not None:
                self._check(row, prompt, response)
        outcomes: list[asyncio.Future[str]] = []
        for row, response in rows:
            outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            outcomes.append(outcome)
            if (taken := self._wanted.pop(row, None)) is None:
                outcome.set_result(OVER)
            else:
                self._outcomes[row], self._hashes[row] = outcome, prompt_hash(taken.prompt_ids)
                sample = row - row_index(taken.group, 0, self._group_bits)
                taken.arrived.put_nowait(dataclasses.replace(response, sample=sample))
        return [await outcome for outcome in outcomes]

    def installed(self, version: int, attested: Attestation | None = None) -> None:
        """Note that the client generates under this version from now on, with what it has `attested`. Raises `RunError` where
        another one is to be installed."""
        if version == self.version and self._install is None:
            return  # said twice
        if version != self._install:
            raise RunError(f"version {version} is not the one that is to be installed: that is {self._install}")
        self.version, self._install, self._attested = version, None, attested
        self._installed.set()

    def prompt_hashes(self, rows: Array) -> Array:
        """Hashes of the prompts (`prompt_hash`) that these rows, which are being stored, answer: int64 [n]."""
        return np.array([self._hashes[row] for row in rows.tolist()], np.int64)

    def resolve(self, row: int, outcome: str) -> None:
        """Answer the client that waits: its response was stored, or was not."""
        self._hashes.pop(row, None)
        if (waiting := self._outcomes.pop(row, None)) is not None and not waiting.done():
            waiting.set_result(outcome)

    def stop(self, why: str = "") -> None:
        """Stop: the run is stopping, or the client has gone; with a reason, it is to join anew."""
        self._is_over, self._why_over = True, self._why_over or why
        for row in list(self._outcomes):
            self.resolve(row, why or "the run is stopping")
        self._changed.set()
        self._installed.set()

    def _check(self, row: int, prompt: OutsidePrompt, response: Response) -> None:
        """Raises `UserError` where a response breaks a law."""
        count, ids, spans = len(response.token_ids), response.token_ids, response.version_spans
        if not 0 < count <= prompt.sampling.max_new_tokens:
            raise UserError(f"the response for row {row} has {count} tokens: 1 to {prompt.sampling.max_new_tokens} are asked for")
        if len(response.logprobs) != count:
            raise UserError(f"the response for row {row} has {count} tokens and {len(response.logprobs)} log-probs")
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocabulary:
            raise UserError(f"the response for row {row} has a token id that is not in 0 to {self._vocabulary - 1}")
        if not (np.isfinite(response.logprobs).all() and (response.logprobs <= 1e-3).all()):
            raise UserError(f"the response for row {row} has a log-prob that is none: they are finite, and 0 at most")
        offsets, versions = spans[:, 0].tolist(), spans[:, 1].tolist()
        if (
            not offsets
            or offsets[0] != 0
            or offsets != sorted(set(offsets))
            or offsets[-1] >= count
            or versions != sorted(versions)
        ):
            raise UserError(f"the version spans of the response for row {row} are not ascending from token 0 on")
        if versions[0] < min(prompt.version, self.version) or versions[-1] > max(prompt.version, self.version):
            raise UserError(
                f"the response for row {row} says versions {versions}: its prompt was taken under version {prompt.version}, and "
                f"this worker serves {self.version}"
            )


class PublishedFiles:
    """Implements `WeightReceiver`: published versions as files, for clients to read.

    A version is held from its fetch until it is installed, so that nobody writes over it while it is read.
    """

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self._file: BinaryIO | None = None

    async def fetch(self, manifest: Manifest) -> Mapping[str, Tensor]:
        """Hold the version's file. Returns no tensors: the client has them."""
        self._let_go()
        try:
            self._file = held(manifest)
        except OSError as error:
            raise WeightSyncError(
                f"version {manifest.version} is not in a file of this machine that could be served: {error.strerror or error}"
            ) from error
        self.manifest = manifest
        return {}

    def file(self, version: int) -> Path:
        """File of the version that is held. Raises `RunError` for another one."""
        if self.manifest is None or self.manifest.version != version or self._file is None:
            raise RunError(f"version {version} is not to be installed by this worker now: asking for prompts says which one is")
        return Path(f"/proc/self/fd/{self._file.fileno()}")

    async def release(self) -> None:
        """Release the version, which is installed."""
        self._let_go()

    async def close(self) -> None:
        """See `WeightReceiver`."""
        self._let_go()

    def _let_go(self) -> None:
        self.manifest = None
        if self._file is not None:
            self._file.close()
            self._file = None


class NotifyingQueue(TransferQueueClient):
    """The queue as an outside worker's loop sees it: a client that has put a response is told what became of it. `kept` is called
    with the rows that were stored, and hashes of their prompts, before that."""

    def __init__(self, places: Places, engine: OutsideEngine, kept: Callable[[Batch, Array], None]) -> None:
        super().__init__(places)
        self._engine, self._kept = engine, kept

    async def complete(self, lease: Lease, outputs: Batch) -> np.ndarray:
        """See `TransferQueueClient.complete`."""
        try:
            is_stored = await super().complete(lease, outputs)
        except BaseException:
            for row in outputs.indices.tolist():
                self._engine.resolve(row, "it could not be stored")
            raise
        if is_stored.any():
            stored_rows = take(self.schema, outputs, np.flatnonzero(is_stored), np.arange(len(outputs.groups)))
            self._kept(stored_rows, self._engine.prompt_hashes(stored_rows.indices))
        for row, stored in zip(outputs.indices.tolist(), is_stored.tolist(), strict=True):
            self._engine.resolve(row, STORED if stored else OVER)
        return is_stored

    async def fail(self, lease: Lease, rows: Sequence[int], error: str, *, is_final: bool = False) -> None:
        """See `TransferQueueClient.fail`."""
        await super().fail(lease, rows, error, is_final=is_final)
        for row in rows:
            self._engine.resolve(row, error)
