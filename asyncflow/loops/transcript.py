"""The tokens of an episode, which side said them, and by which weights: as they come, and as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from asyncflow.engines.base import Response
from asyncflow.environments.base import TOOL_CALLS, TOOL_FAILURES, TurnResult
from asyncflow.environments.capture.transcript import CapturedSequence
from asyncflow.types import Array

EpisodeEnd = Literal["stop", "length", "timeout"]


@dataclass(slots=True)
class Played:
    """An episode that has ended, of L tokens behind the prompt in T turns.

    `response`: all its tokens, of which those with loss_mask (uint8 [L]) 1 were sampled; the log-probs of others are 0. `turns`
    int64 [T, 4]: first token of the turn, its number of tokens, tools that it called, those that failed. `rewards` float32 [T]: of
    the environment, NaN where a turn has none. `seconds`: in the environment. `branches` int64 [B, 2]: see branches.py.
    """

    response: Response
    loss_mask: Array
    ended: EpisodeEnd
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
    sample: int,
    prompt_ids: Array,
    sequences: Sequence[CapturedSequence],
    *,
    ended: EpisodeEnd,
    reward: float | None,
    seconds: float,
) -> Played:
    """An episode of several sequences, whose calls somebody else has made. Each piece that was sampled is a turn, and the last one
    has the reward. `prompt_ids`: of the group."""
    played = _joined(sample, prompt_ids, sequences, ended, seconds)
    edges = np.flatnonzero(np.diff(played.loss_mask, prepend=0, append=0).astype(np.int64) % 2)
    played.turns = np.array([(first, end - first, 0, 0) for first, end in edges.reshape(-1, 2)], np.int64).reshape(-1, 4)
    played.rewards = np.full(len(played.turns), np.nan, np.float32)
    played.rewards[-1:] = np.nan if reward is None else reward
    return played


def _joined(sample: int, prompt_ids: Array, sequences: Sequence[CapturedSequence], ended: EpisodeEnd, seconds: float) -> Played:
    """Sequences end to end, without the turns in them. The first one continues the group's prompt (int64) if its own begins with
    that; all others are branches. What was observed before the first sampled token counts as its version's."""
    tokens, logprobs, masks, branches = [], [], [], []
    spans: list[tuple[int, int]] = []
    end = 0
    for number, sequence in enumerate(sequences):
        context = sequence.prompt_ids
        if number == 0 and len(context) >= len(prompt_ids) and np.array_equal(context[: len(prompt_ids)], prompt_ids):
            context = context[len(prompt_ids) :]
        else:
            branches.append((end, len(context)))
        tokens += [context, sequence.token_ids]
        logprobs += [np.zeros(len(context), np.float32), sequence.logprobs]
        masks += [np.zeros(len(context), np.uint8), sequence.loss_mask]
        for first, version in sequence.version_spans.tolist():
            if not spans or spans[-1][1] != version:
                spans.append((end + len(context) + first if spans else 0, version))
        end += len(context) + len(sequence.token_ids)
    response = Response(
        sample=sample,
        token_ids=np.concatenate(tokens),
        logprobs=np.concatenate(logprobs),
        version_spans=np.array(spans, np.int64).reshape(-1, 2),
        finish_reason="stop" if ended == "stop" else "length",
    )
    columns = np.array(branches, np.int64).reshape(-1, 2)
    return Played(response, np.concatenate(masks), ended, seconds=seconds, branches=columns)


class Transcript:
    """The sequences of an episode so far, the first one and its branches. `num_tokens`: of all of them, behind the group's
    prompt."""

    def __init__(self, sample: int, group_prompt_ids: Array, prompt_ids: Array) -> None:
        """`prompt_ids` (int64): the group's, and the first observation."""
        self._sample, self._group_prompt_ids = sample, group_prompt_ids
        self._sequences = [CapturedSequence(0, prompt_ids)]
        self._turns: list[list[int]] = []
        self._rewards: list[float] = []
        self.num_tokens = len(prompt_ids) - len(group_prompt_ids)

    @property
    def num_turns(self) -> int:
        """Number of the policy's turns so far."""
        return len(self._turns)

    @property
    def sequence(self) -> CapturedSequence:
        """The sequence that goes on."""
        return self._sequences[-1]

    def branched(self, prompt_ids: Array) -> None:
        """Begin a branch, with a prompt of its own (int64)."""
        self._sequences.append(CapturedSequence(len(self._sequences), prompt_ids))
        self.num_tokens += len(prompt_ids)

    def sampled(self, turn: Response) -> None:
        """A turn of the policy."""
        self._turns.append([self.num_tokens, len(turn.token_ids), 0, 0])
        self._rewards.append(np.nan)
        self.sequence.sample(turn)
        self.num_tokens += len(turn.token_ids)

    def answered(self, result: TurnResult) -> None:
        """Add the environment's answer to the last turn, but for its words."""
        self._turns[-1][2:] = [int(result.info.get(TOOL_CALLS, 0)), int(result.info.get(TOOL_FAILURES, 0))]
        self._rewards[-1] = np.nan if result.reward is None else result.reward

    def observed(self, token_ids: Array) -> None:
        """Tokens that the policy did not draw."""
        self.sequence.observe(token_ids)
        self.num_tokens += len(token_ids)

    def played(self, ended: EpisodeEnd, seconds: float) -> Played:
        """The whole episode."""
        played = _joined(self._sample, self._group_prompt_ids, self._sequences, ended, seconds)
        played.turns = np.array(self._turns, np.int64).reshape(-1, 4)
        played.rewards = np.array(self._rewards, np.float32)
        return played


def conversation(played: Played, decode: Callable[[Array], str]) -> list[dict[str, Any]]:
    """An episode as it is kept for reading: the text of each turn and its speaker, token by token, with the log-probs of
    what was sampled."""
    response, pieces, end = played.response, [], 0

    def piece(by: str, first: int, last: int) -> dict[str, Any]:
        ids = response.token_ids[first:last]
        return {"by": by, "text": decode(ids), "tokens": ids.tolist(), "texts": [decode(ids[i : i + 1]) for i in range(len(ids))]}

    def observed(first: int, last: int) -> None:
        if last > first:
            pieces.append(piece("environment", first, last))

    for (first, count, calls, failures), reward in zip(played.turns.tolist(), played.turn_rewards, strict=True):
        observed(end, first)
        end = first + count
        logprobs = [round(float(logprob), 4) for logprob in response.logprobs[first:end]]
        what = {"logprobs": logprobs, "reward": reward, TOOL_CALLS: calls, TOOL_FAILURES: failures}
        pieces.append(piece("policy", first, end) | what)
    observed(end, len(response.token_ids))
    return pieces
