"""The contract of an environment, and of the format in which its words and the policy's become tokens.

    reset(example, seed) -> observation        what stands behind the prompt, before the first turn
    step(action) -> observation, reward, done, info        once for each turn of the policy
    close()

Each method may be a coroutine or a plain function.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec

from asyncflow.types import Array

Message = Mapping[str, Any]
"""Message of a chat, as chat templates take it: `{"role": "tool", "content": "12"}`."""
Words = str | Sequence[Message]
"""An observation: text, or messages of a chat."""

TOOL_CALLS = "tool_calls"
TOOL_FAILURES = "tool_failures"
"""Keys of `info` that the metrics count: tools that an action called, and those of them that failed."""


class Opening(msgspec.Struct, frozen=True):
    """First observation of an environment that brings tools of this episode's own: messages, and the tools' specifications, as the
    chat template takes them. (Tools that all episodes have are `Environment.tools`.)"""

    words: str | list[dict[str, Any]]
    tools: list[dict[str, Any]] = []


class Action(str):
    """Turn of the policy: its text, special tokens included but for the end token.

    `is_finished`: the policy ended the turn itself; False: a limit of tokens did. `token_ids`: as they were sampled.
    """

    is_finished: bool
    token_ids: Sequence[int]

    def __new__(cls, text: str, is_finished: bool = True, token_ids: Sequence[int] = ()) -> Action:
        action = super().__new__(cls, text)
        action.is_finished, action.token_ids = is_finished, token_ids
        return action


class TurnResult(NamedTuple):
    """Result of a step. `words`: None where nothing is to be said. `reward`: None where this turn has none. `done`: the episode
    ends. `info`: JSON values; `tool_calls` and `tool_failures` are counted in the metrics."""

    words: Words | None
    reward: float | None
    done: bool
    info: Mapping[str, Any]


class Environment(Protocol):
    """Environment of one episode: built with the options of the configuration, reset once, stepped once a turn, closed.

    It is built in a process of its own, and the episode is a fork of that process. One that says `episodes_per_process` is built
    anew for each episode, and so many episodes share a process: coroutines take turns there, plain functions run in threads.
    Must not import torch. Any exception fails the row, with its words.
    """

    episodes_per_process: ClassVar[int] = 1
    """Number of episodes that a process has at once."""
    is_deterministic: ClassVar[bool] = True
    """Whether an episode depends on its example, seed and actions alone. False: rows that are lost are made again otherwise, and
    the certificate says so."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Specifications of the tools that all episodes have, as the chat template takes them: prompts of the data are rendered with
    them."""

    def reset(self, example: Mapping[str, Any], seed: int) -> Opening | Words | Awaitable[Opening | Words | None] | None:
        """Begin. `example`: the data set's row. `seed`: the same for all samples of a prompt, 0 to 2^63 - 1 (`seed_of`).

        Returns what the policy reads before its first turn. None: the prompt of the data is all. Text stands behind the prompt.
        Messages are rendered as a whole chat, in the place of the prompt, whose tokens they must begin with.
        """

    def step(self, action: Action) -> TurnResult | tuple[Any, ...] | Awaitable[TurnResult | tuple[Any, ...]]:
        """Answer to a turn: an `TurnResult`, or a tuple of its four fields."""

    def close(self) -> Awaitable[None] | None:
        """End, whether the episode is done or not."""


class Episode(Protocol):
    """Episode in an environment, as `produce` sees it."""

    async def step(self, action: Action) -> TurnResult:
        """The environment's answer to a turn. Raises `EnvironmentFailure`."""

    def end(self) -> None:
        """End the episode: it is over, or is not wanted any more. Returns at once."""


class Environments(Protocol):
    """Source of episodes: processes (pool.py), or a simulation's."""

    async def begin(self, example: Mapping[str, Any], seed: int) -> tuple[Episode, Opening | None]:
        """An episode, and its first observation; waits for room. Raises `EnvironmentFailure`."""


class TurnFormat(Protocol):
    """The tokens between turns. Pure functions of their arguments; what the policy sampled is never encoded again.

    Built with the run's tokenizer (data/tokenizer.py), and the options of `episodes.format`.
    """

    def opening(self, prompt_ids: Array, words: Words, tools: Sequence[Mapping[str, Any]]) -> Array:
        """Tokens (int64) of the first observation, which follow the prompt (int64).

        Raises `EnvironmentFailure` where the observation cannot follow it.
        """

    def between(self, turn_ids: Array, words: Words | None, *, is_finished: bool) -> Array:
        """Tokens (int64) from the end of a turn (int64, its end token included where `is_finished`) to the start of the next."""

    def branch(self, prompt_ids: Array, turns: Sequence[tuple[Array, Words | None]]) -> Array | None:
        """Prompt (int64) of a new sequence, where the last turn's words change what came before them; None where they do not.

        `prompt_ids`: of the first sequence, its first observation included. `turns`: all turns so far, each with the words that
        answered it.
        """

    def action(self, turn_ids: Array, *, is_finished: bool) -> Action:
        """Action of a turn: what the environment gets to see of it."""


class EnvironmentFailure(Exception):
    """An episode that cannot go on: its environment raised, exited, ate memory, or said what is no observation.

    `kind` is one of raised, timeout, exited, memory, output, invalid. The message names the environment and says what happened.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def seed_of(seed: int, prompt_index: int) -> int:
    """Seed of an environment, from the key of the samples (`SampleKey`).

    The samples of a prompt have one seed: a group compares answers to the same situation.
    """
    digest = hashlib.sha256(f"environment\0{seed}\0{prompt_index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
