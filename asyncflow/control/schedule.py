"""The schedule contract: when things may happen. A mode is a schedule; no loop asks which mode it runs in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from asyncflow.types import Interval


class Progress(Protocol):
    """State of the samples that a schedule may look at when it decides."""

    @property
    def committed(self) -> int:
        """Steps committed so far, which is the newest policy version."""
        ...

    def is_done(self, task: str, step: int) -> bool:
        """Every row of the step has what this task gives it (`rollout`: a response), or will never have it."""
        ...

    def task_before(self, task: str) -> str:
        """The task whose outputs this one takes."""
        ...

    def unfinished(self, version: int) -> int:
        """Rows admitted, without a response yet, that no version after `version` may generate."""
        ...

    def unleased(self, version: int) -> int:
        """Rows among the `unfinished` ones that no worker holds."""
        ...

    def oldest_unleased(self, at_least: int) -> int | None:
        """Lowest version, `at_least` or more, that is the last one which may generate some unleased row."""
        ...

    def ready(self, task: str) -> int:
        """Rows that lie ready for a task."""
        ...


class Fleet(Protocol):
    """State of the rollout workers that a schedule may look at when it decides."""

    @property
    def generating(self) -> Mapping[str, int]:
        """The version that each living worker serves, but for those that are stale, which take no prompts."""
        ...

    @property
    def installing(self) -> Mapping[str, int]:
        """The version that a worker has been granted, or is to begin with, and does not serve yet."""
        ...

    @property
    def step_seconds(self) -> float | None:
        """Seconds that the last step took, from publication to publication; None before there was one."""
        ...

    @property
    def install_seconds(self) -> float | None:
        """Seconds that a worker did not generate for its last installation, emptying its slots included; None before there was
        one."""
        ...

    @property
    def called_for(self) -> int:
        """Newest version that the user has asked for: all workers change to it at once, as soon as the interval lets them. -1:
        none."""
        ...


class Schedule(Protocol):
    """Contract of a mode: every method answers a question, and changes nothing that a caller can see."""

    max_staleness: int
    """Versions that a trained token may be older than the policy that it trains."""

    membership: Literal["strict", "first_come"]
    """`strict`: a step trains its own prompts. `first_come`: those that are complete first, as long as none gets too old."""

    installs_in_flight: bool
    """Whether a worker may change its weights in the middle of a response."""

    is_streamed: bool
    """Whether a task may begin with the first complete group of a step, and not only when the task before it has done them all."""

    def interval(self, step: int) -> Interval:
        """The policy versions that may generate a group of this step."""
        ...

    def may_admit(self, step: int, progress: Progress) -> bool:
        """Whether the step's prompts may enter the queue."""
        ...

    def num_newest(self, num_groups: int, group_size: int, progress: Progress) -> int:
        """Number of groups (the last ones) of a step admitted now that its own version alone may generate."""
        ...

    def may_start(self, task: str, step: int, progress: Progress) -> bool:
        """Whether a task behind rollout (`train`, or one before it) may begin on the step."""
        ...

    def may_install(self, version: int, progress: Progress, fleet: Fleet) -> bool:
        """Whether one more rollout worker may install this (published) version."""
        ...
