"""An episode: the policy's turns, and what the environment says of each, until it ends. A row is an episode.

    begin (reset) --> generate --> observe (step) --> generate --> observe ... --> ended: stop, length or timeout
                      sampled:     observed:
                      loss_mask 1  loss_mask 0

consumes: an engine's turns, an environment's answers
waits for: a slot of the engine; the environment
is unblocked by: the engine; the environment's process, or its deadline

What the engine sampled is the row, to the token: an observation is appended as tokens, and nothing is ever decoded and encoded
again. Where an observation changes earlier turns (`TurnFormat.branch`), a new sequence of the same row begins, with a prompt of its
own. A response without an environment is the episode of one turn.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from asyncflow.engines.base import Response, RolloutEngine, SampleKey, Sampling
from asyncflow.environments.base import EnvironmentFailure, Environments, Episode, TurnFormat, Words, seed_of
from asyncflow.loops.samples import GroupRequest
from asyncflow.loops.transcript import EpisodeEnd, Played, Transcript
from asyncflow.types import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Limits of an episode, besides the tokens of all of it. `fails`: a row that reaches one fails; else it is scored."""

    max_turns: int = 1
    max_turn_tokens: int | None = None
    fails: bool = False


class LimitReached(Exception):
    """An episode that reached a limit in a run in which it is to fail. `ended`: `length` or `timeout`."""

    def __init__(self, ended: EpisodeEnd, message: str) -> None:
        super().__init__(message)
        self.ended = ended


@dataclass(slots=True, eq=False)
class EpisodeRow:
    """A row's episode under way. `environment` None: its only turn is the end. `failure`: why it could not begin."""

    sample: int
    prompt_ids: Array
    environment: Episode | None = None
    transcript: Transcript | None = None
    failure: EnvironmentFailure | None = None


