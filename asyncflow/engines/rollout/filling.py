"""Claims of rows whose slots lack keys: prompts, and turns behind them, computed a piece at a time. No tensors, no cache.

    claim --> its prompt, in pieces --> its slots have the prompt's keys --> what stands behind it, token by token --> a row
                ^ others to the same prompt join it                           ^ a slot that was parked begins here

`next` says what one pass computes, within a number of tokens; `fed` and `has_computed` take note of it. Later turns go first, so
that episodes end; else what was claimed first goes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

import numpy as np

from asyncflow.engines.rollout.prompt_attention import CHUNK, PromptPiece
from asyncflow.engines.rollout.requests import SlotRequest
from asyncflow.types import Array


@dataclass(slots=True, eq=False)
class Claim:
    """Rows that a request gets when their slots have all keys that stand before them; of one with `after`, a single row.

    `num_cached`: tokens of prompt and `after` that have keys. `is_current`: the prompt's keys are those of the installed weights.
    """

    request: SlotRequest
    samples: list[tuple[int, np.uint64]]
    slots: list[int]
    num_cached: int = 0
    is_current: bool = True

    @property
    def has_all(self) -> bool:
        """Whether its rows may begin: `after` has keys, too. The token behind the prompt is drawn from the prompt's own logits."""
        return self.num_cached == len(self.request.prompt_ids) + len(self.request.after)


@dataclass(slots=True, eq=False)
class UnfilledPrompt:
    """Prompt that is computed in the first slot of its first claim, and `num_done` of its tokens have keys there."""

    claims: list[Claim]
    num_done: int = 0

    @property
    def token_ids(self) -> Array:
        """Tokens of the prompt: int64 [Lp]."""
        return self.claims[0].request.prompt_ids


@dataclass(slots=True)
class PassWork:
    """Work of one pass: pieces of prompts, and tokens (int64) behind prompts, of claims."""

    pieces: list[tuple[UnfilledPrompt, PromptPiece]] = field(default_factory=list)
    fed: list[tuple[Claim, Array]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts, turns and observations that go through the model."""
        return sum(len(piece.tokens) for _, piece in self.pieces) + sum(len(tokens) for _, tokens in self.fed)


class MissingKeys:
    """Claims that wait for keys."""

    def __init__(self) -> None:
        self._prompts: deque[UnfilledPrompt] = deque()
        self._turns: deque[Claim] = deque()  # that have their prompt's keys

    @property
    def num_rows(self) -> int:
        """Rows that are claimed."""
        return sum(len(claim.slots) for claim in self.claims())

    def claims(self) -> Iterator[Claim]:
        """Claims of turns, then those of prompts."""
        yield from self._turns
        for prompt in self._prompts:
            yield from prompt.claims

    def add(self, claim: Claim) -> None:
        """Take a claim on; of one without keys the prompt is computed, once for all that have the same array and adapter."""
        if claim.num_cached:
            self._turns.append(claim)
            return
        joined = next((prompt for prompt in self._prompts if prompt.claims[0].request.has_keys_of(claim.request)), None)
        if joined is None:
            self._prompts.append(UnfilledPrompt([claim]))
        else:
            joined.claims.append(claim)

    def next(self, num_tokens: int) -> PassWork:
        """Work of the next pass: some `num_tokens` at most. A prompt is cut at multiples of `CHUNK` alone, and one piece is
        always taken."""
        work = PassWork()
        for claim in self._turns:
            whole = np.concatenate([claim.request.prompt_ids, claim.request.after])
            left = num_tokens - work.num_tokens
            if left <= 0:
                return work
            work.fed.append((claim, whole[claim.num_cached : claim.num_cached + left]))
        for prompt in self._prompts:
            first, left = prompt.num_done, num_tokens - work.num_tokens
            count = len(prompt.token_ids) - first
            if count > left:
                count = min(count, left // CHUNK * CHUNK if left >= CHUNK or work.num_tokens else CHUNK)
            if count <= 0:
                return work
            tokens, is_last = prompt.token_ids[first : first + count], first + count == len(prompt.token_ids)
            work.pieces.append((prompt, PromptPiece(prompt.claims[0].slots[0], first, tokens, wants_logits=is_last)))
        return work

    def fed(self, work: PassWork) -> list[Claim]:
        """Note that the tokens behind prompts have their keys. Returns the claims that have all of theirs, which end here."""
        for claim, tokens in work.fed:
            claim.num_cached += len(tokens)
        self._turns = deque(claim for claim in self._turns if not claim.has_all)
        return [claim for claim, _ in work.fed if claim.has_all]

    def has_computed(self, prompt: UnfilledPrompt, piece: PromptPiece) -> bool:
        """Note that the piece has its keys. Returns whether the prompt is whole: it ends here, and its claims with turns continue
        with these."""
        prompt.num_done += len(piece.tokens)
        if prompt.num_done < len(prompt.token_ids):
            return False
        self._prompts.remove(prompt)
        for claim in prompt.claims:
            claim.num_cached = prompt.num_done
        self._turns += [claim for claim in prompt.claims if not claim.has_all]
        return True

    def begin_again(self, *, with_turns: bool) -> None:
        """Begin again under other weights: a prompt that is not whole is computed from its beginning, and, `with_turns`, so is one
        with turns behind it that are not."""
        for prompt in self._prompts:
            prompt.num_done = 0
        turns = list(self._turns)
        if with_turns:
            self._turns.clear()
        for claim in turns:
            claim.is_current = with_turns
            if with_turns:
                claim.num_cached = 0
                self.add(claim)

    def cancel(self, request: SlotRequest) -> list[int]:
        """Forget the claims of a request. Returns their slots."""
        slots = [slot for claim in self.claims() if claim.request is request for slot in claim.slots]
        self._turns = deque(claim for claim in self._turns if claim.request is not request)
        for prompt in self._prompts:
            computed_in = prompt.claims[0]
            prompt.claims = [claim for claim in prompt.claims if claim.request is not request]
            if prompt.claims and prompt.claims[0] is not computed_in:
                prompt.num_done = 0  # in another slot now
        self._prompts = deque(prompt for prompt in self._prompts if prompt.claims)
        return slots

    def clear(self) -> list[Claim]:
        """Forget all claims, and return them."""
        claims = list(self.claims())
        self._prompts.clear()
        self._turns.clear()
        return claims


def in_passes(pieces: Sequence[PromptPiece], num_tokens: int) -> Iterator[list[PromptPiece]]:
    """Pieces, in order, by the passes that compute them: in each those that begin within so many tokens, the last one whole."""
    begins = accumulate((len(piece.tokens) for piece in pieces), initial=0)
    for _, some in groupby(zip(begins, pieces, strict=False), lambda each: each[0] // num_tokens):
        yield [piece for _, piece in some]
