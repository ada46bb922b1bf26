"""Slots of the embedded engine: which requests have them, and one step of all of them: the thread's half.

    waiting --admit--> a slot --its keys, in pieces--> a row --a token a step--> the turn's end --> free, or parked
                         ^                                                                            |
                         +-------- the next turn: its keys are there, but for what was observed <-----+

A step is one pass: a token of every active row (active_rows.py), and beside them some tokens of the prompts and observations whose
keys are missing (filling.py). So no row waits for a whole prompt.

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

from asyncflow.engines.base import NO_TOKENS, Timing
from asyncflow.engines.rollout.active_rows import ActiveRows
from asyncflow.engines.rollout.adapter_bank import INSTALLED
from asyncflow.engines.rollout.decoder import Decoder
from asyncflow.engines.rollout.drafts import LONGEST, NO_DRAFT, Draft, Drafting, FinishedTexts, continuation, joined
from asyncflow.engines.rollout.filling import Claim, MissingKeys, PassWork, in_passes
from asyncflow.engines.rollout.pass_timings import PassTimings
from asyncflow.engines.rollout.prompt_attention import PromptPiece
from asyncflow.engines.rollout.requests import ParkedSlot, SlotRequest
from asyncflow.engines.rollout.slot_options import SlotOptions
from asyncflow.engines.rollout.stop_strings import StopStrings
from asyncflow.types import Array


class Slots:
    """The thread's half: which requests have slots, and what the next pass computes."""

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
        self._rows = ActiveRows(num_slots, decoder.max_context)
        self._timings = PassTimings()

    @property
    def is_busy(self) -> bool:
        """Whether anything is generated or waits."""
        return bool(self._rows.num or self._num_claimed or self._waiting)

    @property
    def has_room(self) -> bool:
        """A row stands empty for want of a sample."""
        return self._rows.num + self._num_claimed < self._num_slots and not self._waiting

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
        for row in reversed(range(self._rows.num)):
            if self._rows.requests[row] is request:
                self._release(self._rows.leave(row), clears=is_broken)

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
        requests = dict.fromkeys([*self._rows.requests, *(claim.request for claim in claims), *self._waiting])
        self._free += [*self._rows.clear(), *(slot for claim in claims for slot in claim.slots)]
        self._free += [parked.slot for parked in self._parked.values()]
        self._waiting.clear()
        self._parked.clear()
        for request in requests:
            request.deliver(error)

    def install(self, version: int, tensors: Mapping[str, Tensor], prepared: Sequence[Tensor] | None) -> None:
        """New weights for the tokens from now on; `ValueError`, changing nothing, when they are not the model's."""
        self._decoder.install(tensors, prepared)
        self.version = version
        self._rows.install(version)
        self._filling.begin_again(with_turns=self._recomputes)
        for parked in self._parked.values():
            parked.is_current = False
        if self._recomputes:
            self._compute_keys_again()

    def _compute_keys_again(self) -> None:
        """Keys and values of every response under way, by the weights installed now, some `tokens_of_prompts` at a time: of each
        prompt once, for all of its rows, then of what stands behind it. Those of parked slots are computed by their next turns."""
        for key in list(self._parked):
            self.forget(key)
        rows, groups = self._rows, dict[tuple[int, int], list[int]]()  # rows whose prompts have the same keys
        for row, request in enumerate(rows.requests):
            groups.setdefault((id(request.prompt_ids), request.adapter), []).append(row)
        by_slot = {int(rows.slots[group[0]]): group for group in groups.values()}
        prompts = [PromptPiece(slot, 0, rows.requests[group[0]].prompt_ids) for slot, group in by_slot.items()]
        for pieces in in_passes(prompts, self._tokens_of_prompts):
            for piece, logits_V in zip(pieces, self._decoder.compute(pieces), strict=True):
                group = by_slot[piece.slot]
                self._share(rows.slots[group].tolist(), [rows.requests[row] for row in group], logits_V)
        rows.is_current[: rows.num] = True
        # The last token's own are computed when it is decoded.
        behind = [
            PromptPiece(int(rows.slots[row]), int(rows.prompt_lengths[row]), rows.tokens[row, :count], wants_logits=False)
            for row, count in enumerate((rows.counts[: rows.num] - 1).tolist())
            if count
        ]
        for pieces in in_passes(behind, self._tokens_of_prompts):
            self._decoder.compute(pieces)
        self.num_computed += sum(len(piece.tokens) for piece in (*prompts, *behind))

    def step(self) -> None:
        """Give free rows to what waits; then a token for every active row, and some of the keys that others lack."""
        self._admit()
        work, began = self._filling.next(self._tokens_of_prompts), time.monotonic()
        if work.num_tokens:
            num_active, num_claimed = self._rows.num, self._num_claimed
            self._fill(work)
            # What is decoded beside it has its part of the time, and no timing: a step of its own takes longer.
            share = work.num_tokens / (work.num_tokens + num_active)
            ended = began + share * (time.monotonic() - began)
            self._timings.add(Timing("prefill", began, ended, num_claimed - self._num_claimed, work.num_tokens))
        elif self._rows.num:
            counts = self._decode(self._drafts())
            self._timings.add(Timing("decode_step", began, time.monotonic(), *counts))

    def _drafts(self) -> list[Draft]:
        """Drafts of every active row, or `NO_DRAFT`."""
        rows, drafting = self._rows, self._drafting
        if not drafting.may_pay(rows.num):
            return [NO_DRAFT] * rows.num
        began, drafts = time.monotonic(), []
        texts = [rows.text(row, LONGEST) for row in range(rows.num)]
        for row, request in enumerate(rows.requests):
            prompt = request.prompt_key
            running = [texts[i] for i, other in enumerate(rows.requests) if other.prompt_key == prompt and i != row]
            most = min(drafting.most, int(rows.limits[row] - rows.counts[row]) - 1)
            own = rows.text(row, len(request.prompt_ids))
            drafts.append(continuation(joined([*self._finished.of(prompt), *running, own]), most) if most > 0 else NO_DRAFT)
        drafting.searched(rows.num, time.monotonic() - began)
        return drafting.chosen(drafts)

    def _decode(self, drafts: Sequence[Draft]) -> tuple[int, int, int, int, int]:
        """Draw one more token for every active row, and each of its drafts that is right.

        Returns the last fields of its `Timing`: rows of the pass, tokens attended to, 1 call, drafts, and right ones.
        """
        began, lengths = time.monotonic(), np.array([1 + len(draft.tokens) for draft in drafts])
        rows = np.repeat(np.arange(len(drafts)), lengths)
        ahead = np.arange(len(rows)) - np.searchsorted(rows, rows)
        fed, lasts = self._rows.lasts(rows)
        fed[ahead > 0] = np.concatenate([draft.tokens for draft in drafts])
        positions = lasts + ahead
        is_taken, is_last = self._append(rows, self._decoder.decode(fed, positions, self._rows.slots[rows]), fed)
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
        self._timings.end()

    def take_timings(self) -> list[Timing]:
        """Timings since the last call, in the order of time. May be called from any thread."""
        return self._timings.take()

    def _admit(self) -> None:
        """Give slots to waiting samples while rows are free, and first tokens to those whose slots have all keys already."""
        first = self._rows.num
        logits: list[Tensor] = []
        while self._waiting and (room := self._num_slots - self._rows.num - self._num_claimed) > 0:
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
                self._rows.begin(claim, self.version)
            else:
                self._filling.add(claim)
            if not request.pending:
                self._waiting.popleft()
        if logits:
            self._append(np.arange(first, self._rows.num), torch.stack(logits))

    def _fill(self, work: PassWork) -> None:
        """Compute a pass: a token of every active row, and `work`. Rows whose slots have all keys then get their first tokens."""
        active, fed = np.arange(self._rows.num), work.fed
        lengths = [1] * len(active) + [len(tokens) for _, tokens in fed]
        lasts, positions = self._rows.lasts(active)
        logits = self._decoder.fill(
            np.concatenate([lasts, *(tokens for _, tokens in fed)]),
            np.concatenate([positions, *(claim.num_cached + np.arange(len(tokens)) for claim, tokens in fed)]),
            np.repeat(np.append(self._rows.slots[active], [claim.slots[0] for claim, _ in fed]).astype(np.int64), lengths),
            np.cumsum(lengths, dtype=np.int64) - 1,
            [piece for _, piece in work.pieces],
        )
        self.num_computed += len(active) + work.num_tokens
        found = list(logits[: len(active)])
        of_turns = {id(claim): logits_V for (claim, _), logits_V in zip(fed, logits[len(active) :], strict=False)}
        of_prompts = iter(logits[len(active) + len(fed) :])
        for claim in self._filling.fed(work):
            self._rows.begin(claim, self.version)
            found.append(of_turns[id(claim)])
        for prompt, piece in work.pieces:
            if not self._filling.has_computed(prompt, piece):
                continue
            logits_V = next(of_prompts)
            slots = [slot for claim in prompt.claims for slot in claim.slots]
            self._share(slots, [claim.request for claim in prompt.claims], logits_V)
            for claim in prompt.claims:
                if claim.has_all:
                    self._rows.begin(claim, self.version)
                    found += [logits_V] * len(claim.slots)
        if found:
            self._append(np.arange(self._rows.num), torch.stack(found))

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
        for row, other in enumerate(self._rows.requests):
            if other.has_keys_of(request) and self._rows.is_current[row]:
                if other is not request and not len(request.after):
                    if other.first_logits_V is None:  # of a later turn, which was not computed behind its prompt
                        continue
                    request.first_logits_V = other.first_logits_V
                return int(self._rows.slots[row])
        return None

    def _free_slot(self) -> int:
        """A slot of the cache; if need be, that of the episode that was parked first and does not wait for a row."""
        if not self._free:
            wanted = {key for request in self._waiting if len(request.after) for _, key in request.pending}
            self.forget(next((key for key in self._parked if key not in wanted), next(iter(self._parked))))
        return self._free.pop()

    def _append(self, rows: Array, logits_NV: Tensor, fed: Array = NO_TOKENS) -> tuple[Array, Array]:
        """Draw a token for each of `rows` (int64 [N], rising), and deliver and free those that end with it.

        A row with drafts is there once more for each of them: `fed` (int64 [N]) are the tokens that the logits stand behind. What
        is drawn behind a draft is taken if the draft is what was drawn before it. Returns, bool [N] each, what was taken, and what
        ended a row. Ends requests of an adapter whose logits are not finite; raises `RuntimeError` where the installed weights'
        are not.
        """
        ahead = np.arange(len(rows)) - np.searchsorted(rows, rows)
        tokens, logprobs = self._rows.draw(rows, ahead, logits_NV)
        broken = dict.fromkeys(self._rows.requests[row] for row in rows[~np.isfinite(logprobs)].tolist())
        if any(request.adapter == INSTALLED for request in broken):
            raise RuntimeError("the model's logits are not finite: the installed weights are broken")
        is_taken, is_last, is_stopped = np.zeros((3, len(rows)), bool)
        now = np.flatnonzero((ahead == 0) & [self._rows.requests[row] not in broken for row in rows.tolist()])
        while len(now):
            is_full = self._rows.add(rows[now], tokens[now], logprobs[now])
            is_taken[now], is_stopped[now] = True, self._are_stopped(rows[now], tokens[now])
            is_last[now] = is_stopped[now] | is_full
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
            sampling = self._rows.requests[row].sampling
            if sampling.stop_ids is not None:
                is_stopped[number] = tokens[number] in sampling.stop_ids
            if sampling.stop and not is_stopped[number]:
                is_stopped[number] = self._stop_strings.are_completed(self._rows.made(row), sampling.stop)
        return is_stopped

    def _finish(self, row: int, reason: Literal["stop", "length"]) -> None:
        rows, request = self._rows, self._rows.requests[row]
        response, keeps = rows.response(row, reason), request.sampling.keeps
        if self._drafting.most:
            self._finished.add(request.prompt_key, rows.text(row, LONGEST))
        if keeps:
            key, tokens, is_current = rows.keys[row], rows.tokens[row, : rows.counts[row]].copy(), bool(rows.is_current[row])
            self.forget(key)
            self._parked[key] = ParkedSlot(rows.leave(row), request.prompt_ids, tokens, is_current, request.adapter)
        else:
            self._release(rows.leave(row))
        request.deliver(response)

    def _release(self, slot: int, *, clears: bool = False) -> None:
        self._decoder.cache.release(slot, clears=clears)
        self._free.append(slot)
