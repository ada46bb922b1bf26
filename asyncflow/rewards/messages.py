"""Messages between a reward pool and its workers (`sandbox/frames.py` says how they travel)."""

from __future__ import annotations

import msgspec

from asyncflow.rewards.base import RewardPart
from asyncflow.sandbox.frames import Broken, Failed
from asyncflow.sandbox.limits import ProcessLimits


class Setup(msgspec.Struct, frozen=True, tag=True):
    """Scorers to build, and their limits. `prompt_column`, `prompt_template`: what makes a row's prompt, where `data` says it."""

    parts: list[RewardPart]
    limits: ProcessLimits
    prompt_column: str | None = None
    prompt_template: str | None = None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The scorers are built. `has_deadline`: the worker itself ends a sample in time, and lives on."""

    has_deadline: bool


class Scored(msgspec.Struct, frozen=True, tag=True):
    """Rewards of the parts, in order, and their weighted sum, which is finite. None: the scorer has nothing to say. `metrics`: the
    scorers' own (`own_metrics.py`)."""

    reward: float | None
    parts: list[float | None]
    metrics: dict[str, tuple[int, float]] = {}


RewardReply = Ready | Broken | Scored | Failed
