"""Parts of a server of the Tinker API that its sessions and models share: the base model, the maker of engines, and stores.

sessions_of (serving.py) --makes--> ServerContext --given to--> Sessions, and each TrainedModel
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asyncflow.engines.base import TrainEngine
from asyncflow.service.tinker.checkpoint_store import CheckpointStore
from asyncflow.service.tinker.messages import LoraConfig
from asyncflow.service.tinker.results import Results
from asyncflow.service.tinker.training_passes import TrainingPasses


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """Model that clients start from: the name by which they ask for it, its folder in Hugging Face format, and its limits."""

    name: str
    folder: Path
    vocab_size: int
    max_context: int


MakeEngine = Callable[[Path | None, LoraConfig | None], TrainEngine]
"""Makes a train engine of what such an engine has saved to a folder, or else (None) of the base model with a new adapter, or
(None) of all weights; takes seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of a server. `adapters`: that a rollout engine has beside one another. `session_seconds`: a session from which nothing
    has come for so long ends."""

    models: int = 4
    adapters: int = 8
    rank: int = 256
    """Largest rank of an adapter."""
    sessions: int = 256
    samplers: int = 100_000
    """Most samplers of one session."""
    queue: int = 2_000
    """Requests that wait for an engine: of one model, and for samples."""
    queue_bytes: int = 512 << 20
    """Bytes of the requests of one model that wait."""
    micro_batch_tokens: int = 4096
    """Tokens that a model computes at once, at most, unless one example has more."""
    session_seconds: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """Shared parts of one server over one base model. `results`: of the requests of all of its sessions; `passes`: of the training
    of all of its models."""

    base: BaseModel
    make_engine: MakeEngine
    store: CheckpointStore
    results: Results
    passes: TrainingPasses
    bounds: Bounds
