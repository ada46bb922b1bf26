"""The tokens of an episode, which side said them, and by which weights: as they come, and as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

from asyncflow.engines.base import NO_TOKENS, Response
from asyncflow.environments.base import TOOL_CALLS, TOOL_FAILURES, TurnResult
from asyncflow.loops.branches import SequenceTokens, joined
from asyncflow.types import Array

Ended = Literal["stop", "length", "timeout"]
NO_LOG_PROB: Final = np.float32(0)
"""Log-prob of an observed token: nobody drew it."""


@dataclass(slots=True)
class Played:
    """An episode that has ended, of L tokens behind the prompt in T turns.

    `response`: all its tokens, of which those with loss_mask (uint8 [L]) 1 were sampled; the log-probs of others are 0. `turns`
    int64 [T, 4]: first token of the turn, its number of tokens, tools that it called, those that failed. `rewards` float32 [T]: of
    the environment, NaN where a turn has none. `seconds`: in the environment. `branches` int64 [B, 2]: see branches.py.
    """

    response: Response
    loss_mask: Array
    ended: Ended
    turns: Array = field(default_factory=lambda: np.zeros((0, 4), np.int64))
    rewards: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    seconds: float = 0.0
    branches: Array = field(default_factory=lambda: np.zeros((0, 2), np.int64))

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy drew."""
        return int(self.loss_mask.sum())

    @property
    def turn_rewards(self) -> list[float | None]:
        """The environment's rewards, None where a turn has none."""
        return [None if np.isnan(reward) else float(reward) for reward in self.rewards]


def played_sequences(
    sample: int, prompt_ids: Array, sequences: Sequence[SequenceTokens], *, ended: Ended, reward: float | None, seconds: float
) -> Played:
    """An episode of several sequences, whose calls somebody else has made. Each piece that was sampled is a turn, and the last one
    has the reward. `prompt_ids`: of the group."""
    made = joined(prompt_ids, sequences)
    edges = np.flatnonzero(np.diff(made.loss_mask, prepend=0, append=0).astype(np.int64) % 2)
    turns = np.array([(first, end - first, 0, 0) for first, end in edges.reshape(-1, 2)], np.int64).reshape(-1, 4)
    rewards = np.full(len(turns), np.nan, np.float32)
    rewards[-1:] = np.nan if reward is None else reward
    reason: Literal["stop", "length"] = "stop" if ended == "stop" else "length"
    response = Response(sample, made.token_ids, made.logprobs, made.version_spans, reason)
    return Played(response, made.loss_mask, ended, turns, rewards, seconds, made.branches)


class Transcript:
    """The tokens of an episode so far, behind the prompt."""

    def __init__(self, sample: int) -> None:
        self._sample = sample
        self._tokens: list[Array] = []
        self._logprobs: list[Array] = []
        self._masks: list[Array] = []
        self._spans: list[tuple[int, int]] = []
        self._turns: list[list[int]] = []
        self._rewards: list[float] = []
        self._num_opening = 0
        self._branches: list[tuple[int, Array]] = []  # first token, context
        self.num_tokens = 0

    @property
    def num_turns(self) -> int:
        """Number of the policy's turns so far."""
        return len(self._turns)

    @property
    def num_branches(self) -> int:
        """Number of sequences beside the first one so far."""
        return len(self._branches)

    def so_far(self, prompt_ids: Array) -> tuple[Array, Array]:
        """Prompt (int64) of the sequence that goes on, and the tokens (int64) behind it. `prompt_ids`: of the first sequence, its
        first observation included."""
        first, prompt = self._num_opening, prompt_ids
        if self._branches:
            begin, prompt = self._branches[-1]
            first = begin + len(prompt)
        return prompt, np.concatenate([NO_TOKENS, *self._tokens])[first:]

    def branched(self, prompt_ids: Array) -> None:
        """A branch begins, with a prompt of its own (int64)."""
        self._branches.append((self.num_tokens, np.asarray(prompt_ids, np.int64)))
        self.observed(prompt_ids)

    def opened(self, token_ids: Array) -> None:
        """Add the first observation."""
        self.observed(token_ids)
        self._num_opening = len(token_ids)

    def sampled(self, turn: Response) -> None:
        """A turn of the policy."""
        for first, version in turn.version_spans.tolist():
            if not self._spans:  # what was observed before the first turn counts as its first version's
                self._spans.append((0, version))
            elif version != self._spans[-1][1]:
                self._spans.append((self.num_tokens + first, version))
        self._turns.append([self.num_tokens, len(turn.token_ids), 0, 0])
        self._rewards.append(np.nan)
        self._append(turn.token_ids, turn.logprobs, 1)

    def answered(self, result: TurnResult) -> None:
        """Add the environment's answer to the last turn, but for its words."""
        self._turns[-1][2:] = [int(result.info.get(TOOL_CALLS, 0)), int(result.info.get(TOOL_FAILURES, 0))]
        self._rewards[-1] = np.nan if result.reward is None else result.reward

    def observed(self, token_ids: Array) -> None:
        """Tokens that the policy did not draw."""
        self._append(np.asarray(token_ids, np.int64), np.full(len(token_ids), NO_LOG_PROB), 0)

    def played(self, ended: Ended, seconds: float) -> Played:
        """The whole episode."""
        response = Response(
            sample=self._sample,
            token_ids=np.concatenate(self._tokens),
            logprobs=np.concatenate(self._logprobs),
            version_spans=np.array(self._spans, np.int64),
            finish_reason="stop" if ended == "stop" else "length",
        )
        turns, rewards = np.array(self._turns, np.int64).reshape(-1, 4), np.array(self._rewards, np.float32)
        branches = np.array([(begin, len(prompt)) for begin, prompt in self._branches], np.int64).reshape(-1, 2)
        return Played(response, np.concatenate(self._masks), ended, turns, rewards, seconds, branches)

    def _append(self, token_ids: Array, logprobs: Array, mask: int) -> None:
        self._tokens.append(token_ids)
        self._logprobs.append(logprobs)
        self._masks.append(np.full(len(token_ids), mask, np.uint8))
        self.num_tokens += len(token_ids)


def conversation(played: Played, decode: Callable[[Array], str]) -> list[dict[str, Any]]:
    """An episode as it is kept for reading: what was said by whom, token by token, and the log-probs of what was sampled."""
    response, pieces, end = played.response, [], 0

    def said(by: str, first: int, last: int) -> dict[str, Any]:
        ids = response.token_ids[first:last]
        return {"by": by, "text": decode(ids), "tokens": ids.tolist(), "texts": [decode(ids[i : i + 1]) for i in range(len(ids))]}

    def observed(first: int, last: int) -> None:
        if last > first:
            pieces.append(said("environment", first, last))

    for (first, count, calls, failures), reward in zip(played.turns.tolist(), played.turn_rewards, strict=True):
        observed(end, first)
        end = first + count
        logprobs = [round(float(logprob), 4) for logprob in response.logprobs[first:end]]
        what = {"logprobs": logprobs, "reward": reward, TOOL_CALLS: calls, TOOL_FAILURES: failures}
        pieces.append(said("policy", first, end) | what)
    observed(end, len(response.token_ids))
    return pieces
