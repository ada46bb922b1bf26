"""Rollout by transformers' own `generate`, for any causal language model: where there is neither a decoder of ours nor vLLM.

    requests with prompts of one length --> [ generate: forward, draw, forward, draw, ... ] --> responses, each when it ends

`generate` knows each family's cache, whatever its layers are. Rows of one batch have prompts of the same length, so nothing is
padded and no mask is needed; rows that have ended are computed on until the last one of the batch ends. Each token is drawn here,
where the library asks for processed logits: by the sample's own noise (sampling.py), with the log-prob of the distribution that it
is drawn from. Calls run between two tokens, so an install changes whole steps; responses under way keep their caches.

Some families' caches are wrong in a batch. So a few tokens are generated at the start and compared with one forward pass
(cache_probe.py): rows go in batches if that is right, else one by one; a model whose single rows differ, too, is refused.

Sums of a row may depend on the rows beside it, so no bits are promised. Slower than the embedded engine: see docs/rollout.md.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.utils.logging import disable_progress_bar

from asyncflow.attestation import Attestation
from asyncflow.bit_sums import sum_of_bits
from asyncflow.engines.base import Response, RolloutEngineOptions, Timing
from asyncflow.engines.devices import check_device
from asyncflow.engines.families import why_not_generated
from asyncflow.engines.rollout.cache_probe import TOLERANCES, largest_difference, windows_of
from asyncflow.engines.rollout.checks import check_tensors, why_transformers_is_not_deterministic
from asyncflow.engines.rollout.requests import SlotRequest
from asyncflow.engines.rollout.sampling import Truncation, draw_tokens, uniforms
from asyncflow.engines.rollout.stop_strings import StopStrings
from asyncflow.engines.rollout.threaded import ThreadedEngine
from asyncflow.model_folder import end_token_ids
from asyncflow.registry import by_name
from asyncflow.types import Array, HeldWeights, UserError, WeightSource


class TransformersEngine(ThreadedEngine):
    """`RolloutEngine` over `generate`; at most `num_slots` rows at a time. `remark`: which way rows go, and why."""

    is_deterministic = False
    why_not_deterministic = why_transformers_is_not_deterministic()

    @by_name(RolloutEngineOptions)
    def __init__(self, options: RolloutEngineOptions) -> None:
        """Load the model. No cache is kept between turns, so `num_parked` counts for nothing.

        Raises `UserError` for `kv_on_install` other than `keep`, and `ValueError` for a model that transformers does not load, one
        with fewer positions, or one whose log-probs are not the same with its cache.
        """
        path, max_context = options.model_path, options.max_context
        check_device(options.device, "rollout.device")
        if options.kv_on_install != "keep":
            raise UserError("rollout.engine=transformers keeps the caches of responses under way: set rollout.kv_on_install=keep")
        disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, options.dtype))
        except OSError as error:
            raise ValueError(str(error).splitlines()[0]) from error
        limit = getattr(model.config, "max_position_embeddings", None)
        if limit is not None and max_context > limit:
            raise ValueError(f"max_context {max_context} exceeds the model's {limit} positions")
        if why := why_not_generated(model.config.to_dict(), max_context):
            raise ValueError(f"rollout.engine=transformers: {why}")
        if hasattr(model.config, "rescale_every"):
            model.config.rescale_every = 0  # rwkv would halve parameters in its first forward pass, and never installed ones
        model.requires_grad_(False).eval().to(options.device)
        # Tensors of another class than the CPU's, as an NPU's are, come as a parameter for each name.
        model.tie_weights(recompute_mapping=False)
        model.generation_config = GenerationConfig()  # the checkpoint's own penalties and filters are not the run's
        self._model, self._parameters = model, dict(model.named_parameters())
        super().__init__(options, vocab_size=model.get_input_embeddings().weight.shape[0])
        stop_ids = frozenset(end_token_ids(path) if options.stop_ids is None else options.stop_ids)
        version, stop_strings = options.version, self._stop_strings
        rows = Batches(model, self._parameters, self.num_slots, stop_ids, version, stop_strings, self._between_tokens)
        self._start(rows, options.num_threads)
        try:
            self.remark = self._hand_in(partial(self._choose_way, rows, TOLERANCES[options.dtype])).result()
        except ValueError:
            self._inbox.put(None)  # ends the thread
            raise

    def _choose_way(self, rows: Batches, tolerance: float) -> str:
        """Have rows go in batches, or one by one, as their log-probs are right; return what was found. Raises `ValueError` if
        neither is."""
        config = self._model.config
        kind, found = config.model_type, ""
        rounding = "" if self._model.dtype == torch.float32 else "; in rollout.dtype=float32 rounding is no cause"
        for rows.num_rows in dict.fromkeys((self.num_slots, 1)):
            try:
                difference = largest_difference(
                    rows,
                    self._log_probs,
                    vocab_size=self._vocab_size,
                    max_context=self.max_context,
                    windows=windows_of(config.get_text_config()),
                )
            except Exception as error:  # of whatever the family's own code does
                found = f"{type(error).__name__}: {error}"
                continue
            if difference <= tolerance and rows.num_rows == self.num_slots:
                return f"rows of this {kind} are generated in batches: with the cache a log-prob differs by {difference:.1e} nats"
            if difference <= tolerance:
                return f"rows of this {kind} are generated one by one: in a batch, with the cache, {found}"
            found = f"log-probs differ by {difference:.2g} nats from those of one forward pass"
        raise ValueError(
            f"transformers does not generate rightly with the cache of this model of type {kind!r}, not even a row alone: {found}; "
            f"take rollout.engine=vllm if that has the model, another version of transformers, or another model{rounding}"
        )

    async def prepare(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Check the tensors; there is nothing to prepare, see `RolloutEngine.prepare`."""
        fitting(tensors, self._parameters)

    async def export_weights(self) -> WeightSource:
        return HeldWeights(self._parameters)

    async def attest(self) -> Attestation:
        """Happens between two tokens, see `RolloutEngine.attest`."""
        self._check_open()
        return await asyncio.wrap_future(self._hand_in(self._attest))

    def _attest(self) -> Attestation:
        return Attestation([([name], sum_of_bits(parameter)) for name, parameter in self._parameters.items()])

    async def log_probs(self, token_ids: Array) -> Array:
        """Happens between two tokens, see `RolloutEngine.log_probs`."""
        self._check_open()
        return await asyncio.wrap_future(self._hand_in(partial(self._log_probs, token_ids)))

    @torch.no_grad()
    def _log_probs(self, token_ids: Array) -> Array:
        ids_1L = torch.from_numpy(token_ids)[None].to(self._model.device)
        logits_LV = self._model(input_ids=ids_1L, use_cache=False).logits[0, :-1].float()
        chosen_L1 = logits_LV.log_softmax(-1).gather(1, ids_1L[0, 1:, None])
        found: Array = chosen_L1.squeeze(1).cpu().numpy()
        return found

    def _between_tokens(self) -> None:
        """Hand over what has ended, and make the calls that wait; while paused, all that come. Raises `RuntimeError` at the end."""
        self._deliveries.hand_over()
        while self._slots.is_paused or not self._inbox.empty():
            call = self._inbox.get()
            if call is None:
                self._inbox.put(None)  # for the thread's loop
                raise RuntimeError("the rollout engine is closed")
            call()
            self._deliveries.hand_over()


