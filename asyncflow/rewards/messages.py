"""Messages between a reward pool and its workers: a 4-byte big-endian length and a msgpack message.

Before each goes a token: a question's is drawn at random, and its answer has the same. A scorer that gets hold of the pipe can so
give an answer to its own sample, but to no other.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from asyncflow.rewards.base import RewardPart, Sample

MAX_FRAME_BYTES = 1 << 28
TOKEN_BYTES = 8


class RewardLimits(msgspec.Struct, frozen=True):
    """Limits of a process that scores."""

    deadline_seconds: float
    """For one sample, from the moment a worker takes it up."""
    memory_bytes: int
    """Address space that scoring may add to what the built scorers already have."""
    output_bytes: int = 1 << 20
    """Bytes that scoring a sample may print, and write to a file."""
    start_seconds: float = 60.0
    """For importing and building the scorers."""


class Setup(msgspec.Struct, frozen=True, tag=True):
    """Scorers to build, and their limits. `prompt_column`, `prompt_template`: what makes a row's prompt, where `data` says it."""

    parts: list[RewardPart]
    limits: RewardLimits
    prompt_column: str | None = None
    prompt_template: str | None = None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The scorers are built. `has_deadline`: the worker itself ends a sample in time, and lives on."""

    has_deadline: bool


class Broken(msgspec.Struct, frozen=True, tag=True):
    """A scorer cannot be imported or built; `message` follows "the scorer ..."."""

    scorer: str
    message: str


class Scored(msgspec.Struct, frozen=True, tag=True):
    """Rewards of the parts, in order, and their weighted sum, which is finite. None: the scorer has nothing to say."""

    reward: float | None
    parts: list[float | None]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """No reward: `kind` as `RewardFailure` has it."""

    kind: str
    message: str


Reply = Ready | Broken | Scored | Failed
Message = TypeVar("Message", Setup, Sample)


def frame(message: msgspec.Struct) -> bytes:
    """The message as it goes over a pipe. Raises `ValueError` if it is too large for one frame."""
    payload = msgspec.msgpack.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes does not fit a frame of {MAX_FRAME_BYTES}")
    return len(payload).to_bytes(4, "big") + payload
