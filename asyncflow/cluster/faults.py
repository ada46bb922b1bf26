"""What goes wrong in a simulated run, and when."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, in virtual seconds from the start. `slow`: by worker, how many times as long everything takes."""

    slow: Mapping[str, float] = field(default_factory=dict)
    deaths: tuple[tuple[float, str], ...] = ()
    stalls: tuple[tuple[float, str, float], ...] = ()
    """(when, who, for how long); for ever: until the run is stopped."""
    late_rewards: float = 0.0
    """Share of rewards that take fifty times as long."""
    broken_fetches: Mapping[str, float] = field(default_factory=dict)
    """By worker, the share of fetches whose weights do not arrive whole."""

    @classmethod
    def drawn(cls, seed: int, workers: Sequence[str], begin_seconds: float, end_seconds: float) -> Faults:
        """A plan by seed: one worker in four is slow, and every other run has deaths, stalls, late rewards, broken fetches.

        The first worker is never slow, never dies and always has its weights, so that somebody is left.
        """
        rng, mortals = random.Random(f"{seed}/faults"), workers[1:]

        def times(most: int) -> list[float]:
            return sorted(rng.uniform(begin_seconds, end_seconds) for _ in range(rng.choice((0, rng.randint(1, most)))))

        is_endless = mortals and rng.random() < 0.2
        endless = ((rng.uniform(begin_seconds, end_seconds), rng.choice(mortals), math.inf),) if is_endless else ()
        return cls(
            slow={worker: rng.uniform(1.5, 8.0) for worker in mortals if rng.random() < 0.25},
            deaths=tuple((time, rng.choice(mortals)) for time in times(4) if mortals),
            stalls=tuple((time, rng.choice(workers), rng.uniform(0, end_seconds / 2)) for time in times(3)) + endless,
            late_rewards=rng.choice((0.0, 0.02)),
            broken_fetches=dict.fromkeys(mortals, 0.1) if rng.random() < 0.5 else {},
        )