@dataclass(slots=True, eq=False)
class _GeneratedRow:
    """Row of a batch: a sample, and what it has so far."""

    request: SlotRequest
    sample: int
    key: np.uint64
    spans: list[tuple[int, int]]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_done: bool = False


class Batches:
    """`Rows` of one batch after another."""

    def __init__(
        self,
        model: Any,
        parameters: Mapping[str, Tensor],
        num_rows: int,
        stop_ids: frozenset[int],
        version: int,
        stop_strings: StopStrings,
        between_tokens: Callable[[], None],
    ) -> None:
        """`parameters`: the model's, by name. `num_rows`: of a batch, at most. `between_tokens` is called after each token."""
        self.version, self.is_paused = version, False
        self._model, self._parameters, self.num_rows = model, parameters, num_rows
        self._stop_ids, self._stop_strings, self._between_tokens = stop_ids, stop_strings, between_tokens
        self._waiting: deque[SlotRequest] = deque()
        self._rows: list[_GeneratedRow] = []

    @property
    def is_busy(self) -> bool:
        """Whether a sample waits; while a batch is generated nobody asks."""
        return bool(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether a request that is added now is in the next batch: no other one waits."""
        return not self._waiting

    def submit(self, request: SlotRequest) -> None:
        """Add a request, which waits for a batch."""
        self._waiting.append(request)

    def cancel(self, request: SlotRequest) -> None:
        """Forget the samples of `request`; its rows are computed on with their batch, for nobody."""
        if request in self._waiting:
            self._waiting.remove(request)
        for row in self._rows:
            row.is_done |= row.request is request

    def fail(self, error: Exception) -> None:
        """End every request with `error`. A batch that is generated meanwhile ends with its next token."""
        requests = dict.fromkeys([*(row.request for row in self._rows if not row.is_done), *self._waiting])
        for row in self._rows:
            row.is_done = True
        self._waiting.clear()
        for request in requests:
            request.deliver(error)

    def install(self, version: int, tensors: Mapping[str, Tensor], prepared: Sequence[Tensor] | None) -> None:
        """New weights for the tokens from now on; `ValueError`, changing nothing, when they are not the model's."""
        given = fitting(tensors, self._parameters)
        for name, parameter in self._parameters.items():
            parameter.copy_(given[name])
        self.version = version
        for row in self._rows:
            if row.spans[-1][0] == len(row.tokens):  # two installs without a token between them
                row.spans.pop()
            row.spans.append((len(row.tokens), version))

    def end_timing(self) -> None:
        """Do nothing: nothing is timed."""

    def take_timings(self) -> list[Timing]:
        """Empty list: pieces of a batch are not told apart."""
        return []

    def step(self) -> None:
        """Generate a batch to its end: the oldest request's samples, and those of others with prompts of the same length."""
        self._rows.clear()  # of a batch that has failed
        self._fill()
        # Some families keep a batch's recurrent states in their modules, which neither an earlier batch nor `log_probs` may touch.
        model = copy.deepcopy(self._model, {id(weight): weight for weight in self._parameters.values()})
        ids_NL = torch.from_numpy(np.stack([_prompt(row.request) for row in self._rows])).to(self._model.device)
        most = max(row.request.sampling.max_new_tokens for row in self._rows)
        model.generate(
            ids_NL,
            attention_mask=torch.ones_like(ids_NL),
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=most, pad_token_id=0, use_cache=True),
            logits_processor=[_Draw(self._draw)],
            stopping_criteria=[_RowsEnded(self._are_done)],
        )
        self._rows.clear()

    def _fill(self) -> None:
        length, left = len(_prompt(self._waiting[0])), deque[SlotRequest]()
        while self._waiting:
            request = self._waiting.popleft()
            while len(_prompt(request)) == length and request.pending and len(self._rows) < self.num_rows:
                sample, key = request.pending.popleft()
                self._rows.append(_GeneratedRow(request, sample, key, [(0, self.version)]))
            if request.pending:
                left.append(request)
        self._waiting = left

    def _draw(self, logits_NV: Tensor) -> Tensor:
        """Draw a token for each row that has not ended, and deliver what ends: the tokens, int64 [N]; 0 for the others."""
        tokens_N = torch.zeros(len(logits_NV), dtype=torch.int64)
        active = [i for i, row in enumerate(self._rows) if not row.is_done]
        if active:
            rows = [self._rows[i] for i in active]
            samplings = [row.request.sampling for row in rows]
            left = Truncation(
                np.array([s.top_p if s.is_truncated else 1.0 for s in samplings], np.float32),
                np.array([s.top_k if s.is_truncated else 0 for s in samplings], np.int64),
                np.array([s.min_p if s.is_truncated else 0.0 for s in samplings], np.float32),
            )
            noise = uniforms(
                np.array([row.key for row in rows]), np.array([len(row.request.after) + len(row.tokens) for row in rows], np.int64)
            )
            temperatures = np.array([s.temperature for s in samplings], np.float32)
            tokens, logprobs = draw_tokens(logits_NV[active].float(), temperatures, noise, None if left.is_none else left)
            if not np.isfinite(logprobs).all():
                raise RuntimeError("the model's logits are not finite: the installed weights are broken")
            tokens_N[active] = torch.from_numpy(tokens)
            for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
                row.tokens.append(token)
                row.logprobs.append(logprob)
                self._end(row)
        self._between_tokens()
        return tokens_N

    def _end(self, row: _GeneratedRow) -> None:
        """Deliver a row's response if its newest token ends it."""
        sampling, count = row.request.sampling, len(row.tokens)
        stop_ids = self._stop_ids if sampling.stop_ids is None else sampling.stop_ids
        is_stopped = row.tokens[-1] in stop_ids or (
            bool(sampling.stop) and self._stop_strings.are_completed(np.array(row.tokens, np.int64), sampling.stop)
        )
        if not is_stopped and count < sampling.max_new_tokens:
            return
        row.is_done = True
        row.request.deliver(
            Response(
                sample=row.sample,
                token_ids=np.array(row.tokens, np.int64),
                logprobs=np.array(row.logprobs, np.float32),
                version_spans=np.array(row.spans, np.int64),
                finish_reason="stop" if is_stopped else "length",
            )
        )

    def _are_done(self) -> list[bool]:
        return [row.is_done for row in self._rows]


def _prompt(request: SlotRequest) -> Array:
    """Tokens before a request's responses: its prompt, and the turns after it."""
    return np.concatenate([request.prompt_ids, request.after]) if len(request.after) else request.prompt_ids


def fitting(tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors for a model's parameters, by the same names. `ValueError` when one does not fit."""
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    return check_tensors(tensors, shapes, ties_head="lm_head.weight" not in shapes and "model.embed_tokens.weight" in shapes)


class _Draw(LogitsProcessor):
    """Leaves one token of each row: the one that `draw` draws."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        self._draw = draw

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens_N1 = self._draw(scores)[:, None].to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens_N1, 0.0)


class _RowsEnded(StoppingCriteria):
    """Stopping criterion: the rows that have ended, as `are_done` says."""

    def __init__(self, are_done: Callable[[], list[bool]]) -> None:
        self._are_done = are_done

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        return torch.tensor(self._are_done(), device=input_ids.device)
