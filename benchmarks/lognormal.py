"""The embedded rollout engine with responses of lognormal length, the same lengths simulated, and the random model that it runs.

A random model does not know when to end, so the engine ends each response after a number of tokens that is drawn from the
response's own noise key: whatever schedule, worker or attempt makes it, it is as long.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from asyncflow.data import arithmetic
from asyncflow.engines.base import SampleKey
from asyncflow.engines.costs import Lengths
from asyncflow.engines.rollout.engine import SlotEngine
from asyncflow.engines.rollout.filling import Claim
from asyncflow.engines.rollout.sampling import stream_keys
from asyncflow.engines.train.random_model import make_random_model
from asyncflow.types import Array


class LognormalSlots(SlotEngine):
    """`SlotEngine`; `median` and `sigma` (of the logarithm) are those of the lengths, which `max_new_tokens` still bounds."""

    def __init__(self, model_path: Path, *, median: float, sigma: float, **options: Any) -> None:
        """See `SlotEngine`."""
        super().__init__(model_path, stop_ids=(), **options)
        rows, begin = self._slots._rows, self._slots._rows.begin

        def begin_for_a_while(claim: Claim, version: int) -> None:
            taken = slice(rows.num, rows.num + len(claim.slots))
            begin(claim, version)
            rows.limits[taken] = np.minimum(rows.limits[taken], lengths(rows.keys[taken], median, sigma))

        rows.begin = begin_for_a_while  # type: ignore[method-assign]


def lengths(keys: Array, median: float, sigma: float) -> Array:
    """Tokens (int64), by noise key (uint64)."""
    normal = NormalDist(math.log(median), sigma)
    return np.array([math.ceil(math.exp(normal.inv_cdf(((int(key) >> 12) + 0.5) / 2**52))) for key in keys], np.int64)


class DrawnLengths(Lengths, frozen=True):
    """Lengths of a simulated run that are those of `LognormalSlots`, response by response."""

    def draw(self, key: SampleKey, sample: int, most: int, position: int = 0) -> tuple[int, int]:
        """See `Lengths.draw`."""
        keys = stream_keys(key.seed, key.prompt_index, np.array([sample]))
        tokens = int(lengths(keys, self.response_median, self.response_sigma)[0])
        return min(tokens, most), super().draw(key, sample, most, position)[1]


def make_model(folder: Path, spec: str = "random:qwen2-tiny") -> Path:
    """A random model for arithmetic problems."""
    problems = arithmetic.problems(0, "train")
    make_random_model(spec, folder, [next(problems).question for _ in range(2000)], seed=0)
    return folder
