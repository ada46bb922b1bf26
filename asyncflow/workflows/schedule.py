"""The schedule contract: when things may happen. A mode is a schedule; no loop asks which mode it runs in."""

from __future__ import annotations

from typing import Protocol

from asyncflow.types import Interval


class Progress(Protocol):
    """What a schedule may look at when it decides."""

    @property
    def committed(self) -> int:
        """Steps committed so far, which is the newest policy version."""
        ...

    def is_generated(self, step: int) -> bool:
        """Every row of the step has its response, or will never have one."""
        ...

    def unfinished(self, version: int) -> int:
        """Rows admitted, without a response yet, that no version after `version` may generate."""
        ...


class Schedule(Protocol):
    """One mode."""

    max_staleness: int

    def interval(self, step: int) -> Interval:
        """The policy versions that may generate a group of this step."""
        ...

    def may_admit(self, step: int, progress: Progress) -> bool:
        """Whether the step's prompts may enter the queue."""
        ...

    def may_train(self, step: int, progress: Progress) -> bool:
        """Whether training on the step may start."""
        ...

    def may_install(self, version: int, progress: Progress) -> bool:
        """Whether a rollout worker may install this (published) version."""
        ...
