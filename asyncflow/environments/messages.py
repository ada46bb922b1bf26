"""Messages between a pool of environments and its processes (`sandbox/frames.py` says how they travel)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncflow.environments.base import Opening, TurnResult
from asyncflow.sandbox.frames import Broken, Failed
from asyncflow.sandbox.limits import ProcessLimits


class EnvironmentSetup(msgspec.Struct, frozen=True, tag=True):
    """Environment to build, `package.module:Name` or `/path/file.py:Name` with its options, and its limits."""

    path: str
    options: Mapping[str, Any]
    limits: ProcessLimits


class EnvironmentReady(msgspec.Struct, frozen=True, tag=True):
    """The environment can be built: what it says of itself, see `Environment`."""

    episodes_per_process: int = 1
    is_deterministic: bool = True
    is_captured: bool = False
    tools: list[dict[str, Any]] = []


class ResetEpisode(msgspec.Struct, frozen=True, tag=True):
    """Begin an episode, which later questions name by its number."""

    episode: int
    example: Mapping[str, Any]
    seed: int


class StepEpisode(msgspec.Struct, frozen=True, tag=True):
    """A turn of the policy: the fields of `Action`."""

    episode: int
    text: str
    is_finished: bool
    token_ids: Sequence[int]


class CloseEpisode(msgspec.Struct, frozen=True, tag=True):
    """End an episode."""

    episode: int


class EpisodeOpened(msgspec.Struct, frozen=True, tag=True):
    """Result of `reset`; None: nothing."""

    opening: Opening | None


class EpisodeStepped(msgspec.Struct, frozen=True, tag=True):
    """Result of `step`."""

    result: TurnResult


class EpisodeClosed(msgspec.Struct, frozen=True, tag=True):
    """The episode has ended; nothing of it stays."""


Question = ResetEpisode | StepEpisode | CloseEpisode
EnvironmentReply = EnvironmentReady | Broken | EpisodeOpened | EpisodeStepped | EpisodeClosed | Failed
