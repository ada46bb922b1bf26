"""An episode whose turns are the calls of a program: it speaks to the capture endpoint, and the calls' sequences are its row.

    begin --> the program runs --> calls, one after another or side by side --> it ends: reward, or none
                                   each is generated at once, behind its own sequence

consumes: calls of the program, by the endpoint
waits for: the program's end
is unblocked by: the program, or the deadline of environments

A row of several sequences is its first one and *branches*: each begins with a prompt of its own, whose tokens are observed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from asyncflow.engines.base import Response, SampleKey, Sampling
from asyncflow.environments.agent import Endpoint
from asyncflow.environments.base import Action, EnvironmentFailure
from asyncflow.environments.capture.episode import CapturedEpisode
from asyncflow.environments.capture.transcript import CapturedCall
from asyncflow.environments.joints import JointsByTools
from asyncflow.loops.episode import EpisodePlayer, EpisodeRow, LimitReached, branch_key
from asyncflow.loops.transcript import EpisodeEnd, Played, played_sequences


class Served(Protocol):
    """The endpoint, as this loop sees it."""

    base_url: str

    def serving(self, episode: CapturedEpisode) -> AbstractContextManager[str]:
        """The key by which the episode's program is served, until the context ends."""


@dataclass(slots=True, kw_only=True)
class CapturePlayer(EpisodePlayer):
    """Player of episodes in which programs call the model."""

    endpoint: Served
    joints: JointsByTools

    def first(self, rows: Sequence[EpisodeRow], sampling: Sampling) -> list[tuple[Sampling | None, list[EpisodeRow]]]:
        """See `EpisodePlayer`: no turn is there before its program asks."""
        return [(None, [row]) for row in rows if row.failure is None]

    async def play(self, row: EpisodeRow, turn: Response | None, sampling: Sampling, key: SampleKey) -> Played:
        """Run the program to its end. Raises `EnvironmentFailure`, and `LimitReached` where limits fail."""
        assert row.environment is not None
        keys: set[SampleKey] = set()

        under_way = 0

        async def generate(call: CapturedCall, limit: int, stops: tuple[str, ...]) -> Response:
            nonlocal under_way
            of_call = branch_key(key, call.sequence.number)
            keys.add(of_call)
            under_way += 1
            self.on_waiting(-(under_way == 1))
            settings = replace(sampling.of_turn(limit, keeps=True), stop=stops or sampling.stop)
            stream = self.engine.generate(call.prompt_ids, samples=[row.sample], sampling=settings, key=of_call, after=call.after)
            try:
                (response,) = [each async for each in stream]
            finally:
                under_way -= 1
                self.on_waiting(int(not under_way))
            return response

        captured = CapturedEpisode(
            self.joints,
            generate,
            max_tokens=sampling.max_new_tokens,
            max_calls=self.limits.max_turns,
            max_call_tokens=self.limits.max_turn_tokens,
            prompt_ids=row.prompt_ids,
        )
        clock, result, failure = asyncio.get_running_loop().time, None, None
        began = clock()
        self.on_waiting(1)
        try:
            with self.endpoint.serving(captured) as api_key:
                endpoint = msgspec.json.encode(Endpoint(self.endpoint.base_url, api_key)).decode()
                result = await row.environment.step(Action(endpoint))
        except EnvironmentFailure as error:
            if error.kind != "timeout":
                raise
            failure = error
        finally:
            self.on_waiting(-1)
            row.environment.end()
            for of_call in keys:
                self.forget(of_call, row.sample)
        sequences, seconds = captured.end(), clock() - began
        if not sequences:
            raise EnvironmentFailure("invalid", "the program has ended without a call that was answered")
        ended: EpisodeEnd = "timeout" if failure is not None else "length" if captured.has_reached_limit else "stop"
        if self.limits.fails and ended != "stop":
            raise LimitReached(ended, f"the episode reached a limit: {failure or 'its program asked for more'}")
        reward = None if result is None else result.reward
        return played_sequences(row.sample, row.prompt_ids, sequences, ended=ended, reward=reward, seconds=seconds)
