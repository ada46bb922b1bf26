"""Transcript of an episode whose calls are captured: its sequences, token by token. Pure: no engine, no HTTP.

call 1: [system, user]                      a new sequence: the prompt, then what was sampled
call 2: [system, user, answer 1, tool]      goes on with it: the joint (mask 0), then what was sampled
call 3: [system, user, answer 1, user]      from the same place as call 2: a branch, with a copy of the tokens as its prompt
call 4: [another system, user]              a new sequence
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from asyncflow.environments.base import Message
from asyncflow.environments.capture.wire import FinishReason
from asyncflow.environments.joints import Joints
from asyncflow.types import Array


class SampledTokens(Protocol):
    """The part of an engine's `Response` that a transcript keeps, and an answer tells."""

    @property
    def token_ids(self) -> Array:
        """Sampled tokens, int64 [n]."""
        ...

    @property
    def logprobs(self) -> Array:
        """Log-prob of each token, float32 [n]."""
        ...

    @property
    def version_spans(self) -> Array:
        """Rows of (first token offset, policy version), int64 [spans, 2], ascending."""
        ...

    @property
    def finish_reason(self) -> FinishReason:
        """Reason why sampling ended."""
        ...


@dataclass(slots=True)
class CapturedSequence:
    """One sequence: a prompt, and the tokens behind it in pieces, each sampled or observed.

    `number`: from 0, in the order in which sequences began. `pieces`: token ids int64, log-probs float32 (0 where observed) and
    version spans int64 [n, 2] of each piece (none where observed).
    """

    number: int
    prompt_ids: Array
    pieces: list[tuple[Array, Array, Array]] = field(default_factory=list)

    @property
    def token_ids(self) -> Array:
        """int64 [L], behind the prompt."""
        return np.concatenate([np.empty(0, np.int64), *(ids for ids, _, _ in self.pieces)])

    @property
    def logprobs(self) -> Array:
        """float32 [L], 0 for observed tokens."""
        return np.concatenate([np.empty(0, np.float32), *(logprobs for _, logprobs, _ in self.pieces)])

    @property
    def loss_mask(self) -> Array:
        """uint8 [L], 1 where the policy itself produced the token."""
        made = [np.full(len(ids), len(spans) > 0, np.uint8) for ids, _, spans in self.pieces]
        return np.concatenate([np.empty(0, np.uint8), *made])

    @property
    def version_spans(self) -> Array:
        """int64 [spans, 2], rows of (first token behind the prompt, version). Observed tokens belong to the span before them."""
        begins = np.cumsum([0, *(len(ids) for ids, _, _ in self.pieces)])
        spans = [spans + np.array([begin, 0]) for (_, _, spans), begin in zip(self.pieces, begins, strict=False) if len(spans)]
        return np.concatenate(spans) if spans else np.empty((0, 2), np.int64)

    def observe(self, token_ids: Array) -> None:
        """Append observed tokens (int64 [n])."""
        if len(token_ids):
            self.pieces.append((token_ids, np.zeros(len(token_ids), np.float32), np.empty((0, 2), np.int64)))

    def sample(self, response: SampledTokens) -> None:
        """Append sampled tokens."""
        if len(response.token_ids):
            self.pieces.append((response.token_ids, response.logprobs, response.version_spans))


class CapturedCall(NamedTuple):
    """Call that waits for its answer: which sequence it goes on with. The answer is sampled behind `prompt_ids` and `after`."""

    sequence: CapturedSequence
    messages: Sequence[Message]
    joints: Joints
    digest: bytes
    prompt_ids: Array
    after: Array
    text: str | None = None
    """Prompt of a completion; None: a conversation's call."""


class _AnswerEnd(NamedTuple):
    """End of an answer, where a sequence may go on. `messages`: the conversation so far, its answers as they were sampled."""

    sequence: CapturedSequence
    num_pieces: int
    messages: Sequence[Message]


