"""Requests of an engine that generates in a thread of its own, and slots that wait for their next ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import Tensor

from asyncflow.engines.base import NO_TOKENS, Response, Sampling
from asyncflow.types import Array


@dataclass(eq=False)
class SlotRequest:
    """Samples of one prompt. `after`: tokens that stand between the prompt and what is generated (int64). `deliver` takes each
    response, or the error that ends the request. `adapter`: the decoder's number of the adapter that it is made by."""

    prompt_ids: Array
    sampling: Sampling
    pending: deque[tuple[int, np.uint64]]  # sample number, noise key: not in a slot yet
    after: Array = field(default_factory=lambda: NO_TOKENS)
    deliver: Callable[[Response | Exception], None] = field(init=False)
    adapter: int = 0
    first_logits_V: Tensor | None = None  # after the prompt, under the weights of its last prefill

    @cached_property
    def prompt_key(self) -> bytes:
        """The prompt, for a dictionary."""
        return self.prompt_ids.tobytes()

    def has_keys_of(self, other: SlotRequest) -> bool:
        """Whether the keys of both prompts are the same: they come from one group, and are computed with one adapter."""
        return self.prompt_ids is other.prompt_ids and self.adapter == other.adapter


@dataclass(slots=True, eq=False)
class ParkedSlot:
    """Slot of an episode between two turns. `tokens` (int64): its turns and observations so far; the last one has no keys yet."""

    slot: int
    prompt_ids: Array
    tokens: Array
    is_current: bool  # the prompt's keys are those of the installed weights
    adapter: int

    def is_before(self, request: SlotRequest) -> bool:
        """Whether the request goes on from here."""
        count, same = len(self.tokens), self.adapter == request.adapter
        same = same and (self.prompt_ids is request.prompt_ids or np.array_equal(self.prompt_ids, request.prompt_ids))
        return same and count <= len(request.after) and np.array_equal(self.tokens, request.after[:count])
