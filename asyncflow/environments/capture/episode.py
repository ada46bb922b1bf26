"""One episode's calls: from a request to the engine, and from what it samples to the answer and the transcript.

consumes: requests
waits for: the engine's answer to each
is unblocked by: the engine
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from asyncflow.environments.capture.transcript import CallTranscript, CapturedCall, CapturedSequence, SampledTokens
from asyncflow.environments.capture.wire import ModelAnswer, ModelRequest, RefusedCall, answer_message
from asyncflow.environments.joints import JointsByTools, turn_text
from asyncflow.types import Array, UserError

Generate = Callable[[CapturedCall, int, tuple[str, ...]], Awaitable[SampledTokens]]
"""Sample an answer behind a call's tokens: of so many tokens at most, ended by these texts."""


class CapturedEpisode:
    """Calls of an episode. `transcript` has what was sampled."""

    def __init__(
        self,
        joints: JointsByTools,
        generate: Generate,
        *,
        max_tokens: int,
        max_calls: int,
        max_call_tokens: int | None = None,
        prompt_ids: Array | None = None,
    ) -> None:
        """`max_tokens`: of all sequences, sampled or not, but for `prompt_ids` (int64) where the first sequence begins with these.
        `max_calls`: calls at most. `max_call_tokens`: sampled by one call, at most.

        A call that may have all that is left holds others up: side by side are those that say `max_tokens`, or all with
        `max_call_tokens`.
        """
        self.transcript = CallTranscript()
        self.num_calls = 0
        self.has_reached_limit = False
        self._joints, self._generate = joints, generate
        self._max_tokens, self._max_calls, self._max_call_tokens = max_tokens, max_calls, max_call_tokens
        self._prompt = [] if prompt_ids is None else prompt_ids.tolist()
        self._promised = 0  # tokens that calls under way may sample
        self._changed = asyncio.Condition()
        self._is_over = False

    def end(self) -> list[CapturedSequence]:
        """End the capture. Returns the sequences that have sampled tokens."""
        self._is_over = True
        return self.transcript.trained()

    async def answer(self, request: ModelRequest) -> ModelAnswer:
        """Answer to a call. Raises `RefusedCall`."""
        self.num_calls += 1
        number = self.num_calls
        if self._is_over:
            raise RefusedCall(409, "episode_over", "the episode is over")
        if number > self._max_calls:
            raise self._limit("calls", "episodes.max_turns")
        call = self._begun(request)
        limit = await self._room(request)
        try:
            sampled = await self._generate(call, limit, request.stops)
        except ValueError as error:
            raise RefusedCall(400, "context_length_exceeded", str(error)) from error
        finally:
            self._promised -= limit
            async with self._changed:
                self._changed.notify_all()
        if self._is_over:
            raise RefusedCall(409, "episode_over", "the episode is over")
        return self._answered(request, call, number, sampled)

    def _begun(self, request: ModelRequest) -> CapturedCall:
        try:
            if request.messages is None:
                return self.transcript.begin_text(str(request.prompt), self._joints.plain)
            return self.transcript.begin(request.messages, self._joints.of(request.offered_tools))
        except UserError as error:
            raise RefusedCall(400, "invalid_request", str(error)) from error

    async def _room(self, request: ModelRequest) -> int:
        """Tokens that a call may sample, which are promised to it. Waits where calls under way have been promised all."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._left > 0 or not self._promised)
        if self._left < 1:
            raise self._limit("tokens", "rollout.max_new_tokens")
        wanted = [limit for limit in (request.limit, self._max_call_tokens) if limit is not None]
        limit = min([self._left, *wanted])
        self._promised += limit
        return limit

    @property
    def _left(self) -> int:
        sequences = self.transcript.sequences
        used = sum(len(sequence.prompt_ids) + len(sequence.token_ids) for sequence in sequences)
        if sequences and sequences[0].prompt_ids[: len(self._prompt)].tolist() == self._prompt:
            used -= len(self._prompt)
        return self._max_tokens - used - self._promised

    def _limit(self, what: str, key: str) -> RefusedCall:
        self.has_reached_limit = True
        return RefusedCall(400, "episode_limit", f"the episode has no {what} left ({key})")

    def _answered(self, request: ModelRequest, call: CapturedCall, number: int, sampled: SampledTokens) -> ModelAnswer:
        tokenizer, ids = self._joints.tokenizer, sampled.token_ids
        message = answer_message(
            turn_text(tokenizer, ids), number, has_tools=bool(request.offered_tools) and request.messages is not None
        )
        self.transcript.end(call, sampled, message)
        return ModelAnswer(
            request, number, message, sampled.finish_reason, len(call.prompt_ids) + len(call.after), ids.tolist(),
            [tokenizer.text_of(token) for token in ids.tolist()], sampled.logprobs.tolist(),
        )  # fmt: skip
