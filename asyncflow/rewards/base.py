"""The reward contract: a scorer turns one finished sample into a number, in a process of its own that can be killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec


class Sample(msgspec.Struct, frozen=True):
    """Response with its prompt, as a scorer sees it. `example` is the data set's row (JSON values); `is_finished`: the end token
    was reached; `token_ids`: of the response, the end token included; `prompt_ids`: of the prompt. Of an episode the response is
    all that came after the prompt, with observations, and `turn_rewards` has the environment's rewards, None where a turn has none.
    """

    prompt: str
    response: str
    example: Mapping[str, Any]
    is_finished: bool
    token_ids: Sequence[int] = ()
    prompt_ids: Sequence[int] = ()
    turn_rewards: Sequence[float | None] = ()


class Scorer(Protocol):
    """Built once per reward process with the options of the config, called once per sample. Must not import torch.

    One with `is_stateless = True` promises that it keeps nothing of a sample and runs nothing that a sample says. It is called in
    the process that it was built in; any other one in a copy of that process (a fork) that ends with the sample. So what building
    it does must be done when it returns: threads do not come along.
    """

    def __call__(self, sample: Sample) -> float | None:
        """The reward; None: it has nothing to say about this sample. Any exception fails the sample (counted, never a 0)."""


class RewardPart(msgspec.Struct, frozen=True):
    """Part of a reward: its name in the metrics, the path of its scorer, the options that the scorer is built with, and its
    weight."""

    name: str
    scorer: str
    """`package.module:Name` or `/path/file.py:Name`, a class built with the options or a function bound to them."""
    options: Mapping[str, Any] = {}
    weight: float = 1.0


class Score(NamedTuple):
    """A sample's reward: the weighted sum of what its parts gave, and these, in order. None: a part that had nothing to say.
    `metrics`: the scorers' own, counts and sums by name.

    Where no part gave anything, and there is a reward all the same, it is the one that was configured for failures.
    """

    reward: float
    parts: tuple[float | None, ...]
    metrics: Mapping[str, tuple[int, float]] = {}


class RewardFailure(Exception):
    """A sample that could not be scored: the scorer raised, hung, exited, ate memory, printed too much or returned no number.

    `kind` is one of raised, timeout, exited, memory, output, invalid; or `skipped`, which is no mistake: every part said None. The
    message names the scorer and says what happened; `trace`: the traceback of what the scorer raised, from its own file on.
    """

    def __init__(self, kind: str, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.kind, self.trace = kind, trace


def weighted(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The sum of what was given, each times its weight. None: nothing was."""
    given = [weight * value for value, weight in zip(values, weights, strict=True) if value is not None]
    return sum(given[1:], given[0]) if given else None
