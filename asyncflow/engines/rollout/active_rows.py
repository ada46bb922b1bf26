"""Active rows of the embedded engine: what each generates, and its tokens so far. No cache, no passes.

a claim whose slots have all keys --begin--> rows --add: what was drawn, a token at a time--> response, leave --> free
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from torch import Tensor

from asyncflow.engines.base import Response
from asyncflow.engines.rollout.filling import Claim
from asyncflow.engines.rollout.requests import SlotRequest
from asyncflow.engines.rollout.sampling import Truncation, draw_tokens, uniforms
from asyncflow.types import Array


class ActiveRows:
    """Rows 0 .. `num` - 1. Where one leaves, the last one gets its number. Arrays have an entry for every row that there may be."""

    def __init__(self, num_rows: int, max_context: int) -> None:
        self.num = 0
        self.requests: list[SlotRequest] = []
        self._spans: list[list[tuple[int, int]]] = []
        self.slots = np.zeros(num_rows, np.int64)
        self.keys = np.zeros(num_rows, np.uint64)  # of the noise
        self.is_current = np.zeros(num_rows, bool)  # the prompt's keys are those of the installed weights
        self.prompt_lengths = np.zeros(num_rows, np.int64)
        self._starts = np.zeros(num_rows, np.int64)  # tokens behind the prompt that were there before
        self.counts = np.zeros(num_rows, np.int64)  # these and the response's so far
        self.limits = np.zeros(num_rows, np.int64)
        self.tokens = np.zeros((num_rows, max_context), np.int64)  # behind the prompt
        self._logprobs = np.zeros((num_rows, max_context), np.float32)
        self._samples = np.zeros(num_rows, np.int64)
        self._temperatures = np.zeros(num_rows, np.float32)
        self._top_ps = np.ones(num_rows, np.float32)
        self._top_ks = np.zeros(num_rows, np.int64)
        self._min_ps = np.zeros(num_rows, np.float32)
        self._arrays = [value for value in vars(self).values() if isinstance(value, np.ndarray)]

    def begin(self, claim: Claim, version: int) -> None:
        """Give the next rows to a claim; they have no tokens of their own so far. `version`: of the installed weights."""
        request, count, start = claim.request, len(claim.slots), len(claim.request.after)
        rows, sampling = slice(self.num, self.num + count), request.sampling
        self.slots[rows] = claim.slots
        self._samples[rows], self.keys[rows] = zip(*claim.samples, strict=True)
        self._temperatures[rows] = sampling.temperature
        left = (sampling.top_p, sampling.top_k, sampling.min_p) if sampling.is_truncated else (1.0, 0, 0.0)
        self._top_ps[rows], self._top_ks[rows], self._min_ps[rows] = left
        self.prompt_lengths[rows] = len(request.prompt_ids)
        self._starts[rows] = self.counts[rows] = start
        self.limits[rows] = start + sampling.max_new_tokens
        self.is_current[rows] = claim.is_current
        self.tokens[rows, :start] = request.after
        self.requests += [request] * count
        self._spans += [[(start, version)] for _ in range(count)]
        self.num += count

    def install(self, version: int) -> None:
        """Take note of the weights that make the tokens from now on; the prompts' keys are older."""
        self.is_current[:] = False
        for count, spans in zip(self.counts.tolist(), self._spans, strict=False):
            if spans[-1][0] == count:  # two installs without a token between them
                spans.pop()
            spans.append((count, version))

    def lasts(self, rows: Array) -> tuple[Array, Array]:
        """The last tokens of rows (int64 [N]), which have no keys yet, and their positions: int64 [N] each."""
        return self.tokens[rows, self.counts[rows] - 1], self.prompt_lengths[rows] + self.counts[rows] - 1

    def draw(self, rows: Array, ahead: Array, logits_NV: Tensor) -> tuple[Array, Array]:
        """Tokens (int64 [N]) for rows (int64 [N]), with their log-probs (float32 [N]): the next ones, or those so far `ahead`
        (int64 [N]) of them."""
        left = Truncation(self._top_ps[rows], self._top_ks[rows], self._min_ps[rows])
        noise = uniforms(self.keys[rows], self.counts[rows] + ahead)
        return draw_tokens(logits_NV, self._temperatures[rows], noise, None if left.is_none else left)

    def add(self, rows: Array, tokens: Array, logprobs: Array) -> Array:
        """Add a token (int64 [N]) to each of rows (int64 [N]), each once. Returns which are at their limits: bool [N]."""
        self.tokens[rows, self.counts[rows]], self._logprobs[rows, self.counts[rows]] = tokens, logprobs
        self.counts[rows] += 1
        is_full: Array = self.counts[rows] == self.limits[rows]
        return is_full

    def made(self, row: int) -> Array:
        """The response's tokens so far (int64): a view."""
        return self.tokens[row, self._starts[row] : self.counts[row]]

    def text(self, row: int, num_prompt: int) -> Array:
        """A row's tokens (int64) behind the last so many of its prompt, and these."""
        return np.concatenate([self.requests[row].prompt_ids[-num_prompt:], self.tokens[row, : self.counts[row]]])

    def response(self, row: int, reason: Literal["stop", "length"]) -> Response:
        """The response that a row has made."""
        start, count = int(self._starts[row]), int(self.counts[row])
        return Response(
            sample=int(self._samples[row]),
            token_ids=self.made(row).copy(),
            logprobs=self._logprobs[row, start:count].copy(),
            version_spans=np.array([(first - start, version) for first, version in self._spans[row] if first < count], np.int64),
            finish_reason=reason,
        )

    def leave(self, row: int) -> int:
        """Free a row. Returns the slot that it had."""
        slot, last = int(self.slots[row]), self.num - 1
        self.num = last
        if row != last:
            for array in self._arrays:
                array[row] = array[last]
            self.requests[row], self._spans[row] = self.requests[last], self._spans[last]
        self.requests.pop()
        self._spans.pop()
        return slot

    def clear(self) -> list[int]:
        """Free all rows. Returns their slots."""
        return [self.leave(row) for row in reversed(range(self.num))]