@dataclass(slots=True)
class EpisodePlayer:
    """Player of a worker's episodes. Without `environments` each is one turn.

    `on_waiting` is called with +1 when a row begins to wait for its environment, and with -1 when it no longer does.
    """

    engine: RolloutEngine
    environments: Environments | None = None
    format: TurnFormat | None = None
    limits: EpisodeLimits = EpisodeLimits()
    on_waiting: Callable[[int], None] = lambda change: None

    async def begin(
        self, request: GroupRequest, samples: Sequence[int], sampling: Sampling, key: SampleKey
    ) -> AsyncIterator[list[EpisodeRow]]:
        """The rows of a group, as their environments have been reset: those that are ready at one time are generated together. A
        row whose environment has to wait for a process holds no other one up."""
        if self.environments is None:
            yield [EpisodeRow(sample, request.prompt_ids) for sample in samples]
            return
        known: dict[bytes, Array] = {}  # what rows begin with, so that those that begin alike have one array
        resets = {asyncio.ensure_future(self._begin(request, sample, sampling.max_new_tokens, key)) for sample in samples}
        try:
            while resets:
                done, resets = await asyncio.wait(resets, return_when=asyncio.FIRST_COMPLETED)
                rows = sorted((reset.result() for reset in done), key=lambda row: row.sample)
                for row in rows:
                    row.prompt_ids = known.setdefault(row.prompt_ids.tobytes(), row.prompt_ids)
                    row.transcript = Transcript(row.sample, request.prompt_ids, row.prompt_ids)
                yield rows
        finally:
            for reset in resets:
                reset.cancel()

    async def _begin(self, request: GroupRequest, sample: int, max_tokens: int, key: SampleKey) -> EpisodeRow:
        assert self.environments is not None
        row = EpisodeRow(sample, request.prompt_ids)
        self.on_waiting(1)
        try:
            seed = seed_of(key.seed, key.prompt_index)
            row.environment, opening = await self.environments.begin(request.example, seed)
            if opening is not None:
                assert self.format is not None
                ids = self.format.opening(request.prompt_ids, opening.words, opening.tools)
                row.prompt_ids = np.concatenate([request.prompt_ids, ids])
                if len(ids) >= max_tokens:
                    what = f"the environment's first observation has {len(ids)} tokens"
                    raise EnvironmentFailure("invalid", f"{what}, and rollout.max_new_tokens is {max_tokens}")
        except EnvironmentFailure as failure:
            row.failure = failure
            if row.environment is not None:  # its words cannot follow the prompt: its place is another row's
                row.environment.end()
        finally:
            self.on_waiting(-1)
        return row

    def first(self, rows: Sequence[EpisodeRow], sampling: Sampling) -> list[tuple[Sampling | None, list[EpisodeRow]]]:
        """Rows that begin with the same tokens, with the settings of their first turn; None: they are played before they have one.
        Those that cannot begin are left out."""
        if self.environments is None:
            return [(sampling, list(rows))]
        alike: dict[bytes, list[EpisodeRow]] = {}
        for row in rows:
            if row.failure is None:
                alike.setdefault(row.prompt_ids.tobytes(), []).append(row)
        return [(self._turn_sampling(some[0], sampling), some) for some in alike.values()]

    async def play(self, row: EpisodeRow, turn: Response | None, sampling: Sampling, key: SampleKey) -> Played:
        """The rest of an episode, from its first turn on. Raises `EnvironmentFailure`, and `LimitReached` where limits fail."""
        assert turn is not None
        if row.environment is None:
            return Played(turn, np.ones(len(turn.token_ids), np.uint8), turn.finish_reason)
        assert self.format is not None and row.transcript is not None
        transcript, seconds, clock = row.transcript, 0.0, asyncio.get_running_loop().time
        turns: list[tuple[Array, Words | None]] = []
        try:
            while True:
                transcript.sampled(turn)
                is_finished = turn.finish_reason == "stop"
                action, began = self.format.action(turn.token_ids, is_finished=is_finished), clock()
                self.on_waiting(1)
                try:
                    result = await row.environment.step(action)
                except EnvironmentFailure as failure:
                    if failure.kind != "timeout":
                        raise
                    return self._ended(transcript, "timeout", clock() - began + seconds, str(failure))
                finally:
                    self.on_waiting(-1)
                seconds += clock() - began
                transcript.answered(result)
                if not is_finished:
                    return self._ended(transcript, "length", seconds, f"turn {transcript.num_turns} was cut off")
                if result.done:
                    return self._ended(transcript, "stop", seconds)
                if transcript.num_turns == self.limits.max_turns:
                    return self._ended(transcript, "length", seconds, f"it was not done after {transcript.num_turns} turns")
                turns.append((turn.token_ids, result.words))
                branch = self.format.branch(row.prompt_ids, turns)
                observed = self.format.between(turn.token_ids, result.words, is_finished=True) if branch is None else branch
                if transcript.num_tokens + len(observed) >= sampling.max_new_tokens:
                    return self._ended(
                        transcript, "length", seconds, f"it has no room for an observation of {len(observed)} tokens"
                    )
                if branch is None:
                    transcript.observed(observed)
                else:
                    self.forget(branch_key(key, transcript.sequence.number), row.sample)
                    transcript.branched(branch)
                turn = await self._next_turn(row, sampling, key)
        finally:
            row.environment.end()
            self.forget(branch_key(key, transcript.sequence.number), row.sample)

    def forget(self, key: SampleKey, sample: int) -> None:
        """Let the engine forget this sequence: no turn of it follows."""
        if (forget := getattr(self.engine, "forget", None)) is not None:
            forget(key, sample)

    async def _next_turn(self, row: EpisodeRow, sampling: Sampling, key: SampleKey) -> Response:
        assert row.transcript is not None
        sequence, settings = row.transcript.sequence, self._turn_sampling(row, sampling)
        of_turn, after = branch_key(key, sequence.number), sequence.token_ids
        stream = self.engine.generate(sequence.prompt_ids, samples=[row.sample], sampling=settings, key=of_turn, after=after)
        (turn,) = [response async for response in stream]
        return turn

    def _turn_sampling(self, row: EpisodeRow, sampling: Sampling) -> Sampling:
        assert row.transcript is not None
        room = sampling.max_new_tokens - row.transcript.num_tokens
        if self.limits.max_turn_tokens is not None:
            room = min(room, self.limits.max_turn_tokens)
        return sampling.of_turn(room, keeps=row.transcript.num_turns + 1 < self.limits.max_turns)

    def _ended(self, transcript: Transcript, ended: EpisodeEnd, seconds: float, why: str = "") -> Played:
        if self.limits.fails and ended != "stop":
            raise LimitReached(ended, f"the episode reached a limit: {why}")
        return transcript.played(ended, seconds)


def branch_key(key: SampleKey, number: int) -> SampleKey:
    """Key of the noise of one of a row's sequences. Positions begin anew in each, so all but the first have noise of their own."""
    if not number:
        return key
    digest = hashlib.sha256(f"branch\0{key.seed}\0{key.prompt_index}\0{number}".encode()).digest()
    return SampleKey(int.from_bytes(digest[:8], "big") >> 1, key.prompt_index)