class CallTranscript:
    """Sequences of one episode."""

    def __init__(self) -> None:
        self.sequences: list[CapturedSequence] = []
        self._places: dict[bytes, _AnswerEnd] = {}  # by the digest of the conversation, as the client has it
        self._texts: list[tuple[str, _AnswerEnd]] = []  # of completions
        self._continued: set[tuple[int, int]] = set()  # places: sequence and number of pieces

    def trained(self) -> list[CapturedSequence]:
        """Sequences with sampled tokens, each up to its last one."""
        kept = []
        for sequence in self.sequences:
            last = max((number for number, (_, _, spans) in enumerate(sequence.pieces, 1) if len(spans)), default=0)
            if last:
                kept.append(CapturedSequence(sequence.number, sequence.prompt_ids, sequence.pieces[:last]))
        return kept

    def begin(self, messages: Sequence[Message], joints: Joints) -> CapturedCall:
        """Place of the answer to a conversation. `joints`: of its tools. Raises `UserError` if the template refuses it."""
        digests = _digests(messages)
        for length in range(len(messages) - 1, 0, -1):
            if messages[length - 1]["role"] == "assistant" and (place := self._places.get(digests[length])) is not None:
                return self._from(place, messages[length:], joints, digests[-1])
        given = [template_message(message) for message in messages]
        return self._new(joints.prompt_ids(given), given, joints, digests[-1])

    def begin_text(self, prompt: str, joints: Joints) -> CapturedCall:
        """Place of the completion of a text: behind the longest text that it begins with and that was completed before."""
        found = [(text, place) for text, place in self._texts if prompt.startswith(text)]
        if not found:
            given = [{"role": "user", "content": prompt}]
            return self._new(joints.prompt_ids(given), given, joints, b"")._replace(text=prompt)
        text, place = max(found, key=lambda each: len(each[0]))
        return self._from(place, [{"role": "user", "content": prompt[len(text) :]}], joints, b"")._replace(text=prompt)

    def end(self, call: CapturedCall, response: SampledTokens, answer: Message) -> None:
        """Add the answer, which has been sampled; `answer`: the message that the client gets."""
        call.sequence.sample(response)
        place = _AnswerEnd(call.sequence, len(call.sequence.pieces), [*call.messages, call.joints.answer(response.token_ids)])
        if call.text is None:
            self._places[_digest(call.digest, answer)] = place
        else:
            self._texts.append((call.text + _text(answer["content"]), place))

    def _from(self, place: _AnswerEnd, new: Sequence[Message], joints: Joints, digest: bytes) -> CapturedCall:
        sequence, given = place.sequence, joints.messages_of([template_message(message) for message in new])
        messages = [*place.messages, *given]
        *before, answer = place.messages
        may_change = any(message["role"] in joints.survey.changing for message in given)
        if may_change and joints.is_changed(before, answer, given):
            return self._new(joints.prompt_ids(messages), messages, joints, digest)
        pieces = sequence.pieces[: place.num_pieces]
        joint = joints.between(int(pieces[-1][0][-1]) if pieces else -1, given)
        if (sequence.number, place.num_pieces) in self._continued:
            return self._new(np.concatenate([sequence.prompt_ids, *(ids for ids, _, _ in pieces), joint]), messages, joints, digest)
        self._continued.add((sequence.number, place.num_pieces))
        sequence.observe(joint)
        return CapturedCall(sequence, messages, joints, digest, sequence.prompt_ids, sequence.token_ids)

    def _new(self, prompt_ids: Array, messages: Sequence[Message], joints: Joints, digest: bytes) -> CapturedCall:
        sequence = CapturedSequence(len(self.sequences), prompt_ids)
        self.sequences.append(sequence)
        return CapturedCall(sequence, messages, joints, digest, prompt_ids, np.empty(0, np.int64))


def template_message(message: Message) -> dict[str, Any]:
    """A client's message as chat templates take it: text parts joined, the arguments of calls as objects."""
    given = {**message, "content": _text(message.get("content"))}
    if calls := message.get("tool_calls"):
        given["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"]["arguments"])}} for call in calls
        ]
    return given


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return "" if content is None else str(content)


def _arguments(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError:
        return arguments


def _digests(messages: Sequence[Message]) -> list[bytes]:
    """Digests of the first 0, 1, ... messages."""
    digests = [b""]
    for message in messages:
        digests.append(_digest(digests[-1], message))
    return digests


def _digest(before: bytes, message: Message) -> bytes:
    """Digest of a conversation with one message more. White space at the ends, ids of calls and spellings of JSON do not count."""
    calls = [
        (call["function"]["name"], json.dumps(_arguments(call["function"]["arguments"]), sort_keys=True))
        for call in message.get("tool_calls") or ()
    ]
    known = (message["role"], _text(message.get("content")).strip(), calls)
    return hashlib.sha256(before + json.dumps(known).encode()).digest()
