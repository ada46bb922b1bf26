"""The reward contract: a scorer turns one finished sample into a number, in a process of its own that can be killed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec


class Sample(msgspec.Struct, frozen=True):
    """What a scorer sees. `example` is the data set's row (JSON values); `is_finished`: the end token was reached."""

    prompt: str
    response: str
    example: Mapping[str, Any]
    is_finished: bool


class Scorer(Protocol):
    """Built once per reward process with the options of the config, called once per sample. Must not import torch."""

    def __call__(self, sample: Sample) -> float:
        """The reward. Any exception fails the sample (counted, never a 0)."""
        ...


class RewardFailure(Exception):
    """A sample that could not be scored: the scorer raised, hung, exited, ran out of memory or returned no number.

    `kind` is one of raised, timeout, exited, memory, invalid; the message names the scorer and says what happened.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
