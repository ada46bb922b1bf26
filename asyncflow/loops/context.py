"""Context of a worker's loops: the services of the run that they call, and what all of them know."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncflow.control.ledger import LedgerService
from asyncflow.control.policy_versions import PolicyVersions
from asyncflow.control.schedule import Schedule
from asyncflow.loops.samples import Shape
from asyncflow.rewards.base import Sample, Score
from asyncflow.telemetry.spans import Recorder
from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.types import Array


@dataclass(frozen=True, slots=True)
class LoopContext:
    """Services and facts of a run, as one worker has them."""

    queue: TransferQueueClient
    ledger: LedgerService
    versions: PolicyVersions
    """The versions that the worker's own pool serves."""
    schedule: Schedule
    shape: Shape
    spans: Recorder
    """The worker's lane."""
    published_dtype: str | None = None
    """Dtype that versions travel in, rounded; None: the trainer's own."""


@dataclass(frozen=True, slots=True)
class ResponseScoring:
    """Scoring of responses: token ids become text, a sample becomes a reward, and scored samples may be kept to be looked at."""

    score: Callable[[Sample], Awaitable[Score]] | None
    """Scorer of a sample. None: another task scores."""
    decode: Callable[[Array], str]
    keep_sample: Callable[[Mapping[str, Any]], None]
