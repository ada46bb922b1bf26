"""Slots of the embedded engine: which request, sample and tokens each holds, and one step of all of them: the thread's half.

    waiting --admit--> a slot --its keys, in pieces--> a row --a token a step--> the turn's end --> free, or parked
                         ^                                                                            |
                         +-------- the next turn: its keys are there, but for what was observed <-----+

A step is one pass: a token of every active row, and beside them some tokens of the prompts and observations whose keys are missing
(filling.py). So no row waits for a whole prompt.

A parked slot keeps the keys and values of an episode that waits for its environment. Where slots are wanted, the one that was
parked first loses its place; its episode's next turn computes them again, by the same passes, so to the same bits: the prompt in a
prefill, everything behind it by decode steps, of which many tokens may share one.

Where few rows are active, a step also has drafts (drafts.py): tokens behind a row's last one that are probably next. They go
through the model as those of an observation do; a row takes those that are what it draws there, and the token behind them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from asyncflow.engines.base import NO_TOKENS, Response, Timing
from asyncflow.engines.rollout.adapter_bank import INSTALLED
from asyncflow.engines.rollout.decoder import Decoder
from asyncflow.engines.rollout.drafts import LONGEST, NO_DRAFT, Draft, Drafting, FinishedTexts, continuation, joined
from asyncflow.engines.rollout.filling import Claim, MissingKeys, PassWork, in_passes
from asyncflow.engines.rollout.prompt_attention import PromptPiece
from asyncflow.engines.rollout.requests import ParkedSlot, SlotRequest
from asyncflow.engines.rollout.sampling import Truncation, draw_tokens, uniforms
from asyncflow.engines.rollout.slot_options import SlotOptions
from asyncflow.engines.rollout.stop_strings import StopStrings
from asyncflow.types import Array

TIMED_TOGETHER = 8  # decode steps: they are short and many; a number, since those of a time would be few where they are slow
MAX_TIMINGS = 10_000  # kept until they are taken


class Slots:
    """The thread's half: which request, sample and tokens each row holds. Rows 0 .. num_active - 1 are active."""

    def __init__(self, decoder: Decoder, options: SlotOptions, *, stop_ids: Iterable[int], stop_strings: StopStrings) -> None:
        """The decoder's cache may have more slots than generate at once, for episodes that are parked."""
        num_slots = options.num_slots
        self.version, self._recomputes = options.version, options.kv_on_install == "recompute"
        self.is_paused = False
        self.num_computed = 0
        """Tokens that went through the model so far: of prompts, observations, responses, drafts, and what was computed again."""
        self._drafting, self._finished = Drafting(options.speculation, num_slots), FinishedTexts()
        self._decoder, self._num_slots, self._stop_strings = decoder, num_slots, stop_strings
        self._is_stop = np.zeros(decoder.config.vocab_size, bool)
        self._is_stop[[token for token in stop_ids if token < len(self._is_stop)]] = True
        self._waiting: deque[SlotRequest] = deque()
        self._filling, self._tokens_of_prompts = MissingKeys(), options.tokens_of_prompts
        self._free = list(range(decoder.num_slots - 1, -1, -1))  # slots of the cache
        self._parked: dict[np.uint64, ParkedSlot] = {}  # by noise key, the one that was parked first in front
        self._num_active = 0
        self._requests: list[SlotRequest] = []  # of the active rows; the arrays below have an entry for every row
        self._spans: list[list[tuple[int, int]]] = []
        self._slots = np.zeros(num_slots, np.int64)
        self._samples = np.zeros(num_slots, np.int64)
        self._keys = np.zeros(num_slots, np.uint64)
        self._temperatures = np.zeros(num_slots, np.float32)
        self._top_ps = np.ones(num_slots, np.float32)
        self._top_ks = np.zeros(num_slots, np.int64)
        self._min_ps = np.zeros(num_slots, np.float32)
        self._prompt_lengths = np.zeros(num_slots, np.int64)
        self._starts = np.zeros(num_slots, np.int64)  # tokens behind the prompt that were there before
        self._counts = np.zeros(num_slots, np.int64)  # these and the response's so far
        self._limits = np.zeros(num_slots, np.int64)
        self._is_current = np.zeros(num_slots, bool)  # the prompt's keys are those of the installed weights
        self._tokens = np.zeros((num_slots, decoder.max_context), np.int64)
        self._logprobs = np.zeros((num_slots, decoder.max_context), np.float32)
        self._timings: deque[Timing] = deque(maxlen=MAX_TIMINGS)
        self._steps: Timing | None = None  # decode steps that are timed together, so far
        self._arrays = (
            *(self._slots, self._samples, self._keys, self._temperatures, self._prompt_lengths, self._starts, self._counts),
            *(self._limits, self._top_ps, self._top_ks, self._min_ps, self._is_current, self._tokens, self._logprobs),
        )

    @property
    def is_busy(self) -> bool:
        """Whether anything is generated or waits."""
        return bool(self._num_active or self._num_claimed or self._waiting)

    @property
    def has_room(self) -> bool:
        """A row stands empty for want of a sample."""
        return self._num_active + self._num_claimed < self._num_slots and not self._waiting

    @property
    def _num_claimed(self) -> int:
        """Rows that are kept for what has not all of its keys."""
        return self._filling.num_rows

    def submit(self, request: SlotRequest) -> None:
        """Add a request, which waits for free rows; a later turn goes before first ones, so that episodes end."""
        if len(request.after):
            self._waiting.insert(next((i for i, r in enumerate(self._waiting) if not len(r.after)), len(self._waiting)), request)
        else:
            self._waiting.append(request)

    def cancel(self, request: SlotRequest, *, is_broken: bool = False) -> None:
        """Free the slots of `request` and forget its waiting samples. `is_broken`: its keys are not finite."""
        if request in self._waiting:
            self._waiting.remove(request)
        for slot in self._filling.cancel(request):  # nobody has seen yet whether an adapter's keys are
            self._release(slot, clears=is_broken or request.adapter != INSTALLED)
        for row in reversed(range(self._num_active)):
            if self._requests[row] is request:
                self._release(self._leave(row), clears=is_broken)

    def forget(self, key: np.uint64) -> None:
        """Free the parked slot of an episode that has ended."""
        if (parked := self._parked.pop(key, None)) is not None:
            self._release(parked.slot)

    def remove_adapter(self, number: int) -> None:
        """Forget an adapter that no request names, with the slots that are parked with its keys: another may have its number."""
        for key in [key for key, parked in self._parked.items() if parked.adapter == number]:
            self.forget(key)
        self._decoder.lora.remove(number)

    def fail(self, error: Exception) -> None:
        """Free every slot, clearing keys that may not be finite; every request ends with `error`."""
        self._decoder.cache.clear()
        claims = self._filling.clear()
        requests = dict.fromkeys([*self._requests, *(claim.request for claim in claims), *self._waiting])
        self._free += [*self._slots[: self._num_active].tolist(), *(slot for claim in claims for slot in claim.slots)]
        self._free += [parked.slot for parked in self._parked.values()]
        self._num_active = 0
        self._requests.clear()
        self._spans.clear()
        self._waiting.clear()
        self._parked.clear()
        for request in requests:
            request.deliver(error)

    def install(self, version: int, tensors: Mapping[str, Tensor], prepared: Sequence[Tensor] | None) -> None:
        """New weights for the tokens from now on; `ValueError`, changing nothing, when they are not the model's."""
        self._decoder.install(tensors, prepared)
        self.version = version
        self._is_current[:] = False
        self._filling.begin_again(with_turns=self._recomputes)
        for parked in self._parked.values():
            parked.is_current = False
        for row, spans in enumerate(self._spans):
            count = int(self._counts[row])
            if spans[-1][0] == count:  # two installs without a token between them
                spans.pop()
            spans.append((count, version))
        if self._recomputes:
            self._compute_keys_again()

    def _compute_keys_again(self) -> None:
        """Keys and values of every response under way, by the weights installed now, some `tokens_of_prompts` at a time: of each
        prompt once, for all of its rows, then of what stands behind it. Those of parked slots are computed by their next turns."""
        for key in list(self._parked):
            self.forget(key)
        groups: dict[tuple[int, int], list[int]] = {}  # rows whose prompts have the same keys
        for row, request in enumerate(self._requests):
            groups.setdefault((id(request.prompt_ids), request.adapter), []).append(row)
        rows_of = {int(self._slots[rows[0]]): rows for rows in groups.values()}
        prompts = [PromptPiece(slot, 0, self._requests[rows[0]].prompt_ids) for slot, rows in rows_of.items()]
        for pieces in in_passes(prompts, self._tokens_of_prompts):
            for piece, logits_V in zip(pieces, self._decoder.compute(pieces), strict=True):
                rows = rows_of[piece.slot]
                self._share(self._slots[rows].tolist(), [self._requests[row] for row in rows], logits_V)
        self._is_current[: self._num_active] = True
        # The last token's own are computed when it is decoded.
        slots, firsts, counts = (array.tolist() for array in (self._slots, self._prompt_lengths, self._counts))
        behind = [
            PromptPiece(slots[row], firsts[row], self._tokens[row, : counts[row] - 1], wants_logits=False)
            for row in range(self._num_active)
            if counts[row] > 1
        ]
        for pieces in in_passes(behind, self._tokens_of_prompts):
            self._decoder.compute(pieces)
        self.num_computed += sum(len(piece.tokens) for piece in (*prompts, *behind))

    def step(self) -> None:
        """Give free rows to what waits; then a token for every active row, and some of the keys that others lack."""
        self._admit()
        work, began = self._filling.next(self._tokens_of_prompts), time.monotonic()
        if work.num_tokens:
            self.end_timing()
            num_active, num_claimed = self._num_active, self._num_claimed
            self._fill(work)
            # What is decoded beside it has its part of the time, and no timing: a step of its own takes longer.
            share = work.num_tokens / (work.num_tokens + num_active)
            ended = began + share * (time.monotonic() - began)
            self._timings.append(Timing("prefill", began, ended, num_claimed - self._num_claimed, work.num_tokens))
        elif self._num_active:
            counts = self._decode(self._drafts())
            so_far = self._steps or Timing("decode_step", began, began, 0, 0, 0)
            sums = (former + now for former, now in zip(so_far[3:], counts, strict=True))
            self._steps = Timing("decode_step", so_far.start, time.monotonic(), *sums)
            if self._steps.calls == TIMED_TOGETHER:
                self.end_timing()

    def _drafts(self) -> list[Draft]:
        """Drafts of every active row, or `NO_DRAFT`."""
        num_active, drafting = self._num_active, self._drafting
        if not drafting.may_pay(num_active):
            return [NO_DRAFT] * num_active
        began, drafts = time.monotonic(), []
        texts = [self._text(row) for row in range(num_active)]
        for row, request in enumerate(self._requests):
            prompt = request.prompt_key
            running = [texts[i] for i, other in enumerate(self._requests) if other.prompt_key == prompt and i != row]
            own = np.concatenate([request.prompt_ids, self._tokens[row, : self._counts[row]]])
            most = min(drafting.most, int(self._limits[row] - self._counts[row]) - 1)
            drafts.append(continuation(joined([*self._finished.of(prompt), *running, own]), most) if most > 0 else NO_DRAFT)
        drafting.searched(num_active, time.monotonic() - began)
        return drafting.chosen(drafts)

    def _text(self, row: int) -> Array:
        """A row's tokens behind the last few of its prompt, which `continuation` compares its first ones by."""
        return np.concatenate([self._requests[row].prompt_ids[-LONGEST:], self._tokens[row, : self._counts[row]]])

    def _decode(self, drafts: Sequence[Draft]) -> tuple[int, int, int, int, int]:
        """Draw one more token for every active row, and each of its drafts that is right.

        Returns the last fields of its `Timing`: rows of the pass, tokens attended to, 1 call, drafts, and right ones.
        """
        began, lengths = time.monotonic(), np.array([1 + len(draft.tokens) for draft in drafts])
        rows = np.repeat(np.arange(len(drafts)), lengths)
        ahead = np.arange(len(rows)) - np.searchsorted(rows, rows)
        fed = self._tokens[rows, self._counts[rows] - 1]
        fed[ahead > 0] = np.concatenate([draft.tokens for draft in drafts])
        positions = (self._prompt_lengths + self._counts)[rows] - 1 + ahead
        is_taken, is_last = self._append(rows, self._decoder.decode(fed, positions, self._slots[rows]), fed)
        self.num_computed += len(rows)
        self._drafting.passed(len(rows), time.monotonic() - began, has_drafts=len(rows) > len(drafts))
        num_taken, ended = np.bincount(rows[is_taken], minlength=len(drafts)), set(rows[is_last].tolist())
        for row in np.flatnonzero((lengths > 1) & (num_taken > 0)).tolist():
            num_right = int(num_taken[row]) - 1
            num_tried = num_right if row in ended else min(num_right + 1, len(drafts[row].tokens))
            self._drafting.learn(drafts[row], num_tried, num_right)
        return len(rows), int(positions.sum()) + len(rows), 1, len(rows) - len(drafts), int(np.maximum(num_taken - 1, 0).sum())

    def end_timing(self) -> None:
        """End the decode steps that are timed together: something else comes before the next one."""
        if self._steps is not None:
            self._timings.append(self._steps)
            self._steps = None

    def take_timings(self) -> list[Timing]:
        """Timings since the last call, in the order of time. May be called from any thread."""
        return [self._timings.popleft() for _ in range(len(self._timings))]

    def _admit(self) -> None:
        """Give slots to waiting samples while rows are free, and first tokens to those whose slots have all keys already."""
        first = self._num_active
        logits: list[Tensor] = []
        while self._waiting and (room := self._num_slots - self._num_active - self._num_claimed) > 0:
            request = self._waiting[0]
            num_prompt, key = len(request.prompt_ids), request.pending[0][1]
            if (parked := self._parked.get(key)) is not None and parked.is_before(request):
                del self._parked[key]
                claim = Claim(request, [], [parked.slot], num_prompt + len(parked.tokens) - 1, parked.is_current)
            else:
                count = 1 if len(request.after) else min(len(request.pending), room)
                claim = Claim(request, [], [self._free_slot() for _ in range(count)])
                if (sibling := self._sibling(request)) is not None:
                    self._decoder.cache.share(sibling, claim.slots, num_prompt)
                    claim.num_cached = num_prompt
            self._decoder.adapters[claim.slots] = request.adapter
            claim.samples += [request.pending.popleft() for _ in claim.slots]
            if claim.has_all:
                assert request.first_logits_V is not None, "a sibling without them is none"
                logits += [request.first_logits_V] * len(claim.slots)
                self._occupy(claim)
            else:
                self._filling.add(claim)
            if not request.pending:
                self._waiting.popleft()
        if logits:
            self._append(np.arange(first, self._num_active), torch.stack(logits))

    def _fill(self, work: PassWork) -> None:
        """Compute a pass: a token of every active row, and `work`. Rows whose slots have all keys then get their first tokens."""
        active, fed = np.arange(self._num_active), work.fed
        lengths = [1] * len(active) + [len(tokens) for _, tokens in fed]
        lasts = (self._prompt_lengths + self._counts)[active] - 1
        logits = self._decoder.fill(
            np.concatenate([self._tokens[active, self._counts[active] - 1], *(tokens for _, tokens in fed)]),
            np.concatenate([lasts, *(claim.num_cached + np.arange(len(tokens)) for claim, tokens in fed)]),
            np.repeat(np.append(self._slots[active], [claim.slots[0] for claim, _ in fed]).astype(np.int64), lengths),
            np.cumsum(lengths, dtype=np.int64) - 1,
            [piece for _, piece in work.pieces],
        )
        self.num_computed += len(active) + work.num_tokens
        found = list(logits[: len(active)])
        of_turns = {id(claim): logits_V for (claim, _), logits_V in zip(fed, logits[len(active) :], strict=False)}
        of_prompts = iter(logits[len(active) + len(fed) :])
        for claim in self._filling.fed(work):
            self._occupy(claim)
            found.append(of_turns[id(claim)])
        for prompt, piece in work.pieces:
            if not self._filling.has_computed(prompt, piece):
                continue
            logits_V = next(of_prompts)
            slots = [slot for claim in prompt.claims for slot in claim.slots]
            self._share(slots, [claim.request for claim in prompt.claims], logits_V)
            for claim in prompt.claims:
                if claim.has_all:
                    self._occupy(claim)
                    found += [logits_V] * len(claim.slots)
        if found:
            self._append(np.arange(self._num_active), torch.stack(found))

    def _share(self, slots: Sequence[int], requests: Sequence[SlotRequest], logits_V: Tensor) -> None:
        """Let slots have in common the prompt of their requests, which the first of them has, and the requests the logits after
        it."""
        first, *others = slots
        self._decoder.cache.share(first, others, len(requests[0].prompt_ids))
        first_logits_V = logits_V.clone()  # a view would keep the whole pass's until the request's last row ends
        for request in requests:
            request.first_logits_V = first_logits_V

    def _sibling(self, request: SlotRequest) -> int | None:
        """An active row's slot that has the keys of the request's prompt under the installed weights."""
        for row, other in enumerate(self._requests):
            if other.has_keys_of(request) and self._is_current[row]:
                if other is not request and not len(request.after):
                    if other.first_logits_V is None:  # of a later turn, which was not computed behind its prompt
                        continue
                    request.first_logits_V = other.first_logits_V
                return int(self._slots[row])
        return None

    def _free_slot(self) -> int:
        """A slot of the cache; if need be, that of the episode that was parked first and does not wait for a row."""
        if not self._free:
            wanted = {key for request in self._waiting if len(request.after) for _, key in request.pending}
            self.forget(next((key for key in self._parked if key not in wanted), next(iter(self._parked))))
        return self._free.pop()

    def _occupy(self, claim: Claim) -> None:
        """Give the next rows to the claim; they have no tokens of their own so far."""
        request, count, start = claim.request, len(claim.slots), len(claim.request.after)
        rows = slice(self._num_active, self._num_active + count)
        self._slots[rows] = claim.slots
        self._samples[rows], self._keys[rows] = zip(*claim.samples, strict=True)
        sampling = request.sampling
        self._temperatures[rows] = sampling.temperature
        left = (sampling.top_p, sampling.top_k, sampling.min_p) if sampling.is_truncated else (1.0, 0, 0.0)
        self._top_ps[rows], self._top_ks[rows], self._min_ps[rows] = left
        self._prompt_lengths[rows] = len(request.prompt_ids)
        self._starts[rows] = self._counts[rows] = start
        self._limits[rows] = start + sampling.max_new_tokens
        self._is_current[rows] = claim.is_current
        self._tokens[rows, :start] = request.after
        self._requests += [request] * count
        self._spans += [[(start, self.version)] for _ in range(count)]
        self._num_active += count

    def _append(self, rows: Array, logits_NV: Tensor, fed: Array = NO_TOKENS) -> tuple[Array, Array]:
        """Draw a token for each of `rows` (int64 [N], rising), and deliver and free those that end with it.

        A row with drafts is there once more for each of them: `fed` (int64 [N]) are the tokens that the logits stand behind. What
        is drawn behind a draft is taken if the draft is what was drawn before it. Returns, bool [N] each, what was taken, and what
        ended a row. Ends requests of an adapter whose logits are not finite; raises `RuntimeError` where the installed weights'
        are not.
        """
        ahead = np.arange(len(rows)) - np.searchsorted(rows, rows)
        counts = self._counts[rows] + ahead
        left = Truncation(self._top_ps[rows], self._top_ks[rows], self._min_ps[rows])
        noise = uniforms(self._keys[rows], counts)
        tokens, logprobs = draw_tokens(logits_NV, self._temperatures[rows], noise, None if left.is_none else left)
        broken = dict.fromkeys(self._requests[row] for row in rows[~np.isfinite(logprobs)].tolist())
        if any(request.adapter == INSTALLED for request in broken):
            raise RuntimeError("the model's logits are not finite: the installed weights are broken")
        is_taken, is_last, is_stopped = np.zeros((3, len(rows)), bool)
        now = np.flatnonzero((ahead == 0) & [self._requests[row] not in broken for row in rows.tolist()])
        while len(now):
            at = rows[now]
            self._tokens[at, counts[now]], self._logprobs[at, counts[now]] = tokens[now], logprobs[now]
            self._counts[at] += 1
            is_taken[now], is_stopped[now] = True, self._are_stopped(at, tokens[now])
            is_last[now] = is_stopped[now] | (self._counts[at] == self._limits[at])
            now = now[~is_last[now]] + 1
            now = now[now < len(rows)]
            now = now[ahead[now] > 0]
            now = now[fed[now] == tokens[now - 1]]
        for last in np.flatnonzero(is_last)[::-1].tolist():
            self._finish(int(rows[last]), "stop" if is_stopped[last] else "length")
        for request in broken:  # others have other weights
            self.cancel(request, is_broken=True)
            request.deliver(RuntimeError("the logits are not finite: the weights of this adapter are broken"))
        return is_taken, is_last

    def _are_stopped(self, rows: Array, tokens: Array) -> Array:
        """Whether these tokens (int64 [N]), the last ones of `rows` (int64 [N]), end their responses: bool [N]."""
        is_stopped: Array = self._is_stop[tokens]
        for number, row in enumerate(rows.tolist()):
            if (own := self._requests[row].sampling.stop_ids) is not None:
                is_stopped[number] = tokens[number] in own
            if (stop := self._requests[row].sampling.stop) and not is_stopped[number]:
                response = self._tokens[row, self._starts[row] : self._counts[row]]
                is_stopped[number] = self._stop_strings.are_completed(response, stop)
        return is_stopped

    def _finish(self, row: int, reason: Literal["stop", "length"]) -> None:
        start, count = int(self._starts[row]), int(self._counts[row])
        response = Response(
            sample=int(self._samples[row]),
            token_ids=self._tokens[row, start:count].copy(),
            logprobs=self._logprobs[row, start:count].copy(),
            version_spans=np.array([(first - start, version) for first, version in self._spans[row] if first < count], np.int64),
            finish_reason=reason,
        )
        request, key, is_current = self._requests[row], self._keys[row], bool(self._is_current[row])
        tokens = self._tokens[row, :count].copy() if request.sampling.keeps else NO_TOKENS
        if self._drafting.most:
            self._finished.add(request.prompt_key, self._text(row))
        slot = self._leave(row)
        if request.sampling.keeps:
            self.forget(key)
            self._parked[key] = ParkedSlot(slot, request.prompt_ids, tokens, is_current, request.adapter)
        else:
            self._release(slot)
        request.deliver(response)

    def _release(self, slot: int, *, clears: bool = False) -> None:
        self._decoder.cache.release(slot, clears=clears)
        self._free.append(slot)

    def _leave(self, row: int) -> int:
        """Move the last active row into the place of `row`. Returns the slot that it had."""
        slot, last = int(self._slots[row]), self._num_active - 1
        self._num_active = last
        if row != last:
            for array in self._arrays:
                array[row] = array[last]
            self._requests[row], self._spans[row] = self._requests[last], self._spans[last]
        self._requests.pop()
        self._spans.pop()
        return slot
